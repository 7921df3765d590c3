"""Which weights are kept quantized and why; GGUF's types as groups of codes; models of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.config import ModelConfig
from octavo.model.loader.gguf import dequantize
from octavo.model.loader.gguf_groups import expanded, grouped
from octavo.model.loader.gguf_kinds import KINDS, bytes_per_value
from octavo.model.quantization import DENSE, Quantization, choose_quantization
from octavo.ops.native import library, memory
from octavo.ops.native.library import Features
from octavo.quant.rounding import roundings
from octavo.quant.scheme import Scheme
from octavo.types import ConfigError
from tests.fixtures import models
from tests.model.running import all_logits, load, random_ids, write_checkpoint, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")
has_kernels = pytest.mark.skipif(not library.features(), reason="no kernels here")
IDS = random_ids(60)


# ---- the choice ----


def chosen(
    quantization: str | None,
    is_gguf: bool = False,
    device: str = "cpu",
    dtype: str = "auto",
    scheme: str | None = None,
    **flags: Any,
) -> Quantization:
    config = ModelConfig(model="m", quantization=quantization, dtype=dtype, **flags)
    of_checkpoint = Scheme(scheme, lambda module: None) if scheme else None
    return choose_quantization(config, is_gguf, device, of_checkpoint)


def refused(*arguments: Any, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        chosen(*arguments, **flags)
    text = str(caught.value)
    assert "\n" not in text and text.startswith("--quanti")
    return text


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "features", lambda: Features.AVX2)


def test_a_gpu_keeps_groups_where_it_has_kernels_for_them() -> None:
    assert chosen(None, is_gguf=True, device="cuda").keeps_groups
    assert chosen(None, is_gguf=True, device="cuda", dtype="float16").keeps_groups
    assert chosen(None, is_gguf=True, device="cuda", dtype="float32") == DENSE
    assert chosen(None, is_gguf=True, device="cuda", deterministic=True) == DENSE


@pytest.mark.parametrize("dtype", ("auto", "bfloat16"))
def test_a_gguf_files_groups_are_kept(avx2: None, dtype: str) -> None:
    found = chosen(None, True, dtype=dtype)
    assert found.name == "gguf" and found.keeps_groups
    assert "the file's own groups; --dtype float32" in found.reason


@pytest.mark.parametrize("dtype", ("float", "float32", "half", "float16"))
def test_but_not_in_fp32_unless_asked_for_and_not_in_fp16(avx2: None, dtype: str) -> None:
    assert chosen(None, True, dtype=dtype) is DENSE
    if "32" in dtype or dtype == "float":
        assert chosen("gguf", True, dtype=dtype).keeps_groups
    else:
        for asked in ("gguf", "int8"):
            assert f"not with --dtype {dtype} on a CPU" in refused(asked, True, dtype=dtype)


@pytest.mark.parametrize("dtype", ("auto", "bfloat16", "float32"))
def test_dense_weights_are_rounded_where_asked_for(avx2: None, dtype: str) -> None:
    for name in roundings("cpu"):
        for is_gguf in (False, True):
            found = chosen(name, is_gguf, dtype=dtype)
            assert found.name == name and found.rounding and not found.keeps_groups
            assert found.reason.startswith(f"--quantization {name}: ")
            if "int8" in name:
                assert found.rounds_inputs == (name == "int8")
    assert chosen(None, dtype=dtype) is DENSE


def test_what_is_in_no_checkpoint_format_cannot_be_asked_to_be(avx2: None) -> None:
    for device in ("cpu", "cuda"):
        for asked in ("gguf", "gptq", "awq_marlin", "squeezellm", "compressed-tensors"):
            text = refused(asked, device=device)
            assert "to round them while loading use int8, " in text and "octavo quantize" in text
            kind = "is not a GGUF file" if asked == "gguf" else "is not a checkpoint in "
            assert f"m {kind}" in text and "not quantized" in text
    assert "in groups of GGUF" in refused("gptq", True)


@pytest.mark.parametrize(
    ("asked", "scheme"),
    [(None, "gptq"), ("gptq", "gptq"), ("gptq_marlin", "gptq"), ("fp8_per_block", "fp8")],
)
def test_a_checkpoints_own_may_be_named(avx2: None, asked: str | None, scheme: str) -> None:
    found = chosen(asked, scheme=scheme)
    assert found.name == scheme and found.scheme and found.rounding is None
    assert found.reason.startswith("the checkpoint's own")


@pytest.mark.parametrize(
    ("asked", "scheme"), [("awq", "gptq"), ("fp8", "gptq"), ("int8", "fp8"), ("gguf", "awq")]
)
def test_a_flag_that_contradicts_the_checkpoint_is_refused(asked: str, scheme: str) -> None:
    assert f"m is in {scheme} already" in refused(asked, scheme=scheme)


@pytest.mark.parametrize("capability", (None, (8, 6), (9, 0)))
def test_fp8_without_its_arithmetic_keeps_inputs(
    avx2: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    """And says so; inputs in FP8 that were asked for by name are refused."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    device = "cuda" if capability else "cpu"
    for asked, scheme in (("fp8", None), (None, "fp8")):
        flags: dict[str, Any] = {"device": device, "scheme": scheme}
        found = chosen(asked, **flags)
        always = {**flags, "quantized_activations": "always"}
        never = chosen(asked, **flags, quantized_activations="never")
        assert not never.rounds_inputs
        if capability == (9, 0):
            assert found.rounds_inputs and "does not multiply" not in found.reason
            assert chosen(asked, **always).rounds_inputs
            continue
        assert not found.rounds_inputs
        assert "does not multiply FP8 (" in found.reason
        assert found.reason.endswith("inputs stay as they are")
        text = refused(asked, **always)
        assert text.startswith("--quantized-activations always: ")
        assert "compute capability 8.9" in text


