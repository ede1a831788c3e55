"""Ctrl-C at any bytecode of a change of mode: the host has the channel behind it."""

from __future__ import annotations

import random

import numpy as np

import nearstep

from ...interrupts import Interrupts

URL = "golden:axdimm?channels=2&memory_bytes=1MiB"
CHANNEL = "/axdimm/channel.py"


def test_a_change_of_mode_that_is_interrupted_is_undone() -> None:
    seed = 5
    print(f"seed {seed}")
    with nearstep.open(URL) as dimm:
        arrays = {name: dimm.alloc(64, np.float32, channel=0) for name in "pgmv"}

        def update() -> None:
            with dimm.acceleration(0):
                dimm.update("adam", arrays, step=1).wait()

        def fill(value: float) -> None:
            for each in arrays.values():
                each.write(np.full(64, value, np.float32))

        fill(0.0)
        whole = Interrupts(within=CHANNEL)
        with whole.armed():
            update()
        places = random.Random(seed).sample(range(1, whole.count + 1), 40)
        found = set()
        for at in places:
            interrupts = Interrupts(at, within=CHANNEL)
            try:
                with interrupts.armed():
                    update()
            except KeyboardInterrupt:
                found.add(at)
            fill(at)
            assert not dimm.channels[0].accelerated, interrupts.where
            for each in arrays.values():
                assert np.array_equal(each.read(), np.full(64, at, np.float32)), interrupts.where
            update()
        assert found == set(places)
