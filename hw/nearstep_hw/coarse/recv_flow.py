"""Acceptance of entries by a RecvBuf, and reports to the peer."""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.wire import MAP_BITS
from nearstep_spec.coarse.config import SEQUENCE_BITS


class RecvFlow(wiring.Component):
    """Sequence numbers of the receiving side of a group, modulo `2 ** sequence_bits`.

    Missing entries are accepted in any order if their slot is free: numbers from `o_received`, the
    first missing one, up to `depth` after `o_consumed`. `o_accepted` marks accepted entries;
    `o_received` advances over them, one a cycle. Every transmission of an entry has a new serial
    number, so a gap in the serial numbers is a lost transmission. All transmissions up to
    `o_passed` have been received or lost: an entry last sent under a serial number up to
    `o_passed`, and not accepted, is lost.

    Parameters
    ----------
    depth : entries of the RecvBuf, a power of two.
    sequence_bits : of a number; more than those of `depth`.

    Members
    -------
    i_begin : the entry `i_sequence` begins, sent as `i_serial`. Ends an unfinished entry before.
    i_end : the current entry is intact.
    i_fail : the current entry is damaged. May be set with the next `i_begin`.
    i_probe : the peer has sent all up to `i_serial`; with `i_answer` it requests an answer.
    i_consume : the core has read the oldest entry. Only while `o_available`.
    i_report : the numbers are sent to the peer.
    i_told : `o_passed` and `o_accepted` are sent too.
    o_storing : the current entry is stored, under the number `o_place`.
    o_accept, o_gap, o_duplicate : pulses.
    o_received, o_consumed : entries accepted with all before them, and read by the core.
    o_accepted : a bit for each entry from `o_received` on, at most `MAP_BITS`.
    o_passed : see above.
    o_available : an entry can be read.
    o_asks : the peer must be informed at once.
    o_changed : the peer does not have the current numbers.
    o_urgent : the peer lacks half of its credits.
    """

    def __init__(self, *, depth: int, sequence_bits: int = SEQUENCE_BITS) -> None:
        self.depth = depth
        self.sequence_bits = sequence_bits
        super().__init__(
            {
                "i_begin": In(1),
                "i_sequence": In(sequence_bits),
                "i_serial": In(sequence_bits),
                "i_end": In(1),
                "i_fail": In(1),
                "i_probe": In(1),
                "i_answer": In(1),
                "i_consume": In(1),
                "i_report": In(1),
                "i_told": In(1),
                "o_storing": Out(1),
                "o_place": Out(sequence_bits),
                "o_accept": Out(1),
                "o_gap": Out(1),
                "o_duplicate": Out(1),
                "o_received": Out(sequence_bits),
                "o_consumed": Out(sequence_bits),
                "o_accepted": Out(min(depth, MAP_BITS)),
                "o_passed": Out(sequence_bits),
                "o_available": Out(1),
                "o_asks": Out(1),
                "o_changed": Out(1),
                "o_urgent": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bits, depth = self.sequence_bits, self.depth
        slot_bits = (depth - 1).bit_length()
        received, consumed = self.o_received, self.o_consumed
        accepted = Signal(depth)  # of entries from `received` on
        inside = Signal(bits)
        offset = Signal(bits)
        distance = Signal(slot_bits)  # from `received`
        wanted = Signal()
        m.d.comb += [
            inside.eq(received - consumed),
            offset.eq(self.i_sequence - consumed),
            distance.eq(self.i_sequence - received),
            wanted.eq((offset < depth) & (offset >= inside) & ~accepted.bit_select(distance, 1)),
            self.o_available.eq(inside != 0),
            self.o_accept.eq(self.i_end & self.o_storing),
            self.o_duplicate.eq(self.i_begin & ~wanted),
        ]
        with m.If(self.i_begin):
            m.d.sync += [self.o_storing.eq(wanted), self.o_place.eq(self.i_sequence)]
        with m.Elif(self.i_end | self.i_fail):
            m.d.sync += self.o_storing.eq(0)

        stored = Signal(slot_bits)  # from `received` to the current entry
        now_accepted = Signal(depth)
        m.d.comb += [
            stored.eq(self.o_place - received),
            now_accepted.eq(accepted | (self.o_accept << stored)),
            self.o_accepted.eq(accepted),
        ]
        m.d.sync += [
            accepted.eq(Mux(now_accepted[0], now_accepted >> 1, now_accepted)),
            received.eq(received + now_accepted[0]),
            consumed.eq(consumed + self.i_consume),
        ]

        self._passes(m)
        told_received = Signal(bits)
        told_consumed = Signal(bits)
        new_received = Signal(bits)
        new_consumed = Signal(bits)
        half = max(depth // 2, 1)
        m.d.comb += [
            new_received.eq(received - told_received),
            new_consumed.eq(consumed - told_consumed),
            self.o_changed.eq((new_received != 0) | (new_consumed != 0)),
            self.o_urgent.eq((new_received >= half) | (new_consumed >= half)),
        ]
        with m.If(self.i_report):
            m.d.sync += [told_received.eq(received), told_consumed.eq(consumed)]
        return m

    def _passes(self, m: Module) -> None:
        """Drive `o_passed`, `o_gap` and `o_asks`."""
        bits = self.sequence_bits
        ended = Signal(bits)
        passed = Signal(bits)
        lost = Signal(bits)
        m.d.comb += [
            ended.eq(self.o_passed + (self.i_end | self.i_fail)),
            # An entry that begins now has not passed before its end.
            passed.eq(self.i_serial - self.i_begin),
            lost.eq(passed - ended),
            self.o_gap.eq((self.i_begin | self.i_probe) & (lost != 0) & ~lost[-1]),
        ]
        m.d.sync += self.o_passed.eq(Mux(self.i_begin | self.i_probe, passed, ended))
        with m.If(self.o_gap | (self.i_fail & self.o_storing) | (self.i_probe & self.i_answer)):
            m.d.sync += self.o_asks.eq(1)
        with m.Elif(self.i_told):
            m.d.sync += self.o_asks.eq(0)
