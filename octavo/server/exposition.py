"""The families of /metrics: names and definitions as in vLLM, plus octavo's own (docs/server.md).

Read from live state whenever Prometheus scrapes. Intervals are in seconds: first token = arrival →
first token; queue = arrival → first scheduled; prefill = first scheduled → first token; decode =
first → last token; inference = first scheduled → last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.engine.messages import REJECTED, RETRIED
from octavo.engine.replica import Replica
from octavo.engine.replicas import Replicas
from octavo.server.histograms import Histogram
from octavo.server.totals import Totals
from octavo.types import FinishReason

if TYPE_CHECKING:
    from octavo.server.metrics import Metrics

ALL_ENGINES = "all"  # the label of what the API process counts, where there are several engines


class Exposition(Collector):
    """What ``metrics`` and the engines of ``client`` hold, as families."""

    def __init__(self, metrics: Metrics, client: Replicas, model_name: str) -> None:
        self._metrics = metrics
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Counts are summed over all API processes; the engine's own figures appear once."""
        totals = self._metrics.totals()
        yield from self._gauges(totals)
        yield from self._counters(totals)
        yield from self._histograms(totals)

    @property
    def _server_label(self) -> str:
        """What is counted for the whole server is told of the one engine, or of all."""
        return "0" if len(self._client.replicas) == 1 else ALL_ENGINES

    def _of_engines(
        self,
        kind: Callable[..., Metric],
        name: str,
        help: str,
        values: Callable[[Replica], float | dict[str, float]],
        label: str = "",
    ) -> Metric:
        """A sample for each engine; with ``label`` one for each value that it takes."""
        family = kind(name, help, labels=["model_name", "engine", *([label] if label else [])])
        for replica in self._client.replicas:
            found = values(replica)
            for key, value in found.items() if isinstance(found, dict) else [("", found)]:
                labels = [self._model_name, str(replica.index), *([key] if label else [])]
                family.add_metric(labels, value)  # type: ignore[attr-defined]
        return family

    def _of_server(
        self,
        kind: Callable[..., Metric],
        name: str,
        help: str,
        values: float | dict[str, float],
        label: str = "",
    ) -> Metric:
        """The sample of the server; with ``label`` one for each value that it takes."""
        family = kind(name, help, labels=["model_name", "engine", *([label] if label else [])])
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            labels = [self._model_name, self._server_label, *([key] if label else [])]
            family.add_metric(labels, value)  # type: ignore[attr-defined]
        return family

    def _gauges(self, totals: Totals) -> Iterator[Metric]:
        engines = totals.engines

        def gauge(name: str, help: str, values: Callable[[Replica], float]) -> Metric:
            return self._of_engines(GaugeMetricFamily, name, help, values)

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
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Sequences in the queue; capacity: for a free place or KV blocks",
            lambda r: {"capacity": engines[r.index].num_waiting, "deferred": 0},
            "reason",
        )
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield gauge(name, "Share of KV blocks held by sequences, 0 to 1", kv_cache_usage)
        yield self._of_engines(
            GaugeMetricFamily, "octavo_kv_blocks", "KV blocks by state", _blocks, "state"
        )
        yield gauge(
            "octavo_kv_internal_fragmentation_ratio",
            "Share of the used blocks' token places that hold no token",
            lambda r: r.stats.fragmentation,
        )
        yield gauge(
            "octavo_graphs_pending",
            "CUDA graphs yet to be captured in idle moments",
            lambda r: r.stats.graphs_pending,
        )
        if self._client.config.parallel.pipeline_parallel_size > 1:
            yield gauge(
                "octavo_pipeline_bubble_ratio",
                "Share of the time with work in which pipeline stages on average computed nothing",
                lambda r: r.stats.bubble,
            )
        yield gauge(
            "octavo_waiting_prompt_tokens",
            "Prompt tokens in the queue",
            lambda r: engines[r.index].num_waiting_tokens,
        )
        yield gauge(
            "octavo_engine_up", "1 while the engine takes requests", lambda r: float(r.serves)
        )
        yield from self._facts()

    def _facts(self) -> Iterator[Metric]:
        """Of the engines that serve; nothing before one does."""
        infos = {r.index: r.info for r in self._client.replicas if r.info is not None}
        if not infos:
            return
        cache = self._client.config.cache
        family = InfoMetricFamily(
            "vllm:cache_config", "Facts of the KV cache", labels=["model_name", "engine"]
        )
        for index, info in infos.items():
            facts = {
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.num_blocks),
                "cache_dtype": cache.kv_cache_dtype,
                "enable_prefix_caching": str(cache.enable_prefix_caching),
                "kv_cache_memory_bytes": str(info.kv_cache_bytes),
            }
            family.add_metric([self._model_name, str(index)], facts)
        yield family
        yield self._of_engines(
            GaugeMetricFamily,
            "octavo_startup_seconds",
            "Seconds each phase of the start took",
            lambda r: dict(infos[r.index].startup_seconds) if r.index in infos else {},
            "phase",
        )

    def _counters(self, totals: Totals) -> Iterator[Metric]:
        engines = totals.engines

        def counter(name: str, help: str, values: Callable[[Replica], float]) -> Metric:
            return self._of_engines(CounterMetricFamily, name, help, values)

        def of_server(name: str, help: str, value: float) -> Metric:
            return self._of_server(CounterMetricFamily, name, help, value)

        for name, help, attribute in (
            ("vllm:prefix_cache_queries", "Tokens looked up", "prefix_queries"),
            ("vllm:prefix_cache_hits", "Tokens found", "prefix_hits"),
            ("vllm:num_preemptions", "Preemptions", "num_preemptions"),
            ("octavo_cow_copies", "Blocks copied on write", "num_copies"),
        ):
            yield counter(name, help, lambda r, a=attribute: getattr(r.stats, a))  # type: ignore[misc]
        yield of_server(
            "vllm:prompt_tokens", "Prompt tokens of started requests", totals.num_prompt_tokens
        )
        yield of_server(
            "vllm:prompt_tokens_cached", "Of those, found in the cache", totals.num_cached_tokens
        )
        yield of_server(
            "vllm:generation_tokens", "Tokens returned to clients", totals.num_generated_tokens
        )
        yield self._of_engines(
            CounterMetricFamily,
            "vllm:request_success",
            "Sequences that ended, by reason",
            lambda r: {
                reason.value: engines[r.index].ended[reason.value] for reason in FinishReason
            },
            "finished_reason",
        )
        yield counter(
            "octavo_requests_admitted",
            "Sequences queued",
            lambda r: engines[r.index].num_admitted,
        )
        yield counter(
            "octavo_requests_rejected",
            "Queued sequences the engine refused",
            lambda r: engines[r.index].ended[REJECTED],
        )
        yield counter(
            "octavo_requests_retried",
            "Queued sequences that went on with another engine",
            lambda r: engines[r.index].ended[RETRIED],
        )
        yield counter(
            "octavo_engine_restarts",
            "How often the engine was started again",
            lambda r: r.restarts.count,
        )
        yield of_server(
            "octavo_requests_timed_out", "HTTP requests whose timeout passed", totals.num_timed_out
        )
        yield self._of_server(
            CounterMetricFamily,
            "octavo_requests_refused",
            "HTTP requests refused before they were queued, by status",
            dict(totals.refused),
            "status",
        )
        if self._client.config.parallel.pipeline_parallel_size > 1:
            yield self._of_engines(
                CounterMetricFamily,
                "octavo_pipeline_stage_busy_seconds",
                "Seconds that a pipeline stage computed",
                lambda r: {str(i): s for i, s in enumerate(r.stats.stage_busy_seconds)},
                "stage",
            )
            yield counter(
                "octavo_pipeline_work_seconds",
                "Seconds in which the pipeline had a plan",
                lambda r: r.stats.work_seconds,
            )
        yield from self._speculation(counter)

    def _speculation(
        self, counter: Callable[[str, str, Callable[[Replica], float]], Metric]
    ) -> Iterator[Metric]:
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
                CounterMetricFamily,
                name,
                f"{what} tokens by their place in the draft",
                lambda r, a=attribute: {  # type: ignore[misc]
                    str(place): count for place, count in enumerate(getattr(r.stats, a))
                },
                "position",
            )
        yield self._of_engines(
            GaugeMetricFamily,
            "octavo_spec_decode_draft_length",
            "Draft tokens that a sequence may bring to a step now, on average",
            lambda r: r.stats.draft_length,
        )
        yield self._of_engines(
            GaugeMetricFamily,
            "octavo_spec_decode_saved_seconds",
            "Seconds that speculation has saved, against steps without that draw as many tokens "
            "(below 0: lost)",
            lambda r: r.stats.saved_seconds,
        )

    def _histograms(self, totals: Totals) -> Iterator[Metric]:
        for name, help, attribute in (
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
        ):
            summed_up = self._summed(attribute, totals)
            yield self._histogram(name, help, [([self._server_label], summed_up)])
        steps = [(str(r.index), self._metrics.steps[r.index]) for r in self._client.replicas]
        yield self._histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed by a step",
            [([engine], of_engine.tokens) for engine, of_engine in steps],
        )
        yield self._histogram(
            "octavo_step_seconds",
            "Seconds of a step, and of scheduling in it",
            [
                ([engine, part], histogram)
                for engine, of_engine in steps
                for part, histogram in of_engine.seconds.items()
            ],
            "part",
        )

    def _summed(self, attribute: str, totals: Totals) -> Histogram:
        summed = Histogram(getattr(self._metrics, attribute).bounds)
        summed.counts, summed.total = totals.histograms[attribute]
        return summed

    def _histogram(
        self, name: str, help: str, parts: list[tuple[list[str], Histogram]], *label: str
    ) -> Metric:
        """``parts``: values of the labels engine and ``label``, and the histogram they have."""
        family = HistogramMetricFamily(name, help, labels=["model_name", "engine", *label])
        for labels, histogram in parts:
            labels = [self._model_name, *labels]
            family.add_metric(labels, histogram.buckets(), histogram.total)
        return family


def _blocks(replica: Replica) -> dict[str, float]:
    stats = replica.stats
    return {"used": stats.blocks_used, "cached": stats.blocks_cached, "free": stats.blocks_free}


def kv_cache_usage(*replicas: Replica) -> float:
    """The share of their KV blocks that sequences hold, 0 to 1; 0 without any."""
    all_blocks = [_blocks(replica) for replica in replicas]
    num_blocks = sum(sum(blocks.values()) for blocks in all_blocks)
    return sum(blocks["used"] for blocks in all_blocks) / num_blocks if num_blocks else 0.0
