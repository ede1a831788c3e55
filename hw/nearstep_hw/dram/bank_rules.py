"""Minimum distances between commands of a bank."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.hold import HoldLine


class BankRules(wiring.Component):
    """Enforces tRCD, tRAS, tRC, tRP, tRTP and tWR of every bank.

    *Timing*: a command given in this cycle counts from the next one.

    Parameters
    ----------
    timing : the distances.
    banks : number of banks.

    Members
    -------
    i_activate, i_precharge, i_read, i_write : a bit for each bank that gets the command.
    o_no_activate, o_no_precharge, o_no_column : a bit for each bank that must not get the command.
    """

    def __init__(self, timing: FabricTiming, *, banks: int) -> None:
        self.timing = timing
        self.banks = banks
        super().__init__(
            {
                **{f"i_{name}": In(banks) for name in ("activate", "precharge", "read", "write")},
                **{f"o_no_{name}": Out(banks) for name in ("activate", "precharge", "column")},
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        t = self.timing
        m.submodules.activate = activate = HoldLine(
            self.banks, {"precharge": t.precharge_to_activate}
        )
        m.submodules.precharge = precharge = HoldLine(
            self.banks,
            {
                "activate": t.activate_to_precharge,
                "read": t.read_to_precharge,
                "write": t.write_to_precharge,
            },
        )
        m.submodules.column = column = HoldLine(self.banks, {"activate": t.activate_to_column})
        m.d.comb += [
            activate.i_precharge.eq(self.i_precharge),
            precharge.i_activate.eq(self.i_activate),
            precharge.i_read.eq(self.i_read),
            precharge.i_write.eq(self.i_write),
            column.i_activate.eq(self.i_activate),
            self.o_no_activate.eq(activate.o_held),
            self.o_no_precharge.eq(precharge.o_held),
            self.o_no_column.eq(column.o_held),
        ]
        return m
