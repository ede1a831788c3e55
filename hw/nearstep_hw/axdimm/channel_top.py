"""One channel of the module with its functional units."""

from collections.abc import Callable

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.channel import AxdimmChannel
from nearstep_hw.axdimm.host_front_end import HOST_PORT, HOST_READ_LATENCY
from nearstep_hw.dram.dfi import DfiSignature
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.unit_row import UnitRow
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.timing import DramTiming
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import AdamKernelConfig


class AxdimmChannelTop(wiring.Component):
    """A memory channel with its arbiter, its controller and its Adam kernel: half a module.

    Flat Verilog ports, k = 0 to 3:

    - `clk`, `rst`.
    - `host__p0__cs_n act_n address[17:0] bg[1:0] ba[1:0]`, `host__p1__...`, `host__wrdata[255:0]
      wrdata_mask[31:0] wrdata_en rddata[255:0] rddata_valid`.
    - `dfi__p<k>__cs_n act_n address bg ba`, `dfi__wrdata[511:0] wrdata_mask[63:0] wrdata_en
      rddata[511:0] rddata_valid`.

    *Timing*: that of `MemoryChannel` and `KernelShell`.

    Parameters
    ----------
    config : of the kernel.
    timing, mapping : of the memory.
    unit : makes a functional unit for the rule; any component with its ports will do.

    Members
    -------
    host : the host's bus.
    dfi : the DRAM.

    Attributes
    ----------
    latency : cycles from a read command of the host to its first data.

    Ref: AXDIMM paper, section 3.1 and figure 2.
    """

    latency = HOST_READ_LATENCY

    def __init__(
        self,
        config: AdamKernelConfig,
        timing: DramTiming | None = None,
        mapping: AddressMapping | None = None,
        *,
        unit: Callable[[Rule], wiring.Component] = FunctionalUnit,
    ) -> None:
        self.config = config
        self.unit = unit
        self.channel = AxdimmChannel(config, timing, mapping)
        super().__init__({"host": In(HOST_PORT), "dfi": Out(DfiSignature())})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.channel = channel = self.channel
        m.submodules.units = units = UnitRow(self.config, self.unit)
        wiring.connect(m, wiring.flipped(self.host), channel.host)
        wiring.connect(m, channel.dfi, wiring.flipped(self.dfi))
        wiring.connect(m, channel.fu, units.fu)
        m.d.comb += units.i_reset.eq(channel.o_kernel_reset)
        return m
