from octavo.engine.cost import FIRST_CHUNK, StepCosts


def test_a_chunk_doubles_the_decode_step_once_both_prices_are_known():
    costs = StepCosts()
    assert costs.chunk_limit(4) == FIRST_CHUNK
    costs.observe(4, 0, 0.020)
    costs.observe(4, 100, 0.070)
    assert costs.chunk_limit(4) == 40


def test_decode_time_is_taken_from_the_nearest_number_of_rows():
    costs = StepCosts()
    costs.observe(1, 0, 0.010)
    costs.observe(64, 0, 0.040)
    assert costs.decode_seconds(2) == 0.010
    assert costs.decode_seconds(100) == 0.040


def test_short_prompts_do_not_set_the_price_of_a_token():
    costs = StepCosts()
    costs.observe(4, 0, 0.020)
    costs.observe(0, 4, 1.0)
    assert costs.chunk_limit(4) == FIRST_CHUNK
    costs.observe(0, 1000, 0.5)
    assert costs.chunk_limit(4) == 40
