"""Length, the prefix cache, preemption, leaving clients and load: none of it shows in answers."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.asking import COMPLETIONS, streamed
from tests.cases.conftest import KEYS
from tests.fixtures.oracle import oracle
from tests.fixtures.server import Server
from tests.fixtures.waiting import PATIENCE

LIMIT = 2048  # R's length
BLOCK = 16


def ids_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [0, *(rng.randrange(20, 320) for _ in range(length - 1))]


def test_the_length_is_exact_and_nothing_is_cut(random_model: Server, model_r: Path):
    """T34: the last token that fits is served; one more is refused with both numbers."""
    prompt = ids_of(LIMIT - 1, 1)
    answer = random_model.complete(prompt, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == LIMIT - 1
    assert answer["choices"][0]["token_ids"] == oracle(model_r).greedy(prompt, 1)
    for ids, fields in (
        (prompt, {"max_tokens": 2}),
        (ids_of(LIMIT, 1), {"max_tokens": 1}),
        (ids_of(LIMIT + 1, 1), {"max_tokens": 1}),
        (ids_of(10 * LIMIT, 1), {"max_tokens": 1}),
        (ids_of(4, 1), {"max_tokens": 10**9}),
    ):
        for stream in (False, True):
            body = {"prompt": ids, "stream": stream, **fields}
            refused = random_model.client.post(COMPLETIONS, json=body)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert str(LIMIT) in message and str(len(ids)) in message


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1500])
def test_a_warm_cache_gives_the_tokens_of_a_cold_one(
    random_model: Server, model_r: Path, length: int
):
    """T36: the same prompt four times, its last block full or not."""
    prompt, salt = ids_of(length, length), f"warm {length}"
    expected = oracle(model_r).greedy(prompt, 6)
    cached = []
    for _ in range(4):
        answer = random_model.complete(prompt, max_tokens=6, ignore_eos=True, cache_salt=salt)
        assert answer["choices"][0]["token_ids"] == expected
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, length - 1, length - 1, length - 1]


def ask_in_parallel(server: Server, bodies: list[dict[str, Any]], at_once: int) -> list[Any]:
    """Whole answers in the order of ``bodies``, each with its own key where it names one."""

    def ask(body: dict[str, Any]) -> Any:
        body = dict(body)
        headers = {"authorization": f"Bearer {body.pop('key', KEYS[0])}"}
        answer = httpx.post(
            server.url + COMPLETIONS, json=body, headers=headers, timeout=2 * PATIENCE
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, bodies))


def test_conversations_that_evict_each_other_are_never_mixed_up(tight: Server, model_r: Path):
    """T36: 30 conversations of two turns by two keys, four at once, in a pool that holds two."""
    turns = [ids_of(30 + index, index) for index in range(30)]
    common = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    for _ in range(2):
        bodies = [
            {"prompt": ids, "key": KEYS[index % 2], **common} for index, ids in enumerate(turns)
        ]
        for index, answer in enumerate(ask_in_parallel(tight, bodies, 8)):
            said = answer["choices"][0]["token_ids"]
            assert said == oracle(model_r).greedy(turns[index], 8)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < len(turns[index])
            turns[index] = [*turns[index], *said, *ids_of(9, 100 + index)[1:]]


def test_a_key_finds_nothing_of_another_keys_cache(tight: Server):
    """T36."""
    prompt = [19, *ids_of(59, 77)]  # no other prompt begins so
    cached = []
    for key in (KEYS[0], KEYS[0], KEYS[1], KEYS[1]):
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "key": key}
        (answer,) = ask_in_parallel(tight, [body], 1)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 59, 0, 59]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 9}], ids=str)
def test_preemption_shows_in_the_counter_only(tight: Server, fields: dict[str, Any]):
    """T37: whole and streamed answers, with stop strings and log-probabilities, equal those of
    requests that ran alone."""
    bodies = [
        {
            "prompt": ids_of(20 + 7 * index, 200 + index),
            "max_tokens": 60,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "stop": ["qqq", "zzz"],
            **fields,
        }
        for index in range(6)
    ]
    alone = [ask_in_parallel(tight, [body], 1)[0] for body in bodies]
    before = tight.metrics()["vllm:num_preemptions_total"]
    for index, answer in enumerate(ask_in_parallel(tight, bodies, 6)):
        found, expected = answer["choices"][0], alone[index]["choices"][0]
        assert found["token_ids"] == expected["token_ids"] and len(found["token_ids"]) == 60
        assert found["text"] == expected["text"]
        for value, other in zip(
            found["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"]
        ):
            assert abs(value - other) < 1e-4
    with ThreadPoolExecutor(6) as pool:
        streams = list(pool.map(lambda body: streamed(tight, COMPLETIONS, **body), bodies))
    for (heard,), usage in streams:
        index = [s[0][0].text for s in streams].index(heard.text)
        assert heard.text == alone[index]["choices"][0]["text"]
        assert usage["completion_tokens"] == 60
    assert tight.metrics()["vllm:num_preemptions_total"] > before


async def leave(server: Server, body: dict[str, Any], after: str) -> None:
    """Sends a request and closes the connection: at once, soon, or after the first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    raw = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    await writer.drain()
    if after == "soon":
        await asyncio.sleep(0.02)
    elif after == "first bytes":
        await asyncio.wait_for(reader.read(1), PATIENCE)
    writer.transport.abort()


def test_three_hundred_clients_that_leave_cost_the_next_one_nothing(random_model: Server):
    """T38: dropped while queued, while their prompt is computed, or in mid-stream."""
    fields = {"max_tokens": 500, "ignore_eos": True, "temperature": 0}

    async def crowd() -> None:
        clients = []
        for index in range(300):
            stream = index % 2 == 0
            after = ("at once", "soon", "first bytes" if stream else "soon")[index % 3]
            body = {"prompt": ids_of(200, index), "stream": stream, **fields}
            clients.append(leave(random_model, body, after))
        for start in range(0, 300, 50):
            await asyncio.gather(*clients[start : start + 50])

    generated = random_model.metrics()["vllm:generation_tokens_total"]
    asyncio.run(crowd())
    before = random_model.wait_idle()
    assert before["vllm:generation_tokens_total"] - generated < 300 * 500 / 2
    random_model.complete([0, 8, 9], max_tokens=4)
    after = random_model.metrics()
    assert after["octavo_requests_admitted_total"] == before["octavo_requests_admitted_total"] + 1


@pytest.mark.parametrize("at_once", [4, 16])
def test_greedy_answers_under_load_are_those_of_idle_times(random_model: Server, at_once: int):
    """T40: same ids, and log-probabilities within float32's rounding."""
    bodies = [
        {
            "prompt": ids_of(5 + 11 * index, 400 + index),
            "max_tokens": 24,
            "temperature": 0,
            "logprobs": 1,
            "return_token_ids": True,
            "cache_salt": f"load {at_once}",
        }
        for index in range(20)
    ]
    alone = [ask_in_parallel(random_model, [{**body, "cache_salt": "a"}], 1)[0] for body in bodies]
    for answer, expected in zip(ask_in_parallel(random_model, bodies, at_once), alone):
        found, other = answer["choices"][0], expected["choices"][0]
        assert found["token_ids"] == other["token_ids"]
        pairs = zip(found["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"])
        assert all(abs(a - b) < 1e-4 for a, b in pairs)
