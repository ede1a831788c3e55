"""Options of emulated AXDIMMs in device names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from nearstep.backends.options import Family, Variant
from nearstep_sim.updater.options import FIXED, Engine, Kernel
from nearstep_sim.verilate.options import Seed, SimulationOptions, Trace, Units
from nearstep_spec.axdimm.config import CHANNELS, DimmConfig
from nearstep_spec.codec import Nested, Option, check_bounds
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map

DDR4 = "ddr4-1600"
"""The memory of a whole DIMM: channels of DDR4, each with a mode arbiter."""

DIMM_FIXED = tuple(name for name in FIXED if name != "address_width")
"""Fixed options; a channel of two ranks can need a larger `address_width` than the default."""


@dataclass(frozen=True, kw_only=True)
class AxdimmOptions:
    """Options of every emulated AXDIMM device, with those of the kernel."""

    kernel: Kernel = field(default_factory=UpdateKernelConfig)
    memory_bytes: Annotated[
        int | None,
        Option(
            meaning="device memory of all channels; host memory is allocated on first use",
            allowed="a multiple of 64 up to 16GiB",
            unset="all that the kernel addresses",
        ),
    ] = None

    def __post_init__(self) -> None:
        adam_kernel_map(self.config())  # raises if rules of a file have names of other registers
        limit = 1 << self.config().address_width
        given = self.memory_bytes
        if given is not None and (not 0 < given <= limit or given % 64):
            raise ValueError(f"memory_bytes must be a multiple of 64 up to {limit}, not {given}")

    @property
    def capacity_bytes(self) -> int:
        """Size of the device memory."""
        return self.memory_bytes or 1 << self.config().address_width

    def config(self) -> UpdateKernelConfig:
        """Configuration of the kernel."""
        return self.kernel


@dataclass(frozen=True, kw_only=True)
class GoldenOptions(AxdimmOptions):
    """Options of `golden:axdimm`."""

    engine: Engine = "cpp"
    in_place: Annotated[
        bool,
        Option(
            meaning="whether large parameters and gradients remain in the host's arrays: the "
            "memory of a DIMM is host memory"
        ),
    ] = True
    channels: Annotated[
        int | None,
        Option(
            meaning="channels of a DIMM, each with a mode arbiter and a part of the memory",
            choices=CHANNELS,
            unset="a kernel alone",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        dimm = self.dimm()
        if dimm is None:
            return
        share, over = divmod(self.capacity_bytes, dimm.channels)
        if over or share % 64 or share > dimm.memory_bytes:
            raise ValueError(
                f"memory_bytes must be channels times a multiple of 64 up to {dimm.memory_bytes}, "
                f"not {self.memory_bytes}"
            )

    @property
    def capacity_bytes(self) -> int:
        dimm = self.dimm()
        if self.memory_bytes is None and dimm is not None:
            return dimm.channels * dimm.memory_bytes
        return super().capacity_bytes

    def dimm(self) -> DimmConfig | None:
        """Configuration of the DIMM, if the device is one.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        if self.channels is None:
            return None
        return DimmConfig(kernel=self.config(), channels=self.channels)


@dataclass(frozen=True, kw_only=True)
class VerilatedOptions(SimulationOptions, AxdimmOptions):
    """Options of `sim:axdimm`. (With `memory=ddr4-1600`: `DimmOptions`.)"""

    top: Annotated[
        Literal["parts", "whole"],
        Option(
            meaning="RTL; parts: the kernel and its units, joined in C++; whole: the Verilog of "
            "`nearstep rtl adam_kernel` as one object, of equal bits and cycles, slower"
        ),
    ] = "parts"

    def __post_init__(self) -> None:
        AxdimmOptions.__post_init__(self)
        SimulationOptions.__post_init__(self)
        _check_whole(self.top, self.fu, self.trace)


def _check_whole(top: str, units: str, trace: str | None) -> None:
    if top != "parts" and units != "rtl":
        raise ValueError(f"fu must be rtl with top={top}, whose units are RTL, not {units}")
    if top != "parts" and trace is not None:
        raise ValueError(
            f"top must be parts with trace={trace}: units of a whole one are not traced"
        )


@dataclass(frozen=True, kw_only=True)
class DimmOptions:
    """Options of `sim:axdimm?memory=ddr4-1600`, with those of the DIMM and its kernels.

    The size of the memory follows from the parts: `nearstep_spec.axdimm.config.DimmConfig`.
    """

    memory: Annotated[
        Literal["ddr4-1600"],
        Option(meaning="channels of DDR4, each with a mode arbiter and a controller"),
    ] = "ddr4-1600"
    dimm: Annotated[DimmConfig, Nested(omit=DIMM_FIXED)] = field(default_factory=DimmConfig)
    scheduler: Annotated[
        Literal["fr-fcfs", "in-order"], Option(meaning="of the host's memory controller")
    ] = "fr-fcfs"
    postpone: Annotated[
        int,
        Option(meaning="refreshes that the host postpones before issuing them", low=1, high=8),
    ] = 1
    top: Annotated[
        Literal["parts", "whole", "channel"],
        Option(
            meaning="RTL; parts: channels and units, joined in C++; whole: the Verilog of "
            "`nearstep rtl axdimm_module` as one object, of equal bits and cycles, slower; "
            "channel: that of `axdimm_channel`, with channels=1"
        ),
    ] = "parts"
    fu: Units = "rtl"
    stall: Annotated[
        float,
        Option(meaning="share of cycles in which the host issues no access", low=0, high=0.95),
    ] = 0.0
    seed: Seed = 1
    trace: Trace = None
    commands: Annotated[
        str | None,
        Option(
            meaning="DRAM commands of each channel, as text: this name with .0, .1 and so on",
            allowed="a file to write",
            unset="none",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        adam_kernel_map(self.dimm.kernel)  # raises if rules of a file have names of other registers
        _check_whole(self.top, self.fu, self.trace)
        if self.top == "channel" and self.dimm.channels != 1:
            raise ValueError(f"channels must be 1 with top=channel, not {self.dimm.channels}")

    def config(self) -> DimmConfig:
        """Configuration of the DIMM."""
        return self.dimm


GOLDEN = Family(
    "golden:axdimm",
    (
        Variant(
            options=GoldenOptions,
            opens="nearstep_sim.axdimm.golden:GoldenAxdimm",
            summary="an AXDIMM or its kernel, without a clock",
        ),
    ),
)
SIM = Family(
    "sim:axdimm",
    (
        Variant(
            options=VerilatedOptions,
            opens="nearstep_sim.axdimm.kernel:VerilatedBackend",
            summary="the RTL of an AXDIMM's kernel, with a memory of one port",
        ),
        Variant(
            options=DimmOptions,
            opens="nearstep_sim.axdimm.dimm:DimmBackend",
            summary="the RTL of an AXDIMM: arbiters, DDR4 controllers, kernels",
            when=("memory", DDR4),
        ),
    ),
)
