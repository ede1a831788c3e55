"""A DIMM of two channels: modes, faults and what each channel owes to the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    ArgumentError,
    BusyError,
    KernelError,
    LostCommandError,
    ModeError,
    ModeRegisterError,
    UninitialisedError,
    WaitTimeoutError,
)
from nearstep.updater.command import Command
from nearstep_spec.dram.command import Command as DramCommand
from nearstep_spec.updater.registers import ErrorCause, Stream

from .conftest import BLOCK, BURSTS_AHEAD
from .job import Job
from .start import DONE, Start

MANY = 40 * BLOCK + 5


@pytest.fixture
def on(dimm: AxdimmDevice) -> Callable[..., Job]:
    """Make a job on a channel."""

    def make(channel: int, count: int = 1001, **changes: object) -> Job:
        return Job(dimm, count, 10 + channel, channel=channel, **changes)

    return make


def modes(dimm):
    """What the arbiters say."""
    status = [dimm.regs[f"arbiter{n}"].status for n in range(dimm.channel_count)]
    return ["normal" if s.normal else "acceleration" if s.acceleration else "none" for s in status]


def check_reusable(dimm, on):
    dimm.backend.heal()
    compared = 0
    for channel in range(dimm.channel_count):
        work = on(channel)
        work.start().wait()
        compared += work.check()
    assert compared == dimm.channel_count * 3003


def test_both_channels_compute_at_once(dimm, on):
    jobs = [on(0, 4000), on(1, 5003)]
    with dimm.acceleration():
        assert modes(dimm) == ["acceleration", "acceleration"]
        runs = [each.start() for each in jobs]
        assert [run.channel for run in runs] == [0, 1]
        assert all(dimm.regs[f"adam{n}"].status.busy for n in range(2))
        for run in reversed(runs):
            run.wait()
    assert modes(dimm) == ["normal", "normal"]
    assert [j.check() for j in jobs] == [12000, 15009]


def test_one_channel_computes_while_the_host_uses_the_other(dimm, on):
    work, other = on(0, MANY), on(1, 3000)
    run = work.start()
    rng = np.random.default_rng(5)
    for _ in range(3):
        data = rng.standard_normal(3000).astype(np.float32)
        other.buffers["g"].write(data)
        np.testing.assert_array_equal(other.buffers["g"].read(), data)
    run.wait()
    assert modes(dimm) == ["acceleration", "normal"]
    assert work.check() == 3 * MANY


def test_host_access_in_acceleration_mode_raises_and_touches_nothing(dimm, on, monkeypatch):
    work = on(1)
    buffer = work.buffers["p"]
    with dimm.acceleration(1):
        touched = []
        for name in ("read_memory", "write_memory"):
            monkeypatch.setattr(dimm.backend, name, lambda *args: touched.append(args))
        uses = (buffer.read, lambda: buffer.fill(0.0), lambda: buffer[:4].write(np.ones(4, "f4")))
        for use in (*uses, lambda: buffer.copy_from(work.buffers["g"])):
            with pytest.raises(ModeError, match="channel 1 must be in normal mode, not accel"):
                use()
        monkeypatch.undo()
        assert touched == []
    assert dimm.regs.arbiter1.status.refused_access == 0
    assert work.check_untouched() == 3 * 1001


def test_an_access_behind_the_runtimes_back_is_answered_flagged_and_harmless(dimm, on):
    work = on(0)
    address = work.buffers["m"].address
    arbiter = dimm.regs.arbiter0
    with dimm.acceleration(0):
        out = np.ones(64, np.uint8)
        dimm.backend.read_memory(address // 64 * 64, out)
        assert not out.any()
        assert (arbiter.status.refused_access, arbiter.refused_access.write) == (1, 0)
        dimm.backend.write_memory(address // 64 * 64, np.full(64, 7, np.uint8))
        assert arbiter.refused_count.value == 2
        assert arbiter.refused_address.value == address // 64 * 64
    arbiter.control.clear = 1
    assert arbiter.status.refused_access == 0
    assert arbiter.refused_count.value == 0
    assert work.check_untouched() == 3 * 1001


SIM_DIMM = pytest.mark.parametrize("dimm", ["sim-dimm"], indirect=True)


@SIM_DIMM
def test_a_mode_register_that_the_kernel_cannot_use_is_an_error(dimm, on):
    work = on(0)
    refreshes = dimm.backend.dram_counters[0]["refreshes"]
    while dimm.backend.dram_counters[0]["refreshes"] == refreshes:
        assert dimm.regs.arbiter0.status.normal == 1
    # Refresh mode 2x, which the model takes until the next refresh, in 1560 cycles
    dimm.backend.give(0, DramCommand.MRS, bank_group=0, bank=3, row=1 << 6)
    with pytest.raises(ModeRegisterError, match="MR3 of channel 0 must be set as") as caught:
        dimm.acceleration(0).__enter__()
    dimm.backend.give(0, DramCommand.MRS, bank_group=0, bank=3, row=0)
    assert (caught.value.channel, caught.value.mode_registers) == (0, (3,))
    assert caught.value.registers["arbiter0.mode.acceleration"] == 0
    assert modes(dimm) == ["normal", "normal"]
    work.start().wait()
    assert work.check() == 3003


@SIM_DIMM
def test_a_lost_command_of_the_host_is_an_error_once_and_the_run_is_whole(dimm, on):
    work = on(0)
    work.start().wait()
    dimm.backend.give(0, DramCommand.ZQCS)  # deferred, not lost
    dimm.backend.give(0, DramCommand.MRS, bank_group=1, bank=2, row=0x880)
    dimm.backend.give(0, DramCommand.MRS, bank_group=0, bank=1, row=1)
    with pytest.raises(LostCommandError, match="lost 2 commands") as c:
        work.take_back()
    assert "the first was MRS of MR6, with 0x880 on the address pins" in str(c.value)
    assert (c.value.channel, c.value.count, c.value.pins, c.value.bank) == (0, 2, 0x880, 6)
    assert modes(dimm) == ["normal", "normal"]
    assert work.check() == 3003
    work.upload()
    work.start().wait()
    assert work.check() == 3003
    assert dimm.regs.arbiter0.lost_count.value == 2
    dimm.regs.arbiter0.control.clear = 1
    assert dimm.regs.arbiter0.status.lost_command == 0
    work.upload()
    work.start().wait()
    dimm.backend.give(0, DramCommand.MRS, bank_group=0, bank=1, row=1)  # fewer than before `clear`
    with pytest.raises(LostCommandError, match="lost 1 command"):
        work.take_back()
    with pytest.raises(ArgumentError, match="must be MRS, ZQCS or ZQCL"):
        dimm.backend.give(0, DramCommand.REF)


def test_adam_in_normal_mode_raises_before_the_device_is_touched(dimm, on, monkeypatch):
    work = on(1)
    touched = []
    monkeypatch.setattr(dimm.backend, "write_register", lambda *args: touched.append(args))
    with pytest.raises(ModeError, match="channel 1 must be in acceleration mode, not normal"):
        dimm.update("adam", work.buffers, step=1)
    with pytest.raises(ArgumentError, match="step"):
        dimm.update("adam", work.buffers, step=0)
    assert touched == []


def test_start_in_normal_mode_is_refused_and_flagged(dimm, on):
    work = on(0)
    kernel, arbiter = dimm.regs.adam0, dimm.regs.arbiter0
    kernel.start.go = 1
    assert arbiter.status.refused_start == 1
    assert (kernel.status.busy, kernel.status.done, kernel.status.error) == (0, 0, 0)
    arbiter.control.clear = 1
    assert arbiter.status.refused_start == 0
    assert work.check_untouched() == 3 * 1001


def test_arrays_of_a_run_lie_on_one_channel(dimm, on):
    work, other = on(0), on(1)
    work.buffers["v"] = other.buffers["v"]
    with dimm.acceleration(), pytest.raises(ArgumentError, match="must lie on one channel"):
        dimm.update("adam", work.buffers, step=1)
    assert other.check_untouched() == 3 * 1001


def test_modes_nest_by_channel_and_not_within_one(dimm, on):
    work = on(0)
    with dimm.acceleration(0):
        with dimm.acceleration(1):
            assert modes(dimm) == ["acceleration", "acceleration"]
        for again in ((0,), (), (1, 0)):
            with pytest.raises(ModeError, match="channel 0 must be in normal"):
                dimm.acceleration(*again).__enter__()
        assert modes(dimm) == ["acceleration", "normal"]
    for wrong in ((2,), (-1,), (True,), (0, 0), ("0",)):
        with pytest.raises(ArgumentError):
            dimm.acceleration(*wrong).__enter__()
    assert modes(dimm) == ["normal", "normal"]
    assert work.check_untouched() == 3 * 1001


def test_a_thread_for_each_channel(dimm, on):
    jobs = [on(0, 3001), on(1, 3001)]

    def train(work):
        compared = 0
        for step in (1, 2, 3):
            work.run(step=step)
            compared += work.check()
        return compared

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, jobs)) == [3 * 3 * 3001] * 2


def test_an_interrupt_at_the_end_gives_every_channel_back(dimm, on, monkeypatch):
    jobs = [on(0, MANY), on(1, MANY)]
    wait = type(dimm.backend).wait
    calls = []

    def interrupted(self, polls, max_cycles):
        calls.append(polls)
        if len(calls) == 3:  # the first two are changes of mode
            raise KeyboardInterrupt
        wait(self, polls, max_cycles)

    monkeypatch.setattr(type(dimm.backend), "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), dimm.acceleration():
        runs = [each.start() for each in jobs]
    monkeypatch.undo()
    assert modes(dimm) == ["normal", "normal"]
    assert all(run.ended for run in runs)
    assert any(isinstance(run.error, AbortedError) for run in runs)
    check_reusable(dimm, on)


def test_a_bound_may_be_as_large_as_a_counter(dimm, on):
    work = on(0)
    run = work.start()
    run.wait(max_cycles=(1 << 64) - 1)
    assert work.check() == 3003


@SIM_DIMM
def test_a_copy_has_the_cycles_until_its_end_whenever_that_is_read(dimm, on):
    work = on(1, MANY)
    data, bound = np.arange(1024, dtype=np.float32), (1 << 64) - 1
    target = dimm.alloc(1024, np.float32, channel=0)
    with dimm.reserved():
        alone = dimm.backend.submit_write(target.address, data.view(np.uint8)).wait(bound).cycles
        run = work.start()
        late = dimm.backend.submit_write(target.address, data.view(np.uint8))
        run.wait()
    assert alone > 64
    assert late.cycles < 2 * alone < run.cycles


def test_a_run_whose_kernel_is_reset_is_aborted(dimm, on):
    work = on(0, MANY)
    run = work.start()
    dimm.channels[0].reset_kernel()
    assert modes(dimm) == ["normal", "normal"]
    with pytest.raises(AbortedError, match="the kernel was reset"):
        run.wait()
    work.take_back()
    check_reusable(dimm, on)


def test_a_fault_of_a_kernel_is_raised_until_a_reset(dimm, on):
    work, unwritten = on(1, MANY), dimm.alloc(MANY, channel=1)
    work.buffers["g"] = unwritten
    with pytest.raises(UninitialisedError) as caught, dimm.acceleration(1):
        dimm.update("adam", work.buffers, step=1).wait()
    assert caught.value.address == unwritten.address
    dimm.reset()
    assert modes(dimm) == ["normal", "normal"]
    check_reusable(dimm, on)


def test_leaving_waits_for_a_run(dimm, on):
    work = on(0, MANY)
    with dimm.acceleration(0):
        run = work.start()
    assert run.done
    assert work.check() == 3 * MANY


def test_an_exception_aborts_the_run_and_gives_the_channel_back(dimm, on):
    work = on(1, MANY)
    runs = []

    def interrupted():
        with dimm.acceleration(1):
            runs.append(work.start())
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        interrupted()
    (run,) = runs
    assert isinstance(run.error, AbortedError)
    assert modes(dimm) == ["normal", "normal"]
    unstarted = run.committed + (BURSTS_AHEAD + 4) * BLOCK
    assert work.check(0, run.committed) + work.check_untouched(unstarted) > 0
    check_reusable(dimm, on)


def test_a_hanging_kernel_gives_its_channel_back_and_leaves_the_other_alone(dimm, on):
    hung, fine = on(0, MANY), on(1, MANY)
    lost = hung.buffers["g"].address + 20 * 4 * BLOCK
    dimm.backend.inject(Injection(kind="never", write=False, base=lost, limit=lost + 64))
    with dimm.acceleration():
        runs = [each.start() for each in (hung, fine)]
        with pytest.raises(WaitTimeoutError) as caught:
            runs[0].wait(max_cycles=20_000)
        assert caught.value.registers["adam0.status.busy"] == 1
        runs[0].abort(max_cycles=2_000)
        assert isinstance(runs[0].error, AbortedError)
        assert modes(dimm) == ["normal", "acceleration"]
        runs[1].wait()
    assert fine.check() == 3 * MANY
    unstarted = runs[0].committed + (BURSTS_AHEAD + 4) * BLOCK
    assert hung.check(0, runs[0].committed) + hung.check_untouched(unstarted) > 0
    check_reusable(dimm, on)


def test_a_kernel_that_hangs_at_the_end_of_the_block_is_reported_there(dimm, on):
    work = on(0, 400)
    lost = work.buffers["p"].address
    dimm.backend.inject(Injection(kind="never", write=False, base=lost, limit=lost + 64))
    with pytest.raises(WaitTimeoutError, match="adam of 400"), dimm.acceleration(0):
        dimm.update("adam", work.buffers, step=1)
    assert modes(dimm) == ["normal", "normal"]
    assert work.check_untouched() == 1200
    check_reusable(dimm, on)


def test_a_mode_switch_while_the_kernel_runs_suspends_it(dimm, on):
    work = on(0, MANY)
    run = work.start()
    arbiter = dimm.regs.arbiter0
    for acceleration in (0, 1, 0, 0, 1, 1):
        arbiter.mode.set(acceleration=acceleration)
        wanted = {"acceleration": 1} if acceleration else {"normal": 1}
        dimm.backend.wait([arbiter.status.poll(**wanted)], 20_000)
    arbiter.mode.set(acceleration=0)
    arbiter.mode.set(acceleration=1)  # before the first is obeyed
    dimm.backend.wait([arbiter.status.poll(acceleration=1)], 20_000)
    run.wait()
    assert work.check() == 3 * MANY


@SIM_DIMM
def test_an_array_may_end_where_the_registers_begin_and_not_behind(dimm, on):
    start = Start(dimm, 1008)
    last = dimm.backend.config.memory_bytes - 4032
    dimm.backend.write_memory(last, start.work.before["v"].view(np.uint8))
    for beyond in (64, 4032):
        bad = last + beyond
        start.refuses(ErrorCause.ADDRESS_RANGE, Stream.V_READ, bad, v_address=bad)
    start.set(v_address=last)
    assert start.outcome() == DONE
    start.work.expect("adam", step=1)
    found = np.empty(4032, np.uint8)
    dimm.backend.read_memory(last, found)
    assert found.tobytes() == start.work.expected()["v"].tobytes()
    check_reusable(dimm, on)


def test_the_error_address_is_that_of_the_device(dimm, on, monkeypatch):
    work = on(1)
    monkeypatch.setattr(Command, "grant", lambda *args: None)
    with pytest.raises(KernelError, match="WINDOW") as caught, dimm.acceleration(1):
        dimm.update("adam", work.buffers, step=1).wait()
    assert caught.value.address == work.buffers["p"].address
    monkeypatch.undo()
    check_reusable(dimm, on)


def test_a_second_run_on_a_busy_channel_is_refused(dimm, on):
    first, second = on(1, MANY), on(1, 100)
    run = first.start()
    with pytest.raises(BusyError):
        dimm.update("adam", second.buffers, step=1)
    run.wait()
    assert first.check() == 3 * MANY
    assert second.check_untouched() == 300


def test_a_reset_gives_every_channel_back(dimm, on):
    jobs = [on(0, MANY), on(1, MANY)]
    runs = [work.start() for work in jobs]
    dimm.reset()
    assert modes(dimm) == ["normal", "normal"]
    for run in runs:
        with pytest.raises(AbortedError, match="reset"):
            run.wait()
    for work in jobs:
        work.take_back()
    check_reusable(dimm, on)
