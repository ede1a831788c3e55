"""Adam steps through the driver, on every emulated device."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.errors import (
    AlignmentError,
    ArgumentError,
    BusError,
    BusyError,
    ClosedDeviceError,
    DtypeError,
    ForeignBufferError,
    FreedBufferError,
    OverlapError,
    ShapeError,
)
from nearstep.registers import RefusedWriteError
from nearstep_spec.updater.registers import ARRAYS

from .conftest import BLOCK, URLS, each_kind, everywhere

COUNTS = (1, 3, 4, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, 1001, 4099)


@everywhere
@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "adamw"])
def test_any_count_gives_the_bits_of_the_golden_rule(device, job, decoupled):
    compared = 0
    for count in COUNTS:
        work = job(count, seed=count, decoupled_weight_decay=decoupled)
        run = work.start().wait()
        assert run.done
        assert run.committed == count
        compared += work.check()
    assert compared == 3 * sum(COUNTS)


@everywhere
def test_steps_in_sequence_build_on_each_other(device, job):
    work = job(700)
    for step in range(1, 5):
        work.start(step=step).wait()
        assert work.check() == 3 * 700


@everywhere
def test_bytes_beside_the_elements_are_untouched(device, job):
    work = job(1024)
    whole = dict(work.buffers)
    first, stop = 256, 256 + 301
    work.buffers = {name: buffer[first:stop] for name, buffer in whole.items()}
    outside = {name: array.copy() for name, array in work.before.items()}
    work.before = {name: array[first:stop] for name, array in outside.items()}
    work.start().wait()
    assert work.check() == 3 * 301
    for name, buffer in whole.items():
        after = buffer.read()
        np.testing.assert_array_equal(after[:first], outside[name][:first])
        np.testing.assert_array_equal(after[stop:], outside[name][stop:])


@everywhere
def test_first_beta_below_one_half_takes_the_other_form_of_the_mean(device, job):
    work = job(500)
    work.hyper["betas"] = (0.3, 0.9)
    work.start().wait()
    assert work.check() == 1500


@everywhere
def test_nan_and_inf_gradients_give_ieee_results(device, job):
    work = job(640)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38], np.float32)
    work.before["g"][: special.size] = special
    work.before["v"][special.size : 2 * special.size] = special
    work.upload()
    work.start().wait()
    assert work.check() == 3 * 640
    assert np.isnan(work.buffers["p"].read()[0])


def test_count_zero_completes_and_changes_nothing(device, job):
    work = job(5000)
    empty = {name: buffer[0:0] for name, buffer in work.buffers.items()}
    work.start().wait()
    assert work.check() == 3 * 5000
    run = device.update("adam", empty, step=1).wait()
    assert run.done
    assert run.committed == 0
    assert [run.counters[each] for each in ("committed", "read_beats", "write_beats")] == [0, 0, 0]
    assert device.channels[0].kernel.status.done
    assert work.check_untouched() == 3 * 5000


@everywhere
def test_busy_is_seen_and_then_done(device, job):
    work = job(4000)
    run = work.start()
    assert device.channels[0].kernel.status.busy
    assert not run.done
    run.wait()
    assert run.done
    assert not device.channels[0].kernel.status.busy


def test_cycles_are_counted_or_unknown_but_never_zero(device, job):
    run = job(2000).start().wait()
    if device.backend.cycles is None:
        assert run.cycles is None
        assert "cycles" not in run.counters
    else:
        assert run.cycles > 4 * 2000 / device.config.lanes
        assert run.counters["read_beats"] == 4 * 500
        assert run.counters["write_beats"] == 3 * 500
    assert run.counters["committed"] == 2000


@everywhere
def test_a_run_while_another_is_busy_is_refused(device, job):
    first, second = job(4000, seed=1), job(100, seed=2)
    run = first.start()
    with pytest.raises(BusyError, match="adam of 4000 elements has not ended"):
        second.start()
    run.wait()
    assert first.check() == 12000
    assert second.check_untouched() == 300
    second.start().wait()
    assert second.check() == 300


def test_start_and_configuration_while_busy_are_refused_and_flagged(device, job):
    work = job(4000)
    run = work.start()
    kernel = device.channels[0].kernel
    assert not kernel.status.refused
    for register in (kernel.start, kernel.p_address, kernel.window0_permissions):
        with pytest.raises(BusError):
            device.backend.write_register(register.address, 1)
        assert kernel.status.refused
        assert kernel.status.refused, "reading it cleared it"
        kernel.control.clear = 1
        assert not kernel.status.refused
    with pytest.raises(RefusedWriteError):
        kernel.start.go = 1
    with pytest.raises(RefusedWriteError):
        kernel.p_address.value = 0
    with pytest.raises(RefusedWriteError):
        kernel.window0_permissions.bits = 0
    assert not kernel.status.refused, "the driver did not clear it"
    assert kernel.status.busy
    run.wait()
    assert work.check() == 12000


@pytest.mark.parametrize("array", ARRAYS)
def test_a_buffer_of_a_run_in_progress_cannot_be_freed_or_changed(device, job, array):
    work = job(4000)
    used = work.buffers[array]
    free = device.free_bytes
    run = work.start()
    for use in (
        used.free,
        lambda: used.write(work.before[array]),
        lambda: used.fill(0.0),
        lambda: used[3990:].fill(0.0),
    ):
        with pytest.raises(BusyError, match=rf"uses it as {array}, has not ended") as caught:
            use()
        assert caught.value.registers[f"{device.channels[0].kernel.name}.status.busy"] == 1
    if array == "g":
        np.testing.assert_array_equal(used.read(), work.before[array])
    else:
        with pytest.raises(BusyError, match="cannot read"):
            used.read()
    assert device.free_bytes == free
    assert not used.freed
    run.wait()
    assert work.check() == 12000
    used.free()
    assert device.free_bytes > free


def test_what_a_run_does_not_use_stays_usable_beside_it(device, job):
    work, other = job(4000, seed=1), job(100, seed=2)
    whole = device.alloc(5000)
    whole[:4000].write(work.before["p"])
    work.buffers["p"] = whole[:4000]
    run = work.start()
    whole[4000:].fill(7.0)
    assert other.check_untouched() == 300
    other.buffers["p"].free()
    with pytest.raises(BusyError):
        whole.read()
    with pytest.raises(BusyError):
        whole.free()
    run.wait()
    assert work.check() == 12000
    assert np.all(whole[4000:].read() == 7.0)


def test_buffers_are_free_again_after_an_abort_or_a_reset(device, job):
    first, second = job(4000, seed=1), job(4000, seed=2)
    first.start().abort()
    second.start()
    device.reset()
    for work in (first, second):
        for buffer in work.buffers.values():
            buffer.free()
    assert job(300).start().wait().done


@everywhere
def test_two_optimizers_share_a_device(device, job):
    one, two = job(600, seed=1), job(900, seed=2, decoupled_weight_decay=False)
    for step in (1, 2, 3):
        for work in (one, two):
            work.start(step=step).wait()
            assert work.check() == 3 * work.count


@everywhere
def test_windows_are_closed_after_a_run(device, job):
    work = job(300)
    work.start().wait()
    permissions = [device.channels[0].kernel[f"window{i}_permissions"].bits for i in range(4)]
    assert permissions == [0, 0, 0, 0]


def wrong_dtype(device, work):
    work.buffers["g"] = device.alloc(work.count, np.float64)


def wrong_size(device, work):
    work.buffers["m"] = device.alloc(work.count + 1)


def not_a_buffer(device, work):
    work.buffers["p"] = np.zeros(work.count, np.float32)


def misaligned(device, work):
    work.buffers = {n: device.alloc(work.count + 1)[0 : work.count] for n in work.buffers}
    work.buffers["v"] = device.alloc(work.count + 1)[1:]


def overlapping(device, work):
    shared = device.alloc(2 * work.count)
    work.buffers["p"] = shared[0 : work.count]
    work.buffers["m"] = shared[work.count - 4 : 2 * work.count - 4]


def the_same_twice(device, work):
    work.buffers["v"] = work.buffers["m"]


def freed(device, work):
    work.buffers["g"].free()


def step_zero(device, work):
    work.hyper["step"] = 0


def beta_one(device, work):
    work.hyper["betas"] = (0.9, 1.0)


def infinite_rate(device, work):
    work.hyper["lr"] = float("inf")


WRONG = {
    wrong_dtype: DtypeError,
    wrong_size: ShapeError,
    not_a_buffer: DtypeError,
    misaligned: AlignmentError,
    overlapping: OverlapError,
    the_same_twice: OverlapError,
    freed: FreedBufferError,
    step_zero: ArgumentError,
    beta_one: ArgumentError,
    infinite_rate: ArgumentError,
}


HYPERPARAMETERS = {
    "fractional step": {"step": 1.5},
    "step of a truth value": {"step": True},
    "step of text": {"step": "1"},
    "no step": {"step": None},
    "step beyond all powers": {"step": 10**400},
    "rate beyond binary32": {"lr": 1e300},
    "rate beyond binary64": {"lr": 10**400},
    "decay beyond binary32": {"weight_decay": 1e45},
    "rate of text": {"lr": "a"},
    "no rate": {"lr": None},
    "NaN rate": {"lr": float("nan")},
    "eps of a truth value": {"eps": True},
    "eps beyond binary32": {"eps": 1e39},
    "one beta": {"betas": 0.9},
    "three betas": {"betas": (0.9, 0.9, 0.9)},
    "betas of text": {"betas": ("a", "b")},
    "betas in text": {"betas": "ab"},
    "NaN beta": {"betas": (float("nan"), 0.9)},
}


@each_kind
@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "adamw"])
@pytest.mark.parametrize("case", HYPERPARAMETERS)
def test_wrong_hyperparameters_fail_before_the_device_is_touched(
    device, job, case, decoupled, monkeypatch
):
    work = job(16)
    hyper = {**work.hyper, "decoupled_weight_decay": decoupled, **HYPERPARAMETERS[case]}
    touched = []
    monkeypatch.setattr(device.backend, "write_register", lambda *args: touched.append(args))
    with pytest.raises(ArgumentError) as caught:
        device.update("adam", work.buffers, **hyper)
    print(caught.value)
    assert touched == []


@everywhere
def test_numbers_of_numpy_are_hyperparameters(device, job):
    work = job(100)
    work.hyper.update(
        step=np.int64(2), lr=np.float32(0.25), betas=[np.float64(0.5), 0], weight_decay=0
    )
    work.start().wait()
    assert work.check() == 300


@everywhere
@pytest.mark.parametrize("bound", [1e9, -5, "x", True, 1 << 64])
def test_a_bound_of_a_wait_is_a_number_of_cycles(device, job, bound):
    work = job(300)
    run = work.start()
    for use in (run.wait, run.abort):
        with pytest.raises(ArgumentError, match="max_cycles must be an integer"):
            use(max_cycles=bound)
    run.wait()
    with pytest.raises(ArgumentError):
        run.wait(max_cycles=bound)
    assert work.check() == 900


@pytest.mark.parametrize("spoil", WRONG, ids=lambda each: each.__name__)
def test_wrong_arguments_fail_before_the_device_is_touched(device, job, spoil, monkeypatch):
    work = job(100)
    spoil(device, work)
    touched = []
    monkeypatch.setattr(device.backend, "write_register", lambda *args: touched.append(args))
    with pytest.raises(WRONG[spoil]) as caught:
        work.start()
    print(caught.value)
    assert touched == []


def test_a_buffer_of_another_device_is_refused(device, job):
    import nearstep

    work = job(100)
    with nearstep.open(URLS["golden-numpy"]) as other:
        work.buffers["g"] = other.alloc(100)
        with pytest.raises(ForeignBufferError):
            work.start()


def test_a_closed_device_says_so(device, job):
    work = job(4000)
    run = work.start()
    device.close()
    device.close()
    for use in (
        run.wait,
        run.abort,
        lambda: run.done,
        lambda: run.committed,
        lambda: device.channels[0].kernel.status.busy,
        lambda: setattr(device.channels[0].kernel.count, "value", 1),
        work.start,
        lambda: device.alloc(4),
        lambda: work.buffers["p"].read(),
        lambda: work.buffers["p"].write(work.before["p"]),
        lambda: work.buffers["p"].free(),
        device.reset,
        lambda: device.cycles,
    ):
        with pytest.raises(ClosedDeviceError, match="is closed"):
            use()
