"""What ships and what shows that it works: the rows of shipped.toml, read and checked.

A top is what somebody builds: Verilog of `nearstep rtl`, or the design of a board. A block is a
part of tops that `nearstep rtl` writes by itself, too.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nearstep.backends.options import DeviceUrl
from nearstep_hw.generate import GENERATORS, build
from nearstep_sim.area import BLOCKS, FAMILIES
from nearstep_sim.backends import families
from nearstep_sim.bitstream.command import DESIGNS
from nearstep_sim.row_file import Row, read_rows
from nearstep_spec.boards.board import BOARDS
from nearstep_spec.boards.nitefury import NitefuryConfig
from nearstep_spec.codec import from_text, texts_of

from ..mutation.__main__ import BLOCKS as MUTATED
from ..mutation.__main__ import RESULTS, matches

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("shipped.toml")
COVERAGE = ROOT / "docs" / "coverage.md"

SHIPPED = "as shipped"
"""What an entry says that is about the top in the configuration that its command writes."""

CELLS = ("cocotb", "runs", "proofs", "area", "stands", "faults")
NEEDS_SHIPPED = ("cocotb", "runs")
"""Cells that need an entry about the top as shipped."""

STAGES = ("exact", "coverage", "mutants")
"""Stages of the sign-off that are no cells, and may have a reason for nothing."""

NOT_LOADED = {"page": "boards.md", "says": "No bitstream was loaded into a real board"}
"""For which nothing is signed off on a board."""

Entry = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Top:
    """A row of a top.

    Attributes
    ----------
    name
    what : in words.
    command : of `nearstep`, which writes it.
    device : in-process device that runs it; empty with a reason in `none` under `runs`.
    cocotb, runs, proofs, faults : `test` (file::function) and `of`, what that test is about.
    specified : what says what it does: `page.md#heading` of docs, or `source.py#class`.
    exact : test of `cocotb` or `runs` that compares bits with the golden model.
    mutants : blocks of `blocks.toml` that are part of it.
    area : `family` and `row` of a synthesis of the whole; of a board `page`, what it `says`, and
        what that is `of`: place and route of the whole, or the synthesis of another tool.
    stands : `what` stands for what, and `test`, which holds the two equal.
    none : cell to the reason why it has nothing.
    pending : cell to what is missing in it.
    """

    name: str
    what: str
    command: str
    specified: str
    exact: str = ""
    mutants: list[str] = field(default_factory=list)
    device: str = ""
    cocotb: list[Entry] = field(default_factory=list)
    runs: list[Entry] = field(default_factory=list)
    proofs: list[Entry] = field(default_factory=list)
    area: list[Entry] = field(default_factory=list)
    stands: list[Entry] = field(default_factory=list)
    faults: list[Entry] = field(default_factory=list)
    none: Mapping[str, str] = field(default_factory=dict)
    pending: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A row of a block.

    Attributes
    ----------
    names : in the list of `nearstep rtl`.
    part_of : tops or blocks that it is in.
    specified, mutants : as of a top.
    tests : of the block alone: proofs, and comparisons with a model.
    """

    names: list[str]
    part_of: list[str]
    specified: str
    tests: list[str]
    mutants: list[str] = field(default_factory=list)


def read(path: Path = FILE) -> tuple[list[Top], list[Block]]:
    """Rows of tops and of blocks.

    Raises
    ------
    TypeError : a key is unknown, or one is missing.
    """
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"top", "block"}, set(found)
    return [Top(**row) for row in found["top"]], [Block(**row) for row in found["block"]]


@cache
def functions(file: str) -> Mapping[str, frozenset[str]]:
    """Tests of a file, those of classes as `Class::test`, and the marks that decorators, class or
    module give each."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return dict(_functions(tree, "", frozenset()))


def _functions(
    node: ast.Module | ast.ClassDef, prefix: str, marks: frozenset[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    for each in node.body:
        if isinstance(each, ast.Assign) and "pytestmark" in map(ast.unparse, each.targets):
            marks |= _attributes(each.value)
    for each in node.body:
        if isinstance(each, ast.ClassDef):
            own = marks.union(*map(_attributes, each.decorator_list))
            yield from _functions(each, f"{prefix}{each.name}::", own)
        elif isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
            yield f"{prefix}{each.name}", marks.union(*map(_attributes, each.decorator_list))


def _attributes(node: ast.AST) -> frozenset[str]:
    return frozenset(each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute))


def _test_problem(test: str, mark: str = "") -> str:
    """What is wrong with the name of a test; nothing if it is there and has the mark."""
    file, _, function = test.partition("::")
    if not (file.startswith("tests/") and (ROOT / file).is_file()):
        return f"there is no file {file}"
    if function not in functions(file):
        return f"there is no test {function!r} in {file}"
    if mark and mark not in functions(file)[function]:
        return f"{test} has no mark {mark!r}"
    return ""


def _cover_problem(test: str) -> str:
    """Why a test proves nothing: it asks alone that cases are reached; nothing otherwise."""
    file, _, function = test.partition("::")
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == function.rpartition("::")[2]:
            words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if "cover" in words and not words & {"bmc", "prove"}:
                return f"{test} proves nothing: it reaches cases"
    return ""


def anchor(title: str) -> str:
    """Of a heading, in links to it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _place_problem(place: str) -> str:
    """Why nothing is specified there; nothing if there is the heading, or a docstring."""
    name, _, part = place.partition("#")
    file = ROOT / ("docs" if name.endswith(".md") else "") / name
    if not file.is_file():
        return f"there is no file {name}"
    text = file.read_text(encoding="utf-8")
    if name.endswith(".md"):
        parts = {"", *map(anchor, re.findall(r"^#+ (.*)$", text, re.MULTILINE))}
    else:
        classes = [each for each in ast.parse(text).body if isinstance(each, ast.ClassDef)]
        parts = {each.name for each in classes if ast.get_docstring(each)}
    return "" if part in parts else f"{name} has no heading, or class with a docstring, {part!r}"


