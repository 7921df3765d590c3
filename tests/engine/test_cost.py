import pytest

from octavo.engine.cost import CAUTION, FIRST_CHUNK, StepCosts


def test_a_chunk_nearly_doubles_the_decode_step_once_both_costs_are_known():
    costs = StepCosts()
    assert costs.chunk_limit(4, 1) == FIRST_CHUNK
    costs.observe(4, 0, 0.020)
    costs.observe(4, 100, 0.070)
    assert costs.chunk_limit(4, 1) == int(CAUTION * 40)


def test_decode_time_is_taken_from_the_nearest_number_of_rows():
    costs = StepCosts()
    costs.observe(1, 0, 0.010)
    costs.observe(64, 0, 0.040)
    assert costs.decode_seconds(2) == 0.010
    assert costs.decode_seconds(100) == 0.040


def test_short_prompts_say_nothing_about_others():
    costs = StepCosts()
    costs.observe(4, 0, 0.020)
    costs.observe(0, 4, 1.0)
    assert costs.chunk_limit(4, 1) == FIRST_CHUNK
    costs.observe(0, 1000, 0.5)
    assert costs.chunk_limit(4, 1) == int(CAUTION * 40)


def test_what_every_prompt_adds_does_not_keep_chunks_small():
    """A step with any prompt takes 4 ms more, and each token 0.01 ms: 600 tokens double 10 ms."""
    costs = StepCosts()
    for _ in range(20):
        costs.observe(256, 0, 0.010)
        for tokens in (128, 8192):
            costs.observe(256, tokens, 0.010 + 0.004 + tokens * 1e-5)
    assert 384 <= costs.chunk_limit(256, 1) <= 600
    for _ in range(20):
        costs.observe(256, 512, 0.010 + 0.004 + 512 * 1e-5)
    assert costs.chunk_limit(256, 1) == 384  # (8 - 4) ms / 0.01 ms = 400, rounded down


@pytest.mark.parametrize(("allowed", "rounded"), [(63, 63), (190, 128), (511, 448), (1000, 896)])
def test_chunks_come_in_few_sizes(allowed: int, rounded: int) -> None:
    costs = StepCosts()
    costs.observe(1, 0, 1.0)
    costs.observe(0, 1024, 1024 * CAUTION / allowed)
    assert costs.chunk_limit(1, 1) == rounded


def test_beyond_what_was_seen_the_last_price_counts():
    costs = StepCosts()
    costs.observe(1, 0, 1.0)
    costs.observe(0, 100, 0.1)
    assert costs.chunk_limit(1, 1) == 768  # 800


def test_a_crowd_of_prompts_may_take_more() -> None:
    costs = StepCosts()
    costs.observe(1, 0, 1.0)
    costs.observe(0, 100, 1.0)
    few = costs.chunk_limit(4, 1)
    assert few == costs.chunk_limit(4, 4) == 64  # 80, rounded down
    assert costs.chunk_limit(4, 8) == 128  # 160, rounded down
    assert costs.chunk_limit(4, 32) == 640
    # With many rows more prompts are no crowd yet.
    assert costs.chunk_limit(256, 16) == few < costs.chunk_limit(256, 32)
