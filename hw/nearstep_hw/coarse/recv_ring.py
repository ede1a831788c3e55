"""RecvBuf: entries received from the previous device of a ring."""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.coarse.recv_flow import RecvFlow
from nearstep_hw.coarse.send_ring import LENGTH_BITS
from nearstep_hw.coarse.wire import MAP_BITS, PHIT_BITS, EntryPhit
from nearstep_spec.coarse.config import SEQUENCE_BITS, CoarseConfig


class RecvRing(wiring.Component):
    """Stores the phits of entries as received, and outputs the correct entries in order.

    The slot of an entry is its sequence number modulo the depth. Phits are written before their
    entry's CRC is checked; the slot of a damaged entry is reused.

    *Timing*: the first phit of an entry is at `o` two cycles after `i_end`; one phit a cycle. The
    slot of an entry is freed when its last phit is read.

    Parameters
    ----------
    config : `buffer_entries` and `entry_phits` are used.

    Members
    -------
    o : entries.
    i_begin, i_sequence, i_serial, i_fail, i_probe, i_answer, i_report, i_told : as of `RecvFlow`,
        like its outputs.
    i_write : `i_data` is phit `i_index` of the current entry.
    i_end : the entry is correct and has `i_length + 1` phits.

    Ref: COARSE paper, section IV-A and figure 11.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        super().__init__(
            {
                "o": Out(stream.Signature(EntryPhit)),
                "i_begin": In(1),
                "i_sequence": In(SEQUENCE_BITS),
                "i_serial": In(SEQUENCE_BITS),
                "i_write": In(1),
                "i_index": In(LENGTH_BITS),
                "i_data": In(PHIT_BITS),
                "i_end": In(1),
                "i_length": In(LENGTH_BITS),
                "i_fail": In(1),
                "i_probe": In(1),
                "i_answer": In(1),
                "i_report": In(1),
                "i_told": In(1),
                "o_received": Out(SEQUENCE_BITS),
                "o_consumed": Out(SEQUENCE_BITS),
                "o_accepted": Out(min(config.buffer_entries, MAP_BITS)),
                "o_passed": Out(SEQUENCE_BITS),
                "o_asks": Out(1),
                "o_changed": Out(1),
                "o_urgent": Out(1),
                "o_accept": Out(1),
                "o_gap": Out(1),
                "o_duplicate": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        depth, phits = self.config.buffer_entries, self.config.entry_phits
        slot_bits, index_bits = ceil_log2(depth), ceil_log2(phits)
        m.submodules.flow = flow = RecvFlow(depth=depth)
        m.submodules.memory = memory = Memory(shape=PHIT_BITS, depth=depth * phits, init=[])
        m.submodules.lengths = lengths = Memory(shape=index_bits, depth=depth, init=[])
        write, read = memory.write_port(), memory.read_port()
        length_write, length_read = lengths.write_port(), lengths.read_port(domain="comb")
        place = flow.o_place[:slot_bits]
        m.d.comb += [
            write.addr.eq(Cat(self.i_index[:index_bits], place)),
            write.data.eq(self.i_data),
            write.en.eq(self.i_write & flow.o_storing),
            length_write.addr.eq(place),
            length_write.data.eq(self.i_length),
            length_write.en.eq(flow.o_accept),
        ]
        for name in self.signature.members:
            if name.startswith("i_") and name in flow.signature.members:
                m.d.comb += getattr(flow, name).eq(getattr(self, name))
            elif name.startswith("o_"):
                m.d.comb += getattr(self, name).eq(getattr(flow, name))

        oldest = flow.o_consumed[:slot_bits]
        index = Signal(index_bits)
        fetch = Signal()
        last = Signal()
        m.d.comb += [
            length_read.addr.eq(oldest),
            fetch.eq(flow.o_available & (~self.o.valid | self.o.ready)),
            last.eq(index == length_read.data),
            read.addr.eq(Cat(index, oldest)),
            read.en.eq(fetch),
            flow.i_consume.eq(fetch & last),
            self.o.payload.data.eq(read.data),
        ]
        with m.If(fetch):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o.payload.last.eq(last),
                index.eq(Mux(last, 0, index + 1)),
            ]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return m
