"""Which entry a RecvBuf takes next, and what the peer has to be told."""

from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_spec.coarse.config import SEQUENCE_BITS


class RecvFlow(wiring.Component):
    """Sequence numbers of the receiving side of a group, modulo `2 ** sequence_bits`.

    Takes the entry `o_received` and no other, and only if the buffer has a place for it. An entry
    that comes before one that is missing, or is broken, makes it ask for `o_received`, once for
    each number; the peer's timeout covers a request that is lost. An entry that it has is
    acknowledged again.

    Parameters
    ----------
    depth : entries of the RecvBuf, a power of two.
    sequence_bits : of a number; more than those of `depth`.

    Members
    -------
    i_begin : the entry `i_sequence` begins. Ends the one before, if that has not ended.
    i_end : the entry that began last is whole.
    i_fail : it is not. May come with `i_begin` of the next.
    i_consume : the core has read the oldest entry. Only while `o_available`.
    i_report : the numbers go to the peer, with the request.
    o_storing : phits of the entry that began last are wanted, at place `o_received`.
    o_accept, o_gap, o_duplicate : pulses.
    o_received, o_consumed : entries taken, and read by the core.
    o_available : an entry can be read.
    o_resend : the peer is to send again from `o_received` on.
    o_changed : the peer does not know the numbers, or shall hear them again.
    o_urgent : the peer lacks half of the numbers that let it go on.
    """

    def __init__(self, *, depth: int, sequence_bits: int = SEQUENCE_BITS) -> None:
        self.depth = depth
        self.sequence_bits = sequence_bits
        super().__init__(
            {
                "i_begin": In(1),
                "i_sequence": In(sequence_bits),
                "i_end": In(1),
                "i_fail": In(1),
                "i_consume": In(1),
                "i_report": In(1),
                "o_storing": Out(1),
                "o_accept": Out(1),
                "o_gap": Out(1),
                "o_duplicate": Out(1),
                "o_received": Out(sequence_bits),
                "o_consumed": Out(sequence_bits),
                "o_available": Out(1),
                "o_resend": Out(1),
                "o_changed": Out(1),
                "o_urgent": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bits = self.sequence_bits
        received, consumed = self.o_received, self.o_consumed
        inside = Signal(bits)
        distance = Signal(bits)
        room = Signal()
        m.d.comb += [
            inside.eq(received - consumed),
            room.eq(inside < self.depth),
            distance.eq(self.i_sequence - received),
            self.o_available.eq(inside != 0),
            self.o_accept.eq(self.i_end & self.o_storing),
            self.o_duplicate.eq(self.i_begin & distance[-1]),
            self.o_gap.eq(self.i_begin & ~distance[-1] & ((distance != 0) | ~room)),
        ]
        with m.If(self.i_begin):
            m.d.sync += self.o_storing.eq((distance == 0) & room)
        with m.Elif(self.i_end | self.i_fail):
            m.d.sync += self.o_storing.eq(0)
        m.d.sync += [
            received.eq(received + self.o_accept),
            consumed.eq(consumed + self.i_consume),
        ]

        asked = Signal()  # for this number
        again = Signal()
        told_received = Signal(bits)
        told_consumed = Signal(bits)
        new_received = Signal(bits)
        new_consumed = Signal(bits)
        half = max(self.depth // 2, 1)
        m.d.comb += [
            new_received.eq(received - told_received),
            new_consumed.eq(consumed - told_consumed),
            self.o_changed.eq(again | (new_received != 0) | (new_consumed != 0)),
            self.o_urgent.eq((new_received >= half) | (new_consumed >= half)),
        ]
        with m.If(self.i_report):
            m.d.sync += [
                told_received.eq(received),
                told_consumed.eq(consumed),
                again.eq(0),
                self.o_resend.eq(0),
            ]
        with m.If(self.o_duplicate):
            m.d.sync += again.eq(1)
        with m.If(self.o_accept):
            m.d.sync += [asked.eq(0), self.o_resend.eq(0)]
        with m.Elif((self.o_gap | (self.i_fail & self.o_storing)) & ~asked):
            m.d.sync += [asked.eq(1), self.o_resend.eq(1)]
        return m
