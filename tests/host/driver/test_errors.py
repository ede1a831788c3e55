"""What goes wrong on a device: a typed error, nothing lost, and the device works again after it."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    BusError,
    BusResponseError,
    GuardError,
    OutOfRangeError,
    ResetNeededError,
    UninitialisedError,
    WaitTimeoutError,
)
from nearstep.smartssd.device import SmartssdDevice
from nearstep_spec.updater.registers import ARRAYS, ErrorCause, Stream

from .conftest import ADAM_ALONE, BLOCK, BUILDS, BURSTS_AHEAD, chosen

MANY = 40 * BLOCK + 3
UNSTARTED = BURSTS_AHEAD + 4
"""Blocks behind the committed ones that a kernel may have begun to write."""


def check_reusable(device, job):
    """Another run, on fresh arrays and with nothing injected, gives the right bits."""
    device.backend.heal()
    work = job(5 * BLOCK + 7, seed=99)
    assert work.start().wait().done
    return work.check()


def check_failed(device):
    """The registers show an error, and neither done nor busy."""
    status = device.channels[0].kernel.status
    assert (status.done, status.error, status.busy) == (0, 1, 0)


def check_outcome(work, run):
    """Committed elements are as the rule says, blocks not started are untouched."""
    assert not run.done
    assert run.committed % BLOCK == 0 or run.committed == work.count
    assert run.committed < work.count
    unstarted = run.committed + UNSTARTED * BLOCK
    return work.check(0, run.committed) + work.check_untouched(unstarted)


@pytest.mark.parametrize("kind", ["slverr", "decerr"])
@pytest.mark.parametrize("array", ARRAYS)
def test_an_error_response_to_a_read_stops_the_run(device, job, kind, array):
    work = job(MANY)
    base = work.buffers[array].address
    hit = base + 4 * 9 * BLOCK
    device.backend.inject(Injection(kind=kind, write=False, base=hit, limit=hit + 4))
    run = work.start()
    with pytest.raises(BusResponseError) as caught:
        run.wait()
    error = caught.value
    check_failed(device)
    assert error.cause == ErrorCause.READ_RESPONSE.name
    assert error.stream == Stream[f"{array.upper()}_READ"].name
    assert hit - 512 < error.address <= hit
    assert (
        error.registers[f"{device.channels[0].kernel.name}.error.response"]
        == {"slverr": 2, "decerr": 3}[kind]
    )
    assert error.transactions
    assert error.committed <= 9 * BLOCK
    assert check_outcome(work, run) > 0
    assert check_reusable(device, job) > 0


@pytest.mark.parametrize("array", ["p", "m", "v"])
def test_an_error_response_to_the_last_write_is_not_done(device, job, array):
    work = job(MANY)
    last = work.buffers[array].address + 4 * (MANY - 1)
    device.backend.inject(Injection(kind="slverr", write=True, base=last, limit=last + 4))
    run = work.start()
    with pytest.raises(BusResponseError) as caught:
        run.wait()
    check_failed(device)
    assert caught.value.cause == ErrorCause.WRITE_RESPONSE.name
    assert caught.value.stream == Stream[f"{array.upper()}_WRITE"].name
    assert not run.done
    assert run.committed == 40 * BLOCK
    assert work.check(0, run.committed) == 3 * 40 * BLOCK
    assert check_reusable(device, job) > 0


def test_the_error_of_a_run_is_kept(device, job):
    work = job(MANY)
    device.backend.inject(Injection(kind="slverr", write=False, nth=20))
    run = work.start()
    for _ in range(2):
        with pytest.raises(BusResponseError):
            run.wait()
    assert run.error is not None
    assert not run.done


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_memory_that_never_answers_ends_in_a_bounded_wait(device, job, write):
    work = job(MANY)
    device.backend.inject(Injection(kind="never", write=write, nth=11))
    run = work.start()
    with pytest.raises(WaitTimeoutError, match=f"adam of {MANY} elements") as caught:
        run.wait(max_cycles=20_000)
    assert caught.value.max_cycles == 20_000
    unit = "steps" if device.cycles is None else "device cycles"
    assert f"waited 20000 {unit} for" in str(caught.value)
    assert caught.value.registers[f"{device.channels[0].kernel.name}.status.busy"] == 1
    assert caught.value.transactions
    assert not run.done
    assert device.channels[0].kernel.status.busy
    run.abort(max_cycles=2_000)
    assert isinstance(run.error, AbortedError)
    assert not device.channels[0].kernel.status.busy
    assert check_outcome(work, run) > 0
    assert check_reusable(device, job) > 0


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_late_beats_of_an_old_run_never_reach_the_next(device, job, write):
    old = job(MANY, seed=5)
    late = Injection(kind="late", write=write, nth=7, times=3, delay=30_000)
    device.backend.inject(late)
    run = old.start()
    with pytest.raises(WaitTimeoutError):
        run.wait(max_cycles=3_000)
    device.reset()
    device.backend.heal()
    assert isinstance(run.error, AbortedError)
    with pytest.raises(AbortedError, match="the device was reset"):
        run.wait()
    untouched = old.buffers["p"].read()
    new = job(MANY, seed=6)
    new.start().wait()
    assert new.check() == 3 * MANY
    np.testing.assert_array_equal(old.buffers["p"].read(), untouched)


def test_a_late_answer_is_waited_for(device, job):
    work = job(1001)
    device.backend.inject(Injection(kind="late", write=False, nth=3, delay=5_000))
    work.start().wait(max_cycles=100_000)
    assert work.check() == 3003


def test_a_reset_in_mid_run_leaves_the_device_usable(device, job):
    work = job(MANY)
    run = work.start()
    device.reset()
    assert isinstance(run.error, AbortedError)
    assert not device.channels[0].kernel.status.busy
    assert check_reusable(device, job) > 0


def test_an_abort_drains_and_says_what_is_committed(device, job):
    work = job(MANY)
    run = work.start()
    run.abort()
    assert isinstance(run.error, AbortedError)
    check_failed(device)
    assert run.error.cause == ErrorCause.ABORTED.name
    assert check_outcome(work, run) > 0
    run.abort()
    assert check_reusable(device, job) > 0


def configure(device, work, **addresses):
    """The registers of a run with other addresses, and one window over all memory."""
    kernel = device.channels[0].kernel
    for name in ARRAYS:
        kernel[f"{name}_address"].value = addresses.get(name, work.buffers[name].address)
    kernel.count.value = addresses.get("count", work.count)
    kernel.v_correction.value = 1.0
    kernel.eps.value = 1.0
    kernel.window0_base.value = 0
    kernel.window0_limit.value = 1 << 34
    kernel.window0_permissions.bits = 0b111
    return kernel


def wait_idle(device):
    kernel = device.channels[0].kernel
    device.backend.wait([kernel.status.poll(busy=0)], 50_000)
    return kernel


BAD = {
    "misaligned": ({"m": 8}, ErrorCause.ALIGNMENT, Stream.M_READ),
    "wrapping": ({"v": (1 << 64) - 64}, ErrorCause.ADDRESS_RANGE, Stream.V_READ),
    "beyond the address space": ({"g": (1 << 34) - 64}, ErrorCause.ADDRESS_RANGE, Stream.G_READ),
}


@pytest.mark.parametrize("case", BAD)
def test_the_kernel_refuses_a_configuration_that_cannot_run(device, job, case):
    work = job(300)
    work.start().wait()
    assert work.check() == 900
    addresses, cause, stream = BAD[case]
    kernel = configure(device, work, **addresses)
    kernel.start.go = 1
    kernel = wait_idle(device)
    check_failed(device)
    counters = ("committed", "read_beats", "write_beats")
    assert [kernel[name].value for name in counters] == [0, 0, 0]
    assert kernel.error.cause == cause
    assert kernel.error.stream == stream
    assert kernel.error_address.value == next(iter(addresses.values()))
    assert work.check_untouched() == 900
    assert check_reusable(device, job) > 0


def test_the_kernel_refuses_overlapping_arrays(device, job):
    work = job(300)
    kernel = configure(device, work, m=work.buffers["p"].address + 64)
    kernel.start.go = 1
    kernel = wait_idle(device)
    check_failed(device)
    assert kernel.error.cause == ErrorCause.OVERLAP
    assert work.check_untouched() == 900


@pytest.mark.parametrize("device", chosen(ADAM_ALONE, BUILDS), indirect=True)
@pytest.mark.parametrize("register", ["formats", "gradient_scale", "copy_out_address"])
def test_the_kernel_refuses_what_it_does_not_support(device, job, register):
    work = job(300)
    kernel = configure(device, work)
    kernel[register].bits = 1
    kernel.start.go = 1
    kernel = wait_idle(device)
    check_failed(device)
    assert kernel.error.cause == ErrorCause.UNSUPPORTED
    assert work.check_untouched() == 900
    kernel[register].bits = 0
    assert check_reusable(device, job) > 0


@pytest.mark.parametrize("array", ARRAYS)
def test_a_read_outside_the_windows_reaches_no_memory(device, job, array):
    work = job(300)
    kernel = configure(device, work)
    cut = work.buffers[array].address
    kernel.window0_limit.value = cut
    kernel.window1_base.value = cut + 4 * work.count
    kernel.window1_limit.value = 1 << 34
    kernel.window1_permissions.bits = 0b111
    kernel.start.go = 1
    kernel = wait_idle(device)
    check_failed(device)
    assert kernel.error.cause == ErrorCause.WINDOW
    assert kernel.error.stream == Stream[f"{array.upper()}_READ"]
    assert kernel.error_address.value == cut
    assert work.check_untouched() == 900
    assert check_reusable(device, job) > 0


def test_a_write_without_permission_is_not_made(device, job):
    work = job(300)
    kernel = configure(device, work)
    kernel.window0_permissions.bits = 0b101
    kernel.start.go = 1
    kernel = wait_idle(device)
    assert kernel.error.cause == ErrorCause.WINDOW
    assert Stream(kernel.error.stream).name.endswith("_WRITE")
    assert kernel.committed.value == 0
    assert work.check_untouched() == 900


def test_reading_memory_that_nobody_wrote_is_a_fault(device, job):
    work, other = job(300), job(100, seed=2)
    work.buffers["g"] = device.alloc(300)
    run = work.start()
    with pytest.raises(UninitialisedError) as caught:
        run.wait()
    assert caught.value.address == work.buffers["g"].address
    assert not caught.value.write
    with pytest.raises(ResetNeededError, match=r"needs a reset\(\): read at .* nobody") as needed:
        other.start()
    assert isinstance(needed.value.__cause__, UninitialisedError)
    if isinstance(device, SmartssdDevice):  # whose memory is reached through what has stopped
        with pytest.raises(ResetNeededError, match=r"cannot write Buffer.* needs a reset\(\)"):
            other.buffers["p"].fill(1.0)
    device.reset()
    assert check_reusable(device, job) > 0


def test_freed_memory_is_a_guard(device, job):
    work = job(300)
    address = work.buffers["v"].address
    work.buffers["v"].free()
    kernel = configure(device, work, v=address)
    kernel.start.go = 1
    with pytest.raises(GuardError) as caught:
        wait_idle(device)
    assert caught.value.address == address
    with pytest.raises(GuardError):
        _ = device.channels[0].kernel.status.busy
    device.reset()
    assert check_reusable(device, job) > 0


def test_an_access_beyond_the_memory_is_a_fault(device, job):
    work = job(300)
    kernel = configure(device, work, v=device.capacity_bytes)
    kernel.start.go = 1
    if isinstance(device, SmartssdDevice):  # whose kernel knows where its memory ends
        assert wait_idle(device).error.cause == ErrorCause.ADDRESS_RANGE
    else:
        with pytest.raises(OutOfRangeError) as caught:
            wait_idle(device)
        assert caught.value.address == device.capacity_bytes
    device.reset()
    assert check_reusable(device, job) > 0


def test_a_register_that_is_not_there_is_a_bus_error(device):
    for access in (
        lambda: device.backend.read_register(0xFFC),
        lambda: device.backend.write_register(0xFFC, 0),
        lambda: device.backend.write_register(device.channels[0].kernel.id.address, 0),
    ):
        with pytest.raises(BusError) as caught:
            access()
        assert caught.value.response == 2
