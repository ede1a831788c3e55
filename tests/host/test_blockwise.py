"""`nearstep.blockwise` beside the golden model, which shares no code with it; bytes of arrays in
devices."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep import blockwise
from nearstep.blockwise import BlockLayout, Blockwise
from nearstep.errors import ArgumentError, DtypeError, ShapeError
from nearstep_sim.golden import blockwise as golden
from nearstep_spec.blockwise import dynamic_map, thresholds

SIGNS = [True, False]
COUNTS = (0, 1, 255, 256, 257, 511, 512, 513, 4095, 4097, 10_000)
LAYOUTS = [BlockLayout(256, 16), BlockLayout(512, 64), BlockLayout(4096, 64)]
SPECIAL = np.array(
    [0x0000_0000, 0x8000_0000, 0x0000_0001, 0x807F_FFFF, 0x7F7F_FFFF, 0xFF7F_FFFF, 0x7F80_0000,
     0xFF80_0000, 0x7FC0_0000, 0xFFC0_1234, 0x7F80_0001, 0x2B8C_BCCC, 0x2B8C_BCCD, 0x0080_0000],
    np.uint32,
).view(np.float32)  # fmt: skip


def same(found: Blockwise, wanted: golden.Blockwise) -> int:
    assert found.codes.dtype == np.uint8
    assert found.codes.tobytes() == wanted.codes.tobytes()
    assert found.scales.tobytes() == wanted.scales.tobytes()
    return found.codes.size


@pytest.mark.parametrize("signed", SIGNS)
@pytest.mark.parametrize("count", COUNTS)
def test_codes_and_scales_are_the_golden_models(count, signed):
    print("seed 3")
    rng = np.random.default_rng(3)
    for low in (-40, -20, 0):
        values = (rng.standard_normal(count) * 2.0 ** rng.integers(low, 3, count)).astype("f4")
        found = blockwise.quantize(values, signed=signed)
        assert same(found, golden.quantize(values, signed=signed)) == count
        back = blockwise.dequantize(found, signed=signed)
        wanted = golden.dequantize(golden.Blockwise(*found), signed=signed)
        assert back.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("signed", SIGNS)
def test_every_special_value_beside_every_other(signed):
    """A group of each pair, of one value and another everywhere else, whole and short."""
    for size in (1, 2, 256):
        groups = np.empty((SPECIAL.size, SPECIAL.size, 256), np.float32)
        groups[:] = SPECIAL[:, None, None]
        groups[:, :, :size:3] = SPECIAL[None, :, None]
        values = groups.reshape(-1)
        found = blockwise.quantize(values, signed=signed)
        assert same(found, golden.quantize(values, signed=signed)) == values.size
        back = blockwise.dequantize(found, signed=signed)
        assert (
            back.tobytes() == golden.dequantize(golden.Blockwise(*found), signed=signed).tobytes()
        )
        assert np.isnan(back).any()
        assert set(back[np.isnan(back)].view(np.uint32)) == {0x7FC0_0000}
    for value in SPECIAL:
        alone = np.array([value])
        same(blockwise.quantize(alone, signed=signed), golden.quantize(alone, signed=signed))


@pytest.mark.parametrize("signed", SIGNS)
def test_quotients_at_the_thresholds_and_next_to_them(signed):
    edges = np.array(thresholds(signed=signed), np.uint32).view(np.float32)
    near = [edges, np.nextafter(edges, np.float32(-2)), np.nextafter(edges, np.float32(2))]
    quotients = np.concatenate(near)
    quotients = quotients[np.abs(quotients) <= 1]
    groups = np.ones((-(-quotients.size // 255), 256), np.float32)
    groups[:, 1:].reshape(-1)[: quotients.size] = 0
    rest = np.zeros(groups.shape[0] * 255, np.float32)
    rest[: quotients.size] = quotients
    groups[:, 1:] = rest.reshape(-1, 255)
    values = groups.reshape(-1)
    same(blockwise.quantize(values, signed=signed), golden.quantize(values, signed=signed))


@pytest.mark.parametrize("signed", SIGNS)
def test_every_code_with_every_kind_of_scale(signed):
    scales = np.concatenate([SPECIAL, np.float32([1e-12, 1.0, 3.7, 1e38])])
    given = Blockwise(np.tile(np.arange(256, dtype=np.uint8), scales.size), scales)
    found = blockwise.dequantize(given, signed=signed)
    assert found.tobytes() == golden.dequantize(golden.Blockwise(*given), signed=signed).tobytes()
    table = np.array(dynamic_map(signed=signed), np.uint32)
    of_one = found.reshape(-1, 256)[np.flatnonzero(scales == 1.0)[0]]
    assert of_one.view(np.uint32).tolist() == table.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", COUNTS)
def test_bytes_are_scales_and_codes_of_one_block_after_the_other(count, layout):
    print("seed 4")
    rng = np.random.default_rng(4)
    given = Blockwise(
        rng.integers(0, 256, count, np.uint8),
        rng.standard_normal(blockwise.groups(count)).astype(np.float32),
    )
    data = blockwise.pack(given, layout)
    expected = bytearray()
    for start in range(0, count, layout.elements):
        stop = min(start + layout.elements, count)
        own = given.scales[start // 256 : -(-stop // 256)].tobytes()
        expected += own.ljust(layout.scale_bytes, b"\0") + given.codes[start:stop].tobytes()
    assert data.tobytes() == bytes(expected)
    assert data.size == layout.nbytes(count)
    back = blockwise.unpack(data, layout)
    assert [each.tobytes() for each in back] == [each.tobytes() for each in given]


def test_arrays_with_strides_are_as_good():
    print("seed 5")
    values = np.random.default_rng(5).standard_normal(2000).astype(np.float32)[::2]
    whole = blockwise.quantize(values.copy(), signed=True)
    codes, scales = np.repeat(whole.codes, 2)[::2], np.repeat(whole.scales, 2)[::2]
    assert not codes.flags.c_contiguous
    assert not scales.flags.c_contiguous
    same(blockwise.quantize(values, signed=True), golden.Blockwise(*whole))
    spread = Blockwise(codes, scales)
    back = blockwise.dequantize(spread, signed=True)
    assert back.tobytes() == blockwise.dequantize(whole, signed=True).tobytes()
    for layout in LAYOUTS:
        data = blockwise.pack(spread, layout)
        assert data.tobytes() == blockwise.pack(whole, layout).tobytes()
        same(blockwise.unpack(np.repeat(data, 2)[::2], layout), golden.Blockwise(*whole))


def test_what_is_no_such_array_is_refused():
    layout = LAYOUTS[1]
    good = blockwise.quantize(np.ones(300, np.float32), signed=True)
    with pytest.raises(DtypeError, match="values: dtype must be float32, not float64"):
        blockwise.quantize(np.ones(3), signed=True)
    with pytest.raises(DtypeError, match="values: dtype must be array of float32, not list"):
        blockwise.quantize([1.0], signed=True)
    with pytest.raises(ShapeError, match=r"values: shape must be one-dimensional, not \(2, 2\)"):
        blockwise.quantize(np.ones((2, 2), np.float32), signed=True)
    for act in (
        lambda given: blockwise.pack(given, layout),
        lambda given: blockwise.dequantize(given, signed=True),
    ):
        with pytest.raises(ShapeError, match=r"scales of 300 codes: shape must be \(2,\), not \(1"):
            act(Blockwise(good.codes, good.scales[:1]))
        with pytest.raises(DtypeError, match="codes: dtype must be uint8, not int8"):
            act(Blockwise(good.codes.view(np.int8), good.scales))
        with pytest.raises(DtypeError, match="given: dtype must be Blockwise, not ndarray"):
            act(good.codes)
    with pytest.raises(DtypeError, match="data: dtype must be uint8, not float32"):
        blockwise.unpack(np.zeros(8, np.float32), layout)
    for size in (1, 64, 576 + 1, 576 + 64):
        with pytest.raises(
            ShapeError, match=rf"not \({size},\): No array in 8 bits has {size} byt"
        ):
            blockwise.unpack(np.zeros(size, np.uint8), layout)


def test_a_device_gives_memory_for_such_an_array_if_it_has_any():
    with nearstep.open("golden:axdimm?state_format=dynamic8&block_bytes=2048") as device:
        for count in (0, 1, 512, 513):
            buffer = device.alloc_blockwise(count)
            assert (buffer.dtype, buffer.size) == (np.uint8, device.block_layout.nbytes(count))
        for count in (-1, 1.5, True, "1"):
            with pytest.raises(ArgumentError, match="count must be an integer from 0, not"):
                device.alloc_blockwise(count)
        values = np.linspace(-1, 1, 1000, dtype=np.float32)
        buffer = device.alloc_blockwise(values.size, align=4096)
        assert buffer.address % 4096 == 0
        codes = blockwise.quantize(values, signed=True)
        buffer.write(blockwise.pack(codes, device.block_layout))
        found = blockwise.unpack(buffer.read(), device.block_layout)
        assert [each.tobytes() for each in found] == [each.tobytes() for each in codes]
    with nearstep.open("golden:axdimm?state_format=bf16") as device:
        assert device.block_layout is None
        with pytest.raises(ArgumentError, match="open the device with state_format=dynamic8"):
            device.alloc_blockwise(10)
