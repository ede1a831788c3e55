"""One channel of the module: memory, arbiter and kernel."""

from amaranth import ClockSignal, Elaboratable, Module, ResetInserter
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.host_front_end import HOST_PORT
from nearstep_hw.axdimm.memory_channel import MemoryChannel
from nearstep_hw.axi.burst import id_width
from nearstep_hw.dram.dfi import DfiSignature
from nearstep_hw.updater.shell import KernelShell, unit_bank
from nearstep_spec.axdimm.registers import window_base
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.timing import DramTiming
from nearstep_spec.updater.config import AdamKernelConfig, ConfigError


class AxdimmChannel(wiring.Component):
    """A DDR4 channel that is the host's until the host gives it to the Adam kernel beside it.

    The functional units are outside. An array of the kernel that ends beyond the channel, or in its
    CSR window, is refused at START.

    *Timing*: that of `MemoryChannel` and `KernelShell`.

    Parameters
    ----------
    config : of the kernel, whose beat has to be that of the memory: 16 lanes.
    timing, mapping : of the memory.

    Members
    -------
    host : the host's bus.
    dfi : the DRAM.
    fu : the functional units.
    o_kernel_reset : the kernel is reset: so must the functional units be, in the same cycle.
    o_acceleration : the kernel owns the DRAM.

    Raises
    ------
    ConfigError : the kernel's beat is not that of the memory.

    Ref: AXDIMM paper, section 3.1 and figure 2.
    """

    def __init__(
        self,
        config: AdamKernelConfig,
        timing: DramTiming | None = None,
        mapping: AddressMapping | None = None,
    ) -> None:
        if config.beat_bytes != BEAT_BYTES:
            raise ConfigError(
                f"lanes must be {BEAT_BYTES // 4}, a beat of the memory, not {config.lanes!r}"
            )
        self.config = config
        self.memory = MemoryChannel(
            timing,
            mapping,
            address_width=config.address_width,
            id_width=id_width(len(config.arrays)) + bool(config.compression),
        )
        super().__init__(
            {
                "host": In(HOST_PORT),
                "dfi": Out(DfiSignature()),
                "fu": Out(unit_bank(config)),
                "o_kernel_reset": Out(1),
                "o_acceleration": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.memory = memory = self.memory
        shell = KernelShell(self.config, line=True, memory_bytes=window_base(self.memory.mapping))
        if self.config.compression:
            m.d.comb += shell.i_pairs_clk.eq(ClockSignal())
        m.submodules.shell = ResetInserter(memory.o_kernel_reset)(shell)
        wiring.connect(m, wiring.flipped(self.host), memory.host)
        wiring.connect(m, memory.dfi, wiring.flipped(self.dfi))
        wiring.connect(m, shell.m_axi, memory.s_axi)
        wiring.connect(m, memory.kernel, shell.csr_line)
        wiring.connect(m, shell.fu, wiring.flipped(self.fu))
        m.d.comb += [
            self.o_kernel_reset.eq(memory.o_kernel_reset),
            self.o_acceleration.eq(memory.o_acceleration),
        ]
        return m
