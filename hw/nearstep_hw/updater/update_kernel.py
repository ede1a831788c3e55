"""Top of an update kernel: with its functional units, or with a port for them."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import connect_channels
from nearstep_hw.csr.axi_lite import AxiLiteAdapter, AxiLiteSignature
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.kernel_core import KernelCore
from nearstep_hw.updater.unit_row import UnitMaker, connect_units, outside_ports
from nearstep_spec.updater.config import UpdateKernelConfig


class UpdateKernel(wiring.Component):
    """An update kernel with AXI4-Lite registers; the top for synthesis.

    Flat Verilog ports, with W = 32 `config.units`:

    - `clk`, `rst` (synchronous, active high).
    - `s_axil__awaddr awprot awvalid awready wdata wstrb wvalid wready bresp bvalid bready
      araddr arprot arvalid arready rdata rresp rvalid rready`, each with the prefix.
    - `m_axi__arvalid arready arid[1:0] araddr arlen[7:0] arsize[2:0] arburst[1:0]`,
      `m_axi__rvalid rready rid rdata rresp[1:0] rlast`,
      `m_axi__awvalid awready awid[1:0] awaddr awlen awsize awburst`,
      `m_axi__wvalid wready wdata wstrb wlast`, `m_axi__bvalid bready bid bresp`.

    With the functional units outside, also:

    - `fu__i_en`, `fu__i_valid`: outputs, to every unit.
    - `fu__i_p`, `fu__i_g`, `fu__i_m`, `fu__i_v`: outputs, W bits; unit k has bits
      32 k to 32 k + 31.
    - `fu__s_<scalar>`: outputs, 32 bits (1 bit for a switch), to every unit.
    - `fu__o_valid`: input, from unit 0.
    - `fu__o_p`, `fu__o_m`, `fu__o_v`: inputs, W bits.

    `fu__i_en` depends combinationally on `fu__o_valid`, and on no other input.

    Parameters
    ----------
    unit : see `UnitMaker`; None: the units are outside.

    Members
    -------
    s_axil : AXI4-Lite registers, see `adam_kernel_map`.
    m_axi : AXI4 to memory.
    fu : the functional units, if they are outside.
    i_pairs_clk, o_pairs_enable : see `KernelCore`; if the units are outside and the kernel
        takes pairs.

    Ref: AXDIMM paper, section 3.3 and figure 3.
    """

    def __init__(
        self, config: UpdateKernelConfig, *, unit: UnitMaker | None = FunctionalUnit
    ) -> None:
        self.unit = unit
        self.shell = KernelCore(config)
        super().__init__(
            {
                "s_axil": In(AxiLiteSignature()),
                "m_axi": Out(self.shell.m_axi.signature),
                **outside_ports(config, unit),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.shell = self.shell
        m.submodules.registers = registers = AxiLiteAdapter()
        wiring.connect(m, wiring.flipped(self.s_axil), registers.s_axil)
        wiring.connect(m, registers.csr, self.shell.csr)
        connect_channels(m, self.shell.m_axi, self.m_axi)
        connect_units(m, self, self.shell, self.unit)
        return m
