"""The guide's commands as they are written, ``vllm`` read as ``octavo``.

Hub ids are those of the guide; a fake hub on this machine serves tiny random checkpoints under
them.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures import server
from tests.fixtures.fake_hub import fake_hub
from tests.model.quantized_checkpoints import KINDS, in_format

LLAMA = "meta-llama/Llama-3-70B"
AWQ = "TheBloke/Llama-2-13B-AWQ"
SMALL = "meta-llama/Llama-3-1B"

SERVE_COMMANDS = [
    f"vllm serve {LLAMA}",
    f"vllm serve {LLAMA} --enable-prefix-caching",
    f"vllm serve {LLAMA} --enable-chunked-prefill",
    f"vllm serve {LLAMA} --max-model-len 512",
    f"vllm serve {LLAMA} --gpu-memory-utilization 0.8 --max-model-len 256 --max-num-seqs 4",
    f"vllm serve {AWQ} --quantization awq",
    f"vllm serve {LLAMA} --quantization fp8",
    f"vllm serve {LLAMA} --quantization fp8 \\\n--quantization-fp8-dynamic",
    f'vllm serve {LLAMA} --speculative-model "[ngram]" \\\n--num-speculative-tokens 5',
    f"vllm serve {LLAMA} \\\n--speculative-model {SMALL} \\\n--num-speculative-tokens 5",
]
PARALLEL_COMMANDS = [  # a process for each device: as many CPUs, in the tests
    f"vllm serve {LLAMA} --tensor-parallel-size 4",
    f"vllm serve {LLAMA} --tensor-parallel-size 2 --pipeline-parallel-size 2",
    f"vllm serve {LLAMA} --tensor-parallel-size 4 --pipeline-parallel-size 2",
]
METRICS = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:gpu_cache_usage_perc",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
]


def tokens(command: str) -> list[str]:
    """What follows ``vllm serve`` in a shell."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["vllm", "serve"]
    return words[2:]


@pytest.fixture(scope="module")
def hub_environment(
    model_r: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    quantized, _ = in_format(model_r, KINDS["awq"], tmp_path_factory.mktemp("awq"))
    with fake_hub({LLAMA: model_r, AWQ: quantized, SMALL: model_r}) as hub:
        yield hub.environment(tmp_path_factory.mktemp("hf"))


FULL = [pytest.param(command, marks=pytest.mark.net) for command in PARALLEL_COMMANDS[::2]]


@pytest.mark.parametrize("command", [*SERVE_COMMANDS, PARALLEL_COMMANDS[1], *FULL])
def test_a_serve_command_answers(command: str, hub_environment: dict[str, str]) -> None:
    model, *flags = tokens(command)
    with server.start(model, *flags, env=hub_environment) as running:
        assert running.client.get("/v1/models").json()["data"][0]["id"] == model
        answer = running.complete("Hello", max_tokens=4, ignore_eos=True)
        assert len(answer["choices"][0]["token_ids"]) == 4


def test_curl_health_and_the_six_metrics(hub_environment: dict[str, str]) -> None:
    with server.start(LLAMA, env=hub_environment) as running:
        base = f"http://localhost:{running.port}"
        if shutil.which("curl"):
            health = subprocess.run(["curl", "-fsS", f"{base}/health"], capture_output=True)
            assert health.returncode == 0
        running.complete("Hello", max_tokens=4, ignore_eos=True)
        metrics = running.metrics()
        assert [name for name in METRICS if name not in metrics] == []
        assert metrics["vllm:e2e_request_latency_seconds_count"] == 1


def test_every_command_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide-commands.md").read_text()
    for command in SERVE_COMMANDS + PARALLEL_COMMANDS:
        for word in tokens(command):
            if word.startswith("--"):
                assert word in page, word


def test_the_command_is_installed_as_octavo() -> None:
    script = Path(sys.executable).parent / "octavo"
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
