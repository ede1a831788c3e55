"""Area of every block: writes the file of a family of FPGAs again, for blocks that have changed."""

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Annotated

import typer
from harness import argument, console, option, script, track
from synthesising import known, valid_rows

from nearstep_sim import area
from nearstep_sim.row_file import Row, read_rows

NUMBERS = ("latency", "lut", "ff", "dsp", "bram36", "bram18", "cycles")


def change(old: Row, new: Row) -> str:
    changed = [
        f"{key} {old.get(key, '-')} -> {new[key]}"
        for key in NUMBERS
        if key in new and old.get(key) != new[key]
    ]
    return ", ".join(changed) or "the same numbers"


@script
def main(
    names: Annotated[list[str] | None, argument("Blocks (default: all but large ones).")] = None,
    large: Annotated[bool, option("Large blocks as well.", "--large")] = False,
    force: Annotated[bool, option("Unchanged blocks as well.", "--force")] = False,
    jobs: Annotated[int, option("Blocks at once.", min=1)] = len(os.sched_getaffinity(0)),
    family: Annotated[
        str, option(f"FPGAs, one of: {', '.join(area.FAMILIES)}.", "--family")
    ] = area.ULTRASCALE_PLUS.name,
) -> None:
    """Synthesise blocks that have changed, and write the file of the family after each."""
    if family not in area.FAMILIES:
        raise typer.BadParameter(
            f"--family must be one of {', '.join(area.FAMILIES)}, not {family!r}"
        )
    target = area.FAMILIES[family]
    known(names or [], area.BLOCKS)
    asked = names or [n for n, block in area.BLOCKS.items() if large or not block.large]
    written, rows = read_rows(target.file)
    if written != area.tools():
        console.print(f"tools: {written or 'none'} -> {area.tools()}: no row is valid any more")
    kept = {name: row for name, row in valid_rows(target).items() if name in area.BLOCKS}
    valid = {} if force else kept
    stale = [
        name
        for name in track(asked, "looking for changes")
        if valid.get(name, {}).get("digest") != area.digest(name, target)
    ]
    console.print(f"{len(asked)} blocks, {len(stale)} to synthesise: {', '.join(stale) or 'none'}")
    bad = False
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(area.measure, name, target): name for name in stale}
        for done in as_completed(running):
            name = running[done]
            try:
                row = done.result()
            except RuntimeError as error:
                console.print(f"[red]{name}: no row: {error}[/red]")
                bad = True
                continue
            console.print(f"{name}: {change(rows.get(name, {}), row)}", soft_wrap=True)
            for key, (value, most) in area.over(name, row, target).items():
                console.print(f"[red]{name}: {key} is {value}, at most {most} is allowed[/red]")
                bad = True
            kept[name] = row
            area.write(kept, target.file)
    area.write(kept, target.file)
    console.print(f"written: {target.file}")
    if bad:
        raise SystemExit(1)
