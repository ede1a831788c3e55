"""One channel of the module: memory, arbiter and kernel, with or without functional units."""

from amaranth import Elaboratable, Module, ResetInserter
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, host_port
from nearstep_hw.axdimm.memory_channel import MemoryChannel
from nearstep_hw.axi.burst import id_width
from nearstep_hw.dram.dfi import DfiSignature
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.kernel_core import KernelCore, unit_bank
from nearstep_hw.updater.unit_row import UnitMaker, connect_units
from nearstep_spec.axdimm.registers import window_base
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.timing import DramTiming
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig


class AxdimmChannel(wiring.Component):
    """A DDR4 channel that is owned by the host or, at its request, by the update kernel.

    START is refused if an array ends beyond the channel or in its CSR window.

    Flat Verilog ports, k = 0 to 3:

    - `clk`, `rst`.
    - `host__p0__cs_n act_n address[17:0] bg[1:0] ba[1:0]`, `host__p1__...`, `host__wrdata[255:0]
      wrdata_mask[31:0] wrdata_en rddata[255:0] rddata_valid`.
    - `dfi__p<k>__cs_n act_n address bg ba`, `dfi__wrdata[511:0] wrdata_mask[63:0] wrdata_en
      rddata[511:0] rddata_valid`.
    - `fu__...`, `o_kernel_reset`, `o_acceleration`, if the functional units are outside; see
      `UpdateKernel`.

    *Timing*: that of `MemoryChannel` and `KernelCore`.

    Parameters
    ----------
    config : of the kernel, whose beat has to be that of the memory: 16 lanes.
    timing, mapping : of the memory.
    unit : see `UnitMaker`; None: the units are outside.

    Members
    -------
    host : the host's bus.
    dfi : the DRAM.
    fu : the functional units, if they are outside.
    o_kernel_reset : the kernel is reset; units outside must be reset in the same cycle.
    o_acceleration : the kernel owns the DRAM; if the units are outside.

    Attributes
    ----------
    latency : cycles from a read command of the host to its first data.

    Raises
    ------
    ConfigError : the kernel's beat is not that of the memory.

    Ref: AXDIMM paper, section 3.1 and figure 2.
    """

    latency = HOST_READ_LATENCY

    def __init__(
        self,
        config: UpdateKernelConfig,
        timing: DramTiming | None = None,
        mapping: AddressMapping | None = None,
        *,
        unit: UnitMaker | None = FunctionalUnit,
    ) -> None:
        if config.beat_bytes != BEAT_BYTES:
            raise ConfigError(
                f"lanes must be {BEAT_BYTES // 4}, a beat of the memory, not {config.lanes!r}"
            )
        self.config = config
        self.unit = unit
        self.memory = MemoryChannel(
            timing,
            mapping,
            address_width=config.address_width,
            id_width=id_width(len(config.arrays)) + bool(config.compression),
        )
        ranks = self.memory.mapping.geometry.ranks
        outside = {
            "fu": Out(unit_bank(config)),
            "o_kernel_reset": Out(1),
            "o_acceleration": Out(1),
        }
        super().__init__(
            {
                "host": In(host_port(ranks)),
                "dfi": Out(DfiSignature(ranks=ranks)),
                **(outside if unit is None else {}),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.memory = memory = self.memory
        shell = KernelCore(self.config, line=True, memory_bytes=window_base(self.memory.mapping))
        m.submodules.shell = ResetInserter(memory.o_kernel_reset)(shell)
        wiring.connect(m, wiring.flipped(self.host), memory.host)
        wiring.connect(m, memory.dfi, wiring.flipped(self.dfi))
        wiring.connect(m, shell.m_axi, memory.s_axi)
        wiring.connect(m, memory.kernel, shell.csr_line)
        connect_units(m, self, shell, self.unit, reset=memory.o_kernel_reset)
        if self.unit is None:
            m.d.comb += [
                self.o_kernel_reset.eq(memory.o_kernel_reset),
                self.o_acceleration.eq(memory.o_acceleration),
            ]
        return m
