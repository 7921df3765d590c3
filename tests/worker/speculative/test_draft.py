"""A draft model computes what is missing of a request, once, and nothing that is wrong stays."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.core.plan import StepPlan
from octavo.engine.verify_cost import VerifyCosts
from octavo.model.batch import ForwardBatch
from octavo.model.shard import ALONE
from octavo.speculation import Speculating
from octavo.types import ConfigError
from octavo.worker import runner
from octavo.worker.batch import BatchBuilder
from octavo.worker.draws import Drawer
from octavo.worker.slots import Slots
from octavo.worker.speculative.draft import IGNORED, DraftModel, DraftProposer
from tests.fixtures import models
from tests.worker.plans import New, Row, SumModel, int32, plan

BLOCK, BLOCKS, MAX_LEN = 4, 40, 48


class Counted(SumModel):
    """Notes the tokens of each of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def forward(self, batch: ForwardBatch, cache: list[Tensor], hidden: None = None) -> Tensor:
        self.batches.append(len(batch.token_ids))
        return super().forward(batch, cache, hidden)

    def hidden(self, ids: list[int]) -> Tensor:
        """Of the last of ``ids``, computed anew."""
        places = torch.arange(1, len(ids) + 1).float()[:, None]
        return (self.embedding[torch.tensor(ids)] * places).sum(0)


class Bench:
    """A draft model beside the slots; the target is whoever appends tokens to them."""

    def __init__(self, max_tokens: int = 64) -> None:
        self.model = Counted()
        self.slots = Slots(6, MAX_LEN, BLOCK, SumModel.vocab)
        batches = BatchBuilder(self.slots, max_tokens, 6)
        model: Any = self.model
        self.draft = DraftModel(model, BLOCKS, self.slots, batches)
        drawer = Drawer(model, self.slots, ALONE, False, 64, IGNORED)
        self.proposer = DraftProposer(self.draft, self.slots, batches, drawer)

    def apply(self, given: StepPlan) -> None:
        self.proposer.apply(given)
        self.slots.apply(given)

    def place(self, slot: int, ids: list[int], blocks: list[int], start: int = 0, **new: Any):
        row = Row(slot, start, len(ids) - start, draw=True, blocks=blocks)
        self.apply(plan(row, new=(New(slot, ids, **new),)))

    def append(self, slot: int, *tokens: int) -> None:
        for token in tokens:
            own = int32([slot])
            self.slots.append(own, self.slots.length[own], torch.tensor([token]))

    def known(self, slot: int) -> list[int]:
        return self.slots.history_host[slot, : self.slots.length[slot]].tolist()

    def prepare(self, *slots: int) -> list[int]:
        """Checks what comes out. Returns the tokens of each batch that was computed."""
        self.model.batches.clear()
        hidden = self.draft.prepare(int32(slots))
        for row, slot in zip(hidden, slots):
            assert torch.equal(row, self.model.hidden(self.known(slot)))
        return list(self.model.batches)

    def propose(self, slots: list[int], most: list[int]) -> list[list[int]]:
        counts, ids = self.proposer.propose(int32(slots), int32(most))
        return [row[:count].tolist() for row, count in zip(ids, counts)]

    def greedy(self, slot: int, count: int) -> list[int]:
        ids = self.known(slot)
        for _ in range(count):
            ids.append(int(self.model.expected(ids).argmax()))
        return ids[len(ids) - count :]


def ids(count: int, start: int = 5) -> list[int]:
    return [(start + 7 * i) % 97 for i in range(count)]


def test_it_catches_up_in_as_many_passes_as_its_buffers_need() -> None:
    bench = Bench(max_tokens=6)
    for slot, count in enumerate((13, 1, 4, 7)):
        bench.place(slot, ids(count, slot), [5 * slot + place for place in range(4)])
    assert bench.prepare(0, 1, 2, 3) == [6, 6, 6, 6, 1]
    bench.append(0, 1)
    bench.append(2, 1, 2, 3)
    assert bench.prepare(2, 0, 1) == [5]  # one that has drawn nothing computes its last token anew
    assert bench.prepare(3, 1) == [2]


def test_guesses_are_its_own_greedy_tokens_and_wrong_ones_leave_no_trace() -> None:
    bench = Bench()
    bench.place(0, ids(6), [0, 1, 2, 3])
    bench.place(1, ids(9, 50), [4, 5, 6, 7])
    expected = [bench.greedy(0, 5), bench.greedy(1, 2)]
    assert bench.propose([0, 1], [5, 2]) == expected
    assert bench.known(0) == ids(6)  # guesses are not known
    wrong = (expected[0][1] + 1) % 97
    bench.append(0, expected[0][0], wrong)
    bench.append(1, *expected[1], 3)
    assert bench.prepare(0, 1) == [5]
    assert bench.propose([1, 0], [3, 4]) == [bench.greedy(1, 3), bench.greedy(0, 4)]


