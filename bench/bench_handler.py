"""The transfer handler of cards with drives: a step beside its drive's time, and what is beside it.

Steps of cards are in cycles of their RTL, with functional units in C++ of equal latency. The
baseline, the same drives as RAID0 with the update on the host, is modelled on the same links.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import report
import torch
import typer
from rich.console import Console

import nearstep
from nearstep.backends.peer import HostLinks
from nearstep.smartssd.raid0 import Raid0
from nearstep.work.timeline import Entry, Timeline
from nearstep.work.trace import picture, write_trace
from nearstep_spec.platform.load import load

CLOCK_HZ = 200_000_000
READ, WRITE = 3_300_000_000, 2_000_000_000
"""Bytes a second of the drive, assumed: the paper plots them (figure 14) and prints none."""
PLATFORM = load("smart-infinity")
CARDS = (1, 2, 4, 8)
NARROW = 4
"""The uplink is so many times narrower in the rows that show where it is full."""
KEPT = 0.01

CHUNK = 4096
"""Elements of a chunk: a subgroup has whole ones, and so has half of one, as arrays have them."""

console = Console()


def rate(link: str) -> int:
    return round(PLATFORM.links[link].bytes_per_s.value)


def url(folder: str, cards: int, subgroup: int, uplink: int) -> str:
    return (
        f"sim:smartssd?fu=native&cards={cards}&subgroup_elements={subgroup}&drive={folder}"
        f"&drive_read_bytes_per_s={READ}&drive_write_bytes_per_s={WRITE}&clock_hz={CLOCK_HZ}"
        f"&uplink_bytes_per_s={uplink}&link_bytes_per_s={rate('card0')}"
    )


def lost(timeline: Timeline, drive: float) -> dict[str, float]:
    """Cycles that a step takes beyond its drive's time, by what the drive's writes waited for."""
    writes = [e for each, e in lanes(timeline) if each.startswith("drive 0 write")]
    spans = sorted((e.start, e.end) for e in writes)
    first, reached, idle = spans[0][0], spans[0][0], 0
    for start, end in spans:
        idle += max(0, start - reached)
        reached = max(reached, end)
    began = min(e.start for e in timeline.entries)
    return {
        "first_subgroup_comes": first - began,
        "nothing_to_write": idle,
        "slower_than_its_rate": reached - first - idle - drive,
        "last_parameters_go": began + timeline.makespan - reached,
    }


def lanes(timeline: Timeline) -> list[tuple[str, Entry]]:
    return [(lane, entry) for lane, each in timeline.lanes.items() for entry in each]


def peer_bytes(device: Any) -> Counter[str]:
    return Counter(asdict(device.backend.peer_traffic))


def step(
    name: str, cards: int, elements: int, subgroup: int, uplink: int, **options: Any
) -> tuple[dict[str, Any], Timeline]:
    """The second step of AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(1)
        parameter = torch.nn.Parameter(torch.randn(elements))
        device = url(folder, cards, subgroup, uplink)
        optimizer = nearstep.optim.AdamW([parameter], lr=1e-3, device=device, **options)
        before: Counter[str] = Counter()
        for _ in range(2):
            parameter.grad = torch.randn(elements)
            before = peer_bytes(optimizer.device)
            optimizer.step()
        timeline = optimizer.timeline
        assert timeline is not None
        peer = peer_bytes(optimizer.device)
        peer.subtract(before)
        drive = 12 * elements / cards / min(READ, WRITE) * CLOCK_HZ
        row = {
            "label": "measured (RTL cycles)",
            "name": name,
            "cards": cards,
            "elements": elements,
            "subgroup_elements": subgroup,
            "uplink_bytes_per_s": uplink,
            "cycles": timeline.makespan,
            "of_drive": timeline.makespan / drive,
            "lost": lost(timeline, drive),
            "bytes": {
                "host_to_card": timeline.traffic["uplink", 0],
                "card_to_host": timeline.traffic["uplink", 1],
                "drive_to_card": peer["write_bytes"],
                "card_to_drive": peer["completion_bytes"],
                "host_to_drive": 0,
                "drive_to_host": 0,
            },
        }
    return row, timeline


