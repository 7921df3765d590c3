"""The guide's out-of-memory list and tuning list, each line answered for one model and machine."""

from __future__ import annotations

import math
import shlex
from pathlib import PurePath

from octavo.plan.choices import Kept
from octavo.plan.plan import Advice, Plan
from octavo.plan.roofline import link_seconds, times
from octavo.worker.sizes import blocks_for, shown

SMALL_GPU = 30 << 30
GUESSES = 5  # of a speculating step, as in the guide's command
SHARED = 2000  # tokens of a shared prefix, for example's sake


def out_of_memory(plan: Plan, running: Plan) -> list[Advice]:
    """``running``: what comes after the start is told of it (``plan.alternative``)."""
    return [_at_start(plan), _while_running(running), _ranks_time_out(running)]


def tuning(plan: Plan, running: Plan) -> list[Advice]:
    return [
        _hardware(plan),
        _quantization(plan),
        *(answer(running) for answer in (_prefixes, _chunks, _length)),
        *(answer(running) for answer in (_spread, _speculation, _watching)),
    ]


def best_kept(plan: Plan) -> Kept:
    """The fastest way to keep weights that fits, else the smallest."""
    fitting = [kept for kept in plan.kept if kept.fits]
    if not fitting:
        return min(plan.kept, key=lambda kept: kept.weights)
    return min(fitting, key=lambda kept: (kept.one.token if kept.one else 0.0, kept.weights))


def _kept_command(plan: Plan, kept: Kept) -> str:
    if kept is plan.kept[0]:
        return plan.serve.command()
    if kept.name != "awq":
        return plan.serve.command(*kept.flags, without=("-q",))
    made = f"./{PurePath(plan.serve.model).name}-awq"
    words = ["octavo", "quantize", plan.serve.model, "--format", "awq", "--output", made]
    return f"{shlex.join(words)} && {plan.serve.command(without=('-q',), model=made)}"


def _wanted_tokens(plan: Plan) -> int:
    """Of a request of the load, where the model takes so many."""
    memory = plan.fit.plan
    most = plan.checkpoint.spec.max_position if memory is None else memory.max_model_len
    return min(plan.load.tokens, most)


def _at_start(plan: Plan) -> Advice:
    line = "out of memory at start: lower --gpu-memory-utilization, --max-model-len; quantize"
    parts, total = plan.fit.per_rank, plan.target.memory_bytes
    weights = parts["weights"]
    if plan.fit.plan is None:
        smaller = next((kept for kept in plan.kept if kept.fits), None)
        number = f"does not fit: {shown(weights)} of weights a device of {shown(total)}"
        if smaller is not None:
            reason = f"{plan.fit.problem}; kept as {smaller.name} the weights take "
            reason += f"{shown(smaller.weights)}, and {smaller.concurrency:.1f} requests fit"
            return Advice(line, number, reason, _kept_command(plan, smaller))
        if plan.devices_needed is not None and plan.devices_needed > plan.layout.tp:
            words = ["-tp", str(plan.devices_needed)]
            reason = f"{plan.fit.problem}; {plan.devices_needed} such GPUs hold it"
            return Advice(line, number, reason, plan.serve.command(*words, without=("-pp",)))
        return Advice(line, number, plan.fit.problem, plan.serve.command())
    memory, length = plan.fit.plan, _wanted_tokens(plan)
    one = memory.kv_cache_bytes // max(1, memory.num_blocks)
    one *= blocks_for(length, memory.block_size)
    if plan.target.device == "cpu":
        number = f"{shown(weights)} of weights and {shown(memory.kv_cache_bytes)} of cache"
        reason = f"{shown(total)} are free; a request of {length} tokens needs {shown(one)}"
        return Advice(
            line, number, reason, plan.serve.command("--max-model-len", str(length), *_cache(one))
        )
    fixed = sum(parts[name] for name in ("weights", "slots", "activations", "graphs"))
    least = math.ceil(100 * (fixed + one + 1) / total) / 100
    number = f"needs {shown(fixed + one)} of {shown(total)}: utilization from {least:.2f} on"
    reason = (
        f"weights {shown(weights)}, activations and graphs "
        f"{shown(parts['activations'] + parts['graphs'])} (estimated), one request of {length} "
        f"tokens {shown(one)}; lower it where others use the GPU"
    )
    words = ["--gpu-memory-utilization", f"{least:.2f}", "--max-model-len", str(length)]
    command = plan.serve.command(*words, without=("--kv-cache-memory-bytes",))
    return Advice(line, number, reason, command)


def _cache(size: int) -> tuple[str, str]:
    return "--kv-cache-memory-bytes", str(size)


