"""What is measured: octavo offline, octavo's server, and transformers with static batches.

Each runs in a process of its own, loaded once and asked in turns, so that a drift of the host hits
all alike. ``python -m benchmarks.subjects KIND MODEL`` is such a process: a line of JSON in, a line
of JSON out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import clients
from benchmarks.cpu_workload import Work
from octavo.config import available_cores

STATIC_BATCH = 8  # rows of a static batch


@dataclass(frozen=True)
class Timing:
    """One workload's run. Seconds; ``first_tokens`` per request, from the start of the run."""

    seconds: float
    first_tokens: list[float]
    num_output_tokens: int

    @property
    def output_rate(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one (of a single request)."""
        return (self.num_output_tokens - 1) / (self.seconds - self.first_tokens[0])


class Subject:
    """A subject's process. ``start_seconds``: from its start to its first token."""

    def __init__(self, kind: str, model: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.subjects", kind, str(model)]
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.run([Work([100, 200, 300, 400], 1)])
        self.start_seconds = time.perf_counter() - began

    def run(self, work: list[Work]) -> Timing:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([asdict(item) for item in work]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the subject ended with {self._process.wait()}; see its output")
        return Timing(**json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Runner = Callable[[list[Work]], Timing]


def octavo_offline(model: str) -> Runner:
    from octavo import LLM, SamplingParams

    llm = LLM(model, skip_tokenizer_init=True)

    def run(work: list[Work]) -> Timing:
        params = [
            SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
            for item in work
        ]
        start = time.monotonic()
        began = time.perf_counter()
        outputs = llm.generate([item.prompt for item in work], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == [item.max_tokens for item in work]
        firsts = [output.timings.first_token - start for output in outputs]
        return Timing(seconds, firsts, sum(counts))

    return run


def octavo_server(model: str, stream: bool = True) -> Runner:
    """Clients, one per request, all at once; the server is a process of its own. On few cores the
    clients' own reading of a stream costs the engine time: hence the plain variant."""
    from tests.fixtures.server import launch

    server = launch(model, "--max-queue-wait", "3600")  # a slow CPU may not refuse what it is given
    server.wait_ready()

    def run(work: list[Work]) -> Timing:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        bodies = [
            {"prompt": item.prompt, "max_tokens": item.max_tokens, "temperature": 0}
            | {"ignore_eos": True, **options}
            for item in work
        ]
        seconds, answers = clients.run(server.url, bodies)
        counts = [answer.events[-1]["usage"]["completion_tokens"] for answer in answers]
        assert counts == [item.max_tokens for item in work]
        return Timing(seconds, [answer.first for answer in answers], sum(counts))

    run.close = server.stop  # type: ignore[attr-defined]
    return run


def transformers_static(model: str, batch: int = STATIC_BATCH) -> Runner:
    """``generate`` on batches of so many requests in order of arrival, padded on the left; a batch
    ends with its longest answer. Surplus tokens of shorter ones are not counted as output."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation import StoppingCriteria, StoppingCriteriaList
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(available_cores())
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    network.generation_config.eos_token_id = None

    class FirstToken(StoppingCriteria):
        def __init__(self) -> None:
            self.time = 0.0

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.time = self.time or time.perf_counter()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run(work: list[Work]) -> Timing:
        firsts: list[float] = []
        began = time.perf_counter()
        for start in range(0, len(work), batch):
            rows = work[start : start + batch]
            width, longest = max(len(r.prompt) for r in rows), max(r.max_tokens for r in rows)
            ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in rows])
            mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in rows])
            watch = FirstToken()
            with torch.inference_mode():
                out = network.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=longest,
                    pad_token_id=0,
                    stopping_criteria=StoppingCriteriaList([watch]),
                )
            assert out.shape[1] == width + longest
            firsts += [watch.time - began] * len(rows)
        return Timing(time.perf_counter() - began, firsts, sum(r.max_tokens for r in work))

    return run


KINDS: dict[str, Callable[[str], Runner]] = {
    "octavo": octavo_offline,
    "octavo-server": octavo_server,
    "octavo-server-plain": partial(octavo_server, stream=False),
    "transformers": transformers_static,
}


def main() -> None:
    kind, model = sys.argv[1:]
    run = KINDS[kind](model)
    try:
        for line in sys.stdin:
            timing = run([Work(**item) for item in json.loads(line)])
            print(json.dumps(asdict(timing)), flush=True)
    finally:
        getattr(run, "close", lambda: None)()


if __name__ == "__main__":
    main()
