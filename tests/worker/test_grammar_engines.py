"""Engines whose requests follow grammars, on the CPU's runner and on the GPU's (interpreted):
answers are those of requests served alone, whatever is in flight, padded, preempted or aborted, and
nothing but what the grammar allows is ever told."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from octavo.config import EngineConfig
from octavo.engine.engine import Engine, Executor
from octavo.engine.messages import AddRequest, EngineInfo, pack_ids
from octavo.flags import from_flags
from octavo.grammar.compile import grammar_text
from octavo.grammar.grammars import Grammars
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import FinishReason, SamplingParams, StructuredOutputsParams
from octavo.worker.executor import CudaExecutor
from octavo.worker.runner import Runner
from tests.worker.interpreted import BLOCK, Interpreted, config, ways_to_run
from tests.worker.plans import SumModel
from tests.worker.test_cuda_engine import AtOnce, Heard, served_together

EOS, FEW_BLOCKS = 1, 24
# One printable character a token: id 2 is a space.
TOKENS = [b"", b"", *(bytes([32 + i]) for i in range(95))]
VOCABULARY = Vocabulary(TOKENS, [0, 1], [EOS])
SHAPE = {
    "type": "object",
    "properties": {"a": {"enum": [1, 23]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
# How the output must look, by kind of constraint; a prefix of it where the length ran out.
KINDS: dict[str, tuple[StructuredOutputsParams, str]] = {
    "regex": (StructuredOutputsParams(regex="[a-c]{2,7}z"), "[a-c]{2,7}z"),
    "choice": (StructuredOutputsParams(choice=["yes", "yellow", "no"]), "yes|yellow|no"),
    "json": (
        StructuredOutputsParams(json=SHAPE, disable_any_whitespace=True),
        r'\{"a":(1|23)(,"b":(true|false))?\}',
    ),
    "open": (StructuredOutputsParams(regex="[0-9]+"), "[0-9]+"),
    "after": (StructuredOutputsParams(regex="[xy]{3}", after="e"), "[^e]*e[xy]{3}"),
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0, "logit_bias": {40: 100.0, EOS: 100.0}},
    {"temperature": 1.0, "min_tokens": 4},
    {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.5},
]


def info(num_blocks: int, eos_ids: list[int]) -> EngineInfo:
    return EngineInfo(
        model="sum", architecture="sum", dtype="float32", device="cpu", threads=1,
        vocab_size=SumModel.vocab, max_model_len=96, eos_ids=eos_ids, block_size=BLOCK,
        num_blocks=num_blocks, kv_cache_bytes=num_blocks, weight_bytes=0, max_num_seqs=8,
        max_num_batched_tokens=64, implementations={}, startup_seconds={}, reasons={},
    )  # fmt: skip


def grammars_of(vocabulary: Vocabulary = VOCABULARY) -> Grammars:
    grammars = Grammars()
    grammars.set_vocabulary(vocabulary)
    return grammars


def make_engine(executor: Executor, grammars: Grammars, num_blocks: int, **settings: Any) -> Engine:
    found = info(num_blocks, grammars._vocabulary.eos_ids if grammars._vocabulary else [])
    return Engine(from_flags(EngineConfig, settings), found, executor, grammars=grammars)


def cpu_engine(
    num_blocks: int = 64, vocabulary: Vocabulary = VOCABULARY, **settings: Any
) -> Engine:
    grammars = grammars_of(vocabulary)
    runner = Runner(
        config(), Path("none"), lambda path, config, progress: SumModel(), grammars=grammars
    )
    runner.start(lambda *news: None)
    return make_engine(AtOnce(runner), grammars, num_blocks, **settings)


def message(
    handle: int, constraint: StructuredOutputsParams | None, max_tokens: int = 24, **params: Any
) -> AddRequest:
    rng = random.Random(handle)
    prompt = [rng.randrange(2, 97) for _ in range(rng.randint(1, 20))]
    given = SamplingParams(max_tokens=max_tokens, seed=handle, **params)
    grammar = after = ""
    if constraint is not None:
        grammar, after = grammar_text(constraint, {}), constraint.after or ""
    return AddRequest(
        handle, str(handle), pack_ids(prompt), given, max_tokens, 0.0, grammar=grammar,
        grammar_after=after,
    )  # fmt: skip


def make_requests(count: int) -> tuple[list[AddRequest], dict[int, str]]:
    """Requests of every kind, each third without a grammar; and each handle's pattern."""
    requests, patterns = [], {}
    names = list(KINDS)
    for index in range(count):
        handle = 100 * index
        constraint, pattern = (None, "") if index % 3 == 2 else KINDS[names[index % len(names)]]
        request = message(handle, constraint, **PARAMS[index % len(PARAMS)])
        requests.append(request)
        if pattern:
            patterns.update(dict.fromkeys(range(handle, handle + request.params.n), pattern))
    return requests, patterns


