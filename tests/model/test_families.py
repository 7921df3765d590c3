"""Each family's tiny random checkpoint gives transformers' logits, however the prompt is cut."""

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
    "qwen3": ("Qwen3", {"head_dim": 32}),
    # T47c: head sizes that hidden_size / heads does not give
    "heads-times-dim-above-hidden": ("Llama", {"head_dim": 24}),
    "heads-times-dim-below-hidden": ("Llama", {"head_dim": 8}),
    "hidden-not-divisible-by-heads": (
        "Mistral",
        {"hidden_size": 56, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    ),
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


@pytest.mark.parametrize("checkpoint", ("llama", "mistral-window", "qwen3"), indirect=True)
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
