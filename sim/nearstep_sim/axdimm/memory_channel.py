"""A memory channel in RTL between the host memory controller model and the DDR4 model."""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.axdimm.arbiter import ModeArbiter
from nearstep_hw.axdimm.host_command import numbered
from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, HOST_WRITE_LATENCY
from nearstep_hw.dram.dfi import HOST_PHASES, PHASES, TPHY_RDLAT, TPHY_WRLAT
from nearstep_hw.verilog import to_verilog
from nearstep_sim.coverage.observed import saw_flags
from nearstep_sim.coverage.points import BANKS, OF_BANK, RANKS, folder_of_points, hit
from nearstep_sim.models.dram.host import HostConfig, HostedDram
from nearstep_sim.models.dram.library import (
    SOURCE,
    CGeometry,
    CMapping,
    CPortConfig,
    CTiming,
)
from nearstep_sim.verilate.abi import load, structure
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.axdimm.registers import Block, window_base
from nearstep_spec.csr.model import BLOCK_BYTES, LINE_BYTES, RegisterMap
from nearstep_spec.dram.address import DEFAULT_INTERLEAVE, DEFAULT_MAPPING, AddressMapping
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.latency import HOST_COMMAND_DELAY, HOST_WRITE_TO_READ
from nearstep_spec.dram.timing import dram_timing

__all__ = ["ChannelBench", "ChannelError", "ChannelStatistics", "Kernel", "Mode"]


class ChannelError(AssertionError):
    """The channel broke a DDR4 rule, or returned wrong data, or data at the wrong time."""


class Mode(IntEnum):
    """Status of the channel."""

    CHANGING = 0
    NORMAL = 1
    ACCELERATION = 2


class Kernel(IntEnum):
    """Behaviour of the kernel's stand-in."""

    QUIET = 0
    BUSY = 1  # random bursts, checked
    DEAF = 2  # takes no answers


@dataclass(frozen=True)
class ChannelStatistics:
    """Counts since the start; reads and writes are the host's, in bursts."""

    cycles: int
    normal_cycles: int
    acceleration_cycles: int
    dram_reads: int
    window_reads: int
    refused_reads: int
    dram_writes: int
    window_writes: int
    refused_writes: int
    torn_reads: int
    kernel_beats_read: int
    kernel_beats_written: int
    kernel_resets: int
    mode_changes: int
    split_columns: int


_CStatistics = structure("axdimm/memory_channel.cpp", "ChannelStatistics")


_CConfig = structure("axdimm/memory_channel.cpp", "ChannelConfig")


@cache
def _library(mapping: AddressMapping) -> ctypes.CDLL:
    geometry = mapping.geometry

    def generate() -> str:
        from nearstep_hw.axdimm.memory_channel import MemoryChannel

        timing = dram_timing("DDR4-1600", geometry.density, geometry.width)
        return to_verilog(MemoryChannel(timing, mapping), "MemoryChannel")

    key = f"memory_channel {geometry.density} {geometry.width} {mapping.order}"
    if geometry.ranks > 1:
        key += f" {geometry.ranks} {mapping.interleave}"
    states = [
        (f"MemoryChannel.dram.{numbered('arbiter', rank)}", "fsm_state")
        for rank in range(geometry.ranks)
    ]
    model = Model(
        top="MemoryChannel",
        verilog=verilog_of(key, generate),
        prefix="VMemoryChannel",
        visible=[
            ("MemoryChannel.dram.switch", "i_pass"),
            *states,
        ],
    )
    source = Path(__file__).with_name("memory_channel.cpp")
    defines = {"NEARSTEP_RANKS": geometry.ranks}
    built = verilate_library("memory_channel", [model], [source], common=[SOURCE], defines=defines)
    return load(built, source, SOURCE)


@cache
def _modes(geometry: DramGeometry) -> dict[int, str]:
    """Return the arbiter's states by their number in the Verilog."""
    arbiter = ModeArbiter(dram_timing(), geometry, shared=geometry.ranks > 1)
    arbiter.elaborate(None)
    return {number: name for name, number in arbiter.fsm.encoding.items()}


