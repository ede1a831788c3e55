"""Ctrl-C at any bytecode of a run and its changes of mode: the host has the channel behind it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import nearstep
from nearstep.errors import AbortedError

from ...interrupts import Interrupts

URL = "golden:axdimm?channels=2&memory_bytes=1MiB"


@contextmanager
def opened() -> Iterator[tuple[Any, Callable[[], None], Callable[..., None]]]:
    """Parameters on a DIMM, what writes all arrays anew, and what updates once."""
    with nearstep.open(URL) as dimm:
        arrays = {name: dimm.alloc(64, np.float32, channel=0) for name in "pgmv"}

        def fill() -> None:
            for name, each in arrays.items():
                each.write(np.full(64, 1.0 if name in "pg" else 0.0, np.float32))

        def update(*, reserved: bool = False) -> None:
            with ExitStack() as inside:
                if reserved:
                    inside.enter_context(dimm.reserved())
                inside.enter_context(dimm.acceleration(0))
                dimm.update("adam", arrays, step=1).wait()

        fill()
        yield arrays["p"], fill, update


@pytest.mark.parametrize(
    "within",
    [
        "/axdimm/channel.py",
        "/updater/golden_command.py",
        "/updater/golden_channel.py:write_register",
        "/updater/golden_channel.py:_show",
    ],
)
def test_a_run_that_is_interrupted_leaves_memory_to_the_host(within) -> None:
    seed = 5
    print(f"seed {seed}")
    with opened() as (p, fill, update):
        update()  # the first one changes more registers
        expected = p.read()
        assert not np.array_equal(expected, np.ones(64, np.float32))
        fill()
        whole = Interrupts(within=within)
        with whole.armed():
            update()
        places = random.Random(seed).sample(range(1, whole.count + 1), 60)
        found = set()
        for at in places:
            interrupts = Interrupts(at, within=within)
            try:
                with interrupts.armed():
                    update()
            except KeyboardInterrupt:
                found.add(at)
            fill()
            assert np.array_equal(p.read(), np.ones(64, np.float32)), interrupts.where
            update()
            assert np.array_equal(p.read(), expected), interrupts.where
        assert found == set(places)


def test_a_wait_after_ctrl_c_shows_one_step_or_an_error() -> None:
    seed = 7
    print(f"seed {seed}")
    values = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32) ** 2
    with nearstep.open("golden:axdimm?memory_bytes=1MiB&engine=numpy") as dimm:
        arrays = {name: dimm.alloc(64, np.float32) for name in "pgmv"}

        def begin() -> Any:
            for each, given in zip(arrays.values(), values, strict=True):
                each.write(given)
            return dimm.update("adam", arrays, step=1)

        begin().wait()
        expected = [each.read() for each in arrays.values()]
        ends = dict.fromkeys([0, 64, None], 0)
        for within in ("golden_kernel.py", "golden_channel.py:advance", "golden_channel.py:_show"):
            whole = Interrupts(within=within)
            run = begin()
            with whole.armed():
                run.wait()
            for at in random.Random(seed).choices(range(1, whole.count + 1), k=60):
                interrupts, run = Interrupts(at, within=within), begin()
                with suppress(KeyboardInterrupt), interrupts.armed():  # accesses take time: a run
                    run.wait()  # may end with fewer bytecodes than another
                try:
                    run.wait()
                except AbortedError as error:
                    ends[error.committed] += 1
                else:
                    found = [each.read() for each in arrays.values()]
                    assert all(map(np.array_equal, found, expected)), interrupts.where
                    ends[None] += 1
        assert min(ends[0], ends[None]) > 0
        assert sum(ends.values()) == 180


@pytest.mark.parametrize("within", ["/axdimm/channel.py", "/updater/device.py"])
def test_a_second_ctrl_c_on_the_way_to_normal_mode_leaves_memory_to_the_host(within) -> None:
    seed = 6
    print(f"seed {seed}")
    with opened() as (p, fill, update):
        whole = Interrupts(within=within)
        with whole.armed():
            update(reserved=True)
        expected = p.read()
        drawn = random.Random(seed)
        twice = 0
        for at in drawn.choices(range(1, whole.count + 1), k=150):
            interrupts = Interrupts(at, within, again=drawn.randint(1, 80))
            try:
                with interrupts.armed():
                    update(reserved=True)
            except KeyboardInterrupt:
                twice += interrupts.twice
            fill()
            update(reserved=True)
            assert np.array_equal(p.read(), expected), interrupts.where
        assert twice > 50
