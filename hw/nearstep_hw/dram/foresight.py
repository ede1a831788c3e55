"""Prediction of each rank's use from the bursts in a queue."""

from itertools import pairwise

from amaranth import Cat, Const, Elaboratable, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class Foresight(wiring.Component):
    """Tracks the ranks of the bursts in a queue, and how soon each rank is needed.

    Only a burst with all the beats of a page counts as long.

    *Timing*: outputs follow the queue, whose level changes in the cycle after `i_enter` or
    `i_leave`.

    Parameters
    ----------
    ranks : of the channel.
    bursts : depth of the queue.
    enough : long bursts that must precede the first of a rank.

    Members
    -------
    i_enter, i_rank, i_long : a burst enters the queue.
    i_leave : the oldest burst leaves the queue.
    o_waiting : a bit for each rank: the queue has a burst of the rank.
    o_ahead : a bit for each rank: at least `enough` long bursts precede its first burst.
    """

    def __init__(self, *, ranks: int, bursts: int, enough: int) -> None:
        self.ranks = ranks
        self.bursts = bursts
        self.enough = enough
        super().__init__(
            {
                "i_enter": In(1),
                "i_rank": In(range(ranks)),
                "i_long": In(1),
                "i_leave": In(1),
                "o_waiting": Out(ranks),
                "o_ahead": Out(ranks),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        rank = [Signal.like(self.i_rank, name=f"rank{place}") for place in range(self.bursts + 1)]
        long = Signal(self.bursts + 1)
        level = Signal(range(self.bursts + 1))
        at = Signal.like(level)  # place of the next burst

        m.d.comb += at.eq(level - self.i_leave)
        m.d.sync += level.eq(level + self.i_enter - self.i_leave)
        with m.If(self.i_leave):
            m.d.sync += [
                *(mine.eq(above) for mine, above in pairwise(rank)),
                long.eq(long >> 1),
            ]
        with m.If(self.i_enter):
            for place in range(self.bursts):
                with m.If(at == place):
                    m.d.sync += [rank[place].eq(self.i_rank), long[place].eq(self.i_long)]
        for number in range(self.ranks):
            before: Value = Const(1, 1)  # none for this rank up to here
            found: list[Value] = []
            waits: list[Value] = []
            for place in range(self.bursts):
                there = level > place
                mine = there & (rank[place] == number)
                before = before & there & ~mine
                waits.append(mine)
                found.append(before & long[place])
            m.d.comb += [
                self.o_waiting[number].eq(Cat(waits).any()),
                self.o_ahead[number].eq(sum(found) >= self.enough),
            ]
        return m
