"""Bounce buffers: threads of a drive share few of them, and arrays on a page need none."""

from __future__ import annotations

import threading
import uuid

import numpy as np
import pytest

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.bounces import BOUNCE_BYTES, Bounces
from nearstep.storage.drive import Drive
from nearstep.storage.header import Header, fingerprint
from nearstep_sim.models.drive import MemoryBlocks

EXTENT = 4 << 20
BLOCKS = 10 * EXTENT // BLOCK_BYTES


@pytest.fixture
def drive():
    header = Header(
        set_id=uuid.UUID(int=1),
        index=0,
        drives=1,
        blocks=BLOCKS,
        extent_bytes=EXTENT,
        owner="gpt",
        owner_digest=fingerprint("gpt"),
    )
    drive = Drive(MemoryBlocks(bytes(BLOCKS * BLOCK_BYTES)), header)
    yield drive
    drive.close()


@pytest.mark.parametrize(
    ("nbytes", "count"),
    [(BLOCK_BYTES, 2048), (1 << 20, 8), (3 << 20, 2), (4 << 20, 2), (1 << 26, 2)],
)
def test_buffers_have_eight_mebibytes_together_or_are_two(nbytes: int, count: int) -> None:
    bounces = Bounces(nbytes)
    assert bounces.count == count
    assert count == 2 or nbytes * count <= BOUNCE_BYTES


def test_arrays_on_a_page_take_no_buffer_and_others_two(drive) -> None:
    data = np.random.default_rng(3).integers(0, 256, 10 * EXTENT, np.uint8)
    held, out = aligned_bytes(data.nbytes), aligned_bytes(data.nbytes)
    held[:] = data
    drive.write(0, held).wait()
    drive.read(0, out).wait()
    assert drive._bounces.held == 0
    assert (out == data).all()
    ragged, got = (aligned_bytes(data.nbytes + 64)[64:] for _ in range(2))
    ragged[:] = ~data
    drive.write(0, ragged).wait()
    drive.read(0, got).wait()
    assert 1 <= drive._bounces.held <= 2 < drive.queue_depth
    assert (got == ~data).all()


def test_who_finds_all_buffers_in_use_waits_for_one() -> None:
    bounces, got = Bounces(EXTENT), threading.Event()

    def third() -> None:
        with bounces.lend(5) as memory:
            assert memory.nbytes == 5
            got.set()

    thread = threading.Thread(target=third)
    with bounces.lend(EXTENT) as one:
        with bounces.lend(EXTENT) as two:
            assert not np.shares_memory(one, two)
            thread.start()
            assert not got.wait(0.05)
        assert got.wait(30)
        thread.join()
        assert bounces.held == 2


def test_buffers_are_lent_again_unless_they_are_larger_together_than_the_bound() -> None:
    for nbytes, kept in ((EXTENT, 2), (2 * EXTENT, 1), (4 * EXTENT, 0)):
        bounces = Bounces(nbytes)
        with bounces.lend(5) as one, bounces.lend(5) as two:
            before = {one.ctypes.data, two.ctypes.data}
            assert bounces.held == len(before) == 2
        assert bounces.held == kept
        with bounces.lend(5) as again:
            assert not kept or again.ctypes.data in before


def test_a_buffer_comes_back_after_an_error() -> None:
    bounces = Bounces(EXTENT)
    with bounces.lend(EXTENT):
        for _ in range(5):
            with pytest.raises(OSError, match="broken"), bounces.lend(EXTENT):
                raise OSError("broken")
        assert bounces.held == 2
    assert bounces.held == 2
