"""Families with experts and with latent attention: transformers' class and its configuration."""

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