def baseline(drives: int, elements: int, block: int, uplink: int) -> dict[str, Any]:
    """The same drives as RAID0, and the update on the host."""
    links = HostLinks(uplink_bytes_per_s=uplink, link_bytes_per_s=rate("card0"))
    memory = PLATFORM.processors["cpu"].memory_bytes_per_s
    assert memory is not None
    machine = Raid0(
        drives=drives,
        read_bytes_per_s=READ,
        write_bytes_per_s=WRITE,
        links=links,
        memory_bytes_per_s=memory.value,
    )
    timeline = machine.update(elements, block * drives)
    assert timeline.seconds is not None
    cycles = round(timeline.seconds * CLOCK_HZ)
    nothing = dict.fromkeys(("host_to_card", "card_to_host", "drive_to_card", "card_to_drive"), 0)
    return {
        "label": "modelled",
        "name": "RAID0, update on the host",
        "cards": drives,
        "elements": elements,
        "subgroup_elements": block,
        "uplink_bytes_per_s": uplink,
        "cycles": cycles,
        "of_drive": cycles / (12 * elements / drives / min(READ, WRITE) * CLOCK_HZ),
        "bytes": nothing
        | {
            "host_to_drive": timeline.traffic["uplink", 0],
            "drive_to_host": timeline.traffic["uplink", 1],
        },
    }


def halved(subgroup: int) -> int:
    if subgroup < 2 * CHUNK or subgroup % (2 * CHUNK):
        raise typer.BadParameter(f"must be a multiple of {2 * CHUNK}, not {subgroup}")
    return subgroup


def main(
    subgroup: Annotated[
        int, typer.Option(callback=halved, help=f"Elements of a subgroup: n x {2 * CHUNK}.")
    ] = 16_384,
    count: Annotated[int, typer.Option(min=3, help="Subgroups of a card.")] = 32,
) -> None:
    """Measure steps, and write build/bench/handler.json, pictures and a trace."""
    elements, uplink = subgroup * count, rate("uplink")
    report.FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [baseline(1, elements, subgroup, uplink)]
    modes: dict[str, dict[str, Any]] = {
        "SU, naive": {"transfer_handler": "naive"},
        "SU+O": {},
        "SU+O+C, 1 % Top-K": {"compression": KEPT},
    }
    for name, options in modes.items():
        row, timeline = step(name, 1, elements, subgroup, uplink, **options)
        rows.append(row)
        console.print(f"{name}: {row['cycles']:,} cycles, {row['of_drive']:.3f} of the drive's")
        if name == "SU+O":
            write_trace(timeline, report.FOLDER / "handler-trace.json")
    _, few = step("", 1, 5 * subgroup, subgroup, uplink)
    title = "Five subgroups of a step, cycles of the RTL"
    picture(few, report.FOLDER / "smartssd-handler.png", title, links=False)
    arrays = []
    for bound in (uplink, uplink // NARROW):
        for cards in CARDS:
            of_all, per_card = cards * elements // 2, subgroup // 2
            row, _ = step("SU+O", cards, of_all, per_card, bound)
            arrays += [row, baseline(cards, of_all, per_card, bound)]
            console.print(f"{cards} cards, uplink {bound / 1e9:.2f} GB/s: {row['cycles']:,} cycles")
    results = {
        "read_bytes_per_s": READ,
        "write_bytes_per_s": WRITE,
        "link_bytes_per_s": rate("card0"),
        "clock_hz": CLOCK_HZ,
        "rows": rows,
        "arrays": arrays,
    }
    console.print(f"written: {report.write('handler', results)}")


if __name__ == "__main__":
    typer.run(main)
