"""Refresh of the DRAM: in batches as late as JEDEC allows, or when idle."""

from amaranth import Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Member, Out
from amaranth.utils import exact_log2

from nearstep_hw.dram.fabric import FabricTiming
from nearstep_spec.dram.timing import MAX_POSTPONED_REFRESHES

DEBT_LIMIT = 2 * MAX_POSTPONED_REFRESHES  # of the counter


def debt_members(postponed: int | None, ranks: int = 1) -> dict[str, Member]:
    """Return the ports for counts of refreshes, see `RefreshManager`; rank 0 in the low bits."""
    if postponed is None:
        return {name: In(ranks) for name in ("i_owed", "i_must", "i_hold")}
    width = ranks * exact_log2(DEBT_LIMIT)
    return {"i_debt": In(width), "o_debt": Out(width)}


def connect_debt(m: Module, outer: wiring.Component, inner: wiring.Component) -> None:
    """Connect the ports of `debt_members` of a component to those of one inside it."""
    for name, member in debt_members(outer.postponed).items():
        connect_part(m, getattr(outer, name), getattr(inner, name), member)


def connect_part(m: Module, outer: Value, inner: Value, member: Member) -> None:
    """Connect a port of a component to that of one inside it, in the direction of `member`."""
    m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)


class RefreshManager(wiring.Component):
    """Counts the due refreshes and issues them.

    A refresh is due every tREFI. When `postponed` refreshes are due, or one is due and the
    controller was idle for `idle_cycles`, or the channel is released, no beat enters; when the
    beats in flight have their commands, all banks are precharged and all due refreshes are issued,
    so the banks are closed and opened only once. If the channel has another owner, refreshes are
    counted outside (`postponed` is None): `i_must` starts them, `i_owed` continues them, also after
    `i_enable` fell, and `i_hold` delays them. If `shared`, the channel has other ranks, which
    continue meanwhile. The rank is then refreshed when a refresh is due and the other ranks have
    enough beats (`i_free`), or when `postponed` refreshes are due. After these refreshes, while all
    banks are closed, the rank is calibrated (ZQCS) on request or if
    `FabricTiming.calibration_interval` has passed since the last calibration.

    *Timing*: tRP after the precharge, then tRFC a refresh and tZQCS a calibration.

    Parameters
    ----------
    timing : distances and interval.
    postponed : number of due refreshes at which beats are stopped, at most 8; or None.
    idle_cycles : cycles without a beat after which refreshes are issued early.
    shared : there are other ranks.

    Members
    -------
    i_enable : the controller owns the channel; when `i_enable` falls the channel is released.
    i_debt : refreshes due when `i_enable` rises, rounded up; see `DramController`.
    i_owed, i_must, i_hold : in place of `i_debt` and `o_debt` if refreshes are counted outside.
    i_calibrate : a calibration is requested; held until it is issued.
    i_busy : beats are waiting or in flight.
    i_clear : no beat is in flight and all open banks may be precharged.
    o_stop : no beat may enter.
    o_no_activate : no bank may be activated.
    o_precharge : all banks are precharged in this cycle.
    o_refresh : the rank is refreshed in this cycle.
    o_calibrate : the rank is calibrated in this cycle.
    o_debt : refreshes due; zero while the channel is released.
    o_idle : the channel is not owned: banks are closed, tRP, tRFC and tZQCS have passed.
    i_free : no beat of this rank is next, and the other ranks have beats for a tRFC. If `shared`.
    i_inside : a beat of this rank is in flight: serve it even after `i_enable` fell. If `shared`.
    i_pins : no other rank is precharged, refreshed or calibrated in this cycle. If `shared`.
    o_done, i_done : this rank, and all ranks, can be released in this cycle. If `shared`.

    Attributes
    ----------
    interval, taken : cycles until the next refresh is due; the channel is owned. Read only by
        proofs.

    Raises
    ------
    ValueError : `postponed` is not 1 to 8.
    """

    def __init__(
        self,
        timing: FabricTiming,
        *,
        postponed: int | None = MAX_POSTPONED_REFRESHES,
        idle_cycles: int,
        shared: bool = False,
    ) -> None:
        if postponed is not None and not 1 <= postponed <= MAX_POSTPONED_REFRESHES:
            raise ValueError(
                f"Postponed refreshes must be 1 to {MAX_POSTPONED_REFRESHES}, not {postponed!r}"
            )
        self.timing = timing
        self.postponed = postponed
        self.idle_cycles = idle_cycles
        self.shared = shared
        self.interval = Signal(range(timing.refresh_interval))
        self.due = Signal()  # another refresh, in this cycle
        self.taken = Signal()
        super().__init__(
            {
                **debt_members(postponed),
                "i_enable": In(1),
                "i_calibrate": In(1),
                "i_busy": In(1),
                "i_clear": In(1),
                "o_stop": Out(1),
                "o_no_activate": Out(1),
                "o_precharge": Out(1),
                "o_refresh": Out(1),
                "o_calibrate": Out(1),
                "o_idle": Out(1),
                **(
                    {
                        **{f"i_{name}": In(1) for name in ("free", "inside", "pins", "done")},
                        "o_done": Out(1),
                    }
                    if shared
                    else {}
                ),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        t = self.timing
        owed = Signal()
        must = Signal()
        quiet = Signal(range(self.idle_cycles + 1))
        left = Signal(range(max(t.refresh_cycle, t.precharge_to_refresh, t.calibration)))
        wanted = Signal()
        uncalibrated = Signal(range(t.calibration_interval + 1))  # cycles
        calibrate = Signal()

        if self.shared:
            free, pay = self._share(m, quiet, owed=owed, must=must)
            pins, done, again = self.i_pins, self.i_done, self.i_enable | self.i_inside
        else:
            free, pay = quiet == self.idle_cycles, owed
            pins, done, again = None, ~self.due, self.i_enable
        m.d.comb += [
            wanted.eq(must | (owed & free) | ~self.i_enable),
            calibrate.eq(self.i_calibrate | (uncalibrated == t.calibration_interval)),
        ]
        with m.If(self.o_calibrate):
            m.d.sync += uncalibrated.eq(0)
        with m.Elif(uncalibrated != t.calibration_interval):
            m.d.sync += uncalibrated.eq(uncalibrated + 1)
        if self.postponed is None:
            m.d.comb += [owed.eq(self.i_owed), must.eq(self.i_must)]
        else:
            m.d.comb += [owed.eq(self.o_debt != 0), must.eq(self.o_debt >= self.postponed)]
            self._count(m)
        with m.If(self.i_busy):
            m.d.sync += quiet.eq(0)
        with m.Elif(quiet != self.idle_cycles):
            m.d.sync += quiet.eq(quiet + 1)

        with m.FSM(init="AWAY") as fsm:
            with m.State("AWAY"):
                m.d.comb += [self.o_idle.eq(1), self.o_stop.eq(1), self.o_no_activate.eq(1)]
                with m.If(self.i_enable):
                    m.next = "OPEN"
            with m.State("OPEN"):
                m.d.comb += self.o_stop.eq(wanted)
                begin = wanted & self.i_clear
                with m.If(begin if pins is None else begin & pins):
                    m.d.comb += self.o_precharge.eq(1)
                    m.d.sync += left.eq(t.precharge_to_refresh - 1)
                    m.next = "CLOSED"
            with m.State("CLOSED"):
                m.d.comb += [
                    self.o_stop.eq(~self.i_enable),
                    self.o_no_activate.eq((left != 0) | pay | calibrate | ~self.i_enable),
                ]
                with m.If(left != 0):
                    m.d.sync += left.eq(left - 1)
                if self.postponed is None:
                    with m.Elif(pay & self.i_hold):
                        pass  # due refreshes are issued first
                if pins is not None:
                    with m.Elif((pay | calibrate) & ~pins):
                        pass
                with m.Elif(pay):
                    m.d.comb += self.o_refresh.eq(1)
                    m.d.sync += left.eq(t.refresh_cycle - 1)
                with m.Elif(calibrate):
                    m.d.comb += self.o_calibrate.eq(1)
                    m.d.sync += left.eq(t.calibration - 1)
                with m.Elif(again):
                    m.next = "OPEN"
                if self.shared:
                    with m.Else():
                        m.d.comb += self.o_done.eq(~self.due)
                        with m.If(done):
                            m.next = "AWAY"
                else:
                    with m.Elif(done):
                        m.next = "AWAY"
        m.d.comb += self.taken.eq(fsm.ongoing("OPEN") | fsm.ongoing("CLOSED"))
        return m

    def _share(
        self, m: Module, quiet: Signal, *, owed: Signal, must: Signal
    ) -> tuple[Value, Value]:
        """Return whether the other ranks leave time for refreshes, and whether a due refresh is
        issued.
        """
        free = Signal()
        pay = Signal()
        all_due = Signal()  # `postponed` were due, and all of them are issued
        m.d.comb += [
            free.eq(self.i_free | (quiet == self.idle_cycles)),
            pay.eq(owed & (free | must | all_due | ~self.i_enable)),
        ]
        with m.If(~owed):
            m.d.sync += all_due.eq(0)
        with m.Elif(must):
            m.d.sync += all_due.eq(1)
        return free, pay

    def _count(self, m: Module) -> None:
        interval, due = self.interval, self.due
        m.d.comb += due.eq(interval == 0)
        with m.If(due | self.o_idle):
            m.d.sync += interval.eq(self.timing.refresh_interval - 1)
        with m.Else():
            m.d.sync += interval.eq(interval - 1)
        with m.If(~self.o_idle):
            m.d.sync += self.o_debt.eq(self.o_debt + due - self.o_refresh)
        with m.Else():
            m.d.sync += self.o_debt.eq(Mux(self.i_enable, self.i_debt, 0))
