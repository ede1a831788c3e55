"""The module in RTL between the host memory controller model and the DDR4 ranks."""

import ctypes
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from amaranth.lib import wiring
from numpy.typing import NDArray

from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, HOST_WRITE_LATENCY
from nearstep_hw.axdimm.module import CHANNELS, AxdimmModule
from nearstep_hw.dram.dfi import PHASES, TPHY_RDLAT, TPHY_WRLAT
from nearstep_hw.updater.unit_instance import UNIT_MODULE, UnitInstance
from nearstep_hw.verilog import to_verilog
from nearstep_sim.models.dram.device import Ddr4Device
from nearstep_sim.models.dram.host import HostConfig, HostController, HostedDram
from nearstep_sim.models.dram.library import SOURCE, CGeometry, CPortConfig, CTiming
from nearstep_sim.verilate.abi import load, structure
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.axdimm.registers import channel_maps
from nearstep_spec.csr.model import LINE_BYTES, WORD_BYTES, RegisterMap
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.timing import dram_timing
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import update_rule

__all__ = ["ModuleBench", "ModuleDriver", "ModuleError"]


class ModuleError(AssertionError):
    """The module broke a DDR4 rule, or gave the host data at the wrong time."""


_CConfig = structure("axdimm/module.cpp", "ModuleConfig")


@cache
def _library(
    config: UpdateKernelConfig,
    unit: Callable[[Rule], wiring.Component],
    channels: int,
    density: str,
    width: str,
) -> ctypes.CDLL:
    def generate() -> str:
        module = AxdimmModule(
            config,
            dram_timing("DDR4-1600", density, width),
            AddressMapping(DramGeometry(density, width)),
            channels=channels,
            unit=UnitInstance,
        )
        return to_verilog(module, "AxdimmModule", {UNIT_MODULE: unit(update_rule(config))})

    rtl = verilog_of(
        f"axdimm_module {channels} {density} {width} {unit.__qualname__} {config!r}",
        generate,
        sources=[Path(inspect.getfile(unit))],
    )
    model = Model(top="AxdimmModule", verilog=rtl, prefix="VAxdimmModule")
    source = Path(__file__).with_name("module.cpp")
    built = verilate_library(
        "axdimm_module",
        [model],
        [source],
        common=[SOURCE],
        cxxflags=["-O1"],  # runs are short: compiling in half the time saves more
        defines={"NEARSTEP_CHANNELS": channels},
    )
    return load(built, source, SOURCE)


