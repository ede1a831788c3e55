"""One Adam step on every channel of the module, in cycles of its RTL."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from amaranth.lib import wiring
from numpy.typing import NDArray

from nearstep_hw.dram.dfi import PHASES
from nearstep_sim.axdimm.module import ModuleBench, ModuleError
from nearstep_sim.models.dram.bench import (
    ARRAYS,
    BEATS_PER_ELEMENT_BEAT,
    LANES,
    Channel,
    bases_of,
)
from nearstep_sim.models.dram.device import BusClocks
from nearstep_sim.models.dram.kernel_on_channel import StandInUnit
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.timing import DramTiming, dram_timing
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import UpdateKernelConfig

__all__ = ["ChannelStep", "ModuleStep", "run_step"]

POLL = 16  # cycles between two polls of the DRAM's counters
TAIL = 4096  # cycles before the expected end at which polling begins

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class ChannelStep:
    """Cost of a step on one channel.

    Attributes
    ----------
    cycles : from START to done, counted by the kernel.
    needed_beats : beats that the step must transfer: each array once.
    read_beats, write_beats : beats on the AXI port, counted by the kernel.
    bus : clocks of the DRAM's data bus from just before START to the last column command.
    commands : to the DRAM in that time.
    debt : refreshes due when the last write was issued, sampled within `POLL` cycles.
    words : of memory that were compared.
    """

    timing: DramTiming
    cycles: int
    needed_beats: int
    read_beats: int
    write_beats: int
    bus: BusClocks
    commands: dict[Command, int]
    debt: int
    words: int

    @property
    def efficiency(self) -> float:
        """Beats needed over all cycles from START to done: a fraction of the peak."""
        return self.needed_beats / self.cycles

    @property
    def settled_efficiency(self) -> float:
        """`efficiency` if the refreshes still due at the end had been issued before the end."""
        late = self.debt * self.timing.t_rfc / PHASES
        return self.needed_beats / (self.cycles + late)


@dataclass(frozen=True)
class ModuleStep:
    """Cost of a step on all channels in parallel.

    `cycles` are counted by the host, from before the first START to the poll that finds the last
    channel done.
    """

    count: int
    cycles: int
    channels: tuple[ChannelStep, ...]

    @property
    def elements_per_second(self) -> float:
        """Parameters updated in a second by all channels, by the clock of the module."""
        timing = self.channels[0].timing
        return self.count * len(self.channels) / (self.cycles * PHASES * timing.tck_ps * 1e-12)


def run_step(
    config: UpdateKernelConfig,
    *,
    count: int = 1_000_000,
    channels: int = 2,
    density: str = "8Gb",
    width: str = "x8",
    unit: Callable[[Rule], wiring.Component] = StandInUnit,
    seed: int = 0,
) -> ModuleStep:
    """Run a step of `count` parameters on each channel, started by the host through the registers.

    The host switches each channel to acceleration mode, starts the kernels one after the other and
    polls them. Memory is filled and compared directly, not through the pins, and in full.

    Parameters
    ----------
    config : of the kernels.
    unit : a stand-in that returns p ^ g, m + 1, v - 1.

    Raises
    ------
    ModuleError : a rule of DDR4 was broken, memory differs, or a kernel does not end.
    """
    bench = ModuleBench(config, unit, channels=channels, density=density, width=width)
    timing = dram_timing("DDR4-1600", density, width)
    bases = dict(zip(ARRAYS, bases_of(Channel(density=density, width=width), count), strict=True))
    everything = range(channels)
    contents = [_fill(bench, number, bases, count, seed + number) for number in everything]
    for number in everything:
        _configure(bench, number, bases, count)
        bench.set(number, {"arbiter.mode.acceleration": 1})
        bench.wait(number, "arbiter.status.acceleration", 1, 20_000)
    before = [device.counts for device in bench.devices]
    start = bench.host.cycle
    for number in everything:
        bench.devices[number].restart_bus_clocks(PHASES * bench.host.cycle)
        bench.set(number, {"adam.start.go": 1})
    beats = -(-count // LANES)
    debts = _run_to_the_last_write(bench, before, 3 * beats, 7 * beats)
    for number in everything:
        bench.wait(number, "adam.status.done", 1, 20_000)
    cycles = bench.host.cycle - start
    buses = [device.bus_clocks for device in bench.devices]
    after = [device.counts for device in bench.devices]
    steps = [
        ChannelStep(
            timing=timing,
            needed_beats=BEATS_PER_ELEMENT_BEAT * beats,
            **{
                name: bench.get(number, f"adam.{name}.value")
                for name in ("cycles", "read_beats", "write_beats")
            },
            bus=buses[number],
            commands={kind: after[number][kind] - before[number][kind] for kind in Command},
            debt=debts[number],
            words=_compare(bench, number, bases, contents[number], count),
        )
        for number in everything
    ]
    return ModuleStep(count, cycles, tuple(steps))


def _fill(
    bench: ModuleBench, channel: int, bases: dict[str, int], count: int, seed: int
) -> dict[str, Words]:
    rng = np.random.default_rng(seed)
    size = (-(-count // LANES) + 8) * LANES  # a guard of eight beats
    contents = {name: rng.integers(0, 1 << 32, size, dtype=np.uint32) for name in bases}
    for name, words in contents.items():
        bench.devices[channel].write(bench.mapping, bases[name], words)
    return contents


def _compare(
    bench: ModuleBench,
    channel: int,
    bases: dict[str, int],
    contents: dict[str, Words],
    count: int,
) -> int:
    expected = {name: words.copy() for name, words in contents.items()}
    expected["p"][:count] ^= contents["g"][:count]
    expected["m"][:count] += 1
    expected["v"][:count] -= 1
    for name, words in expected.items():
        found = bench.devices[channel].read(bench.mapping, bases[name], words.nbytes)
        different = np.flatnonzero(found.view(np.uint32) != words)
        if different.size:
            raise ModuleError(f"{name} of channel {channel} differs at element {different[0]}")
    return sum(words.size for words in expected.values())


def _configure(bench: ModuleBench, channel: int, bases: dict[str, int], count: int) -> None:
    addresses = {f"adam.{name}_address.value": base for name, base in bases.items()}
    bench.set(channel, {**addresses, "adam.count.value": count})
    bench.set(
        channel,
        {
            "adam.window0_base.value": 0,
            "adam.window0_limit.value": bench.maps["arbiter"][0],
            **{f"adam.window0_permissions.{bit}": 1 for bit in ("read", "write", "valid")},
        },
    )


def _run_to_the_last_write(
    bench: ModuleBench, before: list[dict[Command, int]], writes: int, beats: int
) -> list[int]:
    """Run until every channel has issued its last write; return the refreshes due then."""
    bench.run(max(0, beats - TAIL))
    debts: list[int | None] = [None] * len(before)
    for _ in range(20 * beats // POLL + TAIL):
        bench.run(POLL)
        for number, device in enumerate(bench.devices):
            if debts[number] is None:
                given = device.counts[Command.WR] - before[number][Command.WR]
                if given >= writes:
                    debts[number] = device.refresh_debt(PHASES * bench.host.cycle)
        if None not in debts:
            return [debt for debt in debts if debt is not None]
    raise ModuleError("a kernel does not end")