def test_what_goes_with_what(avx2: None) -> None:
    assert chosen("fp8", quantization_fp8_dynamic=True).name == "fp8"
    assert "goes with --quantization fp8" in refused("int8", quantization_fp8_dynamic=True)
    assert "m are not quantized" in refused(None, quantized_activations="always")
    assert chosen("int8", quantized_activations="never").rounds_inputs is False
    assert chosen(None, scheme="gptq", dtype="float32").rounds_inputs is False
    assert chosen(None, scheme="gptq").rounds_inputs is True


def test_inputs_stay_where_the_format_needs_them(avx2: None) -> None:
    """LLM.int8 has one scale for all inputs of an output, of which a few are very large, and tables
    are not multiplied as integers."""
    for asked, scheme in ((None, "bitsandbytes"), ("bitsandbytes_int8", None)):
        assert not chosen(asked, scheme=scheme).rounds_inputs
        assert chosen(asked, scheme=scheme, quantized_activations="always").rounds_inputs
    for scheme in ("squeezellm", "mxfp4"):
        found = chosen(None, scheme=scheme)
        assert not found.rounds_inputs and "rounded" not in found.reason
        text = refused(None, scheme=scheme, quantized_activations="always")
        assert f"{scheme}'s codes stand for numbers of a table" in text


def test_the_head_is_rounded_where_it_is_said_to_be(avx2: None) -> None:
    def of_head(name: str, device: str = "cpu", **flags: Any) -> bool:
        rounding = chosen(name, device=device, **flags).rounding
        assert rounding
        return rounding.head

    assert of_head("int8") and not of_head("int8", "cuda") and not of_head("fp8")
    assert not of_head("int8", quantize_head=False) and of_head("fp8", quantize_head=True)
    assert "the head, too" in chosen("int8").reason and "head" not in chosen("fp8").reason
    assert "add --quantization int8" in refused(None, quantize_head=True)
    assert refused(None, scheme="gptq", quantize_head=True).endswith("leave it out")


def test_without_kernels_nothing_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "features", lambda: Features(0))
    assert chosen(None, True) is DENSE and chosen(None) is DENSE
    for asked in ("int8", "gguf"):
        assert "needs octavo's CPU kernels" in refused(asked, True)
    with pytest.raises(ConfigError, match="m: its weights in gptq need octavo's CPU kernels"):
        chosen(None, scheme="gptq")
    monkeypatch.setattr(library, "problem", lambda: "not built")
    assert "are not built" in refused("int8", False)


# ---- GGUF's types ----

