"""Families with experts and with latent attention: tiny random checkpoints give transformers'
logits, however prompts are cut and whoever shares the batch."""

from __future__ import annotations

import pytest
import torch

from tests.model.running import (
    all_logits,
    load,
    make_batch,
    random_ids,
    reference_logits,
    write_checkpoint,
)

QWEN = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 40}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-4,  # the latents' norms have 1e-6 whatever this is
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "head_dim": 24,
    "sliding_window": 20,
    "rope_parameters": {**YARN, "truncate": False},
}
FAMILIES = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 24, "head_dim": 24},
    ),
    "qwen2-moe": ("Qwen2Moe", {**QWEN, "shared_expert_intermediate_size": 56}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-some": (
        "Qwen3Moe",
        {**QWEN, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None, "mlp_bias": True}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
            "rope_parameters": MSCALE,
        },
    ),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {**DEEPSEEK, "norm_topk_prob": False, "rope_parameters": MSCALE},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {**DEEPSEEK, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-full": (
        "GptOss",
        {**GPT_OSS, "layer_types": ["full_attention"] * 3, "attention_bias": False},
    ),
}
SOME = ("mixtral", "qwen2-moe", "deepseek-v2-groups", "deepseek-v3-yarn", "gpt-oss")


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


@pytest.mark.parametrize("checkpoint", SOME, indirect=True)
def test_mixed_batch_gives_each_row_its_own_logits(checkpoint):
    path, reference = checkpoint
    model = load(path)
    prompts = [random_ids(70), random_ids(33)[::-1], random_ids(200), random_ids(20)[::-1]]
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(3)).view(4, 16).int()
    cache = model.allocate_cache(64, 16)
    cuts = [69, 32, 100, 0]  # of which two decode, one goes on with its prompt, one begins
    for row, prompt in enumerate(prompts):
        if cuts[row]:
            model.forward(make_batch([prompt[: cuts[row]]], [0], tables[row : row + 1]), cache)
    batch = make_batch([p[n:] for p, n in zip(prompts, cuts)], cuts, tables)
    found = model.logits(model.forward(batch, cache)[batch.logit_rows])
    last = model.logits(model.forward_last(batch, cache))
    torch.testing.assert_close(last, found, rtol=0, atol=1e-5)
    for row, prompt in enumerate(prompts):
        expected = reference_logits(reference, prompt)[-1]
        torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpoint", SOME, indirect=True)
def test_40_greedy_tokens_equal_transformers(checkpoint):
    """Of three requests at once, with yarn from below its original length to beyond."""
    path, reference = checkpoint
    model = load(path)
    rows = [random_ids(n)[::-1] for n in (1, 19, 45)]
    tables = torch.randperm(24, generator=torch.Generator().manual_seed(4)).view(3, 8).int()
    cache = model.allocate_cache(24, 16)
    for row, ids in enumerate(rows):
        for start in range(0, len(ids) - 1, 16):
            part = ids[start : min(start + 16, len(ids) - 1)]
            model.forward(make_batch([part], [start], tables[row : row + 1]), cache)
    counts = [len(ids) for ids in rows]
    for _ in range(40):
        batch = make_batch([ids[-1:] for ids in rows], [len(ids) - 1 for ids in rows], tables)
        drawn = model.most_likely(model.forward(batch, cache)).tolist()
        rows = [[*ids, token] for ids, token in zip(rows, drawn)]
    for ids, count in zip(rows, counts):
        prompt = torch.tensor([ids[:count]])
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert ids == expected[0].tolist()


@pytest.mark.parametrize("checkpoint", ("mixtral", "deepseek-v3-yarn", "gpt-oss"), indirect=True)
def test_bf16_stays_close_to_fp32(checkpoint):
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
