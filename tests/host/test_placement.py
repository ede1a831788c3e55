"""Placement: extents, and the grouping of extents into runs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nearstep
from nearstep import blockwise
from nearstep.device import Device
from nearstep.errors import ArgumentError, OutOfDeviceMemoryError, ShapeError
from nearstep.placement import ARRAYS, Placement, Segment


@pytest.fixture
def device() -> Iterator[Device]:
    with nearstep.open("golden:axdimm?engine=numpy&memory_bytes=1MiB") as opened:
        yield opened


def test_extents_start_on_lines_and_are_zero(device):
    extents = Placement(device).place([1, 16, 17, 0, 100])
    for extent in extents:
        for name in ARRAYS:
            assert all(view.address % 64 == 0 for view in extent.views(name))
            np.testing.assert_array_equal(extent.read(name), np.zeros(extent.count, np.float32))


def test_extents_do_not_share_elements(device):
    extents = Placement(device).place([5, 40, 1])
    for number, extent in enumerate(extents):
        for array, name in enumerate(ARRAYS):
            extent.write(name, np.full(extent.count, 10 * number + array, np.float32))
    for number, extent in enumerate(extents):
        for array, name in enumerate(ARRAYS):
            assert set(extent.read(name)) == {10 * number + array}


def test_neighbours_with_equal_keys_are_one_launch(device):
    placement = Placement(device)
    extents = placement.place([10, 20, 30, 40])
    keys = ["a", "a", "b", "b"]
    launches = list(placement.launches(zip(extents, keys, strict=True)))
    assert [(each.key, list(each.extents)) for each in launches] == [
        ("a", extents[:2]),
        ("b", extents[2:]),
    ]
    assert launches[0].count == 16 + 20
    assert launches[0].parts[0]["v"].address == extents[0].views("v")[0].address


def test_a_gap_or_another_segment_ends_a_launch(device):
    placement = Placement(device)
    first, second = placement.place([16, 16, 16]), placement.place([16])
    chosen = [second[0], first[2], first[0]]
    launches = list(placement.launches((extent, 1) for extent in chosen))
    assert [list(each.extents) for each in launches] == [[first[0]], [first[2]], [second[0]]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    data=st.data(),
)
def test_launches_cover_what_was_asked_for_and_nothing_else(device, counts, data):
    placement = Placement(device)
    extents = placement.place(counts)
    keys = [data.draw(st.sampled_from("ab-")) for _ in counts]
    keyed = [(e, k) for e, k in zip(extents, keys, strict=True) if k != "-"]
    launches = list(placement.launches(keyed))
    covered = [(e.start, each.key) for each in launches for e in each.extents]
    assert covered == [(e.start, k) for e, k in keyed if e.count]
    for each in launches:
        inside = {e.start for e in each.extents}
        start = each.extents[0].start
        for extent, key in zip(extents, keys, strict=True):
            if extent.count and start <= extent.start < start + each.count:
                assert extent.start in inside
                assert key == each.key
    placement.free()


def test_free_gives_all_memory_back_and_may_be_repeated(device):
    free = device.free_bytes
    placement = Placement(device)
    placement.place([100, 200])
    placement.free()
    placement.free()
    assert device.free_bytes == free


def test_what_does_not_fit_leaves_nothing_allocated(device):
    free = device.free_bytes
    with pytest.raises(OutOfDeviceMemoryError):
        Placement(device).place([100_000])
    with pytest.raises(ArgumentError):
        Placement(device).place([-1])
    assert device.free_bytes == free


def test_arrays_are_those_asked_for_filled_with_their_values(device):
    placement = Placement(device)
    extents = placement.place([10, 20], {"p": 0.0, "v": 0.5})
    extents[0].segment.reserve({"v": 2.0, "m": 1.5})
    (launch,) = placement.launches((extent, 0) for extent in extents)
    assert [list(part) for part in launch.parts.values()] == [["p", "v", "m"]]
    for name, value in (("p", 0.0), ("v", 0.5), ("m", 1.5)):
        np.testing.assert_array_equal(extents[1].read(name), np.full(20, value, np.float32))


def test_arrays_that_do_not_fit_later_leave_what_there_was(device):
    (extent,) = Placement(device).place([100_000], {"p": 1.0})
    free = device.free_bytes
    with pytest.raises(OutOfDeviceMemoryError):
        extent.segment.reserve({"m": 0.0, "v": 0.0})
    assert device.free_bytes == free
    assert list(extent.segment.arenas[0]) == ["p"]
    assert set(extent.read("p")) == {1.0}


def test_freeing_after_the_device_is_closed_is_harmless(device):
    placement = Placement(device)
    placement.place([10])
    device.close()
    placement.free()


BLOCKWISE = "golden:axdimm?state_format=dynamic8&block_bytes=2048&memory_bytes=4MiB"
SIZES = (1, 255, 256, 257, 0, 512, 513, 4095, 4097, 10_000)


def blockwise_device(channels: int) -> Device:
    return nearstep.open(f"{BLOCKWISE}&channels={channels}" if channels > 1 else BLOCKWISE)


def placed(device: Device, arrays: dict[str, float], **more: object) -> tuple[Placement, list]:
    """Parameters of `SIZES` with their states in 8 bits."""
    placement = Placement(device)
    quantized = {"m": "dynamic8", "v": "dynamic8u"}
    return placement, placement.place(SIZES, arrays, line=512, quantized=quantized, **more)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_an_array_in_8_bits_has_its_initial_value_as_codes_and_scales(channels):
    with blockwise_device(channels) as device:
        free = device.free_bytes
        placement, extents = placed(device, {"p": 0.0, "m": 0.0, "v": 0.0})
        extents[0].segment.reserve({"m": 0.0, "g": 1.0})
        for extent in extents:
            for name, signed in (("m", True), ("v", False)):
                full = np.zeros(extent.count, np.float32)
                wanted = blockwise.pack(
                    blockwise.quantize(full, signed=signed), device.block_layout
                )
                assert extent.size(name) == wanted.size
                found = blockwise.unpack(extent.read(name), device.block_layout)
                assert blockwise.pack(found, device.block_layout).tobytes() == wanted.tobytes()
        placement.free()
        assert device.free_bytes == free
        _, extents = placed(device, {"p": 0.0, "v": 0.25})
        for extent in extents:
            found = blockwise.unpack(extent.read("v"), device.block_layout)
            assert set(blockwise.dequantize(found, signed=False)) <= {0.25}
            assert found.codes.size == extent.count


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_bytes_of_an_array_in_8_bits_are_those_on_one_channel(channels):
    print("seed 7")
    rng = np.random.default_rng(7)
    with blockwise_device(channels) as device:
        _, extents = placed(device, {"p": 0.0, "m": 0.0, "v": 0.0})
        written = []
        for extent in extents:
            data = {name: rng.integers(0, 256, extent.size(name), np.uint8) for name in "mv"}
            for name, each in data.items():
                extent.write(name, each)
            written.append(data)
        block, compared = device.block_layout.nbytes(512), 0
        for extent, data in zip(extents, written, strict=True):
            assert extent.start % 512 == 0
            for name, each in data.items():
                assert extent.read(name).tobytes() == each.tobytes()
                compared += each.size
                for number, at in enumerate(range(0, each.size, block)):
                    place = extent.start // 512 + number
                    arena = extent.segment.arenas[place % channels][name]
                    here = place // channels * block
                    piece = each[at : at + block]
                    assert arena[here : here + piece.size].read().tobytes() == piece.tobytes()
        assert compared == 2 * sum(map(device.block_layout.nbytes, SIZES))
        with pytest.raises(ShapeError, match=r"m of .* must be \(65,\), not \(1,\)"):
            extents[0].write("m", np.zeros(1, np.uint8))
        with pytest.raises(ShapeError, match=r"m of .* must be \(65,\), not \(1,\)"):
            extents[0].read("m", np.zeros(1, np.uint8))


@pytest.mark.parametrize("channels", [1, 2])
def test_a_run_ends_behind_a_group_that_is_not_whole(channels):
    """Else the scale of the group would be of padding, too."""
    with blockwise_device(channels) as device:
        placement, extents = placed(device, {"p": 0.0, "g": 0.0, "m": 0.0, "v": 0.0})
        launches = list(placement.launches((extent, 0) for extent in extents))
        counts = [[each.count for each in launch.extents] for launch in launches]
        assert counts == [[1], [255], [256, 257], [512, 513], [4095], [4097], [10_000]]
        layout = device.block_layout
        for launch in launches:
            sizes = {
                channel: {name: buffer.size for name, buffer in part.items()}
                for channel, part in launch.parts.items()
            }
            assert sum(each["p"] for each in sizes.values()) == launch.count
            for each in sizes.values():
                assert each["g"] == each["p"]
                assert each["m"] == each["v"] == layout.nbytes(each["p"])
        assert all(
            buffer.address % 64 == 0
            for launch in launches
            for part in launch.parts.values()
            for buffer in part.values()
        )


def test_on_a_dimm_arrays_begin_in_one_bank_and_those_in_8_bits_apart():
    """16 banks of x8 parts, a beat in each."""
    with nearstep.open("golden:axdimm?channels=2&state_format=dynamic8") as device:
        segment = Segment(
            device,
            10 * 4096,
            4096,
            quantized={"m": "dynamic8", "v": "dynamic8u", "v_max": "dynamic8u"},
        )
        segment.reserve({"p": 0.0, "g": 0.0, "v": 0.0})
        segment.reserve({"m": 0.0, "v_max": 0.0})
        for arenas in segment.arenas:
            within = {name: buffer.address % (16 * 64) for name, buffer in arenas.items()}
            assert within == {"p": 0, "g": 0, "m": 192, "v": 384, "v_max": 576}
    with nearstep.open("golden:axdimm?channels=2&state_format=dynamic8") as device:
        with pytest.raises(ArgumentError, match="offset must be a multiple of 64 below align=1024"):
            device.alloc(16, align=1024, offset=1024)
        free = device.free_bytes
        buffer = device.alloc_blockwise(5000, channel=1, align=1024, offset=192)
        assert buffer.address % 1024 == 192
        buffer.free()
        assert device.free_bytes == free
