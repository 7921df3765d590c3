"""Run by test_triton_compile.py in a process of its own: compiles the sampler's launches for
Hopper, prints JSON."""

from __future__ import annotations

import json

import torch

from octavo.ops.triton import edits, masks, sampling
from octavo.worker.device_tables import DeviceTables
from tests.fixtures.triton_aot import described, recorded


def main() -> None:
    with recorded() as launches:
        for vocab, rows in ((128256, 256), (151936, 8), (50257, 1)):
            device = torch.device("meta")
            tables = DeviceTables.allocate(256, 4096, 64, vocab, device)
            logits = torch.empty(rows, vocab, device=device)
            slots = torch.empty(rows, dtype=torch.int32, device=device)
            columns = (logits, slots, slots)
            parameters = (tables.params_f, tables.params_i, tables.history, tables.seen)
            scratch = sampling.Scratch.allocate(256, vocab, device)
            sampling.draw(*columns, slots, *parameters, scratch)
            edits.edit(*columns, tables.params_i, tables.edits, tables.history)
            words = torch.empty(rows, -(-vocab // 32), dtype=torch.int32, device=device)
            masks.keep_allowed(logits, slots, words)
    for launch in launches:
        row = described(launch) | {"vocab": launch.arguments["vocab"]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
