"""Simulated devices beside what else a process does: signals, threads, children, an end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest

import nearstep
from nearstep.backends.base import Poll
from nearstep.backends.emulated import Injection
from nearstep.errors import BusyError, ForkedDeviceError, WaitTimeoutError
from nearstep_sim.verilate.harness import MORE
from nearstep_spec.updater.registers import ARRAYS

from ..coarse.small_pool import URL as POOL

KERNEL = "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=4MiB"
CARD = "sim:smartssd?lanes=4&chunk_bytes=512&memory_bytes=4MiB"
DIMM = "sim:axdimm?memory=ddr4-1600&block_bytes=512&functional_units=4&channels=2&fu=native"

SLICE = 4096
POLL = 4096
"""Cycles between looks at a register in a wait, at most."""


class Interrupting:
    """A library of which a call that has not ended is interrupted after its `after`-th slice."""

    def __init__(self, library: Any, after: int) -> None:
        self.library = library
        self.after = after
        self.interrupted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)

        def call(*arguments: object) -> object:
            result = function(*arguments)
            if result == MORE:
                self.after -= 1
                if self.after == 0:
                    self.interrupted.append(name)
                    signal.raise_signal(signal.SIGINT)
            return result

        return call


def interrupted(backend: Any, after: int, action: Any) -> str:
    """Do an action of a backend that Ctrl-C ends, and name the function that was called."""
    library = backend._lib
    backend._lib = Interrupting(library, after)
    try:
        with pytest.raises(KeyboardInterrupt):
            action()
        (name,) = backend._lib.interrupted
    finally:
        backend._lib = library
    return str(name)


@pytest.mark.parametrize("url", [KERNEL, CARD, DIMM, POOL], ids=["kernel", "card", "dimm", "pool"])
def test_a_wait_ends_with_the_slice_in_which_ctrl_c_came(url) -> None:
    with nearstep.open(url) as device:
        backend = device.backend
        never = [Poll(address=0, mask=0xFFFF_FFFF, value=0xDEAD)]
        begun = backend.cycles
        name = interrupted(backend, 2, lambda: backend.wait(never, 100_000_000))
        assert name in ("device_wait", "dimm_wait")
        assert 2 * SLICE <= backend.cycles - begun <= 2 * (SLICE + POLL)
        begun = backend.cycles
        with pytest.raises(WaitTimeoutError, match="waited 20000 device cycles"):
            backend.wait(never, 20_000)
        assert 20_000 <= backend.cycles - begun <= 20_000 + 2 * POLL


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(CARD, id="card"),
        pytest.param(DIMM, id="dimm", marks=pytest.mark.deep),
        pytest.param(f"{POOL}&stall=0.5", id="pool", marks=pytest.mark.deep),
    ],
)
def test_a_copy_that_ctrl_c_ends_leaves_the_device_usable(url) -> None:
    """What was copied before is there; nothing of it is seen in a later copy."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((3, 60_000)).astype(np.float32)
    with nearstep.open(url) as device:
        backend = device.backend
        buffer, other = device.alloc(60_000), device.alloc(60_000)
        buffer.write(values[0])
        write = interrupted(backend, 1, lambda: buffer.write(values[1].copy()))
        gc.collect()  # the array that was written is gone
        other.write(values[2])
        found = buffer.read()
        new = np.flatnonzero(found == values[1])
        assert 0 < new.size < 60_000
        np.testing.assert_array_equal(found[: new.size], values[1][: new.size])
        np.testing.assert_array_equal(found[new.size :], values[0][new.size :])
        out = np.zeros(60_000, np.float32)
        read = interrupted(backend, 1, lambda: buffer.read(out))
        kept = out.copy()
        np.testing.assert_array_equal(other.read(), values[2])
        np.testing.assert_array_equal(out, kept)
        assert (write.split("_")[1], read.split("_")[1]) == ("write", "read")
        device.reset()
        buffer.write(values[1])
        np.testing.assert_array_equal(buffer.read(), values[1])


