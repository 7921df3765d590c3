"""Sampling operations against slow float64 definitions, and draws against the law they promise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo.ops import sampling

MASK = 0xFFFFFFFF


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def keys_of(seeds: np.ndarray, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    words = seeds.astype("<u8").view("<i4").reshape(-1, 2)
    return sampling.row_keys(
        torch.tensor(words[:, 0]),
        torch.tensor(words[:, 1]),
        torch.tensor(positions.astype(np.int32)),
    )


def many_keys(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's draws at positions 0 .. count - 1."""
    return keys_of(np.full(count, seed, dtype=np.uint64), np.arange(count))


# ---- the noise, in plain Python integers (docs/sampling.md) ----


def mix(x: int) -> int:
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK
    x = ((x ^ x >> 15) * 0x846CA68B) & MASK
    return x ^ x >> 16


def noise(seed: int, position: int, token: int) -> int:
    low, high = seed & MASK, seed >> 32
    first = mix(mix((low + 0x9E3779B9) & MASK) ^ position)
    second = mix(mix((first + high) & MASK) ^ (position * 0x9E3779B9 & MASK))
    x = (token * 0x9E3779B9 + first) & MASK
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK
    x = ((x ^ x >> 15) + second) & MASK
    x = (x * 0x846CA68B) & MASK
    return (x ^ x >> 16) & 0x7FFFFFFF


def test_noise_is_the_documented_function_bit_for_bit() -> None:
    random = np.random.default_rng(0)
    seeds = random.integers(0, 2**64, 20, dtype=np.uint64)
    positions = random.integers(0, 2**20, 20)
    ids = random.integers(0, 200_000, 50).astype(np.int32)
    bits = sampling.noise_bits(keys_of(seeds, positions), torch.tensor(ids))
    expected = [
        [noise(int(s), int(p), int(t)) for t in ids] for s, p in zip(seeds, positions, strict=True)
    ]
    assert bits.tolist() == expected


def test_known_values_of_the_noise_stay_what_they_are() -> None:
    """Seeded outputs of one version must be those of the next."""
    bits = sampling.noise_bits(many_keys(2, seed=42), torch.arange(3, dtype=torch.int32))
    assert bits.tolist() == [
        [1854857982, 2125977334, 802921744],
        [745692465, 1306519395, 1601433645],
    ]


def test_noise_looks_uniform_and_unrelated_over_neighbours() -> None:
    tokens = torch.arange(64, dtype=torch.int32)
    bits = sampling.noise_bits(many_keys(4096), tokens).double() / 2**31
    columns = bits - 0.5
    for moved in (columns.roll(1, 0), columns.roll(1, 1), columns.roll((1, 1), (0, 1))):
        correlation = float((columns * moved).mean() * 12)
        assert abs(correlation) < 5 / bits.numel() ** 0.5
    counts = torch.histc(bits, 256, 0, 1)
    expected = bits.numel() / 256
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 255 + 5 * (2 * 255) ** 0.5
    other = sampling.noise_bits(many_keys(4096, seed=2), tokens).double() / 2**31 - 0.5
    assert abs(float((columns * other).mean() * 12)) < 5 / bits.numel() ** 0.5


def test_exponentials_are_finite_positive_and_have_the_right_mean() -> None:
    ends = sampling.exponential(torch.tensor([0, 1, 2**31 - 1, 2**31 - 100], dtype=torch.int32))
    assert torch.isfinite(ends).all() and (ends > 0).all()
    values = sampling.exponential(
        sampling.noise_bits(many_keys(2000), torch.arange(100, dtype=torch.int32))
    )
    assert float(values.double().mean()) == pytest.approx(1, abs=0.02)
    assert float((values.double() ** 2).mean()) == pytest.approx(2, abs=0.1)


# ---- truncation, in float64 ----


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    return shifted / shifted.sum()


