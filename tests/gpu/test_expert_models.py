"""Tiny models with experts and with latent attention on a GPU: answers are the FP32 CPU model's, up
to what rounding may change.

Rounding may send a token to another expert, which moves its logits by far more than rounding does.
So this test judges the many: half of all log-probabilities must be nearly right, and few of the
drawn tokens may be far from what the CPU's model would have drawn. A wrong kernel moves them all.
``-s`` shows the counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from octavo.worker import device
from tests.model.expert_families import FAMILIES
from tests.model.running import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MODELS = ("mixtral", "qwen2-moe", "deepseek-v2-groups", "deepseek-v3-yarn", "gpt-oss")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"enforce_eager": True},
    "blocks of 16": {"block_size": 16},
    "7 tokens a step": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "no overlap": {"async_scheduling": False},
}
# Of the errors of log-probabilities; on a CPU 0.056 and 0.006 at most.
MEDIAN = {"bfloat16": 0.12, "float16": 0.015}
# So far behind the likeliest token so large a share may be; on a CPU 2.3 % and 0.3 %.
FAR, MOST_FAR = 1.0, {"bfloat16": 0.05, "float16": 0.01}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
JUDGE = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    """40, a third of which begin alike."""
    rng = random.Random(20261130)
    stem = [rng.randrange(3, 320) for _ in range(75)]
    alone = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 130))] for _ in range(27)]
    return alone + [stem + [rng.randrange(3, 320) for _ in range(n)] for n in range(1, 40, 3)]


PROMPTS = make_prompts()


@contextmanager
def engine(model: Path, dtype: str, cuda: bool = True, **settings: Any) -> Iterator[LLM]:
    flags = {"max_model_len": 224, "max_num_seqs": 48, "kv_cache_memory_bytes": 32 << 20}
    with pytest.MonkeyPatch.context() as patch:
        if not cuda:
            patch.setattr(device, "visible_gpus", list)
        flags |= {"skip_tokenizer_init": True, **settings}
        with closing(LLM(str(model), dtype=dtype, **flags)) as llm:
            yield llm


def logprobs(answer: RequestOutput, ids: list[int]) -> list[float]:
    rows = answer.prompt_logprobs or []
    return [row[token].logprob for row, token in zip(rows[1:], ids[1:]) if row is not None]


def leads(answer: RequestOutput, ids: list[int], first: int) -> list[float]:
    """How far each token from ``first`` on is behind the likeliest one."""
    rows = (answer.prompt_logprobs or [])[first:]
    return [
        max(entry.logprob for entry in row.values()) - row[token].logprob
        for row, token in zip(rows, ids[first:])
        if row is not None
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: Any) -> dict[str, Path]:
    found = {}
    for model in MODELS:
        name, changes = FAMILIES[model]
        found[model] = tmp_path_factory.mktemp("checkpoint")
        write_checkpoint(found[model], name, **changes)
    return found


def check(path: Path, dtype: str, cuda: bool, **settings: Any) -> str:
    with engine(path, dtype, cuda, **settings) as llm:
        drawn = [a.outputs[0].token_ids for a in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        again = [a.outputs[0].token_ids for a in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        hits = llm.stats.prefix_hits
        reported = llm.generate(PROMPTS, JUDGE, use_tqdm=False)
        llm.engine.scheduler.check()
    wholes = [prompt + tokens for prompt, tokens in zip(PROMPTS * 2, drawn + again)]
    with engine(path, "float32", cuda=False) as llm:
        judged = llm.generate(wholes, JUDGE, use_tqdm=False)
    errors = [
        abs(one - other)
        for prompt, mine, exact in zip(PROMPTS, reported, judged)
        for one, other in zip(logprobs(mine, prompt), logprobs(exact, prompt))
    ]
    behind = [
        lead
        for prompt, whole, answer in zip(PROMPTS * 2, wholes, judged)
        for lead in leads(answer, whole, len(prompt))
    ]
    far = sum(lead > FAR for lead in behind) / len(behind)
    shown = f"median error {median(errors):.4f} of {len(errors)}, {far:.2%} of {len(behind)} far"
    assert len(behind) == 2 * len(PROMPTS) * GREEDY.max_tokens and hits > 0
    assert median(errors) < MEDIAN[dtype], shown
    assert far < MOST_FAR[dtype], shown
    return shown


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_the_cpus(model: str, way: str, checkpoints: dict[str, Path]) -> None:
    print(f"\n{model}, {way}: {check(checkpoints[model], 'bfloat16', True, **WAYS[way])}")


@pytest.mark.parametrize("model", ("mixtral", "deepseek-v3-yarn"))
def test_half_precision(model: str, checkpoints: dict[str, Path]) -> None:
    print(f"\n{model}, FP16: {check(checkpoints[model], 'float16', True)}")
