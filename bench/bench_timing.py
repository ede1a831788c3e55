"""Clock rate and area of blocks on an ECP5-85F, placed and routed: compared with hw/timing.json."""

from __future__ import annotations

import warnings
from typing import Annotated

import report
import typer
from rich.console import Console
from rich.table import Table

from nearstep_sim import timing
from nearstep_sim.row_file import Row, read_rows
from nearstep_sim.verilate.build import BuildError

console = Console()


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Blocks (default: all but large ones).")
    ] = None,
    large: Annotated[bool, typer.Option("--large", help="Large blocks as well.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of the placer (default: 5; of large ones 1).")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write hw/timing.json.")] = False,
) -> None:
    """Place and route, print, write build/bench/timing.json; exit 1 if a block is too slow."""
    warnings.filterwarnings("ignore", message=".*created but never used")
    if unknown := sorted(set(names or []) - set(timing.BLOCKS)):
        raise typer.BadParameter(
            f"there is no {', '.join(unknown)}; there are {', '.join(timing.BLOCKS)}"
        )
    asked = names or [n for n, block in timing.BLOCKS.items() if large or not block.large]
    tools, old = read_rows(timing.FILE)
    if tools and tools != timing.tools():
        console.print(f"rows are of other tools: {tools} -> {timing.tools()}")
    rows: dict[str, Row] = {}
    wrong: dict[str, list[str]] = {}
    for name in asked:
        count = timing.BLOCKS[name].seeds if seeds is None else range(1, seeds + 1)

        def tell(seed: int, rate: float, name: str = name) -> None:
            console.print(f"{name}: seed {seed}: {rate:.1f} MHz")

        try:
            rows[name] = timing.measure(name, count, each=tell)
        except BuildError as error:
            wrong[name] = [str(error)]
            continue
        if found := timing.compare(name, rows[name], old.get(name)):
            wrong[name] = found
        if write:
            timing.write({**old, **rows})
    path = report.write("timing", {"label": "measured (nextpnr)", "blocks": rows})
    table = Table(
        "block", "cycles", "MHz, median", "least", "most", "before", "LUT4", "FF", "MULT18", "EBR",
        title=f"ECP5-{timing.tools()['device']}; {path}",
    )  # fmt: skip
    for name, row in rows.items():
        rates = row["seeds"].values()
        table.add_row(
            name, str(row.get("latency", "")), f"{row['fmax_mhz']:.1f}",
            f"{min(rates):.1f}", f"{max(rates):.1f}", str(old.get(name, {}).get("fmax_mhz", "")),
            *(f"{row[key]:,}" for key in ("lut", "ff", "mult", "bram")),
        )  # fmt: skip
    console.print(table)
    for name, reasons in wrong.items():
        console.print(f"[red]{name}: {'; '.join(reasons)}[/red]")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
