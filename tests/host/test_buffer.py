"""Buffers and the allocator: bounds, types, life time."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nearstep
from nearstep.allocator import LINE_BYTES, Allocator
from nearstep.device import Device
from nearstep.errors import (
    ArgumentError,
    DtypeError,
    FreedBufferError,
    OptionError,
    OutOfBoundsError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    ShapeError,
)
from nearstep_sim.models.memory import EmulatedMemory


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


PLACES = [(LINE_BYTES, 0), (LINE_BYTES, 0), (1024, 0), (1024, 192), (1024, 960)]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5000), st.sampled_from(PLACES)), max_size=60)
)
def test_pieces_are_aligned_apart_and_within_memory(actions):
    allocator = Allocator(1 << 16)
    live: list[tuple[int, int]] = []
    refused: list[tuple[int, int]] = []
    for release, number, (align, offset) in actions:
        if release and live:
            allocator.release(*live.pop(number % len(live)))
            continue
        try:
            piece = (allocator.allocate(number, align, offset), number)
        except OutOfDeviceMemoryError as error:
            if align == LINE_BYTES:
                refused.append((number, error.largest))
            continue
        assert piece[0] % align == offset
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


TENSORS = {
    "plain": (np.float32, lambda: torch.arange(12.0).reshape(3, 4)),
    "strided": (np.float32, lambda: torch.arange(12.0).reshape(4, 3).t()),
    "expanded": (np.float32, lambda: torch.ones(1, 4).expand(3, 4)),
    "requires grad": (np.float32, lambda: torch.ones(3, 4, requires_grad=True) * 2.0),
    "parameter": (np.float32, lambda: torch.nn.Parameter(torch.ones(3, 4))),
    "negative bit": (np.float32, lambda: torch.view_as_real(torch.ones(3, 2) * 1j).flatten(1)),
    "fp16": (np.float16, lambda: torch.arange(12.0).reshape(3, 4).half() / 3),
    "bf16": (np.uint16, lambda: torch.arange(12.0).reshape(3, 4).bfloat16() / 3),
    "bf16, strided": (np.uint16, lambda: (torch.arange(12.0).reshape(4, 3).bfloat16() / 3).t()),
    "int32": (np.int32, lambda: torch.arange(12, dtype=torch.int32).reshape(3, 4)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_torch_is_written_as_it_is(device, name):
    dtype, make = TENSORS[name]
    tensor, buffer = make(), device.alloc((3, 4), dtype)
    buffer.write(tensor)
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    expected = tensor.detach().clone().resolve_neg().contiguous().view(bits).numpy()
    np.testing.assert_array_equal(buffer.read().view(expected.dtype), expected)


def test_a_lazily_conjugated_part_is_resolved(device):
    imaginary = torch.tensor([1.0 + 2.0j, 3.0 - 4.0j]).conj().imag
    assert imaginary.is_neg()
    buffer = device.alloc(2)
    buffer.write(imaginary)
    assert buffer.read().tolist() == [-2.0, 4.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(4, device="meta"), "dense, on the CPU, not torch.strided tensor on meta"),
        (torch.ones(4).to_sparse(), "not torch.sparse_coo tensor on cpu"),
        (torch.ones(4).double(), "must be float32, not float64"),
        (torch.ones(4).bfloat16(), "must be float32, not torch.bfloat16"),
        (torch.ones(4).to(torch.float8_e5m2), "must be array of float32"),
        ([1.0, 2.0, 3.0, 4.0], "must be array of float32, not list"),
        (1.0, "must be array of float32, not float"),
        (None, "must be array of float32, not NoneType"),
    ],
    ids=["meta", "sparse", "double", "bf16", "fp8", "list", "float", "none"],
)
def test_what_is_no_array_of_the_buffer_is_refused(device, value, message):
    buffer = device.alloc(4)
    buffer.fill(7.0)
    with pytest.raises(DtypeError, match=message):
        buffer.write(value)
    assert buffer.read().tolist() == [7.0] * 4


def test_an_array_that_only_numpy_can_take_is_written(device):
    class Wrapped:
        def __array__(self, dtype=None, copy=None):
            return np.arange(4, dtype=np.float32)

    buffer = device.alloc(4)
    buffer.write(Wrapped())
    assert buffer.read().tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        (np.float32, 1e300, "range of float32"),
        (np.float32, -1e39, "range of float32"),
        (np.float32, 10**40, "range of float32"),
        (np.float32, np.float64(3.5e38), "range of float32"),
        (np.float16, 65520.0, "range of float16"),
        (np.float32, "0.5", "must be a real number"),
        (np.float32, 1j, "must be a real number"),
        (np.uint8, 256, "cannot fill"),
        (np.uint8, -1, "cannot fill"),
        (np.int32, 1.5, "must be a value of int32"),
        (np.int32, float("nan"), "cannot fill"),
    ],
)
def test_a_number_that_the_elements_cannot_hold_is_refused(device, dtype, value, message):
    buffer = device.alloc(4, dtype)
    buffer.fill(7)
    with pytest.raises(ArgumentError, match=message):
        buffer.fill(value)
    assert buffer.read().tolist() == [7] * 4


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.float32, float("inf")),
        (np.float32, -float("inf")),
        (np.float32, 3.4028235e38),
        (np.float32, 3.40282356e38),  # rounds to the largest
        (np.float32, 1e-60),
        (np.float16, 65519.0),
        (np.uint8, 255),
        (np.int32, 2.0),
        (np.bool_, True),
    ],
)
def test_a_number_that_they_can_hold_is_rounded(device, dtype, value):
    buffer = device.alloc(4, dtype)
    buffer.fill(value)
    with np.errstate(over="ignore"):
        assert buffer.read().tolist() == [np.array(value).astype(dtype)] * 4


@pytest.mark.parametrize("dims", [True, (2, True), np.True_])
def test_a_truth_value_is_no_dimension(device, dims):
    with pytest.raises(ArgumentError, match="shape must be an integer"):
        device.alloc(dims)
    with pytest.raises(ArgumentError, match="bounds must be integers"):
        device.alloc(4)[True:]


def test_memory_that_is_full_says_how_to_get_more(device):
    with pytest.raises(OutOfDeviceMemoryError, match="open the device with more memory: memory_by"):
        device.alloc(1 << 20)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("axdimm", 16 << 30), ("axdimm?channels=2", 2 * ((8 << 30) - 8192)), ("smartssd", 4 << 30)],
)
def test_memory_is_sized_by_the_device_and_taken_as_it_is_used(name, nbytes):
    """Two processes of this size at once would otherwise not run here."""
    with nearstep.open(f"golden:{name}") as device:
        assert device.capacity_bytes == nbytes
        before = resident()
        last = device.channel_count - 1
        buffers = [device.alloc(1 << 28, channel=last) for _ in range(3)]
        buffers[2][-64 + (1 << 28) :].fill(5.0)
        assert buffers[2][-64 + (1 << 28) :].read().tolist() == [5.0] * 64
        for buffer in buffers:
            buffer.free()
        assert resident() - before < 128 << 20


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


NAMES = ("golden:axdimm", "golden:smartssd", "golden:coarse", "sim:axdimm")


@pytest.mark.parametrize("size", ["2TiB", "2048GiB"])
@pytest.mark.parametrize("name", NAMES)
def test_more_memory_than_there_can_be_is_a_typed_error(name, size):
    """A COARSE device can have 1 TiB, which a host that overcommits has."""
    with pytest.raises(OptionError, match="memory_bytes"):
        nearstep.open(f"{name}?memory_bytes={size}").close()


def test_memory_that_the_host_has_not_is_a_typed_error(monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refused)
    with pytest.raises(OutOfHostMemoryError, match=r"cannot emulate 1024 bytes.*\(memory_bytes"):
        EmulatedMemory(1024)
    with pytest.raises(OutOfHostMemoryError, match=r"cannot emulate \d+ bytes.*\(memory_bytes"):
        nearstep.open("golden:coarse?memory_bytes=1TiB")
