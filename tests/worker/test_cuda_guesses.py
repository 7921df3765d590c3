"""Speculation on the GPU's runner: guesses made and compared on the device change no answer."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from octavo.engine.messages import AddRequest, pack_ids
from octavo.ops.triton import guesses
from octavo.ops.triton.step import RECORD, StepBuffers
from octavo.speculation import SpeculativeConfig
from octavo.types import SamplingParams
from octavo.worker.executor import CudaExecutor
from octavo.worker.speculative.ngram import continuation
from tests.exactness.toy_engine import Free
from tests.worker.interpreted import Interpreted
from tests.worker.test_cuda_engine import make_engine, served_alone, served_together

KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0},
    {"temperature": 0.3, "ignore_eos": True},
    {"temperature": 0, "ignore_eos": True, "n": 2},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 4},
]


def make_requests(count: int, seed: int) -> list[AddRequest]:
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        part = [rng.randrange(2, 97) for _ in range(rng.randint(2, 5))]
        prompt = (part * 8)[: rng.randint(4, 14)]
        max_tokens = rng.randint(16, 40)
        kind = {**KINDS[index % len(KINDS)]}
        if index == count - 1:
            kind["logprobs"], max_tokens = 2, 4  # nobody guesses beside it
        params = SamplingParams(max_tokens=max_tokens, seed=1000 * index, **kind)
        requests.append(
            AddRequest(100 * index, str(index), pack_ids(prompt), params, max_tokens, 0.0)
        )
    return requests


def test_answers_are_those_without_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(6, seed=44)
    aborted = {requests[2].handle}
    speculative = SpeculativeConfig(spec_method="ngram", num_speculative_tokens=5)
    runner = Interpreted(monkeypatch, speculative=speculative)
    executor = CudaExecutor(runner.gpu)
    engine = make_engine(executor, 40, "cuda", spec_method="ngram", num_speculative_tokens=5)
    assert engine._speculation is not None
    engine._speculation._cost = Free()
    while executor.idle():
        pass
    expected = served_alone(requests)
    found = served_together(engine, requests, aborted, seed=5)

    for handle, tokens in expected.tokens.items():
        mine = found.tokens.get(handle, [])
        if handle // 100 * 100 in aborted:
            assert mine == tokens[: len(mine)]
        else:
            assert mine == tokens
            assert found.reasons[handle] == expected.reasons[handle]
            assert found.logprobs.get(handle) == expected.logprobs.get(handle)
    stats = engine.stats()
    assert stats.num_accepted_drafts > 20, "hardly anything was guessed"
    assert stats.blocks_used == 0
    engine.scheduler.check()


def test_the_kernel_guesses_as_the_definition() -> None:
    """Texts of few ids, so that many suffixes stand elsewhere; with too little room for some."""
    rng, slots, longest_text, queries, block = random.Random(3), 7, 60, 6, 4
    device = torch.device("cpu")
    history = torch.zeros(slots, longest_text + 1, dtype=torch.int32)
    width = -(-(longest_text + 1 + queries) // block)
    table = torch.arange(slots * width, dtype=torch.int32).view(slots, width)
    lengths = torch.zeros(slots, dtype=torch.int32)
    buffers = StepBuffers.allocate(64, 64, width, 8, device)
    for _ in range(6):
        for slot in range(slots):
            length = rng.randint(1, longest_text - queries)
            lengths[slot] = length
            history[slot, :length] = torch.tensor([rng.randrange(3) for _ in range(length)])
        most = [rng.randint(0, queries - 1) for _ in range(slots)]
        records = np.zeros((slots + 1, RECORD), dtype=np.int32)
        records[:, 0] = [*rng.sample(range(slots), slots), -1]
        records[:-1, 2] = np.array(most) + 1
        buffers.staged[: records.size] = torch.from_numpy(records.ravel())
        guessed = torch.full((slots + 1,), -7, dtype=torch.int32)
        guesses.begin_guesses(
            buffers, slots + 1, queries, history, table, lengths, guessed, block, 2, 4, False
        )
        for row in range(slots):
            slot, length = int(records[row, 0]), int(lengths[records[row, 0]])
            text = history[slot, :length].numpy()
            found, matched = continuation(text, text, 2, 4, most[row])
            found = found[:matched]
            at = slice(row * queries, row * queries + 1 + len(found))
            assert int(guessed[row]) == len(found)
            assert buffers.token_ids[at].tolist() == [int(text[-1]), *found.tolist()]
            positions = list(range(length - 1, length + len(found)))
            assert buffers.positions[at].tolist() == positions
            places = [int(table[slot, p // block]) * block + p % block for p in positions]
            assert buffers.slot_mapping[at].tolist() == places
            rest = slice(at.stop, (row + 1) * queries)
            assert (buffers.slot_mapping[rest] == -1).all() and (
                buffers.draw_slots[rest] == -1
            ).all()
            assert int(buffers.seq_lens[row]) == length - 1 + queries
        assert int(guessed[slots]) == int(buffers.seq_lens[slots]) == 0


def test_rows_keep_what_was_drawn_up_to_the_first_wrong_guess() -> None:
    queries = 4
    buffers = StepBuffers.allocate(16, 16, 2, 0, torch.device("cpu"))
    buffers.draw_slots[:12] = torch.tensor([2, 2, 2, 2, 0, 0, -1, -1, -1, -1, -1, -1])
    buffers.draw_positions[:12] = torch.tensor([9, 10, 11, 12, 5, 6, 7, 8, 1, 1, 1, 1])
    buffers.token_ids[:12] = torch.tensor([1, 7, 8, 9, 1, 3, 0, 0, 0, 0, 0, 0])
    guessed = torch.tensor([3, 1, 0], dtype=torch.int32)
    drawn = torch.tensor([7, 8, 5, 6, 4, 2, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
    lengths, counts = torch.tensor([5, 0, 9], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    guesses.accept(buffers, 3, queries, drawn, guessed, lengths, counts)
    assert counts.tolist() == [3, 1, 0]
    assert lengths.tolist() == [6, 0, 12]


def test_a_script_accepts_as_often_as_it_says() -> None:
    queries, rows = 6, 120
    buffers = StepBuffers.allocate(rows * queries, rows * queries, 2, 0, torch.device("cpu"))
    slots = torch.arange(rows, dtype=torch.int32).repeat_interleave(queries)
    buffers.draw_slots[:] = slots
    buffers.draw_positions[:] = torch.arange(rows * queries) % queries + 100 + slots % 17
    guessed = torch.full((rows,), queries - 1, dtype=torch.int32)
    lengths, counts = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    drawn = torch.zeros(rows * queries, dtype=torch.int32)
    guesses.accept(buffers, rows, queries, drawn, guessed, lengths, counts, 0.7)
    expected = sum(0.7**k for k in range(queries))
    assert counts.float().mean().item() == pytest.approx(expected, rel=0.12)
    guesses.accept(buffers, rows, queries, drawn, guessed, lengths, counts, 0.0)
    assert (counts == 1).all()
