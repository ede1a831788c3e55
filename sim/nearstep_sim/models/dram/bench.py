"""Cycles of the Adam kernel on the DDR4 controller, counted in RTL against the rank model."""

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from nearstep_hw.dram.column_stage import Slot
from nearstep_hw.dram.controller import DramController
from nearstep_hw.dram.dfi import PHASES, TPHY_RDLAT, TPHY_WRLAT
from nearstep_hw.verilog import to_verilog
from nearstep_sim.models.dram.kernel_on_channel import LATENCY, KernelOnChannel
from nearstep_sim.models.dram.library import CGeometry, CMapping, CPortConfig, CTiming
from nearstep_sim.models.dram.trace import header
from nearstep_sim.verilate.abi import load, structure, values
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.dram.address import DEFAULT_INTERLEAVE, DEFAULT_MAPPING, AddressMapping
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.timing import DramTiming, dram_timing
from nearstep_spec.errors import NearstepError
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map

ELEMENT_BYTES = 4
LANES = BEAT_BYTES // ELEMENT_BYTES
ARRAYS = ("p", "g", "m", "v")
BEATS_PER_ELEMENT_BEAT = 7  # four arrays read, three written
FOLDER = Path(__file__).parent
ADDRESS_BITS = 34  # of the kernel's port, at least: 16 GiB
BURSTS_AHEAD = UpdateKernelConfig().bursts_ahead
DEBT_BITS = 4  # of a rank in `i_debt`
_MESSAGE_BYTES = 512


class ChannelBenchError(NearstepError, RuntimeError):
    """A rule of DDR4 was violated, data differ, or the run did not end; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A channel and its controller.

    Parameters
    ----------
    density, width, ranks : see `dram_timing`, `DramGeometry`.
    mapping, interleave : see `AddressMapping`.
    batch_beats, postponed : see `DramController`.
    """

    density: str = "8Gb"
    width: str = "x8"
    ranks: int = 1
    mapping: str = DEFAULT_MAPPING
    interleave: int = DEFAULT_INTERLEAVE
    batch_beats: int = 4096
    postponed: int = 8

    @cached_property
    def timing(self) -> DramTiming:
        return dram_timing("DDR4-1600", self.density, self.width)

    @cached_property
    def addresses(self) -> AddressMapping:
        geometry = DramGeometry(self.density, self.width, self.ranks)
        return AddressMapping(geometry, self.mapping, self.interleave)

    @property
    def address_bits(self) -> int:
        """Bits of the kernel's port; with two ranks there are addresses outside the channel."""
        return max(ADDRESS_BITS, self.addresses.geometry.address_bits + (self.ranks > 1))

    def controller(self) -> DramController:
        """The controller, to be elaborated once."""
        return DramController(
            self.timing,
            self.addresses,
            address_width=self.address_bits,
            batch_beats=self.batch_beats,
            postponed=self.postponed,
        )