def text(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens).decode()


def serve(engine: Engine, *requests: AddRequest) -> Heard:
    heard = Heard()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        heard.step(engine)
    return heard


def served_alone(requests: list[AddRequest]) -> Heard:
    engine = cpu_engine(async_scheduling=False, enable_prefix_caching=False)
    heard = Heard()
    for request in requests:
        engine.add(request)
        while engine.has_work:
            heard.step(engine)
    return heard


def check(found: Heard, expected: Heard, patterns: dict[int, str], aborted: set[int]) -> None:
    assert found.reasons.keys() == expected.reasons.keys()
    num_whole = 0
    for handle, tokens in expected.tokens.items():
        mine = found.tokens.get(handle, [])
        if handle // 100 * 100 in aborted:
            assert mine == tokens[: len(mine)]
            continue
        assert mine == tokens
        assert found.reasons[handle] == expected.reasons[handle]
        assert found.logprobs.get(handle) == expected.logprobs.get(handle)
        if handle in patterns and found.reasons[handle] is FinishReason.STOP:
            assert re.fullmatch(patterns[handle], text(mine)), text(mine)
            num_whole += 1
    assert num_whole >= len(patterns) // 2


@pytest.mark.parametrize("num_blocks", [FEW_BLOCKS, 64])
@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_cpu_company_and_preemption_change_nothing(num_blocks: int, overlap: bool) -> None:
    requests, patterns = make_requests(24)
    aborted = {requests[3].handle, requests[10].handle, requests[12].handle}
    engine = cpu_engine(num_blocks, async_scheduling=overlap)
    found = served_together(engine, requests, aborted, seed=num_blocks)
    check(found, served_alone(requests), patterns, aborted)
    engine.scheduler.check()
    stats = engine.stats()
    assert stats.blocks_used == stats.num_running == stats.num_waiting == 0
    assert (stats.num_preemptions > 0) == (num_blocks == FEW_BLOCKS)


