"""Event counters."""

from collections.abc import Sequence

from amaranth import Elaboratable, Module, ResetInserter
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

COUNTER_WIDTH = 64


class EventCounters(wiring.Component):
    """Counts the cycles in which each event is high.

    Parameters
    ----------
    events : names.

    Members
    -------
    i_<event> : high in cycles to count.
    o_<event> : cycles since `i_clear`.
    i_clear : clears all counters.

    Attributes
    ----------
    i, o : the ports of the events, by name.
    """

    def __init__(self, events: Sequence[str]) -> None:
        self.events = tuple(events)
        super().__init__(
            {
                **{f"i_{event}": In(1) for event in events},
                **{f"o_{event}": Out(COUNTER_WIDTH) for event in events},
                "i_clear": In(1),
            }
        )
        self.i = {event: getattr(self, f"i_{event}") for event in events}
        self.o = {event: getattr(self, f"o_{event}") for event in events}

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        for event, count in self.o.items():
            with m.If(self.i[event]):
                m.d.sync += count.eq(count + 1)
        return ResetInserter(self.i_clear)(m)
