"""`nearstep paper`: the papers' tables beside modelled and measured ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nearstep.cli.files import write_timeline
from nearstep.cli.outcome import AsJson, group, working
from nearstep.cli.paper_coarse import command as coarse
from nearstep.cli.paper_memferry import command as memferry
from nearstep.cli.paper_rows import AsCsv, BarsFile, Outputs, RowsFile, chosen, give, table
from nearstep.cli.paper_smart_infinity import command as smart_infinity
from nearstep.paper import axdimm_design, axdimm_kernel, axdimm_training
from nearstep.paper.axdimm_kernel import Rate
from nearstep.paper.axdimm_training import Comparison
from nearstep.paper.rows import labelled

app = group("The papers' tables beside modelled and measured ones.")


app.command("coarse")(coarse)
app.command("memferry")(memferry)
app.command("smart-infinity")(smart_infinity)


@app.command()
def axdimm(
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    output: RowsFile = None,
    bars: BarsFile = None,
    models: Annotated[
        str, typer.Option(help="Models of Table 6, with commas; all by default.")
    ] = ",".join(axdimm_training.TABLE_6),
    policy: Annotated[
        str, typer.Option(help="Eviction policy: updated_first or belady.")
    ] = "updated_first",
    trace: Annotated[
        Path | None,
        typer.Option(help="Chrome trace of the first model's iteration on the AXDIMM."),
    ] = None,
    image: Annotated[
        Path | None, typer.Option("--picture", help="That iteration as a picture: .png, .svg.")
    ] = None,
    kernel: Annotated[
        bool, typer.Option("--kernel/--no-kernel", help="Measure Table 5 on the RTL.")
    ] = True,
    rtl_updates: Annotated[
        bool, typer.Option("--rtl-updates", help="In Table 6 the DIMM updates at the RTL's rate.")
    ] = False,
    rtl_transfers: Annotated[
        bool,
        typer.Option(
            "--rtl-transfers", help="In Table 6 copies to and from the DIMM take the RTL's rate."
        ),
    ] = False,
) -> None:
    """Design, Table 5 (rate of the kernel), Tables 4 and 6 (five GPT models) of AXDIMM."""
    names = chosen(models, axdimm_training.TABLE_6, "--models")
    if policy not in axdimm_training.POLICIES:
        expected = " or ".join(axdimm_training.POLICIES)
        raise typer.BadParameter(f"must be {expected}, not {policy!r}", param_hint="--policy")
    for hint, given in (("--rtl-updates", rtl_updates), ("--rtl-transfers", rtl_transfers)):
        if given and not kernel:
            raise typer.BadParameter("needs Table 5: omit --no-kernel", param_hint=hint)
    outputs = Outputs(as_json, as_csv, output, bars)
    outputs.check(trace=trace, picture=image)
    rates: list[Rate] = []
    found: list[Comparison] = []
    parts = len(names) + kernel * (len(axdimm_kernel.DEVICES) + 1)
    with working("Table 5" if kernel else "Table 6", total=parts) as progress:
        if kernel:
            rates += axdimm_kernel.PRINTED
            for rate in axdimm_kernel.measured():
                rates.append(rate)
                progress("Table 5")
            core = axdimm_kernel.this_core()
            rates += [core] if core else []
            progress("Table 6")
        options: dict[str, Any] = {"policy": policy}
        printed = {name: axdimm_training.TABLE_6[name] for name in names}
        measured = next((each for each in rates if each.kind == "measured"), None)
        rtl = [measured if asked else None for asked in (rtl_updates, rtl_transfers)]
        options["updates_per_s"] = rtl[0] and rtl[0].achieved
        options["copies_bytes_per_s"] = rtl[1] and rtl[1].copied
        for each in axdimm_training.table_6(printed, **options):
            found.append(each)
            progress("Table 6")
    rows = [*axdimm_design.design(), *axdimm_design.table_4(names), *axdimm_kernel.rows(rates)]
    rows += [row for each in found for row in each.rows()]
    results = {
        "table_5": [asdict(rate) for rate in rates],
        "table_6": {
            each.model: {"baseline": asdict(each.baseline), "axdimm": asdict(each.axdimm)}
            for each in found
        },
    }
    table_5 = table("Table 5: million parameters a second", map(_in_millions, rates), RATES)
    inputs = axdimm_training.inputs(*rtl)
    give(axdimm_training, [*labelled(rows, inputs)], inputs, results, [table_5], outputs)
    if trace is not None or image is not None:
        case = axdimm_training.AxdimmCase(model=names[0], platform="axdimm", **options)
        timeline = case.timeline()
        title = f"{names[0]} on the AXDIMM, {timeline.seconds or 0.0:.2f} s, modelled"
        write_timeline(timeline, trace, image, title, links=False)


RATES = {"device": "{0[name]}", "": "{0[kind]}", ">theoretical": "{0[theoretical]}"}
RATES |= {">achieved": "{0[achieved]}", ">efficiency": "{0[efficiency]}", "from": "{0[source]}"}
"""Columns of Table 5."""


def _in_millions(rate: Rate) -> dict[str, str]:
    share, most = rate.efficiency, rate.theoretical
    return {
        **asdict(rate),
        "theoretical": "" if most is None else f"{most / 1e6:.2f}",
        "achieved": f"{rate.achieved / 1e6:.2f}",
        "efficiency": "" if share is None else f"{share:.1%}",
    }
