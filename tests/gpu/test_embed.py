"""Vectors of prompts on a GPU against the oracle's hidden states, in chunks and beside answers."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

pytest.importorskip("triton")

from octavo import LLM, SamplingParams
from tests.fixtures import models
from tests.fixtures.oracle import oracle
from tests.gpu.test_engine import PROMPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ERROR = {"bfloat16": 0.03, "float16": 0.004}  # of the vector's length


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("tokens", [None, 24])
def test_vectors_equal_the_oracles(dtype: str, tokens: int | None) -> None:
    """``tokens`` a step: long prompts take several."""
    model = models.path("L64")
    flags = {"max_model_len": 224, "max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20}
    if tokens is not None:
        flags["max_num_batched_tokens"] = tokens
    reference = oracle(model)
    with closing(LLM(str(model), dtype=dtype, **flags)) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8)
        before = llm.generate(PROMPTS[:4], greedy, use_tqdm=False)
        for pooling in ("mean", "last", "mean"):
            outputs = llm.embed(PROMPTS, pooling, normalize=False, use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs):
                hidden = reference.hidden(prompt)
                expected = hidden[-1] if pooling == "last" else hidden.mean(0)
                found = torch.tensor(output.outputs.embedding)
                assert (found - expected).norm() < ERROR[dtype] * expected.norm()
        after = llm.generate(PROMPTS[:4], greedy, use_tqdm=False)
        assert [a.outputs[0].token_ids for a in after] == [b.outputs[0].token_ids for b in before]
