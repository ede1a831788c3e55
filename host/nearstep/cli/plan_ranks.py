"""`nearstep plan --ranks`: iterations of a model that is sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nearstep.cli.files import write_timeline
from nearstep.cli.outcome import console, print_table, table_of, working
from nearstep.errors import ArgumentError
from nearstep.memferry.modelled import Setup
from nearstep.plan.ranks import iteration_of, report, shape, with_network
from nearstep.work.timeline import Entry, Timeline
from nearstep_spec.platform.load import load


def parse(text: str) -> list[int]:
    """Parse numbers of ranks.

    Raises
    ------
    ArgumentError : it is not a list of integers from 1, separated by commas.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ArgumentError(f"--ranks must be integers from 1 with commas between, not {text!r}")
    return [int(part) for part in parts]


def show(
    name: str,
    platform: str,
    setup: Setup,
    ranks: Sequence[int],
    state: str,
    network: float | None,
    trace: Path | None,
    image: Path | None,
) -> None:
    """Print a row for each number of ranks; trace and picture are of the last one.

    Raises
    ------
    ArgumentError : there is no such model, the machine lacks a part, or the ranks do not fill
        machines.
    """
    model, machine = shape(name), load(platform)
    if network is not None:
        machine = with_network(machine, network)
    iterations = [iteration_of(machine, model, setup, count, state) for count in ranks]
    rows = []
    with working("", total=len(ranks)) as progress:
        for iteration in iterations:
            progress(f"{iteration.cluster.ranks} ranks")
            timeline = iteration.timeline()
            found = report(iteration, timeline, setup.batch)
            rows.append(
                (
                    f"{found['ranks']}",
                    f"{found['machines']}",
                    f"{found['seconds']:.4f}",
                    f"{found['sequences_per_s']:.1f}",
                    f"{found['gpu_busy']:.1%}",
                    f"{found['host_busy']:.1%}",
                    f"{float(found['network_bytes']) / 1e9:.3f}",
                    f"{found['busiest']}, {found['busiest_busy']:.1%}",
                )
            )
    columns = (">ranks", ">machines", ">s", ">sequences/s", ">GPU busy", ">host busy")
    title = (
        f"{name}, batch {setup.batch} a rank, sequence {setup.sequence}, {setup.dtype}, state in "
        f"{state}, on machines {machine.name} (modelled)"
    )
    print_table(table_of((*columns, ">GB to network", "busiest part"), rows, title))
    console().print(
        f"{iteration.elements} parameters; GB to network: of one machine in an iteration.",
        soft_wrap=True,
    )
    heading = f"{name} on {ranks[-1]} ranks: {rows[-1][2]} s an iteration"
    write_timeline(timeline, trace, None, heading)
    write_timeline(_slowest(timeline), None, image, heading, links=False)


def _slowest(timeline: Timeline) -> Timeline:
    """Return a timeline with one row for each kind of transfer: of those of a unit that start
    together, the last to end."""
    found: dict[object, Entry] = {}
    for entry in timeline.entries:
        operation = entry.operation
        if operation.transfer is not None:
            kind = operation.name.partition(" ")[0]
            entry = replace(entry, operation=replace(operation, holds=(kind,), transfer=None))
        key = operation.name, operation.transfer is None, entry.start
        if key not in found or found[key].end < entry.end:
            found[key] = entry
    return Timeline([*found.values()], timeline.hertz, timeline.unit)
