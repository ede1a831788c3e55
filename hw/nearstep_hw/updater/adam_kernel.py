"""Tops of the Adam kernel: with its functional units, and with a port for them."""

from collections.abc import Callable

from amaranth import ClockSignal, Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import connect_channels
from nearstep_hw.csr.axi_lite import AxiLiteAdapter, AxiLiteSignature
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.shell import KernelShell, pairs_clock
from nearstep_hw.updater.unit_row import UnitRow
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import AdamKernelConfig


class KernelShellTop(wiring.Component):
    """A `KernelShell` with AXI4-Lite registers; the functional units are outside.

    Flat Verilog ports, with W = 32 `config.units`:

    - `clk`, `rst` (synchronous, active high).
    - `s_axil__awaddr awprot awvalid awready wdata wstrb wvalid wready bresp bvalid bready araddr
      arprot arvalid arready rdata rresp rvalid rready`, each with the prefix.
    - `m_axi__arvalid arready arid[1:0] araddr arlen[7:0] arsize[2:0] arburst[1:0]`,
      `m_axi__rvalid rready rid rdata rresp[1:0] rlast`,
      `m_axi__awvalid awready awid[1:0] awaddr awlen awsize awburst`,
      `m_axi__wvalid wready wdata wstrb wlast`, `m_axi__bvalid bready bid bresp`.
    - `fu__i_en`, `fu__i_valid`: outputs, to every unit.
    - `fu__i_p`, `fu__i_g`, `fu__i_m`, `fu__i_v`: outputs, W bits; unit k has bits
      32 k to 32 k + 31.
    - `fu__s_<scalar>`: outputs, 32 bits (1 bit for a switch), to every unit.
    - `fu__o_valid`: input, from unit 0.
    - `fu__o_p`, `fu__o_m`, `fu__o_v`: inputs, W bits.

    `fu__i_en` depends combinationally on `fu__o_valid`, and on nothing else that comes in.

    Parameters
    ----------
    config : of the kernel.

    Members
    -------
    s_axil, m_axi, fu : see `KernelShell` and `AxiLiteAdapter`.
    i_pairs_clk, o_pairs_enable : see `KernelShell`; if the kernel takes pairs.
    """

    def __init__(self, config: AdamKernelConfig) -> None:
        self.shell = KernelShell(config)
        self.registers = AxiLiteAdapter()
        super().__init__(
            {
                "s_axil": In(AxiLiteSignature()),
                "m_axi": Out(self.shell.m_axi.signature),
                "fu": Out(self.shell.fu.signature),
                **pairs_clock(config),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.shell = self.shell
        m.submodules.registers = self.registers
        wiring.connect(m, wiring.flipped(self.s_axil), self.registers.s_axil)
        wiring.connect(m, self.registers.csr, self.shell.csr)
        connect_channels(m, self.shell.m_axi, self.m_axi)
        wiring.connect(m, self.shell.fu, wiring.flipped(self.fu))
        if self.shell.config.compression:
            m.d.comb += [
                self.shell.i_pairs_clk.eq(self.i_pairs_clk),
                self.o_pairs_enable.eq(self.shell.o_pairs_enable),
            ]
        return m


class AdamKernel(wiring.Component):
    """The Adam kernel: what is synthesised.

    Flat Verilog ports: those of `KernelShellTop` without `fu__*`.

    Parameters
    ----------
    config : of the kernel.
    unit : makes a functional unit for the rule; any component with its ports will do.

    Members
    -------
    s_axil : AXI4-Lite registers, see `adam_kernel_map`.
    m_axi : AXI4 to memory.

    Ref: AXDIMM paper, section 3.3 and figure 3.
    """

    def __init__(
        self,
        config: AdamKernelConfig,
        *,
        unit: Callable[[Rule], wiring.Component] = FunctionalUnit,
    ) -> None:
        self.config = config
        self.unit = unit
        self.top = KernelShellTop(config)
        super().__init__(
            {
                "s_axil": In(AxiLiteSignature()),
                "m_axi": Out(self.top.m_axi.signature),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.top = top = self.top
        wiring.connect(m, wiring.flipped(self.s_axil), top.s_axil)
        connect_channels(m, top.m_axi, self.m_axi)
        m.submodules.units = units = UnitRow(self.config, self.unit)
        if self.config.compression:
            m.d.comb += top.i_pairs_clk.eq(ClockSignal())
        wiring.connect(m, top.fu, units.fu)
        return m
