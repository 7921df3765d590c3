"""What an evaluation found, as a table."""

from __future__ import annotations

from collections.abc import Callable

from octavo.cli.console import size
from octavo.evaluate.report import Report, Scored

_ROWS: tuple[tuple[str, Callable[[Scored], str]], ...] = (
    ("weights", lambda scored: scored.quantization or "dense"),
    ("computed in", lambda scored: scored.dtype),
    ("linears", lambda scored: size(scored.sizes.linear_bytes)),
    ("bits per linear weight", lambda scored: f"{scored.sizes.bits_per_weight:.2f}"),
    ("embedding, head, norms", lambda scored: size(scored.sizes.other_bytes)),
    ("perplexity", lambda scored: f"{scored.perplexity:.4f}"),
)


def show(report: Report) -> None:
    """Prints it: a column for each model, then how they differ."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    models = [report.model, *([report.against] if report.against else [])]
    table = Table("", box=SIMPLE_HEAD)
    for scored in models:
        table.add_column(scored.model, justify="right", overflow="fold")
    for name, shown in _ROWS:
        table.add_row(name, *map(shown, models))
    console = Console(highlight=False)
    console.print(table)
    if (found := report.comparison) is not None:
        rows = (
            ("perplexity, ratio", f"{found.perplexity_ratio:.5f}"),
            ("KL divergence, mean", f"{found.kl_mean:.6f} nats a token"),
            ("KL divergence, 99 %", f"{found.kl_p99:.6f}"),
            ("KL divergence, largest", f"{found.kl_max:.6f}"),
            ("same likeliest token", f"{found.top1_agreement:.3%}"),
        )
        against = Table("against the other", "", box=SIMPLE_HEAD)
        for row in rows:
            against.add_row(*row)
        console.print(against)
    console.print(
        f"{report.num_tokens:,} tokens of {report.text}, in contexts of {report.chunk:,}, on "
        f"{report.model.device}",
        soft_wrap=True,
    )
