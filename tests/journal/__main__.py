"""The journal: what training leaves, row by row, as it was and as it is.

python -m tests.journal            compare with tests/journal/journal.json
python -m tests.journal --write    make that file anew
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from . import rows as of_optimizers
from .coarse import CoarseRow, coarse_rows
from .rows import Row

AnyRow = Row | CoarseRow
FILE = Path(__file__).with_name("journal.json")
VERILOG = Path(__file__).with_name("verilog.json")


def rows() -> Iterator[AnyRow]:
    """The whole table."""
    yield from of_optimizers.rows()
    yield from coarse_rows()


def run(row: AnyRow) -> dict[str, Any]:
    """What a row leaves."""
    return row.run() if isinstance(row, CoarseRow) else of_optimizers.run(row)


def recorded() -> dict[str, Any]:
    """Results by name of the row."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def differences(table: Sequence[AnyRow], known: dict[str, Any]) -> list[str]:
    """A line for each row that is not as it was."""
    wrong = []
    for row in track(table, "journal"):
        found, then = run(row), known.get(row.name, {"row": "not recorded"})
        if found != then:
            parts = sorted(key for key in {*found, *then} if found.get(key) != then.get(key))
            said = [f"{key}: {then.get(key)} was expected, {found.get(key)} found" for key in parts]
            wrong.append(f"{row.name}: {'; '.join(said)}")
    return wrong


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the Verilog in a folder, by path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.v"))
    }


def compare_verilog(folder: Path, *, write: bool) -> int:
    """Print the files that are not as they were; 1 if there are some."""
    found = digests(folder)
    if write:
        VERILOG.write_text(json.dumps(found, indent=0) + "\n")
    known = json.loads(VERILOG.read_text())
    wrong = sorted(name for name in {*found, *known} if found.get(name) != known.get(name))
    print(*wrong, f"{len(found)} files compared, {len(wrong)} differ", sep="\n")
    return 1 if wrong or not found else 0


def write_rows(table: Sequence[AnyRow], kept: set[str]) -> None:
    """Record rows beside those named."""
    known = {name: each for name, each in recorded().items() if name in kept} if kept else {}
    known |= {row.name: run(row) for row in track(table, "journal")}
    lines = [f"{json.dumps(name)}: {json.dumps(known[name])}" for name in known]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(table)} rows recorded")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the rows")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--verilog", type=Path, help="a folder of Verilog, in place of rows")
    given = parser.parse_args()
    if given.verilog is not None:
        return compare_verilog(given.verilog, write=given.write)
    table = [row for row in rows() if given.only in row.name]
    if given.write:
        write_rows(table, {row.name for row in rows()} if given.only else set())
        return 0
    wrong = differences(table, recorded())
    print(*wrong, sep="\n")
    print(f"{len(table)} rows compared, {len(wrong)} differ")
    return 1 if wrong or not table else 0


if __name__ == "__main__":
    sys.exit(main())