@dataclass(frozen=True)
class ChannelRun:
    """Cost of one run.

    `slots` counts column slots by use between the first and the last column command, `start` and
    `drain` the cycles before and after; together they are `cycles`, from START to done. `commands`
    counts commands by kind; `debts` are the refreshes due at done, of each rank, `checks` is the
    number of beats compared.
    """

    channel: Channel
    count: int
    cycles: int
    start: int
    drain: int
    slots: dict[Slot, int]
    commands: dict[Command, int] = field(repr=False)
    checks: int
    debts: tuple[int, ...]

    @property
    def debt(self) -> int:
        """Refreshes due at done, of all ranks."""
        return sum(self.debts)

    @property
    def beats(self) -> int:
        """Beats that the step must transfer."""
        return BEATS_PER_ELEMENT_BEAT * -(-self.count // LANES)

    @property
    def efficiency(self) -> float:
        """Data beats over all cycles from START to done: a fraction of the peak."""
        return self.beats / self.cycles

    @property
    def settled_efficiency(self) -> float:
        """`efficiency` if the refreshes still due at done had been issued before, one after the
        other, also those of different ranks.
        """
        return self.beats / (self.cycles + self.debt * self.channel.timing.t_rfc / PHASES)

    @property
    def elements_per_second(self) -> float:
        """Parameters updated in a second, by the clock of the channel."""
        cycle_s = PHASES * self.channel.timing.tck_ps * 1e-12
        return self.count / (self.cycles * cycle_s)


@dataclass(frozen=True)
class RandomRun:
    """Results of random traffic.

    `longest_hand_over` is in cycles from the fall of `i_enable` to `o_idle`.
    """

    cycles: int
    read_beats: int
    write_beats: int
    refused: int
    hand_overs: int
    longest_hand_over: int
    highest_debt: int
    calibrations: int


_CChannelConfig = structure("models/dram/channel_bench.hpp", "ChannelConfig")
_CTrafficConfig = structure("models/dram/traffic_bench.cpp", "TrafficConfig")
_CChannelResult = structure(
    "models/dram/channel_bench.hpp", "ChannelResult", sizes={"kKinds": len(Command) + 1}
)
_CRandomConfig = structure("models/dram/random_bench.cpp", "RandomConfig")
_CRandomResult = structure("models/dram/random_bench.cpp", "RandomResult")
_CWrite = structure("models/dram/kernel_bench.cpp", "Write")


def controller_library(channel: Channel) -> ctypes.CDLL:
    """The Verilated controller with its C++ benches; cached."""
    verilog = verilog_of(
        f"dram controller {channel!r}", lambda: to_verilog(channel.controller(), "dram_controller")
    )
    model = Model(top="dram_controller", verilog=verilog, prefix="VDramController")
    sources = [FOLDER / "traffic_bench.cpp", FOLDER / "random_bench.cpp"]
    return load(verilate_library("dram_controller", [model], sources), *sources)


def bases_of(channel: Channel, count: int, skew_bytes: int = 0) -> tuple[int, ...]:
    """Addresses of p, g, m and v: all in the same banks, but for `skew_bytes` from one to the next.

    Raises
    ------
    ValueError : the arrays do not fit.
    """
    size = -(-count // LANES) * BEAT_BYTES + 64 * BEAT_BYTES
    stride = max(1 << 20, 1 << (size - 1).bit_length()) + skew_bytes
    if len(ARRAYS) * stride > channel.addresses.geometry.capacity_bytes:
        raise ValueError(f"{count} elements do not fit in four arrays of the channel")
    return tuple(index * stride for index in range(len(ARRAYS)))


def run_traffic(
    channel: Channel,
    *,
    count: int = 1_000_000,
    block_bytes: int = 16384,
    functional_units: int = LANES,
    bursts_ahead: int = BURSTS_AHEAD,
    bases: Sequence[int] | None = None,
    debt: int = 0,
    seed: int = 0,
    commands: str | PathLike[str] | None = None,
) -> ChannelRun:
    """Run a step of the traffic model on the RTL of the controller.

    Parameters
    ----------
    channel : with its controller.
    count : parameters.
    block_bytes, functional_units, bursts_ahead : of the kernel.
    bases : byte addresses of p, g, m and v.
    debt : refreshes due at the start, to each rank.
    commands : a file for the DRAM commands; see docs/dram-traces.md.

    Raises
    ------
    ChannelBenchError : a violation, wrong data, or no end.
    """
    kernel = _kernel(channel, block_bytes, functional_units, bursts_ahead)
    config = _CTrafficConfig(
        _channel_config(channel, count, bases, debt, seed, commands),
        kernel.block_beats,
        kernel.burst_beats,
        kernel.cycles_per_beat,
        LATENCY,
        kernel.bursts_ahead,
    )
    result = _run(controller_library(channel).traffic_bench, config, _CChannelResult())
    return _channel_run(channel, count, result)


def run_random(
    channel: Channel,
    *,
    seed: int,
    bursts: int,
    pages: int = 48,
    stall: float = 0.0,
    refused: float = 0.0,
    hand_over: float = 0.0,
    longest_gap: int = 1,
    rank: Channel | None = None,
    commands: str | PathLike[str] | None = None,
) -> RandomRun:
    """Run random bursts on the RTL of the controller, and check every byte.

    Parameters
    ----------
    bursts : reads and writes in all.
    pages : of 4 KiB that they touch.
    stall : chance of a stalled cycle on each AXI channel.
    refused : chance of a burst that cannot be served.
    hand_over : chance, in a cycle, that the channel is requested back.
    longest_gap : most cycles without an owner.
    rank : part and mapping of the checker, if different from the controller's.
    commands : a file for the DRAM commands.

    Raises
    ------
    ChannelBenchError : a violation, wrong data or responses, or no progress.
    """
    chances = (round(65536 * chance) for chance in (stall, refused, hand_over))
    config = _CRandomConfig(
        _channel_config(rank or channel, 0, (0, 0, 0, 0), 0, seed, commands),
        bursts,
        channel.address_bits,
        pages,
        *chances,
        longest_gap,
    )
    bench = controller_library(channel).random_bench
    return RandomRun(**values(_run(bench, config, _CRandomResult(), what=f"seed {seed}: ")))


def run_kernel(
    channel: Channel,
    *,
    count: int = 1_000_000,
    block_bytes: int = 16384,
    functional_units: int = LANES,
    bursts_ahead: int = BURSTS_AHEAD,
    bases: Sequence[int] | None = None,
    debt: int = 0,
    seed: int = 0,
    commands: str | PathLike[str] | None = None,
) -> ChannelRun:
    """Run a step of the kernel, in RTL but for the arithmetic; parameters as of `run_traffic`."""
    kernel = _kernel(channel, block_bytes, functional_units, bursts_ahead)
    verilog = verilog_of(
        f"kernel on channel {channel!r} {kernel!r}",
        lambda: to_verilog(KernelOnChannel(kernel, channel.controller()), "kernel_on_channel"),
    )
    model = Model(top="kernel_on_channel", verilog=verilog, prefix="VKernelOnChannel")
    source = FOLDER / "kernel_bench.cpp"
    library = load(verilate_library("kernel_bench", [model], [source]), source)
    config = _channel_config(channel, count, bases, debt, seed, commands)
    registers = adam_kernel_map(kernel)
    wanted = {
        **{f"{name}_address": base for name, base in zip(ARRAYS, config.base, strict=True)},
        "count": count,
        "window0_base": 0,
        "window0_limit": channel.addresses.geometry.capacity_bytes,
        "window0_permissions": 0b111,
        "start": 1,
    }
    writes = [
        (registers[name].offset + 4 * word, value >> 32 * word & 0xFFFFFFFF)
        for name, value in wanted.items()
        for word in range(registers[name].words)
    ]
    given = (_CWrite * len(writes))(*writes), len(writes), registers["status"].offset
    result = _run(library.kernel_bench, config, _CChannelResult(), *given)
    return _channel_run(channel, count, result)


def _run(
    bench: Callable[..., int],
    config: ctypes.Structure,
    result: ctypes.Structure,
    *given: object,
    what: str = "",
) -> Any:
    """The result, filled by a bench; `given` are its parameters behind the configuration."""
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    parts = ctypes.byref(config), *given, ctypes.byref(result)
    if bench(*parts, message, _MESSAGE_BYTES):
        raise ChannelBenchError(what + message.value.decode())
    return result


def _kernel(
    channel: Channel, block_bytes: int, functional_units: int, bursts_ahead: int
) -> UpdateKernelConfig:
    return UpdateKernelConfig(
        block_bytes=block_bytes,
        functional_units=functional_units,
        bursts_ahead=bursts_ahead,
        address_width=channel.address_bits,
    )


def _channel_config(
    channel: Channel,
    count: int,
    bases: Sequence[int] | None,
    debt: int,
    seed: int,
    commands: str | PathLike[str] | None,
) -> _CChannelConfig:
    chosen = bases_of(channel, count) if bases is None else bases
    return _CChannelConfig(
        CTiming.of(channel.timing),
        CGeometry.of(channel.addresses.geometry),
        CMapping.of(channel.addresses),
        CPortConfig(PHASES, BEAT_BYTES, TPHY_RDLAT, TPHY_WRLAT),
        sum(debt << DEBT_BITS * rank for rank in range(channel.ranks)),
        0,
        (ctypes.c_uint64 * len(ARRAYS))(*chosen),
        count,
        seed,
        None if commands is None else os.fsencode(commands),
        header(channel.timing).encode(),
    )


def _channel_run(channel: Channel, count: int, result: _CChannelResult) -> ChannelRun:
    return ChannelRun(
        channel,
        count,
        result.cycles,
        result.start,
        result.drain,
        {slot: result.slots[slot.value] for slot in Slot},
        {command: result.commands[command] for command in Command},
        result.checks,
        tuple(result.debt[: channel.ranks]),
    )
