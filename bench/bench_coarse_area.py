# amaranth: UnusedElaboratable=no
"""Area of a COARSE memory device, part by part: `synth_xilinx -family xcup`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from amaranth.lib import wiring
from harness import Kept, Results, option, report, script, track
from measuring import Area, area

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
from nearstep_sim.synthesis import AREA
from nearstep_spec.coarse.config import PORTS, CoarseConfig
from nearstep_spec.coarse.registers import LINK_COUNTERS, SYNC_COUNTERS

CONFIG = CoarseConfig()
LANES = (8, 16)
SHOWN = ("ALUs", "sync core", "link layer", "CRC", "Flow", "snapshot")
"""Parts of the table, by a word of their names."""


def derived(results: Results) -> Results:
    parts = {n: each for n, each in results["parts"].items() if any(word in n for word in SHOWN)}
    sums = {f"*{n}*": each for n, each in results["sums"].items() if not n.startswith("its")}
    config = results["config"]
    entries = config["groups"] * 2 * config["buffer_entries"]
    return {"shown": {**parts, **sums}, "buffers": entries * config["entry_phits"] * 16 // 1024}


@dataclass(frozen=True)
class Part:
    """What is synthesised: a component, without modules whose names match `boxes`."""

    make: Callable[[], wiring.Component]
    boxes: str | None = None


def parts() -> dict[str, Part]:
    groups, depth = CONFIG.groups, CONFIG.buffer_entries
    width = CONFIG.address_width
    link_counters = [f"link{port}_{name}" for port in range(PORTS) for name in LINK_COUNTERS]
    few, many = (replace(CONFIG, alus=n) for n in LANES)
    makers: dict[str, Callable[[], wiring.Component]] = {
        "SendFlow": lambda: SendFlow(depth=depth), "RecvFlow": lambda: RecvFlow(depth=depth),
        "header CRC": header_crc, "snapshot gate": lambda: MemoryDevice(CONFIG).gate,
        "job queue": lambda: JobQueue(address_width=width, depth=CONFIG.queue_jobs),
        "faults": lambda: FaultControl(groups=groups), "decoder": lambda: CsrDecoder(1 + groups),
        "sync counters": lambda: EventCounters(tuple(SYNC_COUNTERS)),
        "copy counters": lambda: EventCounters(("pages_copied", "stall")),
        "link counters": lambda: EventCounters(link_counters),
        "sync registers": lambda: MemoryDevice(CONFIG).blocks["sync0"],
        "pool registers": lambda: MemoryDevice(CONFIG).blocks["pool"],
        "read join": lambda: MemoryDevice(CONFIG).reads,
        "write join": lambda: MemoryDevice(CONFIG).writers,
        "copy join": lambda: MemoryDevice(CONFIG).writes, "entry CRC": entry_crc,
        f"ALUs, {few.alus} lanes": lambda: Reduce(few),
        f"ALUs, {many.alus} lanes": lambda: Reduce(many)}  # fmt: skip
    return {
        "link layer but CRC": Part(lambda: LinkLayer(CONFIG), boxes="*_crc"),
        f"sync core but ALUs, {few.alus} lanes": Part(lambda: SyncCore(few), boxes="*.reduce"),
        f"sync core but ALUs, {many.alus} lanes": Part(lambda: SyncCore(many), boxes="*.reduce"),
        **{name: Part(make) for name, make in makers.items()},
    }


def total(areas: dict[str, Area], counts: dict[str, int]) -> Area:
    return {key: sum(n * areas[name][key] for name, n in counts.items()) for key in AREA}


def sums(areas: dict[str, Area]) -> dict[str, Results]:
    groups = CONFIG.groups
    crc = {"header CRC": 2 * PORTS, "entry CRC": 2 * PORTS}
    links = {"link layer but CRC": 1, **crc}
    rest = {
        "snapshot gate": 1, "read join": 1, "write join": 1, "copy join": 1, "pool registers": 1,
        "sync registers": groups, "decoder": 1, "faults": 1, "job queue": groups,
        "link counters": 1, "sync counters": groups, "copy counters": 1}  # fmt: skip
    counts: dict[str, dict[str, int]] = {"link layer": links, "its CRC": crc}
    counts["its replay"] = {"SendFlow": groups, "RecvFlow": groups}
    for n in LANES:
        core = {f"sync core but ALUs, {n} lanes": 1, f"ALUs, {n} lanes": 1}
        counts[f"sync core, {n} lanes"] = core
        counts[f"device, {n} lanes"] = {**dict.fromkeys(core, groups), **links, **rest}
    return {
        name: {"label": "measured parts, added", "parts": each, **total(areas, each)}
        for name, each in counts.items()
    }


def lanes(areas: dict[str, Area]) -> list[Results]:
    alus = {n: areas[f"ALUs, {n} lanes"] for n in LANES}
    few, many = alus.values()
    more = LANES[1] - LANES[0]
    return [
        *({"name": f"{n} lanes, divided", **{k: c[k] / n for k in AREA}} for n, c in alus.items()),
        {"name": "one more", **{key: (many[key] - few[key]) / more for key in AREA}},
    ]


@script
def main(
    resume: Annotated[bool, option("Keep the parts of a run that was cut off.")] = False,
) -> None:
    """Count cells (may take an hour), and write build/bench/coarse_area.json."""
    kept = Kept("coarse_area", resume=resume)
    areas: dict[str, Area] = {}
    for name, part in track(parts().items(), "parts"):
        cells = kept.measure(name, lambda part=part: area(part.make(), part.boxes))
        areas[name] = {key: cells[key] for key in AREA}
    report("coarse_area", derived, config=asdict(CONFIG), parts=areas, sums=sums(areas),
        lanes=lanes(areas))  # fmt: skip
    kept.path.unlink()
