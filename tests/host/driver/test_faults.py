"""What goes wrong in a run: a typed error, nothing lost, and the device works again after it.

A row is a device, a kind of run and an array; what must hold after a fault is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import nearstep
from nearstep import Pairs, Rounding
from nearstep.backends.emulated import Injection
from nearstep.buffer import Buffer
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
from nearstep.run import Run
from nearstep.smartssd.device import SmartssdDevice
from nearstep.updater.device import KernelDevice
from nearstep_spec.updater.registers import ARRAYS, ErrorCause

from .conftest import BUILDS, BURSTS_AHEAD, DIMMS, FULL, URLS
from .job import Job, accelerated
from .start import Start
from .test_conformance import IN_DEPTH, ROWS

FIVE_ARRAYS = (*ARRAYS, "v_max")
DEVICES = URLS | DIMMS | {f"full-{n}": url for n, url in FULL.items()}
DEVICES |= {name: url for name, (url, _) in ROWS.items()}
SLOW = {*BUILDS, *IN_DEPTH, "full-sim-ideal", "full-sim-card-ecp5", "full-pcie-card"}
STATES = [name for name in ROWS if name.endswith(("-narrow", "-rounded", "-eight"))]
"""Devices on which each of the states has another format than binary32."""

NAMES = {
    "adam": URLS,
    "bf16": [f"full-{name}" for name in FULL],
    "copy": [f"full-{name}" for name in FULL],
    "fused": [f"full-{name}" for name in FULL],
    "scatter": [f"full-{name}" for name in FULL],
    "scan": [f"full-{name}" for name in FULL],
    "amsgrad": ["golden-cpp-all", "golden-dimm-all", "sim-ideal-all"],
    "states": [name for name in STATES if not name.startswith("sim-dimm")],
}
"""Devices that can have each kind of run, and errors of memory in it: a DDR4 channel has none."""

READ = {
    "adam": ARRAYS, "bf16": "g", "copy": "", "fused": ["index", "index again", "g"],
    "scatter": ["index", "index again", "g"], "scan": "g", "amsgrad": ["v_max"], "states": "mv",
}  # fmt: skip
WRITTEN = {"adam": "pmv", "copy": ["copy_out"], "amsgrad": ["v_max"], "states": "mv"}
"""Arrays in which errors are of interest in each kind of run."""


def rows(arrays: dict[str, Any], names: dict[str, Any] = NAMES) -> pytest.MarkDecorator:
    """Device, kind of run, and array."""
    return pytest.mark.parametrize(
        ("name", "kind", "array"),
        [
            pytest.param(name, kind, array, marks=[pytest.mark.deep] if name in SLOW else [])
            for kind, of_kind in arrays.items()
            for name in names[kind]
            for array in of_kind
        ],
    )


class Fault:
    """A run of some blocks and three elements that something is to go wrong in."""

    def __init__(self, device: KernelDevice, kind: str, blocks: int = 40, seed: int = 1) -> None:
        self.device, self.kind = device, kind
        self.block = device.config.block_elements
        self.count = count = blocks * self.block + 3
        optimizer = device.config.rule_set.names[0] if kind == "states" else "adam"
        self.job = job = Job(
            device, count, seed, gradient="bf16" if kind == "bf16" else None,
            arrays=FIVE_ARRAYS if kind == "amsgrad" else ARRAYS, optimizer=optimizer,
        )  # fmt: skip
        self.given: dict[str, Any] = {"amsgrad": True} if kind == "amsgrad" else {}
        if kind == "copy":
            self.given["copy_out"] = job.copy("fp16")
            self.given["copy_out"].fill(0)
        if kind in ("fused", "scatter"):
            ones = np.ones(count, np.float32)
            self.given["g"] = job.pairs(np.arange(count, dtype=np.uint32), ones, kind)
        if device.config.stochastic_rounding:
            self.given["rounding"] = Rounding(seed=9)

    def buffer(self, array: str) -> Buffer:
        pairs = self.given.get("g")
        if isinstance(pairs, Pairs) and array != "copy_out":
            return pairs.value if array == "g" else pairs.index
        return self.given["copy_out"] if array == "copy_out" else self.job.buffers[array]

    def address(self, array: str, element: int) -> int:
        """Of an element that is the first of a block, or the last of all."""
        buffer = self.buffer(array)
        form = self.job.formats.get(array, "fp32")
        if form in ("dynamic8", "dynamic8u") and element == self.count - 1:
            return buffer.address + buffer.nbytes - 1
        if form in ("dynamic8", "dynamic8u"):
            return buffer.address + self.job._place(array, element, form)
        return buffer.address + element * buffer.dtype.itemsize

    @contextmanager
    def started(self) -> Iterator[Run]:
        """The run; the channel is the host's after it, whatever its end."""
        with accelerated(self.device):
            if self.kind == "scan":
                yield self.device.scan(self.job.buffers["g"])
            else:
                yield self.job.start(**self.given)

    def check_failed(self, run: Run) -> None:
        """Registers show an error, committed elements are as the rule says, and blocks that were
        not begun are untouched."""
        status = self.device.channels[0].kernel.status
        assert (status.done, status.error, status.busy) == (0, 1, 0)
        self.check_ended(run)

    def check_ended(self, run: Run) -> None:
        assert not run.done
        assert run.committed % self.block == 0
        assert run.committed < self.count
        if self.kind != "scan":
            begun = run.committed + (BURSTS_AHEAD + 4) * self.block
            compared = self.job.check(0, run.committed)
            assert compared + self.job.check_untouched(begun) > 0

    def check_reusable(self) -> None:
        """Another run, on fresh arrays and with nothing injected, gives the right bits."""
        self.device.backend.heal()
        self.job.free()
        again = Fault(self.device, self.kind, blocks=5, seed=99)
        if self.kind == "scan":
            again.job.buffers["g"].fill(1.0)
            with again.started() as run:
                assert run.wait().sum_of_squares == again.count
        else:
            assert again.job.run(**again.given).done
            assert again.job.check() >= 3 * again.count
        again.job.free()


