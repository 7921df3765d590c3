"""-dp 2 on real engines (model R): what the mock cannot show. One server; one engine is killed."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import pytest

from octavo.machine import available_cores
from tests.fixtures import server

FLAGS = ("--dtype", "float32", "-dp", "2")
PROMPTS = [list(range(3 + i, 60 + 3 * i)) for i in range(8)]
WORDS = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8}


@pytest.fixture(scope="module")
def pair(model_r):
    with server.start(model_r, *FLAGS, "--kv-cache-memory-bytes", "16MiB") as running:
        yield running


def ask(running, answers, index, **fields):
    body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{running.url}/v1/completions", json={**body, **fields}, timeout=60)
    answers[index] = answer.json()["choices"][0]["token_ids"]


def together(running, bodies):
    """Token ids of requests sent at once."""
    answers = {}
    threads = [
        threading.Thread(target=ask, args=(running, answers, i), kwargs=body)
        for i, body in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[i] for i in range(len(bodies))]


def admitted(running):
    page = running.client.get("/metrics").text.splitlines()
    found = [line for line in page if line.startswith("octavo_requests_admitted_total")]
    return [float(line.rpartition(" ")[2]) for line in found]


def replicas(running):
    return running.client.get("/server_info").json()["replicas"]


def wait_whole(running):
    deadline = time.monotonic() + 60
    while any(replica["problem"] for replica in replicas(running)):
        assert time.monotonic() < deadline, running.log
        time.sleep(0.1)


def test_greedy_ids_are_those_of_one_engine_on_either_replica(server_r, pair):
    bodies = [{"prompt": prompt} for prompt in PROMPTS]
    one = together(server_r, bodies)
    assert together(pair, bodies) == one
    assert all(count > 0 for count in admitted(pair)), "both were asked"
    assert together(pair, bodies) == one, "from the caches, too"


def test_beams_and_vectors_are_those_of_one_engine(server_r, pair):
    beams = {"prompt": PROMPTS[0], "use_beam_search": True, "n": 3, "temperature": 0}
    vectors = {"input": PROMPTS, "model": None}
    for path, body in (("/v1/completions", beams), ("/v1/embeddings", vectors)):
        body = {key: value for key, value in body.items() if value is not None}
        one, two = (s.client.post(path, json=body).json() for s in (server_r, pair))
        for key in ("choices", "data"):
            assert one.get(key) == two.get(key)
        assert one.get("choices") or one.get("data")


def test_unseeded_draws_are_those_of_the_request_s_id_wherever_it_runs(pair):
    body = {"prompt": PROMPTS[0], "temperature": 1.2, "request_id": "same"}
    drawn = [together(pair, [{**body, "cache_salt": str(i)}])[0] for i in range(6)]
    assert len({tuple(ids) for ids in drawn}) == 1


def test_a_killed_replica_costs_no_whole_answer_and_knows_grammars_again(pair):
    for _ in range(4):
        answer = pair.client.post("/v1/completions", json={"prompt": "is it?", **WORDS})
        assert answer.json()["choices"][0]["text"] in ("yes", "no")
    bodies = [{"prompt": prompt, "max_tokens": 400} for prompt in PROMPTS]
    whole = together(pair, bodies)
    answers = {}
    threads = [
        threading.Thread(target=ask, args=(pair, answers, i), kwargs=body)
        for i, body in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while any(replica["num_running"] == 0 for replica in replicas(pair)) and not answers:
        assert time.monotonic() < deadline
    os.kill(replicas(pair)[1]["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(bodies))] == whole
    assert pair.client.get("/health").status_code == 200
    wait_whole(pair)
    assert [replica["restarts"] for replica in replicas(pair)] == [0, 1]
    before = admitted(pair)
    for index in range(8):  # other keys: the replicas take turns
        body = {"prompt": "is it?", "cache_salt": str(index), **WORDS}
        answer = pair.client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] in ("yes", "no")
    assert all(now > then for now, then in zip(admitted(pair), before))
    assert together(pair, bodies) == whole


def test_each_replica_has_its_share_of_the_machine(pair):
    info = pair.client.get("/server_info").json()
    assert [replica["place"] for replica in info["replicas"]] == ["this machine"] * 2
    assert info["engine"]["reasons"]["data_parallel_size"].startswith("2 replicas")
    assert info["engine"]["threads"] == max(1, available_cores() // 2)
