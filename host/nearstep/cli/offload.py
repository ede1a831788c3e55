"""`nearstep offload`: overlap of computation, transfers and updates of an offloaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nearstep.cli.devices import DeviceName
from nearstep.cli.files import PictureFile, TraceFile, check_outputs, write_timeline
from nearstep.cli.outcome import FAILED, console, print_table, reported, table_of, working
from nearstep.work.clock import MODEL_HERTZ

if TYPE_CHECKING:
    from nearstep.measure.overlap import Overlap


def command(
    url: DeviceName,
    platform: Annotated[
        str, typer.Option(help="Machine that computes: a name or a file.")
    ] = "axdimm",
    compute: Annotated[
        str | None,
        typer.Option(help="Processor of that machine, such as gpu0, if there are several."),
    ] = None,
    host_rate: Annotated[
        float | None,
        typer.Option(
            help="Parameters that its host updates in a second, if the description has no rate."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Number of equal linear layers.")] = 12,
    width: Annotated[int, typer.Option(help="Width of a layer: width x width parameters.")] = 256,
    batch: Annotated[int, typer.Option(help="Rows of the input.")] = 4096,
    room: Annotated[int, typer.Option(help="The budget, in parameters of a layer.")] = 5,
    updates: Annotated[str, typer.Option(help="in-backward or at-step.")] = "in-backward",
    output: TraceFile = None,
    image: PictureFile = None,
) -> None:
    """Train layers that exceed their budget, and show the overlap in an iteration's timeline.

    The layers are trained three times: with overlap, without overlap, and without offload.

    Computation takes the platform's time. Transfers and updates take the device's cycles on a
    device with a clock, otherwise the platform's time.
    """
    check_outputs({"--output": output, "--picture": image})
    with reported(), working(f"{layers} layers on {url}"):
        from nearstep.measure.overlap import Overlap, Stack  # torch is an extra

        stack = Stack(
            device=url,
            platform=platform,
            compute=compute,
            host_params_per_s=host_rate,
            layers=layers,
            width=width,
            batch=batch,
            room=room,
            updates=updates,  # type: ignore[arg-type]  # is checked
        )
        found = Overlap.of(stack)
    _show(found)
    timeline = found.overlapped.timeline
    assert timeline is not None, "it was recorded"
    write_timeline(timeline, output, image, f"{layers} layers of {width} x {width} on {url}")
    if found.bits:
        raise typer.Exit(FAILED)


def _show(found: Overlap) -> None:
    timeline, report = found.overlapped.timeline, found.overlapped.report
    assert timeline is not None, "it was recorded"
    assert report is not None, "it was offloaded"
    unit = (
        "cycles" if timeline.unit == "cycles" and timeline.hertz != MODEL_HERTZ else "ps, modelled"
    )
    columns = ("backward and update", f"with overlap, {unit}", "share", "without")
    phase, serial = found.overlapped.phase, found.serial.phase
    rows = [("all", str(phase.duration), "", str(serial.duration))]
    for resource, busy in sorted(phase.busy.items()):
        share = f"{100 * busy / max(phase.duration, 1):.1f} %"
        rows.append((resource, str(busy), share, str(serial.busy.get(resource, 0))))
    print_table(table_of(columns, rows, "One iteration"))
    console().print(
        f"backward and update: {found.ratio:.3f} x the busiest resource, "
        f"{found.ratio_of_bounds:.3f} x the busiest one of the sequential run; "
        f"{found.gain:.2f} x as fast as the sequential run",
        soft_wrap=True,
    )
    console().print(
        f"budget {report.budget} bytes, peak {report.peak}, parameters {report.parameters}; "
        f"{found.bits} bits differ from training that is not offloaded",
        soft_wrap=True,
    )
