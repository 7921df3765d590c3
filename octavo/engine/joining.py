"""Engines of other nodes join a head node: what the two sides say, and what must be equal.

A node (``octavo serve --headless``, engine.headless) connects to the head (engine.door) once for
each replica it has. It says what it is; the head gives it a place or says why not; it starts an
engine whose sockets connect to the head. From then on this link carries pings, which also measure
how far the clocks are apart, and what happens to the engine. Never imports torch.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.messages import EngineInfo
from octavo.types import ConfigError

PING_SECONDS = 0.5
MOST_SILENCE = 3.0  # seconds; a node that was heard longer ago gives way to one that asks

# ---- messages ----


class LinkMessage(msgspec.Struct, tag=True):
    """Root of the messages between a node and its head; the class name is the tag."""


class Join(LinkMessage, tag=True):
    """A node's first message for each of its replicas. ``facts``: of the checkpoint;
    ``config``: msgpack EngineConfig, read once the versions are known to be equal."""

    version: str
    host: str
    facts: dict[str, str]
    config: bytes


class Running(LinkMessage, tag=True):
    """The engine was started, and is loading."""

    pid: int


class Ended(LinkMessage, tag=True):
    """The engine has ended: "" cleanly, else how."""

    how: str


class Leave(LinkMessage, tag=True):
    """The node is told to stop: its engine gets nothing new, and ends when it has finished."""


class Pong(LinkMessage, tag=True):
    sent: float  # of the ping
    now: float  # the node's clock


class Here(LinkMessage, tag=True):
    """The head has been silent for long; does it know this link?"""


class Ping(LinkMessage, tag=True):
    sent: float  # the head's clock


class Refused(LinkMessage, tag=True):
    """The node's to mend; no use to ask again."""

    why: str


class Wait(LinkMessage, tag=True):
    """There is no place now."""

    why: str


class Place(LinkMessage, tag=True):
    """Start an engine. The addresses, joined by commas, have the head's host as "*" where the node
    knows it better."""

    index: int
    inboxes: str
    outboxes: str
    config: bytes  # msgpack EngineConfig; the model's path is the node's own


class End(LinkMessage, tag=True):
    """End the engine, after ``grace`` seconds by force, and ask for a place again; not where the
    node has something to mend."""

    why: str
    grace: float = 0.0
    user_error: bool = False


class Unknown(LinkMessage, tag=True):
    """The head does not know this link: it has been started again, or has given it up."""


FromNode = Join | Running | Ended | Leave | Pong | Here
FromHead = Ping | Refused | Wait | Place | End | Unknown

encoder = msgspec.msgpack.Encoder()
from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
from_head: msgspec.msgpack.Decoder[FromHead] = msgspec.msgpack.Decoder(FromHead)

# ---- settings ----

# What a node may choose for itself; where it does not, the head's holds.
NODES_OWN = (
    *("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"),
    *("max_num_seqs", "max_num_batched_tokens", "enforce_eager", "cpu_threads"),
    *("distributed_executor_backend", "cluster_secret_file", "replica_memory"),
)
# What says where the node's files are, and how the two find each other.
NODES_ALONE = (
    *("model", "tokenizer", "revision"),
    *("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port"),
    *("data_parallel_backend", "headless"),
    *("nnodes", "node_rank", "master_addr", "master_port"),
)
HEADS_ALONE = ("served_model_name", "data_parallel_size", "replica", "session")


def common_config(head: EngineConfig, node: EngineConfig) -> EngineConfig:
    """What the node's engine runs with: the head's configuration, with the node's own choices where
    it may make them. Raises ConfigError, naming them, for flags given on the node that say
    something else than the head's."""
    world, num_local = head.parallel.world_size, node.parallel.num_local
    if num_local > 1 and node.parallel.world_size != world:
        raise ConfigError(
            f"this node divides its devices among {num_local} replicas of "
            f"{node.parallel.world_size}, the head's have {world}: start it with the head's "
            f"-tp {head.parallel.tensor_parallel_size} -pp {head.parallel.pipeline_parallel_size}"
        )
    differences: list[str] = []
    merged: EngineConfig = _merged(head, node, differences)
    if differences:
        raise ConfigError(
            f"this node is started with {', '.join(differences)}: leave such flags out here (the "
            "head's hold), or start both with the same"
        )
    return merged


def _merged(head: Any, node: Any, differences: list[str]) -> Any:
    changes: dict[str, Any] = {}
    defaults = type(head)()
    for f in fields(head):
        theirs, own = getattr(head, f.name), getattr(node, f.name)
        if not f.metadata:
            changes[f.name] = _merged(theirs, own, differences)
        elif f.name in NODES_ALONE:
            changes[f.name] = own
        elif f.name not in HEADS_ALONE and own != theirs and own != getattr(defaults, f.name):
            changes[f.name] = own
            if f.name not in NODES_OWN:
                spelling = "--" + f.name.replace("_", "-")
                differences.append(f"{spelling} {own} where the head has {theirs}")
    return replace(head, **changes)


def on_node(config: EngineConfig, node: EngineConfig) -> EngineConfig:
    """The head's answer, with what only the node knows of the replica: its part of the machine."""
    own = node.parallel
    parallel = replace(
        config.parallel, cpu_threads=own.cpu_threads, replica_memory=own.replica_memory
    )
    return replace(config, parallel=parallel)


# ---- the model ----

SETTINGS_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt")
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of a file of weights


def checkpoint_facts(path: Path, weights: bool = True) -> dict[str, str]:
    """Digests that are equal for equal checkpoints: of the small files all bytes; of the weights
    their sizes, beginnings and samples, so that it takes no time. ``weights``: they are read."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    parts: dict[str, list[Path]] = {"settings": [], "tokenizer": [], "weights": []}
    for file in files:
        if file.name in SETTINGS_FILES:
            parts["settings"].append(file)
        elif file.name in TOKENIZER_FILES:
            parts["tokenizer"].append(file)
        elif weights and file.suffix in WEIGHT_SUFFIXES:
            parts["weights"].append(file)
    return {name: _digest(chosen) for name, chosen in parts.items()}


def _digest(files: list[Path]) -> str:
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as stream:
            if file.suffix not in WEIGHT_SUFFIXES:
                digest.update(stream.read())
                continue
            for index in range(SAMPLES):
                stream.seek(index * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1), os.SEEK_SET)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def check_same_checkpoint(head: dict[str, str], node: dict[str, str]) -> None:
    """Raises ConfigError that says what differs."""
    if names := [name for name in head if head[name] != node.get(name)]:
        raise ConfigError(
            f"the model's {' and '.join(names)} on this node are not those of the head: give both "
            "the same checkpoint (and --revision)"
        )


def check_same_engine(first: EngineInfo, other: EngineInfo) -> None:
    """Raises ConfigError where a request that ``first`` has been checked for could fail on
    ``other``, or be answered differently."""
    for name in ("architecture", "vocab_size", "dtype", "eos_ids", "hidden_size"):
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            remedy = f": start both with --dtype {ours}" if name == "dtype" else ""
            raise ConfigError(f"its {name} is {theirs}, the head's {ours}{remedy}")
    if other.default_sampling != first.default_sampling:
        raise ConfigError(
            f"its sampling defaults are {other.default_sampling}, the head's "
            f"{first.default_sampling}"
        )
    if other.max_model_len < first.max_model_len:
        raise ConfigError(
            f"it has room for {other.max_model_len:,} tokens of a request, the head for "
            f"{first.max_model_len:,}: start the head with --max-model-len {other.max_model_len}, "
            "or give this node more memory for the KV cache"
        )