@contextmanager
def fault(name: str, kind: str) -> Iterator[Fault]:
    with nearstep.open(DEVICES[name]) as device:
        assert isinstance(device, KernelDevice)
        made = Fault(device, kind)
        yield made
        made.check_reusable()


@rows(READ)
def test_an_error_response_to_a_read_ends_the_run(name, kind, array):
    """Of indices, which are read twice, to the first or the second."""
    with fault(name, kind) as made:
        for code, response in (("slverr", 2), ("decerr", 3)):
            device, of_array = made.device, array.removesuffix(" again")
            hit = made.address(of_array, 9 * made.block)
            device.backend.inject(
                Injection(
                    kind=code, write=False, base=hit, limit=hit + 1, nth=int(array != of_array)
                )
            )
            with made.started() as run:
                for _ in range(2):  # it is kept
                    with pytest.raises(BusResponseError) as caught:
                        run.wait()
            error = caught.value
            assert (error.cause, error.stream) == ("READ_RESPONSE", f"{of_array.upper()}_READ")
            assert hit - device.config.burst_bytes < error.address <= hit
            kernel = device.channels[0].kernel.name
            assert error.registers[f"{kernel}.error.response"] == response
            assert error.transactions
            assert run.error is not None
            assert error.committed <= 9 * made.block + 1
            if array == "index" or kind == "scan":
                assert error.committed == 0
            made.check_failed(run)
            if array == "index":
                assert made.job.check_untouched() == 3 * made.count
            device.backend.heal()
            made.job.upload()


