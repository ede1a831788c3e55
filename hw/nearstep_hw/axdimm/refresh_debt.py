"""Refreshes that are due: those that the host owes, and those that the DRAM lacks."""

from amaranth import Elaboratable, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.timing import MAX_POSTPONED_REFRESHES

DEBT = signed(6)
MOST = 2 * MAX_POSTPONED_REFRESHES - 1  # what a controller can be told; a legal host stays below
LEAST = -MAX_POSTPONED_REFRESHES  # more given in advance do not count


class RefreshDebt(wiring.Component):
    """Counts refreshes: one more is due every tREFI; one that is given pays one, and up to eight
    may be given in advance.

    There are two counts. The host's sees what the host does, in either mode; the DRAM's sees what
    the DRAM gets, from whomever. While the DRAM has got at least as many as the host has given,
    its debt is not above the host's, and a host that keeps its own limit keeps the DRAM's.

    *Timing*: counts follow a cycle after what they count.

    Parameters
    ----------
    timing : for the interval.
    hurry : cycles that a hand-over may need before the DRAM gets its next refresh.

    Members
    -------
    i_host : the host refreshes.
    i_dram : the DRAM is refreshed.
    o_host, o_dram : refreshes due.
    o_owing : the DRAM lacks refreshes, or is behind the host.
    o_ahead : the DRAM has got refreshes that the host has not given yet.
    o_wait : the DRAM must be refreshed so soon that a hand-over must not begin.
    o_overdue : the DRAM waits for more refreshes than may be postponed.
    o_start : debt for a controller that counts its own intervals from now on. The fraction of the
        current interval is rounded, so that many hand-overs neither add nor lose refreshes.

    Ref: JESD79-4, "Refresh Command".
    """

    def __init__(self, timing: FabricTiming, *, hurry: int) -> None:
        self.timing = timing
        self.hurry = hurry
        super().__init__(
            {
                "i_host": In(1),
                "i_dram": In(1),
                "o_host": Out(DEBT),
                "o_dram": Out(DEBT),
                "o_owing": Out(1),
                "o_ahead": Out(1),
                "o_wait": Out(1),
                "o_overdue": Out(1),
                "o_start": Out(range(MOST + 1)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        interval = self.timing.refresh_interval
        left = Signal(range(interval), init=interval - 1)
        due = Signal()
        m.d.comb += due.eq(left == 0)
        m.d.sync += left.eq(Mux(due, interval - 1, left - 1))
        for debt, paid in ((self.o_host, self.i_host), (self.o_dram, self.i_dram)):
            with m.If(due & ~paid & (debt != MOST)):
                m.d.sync += debt.eq(debt + 1)
            with m.If(~due & paid & (debt != LEAST)):
                m.d.sync += debt.eq(debt - 1)
        rounded = Signal(DEBT)
        m.d.comb += [
            self.o_owing.eq((self.o_dram > 0) | (self.o_dram > self.o_host)),
            self.o_ahead.eq(self.o_dram < self.o_host),
            self.o_wait.eq((self.o_dram == MAX_POSTPONED_REFRESHES) & (left < self.hurry)),
            self.o_overdue.eq(self.o_dram > MAX_POSTPONED_REFRESHES),
            rounded.eq(self.o_dram + (left < interval // 2)),
        ]
        with m.If(rounded > MOST):
            m.d.comb += self.o_start.eq(MOST)
        with m.Elif(rounded > 0):
            m.d.comb += self.o_start.eq(rounded)
        return m
