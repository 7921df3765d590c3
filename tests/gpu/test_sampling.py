"""The device's sampler at full size, in captured graphs, against the host's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.types import SamplingParams
from octavo.worker.sampler import describe
from tests.ops.test_sampling import CASES, law
from tests.worker.device_bench import DeviceBench, random_edits, random_params
from tests.worker.plans import New, int32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
VOCABS = [128256, 151936]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def language_like(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows from certain to flat, in BF16's steps, so that there are ties; on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)
    noise = torch.randn(rows, vocab, generator=generator, device="cuda")
    ranks = torch.rand(rows, vocab, generator=generator, device="cuda").argsort(-1) + 1
    slope = torch.linspace(0.0, 2.5, rows, device="cuda")[:, None]
    return (noise * 0.7 - slope * ranks.log()).to(torch.bfloat16).float()


def fill(bench: DeviceBench, slots: list[int], random: np.random.Generator) -> None:
    for slot in slots:
        ids = random.integers(0, bench.slots.vocab_size, 6).tolist()
        params = random_params(random)
        seed = int(random.integers(2**63))
        bench.place(New(slot, ids, params, seed, prompt_len=int(random.integers(1, 7))))


class Captured:
    """A graph of one draw of up to ``rows`` rows, padded."""

    def __init__(self, bench: DeviceBench, rows: int) -> None:
        vocab = bench.slots.vocab_size
        self.rows = rows
        self.logits = torch.zeros(rows, vocab, device="cuda")
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        self.positions = torch.zeros(rows, dtype=torch.int32, device="cuda")
        arguments = (self.logits, self.slots, self.positions)
        bench.device_sampler.draw(*arguments)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.tokens = bench.device_sampler.draw(*arguments)

    def draw(self, bench: DeviceBench, logits: torch.Tensor, slots: list[int]) -> list[int]:
        padded = slots + [-1] * (self.rows - len(slots))
        columns = bench.columns(padded)
        self.logits[: len(slots)] = logits
        self.slots.copy_(columns[0])
        self.positions.copy_(columns[1])
        self.graph.replay()
        return self.tokens[: len(slots)].tolist()


@pytest.mark.parametrize("rows", [1, 7, 64, 256])
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_replayed_graph_draws_what_the_host_draws(vocab: int, rows: int) -> None:
    """With other requests, rows and padding at each replay; 999 of 1,000 choices are equal."""
    random = np.random.default_rng(rows)
    bench = DeviceBench(vocab, "cuda", max_slots=256)
    captured = Captured(bench, rows)
    equal, drawn = 0, 0
    for step in range(3 if rows == 256 else 8):
        count = rows if step == 0 else int(random.integers(1, rows + 1))
        slots = random.permutation(256)[:count].tolist()
        fill(
            bench, [s for s in slots if bench.slots.length[s] == 0 or random.random() < 0.2], random
        )
        logits = language_like(rows, vocab, step)[random.permutation(rows)[:count].tolist()]
        found = captured.draw(bench, logits, slots)
        expected = bench.expected(logits.cpu(), slots)
        equal += sum(a == b for a, b in zip(found, expected))
        drawn += count
        bench.append(slots, expected)
        if found == expected:
            bench.check(slots)
        bench.adopt(slots)
    assert drawn - equal <= max(1, drawn // 1000), f"{drawn - equal} of {drawn} differ"


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_draws_the_same_alone_and_in_any_company(vocab: int) -> None:
    random = np.random.default_rng(0)
    bench = DeviceBench(vocab, "cuda", max_slots=256)
    slots = list(range(256))
    for slot in slots:
        params = random_params(random).clone(
            repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0
        )
        bench.place(New(slot, [1, 2], params, seed=slot))
    logits = language_like(256, vocab, 3)
    together = bench.draw(logits, slots)
    assert bench.draw(logits.flip(0), slots[::-1]) == together[::-1]
    assert bench.draw(logits[:50], slots[:50]) == together[:50]
    for slot in range(0, 256, 9):
        assert bench.draw(logits[slot : slot + 1], [slot]) == [together[slot]]


@pytest.mark.parametrize(("temperature", "min_p", "top_k", "top_p"), CASES)
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_draws_follow_the_law_of_their_parameters(
    temperature: float, min_p: float, top_k: int, top_p: float, spread: float
) -> None:
    logits = np.random.default_rng(7).standard_normal(60) * spread
    count = 100_000 // 4
    bench = DeviceBench(60, "cuda", max_slots=count, max_len=8)
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    bench.place(New(0, [1], params, seed=11))
    observed = np.zeros(60)
    for part in range(4):  # one request's draws at 100,000 positions
        slots = torch.zeros(count, dtype=torch.int32, device="cuda")
        positions = torch.arange(part * count, (part + 1) * count, device="cuda").int() + 8
        rows = torch.tensor(logits, dtype=torch.float32, device="cuda").expand(count, -1)
        tokens = bench.device_sampler.draw(rows.contiguous(), slots, positions)
        observed += np.bincount(tokens.cpu().numpy(), minlength=60)
    expected = law(logits, temperature, min_p, top_k, top_p) * count * 4
    assert observed[expected == 0].sum() == 0
    many = expected >= 5
    chi2 = ((observed[many] - expected[many]) ** 2 / expected[many]).sum()
    freedom = int(many.sum())
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_hundreds_of_ties_at_every_kind_of_cut() -> None:
    vocab = VOCABS[0]
    bench = DeviceBench(vocab, "cuda")
    kinds = [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.0, top_k=50_000, top_p=0.9),
        SamplingParams(temperature=2.0, top_k=9000, min_p=0.01),
    ]
    bench.place(*(New(i, [1], p, seed=i) for i, p in enumerate(kinds)))
    slots = list(range(len(kinds)))
    flat = torch.zeros(len(kinds), vocab)
    stairs = torch.randint(-9, 3, flat.shape).float()
    plateau = flat.clone()
    plateau[:, 5000:5300] = 4.0
    for logits in (flat, stairs, plateau, flat - 1e30):
        assert bench.draw(logits, slots) == bench.expected(logits, slots)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_absurd_logits_give_ids_of_the_vocabulary_and_harm_nobody(value: float) -> None:
    random = np.random.default_rng(1)
    bench = DeviceBench(VOCABS[0], "cuda", max_slots=64)
    slots = list(range(64))
    fill(bench, slots, random)
    logits = language_like(64, VOCABS[0], 0)
    logits[::2, 70_000] = value
    logits[0] = value
    expected = bench.expected(logits.cpu(), slots)
    found = bench.draw(logits, slots)
    assert all(0 <= token < VOCABS[0] for token in found)
    assert found[1::2] == expected[1::2]


def test_edits_change_the_logits_as_on_the_host() -> None:
    random = np.random.default_rng(2)
    vocab = VOCABS[1]
    bench = DeviceBench(vocab, "cuda", max_slots=64)
    bench.place(*(random_edits(random, slot, vocab) for slot in range(64)))
    slots = [*range(20), -1, *range(20, 64)]
    logits = language_like(65, vocab, 0)
    found = logits.clone()
    bench.device_sampler.edit(found, *bench.columns(slots))
    assert torch.equal(found.cpu(), bench.edited(logits.cpu(), slots))


def test_logprobs_are_those_of_the_host() -> None:
    bench = DeviceBench(VOCABS[0], "cuda")
    logits = language_like(40, VOCABS[0], 5)
    tokens = torch.randint(0, VOCABS[0], (40,), dtype=torch.int32, device="cuda")
    ids, values, ranks = bench.device_sampler.logprobs(logits, tokens, 20)
    expected = describe(logits.cpu().log_softmax(-1), tokens.cpu().long(), int32([20] * 40))
    np.testing.assert_allclose(values.cpu().numpy(), expected.values, rtol=1e-4, atol=5e-5)
    assert ranks.tolist() == expected.ranks.tolist()
    assert ids[:, 0].tolist() == tokens.tolist()


def test_nothing_waits_for_the_device() -> None:
    random = np.random.default_rng(3)
    vocab = VOCABS[0]
    bench = DeviceBench(vocab, "cuda", max_slots=16)
    fill(bench, list(range(8)), random)
    bench.place(*(random_edits(random, slot, vocab) for slot in range(8, 16)))
    logits = language_like(16, vocab, 0)
    columns = bench.columns(list(range(16)))
    tokens = bench.device_sampler.draw_edited(logits, *columns)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bench.device_sampler.place(int32(range(16)))
        bench.device_sampler.draw_edited(logits, *columns)
        bench.device_sampler.logprobs(logits, tokens, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