@rows(WRITTEN)
def test_an_error_response_to_the_last_write_is_not_done(name, kind, array):
    with fault(name, kind) as made:
        device, last = made.device, made.address(array, made.count - 1)
        device.backend.inject(Injection(kind="slverr", write=True, base=last, limit=last + 1))
        with made.started() as run, pytest.raises(BusResponseError) as caught:
            run.wait()
        stream = "COPY_OUT" if array == "copy_out" else f"{array.upper()}_WRITE"
        assert (caught.value.cause, caught.value.stream) == ("WRITE_RESPONSE", stream)
        assert last - device.config.burst_bytes < caught.value.address <= last
        assert run.committed == made.count - 3
        made.check_failed(run)


NEVER = {"adam": ["read", "write"], "fused": ["index"], "scatter": ["index"]}


@rows(NEVER)
def test_memory_that_never_answers_ends_in_a_bounded_wait(name, kind, array):
    with fault(name, kind) as made:
        device, where = made.device, {}
        if array == "index":
            index = made.given["g"].index
            where = {"base": index.address, "limit": index.address + index.nbytes}
        device.backend.inject(Injection(kind="never", write=array == "write", nth=11, **where))
        text = f"adam of {made.count} elements"
        with made.started() as run:
            with pytest.raises(WaitTimeoutError, match=text) as caught:
                run.wait(max_cycles=20_000)
            assert caught.value.max_cycles == 20_000
            unit = "steps" if device.cycles is None else "device cycles"
            assert f"waited 20000 {unit} for" in str(caught.value)
            kernel = device.channels[0].kernel
            assert caught.value.registers[f"{kernel.name}.status.busy"] == 1
            assert caught.value.transactions
            assert not run.done
            assert kernel.status.busy
            run.abort(max_cycles=2_000)
            device.backend.heal()
            assert isinstance(run.error, AbortedError)
            assert not kernel.status.busy
        made.check_ended(run)  # it was reset
        if array == "index":
            assert run.committed == 0
            assert made.job.check_untouched() == 3 * made.count


@rows({"adam": ["read", "write"]})
def test_late_beats_of_an_old_run_never_reach_the_next(name, kind, array):
    with fault(name, kind) as made:
        device, write = made.device, array == "write"
        late = Injection(kind="late", write=write, nth=7, times=3, delay=30_000)
        device.backend.inject(late)
        run = made.job.start()
        with pytest.raises(WaitTimeoutError):
            run.wait(max_cycles=3_000)
        device.reset()
        device.backend.heal()
        assert isinstance(run.error, AbortedError)
        with pytest.raises(AbortedError, match="the device was reset"):
            run.wait()
        untouched = made.job.buffers["p"].read()
        new = Fault(device, kind, seed=6).job
        new.start().wait()
        assert new.check() == 3 * made.count
        np.testing.assert_array_equal(made.job.buffers["p"].read(), untouched)
        new.free()


@rows({"adam": ["all"]})
def test_a_late_answer_is_waited_for(name, kind, array):
    with fault(name, kind) as made:
        late = Injection(kind="late", write=False, nth=3, delay=5_000)
        made.device.backend.inject(late)
        made.job.start().wait(max_cycles=100_000)
        assert made.job.check() == 3 * made.count


ABORTED = {
    "adam": ["at once", "reset"], "bf16": [50, 301, 302, 303, 700], "fused": ["late index"],
    "scatter": ["late index"], "scan": ["at once"], "states": ["at once"],
}  # fmt: skip
CLOCKED = ["full-sim-card-stalled", "full-sim-ideal", "sim-dimm-all"]
OF_ABORTED = {**NAMES, "adam": URLS | DIMMS, "bf16": CLOCKED, "states": STATES}


