"""The walk over PRP entries."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.axi.signature import Axi4ReadSignature
from nearstep_hw.nvme.host_port import BEAT_SHIFT, PORT, LineRead
from nearstep_hw.nvme.layout import (
    ADDRESS_BITS,
    PAGE_BITS,
    SIZE_BITS,
    STATUS_BITS,
    PartLayout,
    WalkLayout,
)
from nearstep_spec.nvme import PAGE_BYTES, TRANSFER_BYTES, EngineStatus

SLOT_BITS = 64
SLOT_SHIFT = 3  # a slot of a list has 8 bytes
LINE_SLOTS = 8


class PrpWalker(wiring.Component):
    """Gives the parts of a transfer in order, then its end with a status.

    PRP 1 may have an offset of dwords. PRP 2 is a page, or the address of a list if more than one
    page follows. The list may begin anywhere in its page; the last slot of a page of a list that
    goes on is the address of the next page. An offset where none may be ends the walk with PRP
    Offset Invalid; a list that cannot be read, or that belongs to a command that was aborted, with
    Data Transfer Error. Lists are read 64 bytes at a time, and nothing beyond their end.

    *Timing*: a part a cycle, but for a read of the host in front of every 8 entries of a list.

    Members
    -------
    i : transfers; taken when no walk is under way.
    o : parts, of at most a page each.
    bus : AR and R, one ID; RREADY is always high.
    i_alive : of the admin and of the I/O command under way: its lists may be read.
    o_quiet : no read is under way.
    """

    i: In(stream.Signature(WalkLayout))
    o: Out(stream.Signature(PartLayout))
    bus: Out(Axi4ReadSignature(**PORT, id_width=1))
    i_alive: In(2)
    o_quiet: Out(1)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.read = read = LineRead()
        wiring.connect(m, read.bus, wiring.flipped(self.bus))
        walk, part = Signal(WalkLayout), self.o.payload
        left = Signal(SIZE_BITS)
        at = Signal(ADDRESS_BITS)  # of the next slot
        status = Signal(STATUS_BITS)
        pages = Signal(bits_for(TRANSFER_BYTES // PAGE_BYTES))  # that are left
        slots = Signal(bits_for(LINE_SLOTS))  # to the end of the line
        entry = Signal(SLOT_BITS)
        first, alive, chained, size = Signal(PAGE_BITS + 1), Signal(), Signal(), Signal(SIZE_BITS)
        last = Signal(SLOT_SHIFT)  # slot of the line that is read last
        taken = self.o.ready

        m.d.comb += [
            alive.eq(self.i_alive.bit_select(walk.io, 1)),
            first.eq(PAGE_BYTES - walk.prp1[:PAGE_BITS]),
            size.eq(Mux(left < PAGE_BYTES, left, PAGE_BYTES)),
            pages.eq((left + (PAGE_BYTES - 1)) >> PAGE_BITS),
            slots.eq(LINE_SLOTS - at[SLOT_SHIFT : 2 * SLOT_SHIFT]),
            last.eq(at[SLOT_SHIFT : 2 * SLOT_SHIFT] + Mux(pages < slots, pages, slots) - 1),
            entry.eq(read.line.word_select(at[SLOT_SHIFT : 2 * SLOT_SHIFT], SLOT_BITS)),
            chained.eq(at[SLOT_SHIFT:PAGE_BITS].all() & (pages > 1)),
            read.i.payload.beat.eq(at >> BEAT_SHIFT),
            read.i.payload.last.eq(last[1:]),
            self.o_quiet.eq(read.o_idle),
        ]

        def fail(reason: EngineStatus) -> None:
            m.d.sync += status.eq(reason)
            m.next = "END"

        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [walk.eq(self.i.payload), left.eq(self.i.payload.nbytes)]
                m.d.sync += status.eq(EngineStatus.SUCCESS)
                with m.If(self.i.valid):
                    m.next = "FIRST"
            with m.State("FIRST"):
                m.d.sync += at.eq(walk.prp2)
                m.d.comb += [
                    part.address.eq(walk.prp1),
                    part.nbytes.eq(Mux(left < first, left, first)),
                ]
                with m.If(walk.prp1[:2] != 0):
                    fail(EngineStatus.PRP_OFFSET_INVALID)
                with m.Elif(left == 0):
                    m.next = "END"
                with m.Else():
                    m.d.comb += self.o.valid.eq(1)
                    with m.If(taken):
                        m.d.sync += left.eq(left - part.nbytes)
                        m.next = "SECOND"
            with m.State("SECOND"):
                m.d.comb += [part.address.eq(walk.prp2), part.nbytes.eq(left)]
                with m.If(left == 0):
                    m.next = "END"
                with m.Elif(left > PAGE_BYTES):
                    m.next = "LIST"
                    with m.If(walk.prp2[:SLOT_SHIFT] != 0):
                        fail(EngineStatus.PRP_OFFSET_INVALID)
                with m.Elif(walk.prp2[:PAGE_BITS] != 0):
                    fail(EngineStatus.PRP_OFFSET_INVALID)
                with m.Else():
                    m.d.comb += self.o.valid.eq(1)
                    with m.If(taken):
                        m.next = "END"
            with m.State("LIST"):
                m.d.comb += read.i.valid.eq(alive)
                with m.If(~alive):
                    fail(EngineStatus.DATA_TRANSFER_ERROR)
                with m.Elif(read.i.ready):
                    m.next = "READ"
            with m.State("READ"), m.If(read.o_done):
                m.next = "ENTRY"
                with m.If(read.o_failed | ~alive):
                    fail(EngineStatus.DATA_TRANSFER_ERROR)
            with m.State("ENTRY"):
                m.d.comb += [part.address.eq(entry), part.nbytes.eq(size)]
                with m.If(entry[:PAGE_BITS] != 0):
                    fail(EngineStatus.PRP_OFFSET_INVALID)
                with m.Elif(chained):
                    m.d.sync += at.eq(entry)
                    m.next = "LIST"
                with m.Else():
                    m.d.comb += self.o.valid.eq(1)
                    with m.If(taken):
                        m.d.sync += [left.eq(left - size), at.eq(at + SLOT_BITS // 8)]
                        with m.If(pages == 1):
                            m.next = "END"
                        with m.Elif(slots == 1):
                            m.next = "LIST"
            with m.State("END"):
                m.d.comb += [self.o.valid.eq(1), part.end.eq(1), part.status.eq(status)]
                with m.If(taken):
                    m.next = "IDLE"
        return m
