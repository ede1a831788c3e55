"""Receiver of a link: checks frames, and times out without valid headers."""

from amaranth import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.crc import entry_crc, header_crc
from nearstep_hw.coarse.frame_writer import CAUSE_BITS
from nearstep_hw.coarse.send_flow import TIMER_BITS
from nearstep_hw.coarse.send_ring import LENGTH_BITS
from nearstep_hw.coarse.wire import (
    ABORT,
    EPOCH_BITS,
    HEADER,
    MAP_BITS,
    MEMBER_BITS,
    PHIT_BITS,
    TRAILER,
    FrameKind,
    LinkPhit,
)
from nearstep_spec.coarse.config import MAX_GROUPS, SEQUENCE_BITS


class FrameReader(wiring.Component):
    """Parses the frames of one port.

    A header is valid if its CRC is correct and its epoch is `i_epoch`; acknowledgements and credits
    of a valid header are used even if its entry is dropped. Phits outside an entry with a valid
    header are dropped.

    *Timing*: acts on a phit in the next cycle; a phit a cycle.

    Parameters
    ----------
    groups : sync cores.
    entry_phits : most phits of an entry.

    Members
    -------
    i : from the link.
    i_used : this port has a peer; otherwise all phits are dropped.
    i_epoch : epoch of valid frames.
    i_mine : groups that receive on this port. An entry for another group is a bad frame.
    o_heard, o_received, o_consumed : pulse: a header, and its numbers for each group.
    o_told, o_passed, o_accepted : with the header: the group `told` and its values.
    o_begin, o_sequence, o_serial : pulse in the group's bit: an entry begins.
    o_probe, o_answer : pulse in the group's bit: a control frame with `o_serial`; the frame
        requests an answer.
    o_write, o_index, o_data : a phit of the entry.
    o_end, o_length : pulse: the entry was correct, of `o_length + 1` phits.
    o_fail : pulse: the entry was damaged.
    o_bad : strobe: a frame was damaged.
    o_abort, o_cause, o_device, o_port : pulse: an ABORT frame, and its contents.
    i_watch, i_silence_limit, o_silent : no valid header for more than `i_silence_limit` cycles of
        `i_watch`; 0: never.
    """

    def __init__(self, *, groups: int, entry_phits: int) -> None:
        self.groups = groups
        self.entry_phits = entry_phits
        super().__init__(
            {
                "i": In(stream.Signature(LinkPhit, always_ready=True)),
                "i_used": In(1),
                "i_epoch": In(EPOCH_BITS),
                "i_mine": In(groups),
                "o_heard": Out(1),
                "o_received": Out(SEQUENCE_BITS).array(groups),
                "o_consumed": Out(SEQUENCE_BITS).array(groups),
                "o_told": Out(groups),
                "o_passed": Out(SEQUENCE_BITS),
                "o_accepted": Out(MAP_BITS),
                "o_begin": Out(groups),
                "o_sequence": Out(SEQUENCE_BITS),
                "o_serial": Out(SEQUENCE_BITS),
                "o_probe": Out(groups),
                "o_answer": Out(1),
                "o_write": Out(groups),
                "o_index": Out(LENGTH_BITS),
                "o_data": Out(PHIT_BITS),
                "o_end": Out(groups),
                "o_length": Out(LENGTH_BITS),
                "o_fail": Out(groups),
                "o_bad": Out(1),
                "o_abort": Out(1),
                "o_cause": Out(CAUSE_BITS),
                "o_device": Out(MEMBER_BITS),
                "o_port": Out(1),
                "i_watch": In(1),
                "i_silence_limit": In(TIMER_BITS),
                "o_silent": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.header_crc = header_crc_ = header_crc()
        m.submodules.entry_crc = entry_crc_ = entry_crc()
        comes = Signal()
        phit = Signal(LinkPhit)
        valid = Signal()
        m.d.comb += [
            comes.eq(self.i.valid & self.i_used),
            header_crc_.start.eq(comes & self.i.payload.head),
            header_crc_.valid.eq(comes & self.i.payload.head),
            header_crc_.data.eq(self.i.payload.data),
        ]
        m.d.sync += valid.eq(comes)
        with m.If(comes):
            m.d.sync += phit.eq(self.i.payload)

        header, abort, trailer = HEADER(phit.data), ABORT(phit.data), TRAILER(phit.data)
        head = Signal()
        right = Signal()  # a valid header
        begins = Signal()
        control = Signal()
        mine = Signal()
        ours = Signal()
        m.d.comb += [
            head.eq(valid & phit.head),
            right.eq(head & (header.crc == header_crc_.crc) & (header.epoch == self.i_epoch)),
            begins.eq(right & (header.kind == FrameKind.ENTRY)),
            control.eq(right & (header.kind == FrameKind.CONTROL)),
            self.o_heard.eq(begins | control),
            mine.eq(self.i_mine.bit_select(header.group, 1)),
            ours.eq(mine & (header.length < self.entry_phits) & ~phit.last),
            self.o_told.eq(Mux(self.o_heard, 1 << header.told, 0)),
            self.o_passed.eq(header.passed),
            self.o_accepted.eq(header.accepted),
            self.o_sequence.eq(header.sequence),
            self.o_serial.eq(header.serial),
            self.o_probe.eq(Mux(control & mine, 1 << header.group, 0)),
            self.o_answer.eq(header.length[0]),
            self.o_begin.eq(Mux(begins & ours, 1 << header.group, 0)),
            self.o_abort.eq(right & (header.kind == FrameKind.ABORT)),
            self.o_cause.eq(abort.cause),
            self.o_device.eq(abort.device),
            self.o_port.eq(abort.port),
        ]
        for index in range(self.groups):
            m.d.comb += [
                self.o_received[index].eq(header.received[index]),
                self.o_consumed[index].eq(header.consumed[index]),
            ]

        inside = Signal()  # inside an entry
        first = Signal()
        group = Signal(range(MAX_GROUPS))
        index = Signal(range((1 << LENGTH_BITS) + 1))
        more = Signal()
        at_end = Signal()
        whole = Signal()
        broken = Signal()
        m.d.comb += [
            more.eq(valid & inside & ~phit.head & (index <= self.o_length)),
            at_end.eq(valid & inside & ~phit.head & (index == self.o_length + 1)),
            whole.eq(at_end & phit.last & (trailer.crc == entry_crc_.crc)),
            broken.eq((head & inside) | (more & phit.last) | (at_end & ~whole)),
            entry_crc_.start.eq(more & first),
            entry_crc_.valid.eq(more),
            entry_crc_.data.eq(phit.data),
            self.o_index.eq(index),
            self.o_data.eq(phit.data),
            self.o_write.eq(Mux(more, 1 << group, 0)),
            self.o_end.eq(Mux(whole, 1 << group, 0)),
            self.o_fail.eq(Mux(broken, 1 << group, 0)),
            self.o_bad.eq(broken | (head & (header.crc != header_crc_.crc)) | (begins & ~ours)),
        ]
        with m.If(head):
            m.d.sync += [
                inside.eq(begins & ours),
                group.eq(header.group),
                self.o_length.eq(header.length),
                index.eq(0),
                first.eq(1),
            ]
        with m.Elif(broken | whole):
            m.d.sync += inside.eq(0)
        with m.Elif(more):
            m.d.sync += [index.eq(index + 1), first.eq(0)]
        self._silence(m, right)
        return m

    def _silence(self, m: Module, right: Signal) -> None:
        quiet = Signal(TIMER_BITS)
        m.d.comb += self.o_silent.eq(
            (self.i_silence_limit != 0) & (quiet > self.i_silence_limit) & self.i_watch
        )
        with m.If(right | ~self.i_watch | ~self.i_used):
            m.d.sync += quiet.eq(0)
        with m.Elif(~self.o_silent):
            m.d.sync += quiet.eq(quiet + 1)
