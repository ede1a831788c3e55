# amaranth: UnusedElaboratable=no
"""Area of whole tops as `nearstep rtl` writes them, each in one synthesis, module by module.

Rows are those of hw/area.json and hw/area-ecp5.json; those of tops that are as they were are kept.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer
from harness import PERCENT, Bench, Column, Results, Table, console
from synthesising import known, valid_rows

from nearstep_sim import area
from nearstep_sim.area_table import CHIPS, PAPERS
from nearstep_sim.row_file import Row, read_rows

CHIP = {area.ULTRASCALE_PLUS.name: "KU15P", area.ECP5.name: "LFE5U-85F"}
"""Of each family the chip that shares are of."""

BRAM = {"bram36": 36, "bram18": 18}
"""Kib of a block."""

SHARES = {"lut": "LUT", "ff": "FF", "dsp": "multipliers", "bram": "block RAM"}


def title(row: Results) -> str:
    """A top with its options, or the name of a paper's design."""
    if "name" in row:
        return f"*paper*, {row['name']}"
    options = ", ".join(
        f"{key} {', '.join(value) if isinstance(value, list | tuple) else value}"
        for key, value in row["options"].items()
    )
    return f"`{row['top']}`" + (f", {options}" if options else "")


def block_ram(row: Results) -> float | None:
    """Kib of memory blocks."""
    return sum((kib * row[key] for key, kib in BRAM.items() if key in row), 0) or None


BENCH = Bench(
    "whole_area",
    "## Area of whole tops",
    """
    Tops as `.venv/bin/nearstep rtl` writes them, with all that is in them, each in **one**
    synthesis, module by module (`synth_xilinx -family xcup`, `synth_ecp5 -noflatten`):
    *measured*, no place and route. No registers are packed into DSP48E2, so FF read high.
    LUT have six inputs on UltraScale+ and four on ECP5, and count LUT as memory;
    multipliers are DSP48E2 and MULT18X18D; block RAM is in Kib. Shares are of a KU15P and
    of an LFE5U-85F: what is above 100 % does not fit. Seconds are those of a processor.
    *Paper*: Table III of Smart-Infinity, shares alone.
    """,
    Table(
        lambda results: [*results["tops"], *results["papers"]],
        Column("top", title),
        Column("FPGA", lambda row: row.get("family", row["chip"])),
        Column("LUT", lambda row: row.get("lut"), ",.0f"),
        Column("FF", lambda row: row.get("ff"), ",.0f"),
        Column("multipliers", lambda row: row.get("dsp"), ",.0f"),
        Column("block RAM", block_ram, ",.0f"),
        *(
            Column(f"of {name}", lambda row, key=key: row["of_chip"].get(key), PERCENT)
            for key, name in SHARES.items()
        ),
        Column("synthesis, s", lambda row: row.get("cpu_s"), ","),
    ),
    label="measured (Yosys, one synthesis, module by module)",
)


def synthesised(name: str, family: area.Family) -> Row:
    """Measure the row of a top, with the processor time of its synthesis in seconds."""
    before = os.times()
    row = area.measure(name, family)
    after = os.times()
    took = after.children_user - before.children_user
    took += after.children_system - before.children_system
    return {**row, "cpu_s": round(took)}


def shares(row: Row, family: area.Family) -> dict[str, float]:
    """Of the chip of the family, by resource."""
    values = {**row, "bram": block_ram(row) or 0}
    chip = CHIPS[CHIP[family.name]]
    return {key: values[key] / chip[key] for key in SHARES if key in chip}


def tops() -> list[Results]:
    """Every whole top that has a row."""
    return [
        {
            "top": generator,
            "options": options,
            "family": family.title,
            "chip": CHIP[family.name],
            "of_chip": shares(rows[name], family),
            **rows[name],
        }
        for family in area.FAMILIES.values()
        for _, rows in [read_rows(family.file)]
        for name, (generator, options) in area.WHOLE.items()
        if name in rows
    ]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Tops (default: all).")] = None,
    family: Annotated[list[str] | None, typer.Option(help="FPGAs (default: both).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Unchanged tops as well.")] = False,
) -> None:
    """Synthesise tops that have changed (minutes to an hour each), and write their rows after each,
    and build/bench/whole_area.json."""
    known(names or [], area.WHOLE, "top ")
    known(family or [], area.FAMILIES, "family ")
    for name in names or area.WHOLE:
        for target in (area.FAMILIES[each] for each in family or area.FAMILIES):
            digest = valid_rows(target).get(name, {}).get("digest")
            if not force and digest == area.digest(name, target):
                continue
            row = synthesised(name, target)
            console.print(f"{name}, {target.title}: {row}", soft_wrap=True)
            # Another process may have written its rows meanwhile.
            area.write({**valid_rows(target), name: row}, target.file)
    papers = [
        {"name": p.name, "chip": p.family, "of_chip": dict(p.share), "source": p.source}
        for p in PAPERS
        if p.share
    ]
    BENCH.report(tops=tops(), papers=papers)


if __name__ == "__main__":
    typer.run(main)
