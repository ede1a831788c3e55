"""Between the clock of the hard block and that of the endpoint."""

from amaranth import Cat, DomainRenamer, Elaboratable, Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.fifo import AsyncFIFOBuffered
from amaranth.lib.wiring import In, Out

from nearstep_hw.pcie.descriptor import COMPLETION_DWORDS, MAX_PAYLOAD_BYTES
from nearstep_hw.pcie.msix import MsixInterruptSignature
from nearstep_hw.pcie.np_credits import REQUEST_BITS
from nearstep_hw.pcie.packet_fifo import PacketFifo
from nearstep_hw.pcie.read_splitter import PAYLOAD_SIZES
from nearstep_hw.pcie.stream import DWORD_BYTES, CcSignature, CqSignature

STREAM_DEPTH = 32  # beats in flight in a FIFO
ANSWERS = 4  # depth of the MSI-X FIFOs; one message is in flight at a time
PAYLOAD = ("tdata", "tkeep", "tlast", "tuser")


class ClockCrossing(wiring.Component):
    """Connects an endpoint in the domain `sync` to a hard block in the domain `pcie`.

    Streams, credits and MSI-X messages pass through FIFOs, so that none is lost or duplicated;
    values that only enumeration changes pass through synchronisers. Completions are stored whole
    before they are forwarded: the hard block accepts no gaps, and a slower endpoint has gaps. Both
    domains must be reset together, with the hard block's `user_reset`.

    *Timing*: up to a beat a cycle of the slower clock. 128 bits at 200 MHz are 3.2 GB/s, of which
    completions of 256 bytes, 17 beats each, leave 3.01 GB/s; Gen3 x4 carries at most 3.65 GB/s of
    them (3.94 GB/s, 276 bytes each); 250 MHz reach this rate.

    Parameters
    ----------
    width : bits of CQ and CC.
    requests : credits of the endpoint, a power of two.

    Members
    -------
    m_axis_cq, s_axis_cc, pcie_cq_np_req, cfg_max_payload, cfg_interrupt_msix : in `pcie`, of the
        hard block.
    cq, cc, i_np_req, o_max_payload, msix : in `sync`, the same of the endpoint.
    """

    def __init__(self, *, width: int, requests: int = 16) -> None:
        self.width = width
        self.requests = requests
        super().__init__(
            {
                "m_axis_cq": In(CqSignature(width)),
                "s_axis_cc": Out(CcSignature(width)),
                "pcie_cq_np_req": Out(REQUEST_BITS),
                "cfg_max_payload": In(range(PAYLOAD_SIZES)),
                "cfg_interrupt_msix": Out(MsixInterruptSignature()),
                "cq": Out(CqSignature(width)),
                "cc": In(CcSignature(width)),
                "i_np_req": In(REQUEST_BITS),
                "o_max_payload": Out(range(PAYLOAD_SIZES)),
                "msix": In(MsixInterruptSignature()),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        self._streams(m)

        m.submodules.credits = credit = self._fifo(1, 2 * self.requests, to="pcie")
        m.d.comb += [
            credit.w_en.eq(self.i_np_req[0]),
            credit.r_en.eq(1),
            self.pcie_cq_np_req.eq(credit.r_rdy),
        ]

        block, inner = self.cfg_interrupt_msix, self.msix
        message = Cat(inner.address, inner.data)
        m.submodules.messages = messages = self._fifo(len(message), ANSWERS, to="pcie")
        m.submodules.answers = answers = self._fifo(2, ANSWERS, to="sync")
        m.d.comb += [
            messages.w_data.eq(message),
            messages.w_en.eq(inner.int),
            messages.r_en.eq(1),
            Cat(block.address, block.data).eq(messages.r_data),
            block.int.eq(messages.r_rdy),
            answers.w_data.eq(Cat(block.sent, block.fail)),
            answers.w_en.eq(block.sent | block.fail),
            answers.r_en.eq(1),
            Cat(inner.sent, inner.fail).eq(answers.r_data & answers.r_rdy.replicate(2)),
        ]
        # One bit a function: `enable` and `mask`, synchronised apart, could change in different
        # cycles.
        allowed = Signal.like(inner.enable)
        m.d.pcie += allowed.eq(block.enable & ~block.mask)
        m.submodules.allowed = FFSynchronizer(allowed, inner.enable)
        m.submodules.max_payload = FFSynchronizer(self.cfg_max_payload, self.o_max_payload)
        return m

    @staticmethod
    def _fifo(width: int, depth: int, *, to: str) -> AsyncFIFOBuffered:
        domains = {"r_domain": to, "w_domain": "sync" if to == "pcie" else "pcie"}
        # One entry of a buffered FIFO is its output register.
        return AsyncFIFOBuffered(width=width, depth=depth + 1, **domains)

    def _streams(self, m: Module) -> None:
        cq = Cat(getattr(self.m_axis_cq, name) for name in PAYLOAD)
        m.submodules.requests = requests = self._fifo(len(cq), STREAM_DEPTH, to="sync")
        m.d.comb += [
            requests.w_data.eq(cq),
            requests.w_en.eq(self.m_axis_cq.tvalid),
            self.m_axis_cq.tready.eq(requests.w_rdy),
            Cat(getattr(self.cq, name) for name in PAYLOAD).eq(requests.r_data),
            self.cq.tvalid.eq(requests.r_rdy),
            requests.r_en.eq(self.cq.tready),
        ]

        cc = Cat(getattr(self.cc, name) for name in PAYLOAD)
        longest = -(-(MAX_PAYLOAD_BYTES + COMPLETION_DWORDS * DWORD_BYTES) // (self.width // 8))
        layout = data.StructLayout({"beat": len(cc), "last": 1, "discontinue": 1})
        m.submodules.completions = completions = self._fifo(len(cc), STREAM_DEPTH, to="pcie")
        store = PacketFifo(layout, depth=2 << (longest - 1).bit_length())
        m.submodules.store = DomainRenamer("pcie")(store)
        last = Signal()
        first_bit = len(self.cc.tdata) + len(self.cc.tkeep)
        m.d.comb += [
            completions.w_data.eq(cc),
            completions.w_en.eq(self.cc.tvalid),
            self.cc.tready.eq(completions.w_rdy),
            last.eq(completions.r_data[first_bit]),
            store.i.payload.beat.eq(completions.r_data),
            store.i.payload.last.eq(last),
            store.i.valid.eq(completions.r_rdy),
            completions.r_en.eq(store.i.ready),
            Cat(getattr(self.s_axis_cc, name) for name in PAYLOAD).eq(store.o.payload.beat),
            self.s_axis_cc.tvalid.eq(store.o.valid),
            store.o.ready.eq(self.s_axis_cc.tready),
        ]
