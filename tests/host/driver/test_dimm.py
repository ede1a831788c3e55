"""A DIMM of two channels: modes, faults and what each channel owes to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    ArgumentError,
    BusyError,
    KernelError,
    LostCommandError,
    MismatchError,
    ModeError,
    ModeRegisterError,
    OptionError,
    OutOfBoundsError,
    UninitialisedError,
    UrlError,
    WaitTimeoutError,
)
from nearstep.updater.command import Command
from nearstep_sim.axdimm.dimm import DimmBackend
from nearstep_sim.models.dram.replay import replay
from nearstep_sim.models.dram.trace import read_trace
from nearstep_sim.updater.golden import GoldenBackend
from nearstep_spec.dram.command import Command as DramCommand
from nearstep_spec.updater.registers import ARRAYS, ErrorCause

from .conftest import BLOCK, BURSTS_AHEAD, DIMMS
from .job import Job

MANY = 40 * BLOCK + 5


@pytest.fixture(params=DIMMS)
def dimm(request: pytest.FixtureRequest) -> Iterator[AxdimmDevice]:
    with nearstep.open(DIMMS[request.param]) as opened:
        assert isinstance(opened, AxdimmDevice)
        yield opened


@pytest.fixture
def on(dimm: AxdimmDevice) -> Callable[..., Job]:
    """Makes a job on a channel."""

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


def test_an_array_beyond_its_channel_is_refused_by_the_kernel(dimm, on):
    work = on(0)
    kernel = dimm.regs.adam0
    end = dimm.backend.config.memory_bytes
    with dimm.acceleration(0):
        for name in ARRAYS:
            kernel[f"{name}_address"].value = work.buffers[name].address
        kernel.v_address.value = end - 64
        kernel.count.value = 1001
        kernel.window0_base.value = 0
        kernel.window0_limit.value = 2 * end
        kernel.window0_permissions.bits = 0b111
        kernel.start.go = 1
        dimm.backend.wait([kernel.status.poll(busy=0)], 20_000)
        assert kernel.error.cause == ErrorCause.ADDRESS_RANGE
        assert kernel.error_address.value == end - 64
        kernel.window0_permissions.bits = 0
    assert work.check_untouched() == 3 * 1001
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


@pytest.mark.parametrize("block", ["arbiter1", "adam0"])
@pytest.mark.parametrize("name", DIMMS)
def test_another_register_map_is_refused_at_open(name, block, monkeypatch):
    backend = GoldenBackend if name.startswith("golden") else DimmBackend
    read = backend.read_register

    def other(self, address):
        base, registers = self.config.maps()[block]
        return read(self, address) ^ (address == base + registers["map_hash"].offset)

    monkeypatch.setattr(backend, "read_register", other)
    with pytest.raises(MismatchError, match=rf"{block}.map_hash must be 0x"):
        nearstep.open(DIMMS[name])


def test_every_size_and_place_of_a_copy_leaves_its_neighbours(dimm):
    rng = np.random.default_rng(11)
    whole = dimm.alloc(400, np.uint8, channel=1)
    shadow = rng.integers(0, 256, 400).astype(np.uint8)
    whole.write(shadow)
    checks = 0
    for start in (0, 1, 63, 64, 65, 130):
        for size in (0, 1, 62, 63, 64, 65, 127, 128, 200):
            part = rng.integers(0, 256, size).astype(np.uint8)
            whole[start : start + size].write(part)
            shadow[start : start + size] = part
            np.testing.assert_array_equal(whole.read(), shadow)
            np.testing.assert_array_equal(whole[start : start + size].read(), part)
            checks += 1
    assert checks == 54


def test_copies_between_channels_and_devices(dimm):
    data = np.arange(1000, dtype=np.float32)
    first, second = dimm.alloc(1000, channel=0), dimm.alloc(1000, channel=1)
    first.write(data)
    second.copy_from(first)
    np.testing.assert_array_equal(second.read(), data)
    with nearstep.open("golden:axdimm?engine=numpy&memory_bytes=1MiB") as other:
        third = other.alloc(1000)
        third.copy_from(second)
        np.testing.assert_array_equal(third.read(), data)


def test_memory_is_allocated_by_channel(dimm):
    free = dimm.free_bytes
    regions = dimm.backend.regions
    for channel, (base, size) in enumerate(regions):
        buffer = dimm.alloc(100, channel=channel, align=1024)
        assert base <= buffer.address < base + size
        assert (buffer.address - base) % 1024 == 0
        buffer.free()
    assert dimm.free_bytes == free
    dimm.alloc(4, channel=np.int64(1), align=np.int64(64)).free()
    for wrong in ({"channel": 2}, {"channel": -1}, {"channel": "0"}, {"align": 32}):
        with pytest.raises(ArgumentError):
            dimm.alloc(4, **wrong)
    base, size = regions[1]
    with pytest.raises(OutOfBoundsError):
        dimm.backend.write_memory(dimm.backend.config.channel_bytes * 2 - 32, np.zeros(64, "u1"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sim:axdimm?memory=ddr4-1600&channels=3", "channels must be one of"),
        ("sim:axdimm?memory=ddr4-1600&lanes=4", "lanes must be 16"),
        ("sim:axdimm?memory=ddr4-1600&mapping=row", "mapping"),
        ("sim:axdimm?memory=ddr4-1600&postpone=9", "postpone must lie"),
        ("sim:axdimm?memory=ddr4-1600&latency=3", "does not go with memory=ddr4-1600"),
        ("sim:axdimm?memory=ddr5", "no such choice"),
        ("sim:axdimm?channels=2", "needs memory=ddr4-1600"),
        ("golden:axdimm?channels=2&memory_bytes=192", "memory_bytes must be"),
        ("golden:axdimm?channels=2&lanes=8", "lanes must be 16"),
    ],
)
def test_options_that_cannot_be(url, said):
    with pytest.raises(OptionError, match=said):
        nearstep.open(url)


@pytest.mark.parametrize("option", ["trace", "commands"])
@pytest.mark.parametrize("path", ["", "/proc/none/x", "/dev/null/x"])
def test_files_that_cannot_be_written_are_refused_at_open(option, path):
    url = f"{DIMMS['sim-dimm']}&{option}={path}"
    with pytest.raises((OptionError, UrlError)) as caught:
        nearstep.open(url)
    print(caught.value)


def test_commands_of_each_channel_are_written_and_keep_the_rules(tmp_path):
    stem = tmp_path / "new" / "trace"
    with nearstep.open(f"{DIMMS['sim-dimm']}&commands={stem}") as dimm:
        work = Job(dimm, 300, channel=1)
        work.start().wait()
        assert work.check() == 900
    for channel in range(2):
        found = list(read_trace(f"{stem}.{channel}"))
        assert len(found) > (100 if channel else 0)
        assert replay(f"{stem}.{channel}").violation is None


def test_host_traffic_is_whole_lines_and_registers_are_written_by_the_line():
    with nearstep.open(DIMMS["sim-dimm"]) as dimm:
        backend = dimm.backend
        buffer = dimm.alloc(1000)
        before = backend.host_statistics
        buffer.write(np.zeros(1000, np.float32))
        between = backend.host_statistics
        buffer.read()
        after = backend.host_statistics
        assert between.stores - before.stores == 63
        assert between.loads - before.loads == 0  # the last line was new: nothing to keep
        assert after.loads - between.loads == 63
        kernel = dimm.regs.adam0
        before = backend.host_statistics
        for name in ARRAYS:
            kernel[f"{name}_address"].value = 1 << 20
        kernel.count.value = 5
        backend.read_register(kernel.count.address)
        after = backend.host_statistics
        assert (after.stores - before.stores, after.loads - before.loads) == (1, 2)
