"""Perplexity of a model on a text, and its divergence from another one.

The two are in memory one after the other. Of the first, the other one, final hidden states are kept
(in the dtype it computes in) and what makes logits of them, its embedding and head: the logits are
made again beside the model's, so that no distribution is ever rounded or stored.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from octavo.checkpoint.locate import locate
from octavo.config import EngineConfig, reject_unsupported, require_one_engine
from octavo.evaluate.corpus import cut
from octavo.evaluate.reading import Logits, Reader, slices
from octavo.evaluate.report import Comparison, Report, Scored, Sizes
from octavo.evaluate.scores import (
    agreements,
    divergences,
    log_probabilities,
    negative_log_likelihoods,
)
from octavo.machine import available_cores
from octavo.model.decoder import Model
from octavo.model.loader.load import load_model
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.types import ConfigError, Progress
from octavo.worker.device import Device, choose_device


@dataclass(frozen=True)
class Text:
    """``name``: what the report calls it. ``chunk``: tokens of a context; each is scored from its
    second token on. ``max_tokens``: of all chunks together; None: as many as there are."""

    name: str
    content: str
    chunk: int = 1024
    max_tokens: int | None = None


@dataclass
class _Kept:
    """Of the other model: hidden states of each chunk, on the CPU, and the way to logits."""

    hidden: list[Tensor]
    logits: Logits


@torch.inference_mode()
def evaluate(
    config: EngineConfig,
    against: EngineConfig | None,
    text: Text,
    progress: Progress,
    device: str = "auto",
) -> Report:
    """Scores the model of ``config``, compared with that of ``against`` if there is one.
    ``device``: "auto", "cpu" or "cuda". Raises ConfigError, in one line, for a model or text that
    cannot be used, and for two models that do not share a vocabulary."""
    where = enter_device(device, config.parallel.cpu_threads)
    names = [one.model.model for one in (config, against) if one is not None]  # as they were typed
    config, tokenizer = _located(config, progress)
    chunks = _chunks(config, tokenizer, text)
    kept = other = None
    if against is not None:
        against, its_tokenizer = _located(against, progress)
        _check_tokenizers(config, tokenizer, against, its_tokenizer, text)
        model = _load(against, where, chunks, progress)
        kept = _Kept([], model.embedding.logits)
        other = _scored(model, names[1], where, _read(model, chunks, kept, progress))
        del model
        free_memory()
    model = _load(config, where, chunks, progress)
    if kept is not None and other is not None:
        _check_vocabularies(config, model, against, kept)
        likelihoods, comparison = _compare(model, chunks, kept, progress)
        scored = _scored(model, names[0], where, likelihoods)
        comparison = replace(comparison, perplexity_ratio=scored.perplexity / other.perplexity)
    else:
        comparison = None
        scored = _scored(model, names[0], where, _read(model, chunks, None, progress))
    num_tokens = sum(len(chunk) - 1 for chunk in chunks)
    return Report(text.name, text.chunk, num_tokens, scored, other, comparison)


def enter_device(wanted: str, threads: int | None) -> Device:
    """The device to compute on, made this thread's. Raises ConfigError where it is not there."""
    torch.set_num_threads(threads or available_cores())
    device = Device("cpu", "--device cpu") if wanted == "cpu" else choose_device()
    if wanted not in ("auto", device.kind):
        raise ConfigError(f"--device {wanted}: {device.reason}; use --device cpu")
    device.enter()
    return device