class ModuleDriver(ABC):
    """A driver of a module's channels: memory and registers through the host.

    Subclasses implement `run` and set the attributes.

    Attributes
    ----------
    host : host with a rank for each channel.
    capacity : bytes of a channel.
    maps : register maps of a channel, see `channel_maps`.
    devices : the ranks.
    """

    host: HostController
    capacity: int
    maps: dict[str, tuple[int, RegisterMap]]
    devices: tuple[Ddr4Device, ...]

    @abstractmethod
    def run(self, cycles: int, *, until_idle: bool = False) -> int:
        """Run fabric cycles, or until the host is idle; return the number of cycles."""

    def store(self, channel: int, address: int, data: NDArray[np.uint8]) -> None:
        """Store whole lines of a channel through the host, and wait until they are issued."""
        lines = data.reshape(-1, LINE_BYTES)
        where = channel * self.capacity + address + np.arange(len(lines)) * LINE_BYTES
        self.host.submit(np.ones(len(lines), bool), where, data=lines)
        self.host.fence()
        self._finish()

    def load(self, channel: int, address: int, size: int) -> NDArray[np.uint8]:
        """Load whole lines of a channel through the host. Other completions are lost."""
        self._finish()
        self.host.completed()
        n = size // LINE_BYTES
        where = channel * self.capacity + address + np.arange(n) * LINE_BYTES
        self.host.submit(np.zeros(n, bool), where, tags=np.arange(n))
        self._finish()
        loads = self.host.completed(n)
        out = np.empty((n, LINE_BYTES), np.uint8)
        out[loads.tags] = loads.data
        return out.reshape(-1)

    def get(self, channel: int, path: str) -> int:
        """Value of `block.register.field`, read through the window."""
        name, _, inside = path.partition(".")
        base, register_map = self.maps[name]
        register, field = register_map.lookup(inside)
        line, offset = divmod(register.offset, LINE_BYTES)
        data = self.load(channel, base + line * LINE_BYTES, LINE_BYTES)
        raw = int.from_bytes(data[offset : offset + register.width // 8].tobytes(), "little")
        return (raw & field.mask) >> field.lsb

    def set(self, channel: int, values: dict[str, int]) -> None:
        """Write fields `block.register.field` of one line, keeping the line's other words."""
        line_address = None
        for path, value in values.items():
            name, _, inside = path.partition(".")
            base, register_map = self.maps[name]
            register, field = register_map.lookup(inside)
            line, offset = divmod(register.offset, LINE_BYTES)
            at = base + line * LINE_BYTES
            if line_address is None:
                line_address, words = at, self.load(channel, at, LINE_BYTES).view(np.uint32)
            if at != line_address:
                raise ValueError(f"{path} is not on the line of the other fields")
            image = value << field.lsb
            for index in range(register.words):
                place = offset // WORD_BYTES + index
                mask = field.mask >> 32 * index & 0xFFFF_FFFF
                words[place] = (int(words[place]) & ~mask) | (image >> 32 * index & mask)
        if line_address is not None:
            self.store(channel, line_address, words.view(np.uint8))

    def wait(self, channel: int, path: str, value: int, most: int) -> int:
        """Poll a field until it has a value; return the cycles that passed."""
        start = self.host.cycle
        while (found := self.get(channel, path)) != value:
            if self.host.cycle - start > most:
                raise ModuleError(f"{path} of channel {channel}: expected {value}, found {found}")
            self.run(20)
        return self.host.cycle - start

    def _finish(self) -> None:
        self.run(1_000_000, until_idle=True)
        if not self.host.idle:
            raise ModuleError("the host is not idle after 1,000,000 cycles")


class ModuleBench(HostedDram, ModuleDriver):
    """`AxdimmModule`, Verilated, behind a host whose ranks are its channels.

    Every method that runs raises `ModuleError`.

    Parameters
    ----------
    config : of every kernel.
    unit : functional unit; a separate module in the Verilog.
    channels : of the module: 1, 2 or 4.
    density, width : of the memory, for host and module.
    host : other options of `HostConfig`.
    """

    failure = ModuleError

    def __init__(
        self,
        config: UpdateKernelConfig,
        unit: Callable[[Rule], wiring.Component],
        *,
        channels: int = CHANNELS,
        density: str = "8Gb",
        width: str = "x8",
        **host: object,
    ) -> None:
        host_config = HostConfig(
            density=density,
            width=width,
            ranks=channels,
            read_latency=HOST_READ_LATENCY,
            write_latency=HOST_WRITE_LATENCY,
            **host,  # type: ignore[arg-type]
        )
        timing = dram_timing("DDR4-1600", density, width)
        self.mapping = host_config.address_mapping
        self.capacity = host_config.geometry.capacity_bytes
        self.maps = channel_maps(
            config,
            self.mapping,
            read_latency=HOST_READ_LATENCY,
            write_latency=HOST_WRITE_LATENCY,
        )
        c_config = _CConfig(
            host=host_config._c(),
            timing=CTiming.of(timing),
            geometry=CGeometry.of(host_config.geometry),
            port=CPortConfig(PHASES, BEAT_BYTES, TPHY_RDLAT, TPHY_WRLAT),
        )
        library = _library(config, unit, channels, density, width)
        pointer = library.module_new(ctypes.byref(c_config))
        super().__init__(library, pointer, host_config, timing, channels)
