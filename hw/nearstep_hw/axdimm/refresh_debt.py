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
    """Counts refreshes: one more is due every tREFI, one that is given pays one, and up to eight
    may be given in advance.

    There are two counts. The host's sees what the host does, in either mode; the DRAM's sees what
    the DRAM gets, from whomever. While the DRAM has got at least as many as the host has given,
    its debt is not above the host's, and a host that keeps its own limit keeps the DRAM's.

    A hand-over leaves the DRAM with nothing due, but the host may still owe eight. If those
    reached the DRAM as well, right behind the eight that it may just have got, it would see more
    than 16 in 2 tREFI. So a refresh of the host that the DRAM has already got is hidden from it,
    if none has come due since the DRAM's last: the time between two then stays within nine tREFI
    as it does for the host.

    That time is one tREFI longer at most where a refresh was given in advance and the host then
    postpones eight. So none is given in advance once the host has been seen to do that.

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
    i_advance : one refresh more than that is wanted; see above.
    o_owing : the DRAM lacks refreshes, or is behind the host.
    o_hide : a refresh of the host, in this cycle, is one that the DRAM has already got.
    o_wait : the DRAM must be refreshed so soon that a hand-over must not begin.
    o_overdue : the DRAM waits for more refreshes than may be postponed.
    o_start : debt for a controller that counts its own intervals from now on: what is due or, if
        refreshes were given in advance, the whole intervals since the last. The interval that has
        begun is not counted, so that many hand-overs neither add nor lose refreshes; the controller
        is behind by up to one and must therefore not postpone the last of eight.

    Attributes
    ----------
    left, gap, gap_left : cycles until one more is due; whole intervals since the DRAM's last
        refresh, and cycles until the next of them. For proofs; nothing else reads them.

    Ref: JESD79-4, "Refresh Command".
    """

    def __init__(self, timing: FabricTiming, *, hurry: int) -> None:
        self.timing = timing
        self.hurry = hurry
        last = timing.refresh_interval - 1
        self.left = Signal(range(last + 1), init=last)
        self.gap = Signal(range(MOST + 1))
        self.gap_left = Signal(range(last + 1), init=last)
        super().__init__(
            {
                "i_host": In(1),
                "i_dram": In(1),
                "i_advance": In(1),
                "o_host": Out(DEBT),
                "o_dram": Out(DEBT),
                "o_owing": Out(1),
                "o_hide": Out(1),
                "o_wait": Out(1),
                "o_overdue": Out(1),
                "o_start": Out(range(MOST + 1)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        interval = self.timing.refresh_interval
        left, gap, gap_left = self.left, self.gap, self.gap_left
        due = Signal()
        fresh = Signal()  # none has come due since the DRAM's last refresh
        postpones = Signal()  # the host has let as many come due as it may
        m.d.comb += due.eq(left == 0)
        m.d.sync += [
            left.eq(Mux(due, interval - 1, left - 1)),
            gap_left.eq(Mux(gap_left == 0, interval - 1, gap_left - 1)),
        ]
        with m.If(self.i_dram):
            m.d.sync += [gap.eq(0), gap_left.eq(interval - 1), fresh.eq(~due)]
        with m.Elif((gap_left == 0) & (gap != MOST)):
            m.d.sync += gap.eq(gap + 1)
        with m.If(due & ~self.i_dram):
            m.d.sync += fresh.eq(0)
        with m.If(self.o_host == MAX_POSTPONED_REFRESHES):
            m.d.sync += postpones.eq(1)
        for debt, paid in ((self.o_host, self.i_host), (self.o_dram, self.i_dram)):
            with m.If(due & ~paid & (debt != MOST)):
                m.d.sync += debt.eq(debt + 1)
            with m.If(~due & paid & (debt != LEAST)):
                m.d.sync += debt.eq(debt - 1)

        most = MAX_POSTPONED_REFRESHES
        wanted = Signal(DEBT)
        m.d.comb += [
            wanted.eq(Mux(self.o_host < 0, self.o_host, 0) - (self.i_advance & ~postpones)),
            self.o_owing.eq((self.o_dram > wanted) & (self.o_dram > LEAST)),
            self.o_hide.eq(
                ((fresh & (self.o_host > 0)) | (self.o_dram == LEAST)) & (self.o_dram < self.o_host)
            ),
            self.o_wait.eq(
                ((self.o_dram == most) & (left < self.hurry))
                | ((gap == most) & (gap_left < self.hurry))
            ),
            self.o_overdue.eq((self.o_dram > most) | (gap > most)),
            self.o_start.eq(Mux(self.o_dram > gap, self.o_dram, gap)),
        ]
        return m
