"""Counters of the uses of the column slot."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member, Out

from nearstep_hw.dram.column_stage import Slot

COUNTER_WIDTH = 48  # 16 days of 200 MHz


def counter_members() -> dict[str, Member]:
    """Outputs of the counters, for a block that hands them on."""
    return {f"o_{slot.name.lower()}": Out(COUNTER_WIDTH) for slot in Slot}


class SlotCounters(wiring.Component):
    """A counter for each kind of `Slot`; together they count the cycles.

    Members
    -------
    i_slot : of this cycle.
    i_clear : all counters become 0.
    o_<kind> : cycles, for every kind, in lower case.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "i_slot": In(Slot),
                "i_clear": In(1),
                **counter_members(),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        with m.Switch(self.i_slot):
            for slot in Slot:
                counter = getattr(self, f"o_{slot.name.lower()}")
                with m.Case(slot):
                    m.d.sync += counter.eq(counter + 1)
        with m.If(self.i_clear):
            m.d.sync += [getattr(self, f"o_{slot.name.lower()}").eq(0) for slot in Slot]
        return m
