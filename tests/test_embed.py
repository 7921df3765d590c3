"""``LLM.embed``: pooled hidden states equal transformers', however prompts are cut and mixed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from octavo import LLM, InvalidRequest, SamplingParams
from tests.model.running import write_checkpoint

SETTINGS = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 2 << 20,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 5,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("embed")
    return path, write_checkpoint(path, "Llama", max_position_embeddings=512)


@pytest.fixture
def llm(checkpoint) -> Iterator[LLM]:
    with closing(LLM(str(checkpoint[0]), **SETTINGS)) as made:
        yield made


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, 320, size=length).tolist() for length in lengths]


def reference(model, prompt: list[int], pooling: str) -> np.ndarray:
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0].double()
    return (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()


PROMPTS = random_prompts(1, 3, 16, 39, 40, 41, 150, 333, 17)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_equal_transformers(llm, checkpoint, pooling):
    """Prompts of one token, of a chunk, one more, and of many chunks; nine share five slots."""
    outputs = llm.embed(PROMPTS, pooling, normalize=False, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output, prompt in zip(outputs, PROMPTS):
        assert output.finished and output.outputs.hidden_size == 64
        expected = reference(checkpoint[1], prompt, pooling)
        np.testing.assert_allclose(output.outputs.embedding, expected, rtol=0, atol=1e-4)


def test_normalized_vectors_have_length_one(llm, checkpoint):
    (output,) = llm.embed(PROMPTS[3], use_tqdm=False)
    expected = reference(checkpoint[1], PROMPTS[3], "last")
    found = np.array(output.outputs.embedding)
    assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), rtol=0, atol=1e-5)


def test_cached_prefixes_serve_the_last_token_and_never_the_mean(llm, checkpoint):
    prompt = PROMPTS[6]
    llm.embed([prompt], use_tqdm=False)
    for pooling, cached in (("last", 149), ("mean", 0), ("last", 149)):
        (output,) = llm.embed([prompt], pooling, normalize=False, use_tqdm=False)
        assert output.num_cached_tokens == cached
        expected = reference(checkpoint[1], prompt, pooling)
        np.testing.assert_allclose(output.outputs.embedding, expected, rtol=0, atol=1e-4)
    longer = prompt + PROMPTS[2]  # what an embedding has computed serves a generation
    (answer,) = llm.generate([longer], SamplingParams(max_tokens=2), use_tqdm=False)
    assert answer.num_cached_tokens >= 144


def test_beside_generation_neither_changes(llm, checkpoint):
    """Embeddings and answers in the same steps, with too few blocks for all at once."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = random_prompts(30, 45, 20)
    alone = [llm.generate([p], greedy, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    llm.reset_prefix_cache()
    from octavo.assembly import Answer, Vector
    from octavo.engine.admission import prepare_embedding

    answers = [llm._answer(prompt, greedy, None) for prompt in prompts]
    vectors = []
    for number, prompt in enumerate(PROMPTS):
        pooling = "mean" if number % 2 else "last"
        handle = llm._next_handle
        llm._next_handle += 1
        request = prepare_embedding(
            llm.info, prompt, pooling, handle=handle, request_id=str(handle), arrival=0.0
        )
        vectors.append((Vector(request, prompt, False), pooling))
    mixed: list[Answer | Vector] = [
        vectors[0][0], answers[0], *(v for v, _ in vectors[1:5]), *answers[1:],
        *(v for v, _ in vectors[5:]),
    ]  # fmt: skip
    llm._run(mixed, False)
    assert [a.output().outputs[0].token_ids for a in answers] == alone
    for (vector, pooling), prompt in zip(vectors, PROMPTS):
        expected = reference(checkpoint[1], prompt, pooling)
        found = vector.output().outputs.embedding
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert llm.stats.num_running == 0 and llm.stats.blocks_used == 0


def test_a_prompt_of_the_models_whole_length_fits(llm, checkpoint):
    prompt = random_prompts(512)[0]
    (output,) = llm.embed([prompt], "mean", normalize=False, use_tqdm=False)
    expected = reference(checkpoint[1], prompt, "mean")
    np.testing.assert_allclose(output.outputs.embedding, expected, rtol=0, atol=1e-4)
    longer = [*prompt, 7]
    with pytest.raises(InvalidRequest, match=r"513 tokens, .* context length is 512"):
        llm.embed([longer], use_tqdm=False)
    (cut,) = llm.embed([longer], "mean", use_tqdm=False, truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == longer[1:]


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ([], {}, "the prompt is empty"),
        ([400], {}, "outside the vocabulary"),
        ([5], {"pooling": "cls"}, "pooling is 'cls'; it must be last or mean"),
        ([5], {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_embedded_is_named(llm, prompt, options, reason):
    with pytest.raises(InvalidRequest, match=reason):
        llm.embed([prompt], use_tqdm=False, **options)
    assert len(llm.embed([[5]], use_tqdm=False)) == 1


def test_a_failed_step_fails_the_vector_and_the_engine_goes_on(llm, monkeypatch):
    from octavo.types import OctavoError
    from octavo.worker.pooling import Pools

    failed = threading.Event()
    add = Pools.add

    def fails_once(self, *arguments):
        if not failed.is_set():
            failed.set()
            raise RuntimeError("no luck")
        return add(self, *arguments)

    monkeypatch.setattr(Pools, "add", fails_once)
    with pytest.raises(OctavoError, match="no luck"):
        llm.embed([PROMPTS[6]], "mean", use_tqdm=False)
    assert len(llm.embed([PROMPTS[6]], "mean", use_tqdm=False)) == 1
