"""What the CPU comparison with other engines computes and how it speaks to their processes."""

from __future__ import annotations

import sys

import pytest

from benchmarks import cpu_peers
from benchmarks.cpu_workload import Work
from benchmarks.protocol import Refused, Subject, Timing

# A subject that prints and answers each request with its prompt.
ECHO = """
from benchmarks.protocol import Timing, serve
def make():
    print("a library's greeting")
    return lambda work: Timing(2.0, [1.0] * len(work), 3, [item.prompt for item in work])
serve(make)
"""
REFUSING = """
from benchmarks.protocol import Refused, serve
def make():
    raise Refused("no such thing here")
serve(make)
"""


def test_a_subject_answers_in_turns_whatever_its_libraries_print() -> None:
    with Subject([sys.executable, "-c", ECHO]) as subject:
        timing = subject.run([Work([1, 2], 3), Work([4], 1)])
        assert timing == Timing(2.0, [1.0, 1.0], 3, [[1, 2], [4]])
        assert 1 < subject.peak_memory() < 1000 and subject.cpu_seconds() > 0
        cpu_peers.settle({"echo": subject}, interval=0.05)


def test_a_subject_can_refuse() -> None:
    with pytest.raises(Refused, match="no such thing here"):
        Subject([sys.executable, "-c", REFUSING])


def test_agreement_ends_at_a_requests_first_difference() -> None:
    assert cpu_peers.agreement([[1, 2, 3, 4]], [[1, 2, 3, 4]]) == 1
    assert cpu_peers.agreement([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [8, 6]]) == 1 / 6


def test_ratios_are_of_octavos_subjects_within_a_turn_and_their_median_counts() -> None:
    turns = [
        {"octavo-bf16": ours, "vllm-bf16": theirs}
        for ours, theirs in ((10.0, 5.0), (40.0, 10.0), (9.0, 3.0))
    ]
    entry = cpu_peers.summary(cpu_peers.WORKLOADS[0], turns)
    assert entry["median"] == {"octavo-bf16": 10.0, "vllm-bf16": 5.0}
    assert entry["ratio"] == {"octavo-bf16": {"vllm-bf16": 3.0}}


def test_everyone_goes_first_once() -> None:
    assert [cpu_peers.in_turn(["a", "b", "c"], turn)[0] for turn in range(4)] == list("abca")
