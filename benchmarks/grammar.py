"""What structured output costs the host: tables, compiling, masks, taking tokens.

    python -m benchmarks.grammar [--tokens 400] [--save]

On the demo model's vocabulary, CPU time of one thread. The tokens are drawn at random from each
mask, as by a model that knows nothing. With --save writes benchmarks/results/grammar.json.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from benchmarks.report import save
from octavo.grammar.compile import grammar_text
from octavo.grammar.compiled import Compiler
from octavo.grammar.grammars import Grammars
from octavo.grammar.vocabulary import Vocabulary
from octavo.ops.masks import keep_allowed
from octavo.text.tokenizer import load_tokenizer
from octavo.types import StructuredOutputsParams
from tests.fixtures import models

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WIDE = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(400)}}
SCHEMAS: dict[str, dict[str, Any]] = {"three properties": PERSON, "400 optional": WIDE}


def vocabulary() -> Vocabulary:
    tokenizer = load_tokenizer(models.path("G"))
    size = tokenizer.vocab_size
    return Vocabulary.of_model(
        size, tokenizer.byte_table(size), tokenizer.special_ids, tokenizer.eos_ids
    )


def milliseconds(times: list[float]) -> dict[str, float]:
    at = np.percentile(np.array(times) * 1e3, [50, 90, 100])
    return dict(zip(("p50", "p90", "max"), at.round(3).tolist()))


def measure(words: Vocabulary, schema: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    text = grammar_text(StructuredOutputsParams(json=schema), {})
    began = time.thread_time()
    Compiler(words).compile(text).compute_bitmask()
    compiling = time.thread_time() - began
    grammars = Grammars()
    grammars.set_vocabulary(words)
    grammars.build()
    grammars.prepare(text)
    grammars.prepared.wait()
    logits = torch.zeros(1, len(words.tokens))
    index, mask = torch.zeros(1, dtype=torch.int32), np.zeros((1, words.words), dtype=np.int32)
    masks, takes, applies = [], [], []
    matcher = grammars.matcher(text)
    while len(masks) < num_tokens:
        began = time.thread_time()
        goes_on = matcher.fill(mask[0])
        masks.append(time.thread_time() - began)
        if not goes_on:
            matcher = grammars.matcher(text)
            continue
        began = time.thread_time()
        keep_allowed(logits, index, torch.from_numpy(mask))
        applies.append(time.thread_time() - began)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        began = time.thread_time()
        matcher.consume(token)
        takes.append(time.thread_time() - began)
        assert not matcher.failure, matcher.failure
    grammars.close()
    return {
        "compile_and_first_mask_ms": round(compiling * 1e3, 2),
        "mask_ms": milliseconds(masks),
        "take_ms": milliseconds(takes),
        "apply_ms": milliseconds(applies),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    words = vocabulary()
    began = time.thread_time()
    Compiler(words)
    found: dict[str, Any] = {
        "vocabulary": len(words.tokens),
        "tables_ms": round((time.thread_time() - began) * 1e3, 1),
        "schemas": {name: measure(words, s, options.tokens) for name, s in SCHEMAS.items()},
    }
    print(json.dumps(found, indent=1))
    if options.save:
        save("grammar", found)


if __name__ == "__main__":
    main()