class ChannelBench(HostedDram):
    """`MemoryChannel`, Verilated, with a host, a kernel's bus and registers, and its DDR4 ranks.

    Every method that runs raises `ChannelError`.

    Parameters
    ----------
    density, width, ranks, mapping, interleave : of the channel, for host and module.
    seed : of the kernel's traffic and of the host's stalls.
    kernel_chunks : pages of 4 KiB that the kernel uses, from `kernel_base` on.
    host : other options of `HostConfig`.

    Attributes
    ----------
    device : the first rank.
    """

    failure = ChannelError
    kernel_base = 1 << 28

    def __init__(
        self,
        *,
        density: str = "8Gb",
        width: str = "x8",
        ranks: int = 1,
        mapping: str = DEFAULT_MAPPING,
        interleave: int = DEFAULT_INTERLEAVE,
        seed: int = 1,
        kernel_chunks: int = 32,
        **host: object,
    ) -> None:
        config = HostConfig(
            density=density,
            width=width,
            ranks=ranks,
            channel_ranks=ranks,
            mapping=mapping,
            interleave=interleave,
            read_latency=HOST_READ_LATENCY,
            write_latency=HOST_WRITE_LATENCY,
            write_to_read=HOST_WRITE_TO_READ,
            seed=seed,
            **host,  # type: ignore[arg-type]
        )
        timing = dram_timing("DDR4-1600", density, width)
        self.mapping = config.address_mapping
        self.window = window_base(self.mapping)
        c_config = _CConfig(
            host=config._c(),
            timing=CTiming.of(timing),
            geometry=CGeometry.of(config.geometry),
            mapping=CMapping.of(self.mapping),
            port=CPortConfig(PHASES, BEAT_BYTES, TPHY_RDLAT, TPHY_WRLAT),
            window_beat=self.window // BEAT_BYTES,
            kernel_beat=self.kernel_base // BEAT_BYTES,
            kernel_chunks=kernel_chunks,
            seed=seed,
        )
        library = _library(self.mapping)
        super().__init__(
            library, library.channel_new(ctypes.byref(c_config)), config, timing, ranks
        )
        self.device = self.devices[0]
        early = config.refresh_offset * PHASES // HOST_PHASES
        for device in self.devices:
            device.refresh_offset(early - HOST_COMMAND_DELAY * PHASES)

    def kernel(self, what: Kernel) -> None:
        """Set the kernel's behaviour from now on."""
        self._library.channel_kernel(self._pointer, what)

    def run(self, cycles: int, *, until_idle: bool = False) -> int:
        try:
            return super().run(cycles, until_idle=until_idle)
        finally:
            if folder_of_points():
                self._cover()

    def _cover(self) -> None:
        """Sample the commands of the host so far."""
        found = np.zeros((16, 3, 16), np.uint64)
        self._library.channel_commands(self._pointer, found.ctypes.data)
        modes = _modes(self.mapping.geometry)
        for state, bank, number in np.argwhere(found):
            if number in tuple(Command)[Command.ACT :]:  # neither NOP nor the reserved code
                command, mode = Command(number), modes[state]
                hit("axdimm.command_mode", f"{command.name} in {mode}")
                if mode in ("KERNEL", "LEAVE"):
                    names = BANKS if command in OF_BANK else RANKS
                    hit("axdimm.command_bank", f"{command.name}, {names[bank]}")

    @property
    def kernel_idle(self) -> bool:
        """Return whether no burst of the kernel is waiting or in flight."""
        return bool(self._library.channel_kernel_idle(self._pointer))

    @property
    def mode(self) -> Mode:
        return Mode(self._library.channel_mode(self._pointer))

    @property
    def statistics(self) -> ChannelStatistics:
        out = _CStatistics()
        self._library.channel_statistics(self._pointer, ctypes.byref(out))
        names = ChannelStatistics.__annotations__
        return ChannelStatistics(**{name: int(getattr(out, name)) for name in names})

    def line_address(self, block: Block, line: int) -> int:
        """Byte address, for the host, of a line of registers."""
        return self.window + block * BLOCK_BYTES + line * LINE_BYTES

    def kernel_line(self, number: int) -> NDArray[np.uint8]:
        """Return a line of the kernel's registers, which are plain memory in this model."""
        out = np.empty(LINE_BYTES, np.uint8)
        self._library.channel_kernel_line(self._pointer, number, out.ctypes.data)
        return out

    def write_line(self, block: Block, line: int, words: dict[int, int]) -> None:
        """Queue a store of a whole line: words by number, the others 0."""
        data = np.zeros(LINE_BYTES // 4, np.uint32)
        for index, word in words.items():
            data[index] = word
        self.host.store(self.line_address(block, line), data.tobytes())

    def read_line(self, block: Block, line: int, *, most: int = 20_000) -> NDArray[np.uint32]:
        """Load a line, after all queued accesses. Other completions of the host are lost."""
        self.run(most, until_idle=True)
        self.host.completed()
        self.host.load(self.line_address(block, line))
        self.run(most, until_idle=True)
        loads = self.host.completed()
        if len(loads.data) != 1:
            raise ChannelError(f"expected one load to complete, found {len(loads.data)}")
        return loads.data[0].view(np.uint32)

    def field(self, register_map: RegisterMap, path: str, *, block: Block = Block.ARBITER) -> int:
        """Value of a `register.field`, read through the window."""
        register, field = register_map.lookup(path)
        line, offset = divmod(register.offset, LINE_BYTES)
        words = self.read_line(block, line)
        raw = int.from_bytes(words.tobytes()[offset : offset + register.width // 8], "little")
        if (block, register.name) == (Block.ARBITER, "status"):
            saw_flags(register, raw)
        return (raw & field.mask) >> field.lsb
