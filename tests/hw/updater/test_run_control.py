"""RunControl: an abort in any cycle of a run, and what the outputs say meanwhile."""

import pytest

from nearstep_hw.updater.run_control import RunControl
from nearstep_spec.updater.registers import ErrorCause

from ..simulate import simulate

CHECKED, RUNNING, DRAINED = 5, 12, 20  # cycles from START at which the world answers


def trace(*, abort=None, check_fault=0, fault=None, empty=False, go_again=None):
    """Outputs of every cycle from START on; fault: (cycle, cause)."""
    dut = RunControl()
    rows = []

    async def bench(ctx):
        ctx.set(dut.i_empty, empty)
        for cycle in range(40):
            ctx.set(dut.i_go, cycle in (0, go_again))
            ctx.set(dut.i_abort, cycle == abort)
            ctx.set(dut.i_checked, cycle == CHECKED)
            ctx.set(dut.i_check_fault.cause, check_fault if cycle == CHECKED else 0)
            ctx.set(dut.i_check_fault.address, 0x1234)
            ctx.set(dut.i_fault.cause, fault[1] if fault and cycle == fault[0] else 0)
            ctx.set(dut.i_whole, cycle >= RUNNING and not ctx.get(dut.o_stop))
            ctx.set(dut.i_drained, cycle >= DRAINED)
            names = ("busy", "done", "error", "launch", "stop", "clear", "check")
            row = {name: ctx.get(getattr(dut, f"o_{name}")) for name in names}
            rows.append({**row, "fault": ctx.get(dut.o_fault)})
            await ctx.tick()

    simulate(dut, bench)
    return rows


def test_a_run_is_checked_launched_and_done():
    rows = trace()
    assert [row["check"] for row in rows].index(1) == 0
    assert [row["launch"] for row in rows].index(1) == CHECKED + 1
    assert sum(row["launch"] for row in rows) == 1
    assert [row["busy"] for row in rows] == [0] + [1] * RUNNING + [0] * (39 - RUNNING)
    assert rows[-1]["done"]
    assert not rows[-1]["error"]
    assert rows[-1]["fault"].address == 0


@pytest.mark.parametrize("abort", range(1, RUNNING))
def test_an_abort_in_any_cycle_ends_the_run(abort):
    rows = trace(abort=abort)
    last = rows[-1]
    assert not last["busy"]
    assert not last["done"]
    assert last["fault"].cause == ErrorCause.ABORTED
    launched = any(row["launch"] for row in rows)
    assert launched == (abort > CHECKED)
    # Once launched, the run is stopped until everything has drained.
    assert sum(row["stop"] for row in rows) == (DRAINED - abort if launched else 0)
    assert all(row["clear"] for row in rows if not row["busy"])


def test_an_abort_with_the_last_response_leaves_the_run_done():
    rows = trace(abort=RUNNING)
    assert rows[-1]["done"]
    assert not rows[-1]["error"]


@pytest.mark.parametrize("cycle", range(CHECKED + 2, RUNNING + 1))
def test_the_first_fault_stays_and_is_never_done(cycle):
    rows = trace(fault=(cycle, ErrorCause.WRITE_RESPONSE), abort=cycle + 1)
    assert rows[-1]["error"]
    assert not any(row["done"] for row in rows)
    assert rows[-1]["fault"].cause == ErrorCause.WRITE_RESPONSE


def test_a_refused_run_launches_nothing():
    rows = trace(check_fault=ErrorCause.WINDOW)
    assert not any(row["launch"] for row in rows)
    assert rows[-1]["fault"].cause == ErrorCause.WINDOW
    assert rows[-1]["fault"].address == 0x1234
    assert not rows[-1]["done"]


def test_an_empty_run_is_done_and_launches_nothing():
    rows = trace(empty=True)
    assert not any(row["launch"] for row in rows)
    assert rows[-1]["done"]


def test_start_clears_the_outcome_of_the_run_before():
    rows = trace(check_fault=ErrorCause.WINDOW, go_again=10)
    assert rows[10]["error"]
    assert not rows[11]["error"]
    assert rows[11]["fault"].address == 0
