"""The families of /metrics: names and definitions as in vLLM, plus octavo's own (docs/server.md).

Read from live state whenever Prometheus scrapes. Intervals are in seconds: first token = arrival →
first token; queue = arrival → first scheduled; prefill = first scheduled → first token; decode =
first → last token; inference = first scheduled → last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from octavo.engine.messages import ADMITTED, DROPPED, REJECTED, RETRIED, STARTED
from octavo.engine.replica import Replica
from octavo.engine.replicas import Replicas
from octavo.server.families import Family, Kind, label_text
from octavo.server.histograms import Histogram
from octavo.server.totals import EngineTotals, Totals
from octavo.types import FinishReason

if TYPE_CHECKING:
    from octavo.server.metrics import Metrics

ALL_ENGINES = "all"  # the label of what the API process counts, where there are several engines

# Of EngineStats: name, help, attribute, for gauges and for counters.
STATE_OF_ENGINE = (
    (
        "octavo_kv_internal_fragmentation_ratio",
        "Share of the used blocks' token places that hold no token",
        "fragmentation",
    ),
    (
        "octavo_graphs_pending",
        "CUDA graphs yet to be captured in idle moments",
        "graphs_pending",
    ),
)
COUNTS_OF_ENGINE = (
    ("vllm:prefix_cache_queries", "Tokens looked up", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Tokens found", "prefix_hits"),
    ("vllm:num_preemptions", "Preemptions", "num_preemptions"),
    ("octavo_cow_copies", "Blocks copied on write", "num_copies"),
    (
        "octavo_tokens_drawn",
        "Tokens the engine drew; more than were returned by those behind a stop string or of "
        "requests that were aborted",
        "generation_tokens",
    ),
)
# Of the sequences of an engine, measured by the API processes: name, help, attribute.
HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token", "first_token"),
    ("vllm:inter_token_latency_seconds", "Between a sequence's tokens", "inter_token"),
    (
        "vllm:time_per_output_token_seconds",
        "The same as inter_token_latency_seconds, under its older name",
        "inter_token",
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean of a sequence: decode time / (tokens - 1)",
        "per_output_token",
    ),
    ("vllm:e2e_request_latency_seconds", "Arrival to last token", "request"),
    ("vllm:request_queue_time_seconds", "Arrival to first scheduled", "queue"),
    ("vllm:request_inference_time_seconds", "Scheduled to last token", "inference"),
    ("vllm:request_prefill_time_seconds", "Scheduled to first token", "prefill"),
    ("vllm:request_decode_time_seconds", "First to last token", "decode"),
    ("vllm:request_prompt_tokens", "Prompt tokens", "prompt_tokens"),
    ("vllm:request_generation_tokens", "Output tokens", "generation_tokens"),
    (
        "vllm:request_max_num_generation_tokens",
        "Output tokens of a request's longest choice",
        "max_generation_tokens",
    ),
    ("vllm:request_params_n", "Choices asked for", "params_n"),
    ("vllm:request_params_max_tokens", "max_tokens asked for", "params_max_tokens"),
)

Values = float | Mapping[str, float]


class Exposition:
    """What ``metrics`` and the engines of ``client`` hold, as families."""

    def __init__(self, metrics: Metrics, client: Replicas, model_name: str) -> None:
        self._metrics = metrics
        self._client = client
        self._model_name = model_name

    def families(self) -> Iterator[Family]:
        """Counts are summed over all API processes; the engine's own figures appear once."""
        totals = self._metrics.totals()
        yield from self._gauges(totals)
        yield from self._facts()
        yield from self._counters(totals)
        yield from self._pipeline()
        yield from self._histograms(totals)

    @property
    def _server_label(self) -> str:
        """What is counted for the whole server is told of the one engine, or of all."""
        return "0" if len(self._client.replicas) == 1 else ALL_ENGINES

    def _labels(self, engine: int | str, **more: str) -> str:
        return label_text({"engine": str(engine), "model_name": self._model_name, **more})

    def _of_engines(
        self,
        kind: Kind,
        name: str,
        help: str,
        values: Callable[[Replica], Values],
        label: str = "",
    ) -> Family:
        """A sample for each engine; with ``label`` one for each value that it takes."""
        family = Family(kind, name, help)
        for replica in self._client.replicas:
            self._add(family, replica.index, values(replica), label)
        return family

    def _add(self, family: Family, engine: int | str, values: Values, label: str) -> None:
        if isinstance(values, Mapping):
            for key, value in values.items():
                family.add(self._labels(engine, **{label: key}), value)
        else:
            family.add(self._labels(engine), values)

    def _of_server(self, name: str, help: str, values: Values, label: str = "") -> Family:
        """The counter of the server; with ``label`` a sample for each value that it takes."""
        family = Family("counter", name, help)
        self._add(family, self._server_label, values, label)
        return family

    def _gauges(self, totals: Totals) -> Iterator[Family]:
        engines = totals.engines

        def gauge(name: str, help: str, values: Callable[[Replica], float]) -> Family:
            return self._of_engines("gauge", name, help, values)

        yield gauge(
            "vllm:num_requests_running",
            "Sequences being generated",
            lambda r: engines[r.index].num_running,
        )
        yield gauge(
            "vllm:num_requests_waiting",
            "Sequences in the queue",
            lambda r: engines[r.index].num_waiting,
        )
        yield self._of_engines(
            "gauge",
            "vllm:num_requests_waiting_by_reason",
            "Sequences in the queue; capacity: for a free place or KV blocks",
            lambda r: {"capacity": engines[r.index].num_waiting, "deferred": 0},
            "reason",
        )
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield gauge(name, "Share of KV blocks held by sequences, 0 to 1", kv_cache_usage)
        yield self._of_engines("gauge", "octavo_kv_blocks", "KV blocks by state", _blocks, "state")
        for name, help, attribute in STATE_OF_ENGINE:
            yield gauge(name, help, lambda r, a=attribute: getattr(r.stats, a))  # type: ignore[misc]
        yield gauge(
            "octavo_waiting_prompt_tokens",
            "Prompt tokens in the queue",
            lambda r: engines[r.index].num_waiting_tokens,
        )
        yield gauge(
            "octavo_engine_up", "1 while the engine takes requests", lambda r: float(r.serves)
        )
        yield gauge(
            "octavo_step_age_seconds",
            "Age of the step under way, as of the engine's last heartbeat; 0 between steps",
            lambda r: r.client.step_age,
        )

    def _facts(self) -> Iterator[Family]:
        """Of the engines that serve; nothing before one does."""
        infos = {r.index: r.info for r in self._client.replicas if r.info is not None}
        if not infos:
            return
        cache = self._client.config.cache
        family = Family("info", "vllm:cache_config", "Facts of the KV cache")
        for index, info in infos.items():
            facts = {
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.num_blocks),
                "cache_dtype": cache.kv_cache_dtype,
                "enable_prefix_caching": str(cache.enable_prefix_caching),
                "kv_cache_memory_bytes": str(info.kv_cache_bytes),
            }
            family.add(self._labels(index, **facts), 1)
        yield family
        yield self._of_engines(
            "gauge",
            "octavo_max_num_seqs",
            "Sequences that may run at once",
            lambda r: infos[r.index].max_num_seqs if r.index in infos else {},
        )
        yield self._of_engines(
            "gauge",
            "octavo_startup_seconds",
            "Seconds each phase of the start took",
            lambda r: infos[r.index].startup_seconds if r.index in infos else {},
            "phase",
        )

    def _counters(self, totals: Totals) -> Iterator[Family]:
        engines = totals.engines

        def counter(name: str, help: str, values: Callable[[Replica], float]) -> Family:
            return self._of_engines("counter", name, help, values)

        def counted(name: str, help: str, values: Callable[[EngineTotals], float]) -> Family:
            return counter(name, help, lambda r: values(engines[r.index]))

        for name, help, attribute in COUNTS_OF_ENGINE:
            yield counter(name, help, lambda r, a=attribute: getattr(r.stats, a))  # type: ignore[misc]
        yield counted(
            "vllm:prompt_tokens", "Prompt tokens of started requests", lambda e: e.num_prompt_tokens
        )
        yield counted(
            "vllm:prompt_tokens_cached",
            "Of those, found in the cache",
            lambda e: e.num_cached_tokens,
        )
        yield counted(
            "vllm:generation_tokens", "Tokens returned to clients", lambda e: e.num_generated_tokens
        )
        yield self._of_engines(
            "counter",
            "vllm:request_success",
            "Sequences that ended, by reason",
            lambda r: {
                reason.value: engines[r.index].ended[reason.value] for reason in FinishReason
            },
            "finished_reason",
        )
        yield counted("octavo_requests_admitted", "Sequences queued", lambda e: e.num_admitted)
        yield counted(
            "octavo_requests_rejected",
            "Queued sequences the engine refused",
            lambda e: e.ended[REJECTED],
        )
        yield counted(
            "octavo_requests_retried",
            "Queued sequences that went on with another engine",
            lambda e: e.ended[RETRIED],
        )
        for name, help in (
            (ADMITTED, "Prompt tokens queued"),
            (STARTED, "Prompt tokens whose requests were scheduled"),
            (DROPPED, "Prompt tokens whose requests ended in the queue"),
        ):
            yield counted(
                f"octavo_prompt_tokens_{name}",
                help,
                lambda e, n=name: e.queue_tokens[n],  # type: ignore[misc]
            )
        yield counter(
            "octavo_engine_restarts",
            "How often the engine was started again",
            lambda r: r.restarts.count,
        )
        yield self._of_server(
            "octavo_requests_timed_out", "HTTP requests whose timeout passed", totals.num_timed_out
        )
        yield self._of_server(
            "octavo_requests_refused",
            "HTTP requests refused before they were queued, by status",
            totals.refused,
            "status",
        )
        yield from self._speculation(counter)

    def _speculation(
        self, counter: Callable[[str, str, Callable[[Replica], float]], Family]
    ) -> Iterator[Family]:
        for name, what, attribute in (
            ("num_drafts", "Drafts", "num_drafts"),
            ("num_draft_tokens", "Draft tokens", "num_draft_tokens"),
            ("num_accepted_tokens", "Accepted draft tokens", "num_accepted_drafts"),
        ):
            yield counter(
                f"vllm:spec_decode_{name}",
                f"{what} (no speculation: 0)",
                lambda r, a=attribute: getattr(r.stats, a),  # type: ignore[misc]
            )
        for name, what, attribute in (
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft", "accepted_at"),
            ("octavo_spec_decode_num_draft_tokens_per_pos", "Draft", "drafted_at"),
        ):
            yield self._of_engines(
                "counter",
                name,
                f"{what} tokens by their place in the draft",
                lambda r, a=attribute: {  # type: ignore[misc]
                    str(place): count for place, count in enumerate(getattr(r.stats, a))
                },
                "position",
            )
        yield self._of_engines(
            "gauge",
            "octavo_spec_decode_draft_length",
            "Draft tokens that a sequence may bring to a step now, on average",
            lambda r: r.stats.draft_length,
        )
        yield self._of_engines(
            "gauge",
            "octavo_spec_decode_saved_seconds",
            "Seconds that speculation has saved, against steps without that draw as many tokens "
            "(below 0: lost)",
            lambda r: r.stats.saved_seconds,
        )

    def _pipeline(self) -> Iterator[Family]:
        if self._client.config.parallel.pipeline_parallel_size == 1:
            return
        yield self._of_engines(
            "gauge",
            "octavo_pipeline_bubble_ratio",
            "Share of the time with work in which pipeline stages on average computed nothing",
            lambda r: r.stats.bubble,
        )
        yield self._of_engines(
            "counter",
            "octavo_pipeline_stage_busy_seconds",
            "Seconds that a pipeline stage computed",
            lambda r: {str(i): s for i, s in enumerate(r.stats.stage_busy_seconds)},
            "stage",
        )
        yield self._of_engines(
            "counter",
            "octavo_pipeline_work_seconds",
            "Seconds in which the pipeline had a plan",
            lambda r: r.stats.work_seconds,
        )

    def _histograms(self, totals: Totals) -> Iterator[Family]:
        labels = {index: self._labels(index) for index in totals.engines}
        for name, help, attribute in HISTOGRAMS:
            family = Family("histogram", name, help)
            for index, engine in totals.engines.items():
                summed = Histogram(getattr(self._metrics.of(index), attribute).bounds)
                summed.counts, summed.total = engine.histograms[attribute]
                family.add_histogram(labels[index], summed)
            yield family
        tokens = Family("histogram", "vllm:iteration_tokens_total", "Tokens computed by a step")
        seconds = Family(
            "histogram", "octavo_step_seconds", "Seconds of a step, and of scheduling in it"
        )
        for index in totals.engines:
            steps = self._metrics.steps[index]
            tokens.add_histogram(labels[index], steps.tokens)
            for part, histogram in steps.seconds.items():
                seconds.add_histogram(self._labels(index, part=part), histogram)
        yield tokens
        yield seconds


def _blocks(replica: Replica) -> dict[str, float]:
    stats = replica.stats
    return {"used": stats.blocks_used, "cached": stats.blocks_cached, "free": stats.blocks_free}


def kv_cache_usage(*replicas: Replica) -> float:
    """The share of their KV blocks that sequences hold, 0 to 1; 0 without any."""
    all_blocks = [_blocks(replica) for replica in replicas]
    num_blocks = sum(sum(blocks.values()) for blocks in all_blocks)
    return sum(blocks["used"] for blocks in all_blocks) / num_blocks if num_blocks else 0.0
