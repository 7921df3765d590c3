"""What is asked of Ray, with a Ray that says what the test tells it to."""

from __future__ import annotations

import importlib
from collections import deque
from types import SimpleNamespace

import pytest

from octavo import ray_nodes
from octavo.config import EngineConfig
from octavo.engine import ray_backend
from octavo.engine.ray_backend import RayBackend
from octavo.flags import from_flags
from octavo.ray_nodes import FIRST_PAUSE, WAIT_SECONDS, Keeper, Task
from octavo.types import ConfigError


class Reference:
    """Of a call to an actor; ``result``: set by the test."""

    def __init__(self, actor, name, arguments):
        self.actor, self.name, self.arguments = actor, name, arguments
        self.result = None


class Actor:
    def __init__(self, options):
        self.options, self.calls = options, []
        self.where = SimpleNamespace(remote=lambda: self._call("where"))
        self.run = SimpleNamespace(remote=lambda *arguments: self._call("run", *arguments))

    def _call(self, name, *arguments):
        self.calls.append(Reference(self, name, arguments))
        return self.calls[-1]


class FakeRay:
    """Of the module ``ray``, what Keeper uses. ``step`` is called when it waits."""

    exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))

    def __init__(self, resources):
        self.resources, self.actors, self.killed = resources, [], []
        self.steps = deque()

    def cluster_resources(self):
        return self.resources

    available_resources = cluster_resources

    def remote(self, **options):
        def make():
            self.actors.append(Actor(options))
            return self.actors[-1]

        return lambda kind: SimpleNamespace(remote=make)

    def wait(self, references, num_returns, timeout):
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.popleft()()
        return [r for r in references if r.result is not None][:num_returns], []

    def get(self, reference):
        if isinstance(reference.result, Exception):
            raise reference.result
        return reference.result

    def kill(self, actor):
        self.killed.append(actor)


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(ray_nodes, "tell", lambda told: lines.append(told.news or told.error))
    return lines


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)

    def sleep(seconds):
        now.seconds += seconds

    monkeypatch.setattr(
        ray_nodes, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    )
    return now


def keep(ray, task):
    with pytest.raises(KeyboardInterrupt):
        Keeper(ray, task).keep()


def task(count=2):
    return Task(count, num_gpus=2, num_cpus=3, tokens=["serve", "m"], host="", secret="s")


@pytest.mark.parametrize(
    ("resources", "asked"), [({"CPU": 8}, {"num_cpus": 3}), ({"GPU": 4, "CPU": 8}, {"num_gpus": 2})]
)
def test_each_replica_is_an_actor_with_what_it_needs(told, clock, resources, asked):
    ray = FakeRay(resources)
    keep(ray, task())
    assert [actor.options for actor in ray.actors] == [
        {**asked, "scheduling_strategy": "SPREAD", "max_restarts": 0}
    ] * 2
    assert [call.name for call in ray.actors[0].calls] == ["where", "run"]
    assert ray.actors[0].calls[1].arguments == (["serve", "m"], "s")


def test_actor_whose_node_has_left_is_replaced_after_growing_pauses(told, clock):
    ray = FakeRay({"CPU": 8})

    def lose(index):
        def step():
            where, run = ray.actors[index].calls
            where.result = "node-1"
            run.result = ray.exceptions.RayError("The actor died:\n its node left")

        return step

    def settle():
        clock.seconds += 0.5

    ray.steps.extend([lose(0), settle, settle, settle, lose(1), *[settle] * 8])
    keep(ray, task(count=1))
    assert len(ray.actors) == 3 and ray.killed == ray.actors[:2]
    assert f"The actor died: its node left; asking for another one in {FIRST_PAUSE:g} s" in told[1]
    assert f"in {2 * FIRST_PAUSE:g} s" in told[3]


def test_what_the_process_of_a_node_said_last_is_told(told, clock):
    ray = FakeRay({"CPU": 8})

    def end():
        ray.actors[0].calls[0].result = "node-1"
        ray.actors[0].calls[1].result = (2, "octavo: model m: no such file")

    ray.steps.extend([end, lambda: None])
    keep(ray, task(count=1))
    assert told[0] == "Ray actor 0 runs on node node-1"
    assert "exit code 2: octavo: model m: no such file" in told[1]


def test_cluster_without_room_is_complained_of_once(told, clock):
    ray = FakeRay({"CPU": 2})

    def later():
        clock.seconds += WAIT_SECONDS

    ray.steps.extend([later, later, later])
    keep(ray, task(count=1))
    assert told == ["Ray actor 0 waits for a node with 3 CPUs free (all have 2)"]


def test_nodes_are_told_where_the_head_is_and_what_only_they_can_know():
    config = from_flags(
        EngineConfig,
        {
            "data_parallel_size": 3, "data_parallel_backend": "ray", "cpu_threads": 2,
            "load_format": "dummy", "revision": "v1", "seed": 4,
        },
    )  # fmt: skip
    assert config.parallel.num_joining == 3 and config.parallel.num_local == 0
    backend = RayBackend(config, "org/name", "tcp://0.0.0.0:29550", b"secret")
    asked = backend._task
    assert asked["tokens"] == [
        *("serve", "org/name", "--headless", "--data-parallel-rpc-port", "29550"),
        *("--revision", "v1", "--load-format", "dummy", "--cpu-threads", "2"),
    ]
    assert (asked["count"], asked["host"], asked["num_cpus"]) == (3, "", 2)


def test_ray_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[ray\]'"):
        ray_backend.check_installed()
