"""Metric families, and how they are written for Prometheus.

prometheus_client would take 6 ms of the event loop for the page of one engine, in which no stream
goes on, and more for each further one; this takes a tenth of that. Its parsers read what is written
here (tests/server/test_exposition.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from octavo.server.histograms import Histogram

Kind = Literal["gauge", "counter", "histogram", "info"]
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# What a family is called in its samples, and of what type it is where there is no such type.
_SUFFIX = {"counter": "_total", "info": "_info"}
_TEXT_KIND = {"info": "gauge"}


class Family:
    """``name``: without the suffix that the samples of counters and infos have."""

    def __init__(self, kind: Kind, name: str, help: str) -> None:
        self.kind, self.name, self.help = kind, name, help
        self.lines: list[str] = []

    def add(self, labels: str, value: float) -> None:
        """``labels``: of ``label_text``."""
        number = _number(value)
        self.lines.append(f"{self.name}{_SUFFIX.get(self.kind, '')}{{{labels}}} {number}")

    def add_histogram(self, labels: str, histogram: Histogram) -> None:
        name, running = self.name, 0
        begin = f"{name}_bucket{{{labels},le="
        for bound, count in zip(histogram.bound_texts, histogram.counts):
            running += count
            self.lines.append(f"{begin}{bound}}} {running}")
        self.lines.append(f"{name}_count{{{labels}}} {running}")
        self.lines.append(f"{name}_sum{{{labels}}} {_number(histogram.total)}")

    def head(self, openmetrics: bool) -> str:
        suffix, kind = _SUFFIX.get(self.kind, ""), self.kind
        name = self.name if openmetrics else self.name + suffix
        shown = kind if openmetrics else _TEXT_KIND.get(kind, kind)
        return f"# HELP {name} {_escaped(self.help, openmetrics)}\n# TYPE {name} {shown}"


def label_text(labels: Mapping[str, str]) -> str:
    """``engine="0",model_name="a \\"b\\""``"""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def page(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """All families in the format that the scraper accepts, and its content type: OpenMetrics 1.0
    where it names that, else Prometheus's text format."""
    openmetrics = "application/openmetrics-text" in accept
    parts: list[str] = []
    for family in families:
        parts.append(family.head(openmetrics))
        parts += family.lines
    parts.append("# EOF\n" if openmetrics else "")
    return "\n".join(parts).encode(), OPENMETRICS_TYPE if openmetrics else TEXT_TYPE


def _number(value: float) -> str:
    return repr(value) if value == value else "NaN"


def _escaped(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
