"""State of the banks as expected by the host."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.host_command import HostCommandLayout
from nearstep_hw.dram.dfi import HOST_PHASES
from nearstep_spec.dram.geometry import DramGeometry


class HostShadow(wiring.Component):
    """Tracks the host's ACT, PRE and automatic precharges: the row of each bank of a rank, and
    whether the bank is open.

    *Timing*: a command in cycle n is in `o_open` and `o_row` from cycle n + 1 on.

    Parameters
    ----------
    geometry : of the rank.

    Members
    -------
    i_slot : commands of the host, in order of time.
    o_open : a bit for each bank.
    o_row : the row of each bank; of a closed bank, the last one.
    o_touched : banks that a command of this cycle opens or closes.
    """

    def __init__(self, geometry: DramGeometry) -> None:
        self.geometry = geometry
        super().__init__(
            {
                "i_slot": In(HostCommandLayout(geometry)).array(HOST_PHASES),
                "o_open": Out(geometry.banks),
                "o_row": Out(geometry.row_bits).array(geometry.banks),
                "o_touched": Out(geometry.banks),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        touched = []
        for bank, row in enumerate(self.o_row):
            touches = Signal(name=f"touches{bank}")
            for slot in self.i_slot:
                mine = slot.bank == bank
                closes = slot.precharge_all | (mine & (slot.precharge | slot.closes))
                with m.If(mine & slot.activate):
                    m.d.sync += [self.o_open[bank].eq(1), row.eq(slot.address)]
                    m.d.comb += touches.eq(1)
                with m.Elif(closes):
                    m.d.sync += self.o_open[bank].eq(0)
                    m.d.comb += touches.eq(1)
            touched.append(touches)
        m.d.comb += self.o_touched.eq(Cat(touched))
        return m