@rows(ABORTED, OF_ABORTED)
def test_a_run_that_is_given_up_says_what_is_committed(name, kind, array):
    """By an abort at once, or after so many cycles, or while indices are checked; or a reset."""
    with fault(name, kind) as made:
        device = made.device
        if array == "late index":
            index = made.given["g"].index
            where = {"base": index.address, "limit": index.address + index.nbytes}
            device.backend.inject(Injection(kind="late", write=False, delay=5_000, **where))
        with made.started() as run:
            if isinstance(array, int):
                with pytest.raises(WaitTimeoutError):
                    device.backend.wait([device.channels[0].kernel.status.poll(done=1)], array)
            if array == "reset":
                device.reset()
            else:
                run.abort(max_cycles=50_000)
        assert isinstance(run.error, AbortedError)
        with pytest.raises(AbortedError):
            run.wait()
        if array == "reset":
            assert not device.channels[0].kernel.status.busy
            return
        assert run.error.cause == ErrorCause.ABORTED.name
        made.check_failed(run)
        run.abort()
        if array == "late index":
            assert run.committed == 0
        if kind == "scan":
            kernel = device.channels[0].kernel
            assert (kernel.scan.found_inf, kernel.sum_of_squares.value) == (0, 0)
            with pytest.raises(AbortedError):
                _ = run.found_inf


UNWRITTEN = {"adam": "g", "fused": ["index", "g"], "scan": "g"}


@rows(UNWRITTEN)
def test_reading_memory_that_nobody_wrote_is_a_fault(name, kind, array):
    with fault(name, kind) as made:
        device, other = made.device, Job(made.device, 100, seed=2)
        if kind == "fused":
            fresh = Pairs(device.alloc(40, np.uint32), device.alloc(40))
            (fresh.value if array == "index" else fresh.index).fill(0)
            made.given["g"] = fresh
        else:
            made.job.buffers["g"] = device.alloc(300)
            made.job.buffers |= {n: b[:300] for n, b in made.job.buffers.items()}
        with pytest.raises(UninitialisedError) as caught, made.started() as run:
            run.wait()
        assert caught.value.address == made.buffer(array).address
        assert not caught.value.write
        made.job.take_back()
        if kind == "adam":
            needs = r"needs a reset\(\): read at .* nobody"
            with pytest.raises(ResetNeededError, match=needs) as needed:
                other.start()
            assert isinstance(needed.value.__cause__, UninitialisedError)
        if isinstance(device, SmartssdDevice):  # whose memory is reached through what has stopped
            with pytest.raises(ResetNeededError, match=r"cannot write Buffer.* needs a reset\(\)"):
                other.buffers["p"].fill(1.0)
        device.reset()


@rows({"adam": "v", "states": "v"}, {**NAMES, "states": [n for n in STATES if "golden" in n]})
def test_a_guard_in_an_array_is_a_fault(name, kind, array):
    with fault(name, kind) as made:
        device, last = made.device, made.address(array, made.count - 1) // 64 * 64
        device.backend.protect(last, 64)
        with pytest.raises(GuardError) as caught, made.started() as run:
            run.wait()
        assert caught.value.address == last
        with pytest.raises(GuardError):
            _ = device.channels[0].kernel.status.busy
        device.reset()


@pytest.mark.parametrize("what", ["freed", "beyond"])
def test_freed_memory_and_what_is_beyond_the_memory_are_faults(device, what):
    """To a kernel whose windows are over all of its addresses."""
    start = Start(device)
    v = start.work.buffers["v"]
    address = v.address if what == "freed" else device.capacity_bytes
    v.free()
    start.set(v_address=address)
    if what == "beyond" and isinstance(device, SmartssdDevice):  # it knows where its memory ends
        assert start.outcome()[0] == ErrorCause.ADDRESS_RANGE
    else:
        with pytest.raises(GuardError if what == "freed" else OutOfRangeError) as caught:
            start.outcome()
        assert caught.value.address == address
    device.reset()
    Fault(device, "adam", blocks=1).check_reusable()


def test_a_register_that_is_not_there_is_a_bus_error(device):
    for access in (
        lambda: device.backend.read_register(0xFFC),
        lambda: device.backend.write_register(0xFFC, 0),
        lambda: device.backend.write_register(device.channels[0].kernel.id.address, 0),
    ):
        with pytest.raises(BusError) as caught:
            access()
        assert caught.value.response == 2
