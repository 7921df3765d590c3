"""What is measured: octavo offline, octavo's server, and transformers with static batches.

``python -m benchmarks.subjects KIND MODEL`` is one's process (benchmarks.protocol).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import clients
from benchmarks.cpu_workload import Work
from benchmarks.protocol import Refused, Runner, Timing, serve
from octavo.machine import available_cores

STATIC_BATCH = 8  # rows of a static batch


def command(kind: str, model: Path) -> list[str]:
    """Of one of this environment's own subjects (KINDS)."""
    return [sys.executable, "-m", "benchmarks.subjects", kind, str(model)]


def octavo_offline(model: str, **settings: Any) -> Runner:
    from octavo import LLM, SamplingParams
    from octavo.types import ConfigError

    try:
        llm = LLM(model, skip_tokenizer_init=True, **settings)
    except ConfigError as error:
        raise Refused(str(error)) from error

    def run(work: list[Work]) -> Timing:
        params = [
            SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
            for item in work
        ]
        start = time.monotonic()
        began = time.perf_counter()
        outputs = llm.generate([item.prompt for item in work], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        told = [list(output.outputs[0].token_ids) for output in outputs]
        assert [len(tokens) for tokens in told] == [item.max_tokens for item in work]
        firsts = [output.timings.first_token - start for output in outputs]
        return Timing(seconds, firsts, sum(map(len, told)), told)

    return run


def octavo_avx2(model: str, **settings: Any) -> Runner:
    """As on a CPU that has AVX2 and nothing newer."""
    from octavo.ops.native import library

    library.features = lambda: library.Features.AVX2  # type: ignore[assignment]
    return octavo_offline(model, dtype="float32", **settings)


def octavo_torch(model: str) -> Runner:
    """As where no compiler was found: torch computes alone."""
    from octavo.ops.native import library

    library._found = lambda: (None, "left out")  # type: ignore[assignment]
    return octavo_offline(model, dtype="float32")


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
    "octavo-int8": partial(octavo_offline, quantization="int8"),
    "octavo-avx2": octavo_avx2,
    "octavo-avx2-groups": partial(octavo_avx2, quantization="gguf"),
    "octavo-torch": octavo_torch,
    "octavo-server": octavo_server,
    "octavo-server-plain": partial(octavo_server, stream=False),
    "transformers": transformers_static,
}


def main() -> None:
    kind, model = sys.argv[1:]
    serve(lambda: KINDS[kind](model))


if __name__ == "__main__":
    main()
