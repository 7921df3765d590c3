"""What `octavo quantize` is asked for: a format, and how weights are to become its numbers. Never
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.types import ConfigError

GROUPS = (128, 64, 32)  # tried in this order where none is asked for


@dataclass(frozen=True)
class Kind:
    """A format of `octavo quantize`. ``bits``: that it can have, the usual first. ``groups``:
    whether inputs are taken in groups of a size that can be chosen. ``asymmetric``: whether zeros
    may differ; ``symmetric``: whether they need not. ``calibrated``: needs a text."""

    meaning: str
    bits: tuple[int, ...]
    groups: bool = False
    asymmetric: bool = False
    symmetric: bool = True
    calibrated: bool = False
    gguf: str | None = None


KINDS: dict[str, Kind] = {
    "gptq": Kind("GPTQ", (4, 2, 3, 8), groups=True, asymmetric=True, calibrated=True),
    "awq": Kind("AWQ", (4,), groups=True, asymmetric=True, symmetric=False, calibrated=True),
    "w4a16": Kind("GPTQ, stored by compressed-tensors", (4, 8), groups=True, calibrated=True),
    "squeezellm": Kind("a table for each output", (4, 3), calibrated=True),
    "fp8": Kind("E4M3, a scale for each matrix", (8,)),
    "fp8_per_channel": Kind("E4M3, a scale for each output, stored by compressed-tensors", (8,)),
    "fp8_per_block": Kind("E4M3, a scale for each 128 x 128", (8,)),
    "int8": Kind("W8A8, a scale for each output, stored by compressed-tensors", (8,)),
    "nf4": Kind("bitsandbytes' NF4, blocks of 64", (4,)),
    "fp4": Kind("bitsandbytes' FP4, blocks of 64", (4,)),
    "bnb_int8": Kind("bitsandbytes' LLM.int8", (8,)),
    "gguf-q4_0": Kind("GGUF's Q4_0", (4,), gguf="Q4_0"),
    "gguf-q4_1": Kind("GGUF's Q4_1", (4,), gguf="Q4_1"),
    "gguf-q5_0": Kind("GGUF's Q5_0", (5,), gguf="Q5_0"),
    "gguf-q5_1": Kind("GGUF's Q5_1", (5,), gguf="Q5_1"),
    "gguf-q8_0": Kind("GGUF's Q8_0", (8,), gguf="Q8_0"),
}


@dataclass(frozen=True)
class Recipe:
    """``bits``, ``group``, ``symmetric``: None: the format's usual; a group of 0: all inputs.
    ``act_order``: GPTQ takes inputs by falling weight. ``sparse``: SqueezeLLM keeps outliers
    apart. ``search``: ranges of groups are shrunk where that errs less. ``head``: the output head
    is quantized too."""

    format: str
    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None
    act_order: bool = False
    sparse: bool = False
    search: bool = True
    head: bool = False

    @property
    def kind(self) -> Kind:
        return KINDS[self.format]

    def checked(self) -> Recipe:
        """With the format's usual bits and symmetry. Raises ConfigError, in one line, for what the
        format does not have."""
        kind, where = self.kind, f"--format {self.format}"
        bits = self.bits or kind.bits[0]
        if bits not in kind.bits:
            allowed = ", ".join(map(str, sorted(kind.bits)))
            raise ConfigError(f"--bits {bits}: {where} has {allowed}")
        if self.group is not None and not kind.groups:
            raise ConfigError(f"--group-size {self.group}: {where} has no groups to choose")
        if self.group and self.group > 0 and self.group % 4:
            raise ConfigError(f"--group-size {self.group}: must be a multiple of 4, or -1")
        symmetric = kind.symmetric if self.symmetric is None else self.symmetric
        if symmetric and not kind.symmetric:
            raise ConfigError(f"--sym: {where} always has zeros of its own for each group")
        if not symmetric and not kind.asymmetric:
            raise ConfigError(f"--no-sym: {where} is symmetric; gptq and awq can have zeros")
        if self.act_order and self.format != "gptq":
            raise ConfigError(f"--desc-act: only gptq has an order of inputs, not {self.format}")
        if self.sparse and self.format != "squeezellm":
            raise ConfigError(f"--sparse: only squeezellm keeps outliers apart, not {self.format}")
        return replace(self, bits=bits, symmetric=symmetric)

    def fitted(self, inputs: dict[str, int]) -> Recipe:
        """With a group that divides the inputs of every matrix. ``inputs``: by module name. Raises
        ConfigError for one asked for that does not."""
        if not self.kind.groups:
            return replace(self, group=0)
        fitting = [g for g in GROUPS if all(size % g == 0 for size in inputs.values())]
        if self.group is None:
            return replace(self, group=fitting[0] if fitting else 0)
        if self.group > 0:
            for name, size in inputs.items():
                if size % self.group:
                    use = fitting[0] if fitting else -1
                    raise ConfigError(
                        f"--group-size {self.group} does not divide the {size} inputs of {name}; "
                        f"use {use}"
                    )
        return self
