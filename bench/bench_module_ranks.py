"""The module with two ranks on each channel: both kernels at once, the host in normal mode, area.

Cycles are those of the RTL of the whole module, START to done by the kernel's own counter, the
slower channel; refresh is on, and every command is judged by the rank models. C++ operators of
equal bits and latency stand for the functional units. `settled` is of all cycles from before the
first START to the poll that finds both kernels done, in which an idle controller gives refreshes,
and of those that are due then, one after the other. The arrays are compared with those of the
golden model.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import report
import typer
from bench_channel import PAPER
from bench_module import ALONE, PATTERNS, cells, host_row
from rich.console import Console
from rich.progress import track
from rich.table import Table

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

FABRIC_HZ = 200e6
CHANNELS = 2
MEASURED = "measured (RTL cycles)"
SHAPES = (
    ("8Gb", "x8", 1, 16),
    *(
        (density, width, 2, units)
        for density, width in (("8Gb", "x8"), ("16Gb", "x8"), ("32Gb", "x16"))
        for units in (16, 4)
    ),
)
"""Part, ranks of a channel, functional units."""

HYPER = {"step": 3, "lr": 1e-3}

console = Console(width=150)


def address_width(density: str, width: str, ranks: int) -> int:
    """Bits that the kernel needs for a channel, and has at least."""
    wide = DimmConfig(
        kernel=UpdateKernelConfig(address_width=64), density=density, width=width, ranks=ranks
    )
    return max(UpdateKernelConfig().address_width, wide.address_mapping.geometry.address_bits)


def signed(debt: int) -> int:
    """A field of `refresh_debt`."""
    return debt - 256 if debt > 127 else debt


def kernel_row(density: str, width: str, ranks: int, units: int, count: int) -> dict[str, Any]:
    """A step of `count` parameters on each channel at once."""
    name = (
        f"sim:axdimm?memory=ddr4-1600&channels={CHANNELS}&ranks={ranks}&density={density}"
        f"&width={width}&functional_units={units}&fu=native"
        f"&address_width={address_width(density, width, ranks)}"
    )
    rng = np.random.default_rng(1)
    contents = {array: rng.standard_normal(count).astype(np.float32) for array in "pgmv"}
    contents["v"] = np.abs(contents["v"])
    with nearstep.open(name) as dimm:
        assert isinstance(dimm, AxdimmDevice)
        jobs = [
            {array: dimm.alloc(count, channel=channel, align=2 << 14) for array in contents}
            for channel in range(CHANNELS)
        ]
        for job in jobs:
            for array, buffer in job.items():
                buffer.write(contents[array])
        with dimm.acceleration():
            start = dimm.cycles
            runs = [dimm.update("adam", job, **HYPER) for job in jobs]
            for run in runs:
                run.wait()
            total = dimm.cycles - start
            worst = max(range(CHANNELS), key=lambda channel: runs[channel].cycles)
            debts = dimm.regs[f"arbiter{worst}"].refresh_debt
            due = [signed(getattr(debts, field)) for field in ("dram", "dram1")[:ranks]]
        found = [{array: job[array].read() for array in "pmv"} for job in jobs]
        timing = dimm.backend.config.timing
    compared = compare(contents, found)
    beats = BEATS_PER_ELEMENT_BEAT * -(-count // LANES)
    cycles = runs[worst].cycles
    late = sum(max(0, each) for each in due) * timing.t_rfc / PHASES
    return {
        "label": f"{MEASURED}, C++ operators of equal bits and latency for the functional units",
        "device": name,
        "density": density,
        "width": width,
        "ranks": ranks,
        "functional_units": units,
        "parameters_per_channel": count,
        "cycles": [run.cycles for run in runs],
        "fraction_of_peak": beats / cycles,
        "refreshes_due_at_done": due,
        "fraction_with_due_refreshes": beats / (total + late),
        "cycles_of_the_host": total,
        "params_per_s": CHANNELS * count / (total / FABRIC_HZ),
        "words_compared": compared,
    }


def channel_of(ranks: int) -> MemoryChannel:
    """Arbiters, host side and controller of a channel."""
    return MemoryChannel(mapping=AddressMapping(DramGeometry(ranks=ranks)))


def compare(
    contents: dict[str, np.ndarray[Any, Any]], found: list[dict[str, np.ndarray[Any, Any]]]
) -> int:
    """The arrays of every channel with those of the golden model. Words."""
    compared = 0
    with nearstep.open("golden:axdimm") as golden:
        job = {array: golden.alloc(len(data)) for array, data in contents.items()}
        for array, buffer in job.items():
            buffer.write(contents[array])
        golden.update("adam", job, **HYPER).wait()
        for array in "pmv":
            expected = job[array].read().view(np.uint32)
            for channel, arrays in enumerate(found):
                if not np.array_equal(arrays[array].view(np.uint32), expected):
                    raise SystemExit(f"{array} of channel {channel} differs from golden")
                compared += expected.size
    return compared


def show(rows: list[dict[str, Any]], hosts: list[dict[str, Any]]) -> None:
    """The tables."""
    table = Table("part, ranks, units", "% of peak", "due", "settled", "MP/s, 2 channels")
    for row in rows:
        table.add_row(
            f"{row['density']} {row['width']}, {row['ranks']}, {row['functional_units']}",
            f"{100 * row['fraction_of_peak']:.2f}",
            ", ".join(map(str, row["refreshes_due_at_done"])),
            f"{100 * row['fraction_with_due_refreshes']:.2f}",
            f"{row['params_per_s'] / 1e6:.1f}",
        )
    console.print(table)
    table = Table("host, two ranks", "channel, bytes/cycle", "% of bare", "% of bare as late")
    for row in hosts:
        table.add_row(
            f"{row['scheduler']}, {row['pattern']}",
            f"{row['bytes_per_cycle']['channel']:.2f}",
            f"{100 * row['throughput_over_bare']:.2f}",
            f"{100 * row['throughput_over_late']:.2f}",
        )
    console.print(table)


def main(
    count: Annotated[int, typer.Option(help="Parameters of a step, a channel.")] = 1_000_000,
    lines: Annotated[int, typer.Option(help="Accesses of the host in each pattern.")] = 30_000,
) -> None:
    """Measure, print, and write build/bench/module_ranks.json."""
    rows = [kernel_row(*shape, count) for shape in track(SHAPES, "kernels", console=console)]
    hosts = [
        host_row(scheduler, pattern, lines, ranks=2)
        for scheduler in track(SCHEDULERS, "host", console=console)
        for pattern in (*PATTERNS, ALONE)
    ]
    show(rows, hosts)
    area = [
        {"ranks": ranks, **cells("memory channel", channel_of(ranks))}
        for ranks in track((1, 2), "area", console=console)
    ]
    console.print(area)
    found = {"paper": PAPER, "rows": rows, "hosts": hosts, "area": area}
    path = report.write("module_ranks", found)
    console.print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
