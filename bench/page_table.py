"""What sections of the page are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Results = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; everything but the first column is aligned right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


def mega(rate: float) -> str:
    """A rate in parameters a second, as millions a second."""
    return f"{rate / 1e6:.2f} M/s"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def section(title: str, *text: str) -> list[str]:
    """A heading and a paragraph."""
    return [f"## {title}", "", *text, ""]
