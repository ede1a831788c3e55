"""The PCIe endpoint of a card."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.pcie.cc_output import CcOutput
from nearstep_hw.pcie.completion_job import CompletionJob, WaitingRequest
from nearstep_hw.pcie.completion_writer import ELEMENT_BITS, CompletionWriter
from nearstep_hw.pcie.dispatch import Dispatcher
from nearstep_hw.pcie.dword_packer import DwordPacker
from nearstep_hw.pcie.memory_writer import MemoryWriter
from nearstep_hw.pcie.msix import Msix, MsixInterruptSignature
from nearstep_hw.pcie.np_credits import REQUEST_BITS, NonPostedCredits
from nearstep_hw.pcie.order import PostedOrder
from nearstep_hw.pcie.read_landing import ReadLanding
from nearstep_hw.pcie.read_splitter import PAYLOAD_SIZES, ReadSplitter
from nearstep_hw.pcie.register_access import RegisterAccess
from nearstep_hw.pcie.request import RequestParser
from nearstep_hw.pcie.route import RequestRouter
from nearstep_hw.pcie.stream import DWORD_BITS, CcSignature, CqSignature
from nearstep_hw.stream.fifo import StreamFifo

COUNTER_BITS = 16


class PcieEndpoint(wiring.Component):
    """Completer behind the UltraScale+ hard block: registers in BAR 0, memory in BAR 2.

    BAR 0 maps the registers of `csr` in its first 4 KiB, then the MSI-X table and its pending bits
    (`nearstep_spec.pcie`). An access is one or two whole dwords; two are accessed in turn, the low
    one first. BAR 2 maps `memory_bytes` of memory behind `m_axi`; any dwords within a page of 4 KiB
    may be read and written, with any byte enables that the PCIe specification allows. A BAR may be
    larger than its contents. Reads and writes without an enabled byte are executed. `RequestRouter`
    lists the refused requests and their status. Beyond that, a register access that `csr` answers
    with an error is an Unsupported Request, and a read that memory answers with an error is a
    Completer Abort. Failed posted requests are only counted. Requests take effect in the order of
    PCIe: a write is done when `csr` or B has responded; no read and no register write begins before
    every earlier write is done. Data written before START by another device are therefore in
    memory. Writes never wait for reads: the hard block gets a credit for each read that fits, and
    lets writes pass the others.

    *Timing*: all in one clock domain. A beat of CQ, a beat of CC and a beat of memory a cycle; a
    register access takes 3 cycles, one of two words 5. A reset drops all requests in flight, and
    must reset the memory path too.

    *Resources* (Yosys, UltraScale+, default parameters): 3352 LUT, 952 LUT as memory, 4463 FF, 7.5
    block RAMs of 36 Kib.

    Parameters
    ----------
    width : bits of CQ and CC: 64, 128, 256 or 512. Gen3 x4 is 128 bits at 250 MHz.
    data_width : bits of a beat of memory, at least `width`.
    address_width : bits of a byte address of memory, at least 13.
    memory_bytes : size of the memory, from address 0 on; None for all that can be addressed.
    vectors : number of MSI-X vectors.
    requests : depth of the read queue, a power of two.
    store_bytes, landing_bytes : sizes of the write and read data buffers; powers of two.

    Members
    -------
    m_axis_cq, s_axis_cc : streams of the hard block.
    pcie_cq_np_req, cfg_max_payload : ports of the hard block.
    cfg_interrupt_msix : see `MsixInterruptSignature`.
    csr : register port.
    m_axi : memory; all bursts have the same ID.
    i_interrupt : a bit for each vector, high for one cycle for each interrupt.
    o_dropped : dropped posted requests. All three counters saturate at 0xFFFE or 0xFFFF.
    o_failed_writes : writes that memory or `csr` answered with an error.
    o_failed_reads : unsuccessful completions.
    """

    def __init__(
        self,
        *,
        width: int = 128,
        data_width: int = 512,
        address_width: int = 32,
        memory_bytes: int | None = None,
        vectors: int = 1,
        requests: int = 16,
        store_bytes: int = 4096,
        landing_bytes: int = 8192,
    ) -> None:
        self.width = width
        self.data_width = data_width
        self.address_width = address_width
        self.memory_bytes = 1 << address_width if memory_bytes is None else memory_bytes
        self.vectors = vectors
        self.requests = requests
        self.store_beats = store_bytes * 8 // data_width
        self.landing_beats = landing_bytes * 8 // data_width
        self.writes = 32  # in flight: latency of memory, in payloads of 128 bytes
        super().__init__(
            {
                "m_axis_cq": In(CqSignature(width)),
                "s_axis_cc": Out(CcSignature(width)),
                "pcie_cq_np_req": Out(REQUEST_BITS),
                "cfg_max_payload": In(range(PAYLOAD_SIZES)),
                "cfg_interrupt_msix": Out(MsixInterruptSignature()),
                "csr": Out(CsrSignature()),
                "m_axi": Out(
                    Axi4Signature(address_width=address_width, data_width=data_width, id_width=1)
                ),
                "i_interrupt": In(vectors),
                "o_dropped": Out(COUNTER_BITS),
                "o_failed_writes": Out(COUNTER_BITS),
                "o_failed_reads": Out(COUNTER_BITS),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.access = access = RegisterAccess()
        m.submodules.msix = msix = Msix(self.vectors)
        m.submodules.order = order = PostedOrder(writes=self.writes, requests=self.requests)
        connect(m, access.csr, flipped(self.csr))
        connect(m, access.msix, msix.bus)
        connect(m, msix.cfg, flipped(self.cfg_interrupt_msix))
        m.d.comb += msix.i_request.eq(self.i_interrupt)

        dispatch, writer = self._requests(m, access, order)
        failed_read = self._completions(m, access, order, dispatch)

        register_failed = access.o_wrote & access.o_write_failed
        for counter, events in (
            (self.o_dropped, dispatch.o_dropped),
            (self.o_failed_writes, writer.o_failed + register_failed),
            (self.o_failed_reads, failed_read),
        ):
            with m.If(~counter[1:].all()):
                m.d.sync += counter.eq(counter + events)
        return m

    def _requests(
        self, m: Module, access: RegisterAccess, order: PostedOrder
    ) -> tuple[Dispatcher, MemoryWriter]:
        """Connect CQ to the executors of memory and register writes and to the dispatcher."""
        m.submodules.parser = parser = RequestParser(self.width)
        m.submodules.router = router = RequestRouter(
            width=self.width, address_width=self.address_width, memory_bytes=self.memory_bytes
        )
        m.submodules.dispatch = dispatch = Dispatcher(
            width=self.width, address_width=self.address_width
        )
        m.submodules.writer = writer = MemoryWriter(
            width=self.width,
            address_width=self.address_width,
            data_width=self.data_width,
            store_beats=self.store_beats,
            bursts=self.writes,
        )
        connect(m, flipped(self.m_axis_cq), parser.cq)
        connect(m, parser.o, router.i)
        connect(m, router.o, dispatch.i)
        connect(m, dispatch.o_memory, writer.i)
        connect(m, dispatch.o_register, access.i_write)
        connect_channels(m, writer.bus, self.m_axi)
        m.d.comb += [
            dispatch.i_writes_done.eq(order.o_done),
            writer.i_room.eq(order.o_room),
            order.i_taken.eq(writer.o_taken),
            order.i_done.eq(writer.o_done),
        ]
        return dispatch, writer

    def _completions(
        self, m: Module, access: RegisterAccess, order: PostedOrder, dispatch: Dispatcher
    ) -> Signal:
        """Connect the dispatcher to CC; return the event of an unsuccessful completion."""
        elements, lanes = self.width // DWORD_BITS, self.data_width // DWORD_BITS
        m.submodules.waiting = waiting = StreamFifo(
            WaitingRequest(self.address_width), depth=self.requests
        )
        m.submodules.credits = credit = NonPostedCredits(self.requests)
        m.submodules.splitter = splitter = ReadSplitter(
            address_width=self.address_width,
            data_width=self.data_width,
            landing_beats=self.landing_beats,
        )
        m.submodules.jobs = jobs = StreamFifo(CompletionJob(lanes), depth=32)
        m.submodules.landing = landing = ReadLanding(
            data_width=self.data_width, beats=self.landing_beats
        )
        m.submodules.completer = completer = CompletionWriter(
            width=self.width, data_width=self.data_width
        )
        m.submodules.packer = packer = DwordPacker(
            elements=elements, lanes=elements, element_width=ELEMENT_BITS
        )
        m.submodules.output = output = CcOutput(self.width)
        connect(m, dispatch.o_request, waiting.i)
        connect(m, splitter.o, jobs.i)
        connect(m, jobs.o, completer.i)
        connect(m, landing.o, completer.i_beat)
        connect(m, landing.o_verdict, completer.i_verdict)
        connect(m, completer.o_read, access.i_read)
        connect(m, access.o_answer, completer.i_answer)
        connect(m, completer.o, packer.i)
        connect(m, packer.o, output.i)
        connect(m, output.cc, flipped(self.s_axis_cc))
        connect(m, splitter.ar, flipped(self.m_axi.ar))
        connect(m, flipped(self.m_axi.r), landing.r)
        go = Signal()
        m.d.comb += [
            order.i_request.eq(waiting.i.valid & waiting.i.ready),
            splitter.i.payload.eq(waiting.o.payload),
            splitter.i.valid.eq(waiting.o.valid & order.o_cleared),
            waiting.o.ready.eq(splitter.i.ready & order.o_cleared),
            go.eq(waiting.o.valid & waiting.o.ready),
            order.i_go.eq(go),
            credit.i_credit.eq(go),
            self.pcie_cq_np_req.eq(credit.o_request),
            splitter.i_max_payload.eq(self.cfg_max_payload),
            splitter.i_credit.eq(completer.i_beat.valid & completer.i_beat.ready),
        ]
        return completer.o_failed