def free_memory() -> None:
    """Of models that are no longer needed: they hold themselves in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _located(config: EngineConfig, progress: Progress) -> tuple[EngineConfig, Tokenizer]:
    reject_unsupported(config)
    require_one_engine(config)
    weights = config.model.load_format != "dummy"
    found = locate(config.model.model, config.model.revision, weights=weights, progress=progress)
    config = replace(config, model=replace(config.model, model=str(found.path)))
    return config, load_tokenizer(found.path, config.model.tokenizer)


def _chunks(config: EngineConfig, tokenizer: Tokenizer, text: Text) -> list[list[int]]:
    """Every one of them begins as the tokenizer lets texts begin."""
    prefix = tokenizer.vocabulary.prefix_ids
    room = text.chunk - len(prefix)
    if room < 2:
        raise ConfigError(f"--chunk {text.chunk}: must be at least {2 + len(prefix)}")
    most = None if text.max_tokens is None else text.max_tokens * room // text.chunk
    ids = tokenizer.encode(text.content, add_special_tokens=False)
    return [[*prefix, *chunk] for chunk in cut(ids, room, most)]


def _check_tokenizers(
    config: EngineConfig,
    tokenizer: Tokenizer,
    against: EngineConfig,
    other: Tokenizer,
    text: Text,
) -> None:
    ids, others = (t.encode(text.content) for t in (tokenizer, other))
    if ids == others:
        return
    pairs = zip(ids, others)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))
    raise ConfigError(
        f"{config.model.model} and {against.model.model} have different tokenizers: {text.name} is "
        f"{len(ids):,} and {len(others):,} tokens, which differ from token {first:,} on; "
        "divergence is defined for models that share one. If the two should, name it for both "
        "with --tokenizer"
    )


def _check_vocabularies(
    config: EngineConfig, model: Model, against: EngineConfig | None, kept: _Kept
) -> None:
    size, other = model.spec.vocab_size, kept.logits(kept.hidden[0][:1].to(model.device)).shape[1]
    if size != other and against is not None:
        raise ConfigError(
            f"{config.model.model} has logits of {size:,} tokens, {against.model.model} of "
            f"{other:,}: their distributions cannot be compared"
        )


def _load(
    config: EngineConfig, device: Device, chunks: list[list[int]], progress: Progress
) -> Model:
    model = load_model(Path(config.model.model), config, progress, device.kind)
    spec, longest = model.spec, max(map(len, chunks))
    if longest > spec.max_position:
        raise ConfigError(
            f"--chunk {longest}: {config.model.model} has {spec.max_position} positions; use "
            f"--chunk {spec.max_position}"
        )
    if (highest := max(map(max, chunks))) >= spec.vocab_size:
        raise ConfigError(
            f"{config.model.model}: its tokenizer gives id {highest}, its vocabulary has "
            f"{spec.vocab_size:,} tokens"
        )
    return model


def _hidden(
    model: Model, chunks: list[list[int]], phase: str, progress: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each chunk: hidden states of all tokens but the last, and what came after each."""
    reader = Reader(model, max(map(len, chunks)))
    progress(phase, 0.0)
    for index, chunk in enumerate(chunks):
        hidden = reader.hidden(chunk)[:-1]
        yield hidden, torch.tensor(chunk[1:], device=hidden.device)
        progress(phase, (index + 1) / len(chunks))


def _read(model: Model, chunks: list[list[int]], kept: _Kept | None, progress: Progress) -> Tensor:
    """Negative log-likelihoods of all scored tokens, FP64. ``kept`` gets the hidden states."""
    found = []
    phase = "scoring" if kept is None else "scoring the other model"
    for hidden, targets in _hidden(model, chunks, phase, progress):
        if kept is not None:
            kept.hidden.append(hidden.cpu())
        for part in slices(len(targets), model.spec.vocab_size):
            own = log_probabilities(model.logits(hidden[part]))
            found.append(negative_log_likelihoods(own, targets[part]).cpu())
    return torch.cat(found)


def _compare(
    model: Model, chunks: list[list[int]], kept: _Kept, progress: Progress
) -> tuple[Tensor, Comparison]:
    """Negative log-likelihoods, and the comparison without its ratio of perplexities."""
    likelihoods, divergence, agreement = [], [], []
    pairs = zip(_hidden(model, chunks, "comparing", progress), kept.hidden)
    for (hidden, targets), other_hidden in pairs:
        other_hidden = other_hidden.to(hidden.device)
        for part in slices(len(targets), model.spec.vocab_size):
            own = log_probabilities(model.logits(hidden[part]))
            other = log_probabilities(kept.logits(other_hidden[part]))
            likelihoods.append(negative_log_likelihoods(own, targets[part]).cpu())
            divergence.append(divergences(other, own).cpu())
            agreement.append(agreements(other, own).cpu())
    of_tokens = torch.cat(divergence)
    return torch.cat(likelihoods), Comparison(
        kl_mean=float(of_tokens.mean()),
        kl_p99=float(of_tokens.quantile(0.99)),
        kl_max=float(of_tokens.max()),
        top1_agreement=float(torch.cat(agreement).double().mean()),
        perplexity_ratio=math.nan,
    )


def _scored(model: Model, name: str, device: Device, likelihoods: Tensor) -> Scored:
    nll = float(likelihoods.mean())
    if not math.isfinite(nll):
        raise ConfigError(
            f"{name}: some logits are not finite; with --dtype float16 numbers may "
            "leave its range: use bfloat16 or float32"
        )
    return Scored(
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device.label,
        quantization=model.quantization,
        sizes=sizes_of(model),
        nll=nll,
        perplexity=math.exp(min(nll, 700.0)),
    )


def sizes_of(model: Model) -> Sizes:
    pieces = (piece for layer in model.layers for piece in layer.parts())
    shapes = (shape for piece in pieces for _, shape in piece.wanted() if len(shape) > 1)
    return Sizes(
        linear_bytes=model.linear_bytes,
        linear_weights=sum(map(math.prod, shapes)),
        other_bytes=model.weight_bytes - model.linear_bytes,
    )
