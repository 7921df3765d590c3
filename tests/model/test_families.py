"""Each family's tiny random checkpoint gives transformers' logits, however the prompt is cut."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import registry
from tests.model import expert_families
from tests.model.running import (
    all_logits,
    load,
    make_batch,
    random_ids,
    reference_logits,
    write_checkpoint,
)

GEMMA2 = {
    "head_dim": 24,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 20,
    "sliding_window": 24,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 4.0,
}
GEMMA3 = {
    "head_dim": 24,
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 20,
    "vocab_size": 331,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "mistral-window": ("Mistral", {"head_dim": 32, "sliding_window": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 24, "tie_word_embeddings": True, "vocab_size": 331}),
    "gemma-untied": ("Gemma", {"head_dim": 24, "hidden_act": "gelu"}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-plain": (
        "Gemma2",
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-linear": (
        "Gemma3",
        {
            **GEMMA3,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": ("Phi3", {"vocab_size": 333}),
    "phi3-window": ("Phi3", {"sliding_window": 24, "tie_word_embeddings": True}),
    "phi3-partial": ("Phi3", {"partial_rotary_factor": 0.75}),
    "gpt2": ("GPT2", {"tie_word_embeddings": True, "vocab_size": 331}),
    "gpt2-untied": (
        "GPT2",
        {
            "n_inner": 104,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "gelu_pytorch_tanh",
        },
    ),
    "gpt2-unscaled": ("GPT2", {"scale_attn_weights": False, "activation_function": "gelu"}),
    "opt": ("OPT", {"ffn_dim": 96, "tie_word_embeddings": True, "vocab_size": 331}),
    "opt-untied": ("OPT", {"ffn_dim": 96, "activation_function": "gelu", "enable_bias": False}),
    "opt-after-narrow": (
        "OPT",
        {
            "ffn_dim": 96,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 40,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {"vocab_size": 331}),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "granite": ("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "granite-biases": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    # T47c: head sizes that hidden_size / heads does not give
    "heads-times-dim-above-hidden": ("Llama", {"head_dim": 24}),
    "heads-times-dim-below-hidden": ("Llama", {"head_dim": 8}),
    "hidden-not-divisible-by-heads": (
        "Mistral",
        {"hidden_size": 56, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    ),
    **expert_families.FAMILIES,
}


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory):
    name, changes = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("checkpoint")
    return path, write_checkpoint(path, name, **changes)


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
@pytest.mark.parametrize("chunk", (None, 64, 7, 1))
def test_logits_equal_transformers(checkpoint, chunk):
    path, reference = checkpoint
    ids = random_ids(90)
    found = all_logits(load(path), ids, chunk)
    torch.testing.assert_close(found, reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


EXPERTS = ("mixtral", "qwen2-moe", "deepseek-v2-groups", "deepseek-v3-yarn", "gpt-oss")
MIXED = (
    *("llama", "mistral-window", "qwen3", "gemma", "gemma2", "gemma3-linear", "phi3-partial"),
    *("phi3-window", "gpt2", "opt", "opt-after-narrow", "olmo2", "granite"),
    *EXPERTS,
)


@pytest.mark.parametrize("checkpoint", MIXED, indirect=True)
def test_forty_greedy_tokens_beside_other_rows_equal_transformers(checkpoint):
    """Rows of other lengths decode with it, one of them starts in the middle. A row's tokens are
    transformers' choices if each is its choice after those before."""
    path, reference = checkpoint
    model = load(path)
    prompts = [random_ids(70), random_ids(33)[::-1], random_ids(20)[::-1]]
    width = 8
    tables = torch.randperm(3 * width, generator=torch.Generator().manual_seed(3))
    tables = tables.view(3, width).int()
    cache = model.allocate_cache(3 * width, 16)

    def step(rows: dict[int, list[int]]) -> None:
        """Each of ``rows`` brings tokens, and is given the one that it draws."""
        order = sorted(rows, key=lambda row: len(rows[row]) != 1)
        past = [len(prompts[row]) - len(rows[row]) for row in order]
        batch = make_batch([rows[row] for row in order], past, tables[order])
        hidden = model.forward_last(batch, cache)
        assert torch.equal(model.most_likely(hidden), model.logits(hidden).argmax(-1))
        for row, token in zip(order, model.most_likely(hidden).tolist()):
            prompts[row].append(token)

    counts = [len(prompt) for prompt in prompts]
    step({0: prompts[0][:], 1: prompts[1][:]})
    for turn in range(39):
        late = {2: prompts[2][:] if turn == 20 else prompts[2][-1:]} if turn >= 20 else {}
        step({0: prompts[0][-1:], 1: prompts[1][-1:], **late})
    assert [len(p) - n for p, n in zip(prompts, counts)] == [40, 40, 19]
    for prompt, count in zip(prompts, counts):
        expected = reference_logits(reference, prompt[:-1])[count - 1 :].argmax(-1)
        assert prompt[count:] == expected.tolist()


