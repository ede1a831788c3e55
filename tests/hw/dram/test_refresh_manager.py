"""RefreshManager against the arithmetic of tREFI, with a stand-in for the beats."""

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.refresh_manager import RefreshManager
from nearstep_spec.dram.timing import dram_timing

from ..simulate import simulate

FABRIC = FabricTiming(dram_timing("DDR4-1600", "8Gb", "x8"))
BRISK = FabricTiming(replace(FABRIC.timing, t_rfc=40, t_refi=160))
HELD = 20  # cycles
IDLE = 32


@dataclass
class Log:
    refreshes: list[int] = field(default_factory=list)
    precharges: list[int] = field(default_factory=list)
    debts: list[int] = field(default_factory=list)
    activates_allowed: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    calibrations: list[int] = field(default_factory=list)


def run(
    cycles,
    *,
    timing=FABRIC,
    postponed=8,
    busy=lambda c: True,
    enable=lambda c: True,
    debt=0,
    drain=40,
    asked=(),
):
    """Beats that take up to `drain` cycles to get out once they are stopped.

    Calibrations are asked for from the cycles `asked` on, until they are given.
    """
    dut = RefreshManager(timing, postponed=postponed, idle_cycles=IDLE)
    log = Log()
    rng = random.Random(1)

    async def bench(ctx):
        ctx.set(dut.i_debt, debt)
        inside = 0
        for cycle in range(cycles):
            ctx.set(dut.i_enable, enable(cycle))
            ctx.set(dut.i_busy, busy(cycle))
            wanted = sum(each <= cycle for each in asked)
            ctx.set(dut.i_calibrate, len(log.calibrations) < wanted)
            stop = ctx.get(dut.o_stop)
            inside = max(0, inside - 1) if stop else rng.randint(1, drain) * busy(cycle)
            ctx.set(dut.i_clear, inside == 0)
            if ctx.get(dut.o_precharge):
                assert stop
                assert inside == 0
                log.precharges.append(cycle)
            if ctx.get(dut.o_refresh):
                assert ctx.get(dut.o_no_activate)
                log.refreshes.append(cycle)
            if ctx.get(dut.o_calibrate):
                assert ctx.get(dut.o_no_activate)
                log.calibrations.append(cycle)
            if not ctx.get(dut.o_no_activate):
                log.activates_allowed.append(cycle)
            if ctx.get(dut.o_idle):
                log.idle.append(cycle)
            log.debts.append(ctx.get(dut.o_debt))
            await ctx.tick()

    simulate(dut, bench)
    return log


@pytest.mark.parametrize(
    "postponed", [1, *(pytest.param(n, marks=pytest.mark.deep) for n in (3, 8))]
)
def test_refreshes_come_together_when_so_many_are_due(postponed: int) -> None:
    intervals = 10
    log = run(intervals * FABRIC.refresh_interval, postponed=postponed)
    assert max(log.debts) == postponed
    assert len(log.refreshes) == (intervals - 1) // postponed * postponed
    assert len(log.precharges) == len(log.refreshes) // postponed
    gaps = [b - a for a, b in zip(log.refreshes, log.refreshes[1:], strict=False)]
    together = [gap for index, gap in enumerate(gaps) if (index + 1) % postponed]
    assert together == [FABRIC.refresh_cycle] * len(together)


def test_bank_rules_around_a_refresh() -> None:
    log = run(10 * FABRIC.refresh_interval)
    assert log.refreshes[0] - log.precharges[0] == FABRIC.precharge_to_refresh
    after = [cycle for cycle in log.activates_allowed if cycle > log.precharges[0]]
    last = [cycle for cycle in log.refreshes if cycle < after[0]][-1]
    assert after[0] - last == FABRIC.refresh_cycle
    assert not any(log.precharges[0] < c < after[0] for c in log.activates_allowed)


def test_an_idle_controller_does_not_postpone() -> None:
    log = run(6 * FABRIC.refresh_interval, busy=lambda c: False)
    assert max(log.debts) == 1
    assert len(log.refreshes) == 5


def test_what_was_due_at_the_start_is_paid() -> None:
    log = run(2 * FABRIC.refresh_interval, debt=9, busy=lambda c: False)
    assert log.debts[1] == 9
    assert len(log.refreshes) == 10
    assert max(log.debts) == 9


def test_the_channel_is_handed_back_closed_and_without_debt() -> None:
    asked = 4 * FABRIC.refresh_interval + 100
    log = run(asked + 1000, enable=lambda c: c < asked)
    back = next(cycle for cycle in log.idle if cycle > asked)
    assert log.debts[back] == 0
    assert len(log.refreshes) == 4
    assert log.precharges[-1] >= asked
    assert back > log.refreshes[-1] + FABRIC.refresh_cycle - 1
    assert not any(c > log.precharges[-1] for c in log.activates_allowed)
    assert not any(c > back for c in log.precharges + log.refreshes)


