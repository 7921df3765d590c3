"""Which operations a row gets, in which order, and that no row sees another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.types import SamplingParams
from octavo.worker import sampler
from octavo.worker.sampler import Sampler
from octavo.worker.slots import Slots
from tests.worker.plans import New, Row, int32, plan

VOCAB = 50


class Bench:
    """Slots with requests in them; ``draw`` draws their next tokens from given logits."""

    def __init__(self) -> None:
        self.slots = Slots(max_slots=16, max_len=64, block_size=16, vocab_size=VOCAB)
        self.sampler = Sampler(self.slots)

    def place(self, *new: New) -> None:
        rows = [Row(n.slot, 0, len(n.ids), draw=True, blocks=[0] * 4) for n in new]
        self.slots.apply(plan(*rows, new=new))

    def draw(self, logits: torch.Tensor, slots: list[int]):  # type: ignore[no-untyped-def]
        chosen = int32(slots)
        positions = self.slots.length[chosen]
        drawn = self.sampler.sample(logits.clone(), chosen, positions)
        self.slots.append(chosen, positions, drawn.tokens)
        return drawn.tokens.tolist(), drawn.rows.tolist(), drawn.logprobs


@pytest.fixture
def bench() -> Bench:
    return Bench()


def logits_of(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def rising(top: int) -> torch.Tensor:
    """One row whose most likely tokens are top, top - 1, …"""
    row = torch.full((1, VOCAB), -5.0)
    row[0, : top + 1] = torch.arange(top + 1).float()
    return row


KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "hot": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=1.2, top_k=7),
    "min_p": SamplingParams(temperature=1.2, min_p=0.05),
    "all": SamplingParams(temperature=1.1, min_p=0.01, top_k=20, top_p=0.95),
    "penalties": SamplingParams(
        temperature=0.9, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 4.0, 9: -50.0}),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=[1, 4, 9, 16]),
    "logprobs": SamplingParams(temperature=1.0, logprobs=3),
}


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 100])
def test_a_request_draws_the_same_alone_and_in_any_company(
    rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "BLOCK_BYTES", rows_at_a_time * 4 * VOCAB)
    names = list(KINDS)
    logits = [logits_of(len(names), seed=step) for step in range(8)]

    def run(groups: list[list[int]]) -> dict[int, list[int]]:
        bench = Bench()
        bench.place(*(New(i, [i, 7], KINDS[n], seed=100 + i) for i, n in enumerate(names)))
        drawn: dict[int, list[int]] = {i: [] for i in range(len(names))}
        for step in logits:
            for group in groups:
                tokens, _, _ = bench.draw(step[group], group)
                for slot, token in zip(group, tokens):
                    drawn[slot].append(token)
        return drawn

    everyone = list(range(len(names)))
    together = run([everyone])
    assert run([[i] for i in everyone]) == together
    assert run([everyone[::-1]]) == together
    assert run([everyone[::2], everyone[1::2]]) == together


def test_the_slot_does_not_matter_but_the_seed_does() -> None:
    draws = []
    for slot, seed in ((0, 5), (9, 5), (9, 6)):
        bench = Bench()
        bench.place(New(slot, [1], KINDS["hot"], seed=seed))
        draws.append([bench.draw(logits_of(1, spread=0.5), [slot])[0][0] for _ in range(12)])
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 0.0])
def test_very_small_temperatures_are_greedy(bench: Bench, temperature: float) -> None:
    logits = logits_of(1, spread=0.01)
    bench.place(New(0, [1], SamplingParams(temperature=temperature)))
    assert bench.draw(logits, [0])[0] == [int(logits.argmax())]


def test_top_k_of_one_is_greedy_even_among_ties(bench: Bench) -> None:
    logits = torch.zeros(1, VOCAB)
    bench.place(New(0, [1], SamplingParams(temperature=1.0, top_k=1), seed=77))
    assert [bench.draw(logits, [0])[0] for _ in range(5)] == [[0]] * 5


def test_penalties_count_output_and_only_repetition_counts_the_prompt(bench: Bench) -> None:
    """T04."""
    for slot, params in enumerate(
        (
            SamplingParams(temperature=0.0, presence_penalty=1.5),
            SamplingParams(temperature=0.0, frequency_penalty=1.5),
            SamplingParams(temperature=0.0, repetition_penalty=1.5),
        )
    ):
        bench.place(New(slot, [10, 10, 10], params))
    drawn = [bench.draw(rising(10).expand(3, -1), [0, 1, 2])[0] for _ in range(4)]
    presence, frequency, repetition = zip(*drawn)
    assert presence == (10, 9, 10, 10)  # 10 once costs 1.5, and never more
    assert frequency == (10, 9, 10, 8)  # 10 twice costs 3
    assert repetition == (9, 8, 7, 10)  # 10 stands in the prompt: 10 / 1.5 from the first draw on


def test_frequency_penalty_breaks_a_cycle(bench: Bench) -> None:
    """T05: each use of a token costs its penalty again."""
    bench.place(New(0, [1], SamplingParams(temperature=0.0, frequency_penalty=2.0)))
    drawn = [bench.draw(rising(10), [0])[0][0] for _ in range(4)]
    counts = np.zeros(VOCAB)
    expected = []
    for _ in range(4):
        token = int(np.argmax(rising(10)[0].numpy() - 2.0 * counts))
        counts[token] += 1
        expected.append(token)
    assert drawn == expected


def test_min_tokens_holds_back_all_stop_ids_exactly_so_long(bench: Bench) -> None:
    """T09: counted from the output, not the prompt."""
    params = SamplingParams(temperature=0.0, min_tokens=3, logit_bias={10: 100.0})
    bench.place(New(0, [1] * 8, params, min_stop_ids=[10, 9]))
    drawn = [bench.draw(rising(10), [0])[0][0] for _ in range(5)]
    assert drawn == [8, 8, 8, 10, 10]


def test_bad_words_are_never_completed(bench: Bench) -> None:
    params = SamplingParams(temperature=0.0)
    words = [[10], [9, 9], [9, 8, 9]]
    bench.place(New(0, [9], params, bad_words=words))
    drawn = [bench.draw(rising(10), [0])[0][0] for _ in range(6)]
    assert drawn == [9, 8, 8, 9, 8, 8]


def test_only_allowed_ids_are_drawn_and_a_bias_moves_them(bench: Bench) -> None:
    allowed = [3, 5, 6]
    hot = SamplingParams(temperature=2.0, allowed_token_ids=allowed)
    biased = SamplingParams(temperature=0.0, allowed_token_ids=allowed, logit_bias={3: 50.0})
    bench.place(New(0, [1], hot, seed=4), New(1, [1], biased))
    drawn = [bench.draw(rising(10).expand(2, -1), [0, 1])[0] for _ in range(40)]
    assert {first for first, _ in drawn} == set(allowed)
    assert {second for _, second in drawn} == {3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_keeps_its_allowed_ids(bench: Bench, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=[7], min_tokens=5)
    bench.place(
        New(0, [1], params, min_stop_ids=[7]),
        New(1, [1], params, bad_words=[[7]], min_stop_ids=[1]),
    )
    tokens, _, _ = bench.draw(rising(10).expand(2, -1), [0, 1])
    assert tokens == [7, 7]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 3e38])
@pytest.mark.parametrize("kind", [*KINDS])
def test_absurd_logits_still_give_ids_of_the_vocabulary(
    bench: Bench, kind: str, value: float
) -> None:
    """T01, T20: a broken model must not take the sampler down, nor its neighbours."""
    bench.place(New(0, [1], KINDS[kind], seed=1), New(1, [1], KINDS["top_p"], seed=2))
    logits = logits_of(2)
    alone = Bench()
    alone.place(New(1, [1], KINDS["top_p"], seed=2))
    expected, _, _ = alone.draw(logits[1:], [1])
    logits[0] = value
    tokens, _, logprobs = bench.draw(logits, [0, 1])
    assert 0 <= tokens[0] < VOCAB and tokens[1] == expected[0]
    assert logprobs is None or not np.isnan(logprobs.values).any()


def test_extreme_parameters_do_not_overflow(bench: Bench) -> None:
    for slot, repetition in enumerate((1e-40, 1e38)):
        params = SamplingParams(
            temperature=1.1e-3, repetition_penalty=repetition, top_p=1e-6, logprobs=2
        )
        bench.place(New(slot, [3, 4], params, seed=slot))
    logits = logits_of(2)
    tokens, _, logprobs = bench.draw(logits, [0, 1])
    assert all(0 <= token < VOCAB for token in tokens)
    assert np.isfinite(logprobs.values).all()


def test_logprobs_are_raw_and_only_of_rows_that_ask(bench: Bench) -> None:
    edited = SamplingParams(temperature=0.5, logit_bias={2: 100.0}, logprobs=2)
    everything = SamplingParams(temperature=0.0, logprobs=-1)
    bench.place(
        New(0, [1], KINDS["hot"]),
        New(1, [1], edited),
        New(2, [1], everything),
        New(3, [1], SamplingParams(temperature=0.0, logprobs=0)),
    )
    logits = logits_of(4)
    tokens, rows, logprobs = bench.draw(logits, [0, 1, 2, 3])
    raw = logits.log_softmax(-1)
    assert rows == [1, 2, 3] and tokens[1] == 2
    assert logprobs.ids.shape == (3, VOCAB + 1)
    assert logprobs.ids[0, :3].tolist() == [2, *raw[1].topk(2).indices.tolist()]
    assert (logprobs.ids[0, 3:] == -1).all() and (logprobs.ids[2, 1:] == -1).all()
    assert logprobs.values[0, 0] == pytest.approx(float(raw[1, 2]), abs=1e-6)
    assert logprobs.ranks.tolist() == [int((raw[1] > raw[1, 2]).sum()) + 1, 1, 1]
    assert sorted(logprobs.ids[1, 1:].tolist()) == list(range(VOCAB))
