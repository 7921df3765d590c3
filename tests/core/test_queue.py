import pytest

from octavo.core.fair import waiting_queue
from tests.core.harness import Harness


def requests(*facts):
    """Requests by (priority, arrival)."""
    h = Harness()
    made = []
    for sequence, (priority, arrival) in enumerate(facts):
        h.time = arrival
        request = h.request([1, 2], priority=priority)
        request.sequence = sequence
        made.append(request)
    return made


def order(queue):
    return [request.sequence for request in queue]


def test_fcfs_puts_a_preempted_request_back_in_front():
    old, middle, young = requests((0, 0), (0, 1), (0, 2))
    queue = waiting_queue("fcfs")
    for request in (middle, young, old):
        queue.push(request)
    assert order(queue) == [0, 1, 2]


def test_ageing_lets_a_request_that_waited_pass_a_better_one_that_came_late():
    patient, urgent = requests((3, 0.0), (1, 25.0))
    for ageing, expected in ((0.0, [1, 0]), (10.0, [0, 1]), (20.0, [1, 0])):
        queue = waiting_queue("priority", ageing)
        queue.push(patient)
        queue.push(urgent)
        assert order(queue) == expected


def test_removing_who_does_not_wait_is_an_error():
    waiting, absent = requests((0, 0), (0, 1))
    queue = waiting_queue("fcfs")
    queue.push(waiting)
    with pytest.raises(ValueError):
        queue.remove(absent)
    queue.remove(waiting)
    assert len(queue) == 0


def test_in_turn_goes_on_behind_who_is_passed_over_and_misses_nobody_when_some_are_taken():
    first, second, third, fourth = requests((0, 0), (0, 1), (0, 2), (0, 3))
    queue = waiting_queue("fcfs")
    for request in (first, second, third, fourth):
        queue.push(request)
    seen = []
    for request in queue.in_turn():
        seen.append(request.sequence)
        if request in (second, fourth):
            queue.remove(request)
    assert seen == [0, 1, 2, 3]
    assert order(queue) == [0, 2]
