"""What routing keeps of a prefix cache when an engine becomes two replicas.

    python -m benchmarks.routing [--model tests/.fixtures/R] [--save-as routing]

40 conversations in 8 groups; a group shares a system prompt. Each begins with a text of its own (a
file, a page), about which there are 4 turns: a question, the greedy answer, some thought. All
conversations go on at once, so their turns come in any order. Each way of routing serves the same
conversations on two fresh engines of a tiny model, and is compared with one engine:

tight    one engine whose KV cache holds all conversations and a tenth more, against two with half
         of that each: a replica that is sent every conversation in turn cannot keep them
ample    one engine against two whose caches each hold everything: what is lost is lost by routing

Hit rate: prompt tokens found in the cache / prompt tokens looked up. Work: tokens computed. The
engines are given the conversations by the server's own ``Replicas``; HTTP is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import save
from octavo.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from octavo.engine.admission import prepare
from octavo.engine.placement import local_replicas
from octavo.engine.replica import computed_tokens
from octavo.engine.replicas import Replicas
from octavo.engine.routing import Load, Router, chain_keys
from octavo.types import SamplingParams

BLOCK = 16
WANTED = {"prefix": 0.9, "random": 0.6, "most_work": 0.6}


@dataclass(frozen=True)
class Workload:
    """Token counts are ranges (least, most)."""

    conversations: int = 40
    groups: int = 8
    turns: int = 4
    system: tuple[int, int] = (64, 192)
    text: tuple[int, int] = (600, 1000)
    said: tuple[int, int] = (10, 60)
    answer: tuple[int, int] = (16, 64)
    think_seconds: tuple[float, float] = (0.5, 1.5)  # nobody reads an answer in no time
    seed: int = 0

    def systems(self) -> list[list[int]]:
        """The ids of each group's system prompt."""
        rng = random.Random(self.seed)
        return [_ids(rng, self.system) for _ in range(self.groups)]

    def script(self, index: int) -> list[Turn]:
        rng = random.Random(f"{self.seed}/{index}")
        turns = [
            Turn(rng.uniform(*self.think_seconds), _ids(rng, self.said), rng.randint(*self.answer))
            for _ in range(self.turns)
        ]
        turns[0].said[:0] = _ids(rng, self.text)
        return turns

    @property
    def num_tokens(self) -> int:
        """What all conversations come to."""
        turns = (turn for index in range(self.conversations) for turn in self.script(index))
        return sum(len(turn.said) + turn.answer for turn in turns) + sum(map(len, self.systems()))


@dataclass(frozen=True)
class Turn:
    pause: float  # seconds before it
    said: list[int]
    answer: int  # tokens


def _ids(rng: random.Random, lengths: tuple[int, int]) -> list[int]:
    return [rng.randrange(5, 300) for _ in range(rng.randint(*lengths))]


class RandomRouter(Router):
    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(1)

    def choose(
        self, keys: Sequence[bytes], num_tokens: int, loads: Mapping[int, Load], hint: bytes = b""
    ) -> tuple[int, int]:
        return self._random.choice(sorted(loads)), 0


class LoadRouter(Router):
    """The same rule, blind to prefixes."""

    def use(self, replica: int, keys: Sequence[bytes]) -> None:
        pass


ROUTERS: dict[str, type[Router]] = {
    "prefix": Router,
    "least loaded": LoadRouter,
    "random": RandomRouter,
}


def config_of(model: Path, replicas: int, num_blocks: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True),
        cache=CacheConfig(block_size=BLOCK, num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(max_num_queued_reqs=1000, max_queue_wait=1000.0),
        parallel=ParallelConfig(data_parallel_size=replicas, cpu_threads=1),
    )


async def converse(client: Replicas, work: Workload, index: int, system: list[int]) -> None:
    history = list(system)
    for number, turn in enumerate(work.script(index)):
        await asyncio.sleep(turn.pause)
        history += turn.said
        request = prepare(
            client.info,
            SamplingParams(temperature=0, max_tokens=turn.answer, ignore_eos=True),
            history,
            handle=client.allocate(1),
            request_id=f"{index}-{number}",
            arrival=time.monotonic(),
        )
        async for events in client.submit([request]):
            history += [token for _, token in events.tokens]


