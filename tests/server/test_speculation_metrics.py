"""What /metrics, the statistics line and sums over engines say of guesses."""

from __future__ import annotations

from octavo.engine.messages import EngineStats
from octavo.engine.replica import summed_stats
from octavo.server.lifecycle import speculation_line
from tests.server.test_pipeline_metrics import samples

FIRST = EngineStats(
    1.0,
    num_drafts=3,
    num_draft_tokens=6,
    num_accepted_drafts=4,
    drafted_at=[3, 2, 1],
    accepted_at=[3, 1, 0],
    draft_length=2.5,
    saved_seconds=1.25,
)
SECOND = EngineStats(
    1.0,
    num_drafts=2,
    num_draft_tokens=2,
    num_accepted_drafts=0,
    drafted_at=[2],
    accepted_at=[0],
    saved_seconds=-0.5,
)


def test_each_engine_has_its_counters_and_those_of_each_place():
    found = samples(1, "spec_decode", FIRST, SECOND)
    vllm, labels = "vllm:spec_decode_num_", 'engine="{}",model_name="toy"'
    for name, values in (
        ("drafts_total", (3, 2)),
        ("draft_tokens_total", (6, 2)),
        ("accepted_tokens_total", (4, 0)),
    ):
        for engine, value in enumerate(values):
            assert found.pop(f"{vllm}{name}{{{labels.format(engine)}}}") == value
    for name, values in (
        (f"{vllm}accepted_tokens_per_pos_total", ((3, 1, 0), (0,))),
        ("octavo_spec_decode_num_draft_tokens_per_pos_total", ((3, 2, 1), (2,))),
    ):
        for engine, places in enumerate(values):
            for place, value in enumerate(places):
                label = f'{labels.format(engine)},position="{place}"'
                assert found.pop(f"{name}{{{label}}}") == value
    for name, values in (("draft_length", (2.5, 0)), ("saved_seconds", (1.25, -0.5))):
        for engine, value in enumerate(values):
            assert found.pop(f"octavo_spec_decode_{name}{{{labels.format(engine)}}}") == value
    assert not found


def test_without_guesses_counters_are_there_and_0():
    found = samples(1, "vllm:spec_decode", EngineStats(1.0))
    assert len(found) == 3 and not any(found.values())


def test_the_statistics_line_says_how_many_guesses_are_right():
    assert speculation_line(EngineStats(1.0)) == ""
    expected = ", guesses 2.5 a step, 66.7% right, 1.2 s saved"
    assert speculation_line(FIRST) == expected


def test_totals_of_several_engines_are_added_place_by_place():
    total = summed_stats([FIRST, SECOND])
    assert (total.num_drafts, total.num_draft_tokens, total.num_accepted_drafts) == (5, 8, 4)
    assert (total.drafted_at, total.accepted_at) == ([5, 2, 1], [3, 1, 0])
    assert total.saved_seconds == 0.75
    assert summed_stats([SECOND, EngineStats(1.0), FIRST]).drafted_at == [5, 2, 1]
