"""``octavo bench serve``: load on any server that speaks OpenAI's completions or chat."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.arguments import Arguments, Command
from octavo.cli.bench import metrics
from octavo.cli.bench.datasets import DatasetOptions, Tokens, load_dataset
from octavo.cli.bench.load import Target, Trace, arrival_times, send_all
from octavo.cli.connection import Connection
from octavo.cli.console import CountLine, PhaseLine, table
from octavo.config import environment_api_keys
from octavo.flags import flag
from octavo.types import ConfigError, OctavoError


@dataclass(frozen=True)
class ServeOptions(DatasetOptions):
    backend: str = flag(
        "openai",
        "openai (= vllm): /v1/completions; openai-chat: /v1/chat/completions",
        group="target",
        choices=("openai", "vllm", "openai-chat"),
        top=True,
    )
    base_url: str | None = flag(None, "server (default http://HOST:PORT)", group="target", top=True)
    host: str = flag("127.0.0.1", "its host", group="target")
    port: int = flag(8000, "its port", group="target", minimum=1, maximum=65535)
    endpoint: str | None = flag(None, "its path (default: the backend's)", group="target")
    model: str | None = flag(
        None, "name of the model there (default: its first)", group="target", top=True
    )
    api_key: str | None = flag(None, "its key (also OCTAVO_API_KEY, VLLM_API_KEY)", group="target")
    header: list[str] = flag([], "further headers, KEY=VALUE", group="target", kind="list")
    insecure: bool = flag(False, "do not verify its certificate", group="target")
    request_rate: float = flag(
        float("inf"),
        "requests per second; inf: all at once",
        group="load",
        kind="rate",
        top=True,
    )
    burstiness: float = flag(
        1.0, "1: Poisson arrivals; below: in bursts; above: evener", group="load", kind="rate"
    )
    max_concurrency: int | None = flag(
        None, "most requests open at a time", group="load", top=True, minimum=1
    )
    num_warmups: int = flag(0, "requests sent before measuring", group="load", minimum=0)
    ignore_eos: bool = flag(
        False, "every answer has its full length (not all servers know this)", group="request"
    )
    temperature: float | None = flag(
        None, "0: always the likeliest token", group="request", minimum=0, maximum=2
    )
    top_p: float | None = flag(None, "nucleus sampling", group="request", minimum=0, maximum=1)
    extra_body: dict[str, Any] = flag(
        {}, "JSON put into every request", group="request", kind="json"
    )
    percentile_metrics: str = flag(
        "ttft,tpot,itl,e2el", "latencies to report", group="report", metavar="A,B"
    )
    metric_percentiles: str = flag("50,90,99", "their percentiles", group="report", metavar="P,Q")
    goodput: list[str] = flag(
        [], "limits in ms, ttft:500 tpot:50 e2el:9000", group="report", kind="list"
    )
    save_result: bool = flag(False, "write a JSON file", group="report", top=True)
    save_detailed: bool = flag(False, "with every request in it", group="report")
    result_dir: str = flag(".", "where", group="report")
    result_filename: str | None = flag(None, "under which name", group="report")
    metadata: list[str] = flag([], "KEY=VALUE put into the file", group="report", kind="list")
    label: str | None = flag(None, "name of the run in the file", group="report")
    disable_tqdm: bool = flag(False, "no progress", group="report")


COMMAND = Command(
    "bench serve",
    "Sends requests to a running server and reports rates and latencies.",
    (ServeOptions,),
    examples=(
        "octavo bench serve --num-prompts 64 --random-input-len 256 --ignore-eos",
        "octavo bench serve --base-url http://host:8000 --request-rate 4 --goodput ttft:500",
        "octavo bench serve --dataset-name sharegpt --dataset-path FILE.json --tokenizer MODEL",
    ),
)


def run(arguments: Arguments) -> int:
    """Returns 0 when every request succeeded, 1 when some failed."""
    options = arguments.build(ServeOptions)
    latencies = metrics.parse_latencies(options.percentile_metrics)
    percentiles = metrics.parse_percentiles(options.metric_percentiles)
    goodput = metrics.parse_goodput(options.goodput)
    extra = _pairs(options.metadata, "--metadata")
    tokenizer = _load_tokenizer(options.tokenizer)
    target = _target(options, tokenizer)
    samples = load_dataset(options, tokenizer)

    warmups = samples[: options.num_warmups]
    if warmups:
        asyncio.run(send_all(target, warmups, [0.0] * len(warmups), None, lambda trace: None))
    times = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
    progress = _Progress(len(samples), quiet=options.disable_tqdm)
    traces, duration = asyncio.run(
        send_all(target, samples, times, options.max_concurrency, progress.done)
    )
    result = metrics.summarize(traces, duration, latencies, percentiles, goodput)
    print(report(result, latencies, percentiles))
    if options.save_result or options.save_detailed:
        path = _save(options, target, {**result, **extra}, traces)
        print(f"saved {path}")
    errors = sorted({trace.error for trace in traces if trace.error})
    for error in errors[:3]:
        print(f"octavo: a request failed: {error}", file=sys.stderr)
    if any("HTTP 429" in error for error in errors):
        hint = (
            "the server takes no more than it can serve: lower --request-rate or --max-concurrency"
        )
        print(f"octavo: {hint} (octavo serve: or raise --max-queue-wait)", file=sys.stderr)
    return 1 if errors else 0


class _Progress:
    def __init__(self, total: int, quiet: bool) -> None:
        self._line = None if quiet else CountLine(total, "requests")
        self._count = 0
        self._failed = 0

    def done(self, trace: Trace) -> None:
        self._count += 1
        self._failed += bool(trace.error)
        if self._line:
            self._line.show(self._count, f", {self._failed} failed" if self._failed else "")


def _load_tokenizer(model: str | None) -> Tokens | None:
    if model is None:
        return None
    from octavo.checkpoint.locate import locate
    from octavo.text.tokenizer import load_tokenizer

    progress = PhaseLine()
    files = locate(model, weights=False, progress=progress)
    progress.end()
    return load_tokenizer(files.path)


def _target(options: ServeOptions, tokenizer: Tokens | None) -> Target:
    is_chat = options.backend == "openai-chat"
    if is_chat and tokenizer is None and options.dataset_name in ("random", "prefix_repetition"):
        raise ConfigError(
            "--backend openai-chat sends text: give --tokenizer MODEL to make random text from, "
            "or a dataset of texts (--dataset-name sharegpt or custom)"
        )
    base = (options.base_url or f"http://{options.host}:{options.port}").rstrip("/")
    keys = [options.api_key] if options.api_key else environment_api_keys()
    headers = {"Content-Type": "application/json", **_pairs(options.header, "--header")}
    if keys:
        headers["Authorization"] = f"Bearer {keys[0]}"
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    fields = {"temperature": options.temperature, "top_p": options.top_p, **options.extra_body}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    model = options.model
    if model is None:
        model = Connection(base, keys[0] if keys else None).served_model()
    return Target(
        url=base.removesuffix("/v1") + (options.endpoint or path),
        model=model,
        is_chat=is_chat,
        headers=headers,
        fields={name: value for name, value in fields.items() if value is not None},
        verify_tls=not options.insecure,
    )


def _pairs(items: list[str], name: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{name} {key}: expected KEY=VALUE")
    return {key: value for key, _, value in pairs}


def report(result: dict[str, Any], latencies: list[str], percentiles: list[float]) -> str:
    """The result as tables."""
    rows: list[tuple[str, ...]] = [
        ("requests", f"{result['completed']:,} done, {result['failed']:,} failed"),
        ("duration", f"{result['duration']:.2f} s"),
        ("input tokens", f"{result['total_input_tokens']:,}"),
        ("output tokens", f"{result['total_output_tokens']:,}"),
        ("most requests open", f"{result['max_concurrent_requests']:,}"),
        ("requests per second", f"{result['request_throughput']:.2f}"),
        ("output tokens per second", f"{result['output_throughput']:.1f}"),
        ("all tokens per second", f"{result['total_token_throughput']:.1f}"),
    ]
    if "request_goodput" in result:
        rows.append(("goodput, requests per second", f"{result['request_goodput']:.2f}"))
    columns = ["mean", "std", *(f"p{p:g}" for p in percentiles)]
    times: list[tuple[str, ...]] = [("milliseconds", *columns)]
    for name in latencies:
        if f"mean_{name}_ms" in result:
            cells = [f"{result[f'{column}_{name}_ms']:.1f}" for column in columns]
            times.append((f"{name}: {metrics.LATENCIES[name][0]}", *cells))
    return "\n".join(["", table(rows), "", table(times)])


def _save(
    options: ServeOptions, target: Target, result: dict[str, Any], traces: list[Trace]
) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    rate = options.request_rate
    content: dict[str, Any] = {
        "date": stamp,
        "backend": options.backend,
        "label": options.label,
        "model_id": target.model,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **result,
    }
    if options.save_detailed:
        content["input_lens"] = [trace.num_prompt_tokens for trace in traces]
        content["output_lens"] = [trace.num_output_tokens for trace in traces]
        content["ttfts"] = [t.first_token_seconds if t.chunks else None for t in traces]
        content["itls"] = [
            [b - a for a, b in zip(trace.chunks, trace.chunks[1:])] for trace in traces
        ]
        content["generated_texts"] = [trace.text for trace in traces]
        content["errors"] = [trace.error for trace in traces]
    name = options.result_filename or f"{options.backend}-{rate:g}qps-{stamp}.json"
    path = Path(options.result_dir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise OctavoError(f"{path}: cannot be written ({error.strerror})") from error
    return path
