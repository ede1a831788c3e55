"""Which entry of a SendBuf goes out next: go-back-N with credits."""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_spec.coarse.config import SEQUENCE_BITS

TIMER_BITS = 32


class SendFlow(wiring.Component):
    """Sequence numbers of the sending side of a group, modulo `2 ** sequence_bits`.

    Entries are numbered as they are put in. Five numbers divide them, in this order around the
    circle: `consumed` (the peer's core has read those before), `acknowledged` (the peer has those
    before), `next` (sent next), `sent` (those before were sent at least once), `written`. An entry
    stays until it is acknowledged, and is sent only if the peer's RecvBuf has a place for it.

    What the peer says counts only if it lies between what is known and what was sent: a header
    that was held back or came twice moves nothing backwards. A valid request, or `i_retry` cycles
    in which entries were out and none was sent or acknowledged, rewinds `next` to `acknowledged`.

    Parameters
    ----------
    depth : entries of this SendBuf, and of the peer's RecvBuf; a power of two.
    sequence_bits : of a number; more than those of `depth`.

    Members
    -------
    i_put : an entry is in the buffer. Only while `o_room`.
    i_take : the entry `o_next` is being sent. Only while `o_offer`.
    i_heard : a header came, with `i_received`, `i_consumed` and `i_resend`.
    i_retry : cycles; 0: never.
    o_room : there is a place for an entry, `o_written`.
    o_offer : the entry `o_next` may be sent.
    o_replay : pulse: entries will be sent again.
    """

    def __init__(self, *, depth: int, sequence_bits: int = SEQUENCE_BITS) -> None:
        self.depth = depth
        self.sequence_bits = sequence_bits
        super().__init__(
            {
                "i_put": In(1),
                "i_take": In(1),
                "i_heard": In(1),
                "i_received": In(sequence_bits),
                "i_consumed": In(sequence_bits),
                "i_resend": In(1),
                "i_retry": In(TIMER_BITS),
                "o_room": Out(1),
                "o_offer": Out(1),
                "o_written": Out(sequence_bits),
                "o_next": Out(sequence_bits),
                "o_acknowledged": Out(sequence_bits),
                "o_sent": Out(sequence_bits),
                "o_consumed": Out(sequence_bits),
                "o_replay": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bits = self.sequence_bits
        written, next_, sent = self.o_written, self.o_next, self.o_sent
        acknowledged, consumed = self.o_acknowledged, self.o_consumed

        used = Signal(bits)
        promised = Signal(bits)  # places of the peer's RecvBuf that are taken
        out = Signal(bits)
        taken = Signal(bits)
        m.d.comb += [
            used.eq(written - acknowledged),
            promised.eq(next_ - consumed),
            out.eq(sent - acknowledged),
            taken.eq(next_ + self.i_take),
            self.o_room.eq(used < self.depth),
            self.o_offer.eq((next_ != written) & (promised < self.depth)),
        ]

        news = Signal(bits)
        known = Signal()
        now_acknowledged = Signal(bits)
        credits = Signal(bits)
        most_credits = Signal(bits)
        m.d.comb += [
            news.eq(self.i_received - acknowledged),
            known.eq(self.i_heard & (news <= out)),
            now_acknowledged.eq(Mux(known, self.i_received, acknowledged)),
            credits.eq(self.i_consumed - consumed),
            most_credits.eq(now_acknowledged - consumed),
        ]

        timer = Signal(TIMER_BITS)
        expired = Signal()
        rewind = Signal()
        ahead = Signal(bits)
        m.d.comb += [
            expired.eq((self.i_retry != 0) & (timer >= self.i_retry) & (out != 0)),
            rewind.eq(expired | (known & self.i_resend)),
            ahead.eq(taken - acknowledged),
            self.o_replay.eq(rewind & (taken != now_acknowledged)),
        ]
        m.d.sync += [
            written.eq(written + self.i_put),
            acknowledged.eq(now_acknowledged),
            # After a rewind, what was sent before can still be acknowledged.
            next_.eq(Mux(rewind | (known & (ahead < news)), now_acknowledged, taken)),
        ]
        with m.If(self.i_take & (next_ == sent)):
            m.d.sync += sent.eq(taken)
        with m.If(self.i_heard & (credits <= most_credits)):
            m.d.sync += consumed.eq(self.i_consumed)
        with m.If((out == 0) | self.i_take | rewind | (known & (news != 0))):
            m.d.sync += timer.eq(0)
        with m.Else():
            m.d.sync += timer.eq(timer + 1)
        return m
