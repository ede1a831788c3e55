"""Executor of memory writes: turns payloads into AXI bursts."""

from amaranth import Cat, Elaboratable, Module, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, exact_log2

from nearstep_hw.axi.signature import Axi4WriteSignature, BurstType, Response
from nearstep_hw.pcie.descriptor import MAX_PAYLOAD_BYTES
from nearstep_hw.pcie.dword_packer import DwordPacker, PackedBeat, interleave
from nearstep_hw.pcie.packet_fifo import PacketFifo
from nearstep_hw.pcie.route import RoutedChunk
from nearstep_hw.pcie.stream import DWORD_BITS, DWORD_BYTES
from nearstep_hw.stream.fifo import StreamFifo

ELEMENT_BITS = DWORD_BITS + DWORD_BYTES  # a dword and its byte enables


class MemoryWriter(wiring.Component):
    """Writes each payload as one burst of whole beats, with strobes, in the order of arrival.

    Neither a request nor its burst crosses a multiple of 4 KiB. A payload is stored until it is
    complete, because its last chunk may mark it as damaged; a damaged payload is dropped. A write
    without an enabled byte is a burst without strobes.

    *Timing*: a chunk a cycle while there is space.

    Parameters
    ----------
    width : bits of the CQ stream.
    address_width : bits of a byte address of the memory.
    data_width : bits of a beat, at least `width`.
    store_beats : capacity of the payload store, a power of two; a payload must fit.
    bursts : depth of the burst queue, a power of two.

    Members
    -------
    i : chunks of memory writes.
    i_room : the last chunk of a write may be accepted.
    bus : AW, W and B; all bursts have the same ID.
    o_taken : an intact write was accepted; one `o_done` follows.
    o_done : B of the oldest write.
    o_failed : with `o_done`: the response was not OKAY.
    """

    def __init__(
        self, *, width: int, address_width: int, data_width: int, store_beats: int, bursts: int
    ) -> None:
        if data_width < width:
            raise ValueError(f"A beat of memory must have at least {width} bits, not {data_width}")
        if store_beats * data_width // 8 < MAX_PAYLOAD_BYTES + data_width // 8:
            raise ValueError(
                f"The store must hold {MAX_PAYLOAD_BYTES} bytes at any alignment, "
                f"not {store_beats!r} beats of {data_width // 8} bytes"
            )
        self.width = width
        self.address_width = address_width
        self.data_width = data_width
        self.store_beats = store_beats
        self.bursts = bursts
        super().__init__(
            {
                "i": In(stream.Signature(RoutedChunk(width, address_width))),
                "i_room": In(1),
                "bus": Out(
                    Axi4WriteSignature(
                        address_width=address_width, data_width=data_width, id_width=1
                    )
                ),
                "o_taken": Out(1),
                "o_done": Out(1),
                "o_failed": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        lanes = self.data_width // DWORD_BITS
        lane_bits = exact_log2(lanes)
        beat_bits = self.address_width - 2 - lane_bits
        longest = self.store_beats  # beats of a burst, at most
        burst_layout = data.StructLayout(
            {"beat": unsigned(beat_bits), "beats": unsigned(bits_for(longest))}
        )
        m.submodules.packer = packer = DwordPacker(
            elements=self.width // DWORD_BITS, lanes=lanes, element_width=ELEMENT_BITS
        )
        m.submodules.store = store = PacketFifo(
            PackedBeat(lanes=lanes, element_width=ELEMENT_BITS), depth=self.store_beats
        )
        m.submodules.bursts = bursts = StreamFifo(burst_layout, depth=self.bursts)
        wiring.connect(m, packer.o, store.i)

        routed, run = self.i.payload, packer.i.payload
        aw, w, b = self.bus.aw, self.bus.w, self.bus.b
        chunk = routed.chunk
        sound = Signal()  # the chunk ends an intact payload
        may_end = Signal()
        end = Signal(range(2 * lanes + MAX_PAYLOAD_BYTES // DWORD_BYTES))
        m.d.comb += [
            sound.eq(chunk.last & ~chunk.discontinue),
            may_end.eq(~sound | (self.i_room & bursts.i.ready)),
            packer.i.valid.eq(self.i.valid & may_end),
            self.i.ready.eq(packer.i.ready & may_end),
            run.elements.eq(interleave(chunk.data, chunk.enable, self.width // DWORD_BITS)),
            run.count.eq(chunk.dwords),
            run.lane.eq(routed.dword),
            run.last.eq(chunk.last),
            run.discontinue.eq(chunk.discontinue),
            self.o_taken.eq(packer.i.valid & packer.i.ready & sound),
            bursts.i.valid.eq(self.o_taken),
            bursts.i.payload.beat.eq(routed.dword[lane_bits:]),
            end.eq(routed.dword[:lane_bits] + chunk.head.descriptor.dwords + (lanes - 1)),
            bursts.i.payload.beats.eq(end >> lane_bits),
        ]

        # W follows its AW: `shown` counts the bursts whose AW is valid or was accepted.
        shown = Signal(range(self.bursts + 1))
        show = Signal()
        ends = Signal()
        address = Signal(self.address_width)
        length = Signal.like(aw.payload.len)
        beat = store.o.payload
        m.d.comb += [
            show.eq(bursts.o.valid & (~aw.valid | aw.ready) & (shown != self.bursts)),
            bursts.o.ready.eq(show),
            aw.payload.addr.eq(address),
            aw.payload.len.eq(length),
            aw.payload.size.eq(exact_log2(self.data_width // 8)),
            aw.payload.burst.eq(BurstType.INCR),
            w.valid.eq(store.o.valid & (shown != 0)),
            store.o.ready.eq(w.ready & (shown != 0)),
            w.payload.data.eq(Cat(beat.elements[lane][:DWORD_BITS] for lane in range(lanes))),
            w.payload.strb.eq(Cat(beat.elements[lane][DWORD_BITS:] for lane in range(lanes))),
            w.payload.last.eq(beat.last),
            ends.eq(w.valid & w.ready & w.payload.last),
            b.ready.eq(1),
            self.o_done.eq(b.valid),
            self.o_failed.eq(b.valid & (b.payload.resp != Response.OKAY)),
        ]
        with m.If(show):
            m.d.sync += [
                aw.valid.eq(1),
                address.eq(bursts.o.payload.beat << (2 + lane_bits)),
                length.eq(bursts.o.payload.beats - 1),
            ]
        with m.Elif(aw.ready):
            m.d.sync += aw.valid.eq(0)
        m.d.sync += shown.eq(shown + show - ends)
        return m