def law(logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float):
    """The distribution that the parameters define, for one row."""
    probs = softmax(logits.astype(np.float64) / temperature)
    keep = probs >= min_p * probs.max()
    if top_k:
        keep &= probs >= np.sort(probs)[-min(top_k, len(probs))]
    order = np.argsort(-np.where(keep, probs, -1.0), kind="stable")
    mass = np.cumsum(np.where(keep, probs, 0.0)[order])
    inside = np.concatenate([[0.0], mass[:-1]]) < top_p * mass[-1]
    keep &= np.isin(np.arange(len(probs)), order[inside])
    return np.where(keep, probs, 0.0) / probs[keep].sum()


def draws(logits: np.ndarray, count: int, temperature, min_p, top_k, top_p) -> np.ndarray:
    """``count`` draws of one row, by the operations the sampler composes."""
    rows = torch.tensor(logits / temperature, dtype=torch.float32).expand(count, -1)
    probs, keys = rows.softmax(-1), many_keys(count)
    if (min_p, top_k, top_p) == (0.0, 0, 1.0):
        return sampling.draw(probs, keys).numpy()
    floor = sampling.min_p_floor(probs, torch.full((count,), min_p))
    if top_k:
        kth = sampling.top_k_floor(probs, torch.full((count,), top_k))
        floor = torch.maximum(floor, kth)
    if top_p == 1.0:
        return sampling.draw_above(probs, floor, keys).numpy()
    return sampling.draw_truncated(probs, floor, torch.full((count,), top_p), keys).numpy()


CASES = [
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 0, 1.0),
    (1.8, 0.0, 0, 1.0),
    (1.0, 0.0, 5, 1.0),
    (1.0, 0.0, 0, 0.6),
    (1.0, 0.0, 0, 0.95),
    (1.0, 0.1, 0, 1.0),
    (1.3, 0.02, 20, 0.8),
]


@pytest.mark.parametrize(("temperature", "min_p", "top_k", "top_p"), CASES)
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_draws_follow_the_law_of_their_parameters(
    temperature: float, min_p: float, top_k: int, top_p: float, spread: float
) -> None:
    logits = np.random.default_rng(7).standard_normal(60) * spread
    count = 20_000
    expected = law(logits, temperature, min_p, top_k, top_p) * count
    observed = np.bincount(
        draws(logits, count, temperature, min_p, top_k, top_p), minlength=len(logits)
    )
    assert observed[expected == 0].sum() == 0
    order = np.argsort(expected)[::-1]
    many = order[expected[order] >= 5]
    few = np.setdiff1d(order, many)
    pairs = [(observed[i], expected[i]) for i in many]
    pairs.append((observed[few].sum(), expected[few].sum()))
    chi2 = sum((o - e) ** 2 / e for o, e in pairs if e > 0)
    freedom = len(many)
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("vocab", [300, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_nucleus_holds_the_same_tokens_as_the_definition(vocab: int, spread: float) -> None:
    random = np.random.default_rng(3)
    for top_p in (0.01, 0.5, 0.9, 0.95, 0.999):
        logits = (random.standard_normal((4, vocab)) * spread).astype(np.float32)
        probs = torch.tensor(logits).softmax(-1)
        floor = sampling.min_p_floor(probs, torch.tensor([0.0, 0.001, 0.0, 0.2]))
        arguments = (probs, floor, torch.full((4,), top_p))
        found, ids, cut, complete = sampling.nucleus(*arguments, vocab)
        assert complete.all()
        for row in range(4):
            kept = ids[row][found[row] >= cut[row]].tolist()
            wanted = law(logits[row], 1.0, [0.0, 0.001, 0.0, 0.2][row], 0, top_p)
            surplus = set(kept) ^ set(np.flatnonzero(wanted).tolist())
            assert len(surplus) <= 1 + vocab // 2000  # float32 probabilities at the very edge


def test_a_first_try_that_is_too_narrow_gives_the_same_draw() -> None:
    probs = (torch.randn(6, 4000, generator=torch.Generator().manual_seed(0)) * 0.05).softmax(-1)
    keys, zero = many_keys(6), torch.zeros(6)
    top_p = torch.tensor([0.3, 0.5, 0.7, 0.9, 0.99, 1.0])
    narrow = sampling.draw_truncated(probs, zero, top_p, keys, divisor=1)
    wide = sampling.draw_truncated(probs, zero, top_p, keys, divisor=4000)
    assert narrow.tolist() == wide.tolist()


def test_top_k_keeps_all_that_tie_and_ignores_values_beyond_the_vocabulary() -> None:
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.1, 0.2, 0.3, 0.4]])
    floor = sampling.top_k_floor(probs, torch.tensor([2, 3]))
    assert (probs >= floor[:, None]).sum(-1).tolist() == [4, 3]
    floor = sampling.top_k_floor(probs, torch.tensor([10**6, 1]))
    assert (probs >= floor[:, None]).sum(-1).tolist() == [4, 1]


