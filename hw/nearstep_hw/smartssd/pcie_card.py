"""Top of a SmartSSD card with its PCIe endpoint."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from nearstep_hw.axi.signature import connect_channels
from nearstep_hw.pcie.crossed_endpoint import BLOCK_SIDE, CrossedEndpoint
from nearstep_hw.pcie.endpoint import PcieEndpoint
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.smartssd.card import SmartssdCard
from nearstep_hw.updater.unit_row import UnitMaker
from nearstep_spec.pcie import CSR_BYTES
from nearstep_spec.smartssd.config import SmartssdConfig

COUNTERS = ("o_dropped", "o_failed_writes", "o_failed_reads")
"""Outputs of the endpoint that count failed requests."""

RUN_VECTOR = 0
"""MSI-X vector of the end of a run."""


class PcieCard(wiring.Component):
    """A card on the PCIe hard block of an UltraScale+ device; the top of a board's FPGA.

    BAR 0 has the registers of `SmartssdConfig.maps` and, from 4 KiB on, the MSI-X table
    (`nearstep_spec.pcie`); BAR 2 maps the DRAM; an address beyond `memory_bytes` is an Unsupported
    Request. Vector 0 is sent at the end of a run, with or without an error, after all data of the
    run are in DRAM. Data that any device wrote before START are in DRAM before the run reads them.

    Flat Verilog ports, with the defaults:

    - `clk`, `rst` (synchronous, active high): `user_clk` and `user_reset` of the hard block. With
      `crossed` they are the card's own, and those of the hard block `pcie_clk`, `pcie_rst`.
    - `m_axis_cq__tdata[127:0] tkeep[3:0] tlast tuser[87:0] tvalid tready`,
      `s_axis_cc__tdata[127:0] tkeep[3:0] tlast tuser[32:0] tvalid tready`,
      `pcie_cq_np_req[1:0]`, `cfg_max_payload[1:0]`,
      `cfg_interrupt_msix__enable[3:0] mask[3:0] int address[63:0] data[31:0] sent fail`.
    - `m_axi__arvalid arready arid[4:0] araddr[33:0] arlen[7:0] arsize[2:0] arburst[1:0]`,
      `m_axi__rvalid rready rid rdata[511:0] rresp[1:0] rlast`,
      `m_axi__awvalid awready awid awaddr awlen awsize awburst`,
      `m_axi__wvalid wready wdata wstrb[63:0] wlast`, `m_axi__bvalid bready bid bresp`.
    - `o_dropped[15:0] o_failed_writes[15:0] o_failed_reads[15:0]`.

    *Timing*: that of `PcieEndpoint`, or `CrossedEndpoint`, and `SmartssdCard`. A reset must reset
    the path to DRAM too.

    Parameters
    ----------
    unit : see `UnitMaker`.
    width : bits of CQ and CC: 64, 128, 256 or 512, at most those of a beat of memory.
    crossed : the hard block has a clock of its own, the domain `pcie`.

    Members
    -------
    m_axis_cq, s_axis_cc, pcie_cq_np_req, cfg_max_payload, cfg_interrupt_msix : of the hard block,
        see `PcieEndpoint`.
    m_axi : AXI4 to the DRAM, see `SmartssdCard`.
    o_dropped, o_failed_writes, o_failed_reads : counters of the endpoint.

    Raises
    ------
    ValueError : the registers do not fit into their part of BAR 0, or `width` is not allowed.

    Ref: Smart-Infinity, sections IV-A, V-A and figure 7.
    """

    def __init__(
        self,
        config: SmartssdConfig,
        *,
        unit: UnitMaker = FunctionalUnit,
        width: int = 128,
        crossed: bool = False,
    ) -> None:
        kernel = config.kernel
        if config.register_bytes > CSR_BYTES:
            raise ValueError(
                f"The registers must fit into {CSR_BYTES} bytes, not {config.register_bytes}"
            )
        if width > kernel.data_width:
            raise ValueError(
                f"PCIe streams must have at most the {kernel.data_width} bits of a beat of memory, "
                f"not {width!r}"
            )
        self.config = config
        self.card = SmartssdCard(config, unit=unit)
        build = CrossedEndpoint if crossed else PcieEndpoint
        self.endpoint = build(
            width=width,
            data_width=kernel.data_width,
            address_width=kernel.address_width,
            memory_bytes=config.memory_bytes,
            vectors=RUN_VECTOR + 1,
        )
        shown = self.endpoint.signature.members
        super().__init__(
            {
                **{name: shown[name] for name in shown if name in BLOCK_SIDE},
                "m_axi": Out(self.card.m_axi.signature),
                **{name: shown[name] for name in COUNTERS},
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.endpoint = endpoint = self.endpoint
        m.submodules.card = card = self.card

        wiring.connect(m, endpoint.csr, card.csr)
        connect_channels(m, endpoint.m_axi, card.s_axi)
        wiring.connect(m, card.m_axi, wiring.flipped(self.m_axi))
        m.d.comb += endpoint.i_interrupt[RUN_VECTOR].eq(card.o_interrupt)
        for name in (*sorted(BLOCK_SIDE), *COUNTERS):
            inner, outer = getattr(endpoint, name), getattr(self, name)
            member = self.signature.members[name]
            if member.is_signature:
                wiring.connect(m, inner, wiring.flipped(outer))
            else:
                m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)
        return m