async def serve(config: EngineConfig, router: type[Router], work: Workload) -> dict[str, Any]:
    """All conversations on fresh engines."""
    client = Replicas(local_replicas(config), router=router())
    await client.start()
    try:
        await client.ready()
        systems = work.systems()
        began = time.monotonic()
        await asyncio.gather(
            *(
                converse(client, work, index, systems[index % work.groups])
                for index in range(work.conversations)
            )
        )
        seconds = time.monotonic() - began
        stats = client.stats
        shares = [computed_tokens(replica.stats) for replica in client.replicas]
    finally:
        await client.close()
    return {
        "hit_rate": round(stats.prefix_hits / stats.prefix_queries, 4),
        "computed_tokens": sum(shares),
        "work_shares": [round(share / sum(shares), 4) for share in shares],
        "preemptions": stats.num_preemptions,
        "seconds": round(seconds, 1),
    }


def routing_cost(num_tokens: int, num_replicas: int = 8) -> float:
    """Microseconds to route a request of so many prompt tokens, of which replicas hold parts."""
    router = Router()
    ids = np.random.default_rng(0).integers(0, 30_000, num_tokens, dtype="<i4").tobytes()
    loads = {index: Load(1000.0 * index, 0.0) for index in range(num_replicas)}
    for index in range(num_replicas):
        router.add(index, 1 << 20)
        router.use(index, chain_keys(b"", ids[: len(ids) * index // num_replicas]))
    spent = []
    for _ in range(200):
        began = time.perf_counter()
        keys = chain_keys(b"", ids)
        chosen, _ = router.choose(keys, num_tokens, loads)
        router.use(chosen, keys)
        spent.append(time.perf_counter() - began)
    return round(sorted(spent)[len(spent) // 2] * 1e6, 1)


def measure(model: Path, work: Workload) -> dict[str, Any]:
    whole = round(1.1 * work.num_tokens / BLOCK)
    results: dict[str, Any] = {}
    for name, per_replica in (("tight", whole // 2), ("ample", whole)):
        one = asyncio.run(serve(config_of(model, 1, whole), Router, work))
        rows = {"one engine": one}
        for routing, router in ROUTERS.items():
            row = asyncio.run(serve(config_of(model, 2, per_replica), router, work))
            rows[routing] = {**row, "of_one": round(row["hit_rate"] / one["hit_rate"], 4)}
        results[name] = {"blocks_of_one": whole, "blocks_of_replica": per_replica, "rows": rows}
    return results


def verdict(results: dict[str, Any]) -> dict[str, bool]:
    rows = results["tight"]["rows"]
    return {
        "prefix": rows["prefix"]["of_one"] >= WANTED["prefix"],
        "random": rows["random"]["of_one"] <= WANTED["random"],
        "most_work": max(rows["prefix"]["work_shares"]) <= WANTED["most_work"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=Path("tests/.fixtures/R"))
    parser.add_argument("--turns", type=int, default=Workload.turns)
    parser.add_argument("--seed", type=int, default=Workload.seed)
    parser.add_argument("--save-as")
    args = parser.parse_args()
    work = replace(Workload(), turns=args.turns, seed=args.seed)
    results = measure(args.model, work)
    for name, result in results.items():
        print(f"{name}: {result['blocks_of_one']} and {result['blocks_of_replica']} blocks")
        for routing, row in result["rows"].items():
            print(f"  {routing:13} {row}")
    cost = {str(tokens): routing_cost(tokens) for tokens in (1024, 2048, 4096, 8192, 131072)}
    print(f"microseconds to route a prompt of so many tokens, 8 replicas: {cost}")
    met = verdict(results)
    print(f"wanted {WANTED}: {met}")
    if args.save_as:
        figures = {
            "workload": work.__dict__, "results": results, "routing_us": cost,
            "wanted": WANTED, "met": met,
        }  # fmt: skip
        save(args.save_as, figures)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
