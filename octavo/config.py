"""The configuration: every flag is a field here, and nothing else reads the environment.

``cli.arguments`` builds the parser, its help and its defaults from the fields' metadata. A
configuration is frozen; what is only known after loading (block count, EOS set, effective length)
lives in ``EngineInfo`` (engine.messages).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.flags import flag, internal
from octavo.speculation import SpeculativeConfig, check_stages, speculating
from octavo.types import ConfigError

GIB = 1 << 30


QUANTIZATIONS = (
    *("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8", "int8_weight_only"),
    *("bitsandbytes", "bitsandbytes_int8"),  # these round dense weights, too
    *("gguf", "gptq", "awq", "squeezellm", "compressed-tensors", "mxfp4"),
    *("gptq_marlin", "awq_marlin", "fbgemm_fp8"),  # as vLLM calls some of them
)


@dataclass(frozen=True)
class ModelConfig:
    model: str = flag(
        "smollm2-135m",
        "a local directory, a GGUF file, a hub id or a name from `octavo models`",
        group="model",
        positional=True,
        top=True,
    )
    served_model_name: list[str] = flag(
        [],
        "names clients may use; the first is the one reported (default MODEL)",
        group="model",
        kind="list",
        top=True,
    )
    tokenizer: str | None = flag(
        None, "tokenizer directory or file (default: the model's)", group="model"
    )
    skip_tokenizer_init: bool = flag(
        False, "serve token ids only; no tokenizer is loaded", group="model"
    )
    dtype: str = flag(
        "auto",
        "numbers to compute with; auto: on a GPU the checkpoint's 16-bit ones (BF16 for FP32), on "
        "a CPU BF16 where it has it, else FP32",
        group="model",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        top=True,
    )
    quantization: str | None = flag(
        None,
        "how weights are kept; fp8 …, int8 … and bitsandbytes … round dense ones while loading; "
        "the others name what a checkpoint is in (default: as the checkpoint holds them)",
        "-q",
        group="model",
        choices=QUANTIZATIONS,
        top=True,
    )
    quantization_fp8_dynamic: bool = flag(
        False,
        "with --quantization fp8: inputs are scaled as they come, which they are anyway",
        group="model",
    )
    quantized_activations: str = flag(
        "auto",
        "round the inputs of quantized weights, too: auto as the format says and the device does "
        "it, on a CPU to 8 bits for 4-bit and 8-bit weights; always, or refuse; never",
        group="model",
        choices=("auto", "always", "never"),
    )
    quantize_head: bool | None = flag(
        None,
        "round the output head as the other weights (default: with int8 … on a CPU)",
        group="model",
    )
    max_model_len: int | None = flag(
        None,
        "prompt + output tokens; -1 or auto fits it to memory (32k, 32K)",
        group="model",
        kind="int_or_auto",
        top=True,
        minimum=1,
    )
    load_format: str = flag(
        "auto",
        "how weights are read; pt: PyTorch's .bin files, dummy: random weights; bitsandbytes is as "
        "auto",
        group="model",
        choices=("auto", "safetensors", "pt", "gguf", "dummy", "bitsandbytes"),
    )
    revision: str | None = flag(None, "hub revision (branch, tag or commit)", group="model")
    trust_remote_code: bool = flag(
        False, "refused: octavo never runs code from a checkpoint", group="model"
    )
    hf_overrides: dict[str, Any] = flag(
        {}, "JSON merged over config.json", group="model", kind="json"
    )
    seed: int = flag(0, "server seed: unseeded requests derive theirs from it", group="model")
    generation_config: str = flag(
        "auto",
        "auto: the checkpoint's sampling defaults; vllm or none: neutral ones",
        group="model",
    )
    override_generation_config: dict[str, Any] = flag(
        {}, "JSON over the sampling defaults", group="model", kind="json"
    )
    max_logprobs: int = flag(
        20, "most logprobs a request may ask for; -1: no cap", group="model", minimum=-1
    )
    deterministic: bool = flag(
        False,
        "batch-invariant logits: one row is computed the same way in any batch (slower on a GPU; "
        "on a CPU with octavo's BF16 kernels it always is)",
        group="model",
    )


@dataclass(frozen=True)
class CacheConfig:
    block_size: int | None = flag(
        None,
        "tokens in a KV block (auto: 16 on a CPU, 64 on a GPU)",
        group="cache",
        kind="int_or_auto",
        minimum=1,
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "exact KV cache size, e.g. 4GiB (default: on a CPU 40 %% of free memory, on a GPU what "
        "gpu-memory-utilization leaves; at most what max-num-seqs requests of full length can use)",
        group="cache",
        kind="bytes",
        top=True,
        minimum=1,
    )
    gpu_memory_utilization: float = flag(
        0.92,
        "share of a GPU's memory this instance may use",
        group="cache",
        minimum=0.01,
        maximum=1.0,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "numbers in the KV cache; auto: as dtype; in 8 bits (fp8 is fp8_e4m3) the same memory "
        "holds about twice the tokens of bfloat16",
        group="cache",
        choices=(
            *("auto", "bfloat16", "float16", "float32"),
            *("fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
        ),
    )
    num_gpu_blocks_override: int | None = flag(
        None, "force the number of KV blocks (to test preemption)", group="cache", minimum=1
    )
    enable_prefix_caching: bool = flag(True, "reuse KV blocks of equal prefixes", group="cache")
    prefix_cache_scope: str = flag(
        "auto",
        "who shares cached blocks; auto: key with several API keys, else server",
        group="cache",
        choices=("auto", "key", "server"),
    )


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int | None = flag(
        None,
        "cap on running requests (CPU: 128; GPU: 256, from 70 GiB on 1024)",
        group="scheduler",
        top=True,
        minimum=1,
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "token budget of one step (CPU: 2048; GPU: 2048, from 70 GiB on 8192)",
        group="scheduler",
        minimum=1,
    )
    enable_chunked_prefill: bool = flag(
        True, "split long prompts over steps so that running requests go on", group="scheduler"
    )
    adaptive_chunks: bool = flag(
        True,
        "while requests decode, keep prompt chunks so short that a step takes at most twice its "
        "time without them (more if a crowd of prompts waits); off (octavo.LLM): throughput alone "
        "counts",
        group="scheduler",
    )
    long_prefill_token_threshold: int = flag(
        0, "most prompt tokens of one request per step; 0: no cap", group="scheduler", minimum=0
    )
    scheduling_policy: str = flag(
        "fcfs",
        "order of the waiting queue; fair: each API key gets its share of the tokens",
        group="scheduler",
        choices=("fcfs", "priority", "fair"),
    )
    priority_ageing: float = flag(
        0.0,
        "seconds of waiting that raise a request by one priority level; 0: off",
        group="scheduler",
        minimum=0,
    )
    max_num_queued_reqs: int | None = flag(
        None,
        "most waiting requests (default 4 x max-num-seqs); beyond: 429",
        group="scheduler",
        minimum=0,
    )
    max_num_queued_tokens: int = flag(
        1_000_000, "most waiting prompt tokens; beyond: 429", group="scheduler", minimum=0
    )
    max_queue_wait: float = flag(
        30.0,
        "refuse (429) when the predicted wait is longer, in seconds",
        group="scheduler",
        minimum=0,
    )
    async_scheduling: bool = flag(True, "build step N+1 while step N runs", group="scheduler")
    step_deadline: float = flag(
        30.0, "a step older than this many seconds ends its engine", group="scheduler", minimum=0.1
    )


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = flag(
        1, "devices that share each layer", "-tp", group="parallel", minimum=1
    )
    pipeline_parallel_size: int = flag(1, "stages of layers", "-pp", group="parallel", minimum=1)
    data_parallel_size: int = flag(
        1,
        "engine replicas behind one port, each with GPUs of its own (-tp x -pp), or on a CPU with "
        "its share of cores and memory",
        "-dp",
        group="parallel",
        minimum=1,
    )
    data_parallel_size_local: int | None = flag(
        None,
        "replicas of them on this node; those of other nodes join (octavo serve --headless). "
        "Default: all; with --headless 1, with --data-parallel-backend ray 0",
        "-dpl",
        group="parallel",
        minimum=0,
    )
    data_parallel_address: str = flag(
        "127.0.0.1",
        "address at which the head node is joined by replicas of others (0.0.0.0: at all it has)",
        "-dpa",
        group="parallel",
    )
    data_parallel_rpc_port: int = flag(
        29550,
        "port at which the head node is joined; the two ports behind it serve the first replica "
        "that joins, the next two the second … (0: any free ones)",
        "-dpp",
        group="parallel",
        minimum=0,
        maximum=65535,
    )
    data_parallel_backend: str = flag(
        "mp",
        "ray: the replicas are actors of a Ray cluster that runs already, on a node each",
        "-dpb",
        group="parallel",
        choices=("mp", "ray"),
    )
    headless: bool = flag(
        False,
        "serve no HTTP here: the replicas of this node join the head node at "
        "--data-parallel-address",
        group="parallel",
    )
    distributed_executor_backend: str | None = flag(
        None, "uni for one device, else mp or ray", group="parallel", choices=("uni", "mp", "ray")
    )
    nnodes: int = flag(
        1,
        "machines that an engine's devices are on, as many on each: start the same command on all, "
        "with its --node-rank",
        "-n",
        group="parallel",
        minimum=1,
    )
    node_rank: int = flag(
        0,
        "which of them this is: 0 serves, the others lend their devices to it",
        "-r",
        group="parallel",
        minimum=0,
    )
    master_addr: str = flag(
        "127.0.0.1", "address of machine 0, as the others reach it", group="parallel"
    )
    master_port: int = flag(
        29501,
        "port on which machine 0 waits for the others",
        group="parallel",
        minimum=1,
        maximum=65535,
    )
    cluster_secret_file: str | None = flag(
        None,
        "file with the secret that the hosts of a cluster share (also OCTAVO_CLUSTER_SECRET); "
        "nothing listens to other hosts without one",
        group="parallel",
    )
    cpu_threads: int | None = flag(
        None,
        "compute threads of a device's process (default: the cores this process may use, divided "
        "by the devices of all replicas)",
        group="parallel",
        minimum=1,
    )
    replica: int = internal(0)  # which of the data-parallel replicas this engine is
    session: str = internal("")  # of an engine that has joined: its sockets' secret is of both
    replica_memory: int | None = internal(None)  # bytes it may count on; None: all that is free

    @property
    def world_size(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_local(self) -> int:
        """Replicas of this node."""
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        if self.headless:
            return 1
        return 0 if self.data_parallel_backend == "ray" else self.data_parallel_size

    @property
    def joined_everywhere(self) -> bool:
        """Ray knows by which address its nodes reach this one; nobody has to choose it."""
        return self.data_parallel_backend == "ray" and self.data_parallel_address == "127.0.0.1"

    @property
    def num_joining(self) -> int:
        """Replicas of other nodes, which join."""
        return 0 if self.headless else self.data_parallel_size - self.num_local

    @property
    def rank_memory(self) -> int | None:
        """Bytes that the process of one of a replica's devices may count on."""
        return None if self.replica_memory is None else self.replica_memory // self.world_size


