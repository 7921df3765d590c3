"""A Ray cluster of two nodes on this machine: replicas as actors, and a batch pipeline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import server
from tests.net.hosts import ROOT, until

pytestmark = [pytest.mark.net, pytest.mark.timeout(400)]

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'octavo[ray]'")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without room for a replica, and two nodes with room for one each; ``members``: these
    two."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.members = [cluster.add_node(num_cpus=1) for _ in range(2)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def replicas(running: server.Server) -> list[dict[str, Any]]:
    return running.client.get("/server_info").json()["replicas"]


def num_serving(running: server.Server) -> int:
    return sum(replica["problem"] is None for replica in replicas(running))


def ray_nodes_of(log: str) -> list[str]:
    return re.findall(r"runs on node (\w+)", log)


def test_replicas_on_two_nodes_one_of_which_leaves_and_another_comes(
    cluster: Any, model_r: Path
) -> None:
    port = str(server.free_port())
    flags = ("-dp", "2", "-dpb", "ray", "-dpp", port, "--cpu-threads", "1")
    more = ("--kv-cache-memory-bytes", "64MiB", "--served-model-name", "r", "--step-deadline", "5")
    with server.start(model_r, *flags, *more) as running:
        until(lambda: num_serving(running) == 2, 120, lambda: running.log)
        until(lambda: len(set(ray_nodes_of(running.log))) == 2, 60, lambda: running.log)
        first = running.complete([5, 6, 7], model="r", max_tokens=8)
        before = {replica["pid"] for replica in replicas(running)}

        cluster.remove_node(cluster.members[1])
        until(lambda: num_serving(running) == 1, 60, lambda: running.log)
        (left,) = (replica["pid"] for replica in replicas(running) if replica["problem"] is None)
        (lost,) = before - {left}
        until(lambda: not Path(f"/proc/{lost}").exists(), 30)
        assert running.client.get("/health").status_code == 200
        for _ in range(4):
            answer = running.complete([5, 6, 7], model="r", max_tokens=8)
            assert answer["choices"] == first["choices"]

        cluster.add_node(num_cpus=1)
        until(lambda: num_serving(running) == 2, 120, lambda: running.log)
        pids = {replica["pid"] for replica in replicas(running)}
        assert len(pids) == 2
        answers = [running.complete([5, 6, 7], model="r", max_tokens=8) for _ in range(4)]
        assert all(answer["choices"] == first["choices"] for answer in answers)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30)


def test_without_a_cluster_the_server_says_how_to_start_one(
    model_r: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refused = subprocess.run(
        [
            *(sys.executable, "-m", "octavo.cli.main", "serve", str(model_r), "--port", "0"),
            *("-dp", "2", "-dpb", "ray", "-dpp", str(server.free_port())),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "ray start --head" in refused.stderr.splitlines()[-1]


def test_batches_are_answered_by_two_actors_and_a_bad_row_ends_nothing(
    cluster: Any, model_r: Path
) -> None:
    import octavo
    from octavo.ray import batch_generate

    params = octavo.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    ray.init(address=cluster.address, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    rows: list[dict[str, Any]] = [
        {"id": i, "prompt": f"row {i}", "messages": None} for i in range(20)
    ]
    rows[3]["prompt"] = "much too long " * 1000
    rows[4] |= {"prompt": None}
    rows[5] |= {"prompt": None, "messages": [{"role": "user", "content": "Hello", "name": None}]}
    settings = {"cpu_threads": 1, "kv_cache_memory_bytes": 32 << 20, "dtype": "float32"}
    answered = batch_generate(
        ray.data.from_items(rows, override_num_blocks=4), model=str(model_r),
        sampling_params=params, concurrency=2, batch_size=5, **settings,
    ).take_all()  # fmt: skip

    assert [row["id"] for row in answered] == list(range(20))
    assert "2,048" in answered[3]["error"] or "2048" in answered[3]["error"]
    assert "the row has no 'prompt'" in answered[4]["error"]
    llm = octavo.LLM(str(model_r), **settings)
    for row in answered:
        if row["id"] in (3, 4):
            assert row["generated_text"] == "" and row["num_generated_tokens"] == 0
            continue
        if row["id"] == 5:
            (expected,) = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
        else:
            (expected,) = llm.generate(row["prompt"], params, use_tqdm=False)
        assert row["error"] is None and row["finish_reason"] == "length"
        assert row["generated_text"] == expected.outputs[0].text
        assert row["num_prompt_tokens"] == len(expected.prompt_token_ids)
        assert row["num_generated_tokens"] == 6
    llm.close()


def test_octavo_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.ray import batch_generate
    from octavo.types import ConfigError

    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[ray\]'"):
        batch_generate(None, model="smollm2-135m")
