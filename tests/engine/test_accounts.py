"""What a client counts of its requests. The queue's bounds are tested in test_admission."""

from __future__ import annotations

import asyncio
import random

import pytest

from octavo.config import SchedulerConfig
from octavo.engine.accounts import Accounts, Origin
from octavo.engine.messages import ADMITTED, DROPPED, REJECTED, STARTED, AddRequest, pack_ids
from octavo.engine.streams import RequestStream
from octavo.types import FinishReason, SamplingParams


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


def entered(accounts, loop, handle, n=1, max_tokens=50):
    params = SamplingParams(n=n, max_tokens=max_tokens)
    request = AddRequest(handle, f"r{handle}", pack_ids([1, 2, 3]), params, max_tokens, 0.0)
    stream = RequestStream(loop, range(handle, handle + n))
    accounts.enter(Origin(request), stream)
    return stream


def test_every_sequence_is_counted_once_whatever_becomes_of_it(loop):
    random.seed(3)
    accounts = Accounts(SchedulerConfig(), num_clients=1)
    accounts.begin(max_num_seqs=8)
    num_requests = 0
    handle, reasons = 1, [*(reason.value for reason in FinishReason), REJECTED]
    for _ in range(500):
        if random.random() < 0.4:
            n = random.randint(1, 4)
            entered(accounts, loop, handle, n)
            num_requests += 1
            handle += n
        elif accounts.entries:
            chosen = random.choice([*accounts.entries])
            if random.random() < 0.5:
                accounts.start(chosen, accounts.entries[chosen])
            else:
                accounts.end(chosen, random.choice(reasons))
        open_now = accounts.num_running + accounts.num_waiting
        assert open_now == len(accounts.entries)
        assert accounts.num_admitted == open_now + sum(accounts.ended.values()) == handle - 1
        queued = {entry for entry in accounts.entries.values() if entry.queued}
        assert accounts.gate.num_requests == len(queued)
        assert accounts.num_waiting_tokens == 3 * len(queued)
        tokens = accounts.queue_tokens
        assert tokens[ADMITTED] == 3 * num_requests
        left = tokens[STARTED] + tokens[DROPPED]
        assert tokens[ADMITTED] == left + accounts.num_waiting_tokens
    assert tokens[STARTED] and tokens[DROPPED]


def test_a_stream_ends_with_its_last_sequence(loop):
    accounts = Accounts(SchedulerConfig(), num_clients=1)
    accounts.begin(max_num_seqs=8)
    stream = entered(accounts, loop, 7, n=2)
    accounts.end(7, "stop")
    assert stream.open == {8}
    accounts.end(8, "abort")
    assert not stream.open and not accounts.entries


def test_vectors_and_steps_of_searches_say_nothing_about_the_lengths_of_outputs(loop):
    accounts = Accounts(SchedulerConfig(), num_clients=1)
    accounts.begin(max_num_seqs=8)
    accounts.forecast.on_step(0.01)
    before = accounts.forecast.waits([(10, 500)]).of(0)
    for handle in range(1, 1001):
        entered(accounts, loop, handle, max_tokens=handle % 2)
        accounts.end(handle, "length")
    assert accounts.forecast.waits([(10, 500)]).of(0) == before