def check_structured_outputs(settings: dict[str, Any]) -> None:
    """Raises ConfigError for a setting of --structured-outputs-config that is not there."""
    spelling = "--structured-outputs-config"
    for name, value in settings.items():
        if name == "backend":
            if value not in ("auto", "guidance"):
                raise ConfigError(
                    f"{spelling} backend {value!r}: the only one here is guidance (or auto)"
                )
        elif name == "disable_any_whitespace":
            if not isinstance(value, bool):
                raise ConfigError(f"{spelling} {name} {value!r}: must be true or false")
        elif not (name == "disable_fallback" and isinstance(value, bool)):
            raise ConfigError(
                f"{spelling} has no setting {name!r}; it has backend and disable_any_whitespace"
            )


@dataclass(frozen=True)
class EngineConfig:
    """All an engine needs to run; the server's own flags are in ``ServerConfig``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    enforce_eager: bool = flag(False, "no CUDA graphs", group="model")
    structured_outputs_config: dict[str, Any] = flag(
        {},
        'JSON: "backend" (auto or guidance, which are the same), "disable_any_whitespace" (true: '
        "none between the tokens of constrained JSON)",
        group="model",
        kind="json",
        check=check_structured_outputs,
    )
    log_format: str = internal("text")  # as the server's flag says
    nvtx: bool = flag(False, "an NVTX range for every step, for Nsight Systems", group="model")


# The second line: further names that vLLM has for the same formats.
TOOL_CALL_PARSERS = (
    *("auto", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "deepseek_v3"),
    *("granite", "openai", "json"),
    *("llama4_json", "llama4_pythonic", "qwen3_xml", "deepseek_v31", "granite4"),
)
REASONING_PARSERS = (
    *("deepseek_r1", "qwen3", "granite", "openai"),
    *("deepseek_v3", "openai_gptoss"),
)


@dataclass(frozen=True)
class ServerConfig:
    host: str = flag(
        "127.0.0.1", "address to listen on (0.0.0.0: all interfaces)", group="server", top=True
    )
    port: int = flag(
        8000,
        "port, bound before the model loads; 0: any free one",
        group="server",
        top=True,
        minimum=0,
        maximum=65535,
    )
    uds: str | None = flag(None, "listen on this Unix socket instead", group="server")
    api_key: list[str] = flag(
        [],
        "keys that guard every route but health (also OCTAVO_API_KEY, VLLM_API_KEY); KEY=infer may "
        "do no more than that",
        group="server",
        kind="list",
        top=True,
    )
    api_key_file: str | None = flag(
        None,
        "file of keys, a line each: NAME KEY SCOPES [weight=W]; read again when it changes",
        group="server",
    )
    chat_template: str | None = flag(
        None, "Jinja template: a file or the text itself", group="server"
    )
    chat_template_content_format: str = flag(
        "auto",
        "how message contents reach the template",
        group="server",
        choices=("auto", "string", "openai"),
    )
    enable_auto_tool_choice: bool = flag(
        False,
        "let models call tools when a request leaves the choice to them; needs --tool-call-parser",
        group="server",
    )
    tool_call_parser: str | None = flag(
        None,
        "format of the model's tool calls; auto: the one its chat template shows",
        group="server",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str | None = flag(
        None,
        "how the model marks its reasoning, which is then set apart from its answers",
        group="server",
        choices=REASONING_PARSERS,
    )
    trust_request_chat_template: bool = flag(
        False, "let a request bring its own chat template", group="server"
    )
    allow_special_tokens_in_content: bool = flag(
        False, "let message text contain control tokens", group="server"
    )
    lenient: bool = flag(
        False, "list unknown request fields as warnings instead of 400", group="server"
    )
    enable_log_requests: bool = flag(
        False, "log each request's id, length and parameters", group="server"
    )
    disable_log_stats: bool = flag(False, "no stats line every 10 s", group="server")
    log_format: str = flag(
        "text",
        "json: each log line of all processes is a JSON object",
        group="server",
        choices=("text", "json"),
    )
    uvicorn_log_level: str = flag(
        "info",
        "log level of the HTTP server",
        group="server",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )
    disable_uvicorn_access_log: bool = flag(False, "no access log line per request", group="server")
    root_path: str = flag("", "path prefix stripped by a proxy", group="server")
    allowed_origins: list[str] = flag(["*"], "CORS origins", group="server", kind="list")
    allowed_methods: list[str] = flag(["*"], "CORS methods", group="server", kind="list")
    allowed_headers: list[str] = flag(["*"], "CORS headers", group="server", kind="list")
    middleware: list[str] = flag(
        [],
        "ASGI middleware around the server: dotted paths, the first outermost",
        group="server",
        kind="list",
    )
    ssl_keyfile: str | None = flag(None, "TLS key", group="server")
    ssl_certfile: str | None = flag(None, "TLS certificate", group="server")
    ssl_ca_certs: str | None = flag(None, "TLS certificate authorities", group="server")
    enable_request_id_headers: bool = flag(False, "X-Request-Id on every response", group="server")
    enable_prompt_tokens_details: bool = flag(True, "report cached tokens in usage", group="server")
    enable_force_include_usage: bool = flag(False, "usage in every stream", group="server")
    api_server_count: int = flag(
        1,
        "API processes behind the port, for the same engines",
        group="server",
        minimum=1,
        maximum=64,
    )
    drain_timeout: float = flag(
        30.0,
        "seconds SIGTERM lets running requests finish",
        "--shutdown-timeout",
        group="server",
        minimum=0,
    )


KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY")


def environment_api_keys() -> list[str]:
    """Keys from OCTAVO_API_KEY and VLLM_API_KEY (each may hold several, comma-separated)."""
    found = (os.environ.get(name, "") for name in KEY_VARIABLES)
    return [key.strip() for value in found for key in value.split(",") if key.strip()]


SECRET_VARIABLE = "OCTAVO_CLUSTER_SECRET"
CLUSTER_SECRET_REMEDY = (
    f"give every host the same with --cluster-secret-file FILE or {SECRET_VARIABLE} "
    "(`openssl rand -hex 32` makes one)"
)
SHORTEST_SECRET = 16  # bytes: a recorded handshake lets secrets be guessed as fast as one can hash


def cluster_secret(file: str | None) -> bytes | None:
    """What the hosts of a cluster know and nobody else: of ``file``, else of the environment;
    None where there is neither. Raises ConfigError for one that cannot be read or guards
    nothing."""
    if file is None:
        secret, source = os.environ.get(SECRET_VARIABLE, "").strip().encode(), SECRET_VARIABLE
        if not secret:
            return None
    else:
        source = f"--cluster-secret-file {file}"
        try:
            secret = Path(file).expanduser().read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{source}: cannot be read ({error.strerror})") from None
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"{source}: a secret of {len(secret)} bytes can be guessed; at least "
            f"{SHORTEST_SECRET} are needed (`openssl rand -hex 32` makes one)"
        )
    return secret


def environment_without_keys() -> dict[str, str]:
    """Of child processes: keys stay with the server that they guard."""
    return {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}


def environment_with(changes: dict[str, str]) -> dict[str, str]:
    """This process's environment and ``changes``, for a child."""
    return {**os.environ, **changes}


