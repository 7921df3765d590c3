"""How checkpoints store the experts of a layer. Never imports torch.

Ours are, for each expert e of layer i, ``layers.{i}.experts.{e}.gate_up.weight`` [2m, h] (rows of
the gate, then of the up projection), ``down.weight`` [h, m], and their biases where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExpertLayout:
    """``names``: of our tensor (``gate_up.weight``) -> of the stored ones that follow one another
    in it. A stored name without {e} is of a tensor that holds all experts, by its first axis.

    ``form``: of stored matrices: "rows", [out, in] as ours; "columns", [in, out]; "mxfp4",
    [out, in / 32, 16] packed bytes and [out, in / 32] scales, two names. ``interleaved``: gate and
    up projection take turns along the out axis, where ours has one after the other.
    """

    names: Mapping[str, tuple[str, ...]]
    form: Literal["rows", "columns", "mxfp4"] = "rows"
    interleaved: bool = False


_MLP = "model.layers.{i}.mlp.experts"


def one_by_one(prefix: str, gate: str, up: str, down: str) -> ExpertLayout:
    """Three matrices an expert, as most repositories have them."""
    return ExpertLayout(
        {
            "gate_up.weight": (f"{prefix}.{{e}}.{gate}.weight", f"{prefix}.{{e}}.{up}.weight"),
            "down.weight": (f"{prefix}.{{e}}.{down}.weight",),
        }
    )


STACKED = ExpertLayout(
    {"gate_up.weight": (f"{_MLP}.gate_up_proj",), "down.weight": (f"{_MLP}.down_proj",)}
)
# As transformers' modules hold them (save_original_format=False), too.
HF_EXPERTS = (one_by_one(_MLP, "gate_proj", "up_proj", "down_proj"), STACKED)

_BLOCK = "blk.{i}.ffn"
GGUF_EXPERTS = (
    ExpertLayout(
        {
            "gate_up.weight": (f"{_BLOCK}_gate_exps.weight", f"{_BLOCK}_up_exps.weight"),
            "down.weight": (f"{_BLOCK}_down_exps.weight",),
        }
    ),
    ExpertLayout(  # Mixtral's files of before March 2024
        {
            "gate_up.weight": (f"{_BLOCK}_gate.{{e}}.weight", f"{_BLOCK}_up.{{e}}.weight"),
            "down.weight": (f"{_BLOCK}_down.{{e}}.weight",),
        }
    ),
)

_BIASES = {
    "gate_up.bias": (f"{_MLP}.gate_up_proj_bias",),
    "down.bias": (f"{_MLP}.down_proj_bias",),
}
GPT_OSS_EXPERTS = (
    ExpertLayout(
        {
            "gate_up.weight": (f"{_MLP}.gate_up_proj_blocks", f"{_MLP}.gate_up_proj_scales"),
            "down.weight": (f"{_MLP}.down_proj_blocks", f"{_MLP}.down_proj_scales"),
            **_BIASES,
        },
        "mxfp4",
        interleaved=True,
    ),
    ExpertLayout({**STACKED.names, **_BIASES}, "columns", interleaved=True),
)
