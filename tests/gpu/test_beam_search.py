"""Beam search on a GPU: what it finds is as likely as it says, and as the oracle's own search."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

pytest.importorskip("triton")

from octavo import LLM, BeamSearchParams
from tests.fixtures import models
from tests.fixtures.oracle import oracle
from tests.gpu.test_engine import PROMPTS
from tests.test_beam_search import slow_search

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ERROR = {"bfloat16": 0.15, "float16": 0.02}  # of a token's log-probability


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("width", [1, 4, 16])
def test_beams_are_as_likely_as_the_oracles(dtype: str, width: int) -> None:
    model = models.path("L64")
    flags = {"max_model_len": 224, "max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20}
    reference, length = oracle(model), 6
    params = BeamSearchParams(width, max_tokens=length, ignore_eos=True)
    with closing(LLM(str(model), dtype=dtype, **flags)) as llm:
        outputs = llm.beam_search(PROMPTS[:3], params)
        assert llm.stats.blocks_used == 0
    for prompt, output in zip(PROMPTS, outputs):
        assert len({tuple(s.tokens) for s in output.sequences}) == width
        best = slow_search(reference, prompt, params, set())
        for sequence, (*_, likely, _) in zip(output.sequences, best):
            tokens = sequence.tokens[len(prompt) :]
            own = sum(
                float(reference.logprobs(prompt + tokens[:i])[token])
                for i, token in enumerate(tokens)
            )
            assert abs(own - sequence.cum_logprob) < length * ERROR[dtype]
            # A beam lost by a near tie early on may cost more than the tie: twice the error.
            assert own > likely - 2 * length * ERROR[dtype]
