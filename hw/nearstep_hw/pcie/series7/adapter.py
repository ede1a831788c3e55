"""The adapter between the 7-series integrated block and an endpoint."""

from collections.abc import Mapping

from amaranth import Cat, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from nearstep_hw.pcie.msix import MsixInterruptSignature
from nearstep_hw.pcie.np_credits import REQUEST_BITS
from nearstep_hw.pcie.read_splitter import PAYLOAD_SIZES
from nearstep_hw.pcie.series7.completion_packets import CompletionPackets
from nearstep_hw.pcie.series7.message_packets import MessagePackets
from nearstep_hw.pcie.series7.np_gate import NonPostedGate
from nearstep_hw.pcie.series7.request_stream import RequestStream
from nearstep_hw.pcie.series7.rx_align import RxAlign
from nearstep_hw.pcie.series7.stream import WIDTH, RxSignature, TxSignature
from nearstep_hw.pcie.series7.tlp import PacketHead, PacketType
from nearstep_hw.pcie.series7.tx_arbiter import TxArbiter
from nearstep_hw.pcie.stream import DWORD_BITS, CcSignature, CqSignature

BUS_MASTER_BIT = 2  # of the command register
MAX_PAYLOAD_BIT = 5  # of the device control register
MAX_PAYLOAD_BITS = 3

BLOCK_MEMBERS = {
    "m_axis_rx": In(RxSignature()),
    "s_axis_tx": Out(TxSignature()),
    "rx_np_ok": Out(1),
    "cfg_bus_number": In(8),
    "cfg_device_number": In(5),
    "cfg_function_number": In(3),
    "cfg_command": In(16),
    "cfg_dcommand": In(16),
    "cfg_interrupt_msixenable": In(1),
    "cfg_interrupt_msixfm": In(1),
    "cfg_to_turnoff": In(1),
    "cfg_turnoff_ok": Out(1),
}
"""Ports of an adapter toward the block, with the names of PG054."""


def _is_non_posted(dword: Value) -> Value:
    """Return whether a packet that begins with this dword is a non-posted request."""
    head = PacketHead(dword)
    kinds = (
        PacketType.LOCKED_READ,
        PacketType.IO,
        PacketType.FETCH_ADD,
        PacketType.SWAP,
        PacketType.COMPARE_AND_SWAP,
    )
    others = [head.packet_type == kind for kind in kinds]
    return Cat((head.packet_type == PacketType.MEMORY) & ~head.payload, *others).any()


class Series7Adapter(wiring.Component):
    """Connects an endpoint for the UltraScale+ block to the 7-series block: Gen2 x4, 128 bits.

    The adapter has the block-side ports of `PcieEndpoint`: CQ and CC streams, credits for
    non-posted requests, and MSI-X. Only function 0. Tie the block's `rx_np_req` and `tx_cfg_gnt` to
    1. MSI and legacy interrupts are not used, and errors are not reported through `cfg_err`: a
    refused request gets a completion, without a bit in the status registers.

    *Timing*: two cycles each way; a beat a cycle, but for the extra cycles of `RxAlign` and
    `RequestStream`.

    *Resources* (Yosys, 7 series, difference between cards with and without): 700 LUT, 760 FF.

    Parameters
    ----------
    apertures : address bits of each BAR, by its number.
    requests : credits of the endpoint for non-posted requests; more than `np_gate.RESERVED`.

    Members
    -------
    m_axis_rx, s_axis_tx, rx_np_ok : of the block, see `RxSignature`, `TxSignature`.
    cfg_bus_number, cfg_device_number, cfg_function_number, cfg_command, cfg_dcommand : of the
        block, configured by the host.
    cfg_interrupt_msixenable, cfg_interrupt_msixfm : of the block, MSI-X.
    cfg_to_turnoff, cfg_turnoff_ok : of the block, power off; granted a cycle after the request.
    cq, cc, i_np_req, o_max_payload, msix : to the endpoint.

    Ref: PG054 (7 Series FPGAs Integrated Block for PCI Express).
    """

    def __init__(self, apertures: Mapping[int, int], *, requests: int = 16) -> None:
        self.apertures = dict(apertures)
        self.requests = requests
        super().__init__(
            {
                **BLOCK_MEMBERS,
                "cq": Out(CqSignature(WIDTH)),
                "cc": In(CcSignature(WIDTH)),
                "i_np_req": In(REQUEST_BITS),
                "o_max_payload": Out(range(PAYLOAD_SIZES)),
                "msix": In(MsixInterruptSignature()),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.align = align = RxAlign()
        m.submodules.requests = requests = RequestStream(self.apertures)
        m.submodules.completions = completions = CompletionPackets()
        m.submodules.messages = messages = MessagePackets()
        m.submodules.arbiter = arbiter = TxArbiter()
        m.submodules.gate = gate = NonPostedGate(self.requests)
        connect(m, flipped(self.m_axis_rx), align.rx)
        connect(m, align.o, requests.i)
        connect(m, requests.cq, flipped(self.cq))
        connect(m, flipped(self.cc), completions.cc)
        connect(m, completions.o, arbiter.i_completion)
        connect(m, flipped(self.msix), messages.msix)
        connect(m, messages.o, arbiter.i_message)
        connect(m, arbiter.tx, flipped(self.s_axis_tx))

        rx, user = self.m_axis_rx, self.m_axis_rx.tuser
        middle = user.start_byte[-1]
        first = Mux(middle, rx.tdata[WIDTH // 2 :][:DWORD_BITS], rx.tdata[:DWORD_BITS])
        own = Cat(self.cfg_function_number, self.cfg_device_number, self.cfg_bus_number)
        allowed = Signal(MAX_PAYLOAD_BITS)
        m.d.comb += [
            gate.i_take.eq(rx.tvalid & rx.tready & user.start & _is_non_posted(first)),
            gate.i_credit.eq(self.i_np_req[0]),
            self.rx_np_ok.eq(gate.o_ok),
            completions.i_id.eq(own),
            messages.i_id.eq(own),
            messages.i_enable.eq(self.cfg_interrupt_msixenable & self.cfg_command[BUS_MASTER_BIT]),
            messages.i_mask.eq(self.cfg_interrupt_msixfm),
            allowed.eq(self.cfg_dcommand[MAX_PAYLOAD_BIT:]),
            self.o_max_payload.eq(Mux(allowed < PAYLOAD_SIZES, allowed, PAYLOAD_SIZES - 1)),
        ]
        m.d.sync += self.cfg_turnoff_ok.eq(self.cfg_to_turnoff)
        return m
