"""Top of a SmartSSD card: with its functional units, or with a port for them."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.join import AxiReadJoin, AxiWriteJoin
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.kernel_core import KernelCore
from nearstep_hw.updater.unit_row import UnitMaker, connect_units, outside_ports
from nearstep_spec.smartssd.config import SmartssdConfig

HOST_ID_WIDTH = 4  # bits of an ID of the BAR's port


class SmartssdCard(wiring.Component):
    """A card behind its PCIe endpoint; the top for synthesis.

    The update kernel and the BAR share the DRAM burst by burst, so the host and the drive can
    access it at any time: while a subgroup is updated, the next one is written to another set of
    buffers and the last one is read from a third. The BAR has priority: its bandwidth is far below
    that of the DRAM, and the kernel prefetches. The host must not access the arrays of a run.

    Flat Verilog ports, with the defaults:

    - `clk`, `rst` (synchronous, active high).
    - `csr__address[11:0] read write write_data[31:0] write_mask[3:0] ack error read_data[31:0]`.
    - `s_axi__arvalid arready arid[3:0] araddr[33:0] arlen[7:0] arsize[2:0] arburst[1:0]`,
      `s_axi__rvalid rready rid rdata[511:0] rresp[1:0] rlast`,
      `s_axi__awvalid awready awid awaddr awlen awsize awburst`,
      `s_axi__wvalid wready wdata wstrb[63:0] wlast`, `s_axi__bvalid bready bid bresp`.
    - `m_axi__...`: the same, the other way round, with IDs of 5 bits.
    - `o_interrupt`.
    - `fu__...`, if the functional units are outside: see `UpdateKernel`.

    *Timing*: that of `KernelCore`, `AxiReadJoin` and `AxiWriteJoin`: a burst takes a cycle more
    than without the join.

    Parameters
    ----------
    unit : see `UnitMaker`; None: the units are outside.

    Members
    -------
    csr : BAR0: registers, see `SmartssdConfig.maps`.
    s_axi : AXI4 from the memory BAR, with RREADY and BREADY always high.
    m_axi : AXI4 to the DRAM, half duplex. The highest bit of an ID is 0 for the BAR and 1 for the
        kernel.
    o_interrupt : pulses when a run has ended or failed.
    fu : the functional units, if they are outside.
    i_pairs_clk, o_pairs_enable : see `KernelCore`; if the units are outside and the kernel takes
        pairs.

    Ref: Smart-Infinity, sections IV-A, V-A and figure 7.
    """

    def __init__(self, config: SmartssdConfig, *, unit: UnitMaker | None = FunctionalUnit) -> None:
        self.unit = unit
        kernel = config.kernel
        self.kernel = KernelCore(kernel, memory_bytes=config.memory_bytes)
        options = {
            "ports": 2,
            "address_width": kernel.address_width,
            "data_width": kernel.data_width,
            "id_width": max(HOST_ID_WIDTH, len(self.kernel.m_axi.ar.payload.id)),
            "fixed": True,
        }
        self.read = AxiReadJoin(**options)
        self.write = AxiWriteJoin(**options)
        widths = {"address_width": kernel.address_width, "data_width": kernel.data_width}
        super().__init__(
            {
                "csr": In(CsrSignature()),
                "s_axi": In(Axi4Signature(**widths, id_width=HOST_ID_WIDTH)),
                "m_axi": Out(Axi4Signature(**widths, id_width=len(self.read.m_axi.ar.payload.id))),
                "o_interrupt": Out(1),
                **outside_ports(kernel, unit),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.kernel = kernel = self.kernel
        m.submodules.read = self.read
        m.submodules.write = self.write
        was_busy = Signal()

        wiring.connect(m, wiring.flipped(self.csr), kernel.csr)
        for join in (self.read, self.write):
            host, updater = join.s_axi
            connect_channels(m, host, self.s_axi)
            connect_channels(m, updater, kernel.m_axi)
            connect_channels(m, join.m_axi, self.m_axi)
        connect_units(m, self, kernel, self.unit)
        m.d.sync += was_busy.eq(kernel.o_busy)
        m.d.comb += self.o_interrupt.eq(was_busy & ~kernel.o_busy)
        return m
