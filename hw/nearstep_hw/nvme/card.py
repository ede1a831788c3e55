"""Top of an NVMe controller: queue engine and MSI-X behind BAR 0."""

from amaranth import Elaboratable, Module, Mux
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.nvme.engine import QueueEngine
from nearstep_hw.pcie.msix import Msix, MsixInterruptSignature
from nearstep_spec.nvme import BAR_BYTES, MSIX_PENDING, MSIX_TABLE, NvmeConfig
from nearstep_spec.pcie import MSIX_PBA_OFFSET, MSIX_TABLE_OFFSET

NOWHERE = MSIX_PBA_OFFSET - MSIX_TABLE_OFFSET - 4
"""A word behind the longest table."""


class NvmeCard(wiring.Component):
    """The queue engine of a controller, for a hard block that bridges PCIe to AXI4.

    BAR 0 has registers, doorbells, MSI-X table and pending bits at the offsets of
    `nearstep_spec.nvme`. Firmware behind the ports of `QueueEngine` executes the commands; those
    ports have their names here.

    *Timing*: that of `QueueEngine` and `Msix`. A reset drops all accesses of the host under way,
    and must reset the path to it, too.

    *Resources* (Yosys, UltraScale+, default parameters): 3850 LUT, 4865 FF.

    Members
    -------
    csr : BAR 0.
    m_axi : memory of the host.
    cfg_interrupt_msix : of the hard block, see `MsixInterruptSignature`.

    Attributes
    ----------
    engine
    """

    def __init__(self, config: NvmeConfig) -> None:
        self.engine = QueueEngine(io_queues=config.io_queues)
        shown = dict(self.engine.signature.members.items())
        del shown["o_interrupt"]
        super().__init__(
            {
                **shown,
                "csr": In(CsrSignature(exact_log2(BAR_BYTES))),
                "cfg_interrupt_msix": Out(MsixInterruptSignature()),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.engine = engine = self.engine
        m.submodules.msix = msix = Msix(engine.vectors)
        for name, member in engine.signature.members.items():
            if name in ("csr", "o_interrupt"):
                continue
            inner, outer = getattr(engine, name), getattr(self, name)
            if member.is_signature and member.flow is Out:
                wiring.connect(m, inner, wiring.flipped(outer))
            elif member.is_signature:
                wiring.connect(m, wiring.flipped(outer), inner)
            else:
                m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)
        wiring.connect(m, msix.cfg, wiring.flipped(self.cfg_interrupt_msix))
        m.d.comb += msix.i_request.eq(engine.o_interrupt)

        csr, page = self.csr, exact_log2(MSIX_PENDING - MSIX_TABLE)
        on_msix = csr.address[exact_log2(MSIX_TABLE)]
        pending = csr.address[page]
        place = csr.address[: page - 1]
        m.d.comb += [
            engine.csr.address.eq(csr.address),
            msix.bus.address.eq(Mux(csr.address[page - 1], NOWHERE, place | (pending << page - 1))),
            csr.ack.eq(engine.csr.ack | msix.bus.ack),
            csr.error.eq(Mux(msix.bus.ack, msix.bus.error, engine.csr.error)),
            csr.read_data.eq(engine.csr.read_data | msix.bus.read_data),
        ]
        for port, chosen in ((engine.csr, ~on_msix), (msix.bus, on_msix)):
            m.d.comb += [
                port.read.eq(csr.read & chosen),
                port.write.eq(csr.write & chosen),
                port.write_data.eq(csr.write_data),
                port.write_mask.eq(csr.write_mask),
            ]
        return m
