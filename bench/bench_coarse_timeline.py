"""COARSE: when each core of a pool of four devices does which step, and what is on each link.

From a waveform of the RTL of a small sum: a core is at a step in the cycles in which a beat goes
into its ALUs, a link is busy in those in which a phit leaves a device.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness import FOLDER, plot, report, script

from nearstep.coarse import CoarsePool
from nearstep_hw.coarse.wire import PHIT_BITS, FrameKind

DEVICES, GROUPS, PORTS = 4, 2, 2
ELEMENTS = 8192
URL = (
    "sim:coarse?entry_phits=32&buffer_entries=8&chunks_ahead=4&link_latency=32&memory_bytes=1MiB"
    f"&window=direct&devices={DEVICES}"
)
STEPS = {
    "send own values": "#9ecae1", "add, send": "#3182bd", "last addition: send, write": "#08306b",
    "pass on, write": "#fd8d3c", "write": "#fdd0a2"}  # fmt: skip
PHITS = {
    "entry of group 0": "#31a354",
    "entry of group 1": "#756bb1",
    "header, trailer, acknowledgement": "#bdbdbd",
}
FIELDS = ("receive", "local", "final", "send")

Spans = list[tuple[int, int]]  # first cycle and length of what goes on without a gap


def cycles_of(path: Path, names: set[str]) -> Iterator[dict[str, int]]:
    """Values of some signals at the end of each cycle, before the clock's edge."""
    scope: list[str] = []
    codes: dict[str, list[str]] = {}
    values = dict.fromkeys(names, 0)
    with path.open() as file:
        for line in file:
            word, _, rest = line.strip().partition(" ")
            if word == "$scope":
                scope.append(rest.split()[1])
            elif word == "$upscope":
                scope.pop()
            elif word == "$var":
                _, _, code, name = rest.split()[:4]
                full = "/".join([*scope, name])
                if full in names:
                    codes.setdefault(code, []).append(full)
            elif word == "$enddefinitions":
                break
        if missing := names - {name for each in codes.values() for name in each}:
            raise SystemExit(f"not in the waveform: {', '.join(sorted(missing)[:5])}")
        even = False
        for line in file:
            first = line[0]
            if first == "#":
                if even:
                    yield values
                even = int(line[1:]) % 2 == 0
                continue
            if first == "b":
                value, _, code = line[1:].rstrip().partition(" ")
            else:
                value, code = first, line[1:].rstrip()
            for name in codes.get(code, ()):
                values[name] = int(value, 2)


def step_of(values: dict[str, int], scope: str) -> str | None:
    if not values[f"{scope}/fires"]:
        return None
    receive, local, final, send = (bool(values[f"{scope}/i__payload.{f}"]) for f in FIELDS)
    if not receive:
        return "send own values"
    if final:
        return "last addition: send, write"
    if local:
        return "add, send"
    return "pass on, write" if send else "write"


def phit_of(values: dict[str, int], port: str, groups: dict[str, int]) -> str | None:
    if not (values[f"{port}__valid"] and values[f"{port}__ready"]):
        return None
    phit = values[f"{port}__payload"]
    head, last = phit >> PHIT_BITS & 1, phit >> (PHIT_BITS + 1) & 1
    if head and phit & 7 == FrameKind.ENTRY.value:
        groups[port] = phit >> 7 & 3
    if head or last:
        return "header, trailer, acknowledgement"
    return f"entry of group {groups[port]}"


