"""Counts that Verilator writes: a text file for each process and library."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nearstep_spec.errors import NearstepError

__all__ = ["CoverageFileError", "Point", "merged", "read_points"]

TITLE = "# SystemC::Coverage-3"
RECORD = re.compile(r"C '(.*)' (\d+)")
ESCAPED = re.compile(r"__0([0-9A-Fa-f]{2})|__DOT__")
VERILOG = re.compile(r"verilog-([0-9a-f]{24})-[0-9a-f]{24}\.v")
"""Name of the files that are counted; others are Verilator's own, around blocks."""


class CoverageFileError(NearstepError, ValueError):
    """A file is not what Verilator writes; has the line, and what was expected."""

    def __init__(self, path: Path, line: int, found: str) -> None:
        self.path = path
        self.line = line
        self.found = found
        expected = TITLE if line == 1 else "a record C '...' COUNT"
        super().__init__(f"{path}:{line}: expected {expected!r}, found {found!r}")


@dataclass(frozen=True)
class Point:
    """What is counted.

    Attributes
    ----------
    verilog : the file, named by its SHA-256.
    module : in the file; has the path of the instance in its name, since Amaranth writes a module
        for each.
    kind : `line`, `branch` or `toggle`.
    line, column : in the file.
    comment : `block`, `case`, `if`, `else`, `elsif`, `cond_then`, `cond_else`; of a toggle the bit
        and its edge, such as `full[3]:0->1`.
    lines : of the file that run if the point does.
    """

    verilog: Path
    module: str
    kind: str
    line: int
    column: int
    comment: str
    lines: tuple[int, ...] = ()

    @property
    def sha(self) -> str:
        """Start of the SHA-256 of the Verilog."""
        match = VERILOG.fullmatch(self.verilog.name)
        assert match is not None  # others are not read
        return match[1]


def _name(text: str) -> str:
    """A name as it stands in the Verilog."""
    return ESCAPED.sub(lambda match: chr(int(match[1], 16)) if match[1] else ".", text)


def _lines(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def read_points(path: Path) -> Mapping[Point, int]:
    """Counts of a file.

    Raises
    ------
    CoverageFileError : it is not whole, or not of Verilator.
    """
    counts: Counter[Point] = Counter()
    with path.open(encoding="utf-8") as rows:
        for number, row in enumerate(rows, 1):
            row = row.rstrip("\n")
            if number == 1 and row == TITLE:
                continue
            match = RECORD.fullmatch(row)
            if number == 1 or match is None:
                raise CoverageFileError(path, number, row[:200])
            fields = dict(part.split("\2", 1) for part in match[1].split("\1")[1:])
            verilog = Path(fields["f"])
            if VERILOG.fullmatch(verilog.name) is None:
                continue
            kind, _, module = fields["page"].partition("/")
            point = Point(
                verilog,
                _name(module),
                kind.removeprefix("v_"),
                int(fields["l"]),
                int(fields["n"]),
                _name(fields["o"]),
                _lines(fields.get("S", "")),
            )
            counts[point] += int(match[2])
    return counts


def merged(paths: Iterable[Path]) -> Mapping[Path, Mapping[Point, int]]:
    """Sum of the counts of files, by Verilog.

    Raises
    ------
    CoverageFileError
    """
    total: dict[Path, Counter[Point]] = {}
    for path in paths:
        for point, count in read_points(path).items():
            total.setdefault(point.verilog, Counter())[point] += count
    return total
