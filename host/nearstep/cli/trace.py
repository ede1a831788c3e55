"""`nearstep trace`: operations of a step of an optimizer, in device cycles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from nearstep.cli.devices import DeviceName
from nearstep.cli.files import PictureFile, TraceFile, check_outputs, write_timeline
from nearstep.cli.outcome import print_table, reported, table_of, working
from nearstep.device import open_device
from nearstep.errors import ArgumentError
from nearstep.work.timeline import Timeline

OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")
SEED = 1


def timeline_of(
    url: str,
    sizes: list[int],
    *,
    optimizer: str = "AdamW",
    steps: int = 2,
    compression: float | None = None,
    max_grad_norm: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Timeline:
    """Make steps on parameters of these sizes, with random gradients, and return the last timeline.

    Parameters
    ----------
    url : name of a device with a clock.
    sizes : elements of each parameter.
    optimizer : one of `OPTIMIZERS`.
    steps : at least 1; the first step also sends the parameters.
    compression, max_grad_norm : options of the optimizer.
    progress : called with the name of each part.

    Raises
    ------
    ArgumentError : the device has no clock; or an argument is invalid.
    """
    import torch  # an extra: other commands do without

    import nearstep.optim

    if not sizes or min(sizes) < 1:
        raise ArgumentError(f"sizes must be one or more, each above 0, not {sizes}")
    if steps < 1:
        raise ArgumentError(f"steps must be above 0, not {steps}")
    if optimizer not in OPTIMIZERS:
        raise ArgumentError(f"optimizer must be of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    generator = torch.Generator().manual_seed(SEED)
    try:
        parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    except (RuntimeError, TypeError) as error:  # torch's error, with a C++ stack
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"torch must be able to allocate sizes: {reason}") from None
    with open_device(url) as device:
        if device.cycles is None:
            raise ArgumentError(f"{url} has no clock: its steps have no timeline")
        made = getattr(nearstep.optim, optimizer)(
            parameters, device=device, compression=compression, max_grad_norm=max_grad_norm
        )
        for step in range(1, steps + 1):
            progress(f"step {step} of {steps}")
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            made.step()
        timeline = made.timeline
    assert isinstance(timeline, Timeline)
    return timeline


def command(
    url: DeviceName,
    sizes: Annotated[
        str, typer.Option(help="Elements of each parameter, with commas.")
    ] = "262144,512",
    optimizer: Annotated[str, typer.Option(help=f"One of: {', '.join(OPTIMIZERS)}.")] = "AdamW",
    steps: Annotated[
        int, typer.Option(help="Steps to make; the last is shown, the first also sends parameters.")
    ] = 2,
    compression: Annotated[
        float | None, typer.Option(help="Share of the gradients to send.")
    ] = None,
    max_grad_norm: Annotated[
        float | None, typer.Option(help="Bound on the norm of the gradients.")
    ] = None,
    output: TraceFile = None,
    image: PictureFile = None,
) -> None:
    """Make optimizer steps on a device with a clock, and show the timeline of the last one."""
    check_outputs({"--output": output, "--picture": image})
    try:
        elements = [int(size) for size in sizes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sizes") from None
    with reported(), working(f"opening {url}", total=steps + 1) as progress:
        timeline = timeline_of(
            url,
            elements,
            optimizer=optimizer,
            steps=steps,
            compression=compression,
            max_grad_norm=max_grad_norm,
            progress=progress,
        )
    text = f"{timeline.makespan} cycles, {timeline.makespan / timeline.limit:.3f} of the busiest"
    with reported():
        write_timeline(timeline, output, image, f"{optimizer} of {sizes} on {url}: {text}")
    show(timeline, text)


def show(timeline: Timeline, title: str) -> None:
    """Print how busy each resource was."""
    rows = []
    for lane, entries in sorted(timeline.lanes.items()):
        busy = timeline.busy(lane)
        share = f"{100 * busy / max(timeline.makespan, 1):.1f} %"
        rows.append((lane, str(len(entries)), str(busy), share))
    print_table(table_of(("resource", "operations", "busy, cycles", "share"), rows, title))