HALVES = {  # bytes where a block has FP16 numbers; anything may stand in the others
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
# What kernels with inputs rounded to 8 bits take.
ROUNDED = [kind for kind, found in KINDS.items() if found.bits in (4, 8) and not found.table]


def random_blocks(kind: str, count: int) -> np.ndarray:
    """uint8 [count, bytes of a block]."""
    rng = np.random.default_rng(len(kind) + count)
    blocks = rng.integers(0, 256, (count, KINDS[kind].num_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        numbers = rng.standard_normal((count, 1)) * 10.0 ** rng.integers(-4, 2, (count, 1))
        blocks[:, at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", KINDS)
def test_groups_expand_to_the_reference_dequantization_exactly(kind: str) -> None:
    found = KINDS[kind]
    values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (found.size, found.num_bytes) == (values, num_bytes)
    blocks = random_blocks(kind, 35 * 3)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    shape = (35, 3 * found.size)
    weight = grouped(torch.from_numpy(blocks).flatten(), kind, shape)
    assert weight.shape == shape and int(weight.codes.max()) < 1 << weight.bits
    assert weight.scales.shape == (35, shape[1] // found.group)
    assert torch.equal(weight.dense(), torch.from_numpy(expected.copy()).view(shape))
    values = dequantize(blocks.reshape(-1), kind, "w", "m.gguf", torch.float32)
    assert torch.equal(values, torch.from_numpy(expected.copy()).flatten())


def test_a_type_that_nobody_expands_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^m.gguf: blk.0.attn_q.weight is of type Q8_K, which"):
        dequantize(np.zeros(292, np.uint8), "Q8_K", "blk.0.attn_q.weight", "m.gguf", torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_expanded_on_the_device_where_they_lie(kind: str) -> None:
    blocks = torch.empty(3, KINDS[kind].num_bytes, dtype=torch.uint8, device="meta")
    values = expanded(blocks, kind)
    assert values.is_meta and values.shape == (3, KINDS[kind].size)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_occurs_and_is_read(kind: str) -> None:
    weight = grouped(torch.from_numpy(random_blocks(kind, 300)).flatten(), kind, (300, -1))
    bits = int(kind.removeprefix("I")[1])
    assert weight.codes.unique().tolist() == list(range(1 << bits))


@has_kernels
@pytest.mark.parametrize("kind", ROUNDED)
def test_the_bytes_a_value_is_said_to_take_are_those_it_is_packed_in(kind: str) -> None:
    from octavo.ops.native.linear import NativeQuantizedLinear

    shape = (64, 512)
    blocks = random_blocks(kind, shape[0] * shape[1] // KINDS[kind].size)
    weight = grouped(torch.from_numpy(blocks).flatten(), kind, shape)
    linear = NativeQuantizedLinear([weight], None, "none", torch.float32)
    size = library.function("octavo_linear_bytes", library.ctypes.c_void_p)(linear._at)
    assert size == bytes_per_value([kind]) * weight.codes.numel()
    assert torch.equal(linear.rows(torch.arange(64)), weight.dense())


# ---- models ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized")
    write_checkpoint(path, "Llama", initializer_range=0.1)
    return path


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).pow(2).mean().sqrt() / exact.std())


def weights_of(model) -> list[type]:
    """What multiplies in the first layer, and the head."""
    return [type(x.apply).__name__ for x in (*model.layers[0].linears(), model.embedding.head)]


ALL = ["NativeQuantizedLinear"] * 5
MIXES = {
    "Q4_1": {},
    "Q4_0": {},
    "Q5_0": {},
    "Q5_1": {},
    "Q8_0": {},
    "q and k other than v": {"attn_v": "Q8_0"},
    "gate other than up": {"ffn_gate": "Q4_0", "ffn_up": "Q5_0"},
}


@has_kernels
@pytest.mark.parametrize("mix", MIXES)
def test_a_gguf_file_is_kept_in_its_groups(mix: str, checkpoint: Path, tmp_path: Path) -> None:
    """Against the expanded weights; inputs are rounded to 8 bits (relative RMS error 1.4 to 2.6 %,
    in BF16 up to 3.2 %)."""
    kind = mix if mix.startswith("Q") else "Q4_1"
    file = write_gguf(tmp_path / "m.gguf", checkpoint, kind, kinds=MIXES[mix])
    exact_model, model = load(file), load(file, "auto")
    assert exact_model.quantization is None and "quantization" not in exact_model.reasons
    assert model.quantization == "gguf"
    assert model.reasons["quantization"].startswith("gguf: the file's own groups; --dtype float32")
    assert weights_of(model) == ALL
    assert model.implementations["quantized_linear"] == "native"
    assert "quantized_linear" not in exact_model.implementations
    assert model.weight_bytes < 0.6 * exact_model.weight_bytes
    exact = all_logits(exact_model, IDS)
    assert error(all_logits(load(file, quantization="gguf"), IDS), exact) < 0.03
    assert error(all_logits(model, IDS), exact) < 0.05


@has_kernels
@pytest.mark.parametrize(
    "kinds",
    [("Q4_1", "Q8_0"), ("Q8_0", "Q4_0"), ("Q4_0", "Q4_1"), ("Q5_0", "Q5_1"), ("Q8_0", "F16")],
    ids=" and ".join,
)
def test_what_is_fused_takes_the_bytes_it_is_said_to_take(
    kinds: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "Llama", hidden_size=256, intermediate_size=512)
    mix = {"attn_v": kinds[1], "ffn_up": kinds[1], "token_embd": "F32", "output": "F32"}
    file = write_gguf(tmp_path / "m.gguf", tmp_path, kinds[0], kinds=mix)
    sizes, zeros = [], memory.zeros
    monkeypatch.setattr(memory, "zeros", lambda size: sizes.append(size) or zeros(size))
    model = load(file, quantization="gguf")
    dense = 4 * (320 * 256 + 7 * 256)  # the embedding, the norms
    assert abs(model.weight_bytes / (sum(sizes) + dense) - 1) < 0.005


@has_kernels
def test_what_is_stored_dense_stays_dense(checkpoint: Path, tmp_path: Path) -> None:
    """Quantized weights that are fused with it are multiplied by themselves."""
    kinds = {"attn_v": "F16", "ffn_down": "BF16", "output": "F32"}
    file = write_gguf(tmp_path / "m.gguf", checkpoint, "Q8_0", kinds=kinds)
    model = load(file, quantization="gguf")
    dense, quantized = "NativeLinear", "NativeQuantizedLinear"
    assert weights_of(model) == ["Separate", quantized, quantized, dense, dense]
    parts = model.layers[0].mixer.qkv.apply.parts
    assert [type(part).__name__ for part in parts] == [quantized, quantized, dense]
    assert error(all_logits(model, IDS), all_logits(load(file), IDS)) < 0.03


@has_kernels
@pytest.mark.parametrize("kind", ("Q4_0", "F16"))
def test_a_tied_head_shares_its_rows_with_the_embedding(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Llama", initializer_range=0.1, tie_word_embeddings=True)
    file = write_gguf(tmp_path / "m.gguf", tmp_path, "Q4_0", tied=True, kinds={"token_embd": kind})
    model = load(file, quantization="gguf")
    exact = load(file)
    ids = torch.tensor([5, 0, 319, 5])
    assert torch.equal(model.embedding(ids), exact.embedding(ids))
    assert error(all_logits(model, IDS), all_logits(exact, IDS)) < 0.03


@has_kernels
def test_fp16_expands_a_gguf_file(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", checkpoint, "Q4_1", kinds={"attn_v": "Q8_0"})
    model = load(file, "float16")
    assert model.quantization is None and model.dtype == torch.float16
    assert error(all_logits(model, IDS), all_logits(load(file), IDS)) < 0.005
    with pytest.raises(ConfigError, match="--quantization gguf: not with --dtype float16"):
        load(file, "float16", quantization="gguf")


@has_kernels
@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("biases", (False, True))
def test_int8_rounds_any_dense_checkpoint(tied: bool, biases: bool, tmp_path: Path) -> None:
    """Relative RMS error 2 to 4 %: both weights and inputs have 8 bits."""
    write_checkpoint(
        tmp_path,
        "Llama",
        initializer_range=0.1,
        tie_word_embeddings=tied,
        attention_bias=biases,
        mlp_bias=biases,
    )
    model, exact = load(tmp_path, quantization="int8"), load(tmp_path)
    assert model.reasons["quantization"].startswith("int8: --quantization int8: weights and ")
    assert weights_of(model) == ALL and set(weights_of(exact)) == {"NativeLinear"}
    ids = torch.tensor([5, 0, 319, 5])
    assert torch.equal(model.embedding(ids), exact.embedding(ids))  # rows are looked up as stored
    assert 0 < error(all_logits(model, IDS), all_logits(exact, IDS)) < 0.05
    assert model.weight_bytes < 0.5 * exact.weight_bytes


@has_kernels
def test_int8_of_dummy_weights_and_of_a_gguf_file(checkpoint: Path, tmp_path: Path) -> None:
    assert weights_of(load(checkpoint, quantization="int8", load_format="dummy")) == ALL
    file = write_gguf(tmp_path / "m.gguf", checkpoint, "Q4_0")
    model = load(file, quantization="int8")
    assert model.quantization == "int8" and weights_of(model) == ALL
    assert error(all_logits(model, IDS), all_logits(load(file), IDS)) < 0.05


@pytest.mark.skipif(not library.features(), reason="no kernels here")
def test_a_file_without_groups_says_so() -> None:
    """What is asked for and cannot be had is refused; what is not asked for is not claimed."""
    model = load(models.path("R-F16"), "auto")
    assert model.quantization is None and "quantization" not in model.reasons
    with pytest.raises(ConfigError, match="holds no type whose groups can be kept"):
        load(models.path("R-F16"), "auto", quantization="gguf")
