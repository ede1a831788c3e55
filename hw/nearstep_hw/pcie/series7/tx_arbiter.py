"""Arbiter of the transmit stream."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.pcie.series7.completion_packets import TxBeat
from nearstep_hw.pcie.series7.stream import LANES, TxSignature
from nearstep_hw.pcie.stream import DWORD_BYTES


class TxArbiter(wiring.Component):
    """Sends whole packets; messages have priority over completions.

    *Timing*: one cycle; a beat a cycle.

    Members
    -------
    i_message, i_completion : beats of packets.
    tx : to the block.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "i_message": In(stream.Signature(TxBeat)),
                "i_completion": In(stream.Signature(TxBeat)),
                "tx": Out(TxSignature()),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        tx = self.tx
        inside = Signal()
        held = Signal()  # the source of the current packet
        message = Signal()
        room = Signal()
        valid = Signal()
        beat = Signal(TxBeat)
        m.d.comb += [
            message.eq(Mux(inside, held, self.i_message.valid)),
            room.eq(~tx.tvalid | tx.tready),
            valid.eq(Mux(message, self.i_message.valid, self.i_completion.valid)),
            beat.eq(Mux(message, self.i_message.payload, self.i_completion.payload)),
            self.i_message.ready.eq(room & message),
            self.i_completion.ready.eq(room & ~message),
        ]
        with m.If(room):
            m.d.sync += tx.tvalid.eq(valid)
        with m.If(room & valid):
            m.d.sync += [
                inside.eq(~beat.last),
                held.eq(message),
                tx.tdata.eq(beat.data),
                tx.tlast.eq(beat.last),
            ]
            for lane in range(LANES):
                m.d.sync += tx.tkeep.word_select(lane, DWORD_BYTES).eq(
                    beat.keep[lane].replicate(DWORD_BYTES)
                )
        return m
