"""Counters of the uses of the column slot."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member, Out

from nearstep_hw.dram.column_stage import Slot

COUNTER_WIDTH = 48  # 16 days at 200 MHz


def counter_members() -> dict[str, Member]:
    """Return the outputs of the counters, for components that forward them."""
    return {f"o_{slot.name.lower()}": Out(COUNTER_WIDTH) for slot in Slot}


class SlotCounters(wiring.Component):
    """Counts the cycles of each kind of `Slot`.

    Members
    -------
    i_slot : use of this cycle's slot.
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
