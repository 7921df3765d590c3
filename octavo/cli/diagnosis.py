"""What scrapes of /metrics, some seconds apart, say is wrong with a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# From which on something is trouble. The alerts of deploy/prometheus have the same.
FULL_CACHE = 0.9  # share of the KV blocks that running sequences hold
MANY_PREEMPTIONS = 0.1  # for each sequence that came
LOW_ACCEPTANCE = 0.3  # share of the draft tokens
LOW_HITS = 0.05  # share of the prompt tokens that were looked up
MANY_LOOKED_UP = 1000  # prompt tokens, below which hits say nothing
HOST_SHARE = 0.3  # of a step's time
FEW_STEPS = 20  # below which their times say nothing
MANY_REFUSED = 0.05  # share of what came
MANY_ERRORS = 0.01  # share of what ended
OLD_STEP = 10.0  # seconds


@dataclass(frozen=True)
class Finding:
    """``checklist``: the line of the guide's checklist that it belongs to, or ""."""

    name: str
    says: str
    evidence: str
    fix: str
    checklist: str = ""


class Scrape:
    """The samples of one page. ``when``: seconds on any clock."""

    def __init__(self, page: str, when: float) -> None:
        self.when = when
        self._samples = [
            sample
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have these labels; 0 without any."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def engines(self) -> list[str]:
        return [s.labels["engine"] for s in self._samples if s.name == "octavo_engine_up"]

    def label(self, name: str, label: str) -> str:
        """Of the first sample of that name; "" without one."""
        found = (s.labels.get(label, "") for s in self._samples if s.name == name)
        return next(found, "")


class Stretch:
    """From the first of some scrapes to the last."""

    def __init__(self, looks: Sequence[Scrape]) -> None:
        """At least two, in order."""
        self.looks = looks
        self.before, self.after = looks[0], looks[-1]

    @property
    def seconds(self) -> float:
        return self.after.when - self.before.when

    def gained(self, name: str, **labels: str) -> float:
        """By how much a counter grew; its whole where the server was started again meanwhile."""
        now, then = self.after.total(name, **labels), self.before.total(name, **labels)
        return now - then if now >= then else now

    def mean(self, name: str, **labels: str) -> float:
        """Of a gauge."""
        return sum(look.total(name, **labels) for look in self.looks) / len(self.looks)


def diagnose(stretch: Stretch) -> list[Finding]:
    """What is wrong, the gravest first."""
    return [finding for rule in RULES for finding in rule(stretch)]


def engine_down(s: Stretch) -> Iterator[Finding]:
    down = [e for e in s.after.engines() if not s.after.total("octavo_engine_up", engine=e)]
    if down:
        yield Finding(
            "engine down",
            "an engine takes no requests",
            f"octavo_engine_up is 0 for engine {', '.join(down)}",
            "/health says why (loading, draining, stalled, dead); the log has its last words",
        )
    if restarts := s.after.total("octavo_engine_restarts_total"):
        yield Finding(
            "engine restarts",
            "an engine has died and was started again",
            f"octavo_engine_restarts_total {restarts:.0f}",
            "the log names the reason: out of memory on the host, a signal, a step past "
            "--step-deadline",
        )


def step_hangs(s: Stretch) -> Iterator[Finding]:
    age = max((s.after.total("octavo_step_age_seconds", engine=e) for e in s.after.engines()),
              default=0.0)  # fmt: skip
    if age > OLD_STEP:
        yield Finding(
            "step hangs",
            "a step does not end",
            f"octavo_step_age_seconds {age:.1f}",
            "look for the stacks in the log (from half of --step-deadline on); several GPUs: "
            "nvidia-smi topo -m, NCCL_DEBUG=INFO",
            "tensor parallelism over NVLink, pipelines between machines",
        )


def cache_saturated(s: Stretch) -> Iterator[Finding]:
    for engine in s.after.engines():
        blocks = {
            state: s.mean("octavo_kv_blocks", engine=engine, state=state)
            for state in ("used", "cached", "free")
        }
        total = sum(blocks.values())
        waiting = s.mean("vllm:num_requests_waiting", engine=engine)
        if total and blocks["used"] / total > FULL_CACHE and waiting >= 1:
            parts = ", ".join(f"{count:.0f} {state}" for state, count in blocks.items())
            yield Finding(
                "cache saturated",
                "the KV cache is full, and sequences wait for it",
                f"engine {engine}: on average {parts} blocks ({blocks['used'] / total:.0%} used); "
                f"{waiting:.0f} sequences waiting",
                "give the cache more memory (--kv-cache-memory-bytes, --gpu-memory-utilization), "
                "halve a token's size (--kv-cache-dtype fp8), lower --max-model-len, or add "
                "replicas",
                "--max-model-len no larger than needed; quantize; watch gpu_cache_usage_perc",
            )


def preemption_thrash(s: Stretch) -> Iterator[Finding]:
    preempted = s.gained("vllm:num_preemptions_total")
    came = s.gained("octavo_requests_admitted_total")
    running = s.after.total("vllm:num_requests_running")
    if preempted >= 3 and preempted / max(came, running, 1.0) > MANY_PREEMPTIONS:
        yield Finding(
            "preemption thrash",
            "running sequences lose their KV blocks and are computed again",
            f"{preempted:.0f} preemptions in {s.seconds:.0f} s, while {came:.0f} sequences came "
            f"and {running:.0f} run",
            "lower --max-num-seqs, or give the cache more memory (--kv-cache-memory-bytes)",
            "--max-num-seqs where the cache is full (the guide's table of memory)",
        )


def queue_grows(s: Stretch) -> Iterator[Finding]:
    least = min(look.total("vllm:num_requests_waiting") for look in s.looks)
    then = s.before.total("vllm:num_requests_waiting")
    now = s.after.total("vllm:num_requests_waiting")
    places = s.after.total("octavo_max_num_seqs")
    if least and now > then:
        running = s.after.total("vllm:num_requests_running")
        yield Finding(
            "queue grows",
            "more comes than is served",
            f"waiting {then:.0f} → {now:.0f} in {s.seconds:.0f} s; {running:.0f} of {places:.0f} "
            "places run",
            "replicas (--data-parallel-size) or servers; with free memory --max-num-seqs; bound "
            "what waits with --max-queue-wait",
            "watch the length of the queue",
        )


def refuses(s: Stretch) -> Iterator[Finding]:
    by_status = {
        status: s.gained("octavo_requests_refused_total", status=status)
        for status in ("429", "503")
    }
    refused, came = sum(by_status.values()), s.gained("octavo_requests_admitted_total")
    if refused and refused / (refused + came) > MANY_REFUSED:
        yield Finding(
            "requests refused",
            "clients are turned away",
            f"{by_status['429']:.0f} × 429, {by_status['503']:.0f} × 503, {came:.0f} sequences "
            f"queued in {s.seconds:.0f} s",
            "429: the queue is at its bounds, which protect those inside; serve more (replicas) "
            "rather than raise them. 503: see /health",
            "watch the length of the queue",
        )


def errors(s: Stretch) -> Iterator[Finding]:
    failed = s.gained("vllm:request_success_total", finished_reason="error")
    ended = s.gained("vllm:request_success_total")
    if failed and failed / ended > MANY_ERRORS:
        yield Finding(
            "requests fail",
            "sequences end with an error",
            f"{failed:.0f} of {ended:.0f} that ended in {s.seconds:.0f} s",
            "the log has the failed step, its requests and the trace",
        )


def speculation_loses(s: Stretch) -> Iterator[Finding]:
    drafted = s.gained("vllm:spec_decode_num_draft_tokens_total")
    accepted = s.gained("vllm:spec_decode_num_accepted_tokens_total")
    name = "octavo_spec_decode_saved_seconds"
    saved = s.after.total(name) - s.before.total(name)
    if drafted and (accepted / drafted < LOW_ACCEPTANCE or saved < 0):
        lost = f"; {-saved:.1f} s lost in {s.seconds:.0f} s" if saved < 0 else ""
        yield Finding(
            "speculation loses",
            "draft tokens cost more than they bring",
            f"{accepted:.0f} of {drafted:.0f} draft tokens accepted ({accepted / drafted:.0%})"
            f"{lost}",
            "fewer draft tokens (--num-speculative-tokens), or serve without speculation: it pays "
            "for predictable output at low temperature and small batches",
            "speculative decoding: for structured output",
        )


def few_prefix_hits(s: Stretch) -> Iterator[Finding]:
    line = "prefix caching: a must for RAG and agents"
    if s.after.label("vllm:cache_config_info", "enable_prefix_caching") == "False":
        yield Finding(
            "prefix cache off",
            "prompts that begin alike are computed anew",
            'vllm:cache_config_info{enable_prefix_caching="False"}',
            "drop --no-enable-prefix-caching",
            line,
        )
        return
    looked_up = s.gained("vllm:prefix_cache_queries_total")
    found = s.gained("vllm:prefix_cache_hits_total")
    if looked_up >= MANY_LOOKED_UP and found / looked_up < LOW_HITS:
        cached = s.after.total("octavo_kv_blocks", state="cached")
        yield Finding(
            "low prefix hits",
            "hardly a prompt begins as another one did",
            f"{found:.0f} of {looked_up:.0f} prompt tokens found ({found / looked_up:.1%}); "
            f"{cached:.0f} blocks cached",
            "put what is the same first (system prompt, documents) and what differs last (dates, "
            "ids); with several replicas send prompt_cache_key; where nothing stays cached give "
            "the cache more memory. Prompts that share nothing need no change",
            line,
        )


def host_bound(s: Stretch) -> Iterator[Finding]:
    steps = s.gained("octavo_step_seconds_count", part="total")
    whole = s.gained("octavo_step_seconds_sum", part="total")
    schedule = s.gained("octavo_step_seconds_sum", part="schedule")
    if steps >= FEW_STEPS and whole and schedule / whole > HOST_SHARE:
        yield Finding(
            "host-bound",
            "the device waits for the host",
            f"scheduling takes {schedule / steps * 1e3:.2f} ms of a step's "
            f"{whole / steps * 1e3:.2f} ms ({schedule / whole:.0%}), over {steps:.0f} steps",
            "faster or more cores (the cgroup's quota: `octavo doctor`), a model that is larger "
            "than this one's steps, or more sequences in each step",
            "hardware that fits the model",
        )


RULES: tuple[Callable[[Stretch], Iterator[Finding]], ...] = (
    *(engine_down, step_hangs, errors, cache_saturated, preemption_thrash, queue_grows, refuses),
    *(host_bound, speculation_loses, few_prefix_hits),
)
