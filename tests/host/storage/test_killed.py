"""A process that commits again and again is killed: the drives hold a whole generation."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.store import Store

WRITER = """
import sys
import numpy as np
from nearstep.storage.store import Store

store = Store.open(sys.argv[2:], owner="killed", direct=sys.argv[1] == "direct")
while True:
    number = store.generation + 1
    for name, tensor in store.tensors.items():
        store.submit_write(name, np.full(tensor.nbytes // 8, number, np.int64))
    assert store.commit({"number": number}) == number
    print(number, flush=True)
"""


def has_direct(folder: Path) -> bool:
    from nearstep.storage.drive_errors import DirectIOError

    try:
        Store.create([folder / "probe"], drive_bytes=64 * BLOCK_BYTES, owner="probe").close()
    except DirectIOError as error:
        print(f"O_DIRECT was not tested: {error}")
        return False
    return True


def kill_again_and_again(folder: Path, times: int, seed: int) -> int:
    """Generations that were committed in all."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    direct = has_direct(folder)
    paths = [folder / f"drive{number}" for number in range(2)]
    with Store.create(
        paths, drive_bytes=2 << 20, owner="killed", extent_bytes=1 << 16, direct=direct
    ) as store:
        for name, nbytes in (("p", 400_000), ("m", 80), ("v", 160_000)):
            store.add(name, nbytes)
        store.commit({"number": 1})
    last = 1
    for _ in range(times):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), "direct" if direct else "cached"]
            + [str(path) for path in paths],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for _ in range(rng.randrange(1, 12)):
            assert int(child.stdout.readline()) > last
        for _ in range(rng.randrange(20_000)):  # somewhere in the next one
            pass
        child.send_signal(signal.SIGKILL)
        told = [int(line) for line in child.communicate()[0].split()]
        with Store.open(paths, owner="killed", direct=direct) as store:
            assert store.generation >= max([last, *told])
            for number in store.generations:
                for name, tensor in store.tensors.items():
                    out = np.zeros(tensor.nbytes // 8, np.int64)
                    store.at(number).read(name, out)
                    assert (out == (number if number > 1 else 0)).all(), (number, name)
            last = store.generation
    return last


def test_killed_three_times(tmp_path) -> None:
    assert kill_again_and_again(tmp_path, 3, seed=1) > 6


@pytest.mark.deep
def test_killed_fifty_times(tmp_path) -> None:
    assert kill_again_and_again(tmp_path, 50, seed=2) > 100
