"""Clock rate of units on an ECP5-85F, speed grade 6: the median of several seeds of the placer."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import report
import typer
from amaranth.lib import wiring
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearstep_hw.fp.unit import FpUnit
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.rule.technology import TECHNOLOGIES
from nearstep_hw.verilog import to_verilog
from nearstep_sim.place import DEVICE, SPEED, Registered, netlist_for_ecp5, place_and_route
from nearstep_spec.rule.adam import ADAM
from nearstep_spec.rule.axpby import AXPBY

ECP5 = TECHNOLOGIES["ecp5"]
KINDS = ("add", "mul", "fma", "div", "sqrt")
BLOCKS: dict[str, Callable[[], wiring.Component]] = {
    **{
        f"fp32_{kind}": lambda kind=kind: FpUnit(
            f"fp32_{kind}",
            depth=ECP5.depths[kind],
            flags=False,
            multiplier=ECP5.multiplier,
        )
        for kind in KINDS
    },
    "axpby_fu": lambda: FunctionalUnit(AXPBY, technology="ecp5"),
    "adam_fu": lambda: FunctionalUnit(ADAM, technology="ecp5"),
}
GOAL_MHZ = 100.0

console = Console()


def measure(name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """One block, placed and routed once for each seed."""
    block = BLOCKS[name]()
    netlist = netlist_for_ecp5(to_verilog(Registered(block), "top"), "top")
    placed = [
        place_and_route(netlist, seed=seed)
        for seed in track(seeds, name, console=console, transient=True)
    ]
    rates = [each.fmax_mhz for each in placed]
    return {
        "block": name,
        "latency": getattr(block, "latency", None),
        "fmax_mhz": statistics.median(rates),
        "seeds": [{"seed": seed, **asdict(each)} for seed, each in zip(seeds, placed, strict=True)],
    }


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Blocks (default: all).")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the placer.")] = 5,
) -> None:
    """Measure, print, and write build/bench/timing.json."""
    warnings.filterwarnings("ignore", message=".*created but never used")
    if unknown := sorted(set(names or []) - set(BLOCKS)):
        raise typer.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(BLOCKS)}")
    rows = [measure(name, range(1, seeds + 1)) for name in names or BLOCKS]
    path = report.write("timing", {"label": "measured (nextpnr)", "rows": rows})
    table = Table(
        "block", "cycles", "MHz, median", "least", "most", "LUT4", "FF", "MULT18",
        title=f"ECP5-{DEVICE}, grade {SPEED}, out of context, goal {GOAL_MHZ:.0f} MHz; {path}",
    )  # fmt: skip
    for row in rows:
        rates = [each["fmax_mhz"] for each in row["seeds"]]
        cells = row["seeds"][0]["cells"]
        table.add_row(
            row["block"], str(row["latency"]), f"{row['fmax_mhz']:.1f}",
            f"{min(rates):.1f}", f"{max(rates):.1f}", f"{cells['TRELLIS_COMB']:,}",
            f"{cells['TRELLIS_FF']:,}", str(cells.get("MULT18X18D", 0)),
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
