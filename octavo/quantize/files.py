"""The files around the weights: what the output directory must be, and what is copied into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from octavo.checkpoint.split import parts_of
from octavo.model.facts import is_gguf
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.types import ConfigError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
_NOT_COPIED = ("config.json", "*.index.json", *_WEIGHTS)
_LARGEST_COPY = 256 << 20
GB = 10**9


def check_output(output: Path) -> None:
    """Raises ConfigError for a directory that holds something, or cannot be one."""
    with _disk_errors(output):
        there = _existing(output)
        if not there.is_dir():
            what = "is" if there == output.absolute() else f"{there} is"
            raise ConfigError(f"--output {output}: {what} a file; name a new directory")
        if output.is_dir() and any(output.iterdir()):
            raise ConfigError(f"--output {output}: is not empty; name a new directory")


def _existing(output: Path) -> Path:
    """The directory, or the nearest of those above it that is there."""
    whole = output.absolute()
    return next(path for path in (whole, *whole.parents) if path.exists())


@contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    """Raises ConfigError for what the system does not let be read or written (a full disk)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        named = error.filename is not None and not Path(error.filename).is_relative_to(output)
        where = f"{error.filename}" if named else f"--output {output}: cannot be written"
        raise ConfigError(f"{where}: {reason}") from None


@contextmanager
def made(output: Path) -> Iterator[None]:
    """Makes the directory; where what follows fails, it is left as it was: not there, or empty.
    Raises ConfigError for errors of the disk."""
    with _disk_errors(output):
        whole, there = output.absolute(), _existing(output)
        new = [path for path in (whole, *whole.parents) if path.is_relative_to(there)]
        new.remove(there)
        try:
            output.mkdir(parents=True, exist_ok=True)
            yield
        except BaseException:
            for file in output.iterdir() if output.is_dir() else ():
                file.unlink()
            for path in new:
                if path.is_dir():
                    path.rmdir()
            raise


def check_space(output: Path, needed: int) -> None:
    """Raises ConfigError where the disk has not so many bytes."""
    with _disk_errors(output):
        free = shutil.disk_usage(_existing(output)).free
    if needed > free:
        raise ConfigError(
            f"--output {output}: needs up to {needed / GB:.1f} GB, {free / GB:.1f} GB are free on "
            "its disk; name a directory on another one"
        )


def weight_bytes(path: Path) -> int:
    """Of a checkpoint's files with weights."""
    if is_gguf(path):
        return sum(part.stat().st_size for part in parts_of(path))
    for pattern in ("*.safetensors", "*.bin"):
        if found := list(path.glob(pattern)):
            return sum(file.stat().st_size for file in found)
    return 0


def copy_others(source: Path, output: Path) -> None:
    """Tokenizer, templates, generation config, licence: all but weights and config.json."""
    for file in sorted(source.iterdir()):
        skipped = file.name.startswith(".") or any(map(file.match, _NOT_COPIED))
        if file.is_file() and not skipped and file.stat().st_size <= _LARGEST_COPY:
            shutil.copyfile(file, output / file.name)


def write_tokenizer(tokenizer: Tokenizer, output: Path, sample: str) -> None:
    """As a tokenizer.json. Raises ConfigError where it would read ``sample`` in another way."""
    vocabulary = tokenizer.vocabulary
    whole = _with_surroundings(tokenizer).to_str(pretty=True)
    (output / "tokenizer.json").write_text(whole, encoding="utf-8")
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **vocabulary.named_tokens,
        "add_bos_token": tokenizer.adds_bos,
    }
    bos, eos = tokenizer.bos_id, tokenizer.eos_ids
    for name, index in (("bos_token", bos), ("eos_token", eos[0] if eos else None)):
        if index is not None:
            values.setdefault(name, vocabulary.backend.id_to_token(index))
    templates = tokenizer.templates
    if templates:
        values["chat_template"] = templates.get("default", next(iter(templates.values())))
    (output / "tokenizer_config.json").write_text(json.dumps(values, indent=1) + "\n")
    if load_tokenizer(output).encode(sample) != tokenizer.encode(sample):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (output / name).unlink()
        raise ConfigError(
            "this GGUF file's tokenizer cannot be written as a tokenizer.json that reads texts "
            "alike; quantize the model's safetensors checkpoint, or to a gguf-… format"
        )


def _with_surroundings(tokenizer: Tokenizer) -> Backend:
    """The backend, which puts BOS and EOS where the vocabulary does."""
    vocabulary = tokenizer.vocabulary
    backend = Backend.from_str(vocabulary.backend.to_str())
    before, after = (
        {index: backend.id_to_token(index) for index in ids}
        for ids in (vocabulary.prefix_ids, vocabulary.suffix_ids)
    )
    if before or after:
        backend.post_processor = TemplateProcessing(
            single=[*before.values(), "$A", *after.values()],
            special_tokens=[(text, index) for index, text in {**before, **after}.items()],
        )
    return backend
