"""Proofs of the queues of an NVMe controller, for every host and firmware."""

import pytest
from amaranth.hdl import Array, Assert, Assume, Cover, Module, Mux, Signal, Value
from amaranth.lib import data
from amaranth.lib.wiring import Component, In

from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.nvme.engine import EARLY, LATE, QueueEngine
from nearstep_hw.nvme.layout import (
    POINTER_BITS,
    CompletionContext,
    DoneLayout,
    OrderKind,
    OrderLayout,
    SubmissionContext,
)
from nearstep_hw.nvme.queues import QueueTable
from nearstep_hw.nvme.registers import ADDRESS_BITS
from nearstep_sim.bench.formal import prove

from .toolkit import History, opened, refuted

pytestmark = pytest.mark.formal
QUEUES, LARGEST = 3, 8


class TableProperties(Component):
    """Whatever is rung and ordered, pointers stay in their queues of up to `LARGEST` entries; a
    completion queue whose host takes only what there is never holds more than its size less one.

    Parameters
    ----------
    watch : number of that queue.
    crowded : state that it never holds as much, which it does.
    """

    def __init__(self, watch: int, *, crowded: bool = False) -> None:
        self.watch, self.crowded = watch, crowded
        self.dut = QueueTable(queues=QUEUES, vectors=QUEUES)
        inputs = {
            name: member for name, member in self.dut.signature.members.items() if member.flow is In
        }
        super().__init__(inputs)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        whole, inside = opened(self.dut)
        m.submodules.dut, dut = whole, self.dut
        for name in self.signature.members:
            self._drive(m, getattr(dut, name), getattr(self, name))
        submissions = [
            self._view(SubmissionContext(QUEUES), inside[f"sq{n}"]) for n in range(QUEUES)
        ]
        completions = [
            self._view(CompletionContext(QUEUES), inside[f"cq{n}"]) for n in range(QUEUES)
        ]
        for queue in (*submissions, *completions):
            with m.If(queue.valid):
                m.d.comb += [
                    Assert((queue.last != 0) & (queue.last < LARGEST)),
                    Assert(queue.head <= queue.last),
                    Assert(queue.tail <= queue.last),
                ]
        exists = Array(queue.valid for queue in completions)
        for number, queue in enumerate(submissions):
            with m.If(queue.valid):
                m.d.comb += [Assert(queue.target < QUEUES), Assert(exists[queue.target])]
                m.d.comb += Assert((number != 0) | (queue.target == 0))
        m.d.comb += Assert(submissions[0].valid == completions[0].valid)
        self._assume(m, dut)
        self._watch(m, dut, completions)
        return m

    @staticmethod
    def _view(layout: data.Layout, register: Signal) -> data.View:
        return data.View(layout, Value.cast(register))

    @staticmethod
    def _drive(m: Module, inner: object, outer: object) -> None:
        if isinstance(inner, list):
            m.d.comb += [each.eq(given) for each, given in zip(inner, outer, strict=True)]
        else:
            m.d.comb += inner.eq(outer)

    def _assume(self, m: Module, dut: QueueTable) -> None:
        """What the engine and the registers do."""
        deeds = (self.i_order, self.i_fetched, self.i_posted, self.i_start)
        selected = self.i_select
        m.d.comb += [
            Assume(sum(deeds) <= 1),
            Assume(selected < QUEUES),
            Assume(self.order.last < LARGEST),
            Assume(~self.i_posted | dut.o_room.bit_select(selected, 1)),
            Assume(~self.i_fetched | (dut.o_submissions.head != dut.o_submissions.tail)),
            *(Assume((last != 0) & (last < LARGEST)) for last in self.i_last),
            # A queue is selected that exists, or that was deleted and whose target is still there.
            Assume(dut.o_submissions.valid | ~(self.i_fetched | self.i_posted)),
        ]

    def _watch(self, m: Module, dut: QueueTable, completions: list[data.View]) -> None:
        """Count what the host has not taken of the watched queue."""
        queue = completions[self.watch]
        unread, lap = Signal(POINTER_BITS + 1), Signal()
        behind, taken = Signal(POINTER_BITS + 1), Signal(POINTER_BITS + 1)
        rung, posted, made = Signal(), Signal(), Signal()
        size = queue.last + 1
        order = self.order
        m.d.comb += [
            behind.eq(queue.tail - queue.head + Mux(queue.tail < queue.head, size, 0)),
            taken.eq(self.i_value - queue.head + Mux(self.i_value < queue.head, size, 0)),
            rung.eq(
                self.i_ring
                & self.i_completions
                & (self.i_number == self.watch)
                & queue.valid
                & (self.i_value <= queue.last)
            ),
            posted.eq(self.i_posted & (dut.o_submissions.target == self.watch)),
            made.eq(
                (self.i_start if self.watch == 0 else 0)
                | (
                    self.i_order
                    & dut.o_may
                    & (order.kind == OrderKind.CREATE_COMPLETIONS)
                    & (order.number == self.watch)
                )
            ),
            Assume(~rung | (taken <= unread)),
        ]
        m.d.sync += unread.eq(unread + posted - Mux(rung, taken, 0))
        with m.If(posted & (queue.tail == queue.last)):
            m.d.sync += lap.eq(~lap)
        with m.If(made):
            m.d.sync += [unread.eq(0), lap.eq(0)]
        with m.If(queue.valid):
            m.d.comb += [
                Assert(unread == behind),
                Assert(unread <= queue.last),
                Assert(queue.phase == ~lap),
                Assert(~posted | (unread < queue.last)),
            ]
            if self.crowded:
                m.d.comb += Assert(unread < queue.last)
        m.d.comb += Cover(queue.valid & lap & (unread == queue.last))


