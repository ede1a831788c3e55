"""Sender of a link: entries of the groups in turn, acknowledgements, aborts."""

from amaranth import Array, Cat, Const, Module, Mux, Signal
from amaranth.hdl import unsigned
from amaranth.lib import stream, wiring
from amaranth.lib.data import View
from amaranth.lib.wiring import In, Out, connect, flipped

from nearstep_hw.coarse.crc import HEADER_BITS, entry_crc, header_crc
from nearstep_hw.coarse.send_flow import TIMER_BITS
from nearstep_hw.coarse.send_ring import LENGTH_BITS
from nearstep_hw.coarse.wire import (
    ABORT,
    EPOCH_BITS,
    HEADER,
    MAP_BITS,
    MEMBER_BITS,
    PHIT_BITS,
    FrameKind,
    LinkPhit,
)
from nearstep_hw.stream.slice import StreamSlice
from nearstep_spec.coarse.config import MAX_GROUPS, SEQUENCE_BITS

CAUSE_BITS = 8
ACKNOWLEDGE_CYCLES = 32
"""Cycles for which a changed acknowledgement waits to be piggybacked on an entry."""

PROBE_CYCLES = 64
"""Cycles without a frame after which the peer is probed for the entries it has received."""


class FrameWriter(wiring.Component):
    """Sends the frames of one port.

    The next frame is an ABORT frame if due; else an entry, round-robin over the groups; else a
    control frame if an entry is lost, or the peer lacks half of its credits, or unreported numbers
    have changed for `ACKNOWLEDGE_CYCLES`, or nothing was sent for `i_keepalive` cycles, or for
    `PROBE_CYCLES` while a group waits for the peer. Every header except that of an ABORT has the
    current numbers of all groups, and the missing entries of one group, in turn: first of groups
    with `i_asks`.

    *Timing*: the header is at `o` two cycles after the decision, which is made while the trailer of
    the previous entry is sent: a phit a cycle, without a gap between entries.

    Parameters
    ----------
    groups : sync cores.

    Members
    -------
    o : to the link.
    i_used : this port has a peer; otherwise no new frame is sent.
    i_offer, i_sequence, i_length : of each group, an entry ready to be sent on this port.
    i_serial, i_waits : of each group, the number of transmissions, and whether the group waits for
        the peer on this port.
    o_take : pulse in the bit of the group whose entry begins; `o_advance` requests the next phit.
    o_group, i_data : the group whose entry is being sent, and its phit.
    i_mine : groups that receive on this port.
    i_received, i_consumed : of each group in `i_mine`; 0 for others.
    i_passed, i_accepted, i_asks : of each group; a header reports one group of `i_mine`.
    i_changed, i_urgent : the peer does not have the current numbers, and needs them.
    o_report, o_told : the current numbers are being sent, and the report of this group.
    i_epoch, i_keepalive : for headers; cycles, 0: never.
    i_abort, i_cause, i_device, i_port : send ABORT frames only, at once and as keepalive.
    o_sent, o_payload, o_stall : strobes: a phit is sent; a phit of an entry is queued; a phit
        stalls.
    """

    def __init__(self, *, groups: int) -> None:
        self.groups = groups
        super().__init__(
            {
                "o": Out(stream.Signature(LinkPhit)),
                "i_used": In(1),
                "i_offer": In(groups),
                "i_sequence": In(SEQUENCE_BITS).array(groups),
                "i_length": In(LENGTH_BITS).array(groups),
                "i_serial": In(SEQUENCE_BITS).array(groups),
                "i_waits": In(groups),
                "o_take": Out(groups),
                "o_advance": Out(1),
                "o_group": Out(range(MAX_GROUPS)),
                "i_data": In(PHIT_BITS),
                "i_mine": In(groups),
                "i_received": In(SEQUENCE_BITS).array(groups),
                "i_consumed": In(SEQUENCE_BITS).array(groups),
                "i_passed": In(SEQUENCE_BITS).array(groups),
                "i_accepted": In(MAP_BITS).array(groups),
                "i_asks": In(groups),
                "i_changed": In(1),
                "i_urgent": In(1),
                "o_report": Out(1),
                "o_told": Out(groups),
                "i_epoch": In(EPOCH_BITS),
                "i_keepalive": In(TIMER_BITS),
                "i_abort": In(1),
                "i_cause": In(CAUSE_BITS),
                "i_device": In(MEMBER_BITS),
                "i_port": In(1),
                "o_sent": Out(1),
                "o_payload": Out(1),
                "o_stall": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.header_crc = header_crc_ = header_crc()
        m.submodules.entry_crc = entry_crc_ = entry_crc()
        go = Signal()
        decide = Signal()
        header = Signal(HEADER_BITS)
        is_entry = Signal()
        left = Signal(LENGTH_BITS)

        abort, entry, control, probe = self._due(m, decide)
        offers, asks = Signal(self.groups), Signal(self.groups)
        last_told = Signal(range(MAX_GROUPS))
        m.d.comb += [
            offers.eq(Mux(entry, self.i_offer, self.i_waits)),
            asks.eq(Mux(self.i_asks != 0, self.i_asks, self.i_mine)),
        ]
        group, told = self._turn(m, self.o_group, offers), self._turn(m, last_told, asks)
        prepared = Signal(PHIT_BITS)
        tells = self._header(m, entry, group, told, probe)
        m.d.comb += prepared.eq(Mux(abort, self._abort(), tells))
        begin = Signal()
        m.d.comb += [
            begin.eq(decide & (abort | entry | control)),
            self.o_report.eq(begin & ~abort),
            self.o_told.eq(Mux(self.o_report, 1 << told, 0)),
            self.o_take.eq(Mux(begin & entry, 1 << group, 0)),
            header_crc_.start.eq(begin),
            header_crc_.valid.eq(begin),
            header_crc_.data.eq(prepared),
        ]
        with m.If(begin):
            m.d.sync += [
                header.eq(prepared),
                is_entry.eq(entry),
                self.o_group.eq(group),
                last_told.eq(told),
                left.eq(Array(self.i_length)[group]),
            ]

        phit = Signal(LinkPhit)
        give = Signal()
        payload = Signal()
        first = Signal()
        m.d.comb += [
            entry_crc_.start.eq(first),
            entry_crc_.valid.eq(payload & go),
            entry_crc_.data.eq(self.i_data),
            self.o_advance.eq(payload & go),
        ]
        with m.FSM():
            with m.State("DECIDE"):
                m.d.comb += decide.eq(1)
                with m.If(begin):
                    m.next = "HEADER"
            with m.State("HEADER"):
                m.d.comb += [
                    give.eq(1),
                    phit.data.eq(Cat(header, header_crc_.crc)),
                    phit.head.eq(1),
                    phit.last.eq(~is_entry),
                ]
                m.d.sync += first.eq(1)
                with m.If(go):
                    m.next = "DECIDE"
                    with m.If(is_entry):
                        m.next = "ENTRY"
            with m.State("ENTRY"):
                m.d.comb += [give.eq(1), payload.eq(1), phit.data.eq(self.i_data)]
                with m.If(go):
                    m.d.sync += [left.eq(left - 1), first.eq(0)]
                    with m.If(left == 0):
                        m.next = "TRAILER"
            with m.State("TRAILER"):
                m.d.comb += [
                    give.eq(1),
                    phit.data.eq(Cat(Const(0, HEADER_BITS), entry_crc_.crc)),
                    phit.last.eq(1),
                    decide.eq(go),
                ]
                with m.If(go):
                    m.next = "DECIDE"
                    with m.If(begin):
                        m.next = "HEADER"

        # Registers in both directions: no path from the link's `ready` to the CRCs.
        m.submodules.slice = out = StreamSlice(LinkPhit)
        connect(m, out.o, flipped(self.o))
        m.d.comb += [
            go.eq(out.i.ready),
            out.i.valid.eq(give),
            out.i.payload.eq(phit),
            self.o_sent.eq(self.o.valid & self.o.ready),
            self.o_payload.eq(payload & go),
            self.o_stall.eq(self.o.valid & ~self.o.ready),
        ]
        return m

    def _due(self, m: Module, decide: Signal) -> tuple[Signal, Signal, Signal, Signal]:
        """Return the kind of the next frame, if any: abort, entry or control; and whether it
        probes.
        """
        quiet = Signal(TIMER_BITS)  # cycles since the last frame
        waiting = Signal(range(ACKNOWLEDGE_CYCLES + 1))
        aborted = Signal()  # an ABORT frame was sent
        keepalive, abort, entry, control, probe = (
            Signal(name=name) for name in ("keepalive", "abort", "entry", "control", "probe")
        )
        acknowledge = self.i_urgent | (waiting == ACKNOWLEDGE_CYCLES)
        m.d.comb += [
            keepalive.eq((self.i_keepalive != 0) & (quiet >= self.i_keepalive)),
            abort.eq(self.i_used & self.i_abort & (~aborted | keepalive)),
            entry.eq(self.i_used & ~self.i_abort & (self.i_offer != 0)),
            probe.eq((self.i_waits != 0) & (keepalive | (quiet >= PROBE_CYCLES))),
            control.eq(
                self.i_used & ~self.i_abort & ((self.i_asks != 0) | acknowledge | keepalive | probe)
            ),
        ]
        # `quiet` counts only between frames.
        with m.If(decide & (abort | entry | control)):
            m.d.sync += [quiet.eq(0), waiting.eq(0)]
        with m.Else():
            with m.If(decide & ~keepalive):
                m.d.sync += quiet.eq(quiet + 1)
            with m.If(~self.i_changed):
                m.d.sync += waiting.eq(0)
            with m.Elif(waiting != ACKNOWLEDGE_CYCLES):
                m.d.sync += waiting.eq(waiting + 1)
        with m.If(~self.i_abort):
            m.d.sync += aborted.eq(0)
        with m.Elif(decide & abort):
            m.d.sync += aborted.eq(1)
        return abort, entry, control, probe

    def _turn(self, m: Module, before: Signal, offers: Signal) -> Signal:
        """Return the next group after `before` with an offer, round-robin."""
        group = Signal(range(MAX_GROUPS))
        with m.Switch(before):
            for last in range(self.groups):
                with m.Case(last):
                    # The last assignment wins: the nearest after `last`.
                    for step in range(self.groups, 0, -1):
                        candidate = (last + step) % self.groups
                        with m.If(offers[candidate]):
                            m.d.comb += group.eq(candidate)
        return group

    def _header(self, m: Module, entry: Signal, group: Signal, told: Signal, probe: Signal) -> View:
        header = Signal(HEADER)
        m.d.comb += [
            header.kind.eq(Mux(entry, FrameKind.ENTRY, FrameKind.CONTROL)),
            header.epoch.eq(self.i_epoch),
            header.group.eq(group),
            header.length.eq(Mux(entry, Array(self.i_length)[group], probe)),
            header.serial.eq(Array(self.i_serial)[group] + entry),
            header.told.eq(told),
            header.passed.eq(Array(self.i_passed)[told]),
            header.accepted.eq(Array(self.i_accepted)[told]),
        ]
        with m.If(entry):
            m.d.comb += header.sequence.eq(Array(self.i_sequence)[group])
        for index in range(self.groups):
            m.d.comb += [
                header.received[index].eq(self.i_received[index]),
                header.consumed[index].eq(self.i_consumed[index]),
            ]
        return header.as_value()

    def _abort(self) -> View:
        fields = {
            "kind": Const(FrameKind.ABORT.value, unsigned(3)),
            "epoch": self.i_epoch,
            "cause": self.i_cause,
            "device": self.i_device,
            "port": self.i_port,
        }
        parts = [fields.get(name, Const(0, field.width)) for name, field in ABORT]
        return Cat(*parts)[:HEADER_BITS]
