# amaranth: UnusedElaboratable=no
"""Area of whole tops as `nearstep rtl` writes them, each in one synthesis, module by module.

Rows are those of hw/area.json and hw/area-ecp5.json; those of tops that are as they were are kept.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import report
import typer
from rich.console import Console

from nearstep_sim import area
from nearstep_sim.area_table import CHIPS, PAPERS, Figures
from nearstep_sim.row_file import Row, read_rows

CHIP = {area.ULTRASCALE_PLUS.name: "KU15P", area.ECP5.name: "LFE5U-85F"}
"""Of each family the chip that shares are of."""
BRAM = {"bram36": 36, "bram18": 18}
"""Kib of a block."""

console = Console()


def synthesised(name: str, family: area.Family) -> Row:
    """The row of a top, with the processor time of its synthesis in seconds."""
    before = os.times()
    row = area.measure(name, family)
    after = os.times()
    took = after.children_user - before.children_user
    took += after.children_system - before.children_system
    return {**row, "cpu_s": round(took)}


def chosen(names: Sequence[str], families: Sequence[str]) -> list[tuple[str, area.Family]]:
    """Tops on families."""
    for what, given, known in (
        ("top", names, area.WHOLE),
        ("family", families, area.FAMILIES),
    ):
        if unknown := sorted(set(given) - set(known)):
            raise typer.BadParameter(
                f"there is no {what} {', '.join(unknown)}; there are {', '.join(known)}"
            )
    return [
        (name, area.FAMILIES[family])
        for name in names or area.WHOLE
        for family in families or area.FAMILIES
    ]


def shares(row: Row, family: area.Family) -> dict[str, float]:
    """Of the chip of the family, by resource."""
    values = {key: row[key] for key in ("lut", "ff", "dsp")}
    values["bram"] = sum(kib * row[key] for key, kib in BRAM.items() if key in row)
    chip = CHIPS[CHIP[family.name]]
    return {key: value / chip[key] for key, value in values.items() if key in chip}


def rows() -> list[dict[str, Any]]:
    """Every whole top that has a row."""
    found = []
    for family in area.FAMILIES.values():
        _, known = read_rows(family.file)
        for name, (generator, options) in area.WHOLE.items():
            if name in known:
                found.append(
                    {
                        "label": "measured (Yosys, one synthesis, module by module)",
                        "top": generator,
                        "options": options,
                        "family": family.title,
                        "chip": CHIP[family.name],
                        "of_chip": shares(known[name], family),
                        **known[name],
                    }
                )
    return found


def papers() -> list[dict[str, Any]]:
    """Shares that papers print."""

    def row(figures: Figures) -> dict[str, Any]:
        return {
            "label": "paper",
            "name": figures.name,
            "chip": figures.family,
            "of_chip": dict(figures.share),
            "source": figures.source,
        }

    return [row(figures) for figures in PAPERS if figures.share]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Tops (default: all).")] = None,
    family: Annotated[list[str] | None, typer.Option(help="FPGAs (default: both).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Unchanged tops as well.")] = False,
) -> None:
    """Synthesise tops that have changed (minutes to an hour each), and write their rows after each,
    and build/bench/whole_area.json."""
    # Components that are made to look at their options alone.
    warnings.filterwarnings("ignore", message=".*created but never used")
    for name, target in chosen(names or [], family or []):
        tools, known = read_rows(target.file)
        kept = known if tools == area.tools() else {}
        if not force and kept.get(name, {}).get("digest") == area.digest(name, target):
            continue
        row = synthesised(name, target)
        console.print(f"{name}, {target.title}: {row}", soft_wrap=True)
        tools, known = read_rows(target.file)  # others may have written theirs
        kept = known if tools == area.tools() else {}
        area.write({**kept, name: row}, target.file)
    results = {"tops": rows(), "papers": papers()}
    console.print(f"written: {report.write('whole_area', results)}")


if __name__ == "__main__":
    typer.run(main)
