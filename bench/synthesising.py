"""What the benchmarks share that keep rows of synthesised blocks."""

import warnings
from collections.abc import Iterable, Sequence

import typer

from nearstep_sim import area
from nearstep_sim.row_file import Row, read_rows

# Components that are made to look at their latency or options alone.
warnings.filterwarnings("ignore", message=".*created but never used")


def known(names: Sequence[str], all_of_them: Iterable[str], what: str = "") -> None:
    """Refuse a name that there is not."""
    there = list(all_of_them)
    if unknown := sorted(set(names) - set(there)):
        raise typer.BadParameter(
            f"there is no {what}{', '.join(unknown)}; there are {', '.join(there)}"
        )


def valid_rows(family: area.Family) -> dict[str, Row]:
    """Rows of a family's file; of other tools none is valid."""
    tools, rows = read_rows(family.file)
    return rows if tools == area.tools() else {}
