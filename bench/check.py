"""Compares the ratios of benchmarks with the committed ones, and names those that fell.

`bench/ratios.json` has runs of benchmarks, the seconds that each takes on two cores, and ratios:
name, JSON and path in it, committed value, tolerance (a share of the value), and what is better.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from harness import FOLDER, ROOT, BenchError, console, find, option, script
from rich.table import Table

FILE = Path(__file__).with_name("ratios.json")
QUICK = 120  # seconds of the longest run that is quick


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


class Ratio(NamedTuple):
    """A ratio that must not fall; `better` is `higher` or `lower`."""

    name: str
    path: str
    value: float
    tolerance: float
    better: str

    @property
    def bound(self) -> float:
        """The worst value that passes."""
        return self.value * (1 + {"higher": -1, "lower": 1}[self.better] * self.tolerance)

    def found(self, folder: Path, command: str) -> float:
        """Read the ratio from the JSON of its benchmark.

        Raises
        ------
        BenchError : it is not there, or no number, or the JSON is of another command.
        """
        name, _, path = self.path.partition(":")
        file = folder / f"{name}.json"
        if not file.exists():
            raise BenchError(f"there is no {file}")
        results = json.loads(file.read_text(encoding="utf-8"))
        if results["command"] != (expected := f"python bench/{command}"):
            raise BenchError(f"{file} must be of `{expected}`, not of `{results['command']}`")
        found = find(results, path)
        if not isinstance(found, int | float):
            raise BenchError(f"{self.path} must be a number, not {found!r}")
        return found

    def compare(self, folder: Path, command: str) -> tuple[str, str | None]:
        """Read the ratio, and say what is wrong with it."""
        try:
            found = self.found(folder, command)
        except BenchError as error:
            return "-", f"{self.name}: {error}"
        higher = self.better == "higher"
        if found >= self.bound if higher else found <= self.bound:
            return shown(found), None
        return shown(found), (
            f"{self.name}: expected at {'least' if higher else 'most'} {shown(self.bound)} "
            f"({shown(self.value)} with a tolerance of {self.tolerance:.1%}), not {shown(found)}"
        )


class Run(NamedTuple):
    """A benchmark with its arguments, the seconds that it takes, and its ratios."""

    command: str
    seconds: float
    ratios: list[Ratio]


def runs(text: str) -> list[Run]:
    """Parse the file of ratios."""
    return [
        Run(each["run"], each["seconds"], [Ratio(*ratio) for ratio in each["ratios"]])
        for each in json.loads(text)
    ]


def chosen(every: Iterable[Run], *, quick: bool, only: str) -> list[Run]:
    """Choose runs that are quick, and those whose command or ratios have a text."""
    return [
        run
        for run in every
        if (not quick or run.seconds < QUICK)
        and any(only in text for text in (run.command, *(ratio.name for ratio in run.ratios)))
    ]


def compare(every: Iterable[Run], folder: Path, *, measure: bool) -> list[str]:
    """Compare ratios, print them, and name those that fell or are not there."""
    table, fell = Table("ratio", "committed", "worst allowed", "found", ""), []
    for run in every:
        if measure:
            name, *arguments = shlex.split(run.command)
            done = subprocess.run([sys.executable, f"bench/{name}", *arguments], cwd=ROOT)
            if done.returncode:
                fell.append(f"bench/{run.command} ended with {done.returncode}")
                continue
        for ratio in run.ratios:
            found, wrong = ratio.compare(folder, run.command)
            fell += [wrong] if wrong else []
            row: list[Any] = [ratio.name, shown(ratio.value), shown(ratio.bound), found]
            table.add_row(*row, "[red]fell[/red]" if wrong else "holds")
    console.print(table)
    return fell


@script
def main(
    quick: Annotated[bool, option("Only runs below two minutes.", "--quick")] = False,
    only: Annotated[str, option("Part of a run or of a ratio's name.")] = "",
    measured: Annotated[bool, option("Run nothing: compare build/bench.", "--measured")] = False,
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