@pytest.mark.slow
@ways_to_run(FEW_BLOCKS)
def test_a_gpu_answers_as_requests_served_alone_on_a_cpu(
    num_blocks: int, graphs: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, patterns = make_requests(14)
    aborted = {requests[4].handle, requests[10].handle}
    grammars = grammars_of()
    runner = Interpreted(monkeypatch if graphs else None, grammars=grammars)
    engine = make_engine(CudaExecutor(runner.gpu), grammars, num_blocks, **settings)
    found = served_together(engine, requests, aborted, seed=5)
    check(found, served_alone(requests), patterns, aborted)
    engine.scheduler.check()
    if num_blocks == FEW_BLOCKS:
        assert engine.stats().num_preemptions > 0
    if graphs:  # the forward alone of some step was captured and replayed
        assert any(graph.num_replays for graph in runner.forward_graphs)


def test_a_grammar_ends_its_request_whatever_min_tokens_and_ignore_eos_say() -> None:
    engine = cpu_engine()
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    found = serve(
        engine,
        message(1, constraint, temperature=0, min_tokens=9),
        message(2, constraint, temperature=0, ignore_eos=True),
        message(3, constraint, temperature=0, bad_words=[]),
    )
    for handle in (1, 2, 3):
        assert text(found.tokens[handle]) in ("yes", "no")
        assert found.reasons[handle] is FinishReason.STOP


def test_an_open_grammar_ends_with_eos_and_not_where_it_is_ignored() -> None:
    """Any number of digits: EOS may come after each."""
    likely = {"temperature": 0, "logit_bias": {EOS: 100.0}}
    constraint = StructuredOutputsParams(regex="[0-9]+")
    found = serve(
        cpu_engine(),
        message(1, constraint, **likely),
        message(2, constraint, **likely, min_tokens=3),
        message(3, constraint, **likely, ignore_eos=True, max_tokens=7),
    )
    assert [len(found.tokens[handle]) for handle in (1, 2, 3)] == [2, 4, 7]
    assert found.tokens[1][-1] == found.tokens[2][-1] == EOS
    assert found.reasons[3] is FinishReason.LENGTH
    assert re.fullmatch("[0-9]{7}", text(found.tokens[3]))


def test_a_model_without_eos_stops_where_its_grammar_is_complete() -> None:
    engine = cpu_engine(vocabulary=Vocabulary(TOKENS, [0], []))
    marker = {TOKENS.index(b"e"): 100.0}
    for index, (constraint, pattern) in enumerate(KINDS.values()):
        request = message(index, constraint, max_tokens=60, temperature=1.0, logit_bias=marker)
        found = serve(engine, request)
        if constraint.regex == "[0-9]+":
            assert found.reasons[index] is FinishReason.LENGTH
        else:
            assert found.reasons[index] is FinishReason.STOP
        assert re.fullmatch(pattern, text(found.tokens[index]))


def test_no_bias_brings_back_what_the_grammar_bans() -> None:
    banned = {token: 100.0 for token in range(2, 97) if TOKENS[token] not in b"abcz"}
    for logprobs in (None, 3):
        found = serve(
            cpu_engine(),
            message(1, KINDS["regex"][0], temperature=0, logit_bias=banned, logprobs=logprobs),
        )
        assert re.fullmatch("[a-c]{2,7}z", text(found.tokens[1]))


def test_bad_words_and_allowed_ids_narrow_the_grammar() -> None:
    allowed = [TOKENS.index(char) for char in (b"a", b"b", b"z")]
    bad = [[TOKENS.index(b"a")]]
    first = message(1, KINDS["regex"][0], temperature=1.0, allowed_token_ids=allowed)
    second = message(2, KINDS["regex"][0], temperature=1.0)
    second.bad_words = bad
    found = serve(cpu_engine(), first, second)
    assert re.fullmatch("[ab]{2,7}z", text(found.tokens[1]))
    assert re.fullmatch("[bc]{2,7}z", text(found.tokens[2]))


@pytest.mark.parametrize("make", [cpu_engine])
def test_a_dead_end_ends_its_own_request_with_what_is_wrong(make: Callable[..., Engine]) -> None:
    """A constraint of which no allowed id is a token."""
    engine, told = make(), {}
    engine.add(message(1, KINDS["regex"][0], temperature=0, allowed_token_ids=[5, 6]))
    engine.add(message(2, KINDS["regex"][0], temperature=1.0, n=2))
    engine.add(message(4, None, temperature=1.0))
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        outputs = engine.step()
        if outputs is not None:
            told.update({end.handle: end for end in outputs.finished})
            for handle, token in outputs.pairs():
                tokens.setdefault(handle, []).append(token)
    assert told[1].reason is FinishReason.ERROR
    assert "allowed_token_ids" in told[1].message
    assert 1 not in tokens
    for handle in (2, 3):
        assert told[handle].reason is FinishReason.STOP
        assert re.fullmatch(KINDS["regex"][1], text(tokens[handle]))
    assert told[4].reason in (FinishReason.STOP, FinishReason.LENGTH)
    engine.scheduler.check()


def test_a_grammar_without_a_vocabulary_is_refused() -> None:
    grammars = Grammars()
    engine = make_engine(AtOnce(None), grammars, 8)  # type: ignore[arg-type]
    engine.add(message(1, KINDS["regex"][0]))
    outputs = engine.step()
    assert outputs is not None
    assert "needs a tokenizer" in outputs.rejected[0].message


def test_a_grammar_that_does_not_compile_is_refused_and_the_others_go_on() -> None:
    engine = cpu_engine()
    bad = message(1, None)
    bad.grammar = json.dumps({"grammars": [{"lark_grammar": "start: /([a/"}]})
    engine.add(bad)
    engine.add(message(2, KINDS["choice"][0], temperature=0))
    rejected, reasons = [], {}
    while engine.has_work:
        outputs = engine.step()
        if outputs is not None:
            rejected += outputs.rejected
            reasons.update({end.handle: end.reason for end in outputs.finished})
    assert [entry.handle for entry in rejected] == [1]
    assert reasons == {2: FinishReason.STOP}
    assert engine.grammars.num_used == 0


def test_one_that_leaves_while_its_grammar_compiles_is_forgotten() -> None:
    engine = cpu_engine()
    engine.add(message(1, KINDS["json"][0], temperature=0))
    engine.add(message(2, KINDS["json"][0], temperature=0))
    engine.abort([1])
    found = Heard()
    while engine.has_work:
        found.step(engine)
    assert found.reasons == {1: FinishReason.ABORT, 2: FinishReason.STOP}
    assert engine.grammars.num_used == 0
