"""Selection of the next entry of a SendBuf to send: selective repeat with credits."""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.coarse.wire import MAP_BITS
from nearstep_spec.coarse.config import SEQUENCE_BITS

TIMER_BITS = 32


class SendFlow(wiring.Component):
    """Sequence numbers of the sending side of a group, modulo `2 ** sequence_bits`.

    Entries are numbered in the order of `i_put`. Four pointers divide the entries, in circular
    order: `consumed` (earlier entries were read by the peer's core), `acknowledged` (earlier
    entries were received by the peer), `sent` (earlier entries were sent at least once), `written`.
    An entry is held until it is acknowledged, and is sent only if the peer's RecvBuf has a free
    slot. The peer's numbers are used only if they are between the pointer and `sent`: a delayed or
    repeated header cannot decrease a pointer. When the peer reports its entries and the last serial
    number that passed it, the entries are scanned: an entry that the peer lacks, and that was last
    sent under that serial number or an earlier one, is retransmitted before any new entry. After
    `i_retry` cycles with entries outstanding and none sent or acknowledged, the oldest outstanding
    entries are retransmitted, at most as many as `i_accepted` has bits.

    *Timing*: scans an entry a cycle, from the second cycle after `i_heard`.

    Parameters
    ----------
    depth : entries of this SendBuf, and of the peer's RecvBuf; a power of two.
    sequence_bits : bits of a number; more than those of `depth`.

    Members
    -------
    i_put : an entry was written. Only while `o_room`.
    i_take : the entry `o_next` is being sent, as `o_serial + 1`. Only while `o_offer`.
    i_heard : a header was received, with `i_received` and `i_consumed`; with `i_told`, also
        `i_passed` and `i_accepted` of this group. All as of `RecvFlow`.
    i_retry : cycles; 0: never.
    o_room : a slot is free, for the entry `o_written`.
    o_offer : the entry `o_next` may be sent.
    o_serial : number of transmissions of entries.
    o_waits : entries are outstanding or wait for a credit: the peer should report.
    o_found, o_again, o_missing : `o_next` was sent before; the entry being scanned, and the entries
        from there on that the peer lacks and that are still to be scanned.
    o_replay : pulse: an entry is sent again.
    """

    def __init__(self, *, depth: int, sequence_bits: int = SEQUENCE_BITS) -> None:
        self.depth = depth
        self.sequence_bits = sequence_bits
        self.map_bits = min(depth, MAP_BITS)
        super().__init__(
            {
                "i_put": In(1),
                "i_take": In(1),
                "i_heard": In(1),
                "i_received": In(sequence_bits),
                "i_consumed": In(sequence_bits),
                "i_told": In(1),
                "i_passed": In(sequence_bits),
                "i_accepted": In(self.map_bits),
                "i_retry": In(TIMER_BITS),
                "o_room": Out(1),
                "o_offer": Out(1),
                "o_written": Out(sequence_bits),
                "o_next": Out(sequence_bits),
                "o_serial": Out(sequence_bits),
                "o_acknowledged": Out(sequence_bits),
                "o_sent": Out(sequence_bits),
                "o_consumed": Out(sequence_bits),
                "o_waits": Out(1),
                "o_found": Out(1),
                "o_again": Out(sequence_bits),
                "o_missing": Out(self.map_bits),
                "o_replay": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bits = self.sequence_bits
        written, sent = self.o_written, self.o_sent
        acknowledged, consumed = self.o_acknowledged, self.o_consumed

        used = Signal(bits)
        promised = Signal(bits)  # slots of the peer's RecvBuf in use
        out = Signal(bits)
        more = Signal()
        place = Signal()
        m.d.comb += [
            used.eq(written - acknowledged),
            promised.eq(sent - consumed),
            out.eq(sent - acknowledged),
            more.eq(sent != written),
            place.eq(promised < self.depth),
            self.o_room.eq(used < self.depth),
            self.o_waits.eq((out != 0) | (more & ~place)),
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
        progress = Signal()
        m.d.comb += [
            expired.eq((self.i_retry != 0) & (timer >= self.i_retry) & (out != 0)),
            progress.eq(known & (news != 0)),
        ]
        with m.If((out == 0) | self.i_take | expired | progress):
            m.d.sync += timer.eq(0)
        with m.Else():
            m.d.sync += timer.eq(timer + 1)

        self._find(m, known, progress, expired)
        m.d.comb += [
            self.o_offer.eq(self.o_found | (more & place)),
            self.o_next.eq(Mux(self.o_found, self.o_again, sent)),
            self.o_replay.eq(self.o_found & self.i_take),
        ]
        m.d.sync += [
            written.eq(written + self.i_put),
            acknowledged.eq(now_acknowledged),
            sent.eq(sent + (self.i_take & ~self.o_found)),
            self.o_serial.eq(self.o_serial + self.i_take),
        ]
        with m.If(self.i_heard & (credits <= most_credits)):
            m.d.sync += consumed.eq(self.i_consumed)
        return m

    def _find(self, m: Module, known: Signal, progress: Signal, expired: Signal) -> None:
        """Scan the entries that may be lost, in turn."""
        bits, slot_bits = self.sequence_bits, ceil_log2(self.depth)
        m.submodules.serials = serials = Memory(shape=bits, depth=self.depth, init=[])
        write, read = serials.write_port(), serials.read_port(domain="comb")
        found, again, missing = self.o_found, self.o_again, self.o_missing
        passed = Signal(bits)
        all_lost = Signal()
        since = Signal(bits)
        m.d.comb += [
            write.addr.eq(self.o_next[:slot_bits]),
            write.data.eq(self.o_serial + 1),
            write.en.eq(self.i_take),
            read.addr.eq(again[:slot_bits]),
            since.eq(passed - read.data),
        ]
        with m.If(known & self.i_told):
            m.d.sync += [
                found.eq(0),
                again.eq(self.i_received),
                missing.eq(~self.i_accepted),
                passed.eq(self.i_passed),
                all_lost.eq(0),
            ]
        with m.Elif(progress):
            m.d.sync += [found.eq(0), missing.eq(0)]
        with m.Elif(expired):
            m.d.sync += [
                found.eq(0),
                again.eq(self.o_acknowledged),
                missing.eq(~0),
                all_lost.eq(1),
            ]
        with m.Elif(~found & (again == self.o_sent)):
            m.d.sync += missing.eq(0)
        with m.Elif(~found & missing[0] & (all_lost | ~since[-1])):
            m.d.sync += found.eq(1)
        with m.Elif(~found | self.i_take):
            m.d.sync += [found.eq(0), again.eq(again + 1), missing.eq(missing >> 1)]