class EngineProperties(Component):
    """A host and firmware that do anything; memory that answers what it was asked, with any data.

    Parameters
    ----------
    hasty : state that nothing is offered once CC.EN is 0, which is too early.
    """

    csr: In(CsrSignature(ADDRESS_BITS))
    i_ready: In(3)  # of AR, AW, W
    i_answer: In(2)  # R and B, where there is one to come
    i_failed: In(2)
    i_data: In(128)
    i_take: In(1)
    i_order: In(OrderLayout(queues=2, vectors=2))
    i_orders: In(1)
    i_done: In(DoneLayout)
    i_is_done: In(1)

    def __init__(self, *, hasty: bool = False) -> None:
        self.hasty = hasty
        self.dut = QueueEngine(io_queues=1)
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        whole, _ = opened(self.dut)
        m.submodules.dut, dut = whole, self.dut
        csr, axi = self.csr, dut.m_axi
        history = History(m)
        strobed = csr.read | csr.write
        m.d.comb += [
            Assume(~(csr.read & csr.write)),
            Assume(~history.before(strobed) | ~strobed),
            # The host does not touch completion queues: rooms are those of full queues alone.
            Assume(~(csr.write & csr.address[-1] & csr.address[2])),
            dut.csr.address.eq(csr.address),
            dut.csr.read.eq(csr.read),
            dut.csr.write.eq(csr.write),
            dut.csr.write_data.eq(csr.write_data),
            dut.csr.write_mask.eq(csr.write_mask),
            dut.o_command.ready.eq(self.i_take),
            dut.o_answer.ready.eq(self.i_take),
            dut.o_report.ready.eq(1),
            dut.i_order.valid.eq(self.i_orders),
            dut.i_order.payload.eq(self.i_order),
            dut.i_done.valid.eq(self.i_is_done),
            dut.i_done.payload.eq(self.i_done),
        ]
        self._answer(m, axi)
        table, registers = dut._table, dut._registers
        offered = axi.ar.valid | axi.aw.valid | axi.w.valid
        if self.hasty:
            m.d.comb += Assert(registers.o_enabled | ~offered)
        m.d.comb += [
            Assert(registers.o_ready | ~offered),
            Assert(~table.i_posted | table.o_room.bit_select(table.i_select, 1)),
            Assert(~table.i_posted | registers.o_ready),
        ]
        for each in (axi.ar, axi.aw, axi.w, dut.o_command, dut.o_answer):
            history.keeps_valid(each)
        # Once CC.EN is 0, what was taken by then comes to the port within two cycles.
        since = Signal(2)
        with m.If(registers.o_enabled):
            m.d.sync += since.eq(0)
        with m.Elif(~since.all()):
            m.d.sync += since.eq(since + 1)
        for channel in (axi.ar, axi.aw, axi.w):
            rises = channel.valid & ~history.before(channel.valid)
            m.d.comb += Assert(~rises | (since < 2))
        # Completions, of which each is of a command, and is written early part first.
        commands, posts = Signal(5), Signal(5)
        early = Signal()
        written = axi.w.valid & axi.w.ready
        m.d.sync += [
            commands.eq(commands + table.i_fetched),
            posts.eq(posts + (written & (axi.w.payload.strb == LATE))),
        ]
        with m.If(written):
            m.d.sync += early.eq(axi.w.payload.strb == EARLY)
            m.d.comb += [
                Assert((axi.w.payload.strb == EARLY) | (axi.w.payload.strb == LATE)),
                Assert((axi.w.payload.strb == EARLY) | (early & (posts < commands))),
            ]
        m.d.comb += [
            Cover(axi.ar.valid & ~registers.o_enabled),
            Cover(dut.o_command.valid & registers.o_enabled),
            Cover(table.i_posted),
        ]
        return m

    def _answer(self, m: Module, axi: object) -> None:
        """Answer what was asked: beats of one burst after the other, one write."""
        left, waits = Signal(3), Signal(2)
        m.d.comb += [
            axi.ar.ready.eq(self.i_ready[0] & (left == 0)),
            axi.aw.ready.eq(self.i_ready[1] & ~waits[0]),
            axi.w.ready.eq(self.i_ready[2] & ~waits[1]),
            axi.r.valid.eq(self.i_answer[0] & (left != 0)),
            axi.r.payload.last.eq(left == 1),
            axi.r.payload.data.eq(self.i_data),
            axi.r.payload.resp.eq(self.i_failed[0] << 1),
            axi.b.valid.eq(self.i_answer[1] & waits.all()),
            axi.b.payload.resp.eq(self.i_failed[1] << 1),
        ]
        with m.If(axi.r.valid):
            m.d.sync += left.eq(left - 1)
        with m.If(axi.b.valid):
            m.d.sync += waits.eq(0)
        with m.If(axi.ar.valid & axi.ar.ready):
            m.d.sync += left.eq(axi.ar.payload.len + 1)
        for number, channel in enumerate((axi.aw, axi.w)):
            with m.If(channel.valid & channel.ready):
                m.d.sync += waits[number].eq(1)


@pytest.mark.parametrize("watch", [0, 1])
def test_pointers_stay_in_their_queues_and_no_completion_is_overwritten(watch: int) -> None:
    done = prove(TableProperties(watch), f"nvme_table_{watch}", "prove", depth=1)
    assert done.statements >= 25


@pytest.mark.deep
def test_queues_fill_and_wrap() -> None:
    assert prove(TableProperties(1), "nvme_table", "cover", depth=12).statements == 1


@pytest.mark.deep
def test_a_queue_is_filled_to_its_last_entry_but_one() -> None:
    refuted(TableProperties(1, crowded=True), "nvme_table_crowded", depth=8)


@pytest.mark.deep
def test_nothing_is_accessed_while_disabled_and_each_completion_has_a_command() -> None:
    assert prove(EngineProperties(), "nvme_engine", "bmc", depth=28).statements >= 18
    assert prove(EngineProperties(), "nvme_engine", "cover", depth=28).statements == 3


@pytest.mark.deep
def test_an_access_can_end_after_the_controller_was_disabled() -> None:
    refuted(EngineProperties(hasty=True), "nvme_engine_hasty", depth=12)
