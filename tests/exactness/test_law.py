"""The judge of 16-bit answers knows right from wrong."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.exactness.law import EOS, Law, Verdict
from tests.fixtures.oracle import oracle

PROMPT = [0, 45, 170, 9, 9, 311, 27]
KINDS = [
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=16, seed=5),
    SamplingParams(temperature=1.0, top_k=20, presence_penalty=0.8, max_tokens=16, seed=6),
    SamplingParams(temperature=0, logit_bias={EOS: 50.0}, min_tokens=7, max_tokens=16),
    SamplingParams(temperature=0.8, bad_words=["a", "th"], min_p=0.02, max_tokens=16, seed=7),
]


@pytest.fixture(scope="module")
def law(model_r: Path) -> Law:
    return Law(oracle(model_r), 1e-3)


def test_exact_answers_are_right_and_one_wrong_token_is_found(model_r: Path, law: Law) -> None:
    with closing(LLM(str(model_r), dtype="float32", kv_cache_memory_bytes=1 << 22)) as llm:
        answers = llm.generate([PROMPT] * len(KINDS), KINDS, use_tqdm=False)
        assert llm.tokenizer is not None
        words = llm.tokenizer.bad_word_ids(KINDS[-1].bad_words)
    for params, answer in zip(KINDS, answers):
        tokens, bad_words = answer.outputs[0].token_ids, words if params.bad_words else []
        right = law.judge(PROMPT, tokens, params, bad_words=bad_words)
        assert right == Verdict(len(tokens), 0, 0.0)
        wrong = [*tokens[:-3], (tokens[-3] + 11) % 320, *tokens[-2:]]
        with pytest.raises(AssertionError):
            law.judge(PROMPT, wrong, params, bad_words=bad_words)


def test_a_near_tie_may_go_either_way(law: Law) -> None:
    first, second = law.reference.last_logits(PROMPT).topk(2).indices.tolist()
    gap = float(law.logits(PROMPT, [first])[0, first] - law.logits(PROMPT, [first])[0, second])
    greedy = SamplingParams(temperature=0, max_tokens=1)
    with pytest.raises(AssertionError):
        law.with_error(gap * 0.4).judge(PROMPT, [second], greedy)
    assert law.with_error(gap * 0.6).judge(PROMPT, [second], greedy).near_ties == 1
    biased = greedy.clone(logit_bias={second: gap * 0.9})
    assert law.with_error(gap * 0.2).judge(PROMPT, [second], biased).near_ties == 1