@cache
def covered() -> Mapping[str, dict[str, str]]:
    """Tops that docs/coverage.md has counts of, and the share that is covered by kind."""
    page = COVERAGE.read_text(encoding="utf-8")
    table = page.partition("## Shipped tops\n")[2].partition("\n## ")[0]
    header, *rows = re.findall(r"^\| (.*) \|$", table, re.MULTILINE)
    found = {}
    for row in rows:
        cells = dict(zip(header.split(" | "), row.split(" | "), strict=False))
        shares = {kind: re.findall(r"\((.*)\)", cell) for kind, cell in cells.items()}
        found[cells["top"].strip("`")] = {kind: each[0] for kind, each in shares.items() if each}
    return {top: shares for top, shares in found.items() if shares}


def mutants() -> Mapping[str, dict[str, Any]]:
    """Blocks whose mutants were counted, with the numbers."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def _score_problems(rows: Iterable[Top | Block]) -> Iterator[str]:
    """Blocks with mutants that no row has, or nobody knows, counts that do not add up, and reasons
    of no survivor."""
    named = {name for row in rows for name in row.mutants}
    known = mutants()
    hardware = [name for name, table in MUTATED.items() if "modules" in table]
    yield from (f"{name}: its mutants are in no row" for name in hardware if name not in named)
    yield from (f"{name}: no mutants of it" for name in named | set(known) if name not in MUTATED)
    for name, row in known.items():
        if row["survived"] != len(row["survivors"]):
            yield f"{name}: {row['survived']} survivors, and {len(row['survivors'])} are listed"
    for name, table in MUTATED.items():
        listed = known.get(name, {}).get("survivors", [])
        for pattern in table.get("reasons", {}):
            if not any(matches(pattern, each) for each in listed):
                yield f"{name}: no survivor has the reason of {pattern!r}"


@cache
def _configuration_problem(command: str) -> str:
    """Why a command could not write anything; nothing if its configuration can be made."""
    words = shlex.split(command)
    try:
        match words:
            case ["rtl", name, *options]:
                kind = GENERATORS[name].config
                build(name, config=from_text(kind, texts_of(kind, options)))
            case ["bitstream", board, "--design", design, *options]:
                kind = DESIGNS[design]
                from_text(kind, {"board": board, **texts_of(kind, options)})
            case ["bitstream", board, *options]:
                kind = DESIGNS["updater"]
                from_text(kind, {"board": board, **texts_of(kind, options)})
            case [module, function] if module.startswith("nearstep_"):
                assert callable(getattr(importlib.import_module(module), function))
                NitefuryConfig()
            case _:
                return f"{command!r} writes no top"
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        return f"{command!r}: {error}"
    return ""


@cache
def _device_problem(url: str) -> str:
    """Why a device could not be opened; nothing if its options can be read."""
    try:
        parsed = DeviceUrl.parse(url)
        if parsed.backend != "sim":
            return f"{url} is not simulated"
        families("SIM")[parsed.target].parse(parsed.options)
    except (ValueError, KeyError) as error:
        return f"{url}: {error}"
    return ""


@cache
def area_rows(family: str) -> Mapping[str, Row]:
    return read_rows(FAMILIES[family].file)[1]


def _says_problem(entry: Entry) -> str:
    page = ROOT / "docs" / entry["page"]
    if not (page.is_file() and page.read_text(encoding="utf-8").count(entry["says"]) == 1):
        return f"{entry['page']} does not say {entry['says']!r} once"
    return ""


def _area_problem(top: Top, entry: Entry) -> str:
    if "page" in entry:
        return _says_problem(entry)
    if entry["family"] not in FAMILIES:
        return f"there is no family {entry['family']!r}"
    row = area_rows(entry["family"]).get(entry["row"])
    if row is None:
        return f"{entry['row']} has no row for {entry['family']}"
    if row.get("without"):
        return f"the row {entry['row']} is without {', '.join(row['without'])}: not of the whole"
    if ["rtl", BLOCKS[entry["row"]].generator] != shlex.split(top.command)[:2]:
        return f"the row {entry['row']} is not of what `{top.command}` writes"
    return ""


KEYS = {"area": {"family", "row"}, "stands": {"what", "test"}}
OF_A_PAGE = {"page", "says", "of"}


def _cell_problems(top: Top, cell: str) -> Iterator[str]:
    entries: list[Entry] = getattr(top, cell)
    keys = KEYS.get(cell, {"test", "of"})
    told = cell in top.none or cell in top.pending
    if cell in top.none and (entries or cell in top.pending):
        yield "says that there is none, and has some"
    if not (entries or told):
        yield "is empty"
    whole = cell not in NEEDS_SHIPPED or any(each.get("of") == SHIPPED for each in entries)
    if not (whole or told):
        yield f"has nothing about the top {SHIPPED}"
    for entry in entries:
        if set(entry) not in (keys, OF_A_PAGE if cell == "area" else keys) or not all(
            entry.values()
        ):
            yield f"{dict(entry)} must have {', '.join(sorted(keys))}"
        elif problem := (
            _area_problem(top, entry)
            if cell == "area"
            else _test_problem(
                entry["test"], {"cocotb": "cocotb", "proofs": "formal"}.get(cell, "")
            )
            or (_cover_problem(entry["test"]) if cell == "proofs" else "")
        ):
            yield problem


def problems_of(top: Top) -> list[str]:
    """What is wrong with a row."""
    found = [f"{cell}: {each}" for cell in CELLS for each in _cell_problems(top, cell)]
    found += [
        f"{kind}: {cell!r} is no cell, or has no reason"
        for kind, reasons in (("none", top.none), ("pending", top.pending))
        for cell, reason in reasons.items()
        if cell not in (*CELLS, *STAGES) or len(reason.split()) < 3
    ]
    if problem := _place_problem(top.specified):
        found.append(f"specified: {problem}")
    if not top.exact and "exact" not in top.none:
        found.append("exact: is empty")
    if top.exact and top.exact not in {each["test"] for each in (*top.cocotb, *top.runs)}:
        found.append(f"exact: {top.exact} is no test of cocotb or runs")
    if problem := _configuration_problem(top.command):
        found.append(f"command: {problem}")
    if top.device and (problem := _device_problem(top.device)):
        found.append(f"device: {problem}")
    if not top.device and "runs" not in {**top.none, **top.pending}:
        found.append("device: is empty")
    return [f"{top.name}: {each}" for each in found]


def problems(tops: list[Top], blocks: list[Block], pending: set[tuple[str, str]]) -> list[str]:
    """What is wrong with all rows.

    Parameters
    ----------
    tops, blocks
    pending : (name of a top, cell), all that may be pending and are.
    """
    found = [each for top in tops for each in problems_of(top)]
    written = [words[1] for top in tops if (words := shlex.split(top.command))[0] == "rtl"]
    named = [*written, *(name for block in blocks for name in block.names)]
    for name in GENERATORS:
        if named.count(name) != 1:
            found.append(f"{name}: nearstep rtl writes it, and it has {named.count(name)} rows")
    found += [f"{name}: nearstep rtl does not write it" for name in named if name not in GENERATORS]
    boards = {words[1] for top in tops if (words := shlex.split(top.command))[0] == "bitstream"}
    found += [f"{name}: is a board without a row" for name in BOARDS if name not in boards]
    known = {top.name for top in tops} | set(named)
    for block in blocks:
        found += [f"{block.names}: there is no {x}" for x in block.part_of if x not in known]
        found += [f"{block.names}: {x}" for test in block.tests if (x := _test_problem(test))]
        if problem := _place_problem(block.specified):
            found.append(f"{block.names}: specified: {problem}")
        if not (block.names and block.part_of and block.tests):
            found.append(f"{block.names}: has an empty cell")
    found += _score_problems([*tops, *blocks])
    found += [f"{name}: has coverage, and no row" for name in covered() if name not in known]
    if problem := _says_problem(NOT_LOADED):
        found.append(f"on a board: {problem}")
    names = [top.name for top in tops]
    found += [f"{name}: has two rows" for name in {n for n in names if names.count(n) > 1}]
    are = {(top.name, cell) for top in tops for cell in top.pending}
    found += [f"{name}: {cell} is pending, and not listed" for name, cell in sorted(are - pending)]
    found += [f"{name}: {cell} is listed and not pending" for name, cell in sorted(pending - are)]
    return found


def cells_checked(tops: list[Top]) -> int:
    """Entries and reasons of all rows."""
    return sum(len(getattr(top, cell)) for top in tops for cell in CELLS) + sum(
        len(top.none) + len(top.pending) for top in tops
    )
