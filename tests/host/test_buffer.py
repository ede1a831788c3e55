"""Buffers and the allocator: bounds, types, life time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nearstep
from nearstep.allocator import LINE_BYTES, Allocator
from nearstep.device import Device
from nearstep.errors import (
    ArgumentError,
    DtypeError,
    FreedBufferError,
    OutOfBoundsError,
    OutOfDeviceMemoryError,
    ShapeError,
)


@pytest.fixture
def device() -> Iterator[Device]:
    with nearstep.open("golden:axdimm?engine=numpy&memory_bytes=64KiB") as opened:
        yield opened


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (0,), (2, 0, 3)])
def test_what_was_written_is_read(device, dtype, shape):
    buffer = device.alloc(shape, dtype)
    array = (np.arange(buffer.size).reshape(shape) + 1).astype(dtype)
    buffer.write(array)
    np.testing.assert_array_equal(buffer.read(), array)
    out = np.zeros(shape, dtype)
    assert buffer.read(out) is out
    np.testing.assert_array_equal(out, array)


def test_strided_arrays_are_written_whole(device):
    buffer = device.alloc((4, 3))
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    buffer.write(array)
    np.testing.assert_array_equal(buffer.read(), array)


def test_shape_and_dtype_are_not_converted(device):
    buffer = device.alloc(8)
    with pytest.raises(DtypeError, match="must be float32, not float64"):
        buffer.write(np.zeros(8))
    with pytest.raises(ShapeError, match=r"must be \(8,\), not \(9,\)"):
        buffer.write(np.zeros(9, np.float32))
    with pytest.raises(ShapeError):
        buffer.read(np.zeros((2, 4), np.float32))
    with pytest.raises(ShapeError, match="contiguous"):
        buffer.read(np.zeros(16, np.float32)[::2])


def test_a_view_shares_memory_and_life(device):
    buffer = device.alloc(32)
    buffer.fill(0.0)
    view = buffer[8:16]
    view.fill(5.0)
    assert buffer.read().sum() == 40.0
    assert view[2:4].address == buffer.address + 40
    with pytest.raises(FreedBufferError):
        view.free()
    buffer.free()
    assert view.freed
    with pytest.raises(FreedBufferError, match="cannot read"):
        view.read()


@pytest.mark.parametrize("part", [slice(0, 33), slice(-1, 4), slice(5, 4)])
def test_slices_are_not_clipped(device, part):
    with pytest.raises(OutOfBoundsError):
        device.alloc(32)[part]


def test_only_rows_of_a_line_can_be_sliced(device):
    with pytest.raises(ShapeError):
        device.alloc((4, 4))[0:2]
    with pytest.raises(ShapeError):
        device.alloc(8)[0:8:2]


def test_double_free_and_use_after_free_are_errors(device):
    buffer = device.alloc(8)
    buffer.free()
    for use in (buffer.free, buffer.read, lambda: buffer.fill(0.0)):
        with pytest.raises(FreedBufferError, match="it has been freed"):
            use()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (-1, np.float32),
        ((2, -3), np.int8),
        ((2, 2.5), np.float32),
        (2.5, np.float32),
        ("abc", np.float32),
        (None, np.float32),
        (4, object),
        (4, "foo"),
    ],
)
def test_what_cannot_be_allocated_is_refused(device, shape, dtype):
    free = device.free_bytes
    with pytest.raises(ArgumentError):
        device.alloc(shape, dtype)
    assert device.free_bytes == free
    buffer = device.alloc((np.int64(2), 3))
    assert buffer.shape == (2, 3)
    assert type(buffer.address) is int


@pytest.mark.parametrize("array", [[1.0] * 8, 1.0, None, "a"])
def test_only_arrays_are_copied(device, array):
    buffer = device.alloc(8)
    with pytest.raises(DtypeError, match="must be array of float32"):
        buffer.write(array)
    if array is not None:
        with pytest.raises(DtypeError, match="must be array of float32"):
            buffer.read(out=array)


def test_an_array_that_cannot_be_written_is_refused(device):
    buffer = device.alloc(8)
    buffer.fill(1.0)
    out = np.zeros(8, np.float32)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="writeable"):
        buffer.read(out)
    assert not out.any()
    with pytest.raises(ArgumentError, match="cannot fill"):
        buffer.fill("a")


@pytest.mark.parametrize("part", [3, "a", slice(1.5, 3), slice(0, "b"), (1, 2)])
def test_only_slices_of_integers_are_views(device, part):
    with pytest.raises(ArgumentError, match=r"must be (a slice|integers)"):
        device.alloc(8)[part]


def test_a_full_device_says_how_much_is_left_and_recovers(device):
    first = device.alloc(8000)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        device.alloc(10000)
    assert caught.value.requested == 40000
    assert caught.value.largest < 40000
    first.free()
    device.alloc(10000).fill(1.0)


def test_freed_memory_is_all_there_again(device):
    free = device.free_bytes
    buffers = [device.alloc(n) for n in (1, 16, 17, 300)]
    for buffer in (buffers[2], buffers[0], buffers[3], buffers[1]):
        buffer.free()
    assert device.free_bytes == free


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_pieces_are_aligned_apart_and_within_memory(actions):
    allocator = Allocator(1 << 16)
    live: list[tuple[int, int]] = []
    refused: list[tuple[int, int]] = []
    for release, number in actions:
        if release and live:
            allocator.release(*live.pop(number % len(live)))
            continue
        try:
            piece = (allocator.allocate(number), number)
        except OutOfDeviceMemoryError as error:
            refused.append((number, error.largest))
            continue
        live.append(piece)
        extents = sorted(live)
        for address, size in extents:
            assert address % LINE_BYTES == 0
            assert LINE_BYTES <= address <= (1 << 16) - size
        for (address, size), (following, _) in itertools.pairwise(extents):
            assert -(-(address + size) // LINE_BYTES) * LINE_BYTES + LINE_BYTES <= following
    assert all(largest < number for number, largest in refused)
    for piece in live:
        allocator.release(*piece)
    assert allocator.free_bytes == (1 << 16) - LINE_BYTES
