# amaranth: UnusedElaboratable=no
"""The module: kernels behind the mode arbiter, the host beside them, hand-overs, area."""

import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from amaranth import Module
from amaranth.lib import wiring
from bench_channel import CHANNELS, KERNEL_PARTS
from harness import Kept, Results, console, option, plot, report, script, track
from measuring import CLOCK_HZ, area, arrays, load, timed

import nearstep
from nearstep.axdimm.device import AxdimmDevice
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
from nearstep_sim.axdimm.memory_channel import ChannelBench, Kernel, Mode
from nearstep_sim.axdimm.module_step import run_step
from nearstep_sim.models.dram.bench import BEATS_PER_ELEMENT_BEAT, LANES, Channel, run_kernel
from nearstep_sim.models.dram.host import SCHEDULERS, BareDram, HostConfig, without_a_module
from nearstep_sim.synthesis import AREA
from nearstep_spec.axdimm.hand_over import longest_to_acceleration, longest_to_normal
from nearstep_spec.axdimm.registers import Block, arbiter_map
from nearstep_spec.csr.model import LINE_BYTES
from nearstep_spec.dram.latency import HOST_WRITE_TO_READ
from nearstep_spec.dram.timing import MAX_POSTPONED_REFRESHES, dram_timing
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import update_rule

DENSITIES = ("8Gb", "16Gb")
UNITS = (16, 4)
PEAK = CLOCK_HZ * LANES / BEATS_PER_ELEMENT_BEAT  # parameters/s of a channel
PAPER = {
    "kernel": {"params_per_s": AXDIMM.achieved, "peak_params_per_s": AXDIMM.theoretical},
    "cpu": {"params_per_s": CPU.achieved, "peak_params_per_s": CPU.theoretical},
}
PATTERNS = ("streaming loads", "streaming stores", "copy", "random loads", "random, 1/3 stores")
ALONE = "random loads, one at a time"
MOST_ALONE = 5000  # accesses of that pattern
REGION = 1 << 26  # bytes that the host touches, away from kernel and registers
MODE_LINE = 1
SIMULATED = "sim:axdimm?memory=ddr4-1600"
THREADS = (1, 2)
SUBJECTS = ("kernels", "host", "hand-overs", "simulation", "area")
LONGEST_STAY = 14_000  # cycles in a mode: nine refresh intervals, so that as many may be owed


def papers(results: Results) -> Results:
    names = {"kernel": "32Gb, 16, 2", "cpu": "CPU"}
    rows = []
    for name, (rate, peak) in ((n, tuple(each.values())) for n, each in results["paper"].items()):
        share, of = f"{100 * rate / peak:.2f} %", f"{rate / 1e6:.2f} of {peak / 1e6:.2f}"
        rows.append([f"*paper*, {names[name]}", share, *[""] * 9, of])
    return {"papers": rows}


def step_row(density: str, width: str, units: int, channels: int, count: int) -> Results:
    config = UpdateKernelConfig(functional_units=units)
    step = run_step(config, count=count, channels=channels, density=density, width=width)
    worst = min(step.channels, key=lambda channel: channel.efficiency)
    clocks, bus = PHASES * worst.cycles, worst.bus
    slots = {n: each for n, each in asdict(bus).items() if n not in ("data", "start")}
    slots = {"start_drain": clocks - (bus.total - bus.start), **slots}
    return {"density": density, "width": width, "functional_units": units, "block_kib": 16,
        "channels": len(step.channels), "parameters_per_channel": step.count,
        "cycles": [channel.cycles for channel in step.channels],
        "fraction_of_peak": worst.efficiency,
        "fraction_with_due_refreshes": worst.settled_efficiency,
        "refresh_bound": worst.timing.refresh_bound, "refreshes_due_at_done": worst.debt,
        "lost": {name: each / clocks for name, each in slots.items()},
        "cycles_seen_by_the_host": step.cycles, "params_per_s": step.elements_per_second,
        "words_compared": sum(channel.words for channel in step.channels)}  # fmt: skip


def postponed_row(density: str, postponed: int, count: int) -> Results:
    run = run_kernel(Channel(density=density, postponed=postponed), count=count)
    return {"density": density, "postponed": postponed, "fraction_of_peak": run.efficiency,
        "fraction_with_due_refreshes": run.settled_efficiency,
        "refreshes_due_at_done": run.debt}  # fmt: skip


