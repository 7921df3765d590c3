"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437): sigmoid scores, for the choice with a correction
per expert, in the groups whose two best experts are worth most."""

from __future__ import annotations

from octavo.model.families.experts import HF_EXPERTS
from octavo.model.families.family import Family
from octavo.model.families.latent import NAMES, build_latent
from octavo.model.families.reading import ConfigReader
from octavo.model.families.routing import read_router
from octavo.model.spec import DecoderSpec


def build(config: ConfigReader) -> DecoderSpec:
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    router = read_router(
        config,
        config.count("n_routed_experts"),
        score="sigmoid",
        renormalize=config.boolean("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor"),
        groups=config.integer("n_group"),
        groups_kept=config.integer("topk_group"),
        group_score="top2",
        corrected=True,
    )
    return build_latent(config, router)


FAMILY = Family(("DeepseekV3ForCausalLM",), (), build, hf_names=NAMES, experts=HF_EXPERTS)