def test_a_row_draws_the_same_in_any_batch() -> None:
    """Bit for bit: neither neighbours nor the place in the batch reach a row."""
    generator = torch.Generator().manual_seed(5)
    probs = (torch.randn(33, 3001, generator=generator) * 3).softmax(-1)
    keys = many_keys(33, seed=9)
    floor = sampling.top_k_floor(probs, torch.full((33,), 400))
    top_p = torch.linspace(0.05, 1.0, 33)
    free, cut = sampling.draw(probs, keys), sampling.draw_truncated(probs, floor, top_p, keys)
    noise = sampling.exponential(sampling.noise_bits(keys, torch.arange(3001, dtype=torch.int32)))
    for rows in ([0], [32], [5, 4, 3], list(range(10, 33))):
        index = torch.tensor(rows)
        own = (keys[0][index], keys[1][index])
        assert sampling.draw(probs[index], own).tolist() == free[index].tolist()
        alone = sampling.draw_truncated(probs[index], floor[index], top_p[index], own)
        assert alone.tolist() == cut[index].tolist()
        ids = torch.arange(3001, dtype=torch.int32)
        assert torch.equal(sampling.exponential(sampling.noise_bits(own, ids)), noise[index])


# ---- penalties and log-probabilities ----


def test_penalties_over_several_steps_equal_their_definition() -> None:
    random = np.random.default_rng(11)
    vocab, prompt = 40, [3, 3, 9, 21]
    repetition, frequency, presence = 1.4, 0.6, -0.3
    output: list[int] = []
    counts = torch.zeros(1, vocab, dtype=torch.int32)
    mask = torch.zeros(1, vocab, dtype=torch.bool)
    mask[0, prompt] = True
    for _ in range(12):
        logits = random.standard_normal(vocab) * 4
        expected = logits.copy()
        for token in range(vocab):
            if token in prompt or token in output:
                positive = expected[token] > 0
                expected[token] *= 1 / repetition if positive else repetition
            expected[token] -= frequency * output.count(token)
            expected[token] -= presence * (token in output)
        found = torch.tensor(logits, dtype=torch.float32)[None]
        columns = [torch.tensor([v]) for v in (repetition, frequency, presence)]
        sampling.apply_penalties(found, counts, mask, *columns)
        np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-5, atol=1e-5)
        token = int(found.argmax())
        output.append(token)
        counts[0, token] += 1


def test_logprobs_give_the_token_the_most_likely_and_the_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, float("-inf")], [0.0, float("nan"), 5.0, 1.0]])
    ids, values, ranks = sampling.top_logprobs(logits, torch.tensor([0, 2]), 2)
    assert ids.tolist() == [[0, 1, 2], [2, 2, 3]]
    assert values.tolist() == [[1.0, 3.0, 2.0], [5.0, 5.0, 1.0]]
    assert ranks.tolist() == [3, 1]
    assert not values.isnan().any()


def test_the_most_likely_token_is_the_first_of_equals_and_nan_counts_as_largest() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[1.0, 3.0, 3.0], [-inf, -inf, -inf], [2.0, nan, inf]])
    assert sampling.most_likely(scores).tolist() == scores.argmax(-1).tolist() == [1, 0, 1]
