"""What speculation gives on a CPU, on texts that repeat themselves and on texts that do not.

    python -m benchmarks.speculation [--model smollm2-135m] [--methods ngram suffix] [--rounds 5]

Engines with and without speculation, alive in one process; every workload runs on each in turn, so
that a round gives a ratio of times under equal conditions. Ids must be equal. Tokens a second come
from the whole call, prompts included. Writes benchmarks/results/speculation.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from benchmarks.report import save
from octavo import LLM, SamplingParams
from octavo.types import StructuredOutputsParams

LETTER = """Dear Sir or Madam,
I am writing to complain about the washing machine that I bought from your shop in March.
It makes a terrible noise when it spins, and last week it stopped in the middle of a wash.
I have called your service number four times, and nobody has come to repair it.
Please send someone before the end of the month, or give me my money back.
Yours faithfully,
John Smith
"""
CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""
TABLE = "\n".join(
    f'{{"id": {i}, "name": "{name}", "city": "{city}", "active": true}}'
    for i, (name, city) in enumerate(
        zip(("Alice", "Bob", "Carol", "Dave", "Erin"), ("Paris", "Rome", "Oslo", "Bern", "Prague"))
    )
)


def repeated(text: str) -> str:
    """Text that goes on with a second copy of ``text``."""
    return f"{text}\n---\nThe same text once more:\n\n{text[: len(text) // 8]}"


TOPICS = ("the sea", "a clock", "my uncle", "winter", "a train", "bread", "the moon", "a war")
STORIES = [f"Write a strange story about {topic}, part {i}:" for i in (1, 2) for topic in TOPICS]
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "first_name": {"type": "string", "maxLength": 12},
                    "last_name": {"type": "string", "maxLength": 12},
                    "age": {"type": "integer"},
                    "employed": {"type": "boolean"},
                },
                "required": ["first_name", "last_name", "age", "employed"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[str]
    params: Callable[[int], SamplingParams]  # by the index of the prompt


def greedy(max_tokens: int) -> Callable[[int], SamplingParams]:
    return lambda _: SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def random_text(index: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=index, max_tokens=128, ignore_eos=True)


def constrained(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=160,
        structured_outputs=StructuredOutputsParams(json=SCHEMA),
    )


def copies(text: str, count: int) -> list[str]:
    return [repeated(f"Document {i}\n{text}") for i in range(count)]


WORKLOADS = [
    *(
        Workload(f"{name}, batch {count}", copies(text, count), greedy(length))
        for count in (1, 8)
        for name, text, length in (
            ("repeat a letter", LETTER, 110),
            ("repeat code", CODE, 150),
            ("repeat JSON lines", TABLE, 120),
        )
    ),
    Workload("JSON under a schema, batch 1", ["A list of people as JSON:\n"], constrained),
    *(
        Workload(f"random text, temperature 1, batch {count}", STORIES[:count], random_text)
        for count in (1, 8, 16)
    ),
]


def run(llm: LLM, workload: Workload) -> tuple[float, list[list[int]]]:
    """Seconds, and the ids of each answer."""
    params = [workload.params(index) for index in range(len(workload.prompts))]
    assert llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def measure(engines: dict[str, LLM], workload: Workload, rounds: int) -> dict[str, dict[str, Any]]:
    _, expected = run(engines["none"], workload)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    before = {name: llm.stats for name, llm in engines.items()}
    for _ in range(rounds):
        for name, llm in engines.items():
            spent, ids = run(llm, workload)
            assert ids == expected, f"{workload.name}: {name} gave other ids"
            seconds[name].append(spent)
    found: dict[str, dict[str, Any]] = {}
    num_tokens = sum(map(len, expected))
    for name, llm in engines.items():
        ratios = [a / b for a, b in zip(seconds["none"], seconds[name])]
        drafted = llm.stats.num_draft_tokens - before[name].num_draft_tokens
        accepted = llm.stats.num_accepted_drafts - before[name].num_accepted_drafts
        found[name] = {
            "tokens_per_second": num_tokens / statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "draft_tokens": drafted,
            "accepted": accepted / drafted if drafted else None,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", nargs="+", default=["ngram"], metavar="METHOD")
    parser.add_argument("--draft-layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=5, help="most guesses of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="speculation", help="of the file with the results")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = {"none": stack.enter_context(closing(LLM(options.model, max_model_len=2048)))}
        for method in options.methods:
            wanted: dict[str, Any] = {"method": method, "num_speculative_tokens": options.tokens}
            if "draft_layers" in method:
                wanted["draft_layers"] = options.draft_layers
            llm = LLM(options.model, max_model_len=2048, speculative_config=wanted)
            engines[method] = stack.enter_context(closing(llm))
        for workload in WORKLOADS:
            figures[workload.name] = found = measure(engines, workload, options.rounds)
            for name, row in found.items():
                accepted = f"{row['accepted']:.0%}" if row["accepted"] is not None else "-"
                print(
                    f"{workload.name:38} {name:12} {row['tokens_per_second']:7.1f} tokens/s  "
                    f"{row['ratio']:.3f} x  right {accepted}",
                    flush=True,
                )
    facts = {"model": options.model, "tokens": options.tokens, "rounds": options.rounds}
    print(save(options.name, {**facts, "workloads": figures}))


if __name__ == "__main__":
    main()
