"""docs/verification.md from shipped.toml: `python -m tests.shipped.page docs/verification.md`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from nearstep_sim.area import FAMILIES
from nearstep_sim.area_table import BRAM_KIB

from ..mutation.__main__ import RESULTS
from .rows import CELLS, SHIPPED, Block, Entry, Top, area_rows, functions, read

HEAD = """\
# What ships and what shows that it works

Written by `make docs` from [`tests/shipped/shipped.toml`](../tests/shipped/shipped.toml); a test
fails if a top has no row, a cell is empty without a reason, a named test does not exist, or this
page differs from the file.

A *top* is a complete design: Verilog of `.venv/bin/nearstep rtl`, or the design of a board. Tests
marked *deep* are part of `make test-all`, the others of `make test`; benches in cocotb run with
`make sim`, proofs with `make formal`. A test marked *{shipped}* has the top in the configuration
that its command writes; for other tests the difference is given. Areas are *measured* by Yosys. The
table counts the tests, proofs and areas.
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


def _overview(tops: list[Top]) -> Iterator[str]:
    """A line for each top: how much there is for each cell."""
    yield f"| top | {' | '.join(TITLES[cell] for cell in CELLS)} |"
    yield f"|---|{'---:|' * len(CELLS)}"
    for top in tops:
        said = []
        for cell in CELLS:
            count = str(len(getattr(top, cell)))
            missing = "not yet whole" if count != "0" else "not yet"
            count = "none" if cell in top.none else count
            said.append(f"{count}, {missing}" if cell in top.pending else count)
        yield f"| [{top.name}](#{_anchor(top.name)}) | {' | '.join(said)} |"
    yield ""


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


def _command(top: Top) -> str:
    module, _, function = top.command.partition(" ")
    if module.startswith("nearstep_"):
        return f"`{module}.{function}()`"
    return f"`.venv/bin/nearstep {top.command}`"


def _blocks(blocks: list[Block]) -> Iterator[str]:
    yield "## Blocks"
    yield ""
    yield "Parts of tops that `.venv/bin/nearstep rtl` writes by themselves, too."
    yield ""
    yield "| block | part of | tests of it alone |"
    yield "|---|---|---|"
    for block in blocks:
        cells = (
            ", ".join(f"`{name}`" for name in block.names),
            ", ".join(f"`{name}`" for name in block.part_of),
            "<br>".join(map(_test, block.tests)),
        )
        yield f"| {' | '.join(cells)} |"


def _mutants() -> Iterator[str]:
    """A line for each block whose mutants were counted."""
    known = json.loads(RESULTS.read_text(encoding="utf-8"))
    yield "## Mutants"
    yield ""
    yield (
        "A mutant changes a bit of a cell of a block. *Killed*: a test of the block fails (or does "
        "not end). *Equivalent*: a solver proves that outputs and next states of its module are "
        "the same. *Measured* by `.venv/bin/python -m tests.mutation BLOCK --count N --seed S`, "
        "with the tests of [`blocks.toml`](../tests/mutation/blocks.toml); survivors, and the "
        "lines of Python that made them, are in [`results.json`](../tests/mutation/results.json). "
        "`make mutate` runs one block; what other tests would kill is not counted."
    )
    yield ""
    yield "| block | seed | mutants | killed | equivalent | survived | killed of the others |"
    yield f"|---|{'---:|' * 6}"
    for block, row in known.items():
        killed, survived = row["killed"] + row["hung"], row["survived"]
        numbers = (row["seed"], killed + row["equivalent"] + survived, killed, row["equivalent"])
        share = killed / (killed + survived)
        yield f"| {block} | {' | '.join(map(str, numbers))} | {survived} | {share:.1%} |"


def text(tops: list[Top], blocks: list[Block]) -> str:
    """The page."""
    lines = [HEAD.format(shipped=SHIPPED), *_overview(tops)]
    for top in tops:
        lines += [f"## {top.name}", "", f"{top.what[0].upper()}{top.what[1:]}.", ""]
        lines += ["| | |", "|---|---|", f"| configuration | {_command(top)} |"]
        lines += [f"| {TITLES[cell]} | {_cell(top, cell)} |" for cell in CELLS]
        lines.append("")
    return "\n".join([*lines, *_blocks(blocks), "", *_mutants(), ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(*read()), encoding="utf-8")
