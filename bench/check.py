"""Compares the ratios of benchmarks with the committed ones, and names those that fell.

`bench/ratios.json` has runs of benchmarks, the seconds that each takes on two cores, and their
ratios: name, where it stands in which JSON, the committed value, a tolerance (a share of the
value), and which is better, `higher` or `lower`.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import FOLDER, ROOT, BenchError, console, find, option, script
from rich.table import Table

FILE = Path(__file__).with_name("ratios.json")
QUICK = 120
"""Seconds of the longest run that is quick."""


@dataclass(frozen=True)
class Ratio:
    """A ratio that must not fall.

    Parameters
    ----------
    path : name of the JSON, a colon, and a path in it as `harness.find` has it.
    tolerance : share of the value by which it may be worse.
    better : `higher` or `lower`.
    """

    name: str
    path: str
    value: float
    tolerance: float
    better: str

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower"):
            raise BenchError(f"{self.name}: better must be higher or lower, not {self.better!r}")

    @property
    def bound(self) -> float:
        """The worst value that passes."""
        sign = -1 if self.better == "higher" else 1
        return self.value * (1 + sign * self.tolerance)

    def found(self, folder: Path) -> float:
        """Read the ratio from the JSON of its benchmark.

        Raises
        ------
        BenchError : it is not there, or no number.
        """
        name, _, path = self.path.partition(":")
        file = folder / f"{name}.json"
        if not file.exists():
            raise BenchError(f"there is no {file}")
        found = find(json.loads(file.read_text(encoding="utf-8")), path)
        if not isinstance(found, int | float):
            raise BenchError(f"{self.path} must be a number, not {found!r}")
        return float(found)

    def holds(self, found: float) -> bool:
        return found >= self.bound if self.better == "higher" else found <= self.bound


@dataclass(frozen=True)
class Run:
    """A benchmark with its arguments, the seconds that it takes, and its ratios."""

    command: str
    seconds: float
    ratios: tuple[Ratio, ...]

    def start(self) -> None:
        """Run the benchmark.

        Raises
        ------
        BenchError : it fails.
        """
        script, *arguments = shlex.split(self.command)
        done = subprocess.run([sys.executable, f"bench/{script}", *arguments], cwd=ROOT)
        if done.returncode:
            raise BenchError(f"bench/{self.command} ended with {done.returncode}")


def runs(text: str) -> list[Run]:
    """Parse the file of ratios."""
    return [
        Run(each["run"], each["seconds"], tuple(Ratio(*ratio) for ratio in each["ratios"]))
        for each in json.loads(text)
    ]


def chosen(every: Iterable[Run], *, quick: bool, only: str) -> list[Run]:
    """Runs that are quick, and those whose command or ratios have a text."""
    return [
        run
        for run in every
        if (not quick or run.seconds < QUICK)
        and any(only in text for text in (run.command, *(ratio.name for ratio in run.ratios)))
    ]


def compare(every: Iterable[Run], folder: Path, *, measure: bool) -> list[str]:
    """Compare ratios, print them, and name those that fell or are not there."""
    table = Table("ratio", "committed", "worst allowed", "found", "")
    fell = []
    for run in every:
        try:
            if measure:
                run.start()
        except BenchError as error:
            fell.append(str(error))
            continue
        for ratio in run.ratios:
            row: list[Any] = [ratio.name, f"{ratio.value:g}", f"{ratio.bound:.4g}"]
            try:
                found = ratio.found(folder)
            except BenchError as error:
                fell.append(f"{ratio.name}: {error}")
                table.add_row(*row, "-", "[red]missing[/red]")
                continue
            said = "at least" if ratio.better == "higher" else "at most"
            if not ratio.holds(found):
                fell.append(
                    f"{ratio.name}: expected {said} {ratio.bound:.4g} "
                    f"({ratio.value:g} with a tolerance of {ratio.tolerance:.1%}), not {found:.4g}"
                )
            verdict = "[green]holds[/green]" if ratio.holds(found) else "[red]fell[/red]"
            table.add_row(*row, f"{found:.4g}", verdict)
    console.print(table)
    return fell


@script
def main(
    quick: Annotated[bool, option("Only runs below two minutes.", "--quick")] = False,
    only: Annotated[str, option("Part of a run or of a ratio's name.")] = "",
    measured: Annotated[
        bool, option("Compare what is under build/bench; run nothing.", "--measured")
    ] = False,
) -> None:
    """Run the benchmarks that have ratios, and compare; exit status 1 if one fell."""
    some = chosen(runs(FILE.read_text(encoding="utf-8")), quick=quick, only=only)
    if not some:
        raise typer.BadParameter(f"no run has {only!r}")
    fell = compare(some, FOLDER, measure=not measured)
    for each in fell:
        console.print(f"[red]{each}[/red]", soft_wrap=True)
    if fell:
        raise typer.Exit(1)