def rows_of(path: Path) -> dict[str, dict[str, Spans]]:
    core = "device{}/memory_device/component/core{}/sequencer"
    scopes = {(d, g): core.format(d, g) for d in range(DEVICES) for g in range(GROUPS)}
    ports = {(d, p): f"device{d}/link_out__{p}" for d in range(DEVICES) for p in range(PORTS)}
    names = {f"{s}/fires" for s in scopes.values()}
    names |= {f"{s}/i__payload.{field}" for s in scopes.values() for field in FIELDS}
    names |= {f"{p}__{each}" for p in ports.values() for each in ("valid", "ready", "payload")}
    rows: dict[str, dict[str, Spans]] = {}
    for d in range(DEVICES):
        for g in range(GROUPS):
            rows[f"device {d}, core {g}"] = {}
        rows[f"link {d} \N{RIGHTWARDS ARROW} {(d + 1) % DEVICES}"] = {}
        rows[f"link {d} \N{RIGHTWARDS ARROW} {(d - 1) % DEVICES}"] = {}
    groups: dict[str, int] = {}
    for cycle, values in enumerate(cycles_of(path, names)):
        labels = iter(rows.values())
        for d in range(DEVICES):
            for g in range(GROUPS):
                extend(next(labels), step_of(values, scopes[d, g]), cycle)
            for p in (1, 0):
                extend(next(labels), phit_of(values, ports[d, p], groups), cycle)
    return rows


def extend(row: dict[str, Spans], what: str | None, cycle: int) -> None:
    if what is None:
        return
    spans = row.setdefault(what, [])
    if spans and sum(spans[-1]) == cycle:
        spans[-1] = (spans[-1][0], spans[-1][1] + 1)
    else:
        spans.append((cycle, 1))


def moved_by(cycles: int, row: dict[str, Spans], end: int) -> dict[str, Spans]:
    return {
        what: [(at + cycles, n) for at, n in spans if 0 <= at + cycles < end]
        for what, spans in row.items()
    }


def joined(spans: Spans) -> Spans:
    whole: Spans = []
    for at, length in spans:
        if whole and sum(whole[-1]) + 1 >= at:
            whole[-1] = (whole[-1][0], at + length - whole[-1][0])
        else:
            whole.append((at, length))
    return whole


def draw(rows: dict[str, dict[str, Spans]]) -> None:
    from matplotlib.patches import Patch

    colours = STEPS | PHITS
    with plot("coarse-timeline.png", figsize=(14, 6.5), dpi=110) as (figure, axes):
        for place, row in enumerate(rows.values()):
            for what, spans in row.items():
                bars = joined(spans)
                axes.broken_barh(bars, (place + 0.1, 0.8), color=colours[what], linewidth=0)
        for place in range(4, len(rows), 4):
            axes.axhline(place, color="black", linewidth=0.6)
        axes.set_yticks([place + 0.5 for place in range(len(rows))], rows)
        axes.set_ylim(len(rows), 0)
        axes.set_xlabel("cycles since the first step")
        axes.margins(x=0.005)
        handles = [Patch(color=colour, label=what) for what, colour in colours.items()]
        figure.legend(handles=handles, ncols=4, loc="outside lower center", fontsize=9)
        axes.set_title(
            f"Sum of {ELEMENTS} fp32 elements on {DEVICES} devices, two rings, entries of 512 "
            "bytes, links of 32 cycles: measured, RTL"
        )


@script
def main() -> None:
    """Run, and write build/bench/coarse_timeline.json and coarse-timeline.png."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    trace = FOLDER / "coarse_timeline.vcd"
    with CoarsePool.open(f"{URL}&trace={trace}") as pool:
        rng = np.random.default_rng(1)
        tensor = pool.tensor([rng.standard_normal(ELEMENTS, np.float32) for _ in range(DEVICES)])
        pool.all_reduce(tensor)
    rows = rows_of(trace)
    trace.unlink()
    steps = [
        s for name, row in rows.items() if "core" in name for each in row.values() for s in each
    ]
    begin, end = min(at for at, _ in steps), max(sum(span) for span in steps)
    moved = {name: moved_by(-begin, row, end - begin) for name, row in rows.items()}
    draw(moved)
    busy = {
        name: sum(n for spans in row.values() for _, n in spans) / (end - begin)
        for name, row in moved.items()
    }
    report("coarse_timeline", url=URL, elements=ELEMENTS, cycles=end - begin, busy=busy, rows=moved)
