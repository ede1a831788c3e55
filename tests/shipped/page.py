"""docs/verification.md from shipped.toml: `python -m tests.shipped.page docs/verification.md`."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nearstep_sim.area import FAMILIES
from nearstep_sim.area_table import BRAM_KIB

from ..mutation.__main__ import BLOCKS as MUTATED
from ..mutation.__main__ import matches
from .rows import (
    CELLS,
    COVERAGE,
    NOT_LOADED,
    SHIPPED,
    Block,
    Entry,
    Top,
    anchor,
    area_rows,
    covered,
    functions,
    mutants,
    read,
)

HEAD = """\
# What ships and what shows that it works

Written by `make docs` from [`tests/shipped/shipped.toml`](../tests/shipped/shipped.toml); a test
fails if a top has no row, a cell is empty without a reason, a named test does not exist, a number
is not that of its record, or this page differs from these files.

A *top* is a complete design: Verilog of `.venv/bin/nearstep rtl`, or the design of a board. A
*block* is a part of tops that `.venv/bin/nearstep rtl` writes by itself, too. A test marked
*{shipped}* has the top in the configuration that its command writes; for other tests the difference
is given. Areas are *measured* by Yosys.

## Sign-off

[Stages](#stages) are explained below. Tests marked *deep* are part of `make test-all` alone, the
others of `make test`, too. *Not yet*: nothing was measured, or run.
"""

STAGES = """\
## Stages

What each stage of the sign-off needs, and the command and seed that show it.

- *specified*: what it does, on a page, or as the contract in its source.
- *bit-exact*: a test compares every bit of its results with a model: `make test-all`; seeds are in
  the tests.
- *formal*: proofs, of a top all of its parts: `make formal`; no seed.
- *coverage*: share of the lines, branches and toggles of its RTL, from [coverage](coverage.md):
  `{coverage}`;
  seeds are parameters of the tests.
- *mutation*: share of the mutants of its parts that tests notice; commands with seeds are those of
  the table of [mutants](#mutants).
- *whole top*: benches in cocotb, and the in-process device, of a top {shipped}: `make test-all`, of
  benches alone `make sim`; seeds are in the tests. Of a block, its tops.
- *on a board*: {says} ([boards]({page})).
"""

TITLES = {
    "cocotb": "benches in cocotb",
    "runs": "in-process device",
    "proofs": "proofs",
    "area": "area of the whole",
    "stands": "what stands for what",
    "faults": "faults",
}
PARAMETERS = {"lut": "LUT", "ff": "FF", "dsp": "multipliers"}


def _test(name: str) -> str:
    file, _, function = name.partition("::")
    deep = ", deep" if "deep" in functions(file)[function] else ""
    return f"[`{function.rpartition('::')[2]}`](../{file}){deep}"


def _entry(cell: str, entry: Entry) -> str:
    if cell == "stands":
        return f"{entry['what']}: {_test(entry['test'])}"
    if cell != "area":
        return f"{entry['of']}: {_test(entry['test'])}"
    if "page" in entry:
        numbers = entry["says"].strip("| ").replace(" | ", ", ")
        return f"{entry['of']}: {numbers}, [{entry['page']}]({entry['page']})"
    row = area_rows(entry["family"])[entry["row"]]
    kib = sum(row[key] * kib for key, kib in BRAM_KIB.items() if key in row)
    numbers = [f"{row[key]:,} {name}" for key, name in PARAMETERS.items()]
    options = row["what"].partition("; whole; ")[2]
    of = FAMILIES[entry["family"]].title + (f", {options}" if options else "")
    return f"{of}: {', '.join(numbers)}, {kib:,.0f} Kib of block RAM"


def _cell(top: Top, cell: str) -> str:
    lines = [_entry(cell, each) for each in getattr(top, cell)]
    if cell == "runs" and top.device:
        lines.insert(0, f"`{top.device}`")
    if cell in top.none:
        lines.append(f"none: {top.none[cell]}")
    if cell in top.pending:
        lines.append(f"**{top.pending[cell]}**")
    return "<br>".join(lines)


def _link(place: str) -> str:
    """To a page, or to a source below the root."""
    file = place.partition("#")[0]
    return f"[{Path(file).name}]({place if file.endswith('.md') else f'../{file}'})"


def _stage(found: Iterable[str], reason: str = "") -> str:
    return "<br>".join(found) or (f"none: {reason}" if reason else "not yet")


def _score(row: Mapping[str, Any]) -> str:
    """Share of the mutants that tests noticed, of those that are not equal."""
    killed = row["killed"] + row["hung"]
    return f"{100 * killed / (killed + row['survived']):.1f} %"


def _scores(row: Top | Block) -> Iterator[str]:
    known = mutants()
    for name in row.mutants:
        yield f"[{name}](#mutants) {_score(known[name]) if name in known else 'not yet'}"


def _signed(top: Top) -> Iterator[str]:
    """Cells of the sign-off of a top."""
    yield f"[{top.name}](#{anchor(top.name)})"
    yield _link(top.specified)
    tests = {each["test"]: each["of"] for each in (*top.cocotb, *top.runs)}
    exact = [f"[{tests[top.exact]}](../{top.exact.partition('::')[0]})"] if top.exact else []
    yield _stage(exact, top.none.get("exact", ""))
    proofs = f"[{len(top.proofs)} of parts](#{anchor(top.name)})"
    yield _stage([proofs] * bool(top.proofs), top.none.get("proofs", ""))
    shares = [f"{kind} {share}" for kind, share in covered().get(top.name, {}).items()][:3]
    linked = f"[{', '.join(shares)}](coverage.md#{anchor(top.name)})"
    yield _stage([linked] * bool(shares), top.none.get("coverage", ""))
    yield _stage(_scores(top), top.none.get("mutants", ""))
    whole = dict.fromkeys(
        f"[{kind}](../{each['test'].partition('::')[0]})"
        for kind, entries in (("bench", top.cocotb), ("device", top.runs))
        for each in entries
        if each["of"] == SHIPPED
    )
    yield _stage(whole, top.none.get("runs", ""))
    placed = [each for each in top.area if each.get("of", "").startswith("placed")]
    yield "not yet" + (f"; [placed and routed]({placed[0]['page']})" if placed else "")


def _table(header: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {header} |"
    yield "|" + "---|" * (header.count("|") + 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _command(top: Top) -> str:
    module, _, function = top.command.partition(" ")
    if module.startswith("nearstep_"):
        return f"`{module}.{function}()`"
    return f"`.venv/bin/nearstep {top.command}`"


def _block(block: Block) -> Iterator[str]:
    """Cells of the sign-off of a block."""
    yield ", ".join(f"`{name}`" for name in block.names)
    yield _link(block.specified)
    proofs = [test for test in block.tests if _is_proof(test)]
    yield "<br>".join(_test(test) for test in block.tests if test not in proofs)
    yield _stage(map(_test, proofs))
    yield _stage(f"[in {top}](coverage.md#{top})" for top in block.part_of if top in covered())
    yield _stage(_scores(block))
    tops = {top.name for top in read()[0]}
    yield ", ".join(f"[{x}](#{anchor(x)})" if x in tops else f"`{x}`" for x in block.part_of)
    yield "not yet"


def _is_proof(test: str) -> bool:
    file, _, function = test.partition("::")
    return "formal" in functions(file)[function]


def _mutants() -> Iterator[str]:
    """A line for each block whose mutants were counted."""
    yield "## Mutants"
    yield ""
    yield (
        "A mutant changes a bit of a cell of a block, or an operator, constant, condition or "
        "statement of Python. *Killed*: a test of the block fails (or does not end). *Equivalent*: "
        "a solver proves that outputs, and next states that an output reads, of its module or of "
        "the unit around it are the same, or outputs of a pipeline once it was flushed; of Python "
        "nothing is proven. *Measured* by the command of the row behind "
        "`.venv/bin/python -m tests.mutation`, with the tests of "
        "[`blocks.toml`](../tests/mutation/blocks.toml); [survivors](#survivors) are those of "
        "[`results.json`](../tests/mutation/results.json). "
        "`make mutate` runs one block; what other tests would kill is not counted."
    )
    yield ""
    yield "| block | command | killed | equivalent | survived | killed of the others |"
    yield f"|---|---|{'---:|' * 4}"
    known = mutants()
    for block in MUTATED:
        if block not in known:
            yield f"| {block} | not yet | | | | |"
            continue
        row = known[block]
        killed, same, survived = row["killed"] + row["hung"], row["equivalent"], row["survived"]
        command = f"`{block} --count {killed + same + survived} --seed {row['seed']}`"
        yield f"| {block} | {command} | {killed} | {same} | {survived} | {_score(row)} |"
    yield ""
    yield from _survivors()


def _survivors() -> Iterator[str]:
    """A line for each survivor, with its reason."""
    yield "### Survivors"
    yield ""
    yield (
        "Each with its line at the time of the run, and why no test can notice it, if that is "
        "known; a reason does not raise a score. *Not yet*: no test does."
    )
    yield ""
    rows = [
        (block, f"`` {each} ``".replace("|", "\\|"), _reason(MUTATED[block], each))
        for block, row in mutants().items()
        for each in row["survivors"]
    ]
    yield from _table("block | survivor | reason", rows)


def _reason(table: Mapping[str, Any], survivor: str) -> str:
    """Why a mutant changes nothing that is promised."""
    reasons: Mapping[str, str] = table.get("reasons", {})
    found = [why for pattern, why in reasons.items() if matches(pattern, survivor)]
    return found[0] if found else "not yet"


def text(tops: list[Top], blocks: list[Block]) -> str:
    """The page."""
    coverage = COVERAGE.read_text(encoding="utf-8")
    (counted,) = re.findall(r"^NEARSTEP_COVERAGE=.*", coverage, re.MULTILINE)
    lines = [HEAD.format(shipped=SHIPPED)]
    stages = "specified | bit-exact | formal | coverage | mutation | whole top | on a board"
    lines += _table(f"top | {stages}", map(_signed, tops))
    lines += _table(f"block | {stages}", map(_block, blocks))
    lines.append(STAGES.format(shipped=SHIPPED, coverage=counted, **NOT_LOADED))
    for top in tops:
        lines += [f"## {top.name}", "", f"{top.what[0].upper()}{top.what[1:]}.", ""]
        lines += ["| | |", "|---|---|", f"| configuration | {_command(top)} |"]
        lines += [f"| {TITLES[cell]} | {_cell(top, cell)} |" for cell in CELLS]
        lines.append("")
    return "\n".join([*lines, *_mutants()])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(*read()), encoding="utf-8")