def rows(
    kept: Kept, what: str, shapes: list[tuple[Any, ...]], row: Callable[..., Results]
) -> list[Results]:
    return [kept.measure(f"{what} {s}", partial(row, *s)) for s in track(shapes, what)]


def kernels(kept: Kept, count: int) -> None:
    shapes = [(*part, units, CHANNELS, count) for part in KERNEL_PARTS for units in UNITS]
    steps = rows(kept, "kernels", [(*KERNEL_PARTS[0], UNITS[0], 1, count), *shapes], step_row)
    several = (MAX_POSTPONED_REFRESHES, POSTPONED)
    alone = [(density, postponed, count) for density in DENSITIES for postponed in several]
    postponing = rows(kept, "controller alone", alone, postponed_row)
    plot_rates(steps)
    report(
        "module", papers, paper=PAPER, peak_params_per_s=PEAK, steps=steps, postponing=postponing
    )


def accesses(pattern: str, n: int, rng: np.random.Generator) -> tuple[Any, Any]:
    index = np.arange(n)
    lines = REGION // LINE_BYTES
    if pattern.startswith("streaming"):
        return np.full(n, pattern.endswith("stores")), index % lines * LINE_BYTES
    if pattern == "copy":  # blocks of a page, from the lower half to the upper
        page = 4096 // LINE_BYTES
        block, inside = np.divmod(index, 2 * page)
        is_store = inside >= page
        line = (block * page + inside % page) % (lines // 2) + is_store * (lines // 2)
        return is_store, line * LINE_BYTES
    is_store = rng.random(n) < (1 / 3 if pattern.endswith("stores") else 0)
    return is_store, rng.integers(0, lines, n) * LINE_BYTES


def host_row(scheduler: str, pattern: str, most: int, seed: int = 1, ranks: int = 1) -> Results:
    """Measure cycles of a host with the channel in normal mode; with DRAM chips alone, which answer
    after their own latencies and turn around as fast as they can; and with DRAM as late as the
    module."""
    n = min(most, MOST_ALONE) if pattern == ALONE else most
    is_store, addresses = accesses(pattern, n, np.random.default_rng(seed))
    data = np.random.default_rng(seed + 1).integers(0, 256, (n, LINE_BYTES), dtype=np.uint8)
    config = HostConfig(
        scheduler=scheduler, read_latency=HOST_READ_LATENCY, write_latency=HOST_WRITE_LATENCY,
        write_to_read=HOST_WRITE_TO_READ, ranks=ranks, channel_ranks=ranks, seed=seed)  # fmt: skip
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
    return {"scheduler": scheduler, "pattern": pattern, "accesses": n, "cycles": took,
        "bytes_per_cycle": {name: LINE_BYTES * n / each for name, each in took.items()},
        "throughput_over_bare": took["bare"] / took["channel"],
        "throughput_over_late": took["late"] / took["channel"]}  # fmt: skip


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
        n = {"idle": 0, "light": 24, "busy": 2000 * self.what.patience}[kind]
        where = self.rng.integers(0, REGION // LINE_BYTES, n) * LINE_BYTES
        self.bench.host.submit(np.zeros(n, bool), where)

    def change(self, to: Mode, host: str) -> int:
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


def hand_over_row(density: str, number: int, times: int, seed: int = 1) -> Results:
    what, timing = HAND_OVERS[number], dram_timing("DDR4-1600", density)
    cycles = Changer(density, what, seed).measure(-(-times // what.patience))
    if what.to is Mode.ACCELERATION:
        bound = longest_to_acceleration(timing)
    else:
        bound = longest_to_normal(timing, restless=what.host != "idle")
    return {"density": density, "to": what.to.name.lower(), "load": what.name, "times": len(cycles),
        "cycles": sorted(cycles), "median": statistics.median(cycles), "worst": max(cycles),
        "shown": f"{max(cycles)}" if max(cycles) <= bound else f"**{max(cycles)}**",
        "bound": bound}  # fmt: skip


class Simulated:
    """Simulated DIMMs that all update `count` parameters of each channel at once."""

    def __init__(
        self, stack: ExitStack, threads: int, devices: int, channels: int, count: int
    ) -> None:
        self.threads = threads
        self.times: list[tuple[float, float]] = []
        self.cycles: list[int] = []
        self.dimms: list[AxdimmDevice] = []
        self.work: list[tuple[AxdimmDevice, int, dict[str, Any]]] = []
        os.environ[VARIABLE] = str(threads)
        for _ in range(devices):
            dimm = stack.enter_context(nearstep.open(f"{SIMULATED}&channels={channels}"))
            if not isinstance(dimm, AxdimmDevice):
                raise SystemExit(f"{SIMULATED} is no DIMM")
            self.dimms.append(dimm)
            for channel in range(channels):
                self.work.append((dimm, channel, load(dimm, arrays(count), channel=channel)))

    def _step(self, number: int) -> None:
        if len(self.dimms) > 1:
            graph = Graph()
            for index, (dimm, channel, buffers) in enumerate(self.work):
                run = partial(dimm.update, "adam", buffers, step=number)
                graph.add("step", f"kernel {index}", action=partial(dimm.accelerated, channel, run))
            execute(graph, Clock([dimm.backend for dimm in self.dimms]))
            return
        with self.dimms[0].acceleration():
            for each in [
                dimm.update("adam", buffers, step=number) for dimm, _, buffers in self.work
            ]:
                each.wait()

    def step(self, number: int) -> None:
        os.environ[VARIABLE] = str(self.threads)
        before = sum(dimm.cycles or 0 for dimm in self.dimms)
        self.times.append(timed(partial(self._step, number)))
        self.cycles.append(sum(dimm.cycles or 0 for dimm in self.dimms) - before)

    def parameters(self) -> list[bytes]:
        return [buffers["p"].read().tobytes() for _, _, buffers in self.work]


def simulation_row(name: str, devices: int, channels: int, count: int, times: int) -> Results:
    with ExitStack() as stack:
        one, two = (Simulated(stack, n, devices, channels, count) for n in THREADS)
        for number in range(1, times + 1):
            one.step(number)
            two.step(number)
        if one.cycles != two.cycles or one.parameters() != two.parameters():
            raise SystemExit(f"{name}: {one.cycles} and {two.cycles} cycles, or other bits")
    seconds, processor = ([[t[n] for t in each.times] for each in (one, two)] for n in (0, 1))
    return {
        "parts": name, "parameters_per_channel": count, "cycles": one.cycles, "threads": THREADS,
        "seconds": seconds, "processor_seconds": processor,
        "least": [min(each) for each in seconds],
        "least_processor": [min(each) for each in processor],
        "speedup_of_the_fastest": min(seconds[0]) / min(seconds[1]),
        "median_speedup": statistics.median(a / b for a, b in zip(*seconds, strict=True)),
    }  # fmt: skip


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


def report_area() -> None:
    channel = "memory channel: arbiter, host side, controller"
    makers: dict[str, Callable[[], wiring.Component]] = {
        "functional unit": lambda: FunctionalUnit(update_rule(UpdateKernelConfig())),
        **{
            f"kernel without units, for {units}": lambda units=units: KernelCore(
                UpdateKernelConfig(functional_units=units), line=True
            )
            for units in UNITS
        },
        "DDR4 controller": ControllerInChannel, channel: MemoryChannel}  # fmt: skip
    blocks = {name: area(make()) for name, make in track(makers.items(), "area")}
    unit, memory, sums = blocks["functional unit"], blocks[channel], {}
    for units in UNITS:
        shell = blocks[f"kernel without units, for {units}"]
        kernel = {key: shell[key] + units * unit[key] for key in AREA}
        sums[f"kernel with {units} units"] = kernel
        sums[f"channel with {units} units"] = {key: kernel[key] + memory[key] for key in AREA}
    controller = blocks["DDR4 controller"]
    sums["arbiter and host side"] = {key: memory[key] - controller[key] for key in AREA}
    report(
        "module_area",
        lambda results: {
            "cells": results["blocks"]
            + [{"name": f"*{name}*", **each} for name, each in results["sums"].items()]
        },
        blocks=[{"name": n, **each} for n, each in blocks.items()], sums=sums)  # fmt: skip


def plot_rates(steps: list[Results]) -> None:
    bars = [
        ("paper, CPU", *PAPER["cpu"].values(), "0.6"),
        ("paper, AXDIMM, 16 units, 32Gb", *PAPER["kernel"].values(), "0.35"),
    ]
    name = "measured, {functional_units} units, {density} {width}"
    bars += [
        (name.format(**row), row["params_per_s"], CHANNELS * PEAK, "tab:blue")
        for row in steps
        if row["channels"] == CHANNELS
    ]
    with plot("module.png", figsize=(8, 3.4), dpi=150) as (_, axes):
        for place, (_, rate, peak, color) in enumerate(bars):
            axes.barh(place, peak / 1e6, color="none", edgecolor="0.3", linestyle=":")
            axes.barh(place, rate / 1e6, color=color)
            text = f"{rate / 1e6:.1f} MP/s, {100 * rate / peak:.1f} % of peak"
            at, side, ink = (
                (rate / 1e6 - 8, "right", "white")
                if rate > 4e8
                else (peak / 1e6 + 8, "left", "black")
            )
            axes.text(at, place, text, ha=side, va="center", color=ink)
        axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, 950)
        axes.set_xlabel("million parameters a second, two channels (dotted: the memory's peak)")


def plot_hand_overs(measured: list[Results]) -> None:
    rows = [row for row in measured if row["density"] == DENSITIES[0]]
    jitter = np.random.default_rng(0)
    with plot("module-hand-over.png", figsize=(8, 4), dpi=150) as (_, axes):
        for place, row in enumerate(rows):
            color = "tab:orange" if row["to"] == "acceleration" else "tab:blue"
            height = place + jitter.uniform(-0.25, 0.25, len(row["cycles"]))
            axes.scatter(row["cycles"], height, s=5, color=color, alpha=0.5)
            median, bound = ("median", "bound") if place == 0 else (None, None)
            axes.plot([row["median"]] * 2, [place - 0.4, place + 0.4], color="black", label=median)
            axes.plot(row["bound"], place, "|", color="red", markersize=14, markeredgewidth=2,
                      label=bound)  # fmt: skip
        names = [f"to {row['to']}: {row['load']}" for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize="small")
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="cycles of 5 ns from the request to the mode, 8Gb x8")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(loc="lower left", fontsize="small")


@script
def main(
    count: Annotated[int, option("Parameters of a step, a channel.")] = 1_000_000,
    lines: Annotated[int, option("Accesses of the host in each pattern.")] = 100_000,
    times: Annotated[int, option("Changes of mode under each load.")] = 200,
    turns: Annotated[int, option("Steps on one thread, and on two.")] = 5,
    only: Annotated[list[str] | None, option(f"Of {', '.join(SUBJECTS)}; all without it.")] = None,
    resume: Annotated[bool, option("Go on with the run that was cut off.")] = False,
) -> None:
    """Measure, print, and write build/bench/module*.json and the plots; area takes five minutes."""
    wanted = only or [*SUBJECTS]
    if wrong := sorted({*wanted} - {*SUBJECTS}):
        raise typer.BadParameter(f"--only must be of {', '.join(SUBJECTS)}, not {wrong[0]}")
    kept = Kept("module", resume=resume)
    if "kernels" in wanted:
        kernels(kept, count)
    if "host" in wanted:
        hosts = [(each, pattern, lines) for each in SCHEDULERS for pattern in (*PATTERNS, ALONE)]
        report(
            "module_host",
            lambda results: {"alone": min(row["accesses"] for row in results["rows"])},
            rows=rows(kept, "host", hosts, host_row),
        )
    if "hand-overs" in wanted:
        loads = [(part, number, times) for part in DENSITIES for number in range(len(HAND_OVERS))]
        changes = rows(kept, "hand-overs", loads, hand_over_row)
        plot_hand_overs(changes)
        report(
            "module_hand_overs",
            lambda results: {
                "beyond": "**Bold**: beyond the bound, which therefore is none for that load."
                if any(row["worst"] > row["bound"] for row in results["rows"])
                else ""
            },
            rows=changes)  # fmt: skip
        for row in changes:
            if row["worst"] > row["bound"]:
                beyond = "beyond its bound of {bound}: {worst} cycles to {to}, {density}, {load}"
                console.print(beyond.format(**row))
    if "simulation" in wanted:
        shapes = [("channels of a DIMM", 1, 2), ("DIMMs on a clock", 2, 1)]
        found = [simulation_row(*each, count, turns) for each in track(shapes, "simulation")]
        report(
            "module_simulation",
            lambda results: {"times": len(results["rows"][0]["cycles"])},
            rows=found,
        )
    if "area" in wanted:
        report_area()
    kept.path.unlink(missing_ok=True)
