import numpy as np
import pytest

from octavo.core.block_pool import BlockPool, PrefixKeys, root_key


def ids(*values):
    return np.array(values, dtype=np.int32)


def chain_of(pool, tokens, salt=b""):
    chain = PrefixKeys(root_key(salt), pool.block_size)
    chain.extend(tokens)
    return chain


def fill(pool, tokens, salt=b""):
    """Takes blocks for ``tokens`` and registers all full ones, and the open one."""
    chain = chain_of(pool, tokens, salt)
    size = pool.block_size
    blocks = pool.take(-(-len(tokens) // size))
    for index, block in enumerate(blocks):
        part = tokens[index * size : (index + 1) * size]
        key = chain.keys[index] if len(part) == size else None
        pool.register(block, chain.parent(index), part.tobytes(), key)
    return blocks


def test_equal_prefix_is_found_and_shared():
    pool = BlockPool(8, 4)
    tokens = ids(1, 2, 3, 4, 5, 6, 7, 8, 9)
    blocks = fill(pool, tokens)
    match = pool.match(tokens, chain_of(pool, tokens), limit=8)
    assert (match.blocks, match.num_tokens, match.partial) == (blocks[:2], 8, 0)
    pool.hold(match.blocks)
    assert pool.references(blocks[0]) == 2
    pool.check([blocks, match.blocks])


def test_another_salt_finds_nothing():
    pool = BlockPool(8, 4)
    tokens = ids(1, 2, 3, 4, 5)
    fill(pool, tokens, salt=b"a")
    assert pool.match(tokens, chain_of(pool, tokens, b"b"), limit=4).num_tokens == 0


def test_freed_blocks_are_revived_from_the_middle_of_the_free_list():
    pool = BlockPool(4, 4)
    tokens = ids(*range(16))
    blocks = fill(pool, tokens)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 4)
    match = pool.match(tokens, chain_of(pool, tokens), limit=9)
    assert match.blocks == blocks[:3] and match.partial == 1
    pool.hold(match.blocks[:2])
    assert (pool.num_free, pool.num_cached) == (2, 2)
    pool.check([blocks[:2]])


def test_ends_of_sequences_are_evicted_before_their_beginnings():
    pool = BlockPool(4, 4)
    tokens = ids(*range(16))
    blocks = fill(pool, tokens)
    pool.release(blocks)
    assert pool.take(1) == [blocks[3]]
    assert pool.match(tokens, chain_of(pool, tokens), limit=15).num_tokens == 12


def test_blocks_without_content_are_taken_first():
    pool = BlockPool(4, 4)
    cached = fill(pool, ids(1, 2, 3, 4))
    plain = pool.take(3)
    pool.release(cached)
    pool.release(plain)
    assert set(pool.take(3)) == set(plain)
    assert pool.num_cached == 1


def test_the_child_with_the_longest_common_prefix_is_matched_partially():
    pool = BlockPool(8, 4)
    fill(pool, ids(1, 2, 3, 4, 10, 11, 12, 13))
    other = fill(pool, ids(1, 2, 3, 4, 10, 11, 99, 13))
    tokens = ids(1, 2, 3, 4, 10, 11, 99, 50, 51)
    match = pool.match(tokens, chain_of(pool, tokens), limit=8)
    assert (match.num_tokens, match.partial, match.blocks[-1]) == (7, 3, other[1])


def test_an_open_tail_is_found_by_its_known_tokens_only():
    pool = BlockPool(8, 4)
    blocks = fill(pool, ids(1, 2, 3, 4, 5, 6))
    tokens = ids(1, 2, 3, 4, 5, 6, 7, 8)
    match = pool.match(tokens, chain_of(pool, tokens), limit=7)
    assert (match.num_tokens, match.partial) == (6, 2)
    assert match.blocks == blocks


def test_equal_keys_with_other_ids_are_no_hit():
    pool = BlockPool(8, 4)
    tokens = ids(1, 2, 3, 4, 5)
    chain = chain_of(pool, tokens)
    block = pool.take(1)[0]
    pool.register(block, chain.parent(0), ids(9, 9, 9, 9).tobytes(), chain.keys[0])
    assert pool.match(tokens, chain, limit=4).num_tokens == 0


def test_fork_pins_its_source_until_the_plan_is_issued():
    pool = BlockPool(3, 4)
    shared = fill(pool, ids(1, 2))
    pool.hold(shared)
    copy = pool.fork(shared[0])
    pool.release(shared)
    assert pool.references(shared[0]) == 1 and copy not in shared
    pool.end_plan()
    assert pool.references(shared[0]) == 0
    pool.check([[copy]])


def test_a_block_freed_in_a_plan_is_never_that_plans_copy_destination():
    pool = BlockPool(3, 4)
    pool.end_plan()
    source, freed, _ = pool.take(3)
    pool.release([freed])
    assert pool.fork(source) is None
    pool.end_plan()
    pool.hold([source])
    assert pool.fork(source) == freed


def test_without_caching_nothing_is_found():
    pool = BlockPool(4, 4, caching=False)
    tokens = ids(1, 2, 3, 4, 5)
    fill(pool, tokens)
    assert pool.match(tokens, chain_of(pool, tokens), limit=4).num_tokens == 0


def test_check_finds_a_wrong_count():
    pool = BlockPool(4, 4)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([[0]])


def test_forget_all_drops_content_of_held_and_free_blocks():
    pool = BlockPool(8, 4)
    tokens = ids(*range(8))
    held = fill(pool, tokens)
    freed = fill(pool, ids(*range(50, 58)))
    pool.release(freed)
    pool.forget_all()
    assert pool.num_cached == 0
    assert pool.match(tokens, chain_of(pool, tokens), limit=8).num_tokens == 0
    pool.check([held])
