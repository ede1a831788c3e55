"""Ring buffers and links of a memory device."""

from functools import reduce
from operator import or_

from amaranth import Array, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from nearstep_hw.coarse.frame_reader import FrameReader
from nearstep_hw.coarse.frame_writer import CAUSE_BITS, FrameWriter
from nearstep_hw.coarse.recv_ring import RecvRing
from nearstep_hw.coarse.send_flow import TIMER_BITS
from nearstep_hw.coarse.send_ring import SendRing
from nearstep_hw.coarse.wire import EPOCH_BITS, MEMBER_BITS, EntryPhit, LinkPhit
from nearstep_spec.coarse.config import PORTS, CoarseConfig
from nearstep_spec.coarse.registers import LINK_COUNTERS

LinkEvents = data.StructLayout(dict.fromkeys(LINK_COUNTERS, 1))
"""Events of a link in this cycle, one bit a counter."""


class LinkLayer(wiring.Component):
    """Transports entries between the sync cores of adjacent devices, over lossy links.

    Each group sends on one port and receives on the same or the other one. Every entry is delivered
    to the group's core of the next device exactly once and in order, even if links lose, duplicate,
    delay or corrupt frames. CRC, sequence and serial numbers detect loss; entries that the peer
    reports as missing are retransmitted (selective repeat), see `SendFlow`. A core that stalls
    blocks only its own group.

    *Timing*: on an idle link, the first phit of an entry is at `receive` 7 cycles, plus the phits
    of the entry and the link's latency, after its last phit was at `send`. A phit a cycle on each
    port in each direction, with `FRAME_PHITS` of overhead a frame, as long as `buffer_entries`
    entries cover the round trip of an entry and its credit. `i_retry` must exceed three of the
    longest frames and twice the latency.

    Parameters
    ----------
    config : its `groups`, `buffer_entries` and `entry_phits`.

    Members
    -------
    send, receive : entries from and to each group's core.
    link_out, link_in : phits of each port.
    i_send_port, i_receive_port : port of each group. Change only with `i_clear`.
    i_epoch : epoch of all frames; frames of another epoch are dropped. Change only with `i_clear`.
    i_used : ports with a peer. No phit is sent on others, and received phits are dropped.
    i_watch, i_silence_limit, o_silent : level of each port: no valid frame for more than
        `i_silence_limit` cycles of `i_watch`; 0: never.
    i_keepalive : cycles without a frame after which one is sent; 0: never.
    i_retry : cycles without progress after which entries are sent again; 0: never.
    i_abort, i_abort_cause, i_abort_device, i_abort_port : level: send only ABORT frames with these
        contents, on every port: one at once (after the current frame) and one every `i_keepalive`
        cycles.
    o_peer_abort, o_peer_cause, o_peer_device, o_peer_port : pulse: the first ABORT frame since
        `i_clear`, and its contents.
    i_clear : clears all entries and numbers. The current frame ends without its trailer, and a
        phit that waits for the link is withdrawn.
    o_events : events of each port in this cycle, a bit for each of `LINK_COUNTERS`.

    Ref: COARSE paper, sections III-D and IV-A.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        groups = config.groups
        super().__init__(
            {
                "send": In(stream.Signature(EntryPhit)).array(groups),
                "receive": Out(stream.Signature(EntryPhit)).array(groups),
                "link_out": Out(stream.Signature(LinkPhit)).array(PORTS),
                "link_in": In(stream.Signature(LinkPhit, always_ready=True)).array(PORTS),
                "i_send_port": In(1).array(groups),
                "i_receive_port": In(1).array(groups),
                "i_epoch": In(EPOCH_BITS),
                "i_used": In(PORTS),
                "i_watch": In(1),
                "i_silence_limit": In(TIMER_BITS),
                "i_keepalive": In(TIMER_BITS),
                "i_retry": In(TIMER_BITS),
                "i_abort": In(1),
                "i_abort_cause": In(CAUSE_BITS),
                "i_abort_device": In(MEMBER_BITS),
                "i_abort_port": In(1),
                "i_clear": In(1),
                "o_silent": Out(PORTS),
                "o_peer_abort": Out(1),
                "o_peer_cause": Out(CAUSE_BITS),
                "o_peer_device": Out(MEMBER_BITS),
                "o_peer_port": Out(1),
                "o_events": Out(LinkEvents).array(PORTS),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        groups, phits = self.config.groups, self.config.entry_phits
        senders = [SendRing(self.config) for _ in range(groups)]
        receivers = [RecvRing(self.config) for _ in range(groups)]
        writers = [FrameWriter(groups=groups) for _ in range(PORTS)]
        readers = [FrameReader(groups=groups, entry_phits=phits) for _ in range(PORTS)]
        for kind, parts in (
            ("send_ring", senders),
            ("recv_ring", receivers),
            ("frame_writer", writers),
            ("frame_reader", readers),
        ):
            for index, part in enumerate(parts):
                m.submodules[f"{kind}{index}"] = part
        for group in range(groups):
            connect(m, flipped(self.send[group]), senders[group].i)
            connect(m, receivers[group].o, flipped(self.receive[group]))
            self._sender(m, group, senders[group], writers, readers)
            self._receiver(m, group, receivers[group], writers, readers)
        for port, (writer, reader) in enumerate(zip(writers, readers, strict=True)):
            self._port(m, port, writer, reader)
            self._frames(m, port, writer, reader, senders, receivers)
        self._peer_abort(m, readers)
        return ResetInserter(self.i_clear)(m)

    def _sender(
        self,
        m: Module,
        group: int,
        ring: SendRing,
        writers: list[FrameWriter],
        readers: list[FrameReader],
    ) -> None:
        """Connect one SendBuf to the received frames of its port."""
        port = self.i_send_port[group]
        m.d.comb += [
            ring.i_take.eq(reduce(or_, (writer.o_take[group] for writer in writers))),
            ring.i_advance.eq(
                reduce(or_, (w.o_advance & (port == p) & (w.o_group == group)
                             for p, w in enumerate(writers)))
            ),
            ring.i_heard.eq(Array(reader.o_heard for reader in readers)[port]),
            ring.i_received.eq(Array(reader.o_received[group] for reader in readers)[port]),
            ring.i_consumed.eq(Array(reader.o_consumed[group] for reader in readers)[port]),
            ring.i_told.eq(Array(reader.o_told[group] for reader in readers)[port]),
            ring.i_passed.eq(Array(reader.o_passed for reader in readers)[port]),
            ring.i_accepted.eq(Array(reader.o_accepted for reader in readers)[port]),
            ring.i_retry.eq(self.i_retry),
        ]  # fmt: skip

    def _receiver(
        self,
        m: Module,
        group: int,
        ring: RecvRing,
        writers: list[FrameWriter],
        readers: list[FrameReader],
    ) -> None:
        """Connect one RecvBuf to the received frames of its port."""
        port = self.i_receive_port[group]
        m.d.comb += [
            ring.i_begin.eq(reduce(or_, (reader.o_begin[group] for reader in readers))),
            ring.i_write.eq(reduce(or_, (reader.o_write[group] for reader in readers))),
            ring.i_end.eq(reduce(or_, (reader.o_end[group] for reader in readers))),
            ring.i_fail.eq(reduce(or_, (reader.o_fail[group] for reader in readers))),
            ring.i_probe.eq(reduce(or_, (reader.o_probe[group] for reader in readers))),
            ring.i_report.eq(Array(writer.o_report for writer in writers)[port]),
            ring.i_told.eq(Array(writer.o_told[group] for writer in writers)[port]),
        ]
        for name in ("sequence", "serial", "answer", "index", "data", "length"):
            values = Array(getattr(reader, f"o_{name}") for reader in readers)
            m.d.comb += getattr(ring, f"i_{name}").eq(values[port])

    def _port(self, m: Module, port: int, writer: FrameWriter, reader: FrameReader) -> None:
        """Connect link and settings of a port."""
        connect(m, writer.o, flipped(self.link_out[port]))
        connect(m, flipped(self.link_in[port]), reader.i)
        m.d.comb += [
            writer.i_used.eq(self.i_used[port]),
            writer.i_epoch.eq(self.i_epoch),
            writer.i_keepalive.eq(self.i_keepalive),
            writer.i_abort.eq(self.i_abort),
            writer.i_cause.eq(self.i_abort_cause),
            writer.i_device.eq(self.i_abort_device),
            writer.i_port.eq(self.i_abort_port),
            reader.i_used.eq(self.i_used[port]),
            reader.i_epoch.eq(self.i_epoch),
            reader.i_watch.eq(self.i_watch),
            reader.i_silence_limit.eq(self.i_silence_limit),
            self.o_silent[port].eq(reader.o_silent),
        ]

    def _frames(
        self,
        m: Module,
        port: int,
        writer: FrameWriter,
        reader: FrameReader,
        senders: list[SendRing],
        receivers: list[RecvRing],
    ) -> None:
        """Connect the frame writer of a port to the buffers, and count events."""
        changed, urgent, replays, accepts, gaps, duplicates = [], [], [], [], [], []
        for group, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
            sends = self.i_send_port[group] == port
            receives = self.i_receive_port[group] == port
            m.d.comb += [
                writer.i_offer[group].eq(sender.o_offer & sends),
                writer.i_sequence[group].eq(sender.o_sequence),
                writer.i_length[group].eq(sender.o_length),
                writer.i_serial[group].eq(sender.o_serial),
                writer.i_waits[group].eq(sender.o_waits & sends),
                writer.i_mine[group].eq(receives),
                writer.i_received[group].eq(Mux(receives, receiver.o_received, 0)),
                writer.i_consumed[group].eq(Mux(receives, receiver.o_consumed, 0)),
                writer.i_passed[group].eq(receiver.o_passed),
                writer.i_accepted[group].eq(receiver.o_accepted),
                writer.i_asks[group].eq(receiver.o_asks & receives),
                reader.i_mine[group].eq(receives),
            ]
            changed.append(receiver.o_changed & receives)
            urgent.append(receiver.o_urgent & receives)
            replays.append(sender.o_replay & sends)
            accepts.append(receiver.o_accept & receives)
            gaps.append(receiver.o_gap & receives)
            duplicates.append(receiver.o_duplicate & receives)
        events = self.o_events[port]
        m.d.comb += [
            writer.i_data.eq(Array(sender.o_data for sender in senders)[writer.o_group]),
            writer.i_changed.eq(reduce(or_, changed)),
            writer.i_urgent.eq(reduce(or_, urgent)),
            events.sent_phits.eq(writer.o_sent),
            events.payload_phits.eq(writer.o_payload),
            events.replays.eq(reduce(or_, replays)),
            events.received_entries.eq(reduce(or_, accepts)),
            events.bad_frames.eq(reader.o_bad),
            events.gaps.eq(reduce(or_, gaps)),
            events.duplicates.eq(reduce(or_, duplicates)),
            events.stall.eq(writer.o_stall),
        ]

    def _peer_abort(self, m: Module, readers: list[FrameReader]) -> None:
        heard = Signal()
        abort = Signal()
        first, second = readers
        m.d.comb += [
            abort.eq(first.o_abort | second.o_abort),
            self.o_peer_abort.eq(abort & ~heard),
            self.o_peer_cause.eq(Mux(first.o_abort, first.o_cause, second.o_cause)),
            self.o_peer_device.eq(Mux(first.o_abort, first.o_device, second.o_device)),
            self.o_peer_port.eq(Mux(first.o_abort, first.o_port, second.o_port)),
        ]
        with m.If(abort):
            m.d.sync += heard.eq(1)