def _while_running(plan: Plan) -> Advice:
    line = "out of memory after a while: KV cache full, lower --max-num-seqs; prefix caching"
    memory = plan.fit.plan
    if memory is None:
        return Advice(line, "0 requests", "it does not start", plan.serve.command())
    length = _wanted_tokens(plan)
    held = memory.num_blocks // blocks_for(length, memory.block_size)
    seqs = max(1, min(memory.max_num_seqs, held))
    number = (
        f"{held} requests of {length} tokens at once, {plan.fit.concurrency:.1f} of the longest "
        f"({memory.max_model_len})"
    )
    reason = (
        f"the cache holds {plan.tokens:,} tokens of {plan.kv_bytes_per_token:,.0f} bytes; beyond, "
        f"requests wait and are preempted, memory does not run out; with --max-num-seqs {seqs} "
        f"none of up to {length} tokens is preempted; prefix caching is on by default"
    )
    return Advice(line, number, reason, plan.serve.command("--max-num-seqs", str(seqs)))


def _ranks_time_out(plan: Plan) -> Advice:
    line = "ranks of several GPUs time out: NVLink, nvidia-smi topo -m, NCCL_*"
    command = f"NCCL_DEBUG=INFO {plan.serve.command()}"
    if plan.layout.tp == 1:
        return Advice(line, "0 exchanges between GPUs", "each layer is on one device", command)
    count = 2 * len(plan.checkpoint.spec.layers)
    size = plan.checkpoint.spec.hidden_size * plan.checkpoint.itemsize
    gpu = plan.target.gpu
    link = gpu.link if gpu and gpu.has_rates else "a link of unknown rate"
    number = f"{count} sums a step over {plan.layout.tp} ranks, {size:,} bytes a token each"
    reason = f"they go over {link}: nvidia-smi topo -m must show NV# (NVLink) or PIX, not SYS"
    return Advice(line, number, reason, f"nvidia-smi topo -m; {command}")


def _hardware(plan: Plan) -> Advice:
    line = "hardware: H100/H200 FP8 first; A100 BF16 or AWQ; consumer cards Ollama"
    gpu, now = plan.target.gpu, plan.kept[0]
    best = best_kept(plan)
    fp8 = next((kept for kept in plan.kept if kept.name.startswith("fp8")), None)
    if plan.target.device == "cpu":
        reason = "a CPU reads weights from memory: fewer bytes are fewer seconds"
        best = min((k for k in plan.kept if k.fits), key=lambda k: k.weights, default=best)
    elif gpu is None:
        reason = "the rates of this GPU are not known: the smallest that fits"
    elif gpu.flops8 is not None and fp8 is not None and fp8.fits:
        best = fp8
        reason = f"{gpu.name} multiplies FP8 at {gpu.flops8 / gpu.flops:.1f} times its 16-bit rate"
    elif gpu.flops8 is None and now.fits and plan.tokens >= plan.load.requests * plan.load.tokens:
        best = now
        reason = f"{gpu.name} does not multiply FP8, and {plan.load.requests} requests fit as it is"
    else:
        reason = f"the fastest of what fits in {gpu.name}"
    if gpu is not None and not gpu.has_nvlink and plan.target.memory_bytes < SMALL_GPU:
        reason += "; one person alone can do with Ollama, this serves many"
    number = f"{best.name}: {shown(best.weights)} a device"
    if best.one is not None:
        number += f", {best.one.token * 1e3:.2f} ms a token predicted"
    return Advice(line, number, reason, _kept_command(plan, best))


def _quantization(plan: Plan) -> Advice:
    line = "quantization: FP8 where it can be; AWQ models as they are"
    now = plan.kept[0]
    smaller = [kept for kept in plan.kept[1:] if kept.weights < now.weights]
    if not smaller:
        reason = "it is quantized as it is stored" if plan.checkpoint.kept else "no way is smaller"
        return Advice(line, f"{shown(now.weights)} a device", reason, plan.serve.command())
    fp8 = next((kept for kept in smaller if kept.name == "fp8"), smaller[0])
    wanted = fp8 if fp8.fits else min(smaller, key=lambda kept: kept.weights)
    wanted = best_kept(plan) if plan.target.device == "cuda" and fp8.note else wanted
    listed = ", ".join(f"{kept.name} {shown(kept.weights)}" for kept in plan.kept)
    faster = ""
    if now.one is not None and wanted.one is not None:
        faster = f"; {now.one.token / wanted.one.token:.2f} times the tokens a second predicted"
    number = f"{shown(now.weights)} -> {shown(wanted.weights)} a device ({wanted.name}){faster}"
    return Advice(line, number, f"bytes a device: {listed}", _kept_command(plan, wanted))


def _prefixes(plan: Plan) -> Advice:
    line = "prefix caching: for RAG and agents"
    size = int(SHARED * plan.kv_bytes_per_token)
    number = f"{shown(size)} of cache once instead of per request, for {SHARED:,} shared tokens"
    reason = "on by default; full blocks are shared, parts of blocks by copy-on-write"
    if plan.one is not None:
        spared = plan.one.first_token * min(1.0, SHARED / plan.one.prompt)
        reason += f"; a first token comes about {spared * 1e3:.0f} ms earlier (predicted)"
    return Advice(line, number, reason, plan.serve.command("--enable-prefix-caching"))


