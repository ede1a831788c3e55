"""A timeline for people: Chrome's trace format, and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nearstep.work.clock import MODEL_HERTZ
from nearstep.work.timeline import Entry, Timeline

LETTERS = 200
"""Letters that fit the width of a picture; a name has to fit its operation."""

NARROW = 500
"""Operations with white edges that fit the width of a picture; shorter ones have an edge in their
own colour, to be visible.
"""


def rows(timeline: Timeline) -> dict[str, list[Entry]]:
    """Rows of a picture, of operations that do not overlap: one for each resource, and one for each
    concurrent transfer of a link; none for a link whose transfers are in the row of a resource,
    such as a DIMM's channel.
    """
    found = timeline.lanes
    held = [
        {each.operation.index for each in entries if each.operation.transfer is not None}
        for entries in found.values()
    ]
    for lane, entries in timeline.links.items():
        if {each.operation.index for each in entries} in held:
            continue
        taken: list[str] = []
        for entry in sorted(entries, key=lambda e: (e.start, e.operation.index)):
            row = next((r for r in taken if found[r][-1].end <= entry.start), None)
            if row is None:
                row = lane if not taken else f"{lane} ({len(taken) + 1})"
                taken.append(row)
                found[row] = []
            found[row].append(entry)
    return found


def trace(timeline: Timeline) -> dict[str, Any]:
    """Convert the timeline for `chrome://tracing` and Perfetto: a thread for each row.

    Times are microseconds, or one for each cycle if the clock has no frequency. An operation that
    holds several resources is in each of their threads, a transfer in those of its links.
    """
    scale = 1.0 if timeline.hertz is None else 1e6 / timeline.hertz
    lanes = rows(timeline)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": resource}}
        for number, resource in enumerate(lanes)
    ]
    for number, entries in enumerate(lanes.values()):
        for entry in entries:
            operation = entry.operation
            arguments: dict[str, Any] = {
                "operation": operation.index,
                "needs": list(operation.needs),
                f"start_{timeline.unit}": entry.start,
                f"end_{timeline.unit}": entry.end,
                "bytes_read": sum(each.stop - each.start for each in operation.reads),
                "bytes_written": sum(each.stop - each.start for each in operation.writes),
            }
            if operation.transfer is not None:
                arguments["bytes_transferred"] = operation.transfer.nbytes
            if entry.cycles is not None:
                arguments["device_cycles"] = entry.cycles
            events.append(
                {
                    "ph": "X",
                    "name": operation.name,
                    "pid": 0,
                    "tid": number,
                    "ts": entry.start * scale,
                    "dur": entry.duration * scale,
                    "args": arguments,
                }
            )
    return {
        "traceEvents": events,
        "otherData": {"unit": timeline.unit, "hertz": timeline.hertz},
    }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write `trace` as JSON; equal timelines give equal files."""
    Path(path).write_text(json.dumps(trace(timeline), indent=1) + "\n", encoding="utf-8")


def picture(timeline: Timeline, path: str | Path, title: str = "", *, links: bool = True) -> None:
    """Draw the timeline to an image file of any kind that matplotlib writes.

    Parameters
    ----------
    title : default: the length.
    links : include rows of links, as `rows`; else only resources with a duration.
    """
    from matplotlib.figure import Figure  # in the extra `torch`; devices do not need it
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter

    lanes = rows(timeline) if links else timeline.lanes
    if not links:
        lanes = {name: each for name, each in lanes.items() if any(e.duration for e in each)}
    colours: dict[str, int] = {}
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for number, entries in enumerate(lanes.values()):
        kinds = [entry.operation.name.split(" ")[0] for entry in entries]
        own = [f"C{colours.setdefault(kind, len(colours)) % 10}" for kind in kinds]
        seen = [entry.duration * NARROW >= timeline.makespan for entry in entries]
        axes.broken_barh(
            [(entry.start, max(entry.duration, 1)) for entry in entries],
            (number - 0.4, 0.8),
            facecolors=own,
            edgecolor=["white" if wide else colour for wide, colour in zip(seen, own, strict=True)],
            linewidth=0.5,
        )
        for entry in entries:
            if entry.duration * LETTERS < len(entry.operation.name) * timeline.makespan:
                continue
            axes.text(
                (entry.start + entry.end) / 2,
                number,
                entry.operation.name,
                ha="center",
                va="center",
                fontsize=6,
            )
    axes.legend(
        handles=[Patch(color=f"C{colour % 10}", label=kind) for kind, colour in colours.items()],
        loc="upper left",
        bbox_to_anchor=(1, 1),
        fontsize=8,
        frameon=False,
    )
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    length = f"{timeline.makespan} {timeline.unit}"
    if timeline.hertz == MODEL_HERTZ:  # no device's cycles
        seconds = EngFormatter("s")
        axes.xaxis.set_major_formatter(lambda value, _: seconds(value / MODEL_HERTZ))
        axes.set_xlabel("time, modelled")
        length = f"{timeline.seconds:.4g} s, modelled"
    else:
        axes.set_xlabel(f"device {timeline.unit}" if timeline.hertz is None else timeline.unit)
    axes.set_title(title or length)
    figure.savefig(path)