def test_rows_may_want_none_or_more_than_there_are_positions() -> None:
    bench = Bench()
    bench.place(0, ids(MAX_LEN - 2), [*range(12)])
    bench.place(1, ids(5), [20, 21])
    assert bench.propose([0, 1], [5, 0]) == [bench.greedy(0, 2), []]
    bench.append(0, 4, 4)
    assert bench.propose([0, 1], [5, 0]) == [[], []]


def test_no_more_is_guessed_than_the_draft_knows_positions() -> None:
    bench = Bench()
    bench.draft.max_len = 8
    bench.place(0, ids(6), [0, 1, 2, 3])
    assert bench.propose([0], [5]) == [bench.greedy(0, 2)]


def test_a_draft_draws_with_the_noise_of_the_targets_draws() -> None:
    bench = Bench()
    params = SamplingParams(temperature=2.0, top_k=20, logprobs=4)
    bench.place(0, ids(6), [0, 1, 2, 3], params=params, seed=77)
    bench.slots.temperature[0] = 20.0
    guesses = bench.propose([0], [4])[0]
    assert guesses != bench.greedy(0, 4)
    model: Any = bench.model
    drawer = Drawer(model, bench.slots, ALONE, False, 64)
    for guess in guesses:
        hidden = bench.model.hidden(bench.known(0))[None]
        drawn = drawer.choose(hidden, int32([0]), bench.slots.length[:1])
        assert drawn.tokens.tolist() == [guess]
        bench.append(0, guess)


@pytest.mark.parametrize("prepared", [True, False])
def test_blocks_of_another_request_count_as_far_as_they_are_filled(prepared: bool) -> None:
    bench = Bench()
    bench.place(0, ids(10), [0, 1, 2])
    if prepared:
        assert bench.prepare(0) == [10]
    bench.place(1, [*ids(8), 70, 71], [0, 1, 5], start=8)  # a hit of two blocks
    assert bench.prepare(1) == [2 if prepared else 10]
    bench.place(2, [*ids(9), 80], [0, 1, 6], start=9)  # and one token of a copied block
    assert bench.prepare(2) == [2]


def test_a_block_that_goes_to_another_text_is_not_filled_any_more() -> None:
    bench = Bench()
    bench.place(0, ids(9), [0, 1, 2])
    bench.prepare(0)
    bench.apply(plan(freed=(0,)))
    bench.place(1, ids(5, 60), [0, 1])
    bench.place(2, ids(9), [3, 4, 5])
    bench.append(1, 7, 7, 7, 7)
    bench.apply(plan(Row(1, 8, 1, draw=True, blocks=[2], block_start=2)))
    assert bench.prepare(1) == [9]
    assert bench.prepare(2) == [9]


def test_the_next_request_in_a_slot_begins_anew() -> None:
    bench = Bench()
    bench.place(0, ids(9), [0, 1, 2])
    bench.prepare(0)
    bench.apply(plan(freed=(0,)))
    bench.place(0, ids(9, 33), [3, 4, 5])
    assert bench.prepare(0) == [9]
    bench.apply(plan(freed=(0,)))
    bench.place(0, ids(9), [0, 1, 6], start=8)
    assert bench.prepare(0) == [1]


