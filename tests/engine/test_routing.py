"""Which replica a request goes to, without any replica."""

from __future__ import annotations

import random
import time

import numpy as np

from octavo.engine.routing import (
    BLOCK_TOKENS,
    FINE_TOKENS,
    HALF_LIFE,
    LARGE_BLOCK_TOKENS,
    KnownPrefixes,
    Load,
    RecentWork,
    Router,
    chain_keys,
    hint_of,
    tokens_of,
)

CACHE = 1 << 20


def ids(*values):
    return np.asarray(values, dtype="<i4").tobytes()


def prompt(seed, num_tokens):
    return np.random.default_rng(seed).integers(0, 1000, num_tokens, dtype="<i4").tobytes()


def router(num=2, cache=CACHE):
    made = Router()
    for index in range(num):
        made.add(index, cache)
    return made


def idle(num=2):
    return {index: Load(0.0, 0.0) for index in range(num)}


def test_keys_are_chained_over_salt_and_ids():
    one = chain_keys(b"", ids(*range(3 * BLOCK_TOKENS + 5)))
    assert len(one) == len(set(one)) == 3, "a block that is not full has no key"
    assert chain_keys(b"", ids(*range(2 * BLOCK_TOKENS))) == one[:2]
    assert not set(one) & set(chain_keys(b"salt", ids(*range(3 * BLOCK_TOKENS))))
    # Equal blocks behind another beginning are other blocks.
    changed = chain_keys(b"", ids(7, *range(1, 3 * BLOCK_TOKENS)))
    assert not set(one) & set(changed)


def test_blocks_of_long_prompts_grow():
    keys = chain_keys(b"", prompt(0, FINE_TOKENS + 3 * LARGE_BLOCK_TOKENS + 5))
    assert len(keys) == FINE_TOKENS // BLOCK_TOKENS + 3
    assert tokens_of(len(keys)) == FINE_TOKENS + 3 * LARGE_BLOCK_TOKENS
    assert tokens_of(2) == 2 * BLOCK_TOKENS


def test_bisection_finds_what_a_plain_walk_finds_whatever_was_evicted():
    random.seed(5)
    known = KnownPrefixes(40 * BLOCK_TOKENS)
    trunk = prompt(1, 8 * BLOCK_TOKENS)
    chains = [
        chain_keys(b"", trunk[: 4 * BLOCK_TOKENS * random.randint(0, 8)] + prompt(i, 700))
        for i in range(2, 30)
    ]
    for _ in range(300):
        known.use(random.choice(chains))
        assert known.num_tokens <= known.most_tokens
        for chain in random.sample(chains, 5):
            walked = next((i for i, k in enumerate(chain) if k not in known._keys), len(chain))
            assert known.matched(chain) == walked
            assert not any(key in known._keys for key in chain[walked:]), "no holes"


def test_the_longest_shared_prefix_wins_where_loads_are_equal():
    made, keys = router(3), chain_keys(b"", prompt(0, 640))
    made.use(1, keys[:4])
    made.use(2, keys[:9])
    assert made.choose(keys, 640, idle(3)) == (2, 9 * BLOCK_TOKENS)
    made.forget(2)
    assert made.choose(keys, 640, idle(3)) == (1, 4 * BLOCK_TOKENS)


def test_without_a_prefix_the_least_loaded_is_taken():
    loads = {0: Load(900.0, 0.0), 1: Load(300.0, 0.0), 2: Load(500.0, 0.0)}
    assert router(3).choose([], 10, loads) == (1, 0)
    assert router(3).choose(chain_keys(b"", prompt(0, 640)), 640, loads) == (1, 0)


def test_a_prefix_is_worth_the_tokens_that_it_saves():
    made, keys = router(), chain_keys(b"", prompt(0, 640))
    made.use(0, keys)
    waits = lambda tokens: {0: Load(tokens, 0.0), 1: Load(0.0, 0.0)}  # noqa: E731
    assert made.choose(keys, 640, waits(600.0))[0] == 0
    assert made.choose(keys, 640, waits(2 * 640 + 1.0))[0] == 1


def test_a_short_common_prefix_draws_nobody_to_a_replica_that_has_done_more():
    """The balance guard: recent work counts, though nothing waits anywhere."""
    made, keys = router(), chain_keys(b"", prompt(0, 128))
    made.use(0, keys)
    assert made.choose(keys, 160, {0: Load(0.0, 10_000.0), 1: Load(0.0, 9_000.0)})[0] == 0
    assert made.choose(keys, 160, {0: Load(0.0, 10_000.0), 1: Load(0.0, 7_000.0)})[0] == 1


