# amaranth: UnusedElaboratable=no
"""Area of a COARSE memory device, part by part: `synth_xilinx -family xcup`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any

import report
import typer
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.crc import Processor
from amaranth.lib.wiring import In, Out
from rich.console import Console

from nearstep_hw.axdimm.counters import EventCounters
from nearstep_hw.coarse.config import PORTS, CoarseConfig
from nearstep_hw.coarse.crc import entry_crc, header_crc
from nearstep_hw.coarse.device import MemoryDevice
from nearstep_hw.coarse.faults import FaultControl
from nearstep_hw.coarse.job_queue import JobQueue
from nearstep_hw.coarse.link_layer import LinkLayer
from nearstep_hw.coarse.recv_flow import RecvFlow
from nearstep_hw.coarse.reduce import Reduce
from nearstep_hw.coarse.registers import LINK_COUNTERS, SYNC_COUNTERS
from nearstep_hw.coarse.send_flow import SendFlow
from nearstep_hw.coarse.sync_core import SyncCore
from nearstep_hw.csr.decoder import CsrDecoder
from nearstep_hw.verilog import to_verilog
from nearstep_sim.synthesis import AREA, ultrascale_plus_area, ultrascale_plus_cells

CONFIG = CoarseConfig()
TOP = "part"
LANES = (8, 16)

Area = dict[str, float]

console = Console()


class Crc(wiring.Component):
    """A CRC by itself, with the members of Amaranth's."""

    def __init__(self, crc: Processor) -> None:
        self.crc_ = crc
        super().__init__(
            {
                "start": In(1),
                "valid": In(1),
                "data": In(len(crc.data)),
                "crc": Out(len(crc.crc)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.crc = crc = self.crc_
        m.d.comb += [
            crc.start.eq(self.start),
            crc.valid.eq(self.valid),
            crc.data.eq(self.data),
            self.crc.eq(crc.crc),
        ]
        return m


def parts() -> dict[str, Callable[[], wiring.Component]]:
    """What is synthesised by itself, by name."""
    groups, depth = CONFIG.groups, CONFIG.buffer_entries
    link_counters = [f"link{port}_{name}" for port in range(PORTS) for name in LINK_COUNTERS]
    few, many = (replace(CONFIG, alus=n) for n in LANES)
    return {
        f"ALUs, {few.alus} lanes": lambda: Reduce(few),
        "SendFlow": lambda: SendFlow(depth=depth),
        "RecvFlow": lambda: RecvFlow(depth=depth),
        "header CRC": lambda: Crc(header_crc()),
        "entry CRC": lambda: Crc(entry_crc()),
        f"sync core, {few.alus} lanes": lambda: SyncCore(few),
        "link layer": lambda: LinkLayer(CONFIG),
        "snapshot gate": lambda: MemoryDevice(CONFIG).gate,
        "job queue": lambda: JobQueue(address_width=CONFIG.address_width, depth=CONFIG.queue_jobs),
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
        f"ALUs, {many.alus} lanes": lambda: Reduce(many),
        f"sync core, {many.alus} lanes": lambda: SyncCore(many),
    }


def total(areas: dict[str, Area], counts: dict[str, int]) -> Area:
    """Sum of parts, each as often as it is said."""
    return {key: sum(n * areas[name][key] for name, n in counts.items()) for key in AREA}


def sums(areas: dict[str, Area]) -> dict[str, dict[str, Any]]:
    """What is added up, with the parts of each sum."""
    groups = CONFIG.groups
    rest = {
        "link layer": 1,
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
    counts: dict[str, dict[str, int]] = {
        "CRC of the link layer": {"header CRC": 2 * PORTS, "entry CRC": 2 * PORTS},
        "replay of the link layer": {"SendFlow": groups, "RecvFlow": groups},
        **{f"device, {n} lanes": {f"sync core, {n} lanes": groups, **rest} for n in LANES},
    }
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
    """Count cells (takes half an hour), and write build/bench/coarse_area.json part by part."""
    path = report.FOLDER / "coarse_area.json"
    areas: dict[str, Area] = json.loads(path.read_text())["parts"] if resume else {}
    for name, make in parts().items():
        if name in areas:
            continue
        began = time.perf_counter()
        areas[name] = ultrascale_plus_area(ultrascale_plus_cells(to_verilog(make(), TOP), TOP))
        cells = ", ".join(f"{key} {value:g}" for key, value in areas[name].items())
        console.print(f"{name}: {cells} ({time.perf_counter() - began:.0f} s)")
        results = {
            "label": "measured (synth_xilinx -family xcup, each part by itself)",
            "config": asdict(CONFIG),
            "parts": areas,
            "sums": sums(areas),
            "lanes": lanes(areas),
        }
        report.write("coarse_area", results)
    console.print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