class Life:
    """Requests that share blocks as the scheduler shares them, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(max_tokens=self.rng.choice((6, 9, 64)))
        self.tables: dict[int, list[int]] = {}
        self.free = list(range(BLOCKS))
        self.found: dict[tuple[int, ...], int] = {}  # all ids up to a block's end -> the block
        self.num_hits = self.num_computed = 0

    def step(self) -> None:
        do = self.rng.choice((self.place, self.grow, self.grow, self.guess, self.prepare, self.end))
        if do == self.place or self.tables:
            do()

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        self.found = {key: block for key, block in self.found.items() if block not in taken}
        return taken

    def place(self) -> None:
        slots = [slot for slot in range(6) if slot not in self.tables]
        if not slots or len(self.free) < 12:
            return
        rng, slot = self.rng, slots[0]
        tokens = [rng.randrange(2, 97) for _ in range(rng.randint(1, 14))]
        if self.found and rng.random() < 0.8:
            tokens = list(rng.choice(list(self.found))) + tokens
        tokens, hits = tokens[:30], []
        while len(tokens) > (end := BLOCK * (len(hits) + 1)):
            if (block := self.found.get(tuple(tokens[:end]))) is None:
                break
            hits.append(block)
        self.free = [block for block in self.free if block not in hits]
        self.num_hits += len(hits)
        self.tables[slot] = hits + self.take(-(-(len(tokens) + 1) // BLOCK) - len(hits))
        self.bench.place(slot, tokens, self.tables[slot], BLOCK * len(hits))
        self.register(slot)

    def grow(self) -> None:
        slot = self.rng.choice(list(self.tables))
        table, length = self.tables[slot], len(self.bench.known(slot))
        count = self.rng.randint(1, 4)
        if length + count + 6 > MAX_LEN or len(self.free) < 4:
            return
        missing = self.take(max(0, -(-(length + count + 5) // BLOCK) - len(table)))
        row = Row(slot, length - 1, 1, draw=True, blocks=missing, block_start=len(table))
        self.bench.apply(plan(row))
        table += missing
        self.bench.append(slot, *(self.rng.randrange(2, 97) for _ in range(count)))
        self.register(slot)

    def register(self, slot: int) -> None:
        known = self.bench.known(slot)
        for place in range((len(known) - 1) // BLOCK):
            self.found.setdefault(tuple(known[: BLOCK * (place + 1)]), self.tables[slot][place])

    def some(self) -> list[int]:
        return self.rng.sample(list(self.tables), self.rng.randint(1, len(self.tables)))

    def prepare(self) -> None:
        self.num_computed += sum(self.bench.prepare(*self.some()))

    def guess(self) -> None:
        slots = self.some()
        room = [len(self.tables[s]) * BLOCK - len(self.bench.known(s)) for s in slots]
        most = [min(self.rng.randint(0, 3), max(0, r)) for r in room]
        expected = [self.bench.greedy(slot, count) for slot, count in zip(slots, most)]
        assert self.bench.propose(slots, most) == expected

    def end(self) -> None:
        slot = self.rng.choice(list(self.tables))
        self.bench.apply(plan(freed=(slot,)))
        held = {block for other, table in self.tables.items() if other != slot for block in table}
        left = [block for block in self.tables.pop(slot) if block not in held]
        self.free += left


@pytest.mark.parametrize("seed", range(8))
def test_whatever_shares_its_blocks_is_computed_right(seed: int) -> None:
    life = Life(seed)
    for _ in range(120):
        life.step()
    assert life.num_hits > 3 and life.num_computed > 20


# ---- in engines ----


def start(path: Path, **config: Any) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        cpu_threads=1,
        kv_cache_memory_bytes=1 << 20,
        max_model_len=64,
        speculative_config=config,
    )


def test_a_draft_of_another_vocabulary_is_refused(model_r: Path) -> None:
    with pytest.raises(ConfigError, match=r"R-vpad has a vocabulary of 384 tokens, the model one"):
        start(model_r, model=str(models.path("R-vpad")))


@pytest.mark.parametrize("num_layers", [2, 3])
def test_as_many_layers_as_the_model_has_are_no_draft(num_layers: int, model_r: Path) -> None:
    with pytest.raises(ConfigError, match=f"draft_layers {num_layers}, the model has 2: use 1 to"):
        start(model_r, draft_layers=num_layers)


def test_the_draft_counts_in_the_memory_plan(model_r: Path) -> None:
    with (
        closing(start(model_r, model=str(model_r))) as both,
        closing(start(model_r, method="ngram")) as alone,
    ):
        assert both.info.num_blocks == alone.info.num_blocks // 2
        assert both.info.weight_bytes == 2 * alone.info.weight_bytes
        assert "draft_model" in both.info.reasons["speculation"]


@pytest.fixture
def one_layer(tmp_path: Path) -> Path:
    """R's first layer as a model."""
    weights = models.random_llama(models.R_CONFIG, seed=20261129)
    kept = {name: value for name, value in weights.items() if "layers.1." not in name}
    models.write_llama(tmp_path, {**models.R_CONFIG, "num_hidden_layers": 1}, kept)
    return tmp_path


def test_first_layers_guess_what_a_model_of_these_layers_would(
    model_r: Path, one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the target's own keys and values, of prompts in chunks and of accepted guesses."""
    monkeypatch.setattr(VerifyCosts, "seconds", lambda self, rows, guesses: np.ones(len(guesses)))
    noted: list[tuple[list[int], list[int]]] = []

    def noting(wanted: Speculating, slots: Slots, drafts: Any) -> Any:
        propose = drafts.propose

        def note(own: np.ndarray, most: np.ndarray) -> Any:
            counts, guesses = propose(own, most)
            for row, slot in enumerate(own.tolist()):
                known = slots.history_host[slot, : slots.length[slot]].tolist()
                noted.append((known, guesses[row, : counts[row]].tolist()))
            return counts, guesses

        drafts.propose = note
        return drafts

    monkeypatch.setattr(runner, "make_proposer", noting)
    prompts = [[0, *ids(23)], [0, 9], [0, *ids(30, 40)]]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    with closing(start(model_r, draft_layers=1, num_speculative_tokens=4)) as llm:
        llm.generate(prompts, greedy, use_tqdm=False)
    params = [greedy.clone(max_tokens=len(guesses)) for _, guesses in noted]
    settings = {"dtype": "float32", "cpu_threads": 1, "kv_cache_memory_bytes": 1 << 20}
    with closing(LLM(str(one_layer), skip_tokenizer_init=True, **settings)) as llm:
        answers = llm.generate([known for known, _ in noted], params, use_tqdm=False)
    assert len(noted) > 10
    assert [answer.outputs[0].token_ids for answer in answers] == [guesses for _, guesses in noted]