def test_a_refresh_that_becomes_due_while_the_channel_is_handed_back_is_paid() -> None:
    interval = BRISK.refresh_interval
    for asked in range(2 * interval, 3 * interval):
        log = run(asked + 100, timing=BRISK, enable=lambda c, asked=asked: c < asked, drain=3)
        back = next(cycle for cycle in log.idle if cycle > asked)
        assert log.debts[back] == 0, asked
        assert len(log.refreshes) == (back - 1) // interval, asked


CALIBRATED = FabricTiming(replace(BRISK.timing, calibration_interval=5 * 160))


def test_the_rank_is_calibrated_at_the_interval_of_its_part() -> None:
    interval = CALIBRATED.refresh_interval
    log = run(40 * interval, timing=CALIBRATED, postponed=2, busy=lambda c: True, drain=3)
    gaps = [b - a for a, b in zip([0, *log.calibrations], log.calibrations, strict=False)]
    print(log.calibrations)
    # Every fifth interval, and then with the next refreshes, of every second
    assert 40 // 8 <= len(gaps) <= 40 // 5
    assert all(5 * interval <= gap < 8 * interval for gap in gaps)


def test_a_calibration_follows_refreshes_and_nothing_follows_it_for_tzqcs() -> None:
    interval = BRISK.refresh_interval
    log = run(30 * interval, timing=BRISK, postponed=3, drain=3, asked=(40, 300, 700, 701))
    assert len(log.calibrations) == 4
    for at in log.calibrations:
        others = log.refreshes + log.precharges + log.activates_allowed
        before = max(each for each in log.refreshes + log.calibrations if each < at)
        after = min(each for each in [*others, *log.calibrations] if each > at)
        assert at - before in (BRISK.refresh_cycle, BRISK.calibration)
        assert after - at >= BRISK.calibration == 32


def test_the_channel_is_not_handed_back_in_a_calibration() -> None:
    interval = BRISK.refresh_interval
    enabled = 3 * interval + 5
    log = run(enabled + 200, timing=BRISK, enable=lambda c: c < enabled, asked=(3 * interval,))
    (at,) = log.calibrations
    assert at > enabled
    assert min(c for c in log.idle if c > enabled) > at + BRISK.calibration - 1


def test_what_is_counted_outside_is_given_until_nothing_is_owed() -> None:
    """`i_must` begins, `i_owed` goes on; alone it waits for an idle controller."""
    dut = RefreshManager(FABRIC, postponed=None, idle_cycles=IDLE)
    refreshes: list[int] = []

    async def bench(ctx):
        owed = 4
        for cycle in range(3000):
            owed += cycle == 2000
            ctx.set(dut.i_enable, cycle < 2100)
            ctx.set(dut.i_owed, owed > 0)
            ctx.set(dut.i_must, 500 <= cycle < 510)
            ctx.set(dut.i_busy, cycle < 2050)
            ctx.set(dut.i_clear, 1)
            if ctx.get(dut.o_refresh):
                refreshes.append(cycle)
                owed -= 1
                assert owed >= 0
            await ctx.tick()
        assert ctx.get(dut.o_idle)

    simulate(dut, bench)
    assert len(refreshes) == 5
    assert 500 <= refreshes[0] <= 510
    assert [b - a for a, b in pairwise(refreshes[:4])] == [FABRIC.refresh_cycle] * 3
    assert 2050 + IDLE <= refreshes[4] < 2050 + IDLE + 10


@pytest.mark.parametrize("postponed", [0, 9])
def test_refuses_to_postpone_more_than_jedec_allows(postponed: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 8, not {postponed}"):
        RefreshManager(FABRIC, postponed=postponed, idle_cycles=IDLE)


def test_a_refresh_that_has_to_wait_is_not_overtaken() -> None:
    """In the cycle of `i_hold` none is given, and neither a calibration nor a beat goes first."""
    dut = RefreshManager(FABRIC, postponed=None, idle_cycles=IDLE)
    refreshes: list[int] = []
    held, precharged = [], []

    async def bench(ctx):
        for cycle in range(200):
            closed = bool(precharged)
            ctx.set(dut.i_enable, 1)
            ctx.set(dut.i_owed, not refreshes)
            ctx.set(dut.i_must, not refreshes)
            ctx.set(dut.i_calibrate, 1)
            ctx.set(dut.i_clear, 1)
            ctx.set(dut.i_hold, closed and cycle <= precharged[0] + HELD)
            if closed and not refreshes:
                held.append(cycle)
                assert ctx.get(dut.o_no_activate)
                assert not ctx.get(dut.o_calibrate)
            if ctx.get(dut.o_precharge):
                precharged.append(cycle)
            if ctx.get(dut.o_refresh):
                refreshes.append(cycle)
            await ctx.tick()

    simulate(dut, bench)
    assert refreshes == [precharged[0] + HELD + 1]
    assert len(held) == HELD + 1
