# amaranth: UnusedElaboratable=no
"""The module: kernels behind the mode arbiter, the host beside them, hand-overs, area.

Cycles are those of the RTL of the whole module (arbiters, controllers, kernels) against the rank
model, which judges every command; refresh is on. Stand-ins of equal latency do the arithmetic of
the kernels, since no figure here depends on it; all memory is compared. `simulation` is how long a
simulated DIMM takes, with its functional units in RTL, on one thread and on two.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import report
import typer
from amaranth import Module
from amaranth.lib import wiring
from matplotlib import pyplot
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.buffer import Buffer
from nearstep.paper.axdimm_kernel import AXDIMM, CPU
from nearstep.threads import VARIABLE
from nearstep.work.clock import Clock
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, HOST_WRITE_LATENCY
from nearstep_hw.axdimm.memory_channel import MemoryChannel
from nearstep_hw.axdimm.refresh_debt import POSTPONED
from nearstep_hw.dram.controller import DramController
from nearstep_hw.dram.dfi import PHASES
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.kernel_core import KernelCore
from nearstep_hw.verilog import to_verilog
from nearstep_sim.axdimm.memory_channel import ChannelBench, Kernel, Mode
from nearstep_sim.axdimm.module_step import ModuleStep, run_step
from nearstep_sim.models.dram.bench import BEATS_PER_ELEMENT_BEAT, LANES, Channel, run_kernel
from nearstep_sim.models.dram.host import (
    SCHEDULERS,
    BareDram,
    HostConfig,
    without_a_module,
)
from nearstep_sim.synthesis import AREA, ultrascale_plus_area, ultrascale_plus_cells
from nearstep_spec.axdimm.hand_over import longest_to_acceleration, longest_to_normal
from nearstep_spec.axdimm.registers import Block, arbiter_map
from nearstep_spec.csr.model import LINE_BYTES
from nearstep_spec.dram.latency import HOST_WRITE_TO_READ
from nearstep_spec.dram.timing import MAX_POSTPONED_REFRESHES, dram_timing
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import ARRAYS, update_rule

DENSITIES = ("8Gb", "16Gb")
PARTS = (("8Gb", "x8"), ("16Gb", "x8"), ("32Gb", "x16"))
"""The last one is that of the paper."""

UNITS = (16, 4)
CHANNELS = 2
FABRIC_HZ = 200e6
PEAK = FABRIC_HZ * LANES / BEATS_PER_ELEMENT_BEAT  # parameters/s of a channel
PAPER = {
    "label": "paper (32Gb parts, two channels)",
    "kernel": {"params_per_s": AXDIMM.achieved, "peak_params_per_s": AXDIMM.theoretical},
    "cpu": {"params_per_s": CPU.achieved, "peak_params_per_s": CPU.theoretical},
}
MEASURED = "measured (RTL cycles)"
PATTERNS = ("streaming loads", "streaming stores", "copy", "random loads", "random, 1/3 stores")
ALONE = "random loads, one at a time"
MOST_ALONE = 5000  # accesses of that pattern
REGION = 1 << 26  # bytes that the host touches, away from kernel and registers
MODE_LINE = 1
SIMULATED = "sim:axdimm?memory=ddr4-1600"
THREADS = (1, 2)
SUBJECTS = ("kernels", "host", "hand-overs", "simulation", "area")
LONGEST_STAY = 14_000  # cycles in a mode: nine refresh intervals, so that as many may be owed

pyplot.switch_backend("Agg")
console = Console(width=150)


def step_row(step: ModuleStep, part: tuple[str, str], units: int) -> dict[str, Any]:
    """A step of the kernels of one or both channels, as plain data."""
    worst = min(step.channels, key=lambda channel: channel.efficiency)
    clocks, bus = PHASES * worst.cycles, worst.bus
    lost = {
        "start_drain": clocks - (bus.total - bus.start),
        **{name: count for name, count in asdict(bus).items() if name not in ("data", "start")},
    }
    return {
        "label": f"{MEASURED}, stand-ins of equal latency for the functional units",
        "density": part[0],
        "width": part[1],
        "functional_units": units,
        "block_kib": 16,
        "channels": len(step.channels),
        "parameters_per_channel": step.count,
        "cycles": [channel.cycles for channel in step.channels],
        "fraction_of_peak": worst.efficiency,
        "fraction_with_due_refreshes": worst.settled_efficiency,
        "refresh_bound": worst.timing.refresh_bound,
        "refreshes_due_at_done": worst.debt,
        "lost": {name: count / clocks for name, count in lost.items()},
        "cycles_seen_by_the_host": step.cycles,
        "params_per_s": step.elements_per_second,
        "words_compared": sum(channel.words for channel in step.channels),
    }


Shape = tuple[Any, ...]
Row = dict[str, Any]


class Rows:
    """Rows that are kept as they are measured, so that a bench which was cut off goes on.

    Parameters
    ----------
    resume : take those of the run before.
    """

    def __init__(self, *, resume: bool) -> None:
        self.path = report.FOLDER / "module.partial.json"
        self.kept: dict[str, Row] = {}
        if resume and self.path.exists():
            self.kept = json.loads(self.path.read_text())

    def measure(self, what: str, shapes: list[Shape], row: Callable[..., Row]) -> list[Row]:
        """A row for each shape, in their order."""
        found = []
        for shape in track(shapes, what, console=console):
            key = f"{what} {shape}"
            if key not in self.kept:
                self.kept[key] = row(*shape)
                report.FOLDER.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps(self.kept))
            found.append(self.kept[key])
        return found

    def end(self) -> None:
        """All rows are there."""
        self.path.unlink(missing_ok=True)


def step(density: str, width: str, units: int, channels: int, count: int) -> Row:
    """A step of the kernels."""
    config = UpdateKernelConfig(functional_units=units)
    run = run_step(config, count=count, channels=channels, density=density, width=width)
    return step_row(run, (density, width), units)


def steps(rows: Rows, count: int) -> list[Row]:
    """Both channels at once, and one alone."""
    shapes = [(*part, units, CHANNELS, count) for part in PARTS for units in UNITS]
    return rows.measure("kernels", [(*PARTS[0], UNITS[0], 1, count), *shapes], step)


def postponed_row(density: str, postponed: int, count: int) -> Row:
    """The controller alone, with so many refreshes postponed."""
    run = run_kernel(Channel(density=density, postponed=postponed), count=count)
    return {
        "label": f"{MEASURED}, stand-ins of equal latency for the functional units",
        "density": density,
        "postponed": postponed,
        "fraction_of_peak": run.efficiency,
        "fraction_with_due_refreshes": run.settled_efficiency,
        "refreshes_due_at_done": run.debt,
    }


def postponing(rows: Rows, count: int) -> list[Row]:
    """With eight refreshes postponed and with five as in a channel."""
    several = (MAX_POSTPONED_REFRESHES, POSTPONED)
    shapes = [(density, postponed, count) for density in DENSITIES for postponed in several]
    return rows.measure("controller alone", shapes, postponed_row)


def accesses(pattern: str, n: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Which are stores, and byte addresses."""
    index = np.arange(n)
    lines = REGION // LINE_BYTES
    if pattern == "streaming loads":
        return np.zeros(n, bool), index % lines * LINE_BYTES
    if pattern == "streaming stores":
        return np.ones(n, bool), index % lines * LINE_BYTES
    if pattern == "copy":  # blocks of a page, from the lower half to the upper
        page = 4096 // LINE_BYTES
        block, inside = np.divmod(index, 2 * page)
        is_store = inside >= page
        line = (block * page + inside % page) % (lines // 2) + is_store * (lines // 2)
        return is_store, line * LINE_BYTES
    is_store = rng.random(n) < (1 / 3 if pattern.endswith("stores") else 0)
    return is_store, rng.integers(0, lines, n) * LINE_BYTES


def host_rows(rows: Rows, most: int) -> list[Row]:
    """Every pattern and scheduler."""
    patterns = (*PATTERNS, ALONE)
    shapes = [(scheduler, each, most) for scheduler in SCHEDULERS for each in patterns]
    return rows.measure("host", shapes, host_row)


def host_row(scheduler: str, pattern: str, most: int, seed: int = 1, ranks: int = 1) -> Row:
    """Cycles of a host with the channel in normal mode; with DRAM chips alone, which answer after
    their own latencies and turn around as fast as they can; and with DRAM as late as the module."""
    n = min(most, MOST_ALONE) if pattern == ALONE else most
    is_store, addresses = accesses(pattern, n, np.random.default_rng(seed))
    data = np.random.default_rng(seed + 1).integers(0, 256, (n, LINE_BYTES), dtype=np.uint8)
    config = HostConfig(
        scheduler=scheduler,
        read_latency=HOST_READ_LATENCY,
        write_latency=HOST_WRITE_LATENCY,
        write_to_read=HOST_WRITE_TO_READ,
        ranks=ranks,
        channel_ranks=ranks,
        seed=seed,
    )
    benches = {
        "channel": ChannelBench(scheduler=scheduler, seed=seed, ranks=ranks),
        "bare": BareDram(without_a_module(config)),
        "late": BareDram(config),
    }
    took = {}
    for name, bench in benches.items():
        took[name] = 0
        for part in range(n if pattern == ALONE else 1):
            some = slice(part, part + 1) if pattern == ALONE else slice(n)
            bench.host.submit(is_store[some], addresses[some], data=data[some])
            took[name] += bench.run(200 * n, until_idle=True)
        if not bench.host.idle:
            raise SystemExit(f"{scheduler}, {pattern}, {name}: the host does not end")
    return {
        "label": MEASURED,
        "scheduler": scheduler,
        "pattern": pattern,
        "accesses": n,
        "cycles": took,
        "bytes_per_cycle": {name: LINE_BYTES * n / each for name, each in took.items()},
        "throughput_over_bare": took["bare"] / took["channel"],
        "throughput_over_late": took["late"] / took["channel"],
    }


@dataclass(frozen=True)
class HandOver:
    """What host and kernel do while the channel changes hands."""

    name: str
    to: Mode
    kernel: Kernel = Kernel.QUIET
    host: str = "idle"  # or "busy": more accesses than it can serve; "light": some
    postpone: int = 1
    scheduler: str = "fr-fcfs"

    @property
    def patience(self) -> int:
        """Refresh intervals, about, that the change may have to wait for."""
        return self.postpone if self.to is Mode.NORMAL else 1


HAND_OVERS = (
    HandOver("idle host", Mode.ACCELERATION),
    HandOver("busy host", Mode.ACCELERATION, host="busy"),
    HandOver("busy host that postpones 8 refreshes", Mode.ACCELERATION, host="busy", postpone=8),
    HandOver("kernel at rest, idle host", Mode.NORMAL),
    HandOver("kernel busy, idle host", Mode.NORMAL, Kernel.BUSY),
    HandOver("kernel busy, some refused accesses", Mode.NORMAL, Kernel.BUSY, "light"),
    HandOver("kernel busy, host never rests", Mode.NORMAL, Kernel.BUSY, "busy"),
    HandOver("kernel busy, in-order host never rests", Mode.NORMAL, Kernel.BUSY, "busy", 1,
             "in-order"),
    HandOver("kernel busy, host never rests, postpones 8", Mode.NORMAL, Kernel.BUSY, "busy", 8),
)  # fmt: skip


def bounds(density: str) -> dict[str, int]:
    """Most cycles of a change of mode."""
    timing = dram_timing("DDR4-1600", density)
    return {
        "to_acceleration": longest_to_acceleration(timing),
        "to_normal": longest_to_normal(timing, restless=False),
        "to_normal_busy_host": longest_to_normal(timing),
    }


class Changer:
    """Takes a channel from mode to mode under one kind of load."""

    def __init__(self, density: str, what: HandOver, seed: int) -> None:
        self.what = what
        self.bench = ChannelBench(
            density=density, seed=seed, postpone=what.postpone, scheduler=what.scheduler
        )
        self.map = arbiter_map(
            self.bench.mapping, read_latency=HOST_READ_LATENCY, write_latency=HOST_WRITE_LATENCY
        )
        self.rng = np.random.default_rng(seed)

    def load(self, kind: str) -> None:
        """Accesses that the host begins with behind what is queued."""
        n = {"idle": 0, "light": 24, "busy": 2000 * self.what.patience}[kind]
        where = self.rng.integers(0, REGION // LINE_BYTES, n) * LINE_BYTES
        self.bench.host.submit(np.zeros(n, bool), where)

    def change(self, to: Mode, host: str) -> int:
        """Cycles of one change, counted by the arbiter."""
        bench = self.bench
        if host == "busy" and to is Mode.ACCELERATION:
            self.load(host)  # in normal mode, before and behind the request
            bench.run(int(self.rng.integers(1, 3000)))
        bench.write_line(Block.ARBITER, MODE_LINE, {0: int(to is Mode.ACCELERATION)})
        self.load(host)
        for _ in range(8000):
            bench.run(10)
            if bench.mode is to:
                break
        else:
            raise SystemExit(f"{self.what.name}: the mode does not change")
        if host == "busy" and bench.host.idle:
            raise SystemExit(f"{self.what.name}: the host was not busy to the end")
        bench.run(1_000_000, until_idle=True)
        bench.host.completed()
        name = "to_acceleration" if to is Mode.ACCELERATION else "to_normal"
        return bench.field(self.map, f"{name}_last.value")

    def measure(self, times: int) -> list[int]:
        """Cycles of many changes to the mode that counts, at random times."""
        found = []
        back = Mode.NORMAL if self.what.to is Mode.ACCELERATION else Mode.ACCELERATION
        for _ in range(times):
            if self.bench.mode is not back:
                self.change(back, "idle")
            self.bench.kernel(self.what.kernel)
            self.bench.run(int(self.rng.integers(1, LONGEST_STAY)))
            found.append(self.change(self.what.to, self.what.host))
            self.bench.kernel(Kernel.QUIET)
        return found


def hand_over_rows(rows: Rows, times: int) -> list[Row]:
    """Every load."""
    shapes = [
        (density, number, times) for density in DENSITIES for number in range(len(HAND_OVERS))
    ]
    return rows.measure("hand-overs", shapes, hand_over_row)


def hand_over_row(density: str, number: int, times: int, seed: int = 1) -> Row:
    """Distribution of the cycles of a change of mode."""
    what = HAND_OVERS[number]
    cycles = Changer(density, what, seed).measure(-(-times // what.patience))
    bound = "to_acceleration" if what.to is Mode.ACCELERATION else "to_normal"
    if what.to is Mode.NORMAL and what.host != "idle":
        bound = "to_normal_busy_host"
    return {
        "label": f"{MEASURED}, random bursts for the kernel",
        "density": density,
        "to": what.to.name.lower(),
        "load": what.name,
        "times": len(cycles),
        "cycles": sorted(cycles),
        "median": statistics.median(cycles),
        "worst": max(cycles),
        "bound": bounds(density)[bound],
    }


class Simulated:
    """Simulated DIMMs that all update parameters at once.

    Parameters
    ----------
    threads : that simulate.
    devices, channels : DIMMs, and channels of each.
    count : parameters of each channel.
    """

    def __init__(
        self, stack: ExitStack, threads: int, devices: int, channels: int, count: int
    ) -> None:
        self.threads = threads
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.cycles: list[int] = []
        rng = np.random.default_rng(1)
        self.dimms: list[AxdimmDevice] = []
        self.work: list[tuple[AxdimmDevice, int, dict[str, Buffer]]] = []
        os.environ[VARIABLE] = str(threads)
        for _ in range(devices):
            dimm = stack.enter_context(nearstep.open(f"{SIMULATED}&channels={channels}"))
            if not isinstance(dimm, AxdimmDevice):
                raise SystemExit(f"{SIMULATED} is no DIMM")
            self.dimms.append(dimm)
            for channel in range(channels):
                arrays = {name: dimm.alloc(count, channel=channel) for name in ARRAYS}
                for array in arrays.values():
                    array.write(rng.random(count, np.float32))
                self.work.append((dimm, channel, arrays))

    def step(self, number: int) -> None:
        """One step of all, timed."""
        os.environ[VARIABLE] = str(self.threads)
        before = sum(dimm.cycles or 0 for dimm in self.dimms)
        wall, processor = time.perf_counter(), time.process_time()
        if len(self.dimms) > 1:
            graph = Graph()
            for index, (dimm, channel, arrays) in enumerate(self.work):
                run = partial(dimm.adam, **arrays, step=number)
                graph.add("step", f"kernel {index}", action=partial(dimm.accelerated, channel, run))
            execute(graph, Clock([dimm.backend for dimm in self.dimms]))
        else:
            with self.dimms[0].acceleration():
                for each in [
                    dimm.update("adam", arrays, step=number) for dimm, _, arrays in self.work
                ]:
                    each.wait()
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)
        self.cycles.append(sum(dimm.cycles or 0 for dimm in self.dimms) - before)

    def parameters(self) -> list[bytes]:
        """Of each channel."""
        return [arrays["p"].read().tobytes() for _, _, arrays in self.work]


def simulation_rows(count: int, times: int) -> list[dict[str, Any]]:
    """Wall and processor time of steps on one thread and on two, which take turns."""
    rows = []
    shapes = [("channels of a DIMM", 1, 2), ("DIMMs on a clock", 2, 1)]
    for name, devices, channels in track(shapes, "simulation", console=console):
        with ExitStack() as stack:
            pair = [Simulated(stack, n, devices, channels, count) for n in THREADS]
            for number in range(1, times + 1):
                for each in pair:
                    each.step(number)
            one, two = pair
            if one.cycles != two.cycles or one.parameters() != two.parameters():
                raise SystemExit(f"{name}: {one.cycles} and {two.cycles} cycles, or other bits")
        rows.append(
            {
                "label": f"measured ({SIMULATED})",
                "parts": name,
                "parameters_per_channel": count,
                "cycles": one.cycles,
                "threads": THREADS,
                "seconds": [each.wall for each in pair],
                "processor_seconds": [each.processor for each in pair],
                "speedup_of_the_fastest": min(one.wall) / min(two.wall),
                "median_speedup": statistics.median(
                    a / b for a, b in zip(one.wall, two.wall, strict=True)
                ),
            }
        )
    return rows


def cells(name: str, component: wiring.Component) -> dict[str, Any]:
    """Area of a block."""
    found = ultrascale_plus_cells(to_verilog(component, "top"), "top")
    return {"name": name, **ultrascale_plus_area(found), "cells": dict(found)}


class ControllerInChannel(wiring.Component):
    """The controller with what a memory channel uses of it, so that nothing else is counted."""

    def __init__(self) -> None:
        self.controller = DramController(postponed=None)
        used = ("s_axi", "dfi", "i_enable", "o_idle", "i_owed", "i_must")
        super().__init__({name: self.controller.signature.members[name] for name in used})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.controller = controller = self.controller
        wiring.connect(m, wiring.flipped(self.s_axi), controller.s_axi)
        wiring.connect(m, controller.dfi, wiring.flipped(self.dfi))
        m.d.comb += [
            controller.i_enable.eq(self.i_enable),
            controller.i_owed.eq(self.i_owed),
            controller.i_must.eq(self.i_must),
            self.o_idle.eq(controller.o_idle),
        ]
        return m


def area() -> dict[str, Any]:
    """Blocks, and the sums that make a kernel and a channel."""
    makers = {
        "functional unit": lambda: FunctionalUnit(update_rule(UpdateKernelConfig())),
        **{
            f"kernel without units, for {units}": lambda units=units: KernelCore(
                UpdateKernelConfig(functional_units=units), line=True
            )
            for units in UNITS
        },
        "DDR4 controller": ControllerInChannel,
        "memory channel: arbiter, host side, controller": MemoryChannel,
    }
    blocks = {
        name: cells(name, make()) for name, make in track(makers.items(), "area", console=console)
    }
    unit, memory = (
        blocks["functional unit"],
        blocks["memory channel: arbiter, host side, controller"],
    )
    sums = {}
    for units in UNITS:
        shell = blocks[f"kernel without units, for {units}"]
        kernel = {key: shell[key] + units * unit[key] for key in AREA}
        sums[f"kernel with {units} units"] = kernel
        sums[f"channel with {units} units"] = {key: kernel[key] + memory[key] for key in AREA}
    controller = blocks["DDR4 controller"]
    sums["arbiter and host side"] = {key: memory[key] - controller[key] for key in AREA}
    return {
        "label": "measured (synth_xilinx -family xcup; no place and route); sums are added up",
        "blocks": list(blocks.values()),
        "sums": sums,
    }


def show_kernels(results: Row) -> None:
    """Steps, and what fewer postponed refreshes cost."""
    table = Table("part", "units", "channels", "% of peak", "due", "settled", "bound",
                  *results["steps"][0]["lost"], "MP/s")  # fmt: skip
    for row in results["steps"]:
        table.add_row(
            f"{row['density']} {row['width']}",
            *(str(row[key]) for key in ("functional_units", "channels")),
            f"{100 * row['fraction_of_peak']:.2f}",
            str(row["refreshes_due_at_done"]),
            f"{100 * row['fraction_with_due_refreshes']:.2f}",
            f"{100 * row['refresh_bound']:.2f}",
            *(f"{100 * lost:.3f}" for lost in row["lost"].values()),
            f"{row['params_per_s'] / 1e6:.1f}",
        )
    console.print(table)
    table = Table("controller alone", "postponed", "% of peak", "due", "settled")
    for row in results["postponing"]:
        table.add_row(
            row["density"],
            str(row["postponed"]),
            f"{100 * row['fraction_of_peak']:.2f}",
            str(row["refreshes_due_at_done"]),
            f"{100 * row['fraction_with_due_refreshes']:.3f}",
        )
    console.print(table)


def show_host(rows: list[Row]) -> None:
    """Rates of the host in normal mode."""
    table = Table("host", "pattern", "channel, B/cycle", "bare", "as late", "% of bare", "of late")
    for row in rows:
        table.add_row(
            row["scheduler"],
            row["pattern"],
            *(f"{row['bytes_per_cycle'][name]:.3f}" for name in ("channel", "bare", "late")),
            *(f"{100 * row[f'throughput_over_{name}']:.2f}" for name in ("bare", "late")),
        )
    console.print(table)


def show_hand_overs(rows: list[Row]) -> None:
    """Cycles of changes of mode."""
    table = Table("part", "to", "load", "times", "median", "worst", "bound")
    for row in rows:
        keys = ("density", "to", "load", "times", "median", "worst", "bound")
        table.add_row(*(str(row[key]) for key in keys))
    console.print(table)


def show_simulation(rows: list[Row]) -> None:
    """Seconds of simulated DIMMs."""
    table = Table("simulation", "threads", "s, fastest", "processor s", "times as fast", "median")
    for row in rows:
        for place, threads in enumerate(row["threads"]):
            ratios = (row["speedup_of_the_fastest"], row["median_speedup"])
            table.add_row(
                row["parts"],
                str(threads),
                *(f"{min(row[key][place]):.2f}" for key in ("seconds", "processor_seconds")),
                *(f"{each:.2f}" if place else "" for each in ratios),
            )
    console.print(table)


def show_area(found: dict[str, Any]) -> None:
    """Blocks and sums."""
    table = Table("area", *AREA)
    for each in found["blocks"]:
        table.add_row(each["name"], *(f"{each[key]:,}" for key in AREA))
    for name, each in found["sums"].items():
        table.add_row(name, *(f"{each[key]:,}" for key in AREA))
    console.print(table)


def plot_rates(results: dict[str, Any]) -> None:
    """Rates of the paper and of the module, each inside its peak."""
    bars = [
        ("paper, CPU", PAPER["cpu"]["params_per_s"], PAPER["cpu"]["peak_params_per_s"], "0.6"),
        ("paper, AXDIMM, 16 units, 32Gb", *PAPER["kernel"].values(), "0.35"),
    ]
    bars += [
        (
            f"measured, {row['functional_units']} units, {row['density']} {row['width']}",
            row["params_per_s"],
            CHANNELS * PEAK,
            "tab:blue",
        )
        for row in results["steps"]
        if row["channels"] == CHANNELS
    ]
    figure, axes = pyplot.subplots(figsize=(8, 3.4))
    for place, (_, rate, peak, color) in enumerate(bars):
        axes.barh(place, peak / 1e6, color="none", edgecolor="0.3", linestyle=":")
        axes.barh(place, rate / 1e6, color=color)
        text = f"{rate / 1e6:.1f} MP/s, {100 * rate / peak:.1f} % of peak"
        inside = rate > 4e8
        axes.text(
            rate / 1e6 - 8 if inside else peak / 1e6 + 8,
            place,
            text,
            ha="right" if inside else "left",
            va="center",
            color="white" if inside else "black",
        )
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 950)
    axes.set_xlabel("million parameters a second, two channels (dotted: the memory's peak)")
    figure.tight_layout()
    figure.savefig(report.FOLDER / "module.png", dpi=150)


def plot_hand_overs(measured: list[Row]) -> None:
    """Every change of mode that was measured, by load."""
    rows = [row for row in measured if row["density"] == DENSITIES[0]]
    figure, axes = pyplot.subplots(figsize=(8, 4))
    jitter = np.random.default_rng(0)
    for place, row in enumerate(rows):
        cycles = np.array(row["cycles"])
        color = "tab:orange" if row["to"] == "acceleration" else "tab:blue"
        height = place + jitter.uniform(-0.25, 0.25, cycles.size)
        axes.scatter(cycles, height, s=5, color=color, alpha=0.5)
        first = place == 0
        axes.plot([row["median"]] * 2, [place - 0.4, place + 0.4], color="black",
                  label="median" if first else None)  # fmt: skip
        axes.plot(row["bound"], place, "|", color="red", markersize=14, markeredgewidth=2,
                  label="bound" if first else None)  # fmt: skip
    names = [f"to {row['to']}: {row['load']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("cycles of 5 ns from the request to the mode, 8Gb x8")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left", fontsize="small")
    figure.tight_layout()
    figure.savefig(report.FOLDER / "module-hand-over.png", dpi=150)


def main(
    count: Annotated[int, typer.Option(help="Parameters of a step, a channel.")] = 1_000_000,
    lines: Annotated[int, typer.Option(help="Accesses of the host in each pattern.")] = 100_000,
    times: Annotated[int, typer.Option(help="Changes of mode under each load.")] = 200,
    turns: Annotated[int, typer.Option(help="Steps on one thread, and on two.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(SUBJECTS)}; all without it.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run that was cut off.")] = False,
) -> None:
    """Measure, print, and write build/bench/module*.json and the plots; area takes five minutes."""
    wanted = only or [*SUBJECTS]
    if wrong := sorted({*wanted} - {*SUBJECTS}):
        raise typer.BadParameter(f"--only must be of {', '.join(SUBJECTS)}, not {wrong[0]}")
    rows = Rows(resume=resume)
    if "kernels" in wanted:
        kernels = {"paper": PAPER, "peak_params_per_s": PEAK, "steps": steps(rows, count)}
        kernels["postponing"] = postponing(rows, count)
        show_kernels(kernels)
        report.write("module", kernels)
        plot_rates(kernels)
    if "host" in wanted:
        hosts = host_rows(rows, lines)
        show_host(hosts)
        report.write("module_host", {"rows": hosts})
    if "hand-overs" in wanted:
        changes = hand_over_rows(rows, times)
        show_hand_overs(changes)
        report.write("module_hand_overs", {"rows": changes})
        plot_hand_overs(changes)
        for row in changes:
            if row["worst"] > row["bound"]:
                console.print(
                    f"beyond its bound of {row['bound']}: {row['worst']} cycles to {row['to']}, "
                    f"{row['density']}, {row['load']}"
                )
    if "simulation" in wanted:
        simulated = simulation_rows(count, turns)
        show_simulation(simulated)
        report.write("module_simulation", {"rows": simulated})
    if "area" in wanted:
        found = area()
        show_area(found)
        report.write("module_area", found)
    rows.end()


if __name__ == "__main__":
    typer.run(main)