def model_cache_dir() -> Path:
    """Where ``octavo pull`` keeps models: $OCTAVO_CACHE, else octavo in the user's cache."""
    explicit = os.environ.get("OCTAVO_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(explicit) if explicit else Path(base) / "octavo"


def kernel_cache_dir() -> Path | None:
    """Where compiled GPU kernels are kept, so that only the first start of a machine compiles:
    $TRITON_CACHE_DIR, else with the models; None where that cannot be written (Triton then uses a
    place of its own)."""
    explicit = os.environ.get("TRITON_CACHE_DIR")
    if explicit:
        return Path(explicit)
    wanted = model_cache_dir() / "kernels"
    existing = next(path for path in (wanted, *wanted.parents) if path.exists())
    return wanted if os.access(existing, os.W_OK) else None


def child_environment(threads: int, devices: str | None = None) -> dict[str, str]:
    """Environment of an engine process: one place decides thread pools, and which GPUs it sees
    (``devices``, as CUDA_VISIBLE_DEVICES; None: those seen here). API keys stay here."""
    shown = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    return {
        **environment_without_keys(),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        **shown,
    }


def worker_environment(threads: int, interface: str | None) -> dict[str, str]:
    """Of a worker among several. ``interface``: the network interface by which they reach each
    other; None: NCCL and gloo choose. What the user has set stays. NVLink multicast stays off: not
    every host lends it, and a process that asks for it in vain can hang."""
    found = {"NCCL_NVLS_ENABLE": "0"}
    if interface is not None:
        found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {**found, **child_environment(threads)}


def visible_devices() -> list[str]:
    """The GPUs that CUDA would show to this process, as CUDA_VISIBLE_DEVICES names them: those of
    that variable, else all whose device files are here. Not asked of CUDA, which would take
    torch: one that is too old to be used counts, too."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        files = Path("/dev").glob("nvidia[0-9]*")
        return [str(index) for index in range(len([*files]))]
    # CUDA itself stops at the first that it does not know, so does "-1" by custom.
    names = [name.strip() for name in chosen.split(",")]
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:end]


# How long a compute thread that waits for the others spins before it sleeps (GNU OpenMP's unit,
# some nanoseconds). Left alone it spins for very long: when anything else wants the cores, the
# thread that spins takes the time of the one it waits for, and steps take ten times as long and
# more. On two idle cores, decoding one row is as fast with this value as with OpenMP's own, and a
# tenth slower with 2,000.
SPIN_COUNT = 10_000


def prepare_torch() -> None:
    """Settings for this process that torch and Triton read when they are imported, unless the user
    has chosen: the above; where compiled kernels are kept; and on a GPU segments that grow in
    place, so that what the largest step took serves all others, however they split it."""
    if (kernels := kernel_cache_dir()) is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(kernels))
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def prepare_tokenizers() -> None:
    """The tokenizers library runs in the threads that call it: texts come one by one, and its own
    pool would only be one more hop."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def require_one_engine(config: EngineConfig) -> None:
    """Raises ConfigError for replicas where one engine is used in this process."""
    if config.parallel.headless:
        raise ConfigError("--headless (headless): only `octavo serve` joins a head node")
    if (nodes := config.parallel.nnodes) > 1:
        raise ConfigError(
            f"--nnodes {nodes} (nnodes): only `octavo serve` spans machines; here use those of one"
        )
    if (size := config.parallel.data_parallel_size) > 1:
        raise ConfigError(
            f"--data-parallel-size {size} (data_parallel_size): only `octavo serve` runs several "
            "engines; here use 1, or start a server and send it the requests"
        )


def _check_nodes(parallel: ParallelConfig) -> None:
    """Raises ConfigError for machines among which an engine's devices cannot be divided."""
    world, nodes = parallel.tensor_parallel_size * parallel.pipeline_parallel_size, parallel.nnodes
    if parallel.node_rank >= nodes:
        raise ConfigError(
            f"--node-rank {parallel.node_rank}: --nnodes {nodes} are 0 to {nodes - 1}"
        )
    if nodes > 1 and world % nodes:
        raise ConfigError(
            f"--nnodes {nodes}: {world} devices (-tp {parallel.tensor_parallel_size} x -pp "
            f"{parallel.pipeline_parallel_size}) do not divide among them; their product must be a "
            f"multiple of {nodes}"
        )
    if nodes > 1 and parallel.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {nodes} with --data-parallel-size {parallel.data_parallel_size}: one engine "
            "spans machines, or several share a port; not both in this version"
        )


def reject_unsupported(config: EngineConfig) -> None:
    """Raises ConfigError for a value that parses but that this version cannot run."""
    parallel = config.parallel
    _check_nodes(parallel)
    check_stages(speculating(config.speculative), parallel.pipeline_parallel_size)
    backend = parallel.distributed_executor_backend
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if backend == "ray":
        raise ConfigError(
            "--distributed-executor-backend ray: ranks of one engine are started by octavo itself; "
            "leave it out, or use --data-parallel-backend ray for replicas on other nodes"
        )
    if backend == "uni" and world > 1:
        raise ConfigError(
            f"--distributed-executor-backend uni: {world} devices need as many processes; use mp"
        )
    if not parallel.headless and parallel.num_local > parallel.data_parallel_size:
        raise ConfigError(
            f"--data-parallel-size-local {parallel.num_local}: more than the "
            f"{parallel.data_parallel_size} of --data-parallel-size"
        )
    if parallel.headless and not parallel.num_local:
        raise ConfigError("--headless --data-parallel-size-local 0: at least one replica is needed")
    if config.model.trust_remote_code:
        raise ConfigError(
            "--trust-remote-code: octavo never runs code from a checkpoint; drop the flag "
            "(see `octavo models` for the supported families)"
        )
