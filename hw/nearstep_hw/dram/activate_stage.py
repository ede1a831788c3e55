"""Opens rows ahead of the beats that need them."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.fabric import ACTIVATES_IN_WINDOW, FabricTiming
from nearstep_hw.dram.hold import HoldLine
from nearstep_hw.dram.request import RowLayout
from nearstep_spec.dram.geometry import DramGeometry


class ActivateStage(wiring.Component):
    """Activates rows in order, and keeps tRRD and tFAW.

    *Timing*: combinational; at most one a cycle.

    Parameters
    ----------
    timing, geometry : of the channel.

    Members
    -------
    i : rows; taken with their command.
    i_stop : nothing is activated.
    i_no_activate : banks that must not be activated yet.
    o_activate : the bank activated in this cycle, with the row of `i`.
    """

    def __init__(self, timing: FabricTiming, geometry: DramGeometry) -> None:
        self.timing = timing
        self.geometry = geometry
        super().__init__(
            {
                "i": In(stream.Signature(RowLayout(geometry))),
                "i_stop": In(1),
                "i_no_activate": In(geometry.banks),
                "o_activate": Out(geometry.banks),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        t, geometry = self.timing, self.geometry
        m.submodules.rank = rank = HoldLine(1, {"activate": t.activate_to_activate})
        m.submodules.group = group = HoldLine(
            geometry.bank_groups, {"activate": t.activate_to_activate_same_group}
        )
        recent = Signal(max(1, t.four_activates - 1))  # activates in the cycles before this one
        bank = Signal(geometry.banks)
        bank_group = Signal(geometry.bank_groups)
        activate = Signal()

        m.d.comb += [
            bank.eq(1 << self.i.payload.bank),
            bank_group.eq(1 << (self.i.payload.bank >> geometry.bank_bits)),
            activate.eq(
                self.i.valid
                & ~self.i_stop
                & ~rank.o_held
                & ~(group.o_held & bank_group).any()
                & ~(self.i_no_activate & bank).any()
                & (sum(recent) < ACTIVATES_IN_WINDOW)
            ),
            self.i.ready.eq(activate),
            self.o_activate.eq(Mux(activate, bank, 0)),
            rank.i_activate.eq(activate),
            group.i_activate.eq(Mux(activate, bank_group, 0)),
        ]
        m.d.sync += recent.eq(Cat(activate, recent))
        return m