def test_ctrl_c_ends_a_run_whose_memory_never_answers() -> None:
    """Through the timer of the system: the wait would take 10**12 cycles otherwise."""
    with nearstep.open(KERNEL) as device:
        buffers = {name: device.alloc(999) for name in ARRAYS}
        for buffer in buffers.values():
            buffer.fill(1.0)
        device.backend.inject(Injection(kind="never", write=False))
        run = device.update("adam", buffers, step=1)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(KeyboardInterrupt):
                run.wait(10**12)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        device.backend.heal()
        device.reset()
        assert run.error is not None
        for buffer in buffers.values():
            buffer.fill(1.0)
        assert device.update("adam", buffers, step=1).wait().committed == 999


def test_a_signal_handler_is_told_that_a_call_is_under_way() -> None:
    told: list[BusyError] = []
    with nearstep.open(KERNEL) as device:
        backend = device.backend

        def handler(*_: object) -> None:
            with pytest.raises(BusyError, match="a signal handler has interrupted") as caught:
                backend.read_register(0)
            told.append(caught.value)

        library, before = backend._lib, signal.signal(signal.SIGINT, handler)
        backend._lib = Interrupting(library, 1)
        try:
            with pytest.raises(WaitTimeoutError):
                backend.wait([Poll(address=0, mask=1, value=2)], 9000)
        finally:
            backend._lib = library
            signal.signal(signal.SIGINT, before)
        assert len(told) == 1
        backend.read_register(0)


@pytest.mark.parametrize("url", [KERNEL, DIMM, POOL], ids=["kernel", "dimm", "pool"])
def test_a_device_that_is_dropped_is_closed_with_its_threads(url, monkeypatch) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    monkeypatch.setenv("NEARSTEP_THREADS", "2")
    before, python = threads(), threading.active_count()
    device = nearstep.open(url)
    assert (threads(), threading.active_count()) == (before, python)
    device.alloc(16).fill(1.0)
    with pytest.raises(WaitTimeoutError):
        device.backend.wait([Poll(address=0, mask=1, value=2)], 2000)
    begun = threads() - before
    assert (begun, threading.active_count()) == (int(url in (DIMM, POOL)), python)
    end = device.backend._simulation._end  # calls what frees the memory of the simulation
    assert end.alive
    del device
    gc.collect()
    assert not end.alive
    assert threads() == before


CHILD = """
    import os, sys
    import nearstep
    from nearstep.backends.base import Poll
    from nearstep.errors import ForkedDeviceError, WaitTimeoutError

    def run(device):  # for so long that its channels have threads
        try:
            device.backend.wait([Poll(address=0, mask=1, value=2)], 2000)
        except WaitTimeoutError:
            pass

    device = nearstep.open({url!r})
    buffer = device.alloc(64)
    buffer.fill(1.0)
    run(device)
    channels = device.channels  # of kernels: a pool without rules has none
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        told = 0
        for action in (buffer.read, device.reset, lambda: device.cycles, lambda: device.alloc(1),
                       lambda: device.backend.read_register(0)):
            try:
                action()
            except ForkedDeviceError as error:
                assert error.process == parent
                told += 1
        if channels:
            try:
                channels[0].lock.__enter__()
            except ForkedDeviceError:
                told += 1
        assert device.closed
        device.close()
        own = nearstep.open({url!r})
        own.alloc(64).fill(2.0)
        run(own)
        print("told", told, flush=True)
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    run(device)
    assert buffer.read().tolist() == [1.0] * 64
    print("parent goes on")
"""


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(KERNEL, id="kernel"),
        *(
            pytest.param(url, id=name, marks=pytest.mark.deep)
            for name, url in (("dimm", DIMM), ("pool", POOL), ("golden", "golden:axdimm"))
        ),
    ],
)
def test_a_child_ends_and_cannot_use_the_device_of_its_parent(url) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD.format(url=url))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "NEARSTEP_THREADS": "2"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = 5 if url == POOL else 6
    assert done.stdout.split("\n") == [f"told {told}", "parent goes on", ""]
    assert issubclass(ForkedDeviceError, nearstep.errors.ClosedDeviceError)
