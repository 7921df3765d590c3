"""The fuzzed load, for a moment, on whatever device this machine has; and its judgement."""

from __future__ import annotations

import json
import random
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.gpu import fuzz
from benchmarks.gpu.load import Golden, Load, Open, hear_goldens
from octavo import LLM, SamplingParams

GOLDEN = Golden([5, 6], [10, 11, 12], [20, 21, 22], [2.0, 0.1, 2.0])


def test_a_known_answer_may_differ_where_it_nearly_was_another() -> None:
    assert GOLDEN.judge([10, 11, 12]) == "equal"
    assert GOLDEN.judge([10, 21, 99]) == "near tie"
    for tokens in ([20, 11, 12], [10, 50, 12], [10, 11], [10, 11, 12, 13]):
        assert GOLDEN.judge(tokens) == "wrong"


@pytest.fixture
def llm(model_r: Path):  # type: ignore[no-untyped-def]
    settings = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 8}
    with closing(LLM(str(model_r), num_gpu_blocks_override=16, **settings)) as made:
        yield made


def test_a_moment_of_load_ends_well_and_sees_every_kind_of_end(llm: LLM) -> None:
    rng = random.Random(4)
    load = Load(llm, hear_goldens(llm, rng), rng)
    for _ in range(30):
        load.run(1.0)
        ends = {"stop", "length", "abort", "equal"} <= load.counts.keys()
        if enough := ends and llm.stats.num_preemptions > 0 and load.num_steps > 50:
            break
    assert enough, load.counts
    assert load.problems == []


def test_a_wrong_answer_and_what_is_left_over_are_problems(llm: LLM) -> None:
    wrong = Golden([0, 5, 9], [7] * 24, [8] * 24, [3.0] * 24)
    load = Load(llm, [wrong], random.Random(4))
    for _ in range(30):
        load.run(0.5)
        if load.counts["wrong"]:
            break
    assert "was answered with" in load.problems[0]
    load._open[1] = Open(SamplingParams(), None)  # of which the engine knows nothing
    load.run(0.0)
    assert load.problems[-1] == "left at the end: (0, 0, 0, 1) running, waiting, blocks, not told"


def test_the_program_runs_lives_of_both_kinds_and_saves_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(fuzz, "CLIENTS", 6)
    monkeypatch.setattr(sys, "argv", [fuzz.__file__, "--seconds", "3", "--lives", "3"])
    with pytest.raises(SystemExit) as end:
        fuzz.main()
    found = json.loads((tmp_path / "gpu_fuzz.json").read_text())
    assert end.value.code == 0, found
    assert [life["by"] for life in found["lives"]] == ["offline_life"] * 2 + ["async_life"]
    assert sum(life["counts"].get("length", 0) for life in found["lives"]) > 0


def test_the_commands_for_the_sanitizer_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [fuzz.__file__, "--sanitize", "--seconds", "60"])
    fuzz.main()
    printed = capsys.readouterr().out
    assert printed.count("compute-sanitizer --tool") == 3 and "--seconds 60" in printed
