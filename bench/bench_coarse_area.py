# amaranth: UnusedElaboratable=no
"""Area of a COARSE memory device, part by part: `synth_xilinx -family xcup`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import report
import typer
from amaranth.lib import wiring
from rich.console import Console

from nearstep_hw.coarse.crc import entry_crc, header_crc
from nearstep_hw.coarse.device import MemoryDevice
from nearstep_hw.coarse.faults import FaultControl
from nearstep_hw.coarse.job_queue import JobQueue
from nearstep_hw.coarse.link_layer import LinkLayer
from nearstep_hw.coarse.recv_flow import RecvFlow
from nearstep_hw.coarse.reduce import Reduce
from nearstep_hw.coarse.send_flow import SendFlow
from nearstep_hw.coarse.sync_core import SyncCore
from nearstep_hw.csr.counters import EventCounters
from nearstep_hw.csr.decoder import CsrDecoder
from nearstep_hw.verilog import to_verilog
from nearstep_sim.synthesis import AREA, ultrascale_plus_area, ultrascale_plus_cells
from nearstep_spec.coarse.config import PORTS, CoarseConfig
from nearstep_spec.coarse.registers import LINK_COUNTERS, SYNC_COUNTERS

CONFIG = CoarseConfig()
TOP = "part"
LANES = (8, 16)

Area = dict[str, float]

console = Console()


@dataclass(frozen=True)
class Part:
    """What is synthesised: a component, without modules whose names match `boxes`."""

    make: Callable[[], wiring.Component]
    boxes: str | None = None


def parts() -> dict[str, Part]:
    """What is synthesised by itself, by name."""
    groups, depth = CONFIG.groups, CONFIG.buffer_entries
    width = CONFIG.address_width
    link_counters = [f"link{port}_{name}" for port in range(PORTS) for name in LINK_COUNTERS]
    few, many = (replace(CONFIG, alus=n) for n in LANES)
    makers: dict[str, Callable[[], wiring.Component]] = {
        "SendFlow": lambda: SendFlow(depth=depth),
        "RecvFlow": lambda: RecvFlow(depth=depth),
        "header CRC": header_crc,
        "snapshot gate": lambda: MemoryDevice(CONFIG).gate,
        "job queue": lambda: JobQueue(address_width=width, depth=CONFIG.queue_jobs),
        "faults": lambda: FaultControl(groups=groups),
        "decoder": lambda: CsrDecoder(1 + groups),
        "sync counters": lambda: EventCounters(tuple(SYNC_COUNTERS)),
        "copy counters": lambda: EventCounters(("pages_copied", "stall")),
        "link counters": lambda: EventCounters(link_counters),
        "sync registers": lambda: MemoryDevice(CONFIG).blocks["sync0"],
        "pool registers": lambda: MemoryDevice(CONFIG).blocks["pool"],
        "read join": lambda: MemoryDevice(CONFIG).reads,
        "write join": lambda: MemoryDevice(CONFIG).writers,
        "copy join": lambda: MemoryDevice(CONFIG).writes,
        "entry CRC": entry_crc,
        f"ALUs, {few.alus} lanes": lambda: Reduce(few),
        f"ALUs, {many.alus} lanes": lambda: Reduce(many),
    }
    return {
        "link layer but CRC": Part(lambda: LinkLayer(CONFIG), boxes="*_crc"),
        f"sync core but ALUs, {few.alus} lanes": Part(lambda: SyncCore(few), boxes="*.reduce"),
        f"sync core but ALUs, {many.alus} lanes": Part(lambda: SyncCore(many), boxes="*.reduce"),
        **{name: Part(make) for name, make in makers.items()},
    }


def total(areas: dict[str, Area], counts: dict[str, int]) -> Area:
    """Sum of parts, each as often as it is said."""
    return {key: sum(n * areas[name][key] for name, n in counts.items()) for key in AREA}


def sums(areas: dict[str, Area]) -> dict[str, dict[str, Any]]:
    """What is added up, with the parts of each sum, if all are there."""
    groups = CONFIG.groups
    crc = {"header CRC": 2 * PORTS, "entry CRC": 2 * PORTS}
    links = {"link layer but CRC": 1, **crc}
    rest = {
        "snapshot gate": 1,
        "read join": 1,
        "write join": 1,
        "copy join": 1,
        "pool registers": 1,
        "sync registers": groups,
        "decoder": 1,
        "faults": 1,
        "job queue": groups,
        "link counters": 1,
        "sync counters": groups,
        "copy counters": 1,
    }
    counts: dict[str, dict[str, int]] = {"link layer": links, "its CRC": crc}
    counts["its replay"] = {"SendFlow": groups, "RecvFlow": groups}
    for n in LANES:
        core = {f"sync core but ALUs, {n} lanes": 1, f"ALUs, {n} lanes": 1}
        counts[f"sync core, {n} lanes"] = core
        counts[f"device, {n} lanes"] = {**dict.fromkeys(core, groups), **links, **rest}
    return {
        name: {"label": "measured parts, added", "parts": each, **total(areas, each)}
        for name, each in counts.items()
        if set(each) <= set(areas)
    }


def lanes(areas: dict[str, Area]) -> list[dict[str, Any]]:
    """Area of one lane: all of the ALUs over their lanes, and what eight more lanes add."""
    alus = {n: areas[f"ALUs, {n} lanes"] for n in LANES if f"ALUs, {n} lanes" in areas}
    rows = [
        {"of": f"{n} lanes, divided", **{key: area[key] / n for key in AREA}}
        for n, area in alus.items()
    ]
    if len(alus) < len(LANES):
        return rows
    few, many = alus.values()
    more = LANES[1] - LANES[0]
    return [*rows, {"of": "one more", **{key: (many[key] - few[key]) / more for key in AREA}}]


def main(
    resume: Annotated[bool, typer.Option(help="Keep the parts that are there already.")] = False,
) -> None:
    """Count cells (may take an hour), and write build/bench/coarse_area.json part by part."""
    path = report.FOLDER / "coarse_area.json"
    areas: dict[str, Area] = {}
    if resume and path.exists():
        areas = json.loads(path.read_text())["parts"]
    for name, part in parts().items():
        if name in areas:
            continue
        began = time.perf_counter()
        verilog = to_verilog(part.make(), TOP)
        areas[name] = ultrascale_plus_area(ultrascale_plus_cells(verilog, TOP, part.boxes))
        cells = ", ".join(f"{key} {value:g}" for key, value in areas[name].items())
        console.print(f"{name}: {cells} ({time.perf_counter() - began:.0f} s)")
        results = {
            "label": "measured (synth_xilinx -family xcup), each part by itself",
            "config": asdict(CONFIG),
            "parts": areas,
            "sums": sums(areas),
            "lanes": lanes(areas),
        }
        report.write("coarse_area", results)
    console.print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
