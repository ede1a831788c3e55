"""`nearstep plan --ranks`: iterations of a model that is sharded over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from nearstep.cli.files import write_timeline
from nearstep.cli.outcome import console, print_table, table_of, working
from nearstep.errors import ArgumentError
from nearstep.memferry import modelled
from nearstep.plan.ranks import NETWORK, Cluster, Iteration, with_network
from nearstep.work.timeline import Entry, Timeline
from nearstep_spec.platform.load import load
from nearstep_spec.platform.transformer import Transformer


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
    model: Transformer,
    platform: str,
    setup: modelled.Setup,
    ranks: list[int],
    state: Literal["memory", "drives"],
    network: float | None,
    trace: Path | None,
    image: Path | None,
) -> None:
    """Print a row for each number of ranks; trace and picture are of the last one.

    Raises
    ------
    ArgumentError : the machine lacks a part, or the ranks do not fill machines.
    """
    machine = load(platform)
    if network is not None:
        machine = with_network(machine, network)
    layers = modelled.profile(machine, model, setup).layers
    width = modelled.DTYPE_BYTES[setup.dtype]
    clusters = [
        Cluster(
            machine=machine,
            ranks=count,
            gpu=setup.gpu,
            host=setup.host,
            params_per_s=setup.host_params_per_s,
            state=state,
        )
        for count in ranks
    ]
    rows = []
    with working("", total=len(ranks)) as progress:
        for cluster in clusters:
            progress(f"{cluster.ranks} ranks")
            iteration = Iteration(layers, cluster, width)
            timeline = iteration.timeline()
            seconds, span = timeline.makespan / 1e12, max(timeline.makespan, 1)
            least = timeline.least
            link = max(least, key=lambda lane: (least[lane], lane), default="-")
            sent = sum(
                nbytes
                for (name, way), nbytes in timeline.traffic.items()
                if name in machine.links and machine.links[name].ends[1 - way] == NETWORK
            )
            rows.append(
                (
                    str(cluster.ranks),
                    str(cluster.machines),
                    f"{seconds:.4f}",
                    f"{cluster.ranks * setup.batch / seconds:.1f}",
                    f"{timeline.busy('GPU') / span:.1%}",
                    f"{timeline.busy('host') / span:.1%}",
                    f"{sent / 1e9:.3f}",
                    f"{link}, {least.get(link, 0) / span:.1%}",
                )
            )
    columns = (">ranks", ">machines", ">s", ">sequences/s", ">GPU busy", ">host busy")
    title = (
        f"{model.name}, batch {setup.batch} a rank, sequence {setup.sequence}, {setup.dtype}, "
        f"state in {state}, on machines {machine.name} (modelled)"
    )
    print_table(table_of((*columns, ">GB to network", "busiest part"), rows, title))
    console().print(
        f"{iteration.elements} parameters; GB to network: of one machine in an iteration.",
        soft_wrap=True,
    )
    heading = f"{model.name} on {ranks[-1]} ranks: {rows[-1][2]} s an iteration"
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
