"""Whole engines of several ranks give one rank's greedy ids: prompts in chunks, prefixes found in
the cache, preemption. The ranks are threads (``ranks``); ``tests.processes`` has the real ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine import start
from octavo.grammar.grammars import Grammars
from octavo.ops.native import library
from octavo.types import Progress
from tests.model import expert_families
from tests.model.quantized_checkpoints import KINDS, in_format
from tests.model.running import random_ids, write_checkpoint, write_gguf
from tests.model.test_families import FAMILIES
from tests.parallel.ranks import ThreadGroup

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = {**FAMILIES, **expert_families.FAMILIES}
FORMATS = ("dense", "gptq act-order", "awq", "fp8 by block", "nf4")
SHAPES = [(2, 1), (1, 2), (2, 2)]
SIZES = {"hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 96}
COUNT = 16


def threads(config: EngineConfig, path: Path, progress: Progress, grammars: Grammars, _: Any):
    group = ThreadGroup(config, path, grammars)
    return group, group.start(progress)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    found: dict[tuple[str, str], Path] = {}

    def make(family: str, kind: str) -> Path:
        key = family, kind
        if key not in found:
            path = tmp_path_factory.mktemp("model")
            name, changes = ALL[family]
            if kind == "gguf":
                write_checkpoint(
                    path, name, **SIZES, head_dim=32, num_attention_heads=3, num_key_value_heads=3
                )
                path = write_gguf(path / "model.gguf", path, "Q4_0")
            elif kind == "dense":
                write_checkpoint(path, name, **changes)
            else:
                write_checkpoint(path / "source", name, **{**changes, **SIZES})
                path, _ = in_format(path / "source", KINDS[kind], path)
            found[key] = path
        return found[key]

    return make


def greedy(path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, pp: int) -> list[list[int]]:
    """Of prompts that share beginnings, twice: the second time from a warm cache."""
    if tp * pp > 1:
        monkeypatch.setattr(start, "start_executor", threads)
    stem = random_ids(40)
    prompts = [stem[: 5 + 7 * i] + random_ids(9 * i + 1)[::-1] for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "cpu_threads": 1,
        "block_size": 16,
        "max_model_len": 128,
        "num_gpu_blocks_override": 12,
        "max_num_batched_tokens": 33,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
    }
    found = []
    with closing(LLM(str(path), **settings)) as llm:
        for _ in range(2):
            answers = llm.generate(prompts, params, use_tqdm=False)
            found += [list(answer.outputs[0].token_ids) for answer in answers]
        assert llm.stats.num_preemptions > 0 and llm.stats.prefix_hits > 0
    return found


@pytest.mark.parametrize(
    ("family", "kind", "tp", "pp"),
    [
        *(
            (family, "dense", *shape)
            for family in ("llama", "qwen3-moe", "gemma2")
            for shape in SHAPES
        ),
        *(("llama", kind, *shape) for kind in (*FORMATS[1:], "gguf") for shape in SHAPES),
        ("qwen3-moe", "gptq act-order", 2, 2),
        ("gemma2", "fp8 by block", 2, 2),
        *(("gpt2", "dense", *shape) for shape in SHAPES),
    ],
)
def test_greedy_ids_are_those_of_one_rank(
    family: str, kind: str, tp: int, pp: int, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "dense" and not library.features():
        pytest.skip("no kernels here")
    path = models(family, kind)
    assert greedy(path, monkeypatch, tp, pp) == alone(path)


ALONE: dict[Path, list[list[int]]] = {}


def alone(path: Path) -> list[list[int]]:
    if path not in ALONE:
        with pytest.MonkeyPatch.context() as plain:
            plain.undo()
            plain.setattr(start, "start_executor", REAL)
            ALONE[path] = greedy(path, plain, 1, 1)
    return ALONE[path]


REAL = start.start_executor
