"""SendBuf: entries for the next device of a ring."""

from amaranth import Cat, Const, Module, Mux, Shape, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.coarse.send_flow import TIMER_BITS, SendFlow
from nearstep_hw.coarse.wire import HEADER, MAP_BITS, PHIT_BITS, EntryPhit
from nearstep_spec.coarse.config import SEQUENCE_BITS, CoarseConfig

LENGTH_BITS = Shape.cast(HEADER["length"].shape).width
"""Bits of the length of an entry: its phits less one."""


class SendRing(wiring.Component):
    """Buffers entries of a sync core for a frame writer until the peer has acknowledged them.

    *Timing*: accepts a phit a cycle. An entry can be sent from the cycle after its last phit.
    `o_data` has the first phit in the cycle after `i_take`, the next one in the cycle after
    `i_advance`.

    Parameters
    ----------
    config : `buffer_entries` and `entry_phits` are used.

    Members
    -------
    i : entries of up to `entry_phits` phits.
    o_offer : the entry `o_sequence` of `o_length + 1` phits may be sent; `i_take` begins it.
    o_data : phit of the entry that was taken last; `i_advance` selects the next.
    i_heard, i_received, i_consumed, i_told, i_passed, i_accepted, i_retry : as of `SendFlow`, like
        `o_serial`, `o_waits`, `o_replay`.

    Ref: COARSE paper, section IV-A and figure 11.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(EntryPhit)),
                "o_offer": Out(1),
                "o_sequence": Out(SEQUENCE_BITS),
                "o_length": Out(LENGTH_BITS),
                "i_take": In(1),
                "i_advance": In(1),
                "o_data": Out(PHIT_BITS),
                "i_heard": In(1),
                "i_received": In(SEQUENCE_BITS),
                "i_consumed": In(SEQUENCE_BITS),
                "i_told": In(1),
                "i_passed": In(SEQUENCE_BITS),
                "i_accepted": In(min(config.buffer_entries, MAP_BITS)),
                "i_retry": In(TIMER_BITS),
                "o_serial": Out(SEQUENCE_BITS),
                "o_waits": Out(1),
                "o_replay": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        depth, phits = self.config.buffer_entries, self.config.entry_phits
        slot_bits, index_bits = ceil_log2(depth), ceil_log2(phits)
        m.submodules.flow = flow = SendFlow(depth=depth)
        m.submodules.memory = memory = Memory(shape=PHIT_BITS, depth=depth * phits, init=[])
        m.submodules.lengths = lengths = Memory(shape=LENGTH_BITS, depth=depth, init=[])
        write, read = memory.write_port(), memory.read_port()
        length_write, length_read = lengths.write_port(), lengths.read_port(domain="comb")

        put = Signal()
        index = Signal(index_bits)
        m.d.comb += [
            self.i.ready.eq(flow.o_room),
            put.eq(self.i.valid & flow.o_room),
            write.addr.eq(Cat(index, flow.o_written[:slot_bits])),
            write.data.eq(self.i.payload.data),
            write.en.eq(put),
            length_write.addr.eq(flow.o_written[:slot_bits]),
            length_write.data.eq(index),
            length_write.en.eq(put & self.i.payload.last),
            flow.i_put.eq(put & self.i.payload.last),
        ]
        with m.If(put):
            m.d.sync += index.eq(Mux(self.i.payload.last, 0, index + 1))

        following = Signal(slot_bits + index_bits)
        m.d.comb += [
            length_read.addr.eq(flow.o_next[:slot_bits]),
            self.o_offer.eq(flow.o_offer),
            self.o_sequence.eq(flow.o_next),
            self.o_length.eq(length_read.data),
            read.addr.eq(
                Mux(self.i_take, Cat(Const(0, index_bits), flow.o_next[:slot_bits]), following)
            ),
            read.en.eq(self.i_take | self.i_advance),
            self.o_data.eq(read.data),
        ]
        with m.If(read.en):
            m.d.sync += following.eq(read.addr + 1)
        m.d.comb += [
            flow.i_take.eq(self.i_take),
            flow.i_heard.eq(self.i_heard),
            flow.i_received.eq(self.i_received),
            flow.i_consumed.eq(self.i_consumed),
            flow.i_told.eq(self.i_told),
            flow.i_passed.eq(self.i_passed),
            flow.i_accepted.eq(self.i_accepted),
            flow.i_retry.eq(self.i_retry),
            self.o_serial.eq(flow.o_serial),
            self.o_waits.eq(flow.o_waits),
            self.o_replay.eq(flow.o_replay),
        ]
        return m
