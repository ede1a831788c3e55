"""Refreshes that are due: those that the host owes, and those that the DRAM lacks."""

from amaranth import Elaboratable, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.fabric import FabricTiming
from nearstep_spec.axdimm.hand_over import HOLD_INTERVALS as RATE_INTERVALS
from nearstep_spec.dram.timing import MAX_POSTPONED_REFRESHES

DEBT = signed(6)
MOST = 2 * MAX_POSTPONED_REFRESHES - 1  # of the counters; a legal host does not reach it
LEAST = -MAX_POSTPONED_REFRESHES - 1  # a host whose intervals begin earlier is at -8 there
RATE = 16  # REF in two tREFI, at most
POSTPONED = RATE - MAX_POSTPONED_REFRESHES - RATE_INTERVALS - 1
"""Refreshes that the DRAM may lack where the host does not; see `RefreshDebt`, *Rate*."""
ADVANCE = MAX_POSTPONED_REFRESHES - RATE + RATE_INTERVALS + 1
"""Least debt of the DRAM, two tREFI after a debt of eight."""
RESERVE = 2  # refreshes left due if the host owes more


class RefreshDebt(wiring.Component):
    """Decides which refreshes of the host are forwarded, and when the DRAM needs others.

    The host keeps JEDEC's limits: no more than nine tREFI between two REF, from eight postponed to
    eight pulled in, at most 16 REF in two tREFI. The phase of its intervals is unknown: they begin
    up to a tREFI earlier than those counted here. The same limits must hold for the DRAM. In normal
    mode a REF of the host can be hidden from the DRAM, but none added.

    `o_host` is the host's debt, reduced by the host's refreshes in any mode; `o_dram` is the DRAM's
    debt, reduced by refreshes from any source. Both grow by one every tREFI. The host refreshes at
    times h, the DRAM is refreshed at times d.

    *Debt*: the mode becomes normal only with `o_dram <= o_host`, which hiding preserves. So the
    DRAM's debt never exceeds the host's. In the other modes the DRAM is refreshed as soon as
    `POSTPONED` are due. By the host's intervals one more may be due, and another one may become due
    during a hand-over. A hand-over does not begin with seven or eight due, because the host must
    then refresh within two tREFI.

    *Gap*: the next REF of the host is at most 9 tREFI after its last REF. If the DRAM was refreshed
    at or after the host's last REF (d >= h) and the next REF is forwarded, the DRAM's gap is no
    longer than the host's. So the mode becomes normal only with d >= h: `o_owing` is high while the
    host's last REF is after the DRAM's. There is one exception. A host that owes k refreshes after
    a REF issues the next one within 9 - k tREFI. With `gap` whole intervals since d the next REF is
    early enough if gap + 1 <= k. Then the REF may be hidden (one more refresh is kept in reserve,
    for a host whose intervals begin later), and is hidden if the DRAM's debt is below the host's.
    Outside normal mode the DRAM is refreshed, due or not, 8 tREFI after its last refresh, with one
    tREFI of margin; a hand-over does not begin if this deadline cannot be met. No such refresh is
    needed while the arbiter only waits for the host to close all banks: the following REF is
    forwarded.

    *Rate*: consider a time of less than two tREFI that begins with a refresh of the DRAM, whose
    debt is then E; at most two more refreshes become due in this time. In normal mode the DRAM gets
    only refreshes of the host: if not behind the host at the beginning, at most as many as the host
    issues, 16. If behind, the DRAM gets E - E' + 2, with the debt E' at the end. E' is at least the
    host's -8, counted with the host's intervals, where E is one more at most. So E <= `POSTPONED`
    limits the DRAM to 16. In acceleration mode the DRAM is refreshed when `POSTPONED` are due; E is
    greater only if the host issues postponed refreshes during a hand-over. Then `o_hold` keeps the
    mode from becoming normal for two tREFI, in which the DRAM is refreshed only down to a debt of
    `ADVANCE`, a negative number. A DRAM ahead of the host would exceed the rate as well, so the
    DRAM is refreshed only down to a debt of `RESERVE`, or to the host's debt if that is less;
    refreshes ahead of a host that owes more than `RESERVE` are compensated by hiding before the
    host owes none. Only a refresh for the gap puts the DRAM ahead of the host, by one, and then the
    DRAM had no refresh in the previous 8 tREFI.

    *Timing*: counts change a cycle after the counted event.

    Parameters
    ----------
    timing : has the interval of refreshes.
    hurry : cycles that a hand-over may need before the DRAM gets its next refresh.

    Members
    -------
    i_host : the host refreshes.
    i_pass : the refresh is forwarded unless `o_hide` is high: the mode is normal.
    i_own : the DRAM is refreshed by the kernel's controller or the arbiter.
    i_enable : the controller owns the channel and will keep it.
    i_yield : the next REF of the host will be forwarded.
    o_host, o_dram : refreshes due.
    o_hide : the DRAM does not need the host's refresh in this cycle.
    o_owing : the DRAM must be refreshed before the mode is normal, and may be now.
    o_owed : the controller shall refresh if it has closed all banks; after `i_enable` fell, equal
        to `o_owing`.
    o_must : the controller shall close all banks and refresh.
    o_wait : a refresh is due so soon that a hand-over must not begin; the host will refresh.
    o_hold : the mode must not become normal yet.
    o_overdue : the DRAM lacks more refreshes than may be postponed, or for too long.

    Attributes
    ----------
    left, gap, gap_left : cycles until one more is due; whole intervals since the DRAM's last
        refresh, and cycles until the next of them.
    stale, hold : after the DRAM's last refresh the host has refreshed, and may not refresh again
        soon; cycles of `o_hold` left. For proofs only.

    Ref: JESD79-4, "Refresh Command".
    """

    def __init__(self, timing: FabricTiming, *, hurry: int) -> None:
        self.timing = timing
        self.hurry = hurry
        last = timing.refresh_interval - 1
        self.left = Signal(range(last + 1), init=last)
        self.gap = Signal(range(MOST + 1))
        self.gap_left = Signal(range(last + 1), init=last)
        self.stale = Signal()
        self.hold = Signal(range(RATE_INTERVALS * timing.refresh_interval + 1))
        super().__init__(
            {
                "i_host": In(1),
                "i_pass": In(1),
                "i_own": In(1),
                "i_enable": In(1),
                "i_yield": In(1),
                "o_host": Out(DEBT),
                "o_dram": Out(DEBT),
                "o_hide": Out(1),
                "o_owing": Out(1),
                "o_owed": Out(1),
                "o_must": Out(1),
                "o_wait": Out(1),
                "o_hold": Out(1),
                "o_overdue": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        interval = self.timing.refresh_interval
        most = MAX_POSTPONED_REFRESHES
        host, dram = self.o_host, self.o_dram
        left, gap, gap_left = self.left, self.gap, self.gap_left
        stale, hold = self.stale, self.hold
        due = Signal()
        paid = Signal()  # the DRAM is refreshed
        soon = Signal()  # after a refresh now, the host's next must be in time for the DRAM
        ahead = Signal()
        behind = Signal()
        late = Signal()
        enough = Signal()  # issued in `o_hold`
        spare = Signal()  # the DRAM lacks more than is left to the host

        m.d.comb += [
            due.eq(left == 0),
            paid.eq((self.i_host & self.i_pass & ~self.o_hide) | self.i_own),
            ahead.eq(dram < host),
            behind.eq(dram > host),
            soon.eq(host >= gap + (1 + RESERVE)),
            late.eq(gap >= most),
            spare.eq(behind | (dram > RESERVE)),
            enough.eq(self.o_hold & (dram <= ADVANCE)),
        ]
        m.d.sync += [
            left.eq(Mux(due, interval - 1, left - 1)),
            gap_left.eq(Mux(gap_left == 0, interval - 1, gap_left - 1)),
        ]
        with m.If(paid):
            m.d.sync += [gap.eq(0), gap_left.eq(interval - 1), stale.eq(0)]
        with m.Elif((gap_left == 0) & (gap != MOST)):
            m.d.sync += gap.eq(gap + 1)
        with m.If(self.i_host & ~self.i_pass & ~soon):
            m.d.sync += stale.eq(1)

        # At most eight refreshes are counted in advance, or as many as the host's count has.
        host_next, dram_next = Signal(DEBT), Signal(DEBT)
        m.d.comb += [host_next.eq(host), dram_next.eq(dram)]
        m.d.sync += [host.eq(host_next), dram.eq(dram_next)]
        with m.If(due & ~self.i_host & (host != MOST)):
            m.d.comb += host_next.eq(host + 1)
        with m.If(~due & self.i_host & (host != LEAST)):
            m.d.comb += host_next.eq(host - 1)
        with m.If(due & ~paid & (dram != MOST)):
            m.d.comb += dram_next.eq(dram + 1)
        with m.If(~due & paid & ((dram > -most) | (dram > host_next))):
            m.d.comb += dram_next.eq(dram - 1)

        with m.If(self.i_own & behind & (dram > POSTPONED)):
            m.d.sync += hold.eq(RATE_INTERVALS * interval)
        with m.Elif(self.o_hold):
            m.d.sync += hold.eq(hold - 1)

        m.d.comb += [
            self.o_hold.eq(hold != 0),
            self.o_hide.eq(ahead & soon),
            self.o_owing.eq(
                ~enough
                & (
                    behind
                    | stale
                    | (~self.i_yield & ((dram > POSTPONED) | late))
                    | (self.o_hold & spare)
                )
            ),
            self.o_owed.eq(Mux(self.i_enable, (spare | late) & ~enough, self.o_owing)),
            self.o_must.eq((spare & (dram >= POSTPONED)) | late),
            self.o_wait.eq(
                (dram == most - 1) | (dram == most) | ((gap == most) & (gap_left < self.hurry))
            ),
            self.o_overdue.eq((dram > most) | (gap > most)),
        ]
        return m
