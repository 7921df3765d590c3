"""Scores of the multiple-choice task by transformers, straight from the logits, as JSON.

    python -m tests.conformance.direct MODEL_DIRECTORY

For each question: the context's token ids, and for each choice its ids, the sum of their
log-probabilities and whether each is the most likely; then the accuracies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

QUESTIONS = Path(__file__).with_name("questions.jsonl")
BATCH = 24


def main() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    documents = [ids_of(tokenizer, json.loads(line)) for line in QUESTIONS.read_text().splitlines()]
    pairs = [(document["context"], c) for document in documents for c in document["choices"]]
    for first in range(0, len(pairs), BATCH):
        score(model, pairs[first : first + BATCH])

    def share(by_length: bool) -> float:
        return sum(right(document, by_length) for document in documents) / len(documents)

    json.dump({"documents": documents, "acc": share(False), "acc_norm": share(True)}, sys.stdout)


def ids_of(tokenizer: Any, question: dict[str, Any]) -> dict[str, Any]:
    context = f"Question: {question['question']}\nAnswer:"
    begin = tokenizer.encode(context, add_special_tokens=False)
    choices = []
    for choice in question["choices"]:
        ids = tokenizer.encode(f"{context} {choice}", add_special_tokens=False)
        assert ids[: len(begin)] == begin
        choices.append({"ids": ids[len(begin) :], "length": len(choice)})
    return {"context": begin, "choices": choices, "answer": question["answer"]}


@torch.inference_mode()
def score(model: Any, pairs: list[tuple[list[int], dict[str, Any]]]) -> None:
    """Adds to each choice what it scores after its context. Padding comes last, where nothing that
    counts can see it."""
    rows = [torch.tensor([*context, *choice["ids"]]) for context, choice in pairs]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    for (context, choice), states in zip(pairs, model.model(batch).last_hidden_state):
        end = len(context) + len(choice["ids"]) - 1
        logprobs = model.lm_head(states[len(context) - 1 : end]).log_softmax(-1)
        own = torch.tensor(choice["ids"])
        choice["logprob"] = float(logprobs.gather(1, own[:, None]).sum())
        choice["greedy"] = bool((logprobs.argmax(-1) == own).all())


def right(document: dict[str, Any], by_length: bool) -> bool:
    """Whether the likeliest choice, per character if ``by_length``, is the answer."""
    values = [c["logprob"] / (c["length"] if by_length else 1) for c in document["choices"]]
    return values.index(max(values)) == document["answer"]


if __name__ == "__main__":
    main()
