"""EleutherAI's lm-evaluation-harness scores a task through the server as transformers does without
it: same token ids, same log-probabilities, same accuracies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import in_servers_environment
from tests.fixtures.server import ROOT, Server

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make conformance")
pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
TASK = "octavo_multiple_choice"


@pytest.fixture(scope="module")
def direct(places: dict[str, str]) -> dict[str, Any]:
    return in_servers_environment("tests.conformance.direct", places["G-bf16"])


def evaluate(server: Server, **settings: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    arguments = {"model": "twin", "base_url": f"{server.url}/v1/completions", **settings}
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"tokenizer_backend": "remote", "max_retries": 1, **arguments},
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(HERE), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The task's file is read from the repository; nothing is asked of a hub."""
    import datasets

    monkeypatch.chdir(ROOT)
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


@pytest.mark.parametrize("settings", [{"batch_size": 8}, {"num_concurrent": 4}], ids=str)
def test_scores_are_those_of_transformers(
    twin: Server, direct: dict[str, Any], settings: dict[str, Any]
):
    """Batches of prompts as token ids, or several requests at once."""
    results = evaluate(twin, **settings)
    found = results["results"][TASK]
    assert (found["acc,none"], found["acc_norm,none"]) == (direct["acc"], direct["acc_norm"])
    assert direct["acc"] > 0.4  # the model knows something
    samples = sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(direct["documents"]) == 30
    for sample, document in zip(samples, direct["documents"]):
        assert len(sample["filtered_resps"]) == len(document["choices"])
        for (logprob, greedy), choice in zip(sample["filtered_resps"], document["choices"]):
            assert abs(float(logprob) - choice["logprob"]) < 2e-3
            assert bool(greedy) == choice["greedy"]


def test_token_ids_and_both_ways_of_asking_agree(twin: Server, direct: dict[str, Any]):
    """The text's ids, and prompt log-probabilities with max_tokens 0 and 1."""
    questions = (HERE / "questions.jsonl").read_text().splitlines()
    prompts = []
    for line, document in zip(questions, direct["documents"]):
        question = json.loads(line)
        text = f"Question: {question['question']}\nAnswer: {question['choices'][0]}"
        body = {"prompt": text, "add_special_tokens": False}
        prompts.append([*document["context"], *document["choices"][0]["ids"]])
        assert twin.client.post("/tokenize", json=body).json()["tokens"] == prompts[-1]
    fields = {"prompt": prompts[:6], "echo": True, "logprobs": 1, "temperature": 0}
    answers = []
    for count in (0, 1):
        answer = twin.client.post("/v1/completions", json={**fields, "max_tokens": count})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["choices"])
    for without, with_one, prompt, document in zip(*answers, prompts, direct["documents"]):
        values = without["logprobs"]["token_logprobs"]
        assert values == with_one["logprobs"]["token_logprobs"][:-1] and len(values) == len(prompt)
        own = sum(values[len(document["context"]) :])
        assert abs(own - document["choices"][0]["logprob"]) < 2e-3