def _chunks(plan: Plan) -> Advice:
    line = "chunked prefill: for long prompts"
    memory = plan.fit.plan
    tokens = 8192 if memory is None else memory.max_num_batched_tokens
    number = f"prompts are cut to at most {tokens} tokens a step"
    reason = "on by default; while requests decode, chunks keep a step under twice its time"
    if plan.one is not None:
        whole = plan.one.first_token * tokens / plan.one.prompt
        reason += (
            f": {tokens} tokens at once would hold them up for {whole * 1e3:.0f} ms, a token takes "
            f"{plan.one.token * 1e3:.1f} ms (predicted)"
        )
    return Advice(line, number, reason, plan.serve.command("--enable-chunked-prefill"))


def _length(plan: Plan) -> Advice:
    line = "--max-model-len: as long as the longest real request, no longer"
    memory, longest = plan.fit.plan, plan.checkpoint.spec.max_position
    length = min(plan.load.tokens, longest)
    if memory is None:
        return Advice(line, "0 requests", "it does not start", plan.serve.command())
    blocks = blocks_for(length, memory.block_size)
    count = memory.num_blocks / blocks
    number = (
        f"{plan.fit.concurrency:.1f} requests of {memory.max_model_len}, {count:.1f} of {length}"
    )
    reason = (
        f"the model knows {longest} positions; blocks are taken as a request grows, so the limit "
        "frees the state of slots alone, and refuses what would crowd others out"
    )
    return Advice(line, number, reason, plan.serve.command("--max-model-len", str(length)))


def _spread(plan: Plan) -> Advice:
    line = "TP within an NVLink host; PP or TP x PP across hosts"
    layout = next((one for one in plan.layouts if one.fits and one.runs), plan.layout)
    number = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"
    if layout.many is not None:
        number += f": {layout.tokens_per_second:,.0f} tokens/s under the load predicted"
    reason = f"{shown(layout.weights_per_rank)} of weights a device"
    gpu = plan.target.gpu
    if layout.tp > 1 and gpu is not None and gpu.has_rates:
        rank = next(rank for rank in plan.ranks if rank.shard.rank == 0)
        if rank.shard.size == layout.tp:
            spent = link_seconds(plan.checkpoint, rank, gpu, 1)
            reason += f"; sums over {gpu.link} take {spent * 1e3:.2f} ms of a token"
    if plan.target.count == 1:
        reason += "; one device needs no other"
    if plan.target.device == "cuda":
        reason += "; -pp runs on CPUs alone in this version"
    words = layout.flags
    return Advice(line, number, reason, plan.serve.command(*words, without=("-tp", "-pp", "-dp")))


def _speculation(plan: Plan) -> Advice:
    line = 'speculative decoding: structured output, --speculative-model "[ngram]"'
    words = ("--speculative-model", "[ngram]", "--num-speculative-tokens", str(GUESSES))
    command = plan.serve.command(*words, without=("-pp",))
    reason = "octavo stops guessing where that does not pay, and no answer changes"
    if plan.one is None or plan.target.gpu is None or plan.fit.plan is None:
        return Advice(line, f"{GUESSES} guesses a step", reason, command)
    firsts = [rank for rank in plan.ranks if rank.shard.rank == 0]
    block, one = plan.fit.plan.block_size, plan.one
    wide = times(
        plan.checkpoint, firsts, plan.target.gpu, block, one.prompt, GUESSES + 1, one.context
    )
    assert wide is not None
    price = wide.token / one.token
    number = (
        f"{price:.2f} times a step for {GUESSES + 1} tokens: pays from {price - 1:.2f} right on"
    )
    return Advice(line, number, f"a step reads all weights either way; {reason}", command)


def _watching(plan: Plan) -> Advice:
    line = "monitoring: Prometheus and Grafana, gpu_cache_usage_perc and the queue"
    memory = plan.fit.plan
    if memory is None:
        return Advice(line, "0 requests", "it does not start", plan.serve.command())
    typical = plan.tokens / max(1, min(plan.load.tokens, memory.max_model_len))
    number = f"usage 1.0 is {plan.tokens:,} tokens: {typical:.0f} requests of {plan.load.tokens}"
    queue = plan.config.scheduler.max_num_queued_reqs or 4 * memory.max_num_seqs
    reason = (
        f"up to {queue} wait, then 429; vllm:num_requests_waiting above 0 for minutes is too much "
        "load; dashboards and alerts are in deploy/"
    )
    command = f"{plan.serve.command()} & curl -s localhost:8000/metrics | grep -E "
    return Advice(line, number, reason, command + "'cache_usage_perc|num_requests_waiting'")