@pytest.mark.parametrize("checkpoint", MIXED, indirect=True)
def test_mixed_batch_gives_each_row_its_own_logits(checkpoint):
    path, reference = checkpoint
    model = load(path)
    prompts = [random_ids(70), random_ids(33)[::-1], random_ids(200), random_ids(20)[::-1]]
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(3)).view(4, 16).int()
    cache = model.allocate_cache(64, 16)
    cuts = [[69, 1], [32, 1], [100, 100], [0, 20]]  # decode, decode, later chunk, new prompt
    for row, prompt in enumerate(prompts):
        if first := cuts[row][0]:
            model.forward(make_batch([prompt[:first]], [0], tables[row : row + 1]), cache)
    past = [cut[0] for cut in cuts]
    batch = make_batch([p[n:] for p, n in zip(prompts, past)], past, tables)
    assert batch.decode_rows == 2
    found = model.logits(model.forward(batch, cache)[batch.logit_rows])
    last = model.forward_last(batch, cache)
    torch.testing.assert_close(model.logits(last), found, rtol=0, atol=1e-5)
    for row, prompt in enumerate(prompts):
        expected = reference_logits(reference, prompt)[-1]
        torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(
    registry.select("linear", "cpu", torch.float32).name != "native",
    reason="needs a CPU that runs kernels of our own",
)
@pytest.mark.parametrize(
    "checkpoint", ("gemma2", "gemma3-linear", "phi3-partial", "gpt2", "olmo2"), indirect=True
)
def test_deterministic_logits_are_the_same_bits_however_the_prompt_is_cut(checkpoint):
    path, _ = checkpoint
    model, ids = load(path, deterministic=True), random_ids(90)
    whole = all_logits(model, ids)
    assert torch.equal(all_logits(model, ids, 7), whole)
    assert torch.equal(all_logits(model, ids, 1), whole)


def test_copied_block_serves_as_the_original(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    model, ids = load(tmp_path), random_ids(33)
    cache = model.allocate_cache(8, 16)
    tables = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    model.forward(make_batch([ids[:32]], [0], tables), cache)
    expected = model.forward(make_batch([ids[32:]], [32], tables), cache)
    model.copy_blocks(cache, torch.tensor([[0, 5], [1, 6]]))
    moved = torch.tensor([[5, 6, 7]], dtype=torch.int32)
    assert torch.equal(model.forward(make_batch([ids[32:]], [32], moved), cache), expected)


def test_bf16_stays_close_to_fp32(tmp_path):
    write_checkpoint(tmp_path, "Llama", initializer_range=0.05)
    ids = random_ids(60)
    exact = all_logits(load(tmp_path), ids)
    error = all_logits(load(tmp_path, dtype="bfloat16"), ids) - exact
    assert error.abs().max() / exact.abs().max() < 0.03


@pytest.mark.parametrize("checkpoint", ("mixtral", "deepseek-v3-yarn", "gpt-oss"), indirect=True)
def test_bf16_of_experts_stays_close_for_most_tokens(checkpoint):
    path, _ = checkpoint
    ids = random_ids(60)
    exact = all_logits(load(path), ids)
    error = (all_logits(load(path, dtype="bfloat16"), ids) - exact).abs() / exact.abs().max()
    assert error.median() < 0.02  # a token whose experts are others by rounding may be far off


@pytest.mark.parametrize("checkpoint", ("gpt-oss",), indirect=True)
def test_a_version_without_sinks_is_passed_over(checkpoint):
    """Octavo's kernels do not take FP16, and ATen's attention has no sinks."""
    path, reference = checkpoint
    model, ids = load(path, dtype="float16"), random_ids(60)
    assert model.implementations["paged_attention"] == "torch"
    expected = reference_logits(reference, ids)
    error = (all_logits(model, ids) - expected).abs() / expected.abs().max()
    assert error.median() < 0.003
