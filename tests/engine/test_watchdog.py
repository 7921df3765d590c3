"""A step that hangs is told: to clients by heartbeats, and in the log with all stacks."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

from octavo.engine.health import HEARTBEAT_LIMIT, Health
from octavo.engine.messages import Heartbeat
from octavo.engine.process import EngineLoop
from octavo.engine.watchdog import Watchdog, stacks
from tests.engine.toy import add_request, toy_engine


def test_a_late_step_takes_nothing_new_and_one_past_the_deadline_ends():
    health = Health(step_deadline=10.0)
    health.begin(now=100.0)
    for age, late, fault in ((0.0, False, False), (4.9, False, False), (5.1, True, False),
                             (0.0, False, False), (10.1, True, True)):  # fmt: skip
        health.hear(Heartbeat(0.0, 1, age), now=100.0)
        assert bool(health.judge(100.1)) is fault
        assert bool(health.late) is late
        assert not health.stalled
    health.hear(Heartbeat(0.0, 1, 0.0), now=100.0)
    assert not health.judge(100.0 + HEARTBEAT_LIMIT + 0.1) and health.stalled


def test_a_hanging_step_is_named_with_the_stacks_of_all_threads_once(caplog):
    engine, executor = toy_engine()
    going, release = threading.Event(), threading.Event()

    def collect_at_last():
        going.set()
        release.wait(30)
        return type(executor).collect(executor)

    executor.collect = collect_at_last
    engine.add(add_request(1, [5, 6, 7], max_tokens=3))
    thread = threading.Thread(target=engine.step, name="the loop")
    thread.start()
    assert going.wait(30)
    watchdog = Watchdog(10.0, engine.under_way)
    with caplog.at_level(logging.WARNING):
        for age in (0.1, 4.0, 5.5, 6.0, 6.5):
            watchdog.look(age)
        (told,) = [record.getMessage() for record in caplog.records]
        release.set()
        thread.join(30)
        watchdog.look(0.0)
        watchdog.look(0.0)
    watchdog.stop()
    first, _, rest = told.partition("\n")
    request = engine._requests[1].request_id
    assert first.startswith("step 0 (3 tokens of 1 sequences: ") and request in first
    assert "has taken 5.5 s" in first
    assert "thread the loop:" in rest and "collect_at_last" in rest and "MainThread" not in rest
    assert caplog.records[-1].getMessage() == "it goes on, after 6.5 s"
    assert len(caplog.records) == 2


def test_a_loop_that_stands_still_outside_of_a_step_is_late_too(tmp_path):
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("inbox", "outbox")]
    from octavo.config import EngineConfig

    loop = EngineLoop(EngineConfig(), *addresses)
    loop.engine, loop._executor = toy_engine()
    loop._ticked = 100.0
    assert loop.pause(100.9) == 0.0, "it waits for requests"
    assert loop.pause(103.0) == 3.0
    assert loop.problem.startswith("the engine has done nothing for ")
    loop.engine.step_started = 102.5
    assert loop.pause(103.0) == 0.0 and loop.problem == ""
    assert loop.engine.under_way() == "the engine's loop, outside of a step,"
    loop.close()


def test_stacks_name_threads():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(30,), name="waits")
    thread.start()
    try:
        assert "thread waits:" in stacks()
    finally:
        release.set()
        thread.join()


def test_a_call_that_holds_the_interpreter_is_found_as_well():
    """The heartbeat's thread cannot run then; faulthandler's can."""
    code = (
        "import ctypes; from octavo.engine.watchdog import Watchdog\n"
        "def stuck(): ctypes.PyDLL(None).usleep(1_600_000)\n"
        "Watchdog(2.0, str).look(0.0); stuck()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Timeout" in done.stderr and "in stuck" in done.stderr
