"""The device's sampler draws what the host's draws: interpreted here, compiled on a GPU
(tests/gpu/test_sampling.py)."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.ops.needs import PENALTIES
from octavo.ops.triton import sampling as kernels
from octavo.types import SamplingParams
from octavo.worker.device_sampler import DeviceSampler
from octavo.worker.device_tables import DeviceTables
from octavo.worker.sampler import describe
from tests.worker.device_bench import DeviceBench, random_edits, random_params
from tests.worker.plans import New, int32

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU"
)
VOCAB = 211
# How many candidates fit and how many of them are compared in pairs: everything found among the
# candidates, by pairs or by halving, and rows that must be searched.
ROOMS = {"pairs": (512, 512), "halving": (512, 4), "search": (16, 4)}


def bench_of(room: str = "pairs", vocab: int = VOCAB, chunk: int = 128) -> DeviceBench:
    capacity, few = ROOMS[room]
    device = torch.device("cpu")
    scratch = kernels.Scratch.allocate(
        16, vocab, device, chunk=chunk, group=8, capacity=capacity, few=few
    )
    return DeviceBench(vocab, scratch=scratch)


def logits_of(rows: int, seed: int, spread: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "nearly greedy": SamplingParams(temperature=5e-4),
    "hot": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=1.2, top_k=7),
    "min_p": SamplingParams(temperature=1.2, min_p=0.05),
    "all": SamplingParams(temperature=1.1, min_p=0.01, top_k=20, top_p=0.95),
    "penalties": SamplingParams(
        temperature=0.9, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2
    ),
    "greedy penalties": SamplingParams(temperature=0.0, frequency_penalty=0.6),
    "everything": SamplingParams(
        temperature=1.5, top_p=0.97, top_k=200, repetition_penalty=0.7, presence_penalty=-1.0
    ),
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_mixture_of_all_parameters_draws_what_the_host_draws(room: str) -> None:
    bench = bench_of(room)
    names = list(KINDS)
    bench.place(*(New(i, [i, 7, i, 9], KINDS[n], seed=100 + i) for i, n in enumerate(names)))
    for step in range(3):
        slots = np.random.default_rng(step).permutation(len(names)).tolist()
        logits = logits_of(len(slots), step, spread=(0.2, 1.0, 5.0)[step])
        tokens = bench.expected(logits, slots)
        assert bench.draw(logits, slots) == tokens
        bench.append(slots, tokens)
        bench.check(slots)


@pytest.mark.parametrize("seed", range(3))
def test_random_parameters_draw_what_the_host_draws(seed: int) -> None:
    random = np.random.default_rng(seed)
    bench = bench_of(list(ROOMS)[seed], vocab=1999, chunk=512)
    slots = list(range(16))
    params = [random_params(random) for _ in slots]
    bench.place(
        *(New(i, [i, 7], p, seed=int(random.integers(2**63))) for i, p in enumerate(params))
    )
    logits = logits_of(16, seed, vocab=1999) * torch.tensor(random.choice([0.1, 1, 2], 16))[:, None]
    logits = logits.to(torch.bfloat16).float()  # ties
    assert bench.draw(logits, slots) == bench.expected(logits, slots)


def test_padding_is_left_alone_and_company_does_not_matter() -> None:
    bench = bench_of()
    names = ["greedy", "hot", "top_p", "all", "penalties"]
    bench.place(*(New(i, [i, 7], KINDS[n], seed=5 + i) for i, n in enumerate(names)))
    logits = logits_of(7, 1)
    before = bench.tables.history.clone()
    bench.device_sampler.tokens.fill_(-7)
    assert bench.draw(logits, [-1] * 7) == [-7] * 7
    assert torch.equal(bench.tables.history, before)
    order = [3, -1, 0, 4, 1, -1, 2]
    together = bench.draw(logits, order)
    assert together[1] == together[5] == -7
    assert bench.tables.seen[4].tolist().count(1) == 1
    for row, slot in enumerate(order):
        if slot in (0, 1, 2, 3):
            assert bench.draw(logits[row : row + 1], [slot]) == [together[row]]


def test_a_draw_without_the_launches_of_truncation_is_the_same() -> None:
    bench = bench_of()
    bench.place(New(0, [1], KINDS["greedy"]), New(1, [1], KINDS["hot"], seed=3))
    logits = logits_of(2, 4)
    tokens = bench.device_sampler.draw(logits, *bench.columns([0, 1]), truncation=False)
    assert tokens.tolist() == bench.expected(logits, [0, 1])


@pytest.mark.parametrize("room", ROOMS)
def test_tokens_that_tie_at_a_cut_are_all_kept(room: str) -> None:
    """Equal logits by the hundred: no more than a handful may be told apart."""
    bench = bench_of(room)
    kinds = [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.9),
    ]
    bench.place(*(New(i, [1], p, seed=i) for i, p in enumerate(kinds)))
    some = torch.zeros(4, VOCAB)
    some[:, 50:150] = 2.0
    some[:, 200] = 2.5
    flat = torch.zeros(4, VOCAB)
    whole = logits_of(4, 0).round()
    for logits in (some, flat, whole):
        assert bench.draw(logits, [0, 1, 2, 3]) == bench.expected(logits, [0, 1, 2, 3])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreted kernels
@pytest.mark.parametrize("room", ["pairs", "search"])
def test_absurd_logits_still_give_ids_of_the_vocabulary(room: str) -> None:
    bench = bench_of(room)
    names = ["greedy", "hot", "top_p", "top_k", "min_p", "all"]
    bench.place(*(New(i, [i, 7], KINDS[n], seed=i) for i, n in enumerate(names)))
    slots = list(range(len(names)))
    for fill in ("nan", "-inf", "inf", "3e38"):
        logits = torch.full((len(names), VOCAB), float(fill))
        assert all(0 <= token < VOCAB for token in bench.draw(logits, slots))
    for odd in (float("nan"), float("inf"), 3e38):
        logits = logits_of(len(names), 2)
        logits[::2, 17] = odd
        tokens, expected = bench.draw(logits, slots), bench.expected(logits, slots)
        assert all(0 <= token < VOCAB for token in tokens)
        assert (tokens[0], tokens[1::2]) == (expected[0], expected[1::2])
    bans = logits_of(len(names), 3)
    bans[:, torch.arange(VOCAB) % 50 != 3] = float("-inf")
    assert bench.draw(bans, slots) == bench.expected(bans, slots)


def test_counts_come_back_with_a_request_and_stop_at_their_limit() -> None:
    bench = bench_of()
    params = SamplingParams(temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.5)
    bench.place(New(2, [4, 4, 9, 9, 9, 4, 5], params, prompt_len=3))
    seen = bench.tables.seen[2].int()
    assert {t: int(seen[t]) for t in (4, 5, 9, 0)} == {4: 1 - 2**15, 5: 1, 9: 2 - 2**15, 0: 0}
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 9]] = torch.tensor([1e9, 1e12])
    for start, end in ((2**15 - 2 - 2**15, -1), (-1, -1)):
        bench.tables.seen[2, 9] = start
        assert bench.draw(logits, [2]) == [9]
        assert int(bench.tables.seen[2, 9]) == end
    bench.place(New(2, [8], params))  # nothing of the last request is left
    assert bench.tables.seen[2].nonzero().tolist() == [[8]]


# ---- edits ----


def test_edits_change_the_logits_as_on_the_host() -> None:
    random = np.random.default_rng(2)
    emptied = 0
    for round_ in range(3):
        bench = bench_of()
        bench.place(*(random_edits(random, slot, VOCAB) for slot in range(16)))
        slots = [*range(8), -1, *range(8, 16)]
        logits = logits_of(17, round_)
        expected = bench.edited(logits, slots)
        found = logits.clone()
        bench.device_sampler.edit(found, *bench.columns(slots))
        assert torch.equal(found, expected)
        emptied += sum(
            bool(edits.allowed is not None and edits.min_stop_ids is not None)
            for edits in bench.slots.edits.values()
        )
    assert emptied > 3  # rows whose bans had to be dropped were among them


def test_edited_draws_are_those_of_the_host_over_several_steps() -> None:
    bench = bench_of()
    stop = SamplingParams(temperature=0.0, min_tokens=3, logit_bias={10: 100.0})
    banned = SamplingParams(temperature=0.0)
    only = SamplingParams(temperature=1.0, top_p=0.9, allowed_token_ids=[7], min_tokens=5)
    bench.place(
        New(0, [1] * 8, stop, min_stop_ids=[10, 9]),
        New(1, [9], banned, bad_words=[[10], [9, 9], [9, 8, 9]]),
        New(2, [1], only, min_stop_ids=[7], seed=1),
        New(3, [1], KINDS["penalties"], seed=2),
    )
    logits = torch.full((4, VOCAB), -5.0)
    logits[:, :11] = torch.arange(11).float()
    for _ in range(5):
        tokens = bench.expected(logits, [0, 1, 2, 3])
        assert bench.draw(logits, [0, 1, 2, 3], edited=True) == tokens
        bench.append([0, 1, 2, 3], tokens)
    bench.check([0, 1, 2, 3])
    assert bench.slots.history[1, 1:6].tolist() == [9, 8, 8, 9, 8]
    bench.place(New(1, [9], banned))  # the edits of the last request are gone
    assert bench.draw(logits[1:2], [1], edited=True) == [10]


# ---- log-probabilities and tables ----


def test_logprobs_are_those_of_the_host() -> None:
    bench = bench_of()
    logits = logits_of(9, 6)
    logits[3, 5], logits[4, 100:] = float("nan"), float("-inf")
    tokens = torch.randint(0, VOCAB, (9,), dtype=torch.int32)
    expected = describe(logits.log_softmax(-1), tokens.long(), int32([6] * 9))
    for k in (6, VOCAB):
        ids, values, ranks = bench.device_sampler.logprobs(logits, tokens, k)
        assert ids.dtype == ranks.dtype == torch.int32 and ids.shape == (9, k + 1)
        assert ids[:, :7].tolist() == expected.ids.tolist() or k == VOCAB
        assert np.array_equal(values[:, :7].numpy(), expected.values)
        assert ranks.tolist() == expected.ranks.tolist()


def test_tables_take_the_memory_they_say_and_all_start_empty() -> None:
    tables = DeviceTables.allocate(5, 40, 3, VOCAB, "cpu")
    tensors = [getattr(tables, field.name) for field in fields(tables)]
    assert sum(t.numel() * t.element_size() for t in tensors) == DeviceTables.num_bytes(
        5, 40, 3, VOCAB
    )
    assert not any(t.any() for t in tensors)


def test_placing_leaves_other_slots_alone() -> None:
    bench = bench_of()
    bench.place(New(0, [1], KINDS["everything"], seed=1), New(3, [2], KINDS["all"], seed=2**63))
    before = [t.clone() for t in (bench.tables.params_f, bench.tables.params_i, bench.tables.seen)]
    bench.place(New(1, [5], KINDS["penalties"], seed=4))
    after = [bench.tables.params_f, bench.tables.params_i, bench.tables.seen]
    others = [0, *range(2, 16)]
    for old, new in zip(before, after):
        assert torch.equal(old[others], new[others]) and not torch.equal(old[1], new[1])
    assert bench.slots.needs[1] & PENALTIES
    assert isinstance(bench.device_sampler, DeviceSampler)
