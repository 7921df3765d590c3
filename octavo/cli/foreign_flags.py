"""Flags that octavo does not have and vLLM's users know."""

from __future__ import annotations

# Flags of vLLM that a later version brings: parsed, then "not in this version" (exit 2).
FLAGS_OF_LATER_VERSIONS: dict[str, str] = {
    "--quantization-fp8-dynamic": "quantization",
    "--nnodes": "several nodes",
    "-n": "several nodes",
    "--node-rank": "several nodes",
    "-r": "several nodes",
    "--master-addr": "several nodes",
    "--master-port": "several nodes",
    "--headless": "several nodes",
    "--data-parallel-backend": "several nodes",
    "-dpb": "several nodes",
    "--speculative-config": "speculative decoding",
    "-sc": "speculative decoding",
    "--spec-method": "speculative decoding",
    "--spec-model": "speculative decoding",
    "--spec-tokens": "speculative decoding",
    "--speculative-model": "speculative decoding",
    "--num-speculative-tokens": "speculative decoding",
    "--otlp-traces-endpoint": "tracing",
}

# Flags vLLM removed, still in people's scripts: accepted, and answered with what replaced them.
RETIRED_FLAGS: dict[str, str] = {
    "--swap-space": "preempted requests are recomputed, never swapped; nothing to set",
    "--worker-use-ray": "use --distributed-executor-backend ray",
    "--use-v2-block-manager": "there is one block pool; nothing to set",
    "--num-lookahead-slots": "lookahead follows from speculative decoding; nothing to set",
    "--guided-decoding-backend": "llguidance is the only backend; use --structured-outputs-config",
    "--disable-frontend-multiprocessing": "use octavo.LLM for an engine in the same process",
    "--disable-log-requests": "requests are not logged unless --enable-log-requests is given",
    "--device": "a GPU is used where CUDA shows one; CUDA_VISIBLE_DEVICES= runs on the CPU",
    "--num-scheduler-steps": "steps overlap by default (--async-scheduling)",
    "--preemption-mode": "preemption is always by recompute",
    "--task": "the server offers what the model can do; nothing to set",
    "--max-seq-len-to-capture": "CUDA graphs cover every length; --enforce-eager turns them off",
    "--enable-reasoning": "use --reasoning-parser",
    "--rope-scaling": "use --hf-overrides '{\"rope_scaling\": {…}}'",
    "--rope-theta": "use --hf-overrides '{\"rope_theta\": …}'",
}
# Of the retired flags, those that took no value.
RETIRED_SWITCHES = {
    "--worker-use-ray",
    "--use-v2-block-manager",
    "--disable-frontend-multiprocessing",
    "--disable-log-requests",
    "--enable-reasoning",
}
