"""Contexts of the queues of a controller."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.nvme.layout import (
    BASE_BITS,
    DOORBELL_BITS,
    POINTER_BITS,
    CompletionContext,
    OrderKind,
    OrderLayout,
    SubmissionContext,
)
from nearstep_spec.csr.model import WORD_BITS

SUBMISSIONS, COMPLETIONS = 0, 1


def following(pointer: Value, last: Value) -> Value:
    """Return the number of the next entry of a queue."""
    return Mux(pointer == last, 0, pointer + 1)


class QueueTable(wiring.Component):
    """Base, size, head, tail and phase of every pair of queues; the pair 0 is of admin commands.

    A completion queue is full when one entry is free. A doorbell of a queue that does not exist, or
    with a value beyond its end, is wrong, and changes nothing. An order is refused, and changes
    nothing, if it creates a queue that exists, of one entry, or for a completion queue that does
    not exist; or if it deletes one that does not exist or that a submission queue needs. Pair 0 can
    be neither created nor deleted, and without it no other can be created.

    *Timing*: all changes in the next cycle. Outputs are combinational.

    Parameters
    ----------
    queues : pairs of queues.
    vectors : interrupts.

    Members
    -------
    i_clear : deletes every queue; takes precedence.
    i_start : creates pair 0, with the vector 0.
    i_base, i_last : of submission and completion queue of pair 0, with `i_start`.
    i_order : carries out `order`, if `o_may`.
    order, o_may : an order, and whether it is not refused.
    i_ring : a doorbell is written.
    i_completions, i_number, i_value : which one, and the value.
    o_wrong, o_wrong_value : the doorbell of this cycle is wrong, because of its value.
    i_select : number of a submission queue.
    o_submissions, o_completions : contexts of this and of its completion queue; of a deleted one as
        it was.
    o_room : of every submission queue, its completion queue exists and is not full.
    o_pending : of every submission queue that exists, entries have not been fetched.
    i_fetched : an entry of the selected queue was fetched.
    i_posted : a completion for the selected queue was posted.
    i_drop : drops all entries that have not been fetched.
    """

    def __init__(self, *, queues: int, vectors: int) -> None:
        self.queues = queues
        self.vectors = vectors
        super().__init__(
            {
                "i_clear": In(1),
                "i_start": In(1),
                "i_base": In(BASE_BITS).array(2),
                "i_last": In(POINTER_BITS).array(2),
                "i_order": In(1),
                "order": In(OrderLayout(queues=queues, vectors=vectors)),
                "o_may": Out(1),
                "i_ring": In(1),
                "i_completions": In(1),
                "i_number": In(DOORBELL_BITS),
                "i_value": In(WORD_BITS),
                "o_wrong": Out(1),
                "o_wrong_value": Out(1),
                "i_select": In(bits_for(queues - 1)),
                "o_submissions": Out(SubmissionContext(queues)),
                "o_completions": Out(CompletionContext(vectors)),
                "o_room": Out(queues),
                "o_pending": Out(queues),
                "i_fetched": In(1),
                "i_posted": In(1),
                "i_drop": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        numbers = range(self.queues)
        submissions = [Signal(SubmissionContext(self.queues), name=f"sq{n}") for n in numbers]
        completions = [Signal(CompletionContext(self.vectors), name=f"cq{n}") for n in numbers]
        self._select(m, submissions, completions)
        with m.If(self.i_drop):
            m.d.sync += [queue.head.eq(queue.tail) for queue in submissions]
        self._ring(m, submissions, completions)
        self._order(m, submissions, completions)

        with m.If(self.i_start):
            base, last = self.i_base, self.i_last
            self._create(m, submissions[0], base[SUBMISSIONS], last[SUBMISSIONS])
            self._create(m, completions[0], base[COMPLETIONS], last[COMPLETIONS])
            m.d.sync += [
                submissions[0].target.eq(0),
                completions[0].phase.eq(1),
                completions[0].vector.eq(0),
                completions[0].interrupts.eq(1),
            ]
        with m.If(self.i_clear):
            m.d.sync += [queue.valid.eq(0) for queue in (*submissions, *completions)]
        return m

    def _select(
        self, m: Module, submissions: list[data.View], completions: list[data.View]
    ) -> None:
        """Show the selected queue, and move its pointers."""
        full = Signal(self.queues)
        for number, queue in enumerate(completions):
            m.d.comb += full[number].eq(
                ~queue.valid | (following(queue.tail, queue.last) == queue.head)
            )
        for number, queue in enumerate(submissions):
            m.d.comb += [
                self.o_room[number].eq(~full.bit_select(queue.target, 1)),
                self.o_pending[number].eq(queue.valid & (queue.head != queue.tail)),
            ]
        with m.Switch(self.i_select):
            for number, queue in enumerate(submissions):
                with m.Case(number):
                    m.d.comb += self.o_submissions.eq(queue)
                    with m.If(self.i_fetched):
                        m.d.sync += queue.head.eq(following(queue.head, queue.last))
        with m.Switch(self.o_submissions.target):
            for number, queue in enumerate(completions):
                with m.Case(number):
                    m.d.comb += self.o_completions.eq(queue)
                    with m.If(self.i_posted):
                        m.d.sync += [
                            queue.tail.eq(following(queue.tail, queue.last)),
                            queue.phase.eq(queue.phase ^ (queue.tail == queue.last)),
                        ]

    def _ring(self, m: Module, submissions: list[data.View], completions: list[data.View]) -> None:
        """Take a doorbell."""
        known, fits = Signal(), Signal()
        m.d.comb += [
            self.o_wrong.eq(self.i_ring & ~(known & fits)),
            self.o_wrong_value.eq(known),
        ]
        for kind, queues in ((SUBMISSIONS, submissions), (COMPLETIONS, completions)):
            for number, queue in enumerate(queues):
                pointer = queue.head if kind == COMPLETIONS else queue.tail
                with m.If((self.i_completions == kind) & (self.i_number == number)):
                    m.d.comb += [known.eq(queue.valid), fits.eq(self.i_value <= queue.last)]
                    with m.If(self.i_ring & queue.valid & fits):
                        m.d.sync += pointer.eq(self.i_value)

    def _order(self, m: Module, submissions: list[data.View], completions: list[data.View]) -> None:
        """Judge an order, and carry it out."""
        order = self.order
        exists = Cat(queue.valid for queue in submissions)
        completions_exist = Cat(queue.valid for queue in completions)
        needed = Cat(queue.valid & (queue.target == order.number) for queue in submissions).any()
        allowed, long = Signal(), order.last != 0
        mine = exists.bit_select(order.number, 1)
        completions_mine = completions_exist.bit_select(order.number, 1)
        target = Signal()
        for number in range(1, self.queues):
            with m.If(order.target == number):
                m.d.comb += target.eq(completions[number].valid)
        with m.Switch(order.kind):
            with m.Case(OrderKind.DELETE_SUBMISSIONS):
                m.d.comb += allowed.eq(mine)
            with m.Case(OrderKind.CREATE_SUBMISSIONS):
                m.d.comb += allowed.eq(~mine & target & long)
            with m.Case(OrderKind.DELETE_COMPLETIONS):
                m.d.comb += allowed.eq(completions_mine & ~needed)
            with m.Case(OrderKind.CREATE_COMPLETIONS):
                m.d.comb += allowed.eq(~completions_mine & long)
        known = (order.number != 0) & (order.number < self.queues)
        m.d.comb += self.o_may.eq(allowed & known & submissions[0].valid)

        with m.If(self.i_order & self.o_may), m.Switch(order.number):
            for number in range(1, self.queues):
                with m.Case(number), m.Switch(order.kind):
                    queue = submissions[number]
                    with m.Case(OrderKind.DELETE_SUBMISSIONS):
                        m.d.sync += queue.valid.eq(0)
                    with m.Case(OrderKind.CREATE_SUBMISSIONS):
                        self._create(m, queue, order.base, order.last)
                        m.d.sync += queue.target.eq(order.target)
                    queue = completions[number]
                    with m.Case(OrderKind.DELETE_COMPLETIONS):
                        m.d.sync += queue.valid.eq(0)
                    with m.Case(OrderKind.CREATE_COMPLETIONS):
                        self._create(m, queue, order.base, order.last)
                        m.d.sync += [
                            queue.phase.eq(1),
                            queue.vector.eq(order.vector),
                            queue.interrupts.eq(order.interrupts),
                        ]

    @staticmethod
    def _create(m: Module, queue: data.View, base: Value, last: Value) -> None:
        """Make a queue exist, empty."""
        m.d.sync += [
            queue.valid.eq(1),
            queue.base.eq(base),
            queue.last.eq(last),
            queue.head.eq(0),
            queue.tail.eq(0),
        ]
