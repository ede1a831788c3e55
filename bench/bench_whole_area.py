# amaranth: UnusedElaboratable=no
"""Area of whole tops as `nearstep rtl` writes them, each in one synthesis, module by module.

Rows are those of hw/area.json and hw/area-ecp5.json; those of tops that are as they were are kept.
"""

import os
from typing import Annotated

from harness import Results, argument, console, option, report, script
from synthesising import known, valid_rows

from nearstep_sim import area
from nearstep_sim.area_table import CHIPS, PAPERS
from nearstep_sim.row_file import Row, read_rows

CHIP = {area.ULTRASCALE_PLUS.name: "KU15P", area.ECP5.name: "LFE5U-85F"}
"""Of each family the chip that shares are of."""

BRAM = {"bram36": 36, "bram18": 18}  # kib of a block
SHARES = ("lut", "ff", "dsp", "bram")


def derived(results: Results) -> Results:
    rows = []
    for row in [*results["tops"], *results["papers"]]:
        shares = {f"of_{key}": share for key, share in row["of_chip"].items()}
        if "options" in row:
            options = (
                f", {key} {', '.join(value) if isinstance(value, list | tuple) else value}"
                for key, value in row["options"].items()
            )
            name = f"`{row['top']}`{''.join(options)}"
        else:
            name = f"*paper*, {row['name']}"
        fpga = row.get("family", row["chip"])
        rows.append({**row, **shares, "name": name, "fpga": fpga})
    return {"rows": rows}


def synthesised(name: str, family: area.Family) -> Row:
    before = os.times()
    row = area.measure(name, family)
    after = os.times()
    took = after.children_user - before.children_user
    took += after.children_system - before.children_system
    return {**row, "cpu_s": round(took)}


def tops() -> list[Results]:
    found = []
    for family in area.FAMILIES.values():
        _, rows = read_rows(family.file)
        chip = CHIPS[CHIP[family.name]]
        for name, (generator, options) in area.WHOLE.items():
            if name not in rows:
                continue
            bram = sum(kib * rows[name][key] for key, kib in BRAM.items() if key in rows[name])
            row = {"top": generator, "options": options, **rows[name], "bram": bram}
            of_chip = {key: row[key] / chip[key] for key in SHARES if key in chip}
            more = {"family": family.title, "chip": CHIP[family.name], "of_chip": of_chip}
            found.append({**row, **more})
    return found


@script
def main(
    names: Annotated[list[str] | None, argument("Tops (default: all).")] = None,
    family: Annotated[list[str] | None, option("FPGAs (default: both).")] = None,
    force: Annotated[bool, option("Unchanged tops as well.", "--force")] = False,
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
    report("whole_area", derived, tops=tops(), papers=papers)
