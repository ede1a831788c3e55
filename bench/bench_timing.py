"""Clock rate and area of blocks on an ECP5-85F, placed and routed: compared with hw/timing.json."""

from __future__ import annotations

from typing import Annotated

import typer
from harness import Bench, Column, Table, console
from synthesising import known

from nearstep_sim import timing
from nearstep_sim.row_file import Row, read_rows
from nearstep_sim.verilate.build import BuildError

BENCH = Bench(
    "timing",
    "## Clock rate on an ECP5-{device}",
    Table(
        "blocks",
        Column("block", "key"),
        Column("cycles", lambda row: row.get("latency")),
        Column("MHz, median", "fmax_mhz", ".1f"),
        Column("least", lambda row: min(row["seeds"].values()), ".1f"),
        Column("most", lambda row: max(row["seeds"].values()), ".1f"),
        Column("before", "before"),
        Column("LUT4", "lut", ","),
        Column("FF", "ff", ","),
        Column("MULT18", "mult", ","),
        Column("EBR", "bram", ","),
    ),
    label="measured (nextpnr)",
)


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
    known(names or [], timing.BLOCKS)
    tools, old = read_rows(timing.FILE)
    if tools and tools != timing.tools():
        console.print(f"rows are of other tools: {tools} -> {timing.tools()}")
    rows: dict[str, Row] = {}
    wrong: dict[str, list[str]] = {}
    for name in names or [n for n, block in timing.BLOCKS.items() if large or not block.large]:
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
    blocks = {n: {**row, "before": old.get(n, {}).get("fmax_mhz")} for n, row in rows.items()}
    BENCH.report(device=timing.tools()["device"], blocks=blocks)
    for name, reasons in wrong.items():
        console.print(f"[red]{name}: {'; '.join(reasons)}[/red]")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
