"""`nearstep paper`: the papers' tables beside modelled and measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nearstep.cli.files import check_outputs, write_timeline
from nearstep.cli.outcome import AsJson, console, group, print_table, table_of, working
from nearstep.cli.paper_coarse import command as coarse
from nearstep.cli.paper_memferry import command as memferry
from nearstep.cli.paper_rows import RowsFile, chosen, give_json
from nearstep.cli.paper_smart_infinity import command as smart_infinity
from nearstep.paper import axdimm_kernel, axdimm_training
from nearstep.paper.axdimm_kernel import Rate
from nearstep.paper.axdimm_training import Comparison

app = group("The papers' tables beside modelled and measured ones.")


app.command("coarse")(coarse)
app.command("memferry")(memferry)
app.command("smart-infinity")(smart_infinity)


@app.command()
def axdimm(
    as_json: AsJson = False,
    output: RowsFile = None,
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
) -> None:
    """Table 5 (rate of the kernel) and Table 6 (training of five GPT models) of AXDIMM."""
    names = chosen(models, axdimm_training.TABLE_6, "--models")
    if policy not in axdimm_training.POLICIES:
        expected = " or ".join(axdimm_training.POLICIES)
        raise typer.BadParameter(f"must be {expected}, not {policy!r}", param_hint="--policy")
    check_outputs({"--output": output, "--trace": trace, "--picture": image})
    rates: list[Rate] = []
    rows: list[Comparison] = []
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
        printed = {name: axdimm_training.TABLE_6[name] for name in names}
        for row in axdimm_training.table_6(printed, policy=policy):
            rows.append(row)
            progress("Table 6")
    give_json(plain(rates, rows), as_json, output)
    if not as_json:
        if rates:
            print_table(_table_5(rates))
            for rate in rates:
                typer.echo(f"  {rate.name}: {rate.source}")
        print_table(_table_6(rows))
        _explain(console(), rows)
    if trace is not None or image is not None:
        case = axdimm_training.AxdimmCase(model=names[0], platform="axdimm", policy=policy)
        timeline = case.timeline()
        title = f"{names[0]} on the AXDIMM, {timeline.seconds or 0.0:.2f} s, modelled"
        write_timeline(timeline, trace, image, title, links=False)


def plain(rates: Sequence[Rate], rows: Sequence[Comparison]) -> dict[str, Any]:
    """Convert both tables for `json.dumps`, in seconds and parameters a second."""
    return {
        "table_5": [asdict(rate) for rate in rates],
        "table_6": [
            {
                "model": row.model,
                "paper": asdict(row.printed),
                "modelled": {"baseline": asdict(row.baseline), "axdimm": asdict(row.axdimm)},
                "errors": dict(zip(("baseline", "axdimm", "speedup"), row.errors, strict=True)),
            }
            for row in rows
        ],
        "fitted": {
            "drives_bytes_per_s": axdimm_training.DRIVES_BYTES_PER_S,
            "on": axdimm_training.FITTED_ON,
        },
        "assumptions": list(axdimm_training.ASSUMPTIONS),
    }


def _table_5(rates: Sequence[Rate]) -> Table:
    rows = [
        (
            rate.name,
            rate.kind,
            "" if rate.theoretical is None else f"{rate.theoretical / 1e6:.2f}",
            f"{rate.achieved / 1e6:.2f}",
            "" if rate.efficiency is None else f"{rate.efficiency:.1%}",
        )
        for rate in rates
    ]
    columns = ("device", "", ">theoretical", ">achieved", ">efficiency")
    return table_of(columns, rows, "Table 5: million parameters a second")


def _table_6(rows: Sequence[Comparison]) -> Table:
    texts: list[tuple[str, ...]] = []
    for row in rows:
        for name, printed, modelled, error in (
            ("baseline", row.printed.baseline, row.baseline, row.errors[0]),
            ("AXDIMM", row.printed.axdimm, row.axdimm, row.errors[1]),
        ):
            here = modelled.forward_s, modelled.backward_s, modelled.total_s
            beside = [
                " ".join(f"{each:6.2f}" for each in seconds)
                for seconds in ((*printed, sum(printed)), here)
            ]
            model = row.model if name == "baseline" else ""
            texts.append((model, name, *beside, f"{error:+.1%}"))
        speedups = f"{row.printed.speedup:6.2f}", f"{row.speedup:6.2f}"
        texts += [("", "speedup", *speedups, f"{row.errors[2]:+.1%}"), ()]
    columns = ("model", "platform", ">paper", ">modelled", ">error")
    return table_of(columns, texts, "Table 6: seconds of an iteration (forward, backward, total)")


def _explain(console: Console, rows: Sequence[Comparison]) -> None:
    totals = fmean(abs(error) for row in rows for error in row.errors[:2])
    speedups = fmean(abs(row.errors[2]) for row in rows)
    count = len(rows)
    console.print(
        f"Mean error of {2 * count} totals {totals:.1%}, of {count} speedups {speedups:.1%}."
    )
    console.print(
        f"Fitted, once: {axdimm_training.DRIVES_BYTES_PER_S / 1e9:.2f} GB/s of both drives "
        f"together, on the forward pass of {axdimm_training.FITTED_ON} on the baseline. An input: "
        "the printed peak of the drives. Assumed:",
        soft_wrap=True,
    )
    for each in axdimm_training.ASSUMPTIONS:
        console.print(f"- {each}", soft_wrap=True)
