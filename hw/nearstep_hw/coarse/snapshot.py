"""Copy-on-write snapshot: a frozen page is copied before its first write."""

from amaranth import Cat, Const, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, ceil_log2

from nearstep_hw.axi.signature import Axi4ReadSignature, Axi4WriteSignature
from nearstep_hw.coarse.page_copy import COPY_ID_WIDTH, PageCopy
from nearstep_spec.coarse.config import BEAT_BYTES, PAGE_BYTES, PAGE_COUNT_BITS, CoarseConfig

WORD_BITS = 32  # of the map of copied pages
OUTSTANDING = 64  # most forwarded bursts without a response


class SnapshotGate(wiring.Component):
    """Delays writes to frozen pages of the local DRAM until the page has been copied.

    A snapshot freezes a range of pages when it opens. A page is copied once, to the same offset in
    an area of the same size; the first burst to the page passes when the whole page has been read.
    A page that is not copied has not changed. Opening waits for the responses of all earlier
    writes, so that no page mixes two versions. Opening samples the ranges, and is ignored if they
    are not whole pages of memory, too long, or overlapping. Closing waits for the copy in progress,
    and starts no other.

    *Timing*: no latency without a snapshot. With one, a burst to a frozen page waits 2 cycles, and
    the first one to each page until the page is read, with all later bursts. While a page's copy is
    written only the next page can be read. Opening takes as long as the outstanding writes, plus a
    cycle for every 32 pages.

    Parameters
    ----------
    id_width : bits of an ID of the writes.

    Members
    -------
    s_axi : AW, W and B of all writers.
    m_axi : the same, to memory.
    read, write : AXI4 of the copies.
    i_open, i_close : pulses; `i_open` is ignored while a snapshot is open and not closing.
    i_base, i_area : first byte of the frozen pages and of their copies, multiples of a page; held
        in the cycle of `i_open` and the one before.
    i_pages : number of frozen pages, held as `i_base`.
    i_word : selects the 32 pages of `o_copied`.
    o_open : a snapshot is open.
    o_failed : a copy got a response other than OKAY, so the snapshot is incomplete; cleared by the
        next opening.
    o_copied : a bit for each of the 32 pages, a cycle after `i_word`: the page may have changed,
        and its copy is in the area or in flight.
    o_taken, o_written : pages whose bit was set, and pages whose copy was written, since reset.
    o_page_copied : pulse: a page's bit was set.
    o_stall : a write waits for a copy.

    Ref: COARSE paper, section IV-A, fault tolerance.
    """

    def __init__(self, config: CoarseConfig, *, id_width: int) -> None:
        self.config = config
        self.words = -(-config.snapshot_pages // WORD_BITS)
        address_width = config.address_width
        widths = {"address_width": address_width, "data_width": 8 * BEAT_BYTES}
        writes = Axi4WriteSignature(**widths, id_width=id_width)
        super().__init__(
            {
                "s_axi": In(writes),
                "m_axi": Out(writes),
                "read": Out(Axi4ReadSignature(**widths, id_width=COPY_ID_WIDTH)),
                "write": Out(Axi4WriteSignature(**widths, id_width=COPY_ID_WIDTH)),
                "i_open": In(1),
                "i_close": In(1),
                "i_base": In(64),
                "i_area": In(64),
                "i_pages": In(32),
                "i_word": In(max(1, ceil_log2(self.words))),
                "o_open": Out(1),
                "o_failed": Out(1),
                "o_taken": Out(PAGE_COUNT_BITS),
                "o_written": Out(PAGE_COUNT_BITS),
                "o_copied": Out(WORD_BITS),
                "o_page_copied": Out(1),
                "o_stall": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.map = copied = Memory(shape=WORD_BITS, depth=self.words, init=[])
        m.submodules.copy = copy = PageCopy(address_width=self.config.address_width)
        wiring.connect(m, copy.read, wiring.flipped(self.read))
        wiring.connect(m, copy.write, wiring.flipped(self.write))
        mark = copied.write_port(granularity=1)
        lookup = copied.read_port()
        shown = copied.read_port()
        all_pages = Const(-1, WORD_BITS).as_unsigned()
        page_bits = ceil_log2(PAGE_BYTES)
        word_bits = ceil_log2(WORD_BITS)
        host, memory, answers = self.s_axi.aw, self.m_axi.aw, self.m_axi.b
        outstanding = Signal(range(OUTSTANDING + 1))
        passed, answered = Signal(), Signal()
        page = Signal(self.config.address_width - page_bits)  # of the burst, in the snapshot
        base, area = Signal.like(page), Signal.like(page)
        pages = Signal(bits_for(self.config.snapshot_pages))
        frozen, opening, closing, may_pass = Signal(), Signal(), Signal(), Signal()

        wiring.connect(m, wiring.flipped(self.s_axi.w), wiring.flipped(self.m_axi.w))
        wiring.connect(m, wiring.flipped(self.m_axi.b), wiring.flipped(self.s_axi.b))
        m.d.comb += [
            memory.payload.eq(host.payload),
            memory.valid.eq(host.valid & may_pass),
            host.ready.eq(memory.ready & may_pass),
            passed.eq(memory.valid & memory.ready),
            answered.eq(answers.valid & answers.ready),
            page.eq(host.payload.addr[page_bits:] - base),
            frozen.eq(self.o_open & ~closing & (page < pages)),
            lookup.addr.eq(page[word_bits:]),
            shown.addr.eq(self.i_word),
            self.o_copied.eq(shown.data),
            copy.i_from.eq(Cat(Const(0, page_bits), host.payload.addr[page_bits:])),
            copy.i_to.eq(Cat(Const(0, page_bits), (area + page)[: len(page)])),
            self.o_stall.eq(host.valid & ~may_pass),
        ]
        m.d.sync += [outstanding.eq(outstanding + passed - answered)]
        with m.If(self.i_open & (~self.o_open | closing) & self._can_be(m)):
            m.d.sync += opening.eq(1)
        m.d.sync += [
            self.o_taken.eq(self.o_taken + self.o_page_copied),
            self.o_written.eq(self.o_written + copy.o_written),
        ]
        with m.If(self.i_close):
            m.d.sync += [opening.eq(0), closing.eq(self.o_open | opening)]
        with m.If(copy.o_failed):
            m.d.sync += self.o_failed.eq(1)
        cleared = Signal(range(self.words))
        with m.FSM():
            with m.State("PASS"):
                m.d.comb += may_pass.eq(~frozen & ~opening & (outstanding != OUTSTANDING))
                with m.If(closing):
                    m.d.sync += [closing.eq(copy.o_busy), self.o_open.eq(copy.o_busy)]
                with m.Elif(opening & (outstanding == 0)):
                    m.d.sync += [
                        base.eq(self.i_base >> page_bits),
                        area.eq(self.i_area >> page_bits),
                        pages.eq(self.i_pages),
                        cleared.eq(0),
                        self.o_failed.eq(0),
                    ]
                    m.next = "CLEAR"
                with m.Elif(host.valid & frozen):
                    m.next = "LOOK"
            with m.State("CLEAR"):
                m.d.comb += [mark.addr.eq(cleared), mark.en.eq(all_pages)]
                m.d.sync += cleared.eq(cleared + 1)
                with m.If(cleared == self.words - 1):
                    with m.If(closing):  # an opening may be pending
                        m.d.sync += closing.eq(0)
                    with m.Else():
                        m.d.sync += [opening.eq(0), self.o_open.eq(1)]
                    m.next = "PASS"
            with m.State("LOOK"):
                with m.If(closing | lookup.data.bit_select(page[:word_bits], 1)):
                    m.next = "LET"
                with m.Elif(copy.o_ready):
                    m.d.comb += copy.i_start.eq(1)
                    m.next = "COPY"
            with m.State("COPY"), m.If(copy.o_loaded):
                m.d.comb += [
                    mark.addr.eq(page[word_bits:]),
                    mark.data.eq(all_pages),
                    mark.en.eq(1 << page[:word_bits]),
                    self.o_page_copied.eq(1),
                ]
                m.next = "LET"
            with m.State("LET"):
                m.d.comb += may_pass.eq(outstanding != OUTSTANDING)
                with m.If(passed):
                    m.next = "PASS"
        return m

    def _can_be(self, m: Module) -> Signal:
        """Return whether the ranges are whole pages of memory, not too long, and disjoint."""
        page_bits = ceil_log2(PAGE_BYTES)
        memory = self.config.memory_bytes // PAGE_BYTES
        base, area, pages = self.i_base >> page_bits, self.i_area >> page_bits, self.i_pages
        good = Signal()
        m.d.sync += good.eq(
            ~(self.i_base[:page_bits] | self.i_area[:page_bits]).any()
            & (pages != 0)
            & (pages <= self.config.snapshot_pages)
            & (base + pages <= memory)
            & (area + pages <= memory)
            & ((base + pages <= area) | (area + pages <= base))
        )
        return good
