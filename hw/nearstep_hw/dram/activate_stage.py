"""Activation of rows ahead of their beats."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.fabric import ACTIVATES_IN_WINDOW, FabricTiming
from nearstep_hw.dram.hold import HoldLine
from nearstep_hw.dram.request import RowLayout, of_rank, rank_select
from nearstep_spec.dram.geometry import DramGeometry


class ActivateStage(wiring.Component):
    """Activates rows in order, and keeps tRRD and tFAW of each rank.

    *Timing*: combinational; at most one ACT a cycle.

    Parameters
    ----------
    timing, geometry : of the channel.

    Members
    -------
    i : rows; accepted with their command.
    i_stop : a bit for each rank: none of its banks is activated.
    i_no_activate : banks that must not be activated yet.
    o_activate : the bank activated in this cycle, with the row of `i`.
    """

    def __init__(self, timing: FabricTiming, geometry: DramGeometry) -> None:
        self.timing = timing
        self.geometry = geometry
        super().__init__(
            {
                "i": In(stream.Signature(RowLayout(geometry))),
                "i_stop": In(geometry.ranks),
                "i_no_activate": In(geometry.all_banks),
                "o_activate": Out(geometry.all_banks),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        t, geometry = self.timing, self.geometry
        ranks = geometry.ranks
        m.submodules.rank = rank = HoldLine(ranks, {"activate": t.activate_to_activate})
        m.submodules.group = group = HoldLine(
            ranks * geometry.bank_groups, {"activate": t.activate_to_activate_same_group}
        )
        # ACT in the cycles before this one.
        recent = [
            Signal(max(1, t.four_activates - 1), name="recent" if ranks == 1 else f"recent{each}")
            for each in range(ranks)
        ]
        bank = Signal(geometry.all_banks)
        bank_group = Signal(ranks * geometry.bank_groups)
        own = rank_select(geometry, self.i.payload.bank)
        activate = Signal()
        enough = [sum(each) < ACTIVATES_IN_WINDOW for each in recent]

        m.d.comb += [
            bank.eq(1 << self.i.payload.bank),
            bank_group.eq(1 << (self.i.payload.bank >> geometry.bank_bits)),
            activate.eq(
                self.i.valid
                & ~of_rank(self.i_stop, own)
                & ~of_rank(rank.o_held, own)
                & ~(group.o_held & bank_group).any()
                & ~(self.i_no_activate & bank).any()
                & (enough[0] if ranks == 1 else of_rank(Cat(enough), own))
            ),
            self.i.ready.eq(activate),
            self.o_activate.eq(Mux(activate, bank, 0)),
            rank.i_activate.eq(activate if ranks == 1 else Mux(activate, own, 0)),
            group.i_activate.eq(Mux(activate, bank_group, 0)),
        ]
        for each, mine in zip(recent, rank.i_activate, strict=True):
            m.d.sync += each.eq(Cat(activate if ranks == 1 else mine, each))
        return m