def test_a_lone_conversation_stays_where_its_history_is():
    made, work = router(), [RecentWork(), RecentWork()]
    history, done, now = b"", [0, 0], 0.0
    for turn in range(30):
        history += prompt(turn, 150)
        now += 3.0
        keys, length = chain_keys(b"", history), len(history) // 4
        loads = {i: Load(0.0, work[i].update(done[i], now)) for i in (0, 1)}
        chosen, cached = made.choose(keys, length, loads)
        assert chosen == 0
        made.use(chosen, keys)
        done[chosen] += length - cached + 50
        history += prompt(1000 + turn, 50)


def test_one_hot_system_prompt_is_spread_over_all():
    """400 conversations that begin with the same 1,000 tokens, one after the other."""
    made, work, done = router(4), [RecentWork() for _ in range(4)], [0] * 4
    system, now = prompt(0, 1024), 0.0
    for index in range(400):
        text = system + prompt(index + 1, 100)
        keys = chain_keys(b"", text)
        now += 0.1
        loads = {i: Load(0.0, work[i].update(done[i], now)) for i in range(4)}
        chosen, cached = made.choose(keys, 1124, loads)
        made.use(chosen, keys)
        done[chosen] += 1124 - cached + 128
    assert max(done) < 0.3 * sum(done)


def test_no_replica_gets_more_than_its_part_for_its_prefixes():
    """Conversations of very different lengths in groups, several turns, in any order."""
    random.seed(2)
    made, work, done = router(), [RecentWork(), RecentWork()], [0, 0]
    groups = [prompt(i, 512) for i in range(3)]
    talks = [groups[i % 3] for i in range(40)]
    hits = total = 0
    now = 0.0
    for turn in range(40 * 6):
        i = random.randrange(40)
        talks[i] += prompt(5000 + turn, random.randint(20, 300))
        keys, length = chain_keys(b"", talks[i]), len(talks[i]) // 4
        now += 0.2
        loads = {r: Load(0.0, work[r].update(done[r], now)) for r in (0, 1)}
        chosen, cached = made.choose(keys, length, loads)
        made.use(chosen, keys)
        done[chosen] += length - cached + 60
        hits, total = hits + cached, total + length
    assert max(done) < 0.6 * sum(done)
    assert hits > 0.7 * total


def test_a_client_s_hint_keeps_requests_together_where_no_prefix_is_known():
    routers = [router(4), router(4)]  # of API processes that know nothing of each other
    places = {}
    for name in range(64):
        hint = hint_of(b"", str(name))
        chosen = {made.choose([], 50, idle(4), hint)[0] for made in routers}
        assert len(chosen) == 1
        places[name] = chosen.pop()
    assert len(set(places.values())) == 4
    assert hint_of(b"", None) == b"" and hint_of(b"a", "x") != hint_of(b"b", "x")
    # It gives way to load, to balance, and to a prefix that is known.
    hint, place = hint_of(b"", "0"), places[0]
    busy = {i: Load(600.0 if i == place else 0.0, 0.0) for i in range(4)}
    assert routers[0].choose([], 400, busy, hint)[0] != place
    spent = {i: Load(0.0, 9000.0 if i == place else 0.0) for i in range(4)}
    assert routers[0].choose([], 400, spent, hint)[0] != place
    keys = chain_keys(b"", prompt(0, 640))
    routers[0].use((place + 1) % 4, keys)
    assert routers[0].choose(keys, 640, idle(4), hint)[0] == (place + 1) % 4


def test_recent_work_fades_and_a_newcomer_begins_where_the_others_are():
    work = RecentWork()
    assert work.update(1000, 10.0) == 1000
    assert work.update(1000, 10.0 + HALF_LIFE) == 500
    assert work.update(1300, 10.0 + HALF_LIFE) == 800
    work.restart(750.0, 0, 100.0)
    assert work.update(20, 100.0) == 770


def test_routing_a_long_prompt_takes_less_than_the_loop_may_be_held():
    made, text = router(8), prompt(0, 8192)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        keys = chain_keys(b"", text)
        chosen, _ = made.choose(keys, 8192, idle(8))
        made.use(chosen, keys)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.005  # 0.2 ms on an idle core of 2024
