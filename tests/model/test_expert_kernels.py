"""Layers with experts and latent attention on the GPU's kernels, interpreted: a step with padding,
whose lengths nothing reads on the host, gives each row the logits of the CPU's FP32 model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from octavo.model import decoder
from octavo.model.batch import ForwardBatch
from octavo.model.versions import choose_versions
from octavo.ops import registry
from tests.model.expert_families import FAMILIES
from tests.model.running import all_logits, load, make_batch, random_ids, write_checkpoint

INTERPRETED = ("paged_attention", "paged_latent_attention", "moe_route", "moe_experts")


@pytest.fixture(params=("mixtral", "qwen2-moe", "deepseek-v3-yarn", "gpt-oss"))
def models(request, tmp_path, monkeypatch):
    """(that of a CPU, that of a GPU), both in FP32."""
    name, changes = FAMILIES[request.param]
    write_checkpoint(tmp_path, name, **{**changes, "num_hidden_layers": 2})
    exact = load(tmp_path)

    def with_kernels(*arguments):
        chosen = choose_versions(*arguments)
        kernels = {
            op: next(v for v in registry.versions(op, "cuda") if v.name == "triton")
            for op in INTERPRETED
            if op in chosen
        }
        return {**chosen, **kernels}

    monkeypatch.setattr(decoder, "choose_versions", with_kernels)
    model = load(tmp_path)
    model.device = "cuda"  # as far as steps know
    return exact, model


def padded(batch: ForwardBatch, tokens: int) -> ForwardBatch:
    """With a row of one token after those that have one, and a row of ``tokens`` at the end, both
    of padding; without copies on the host."""
    decode = batch.decode_rows

    def rows(x, filler):
        one = x.new_full((1, *x.shape[1:]), filler)
        return torch.cat((x[:decode], one, x[decode:], one))

    def flat(x, filler):
        one, many = x.new_full((1,), filler), x.new_full((tokens,), filler)
        return torch.cat((x[:decode], one, x[decode:], many))

    counts = rows(batch.query_starts.diff(), 1)
    counts[-1] = tokens
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0).int()))
    return replace(
        batch,
        token_ids=flat(batch.token_ids, 0),
        positions=flat(batch.positions, 0),
        slot_mapping=flat(batch.slot_mapping, -1),
        query_starts_host=[],
        seq_lens_host=[],
        query_starts=starts,
        seq_lens=rows(batch.seq_lens, 0),
        block_tables=rows(batch.block_tables, 0),
        decode_rows=decode + 1,
        logit_rows=starts[1:].long() - 1,
    )


def test_a_padded_step_gives_each_row_its_logits(models):
    exact, model = models
    prompts = [random_ids(20), random_ids(9)[::-1], random_ids(40)[::-1]]
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(3)).view(3, 4).int()
    cache = allocate(model, 16)
    for row, count in enumerate((19, 8, 0)):
        if count:
            part = make_batch([prompts[row][:count]], [0], tables[row : row + 1])
            model.forward(part, cache)
    ends = [prompts[0][19:], prompts[1][8:], prompts[2]]
    batch = make_batch(ends, [19, 8, 0], tables)
    assert batch.decode_rows == 2
    hidden = model.forward_last(padded(batch, 5), cache)
    found = model.logits(hidden[[0, 1, 3]])
    expected = torch.stack([all_logits(exact, prompt)[-1] for prompt in prompts])
    error = (found - expected).abs()
    assert error.max() < 1e-3
    whole = model.logits(model.forward(padded(batch, 5), cache)[padded(batch, 5).logit_rows])
    torch.testing.assert_close(whole[[0, 1, 3]], found, rtol=0, atol=1e-4)


def test_padding_goes_to_no_expert(models, monkeypatch):
    _, model = models
    seen = []
    for layer in model.layers:
        if hasattr(layer.mlp, "route"):
            route = layer.mlp.route

            def spy(*arguments, route=route):
                seen.append(route(*arguments))
                return seen[-1]

            monkeypatch.setattr(layer.mlp, "route", spy)
    tables = torch.tensor([[0]], dtype=torch.int32)
    batch = padded(make_batch([[5, 6, 7]], [0], tables), 4)
    model.forward_last(batch, allocate(model, 4))
    *others, (last, _) = seen
    for ids, weights in others:
        assert (ids[batch.slot_mapping < 0] == -1).all() and (
            weights[batch.slot_mapping < 0] == 0
        ).all()
        assert (ids[batch.slot_mapping >= 0] >= 0).all()
    assert last.shape[0] == 3 and (last[[0, 2]] == -1).all() and (last[1] >= 0).all()


def allocate(model, blocks: int):
    shapes = [layer.mixer.operation.kv_shape(blocks, 16) for layer in model.layers]
    return [torch.zeros(shape, dtype=model.dtype) for shape in shapes]
