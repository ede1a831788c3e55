# amaranth: UnusedElaboratable=no
"""Area of whole tops of the AXDIMM family, as `nearstep rtl` writes them: one synthesis each."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import report
import typer
from rich.console import Console

from nearstep_hw.generate import verilog
from nearstep_sim import area
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.updater.config import AdamKernelConfig

TOPS = ("axdimm_channel", "axdimm_module")
UNITS = (16, 4)

console = Console()


def synthesise(top: str, units: int, family: area.Family) -> dict[str, Any]:
    """The cells of a whole top. Each module is synthesised by itself, once."""
    technology = {} if family is area.ULTRASCALE_PLUS else {"technology": family.name}
    kernel = AdamKernelConfig(functional_units=units, **technology)
    text = verilog(top, config=DimmConfig(kernel=kernel))
    began = time.perf_counter()
    found = family.area(family.cells(text, top, None, flat=False))
    return {**found, "seconds": round(time.perf_counter() - began)}


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Tops as TOP-UNITS-FAMILY, as axdimm_module-16-ecp5 (default: all)."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Keep the tops that are there already.")] = False,
) -> None:
    """Count cells (may take an hour), and write build/bench/axdimm_area.json top by top."""
    path = report.FOLDER / "axdimm_area.json"
    rows: dict[str, Any] = {}
    if resume and path.exists():
        rows = json.loads(path.read_text())["tops"]
    known = {
        f"{top}-{units}-{family.name}": (top, units, family)
        for family in area.FAMILIES.values()
        for top in TOPS
        for units in UNITS
    }
    if unknown := sorted(set(names or ()) - set(known)):
        raise typer.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names or known:
        if name in rows:
            continue
        top, units, family = known[name]
        rows[name] = {"top": top, "units": units, "family": family.title}
        rows[name] |= synthesise(top, units, family)
        console.print(f"{name}: {rows[name]}")
        results = {
            "label": "measured (Yosys, the whole top in one synthesis, module by module)",
            "tops": {name: rows[name] for name in known if name in rows},
        }
        report.write("axdimm_area", results)
    console.print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
