"""The demo model's greedy answers are those of transformers on the same dequantized weights.

Each of octavo's tokens must be transformers' choice given the tokens before it (which makes the
whole answers equal), except where transformers' own two best logits lie within 1e-3 of each other:
such near-ties are allowed, counted and printed.
"""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.fixtures import gguf_files, models

NEAR_TIE = 1e-3
NUM_TOKENS = 64

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Q: What is 17 + 25?\nA:",
    "Water boils at",
    '{"name": "Ada", "age": ',
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "In 1969, astronauts",
    "import numpy as np\n\n",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "Photosynthesis is the process by which",
    "To make a good cup of tea, first",
    "SELECT name FROM users WHERE",
    "She opened the door and saw",
]


def prompts(tokenizer) -> list[list[int]]:
    """17 texts, a chat, a long text and random ids."""
    rng = random.Random(20261129)
    chat = [{"role": "user", "content": "Name two rivers and say where they flow."}]
    return [
        *(tokenizer.encode(text) for text in TEXTS),
        tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"],
        tokenizer.encode(" ".join(TEXTS) * 2),
        [rng.randrange(17, 49152) for _ in range(40)],
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_answers_equal_transformers(model_g, capsys):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path("G-bf16"))
    asked = prompts(tokenizer)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with closing(LLM(str(model_g), dtype="float32", kv_cache_memory_bytes=1 << 30)) as llm:
        answers = llm.generate(asked, params, use_tqdm=False)

    config, weights, _ = gguf_files.dequantized(model_g)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float().eval()
    tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied to the embedding
    reference.tie_weights()

    near_ties, worst = [], 0.0
    for index, (prompt, answer) in enumerate(zip(asked, answers)):
        output = answer.outputs[0]
        assert len(output.token_ids) == NUM_TOKENS
        with torch.inference_mode():
            ids = torch.tensor([prompt + output.token_ids[:-1]])
            logits = reference(ids).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1)
        for position, token in enumerate(output.token_ids):
            found = output.logprobs[position][token].logprob
            worst = max(worst, abs(found - float(logprobs[position, token])))
            best = logits[position].topk(2)
            if token == int(best.indices[0]):
                continue
            gap = float(best.values[0] - best.values[1])
            assert gap < NEAR_TIE and token == int(best.indices[1]), (
                f"prompt {index}, token {position}: {token}, transformers says {best}"
            )
            near_ties.append((index, position, gap))
    with capsys.disabled():
        print(
            f"\n{len(asked)} prompts x {NUM_TOKENS} tokens equal transformers; near-ties taken "
            f"the other way: {len(near_ties)}; largest log-probability difference {worst:.1e}"
        )
    assert worst < 1e-2
