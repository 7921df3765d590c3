"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434): softmax scores, experts chosen among all or in
the groups that have the best ones."""

from __future__ import annotations

from octavo.model.families.experts import HF_EXPERTS
from octavo.model.families.family import Family
from octavo.model.families.latent import NAMES, build_latent
from octavo.model.families.reading import ConfigReader
from octavo.model.families.routing import read_router
from octavo.model.spec import DecoderSpec


def build(config: ConfigReader) -> DecoderSpec:
    config.choice("scoring_func", ("softmax",), "softmax")
    config.absent("norm_topk_prob", False)  # with it the published code leaves the scale out
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    grouped = method == "group_limited_greedy"
    router = read_router(
        config,
        config.count("n_routed_experts"),
        renormalize=False,
        scale=config.number("routed_scaling_factor", 1.0),
        groups=config.integer("n_group") if grouped else 1,
        groups_kept=config.integer("topk_group") if grouped else 1,
    )
    return build_latent(config, router, config.boolean("mlp_bias", False))


FAMILY = Family(("DeepseekV2ForCausalLM",), (), build, hf_names=NAMES, experts=HF_EXPERTS)
