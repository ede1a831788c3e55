"""The transfer handler of cards with drives: a step beside its drive's time, and beside RAID0."""

import tempfile
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from harness import FOLDER, Results, option, report, script, track
from measuring import CLOCK_HZ

import nearstep
from nearstep.backends.peer import HostLinks
from nearstep.paper.smart_infinity_machine import Machine, Options
from nearstep.smartssd.raid0 import Raid0
from nearstep.work.timeline import Timeline
from nearstep.work.trace import picture, write_trace

PLATFORM = Machine(Options()).platform
"""Of `nearstep paper smart-infinity`: drives read or write, and the uplink's rate is fitted."""

DRIVE, UPLINK = PLATFORM.drives["ssd0"], PLATFORM.links["uplink"]
READ, WRITE = round(float(DRIVE.read_bytes_per_s or 0)), round(float(DRIVE.write_bytes_per_s or 0))
CARDS = (1, 2, 4, 8)
NARROW = 4  # the uplink is so many times narrower in the rows that show where it is full
KEPT = 0.01
CHUNK = 4096
"""Elements of a chunk: a subgroup has whole ones, and so has half of one, as arrays have them."""

PATHS = ("host_to_card", "card_to_host", "drive_to_card", "card_to_drive", "host_to_drive",
         "drive_to_host")  # fmt: skip


def derived(results: Results) -> Results:
    arrays, first = results["arrays"], results["rows"][0]
    return {
        "count": first["elements"] // first["subgroup_elements"],
        "waits": [row for row in results["rows"] if "lost" in row],
        "pairs": [
            {
                **own,
                "base": base["cycles"],
                "of_one": own["cycles"] / arrays[0]["cycles"],
                "over": base["cycles"] / own["cycles"],
            }
            for own, base in zip(arrays[::2], arrays[1::2], strict=True)]}  # fmt: skip


def rate(link: str) -> int:
    return round(PLATFORM.links[link].bytes_per_s.value)


def row(
    name: str, cards: int, elements: int, subgroup: int, uplink: int, cycles: int, **more: Any
) -> Results:
    return {"name": name, "cards": cards, "elements": elements, "subgroup_elements": subgroup,
        "uplink_bytes_per_s": uplink, "cycles": cycles,
        "of_drive": cycles / of_drive(more["bytes"], cards), **more}  # fmt: skip


def of_drive(moved: dict[str, int], drives: int) -> float:
    """Cycles of one of the drives for its reads and its writes."""
    read = moved["drive_to_card"] + moved["drive_to_host"]
    written = moved["card_to_drive"] + moved["host_to_drive"]
    return (read / READ + written / WRITE) / drives * CLOCK_HZ


def lost(timeline: Timeline, drive: float) -> dict[str, float]:
    """Cycles beyond those of the drive 0: without a transfer, and with one."""
    lanes = timeline.lanes.items()
    mine = [entries for lane, entries in lanes if lane.startswith("drive 0 ")]
    reached = min(e.start for e in timeline.entries)
    idle = timeline.makespan
    for start, end in sorted((e.start, e.end) for entries in mine for e in entries):
        idle -= max(0, end - max(start, reached))
        reached = max(reached, end)
    return {"idle": idle, "slower": timeline.makespan - idle - drive}


def step(
    name: str, cards: int, elements: int, subgroup: int, uplink: int, **options: Any
) -> tuple[Results, Timeline]:
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(1)
        parameter = torch.nn.Parameter(torch.randn(elements))
        device = (
            f"sim:smartssd?fu=native&cards={cards}&subgroup_elements={subgroup}&drive={folder}"
            f"&drive_read_bytes_per_s={READ}&drive_write_bytes_per_s={WRITE}&clock_hz={CLOCK_HZ}"
            f"&drive_duplex={DRIVE.duplex}&uplink_duplex={UPLINK.duplex}"
            f"&uplink_bytes_per_s={uplink}&link_bytes_per_s={rate('card0')}"
        )
        optimizer: Any = nearstep.optim.AdamW([parameter], lr=1e-3, device=device, **options)
        peer: list[Counter[str]] = []
        for _ in range(2):
            parameter.grad = torch.randn(elements)
            peer.append(Counter(asdict(optimizer.device.backend.peer_traffic)))
            optimizer.step()
        timeline = optimizer.timeline
        moved = Counter(asdict(optimizer.device.backend.peer_traffic))
    moved.subtract(peer[-1])
    by_path = (timeline.traffic["uplink", 0], timeline.traffic["uplink", 1], moved["write_bytes"],
               moved["completion_bytes"], 0, 0)  # fmt: skip
    found = dict(zip(PATHS, by_path, strict=True))
    more = {"lost": lost(timeline, of_drive(found, cards)), "bytes": found}
    return row(name, cards, elements, subgroup, uplink, timeline.makespan, **more), timeline


def baseline(drives: int, elements: int, block: int, uplink: int) -> Results:
    memory = PLATFORM.processors["cpu"].memory_bytes_per_s
    assert memory is not None
    machine = Raid0(drives=drives, drive=DRIVE,
        links=HostLinks(uplink_bytes_per_s=uplink, link_bytes_per_s=rate("card0"),
                        uplink_duplex=UPLINK.duplex),
        memory_bytes_per_s=memory.value)  # fmt: skip
    timeline = machine.update(elements, block * drives)
    assert timeline.seconds is not None
    down, up = timeline.traffic["uplink", 0], timeline.traffic["uplink", 1]
    moved = dict(zip(PATHS, (0, 0, 0, 0, down, up), strict=True))
    cycles = round(timeline.seconds * CLOCK_HZ)
    name = "RAID0, update on the host"
    return row(name, drives, elements, block, uplink, cycles, label="modelled", bytes=moved)


def halved(subgroup: int) -> int:
    if subgroup < 2 * CHUNK or subgroup % (2 * CHUNK):
        raise typer.BadParameter(f"must be a multiple of {2 * CHUNK}, not {subgroup}")
    return subgroup


@script
def main(
    subgroup: Annotated[
        int, option(f"Elements of a subgroup: n x {2 * CHUNK}.", callback=halved)
    ] = 16_384,
    count: Annotated[int, option("Subgroups of a card.", min=3)] = 32,
) -> None:
    """Measure steps, and write build/bench/handler.json, pictures and a trace."""
    elements, uplink = subgroup * count, rate("uplink")
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [baseline(1, elements, subgroup, uplink)]
    modes: dict[str, dict[str, Any]] = {
        "SU, naive": {"transfer_handler": "naive"},
        "SU+O": {},
        "SU+O+C, 1 % Top-K": {"compression": KEPT},
    }
    for name, options in track(modes.items(), "one card"):
        found, timeline = step(name, 1, elements, subgroup, uplink, **options)
        rows.append(found)
        if name == "SU+O":
            write_trace(timeline, FOLDER / "handler-trace.json")
    _, few = step("", 1, 5 * subgroup, subgroup, uplink)
    title = "Five subgroups of a step, cycles of the RTL"
    picture(few, FOLDER / "smartssd-handler.png", title, links=False)
    arrays = []
    for bound, cards in track([(b, n) for b in (uplink, uplink // NARROW) for n in CARDS], "cards"):
        shape = (cards, cards * elements // 2, subgroup // 2, bound)
        arrays += [step("SU+O", *shape)[0], baseline(*shape)]
    report("handler", derived, read_bytes_per_s=READ, write_bytes_per_s=WRITE,
        link_bytes_per_s=rate("card0"), clock_hz=CLOCK_HZ, rows=rows, arrays=arrays)  # fmt: skip
