"""Clock rate and area of blocks on an ECP5-85F, placed and routed: compared with hw/timing.json."""

from typing import Annotated

import typer
from harness import argument, console, option, report, script
from synthesising import known

from nearstep_sim import timing
from nearstep_sim.row_file import Row, read_rows
from nearstep_sim.verilate.build import BuildError


@script
def main(
    names: Annotated[list[str] | None, argument("Blocks (default: all but large ones).")] = None,
    large: Annotated[bool, option("Large blocks as well.", "--large")] = False,
    seeds: Annotated[
        int | None, option("Seeds of the placer (default: 5; of large ones 1).", min=1)
    ] = None,
    write: Annotated[bool, option("Write hw/timing.json.", "--write")] = False,
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
    for name, row in rows.items():
        rates = row["seeds"].values()
        row |= {"least": min(rates), "most": max(rates), "latency": row.get("latency")}
        row["before"] = old.get(name, {}).get("fmax_mhz")
    report("timing", device=timing.tools()["device"], blocks=rows)
    for name, reasons in wrong.items():
        console.print(f"[red]{name}: {'; '.join(reasons)}[/red]")
    if wrong:
        raise typer.Exit(1)
