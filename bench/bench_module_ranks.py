# amaranth: UnusedElaboratable=no
"""The module with two ranks on each channel: both kernels at once, the normal mode, area."""

from typing import Annotated, Any

import numpy as np
from bench_channel import CHANNELS, KERNEL_PARTS, PAPER
from bench_module import ALONE, PATTERNS, host_row
from harness import Results, option, report, script, track
from measuring import CLOCK_HZ, area, arrays, differ, load

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep_hw.axdimm.memory_channel import MemoryChannel
from nearstep_sim.models.dram.bench import BEATS_PER_ELEMENT_BEAT, LANES
from nearstep_sim.models.dram.host import SCHEDULERS
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.latency import PHASES
from nearstep_spec.updater.config import UpdateKernelConfig

SHAPES = (("8Gb", "x8", 1, 16), *((*part, 2, units) for part in KERNEL_PARTS for units in (16, 4)))
"""Part, ranks of a channel, functional units."""

HYPER = {"step": 3, "lr": 1e-3}


def address_width(density: str, width: str, ranks: int) -> int:
    wide = DimmConfig(
        kernel=UpdateKernelConfig(address_width=64), density=density, width=width, ranks=ranks
    )
    return max(UpdateKernelConfig().address_width, wide.address_mapping.geometry.address_bits)


def kernel_row(density: str, width: str, ranks: int, units: int, count: int) -> Results:
    """Measure a step of `count` parameters on each channel at once."""
    name = (
        f"sim:axdimm?memory=ddr4-1600&channels={CHANNELS}&ranks={ranks}&density={density}"
        f"&width={width}&functional_units={units}&fu=native"
        f"&address_width={address_width(density, width, ranks)}"
    )
    contents = arrays(count)
    with nearstep.open(name) as dimm:
        assert isinstance(dimm, AxdimmDevice)
        jobs = [load(dimm, contents, channel=c, align=2 << 14) for c in range(CHANNELS)]
        with dimm.acceleration():
            start = dimm.cycles
            runs = [dimm.update("adam", job, **HYPER) for job in jobs]
            for run in runs:
                run.wait()
            total = dimm.cycles - start
            worst = max(range(CHANNELS), key=lambda channel: runs[channel].cycles)
            debts = dimm.regs[f"arbiter{worst}"].refresh_debt
            fields = [getattr(debts, field) for field in ("dram", "dram1")[:ranks]]
            due = [each - 256 if each > 127 else each for each in fields]  # signed
        found = [{array: job[array].read() for array in "pmv"} for job in jobs]
        timing = dimm.backend.config.timing
    beats = BEATS_PER_ELEMENT_BEAT * -(-count // LANES)
    late = sum(max(0, each) for each in due) * timing.t_rfc / PHASES
    return {"device": name, "density": density, "width": width, "ranks": ranks,
        "functional_units": units, "parameters_per_channel": count,
        "cycles": [run.cycles for run in runs], "fraction_of_peak": beats / runs[worst].cycles,
        "refreshes_due_at_done": due, "due": " + ".join(map(str, due)),
        "fraction_with_due_refreshes": beats / (total + late), "cycles_of_the_host": total,
        "params_per_s": CHANNELS * count / (total / CLOCK_HZ),
        "words_compared": compare(contents, found)}  # fmt: skip


def compare(contents: dict[str, np.ndarray], found: list[dict[str, Any]]) -> int:
    with nearstep.open("golden:axdimm") as golden:
        job = load(golden, contents)
        golden.update("adam", job, **HYPER).wait()
        for channel, each in enumerate(found):
            for array, values in each.items():
                if differ(values, job[array].read()):
                    raise SystemExit(f"{array} of channel {channel} differs from golden")
        return sum(values.size for each in found for values in each.values())


@script
def main(
    count: Annotated[int, option("Parameters of a step, a channel.")] = 1_000_000,
    lines: Annotated[int, option("Accesses of the host in each pattern.")] = 30_000,
) -> None:
    """Measure, print, and write build/bench/module_ranks.json."""
    rows = [kernel_row(*shape, count) for shape in track(SHAPES, "kernels")]
    hosts = [
        host_row(scheduler, pattern, lines, ranks=2)
        for scheduler in track(SCHEDULERS, "host")
        for pattern in (*PATTERNS, ALONE)
    ]
    channels = {n: AddressMapping(DramGeometry(ranks=n)) for n in (1, 2)}
    cells = [
        {"ranks": ranks, **area(MemoryChannel(mapping=mapping))}
        for ranks, mapping in track(channels.items(), "area")
    ]
    report("module_ranks", paper=PAPER, rows=rows, hosts=hosts, area=cells)
