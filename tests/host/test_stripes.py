"""Stripes: what of an array lies on which channel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nearstep
from nearstep.placement import ARRAYS, Placement
from nearstep.stripes import Stripes

BLOCK = 128
URL = "golden:axdimm?engine=numpy&channels={}&block_bytes=512&memory_bytes=4MiB"


@given(
    block=st.integers(1, 20),
    channels=st.sampled_from([1, 2, 4]),
    start=st.integers(0, 300),
    count=st.integers(0, 300),
)
def test_every_element_is_on_the_channel_of_its_block_and_comes_back(block, channels, start, count):
    stripes = Stripes(block, channels)
    elements = np.arange(start, start + count)
    out = np.full(count, -1)
    seen = 0
    for channel in range(channels):
        part = stripes.gather(elements, start, channel)
        first, last = stripes.span(start, start + count, channel)
        assert part.size == last - first
        assert [(each // block) % channels for each in part] == [channel] * part.size
        local = [each // (block * channels) * block + each % block for each in part]
        assert local == list(range(first, last))
        assert [each.tolist() for each in stripes.locate(part)] == [[channel] * part.size, local]
        stripes.scatter(part, out, start, channel)
        seen += part.size
    assert seen == count
    np.testing.assert_array_equal(out, elements)


@given(st.integers(1, 10_000), st.integers(1, 500), st.sampled_from([2, 4]))
def test_no_array_loads_a_channel_by_more_than_a_block_above_another(size, block, channels):
    shares = [Stripes(block, channels).before(size, channel) for channel in range(channels)]
    assert sum(shares) == size
    assert max(shares) - min(shares) <= block


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_extents_keep_their_contents_apart_on_every_channel(channels):
    counts = [5, 1000, 1, 0, 4 * BLOCK, 77]
    with nearstep.open(URL.format(channels)) as device:
        extents = Placement(device).place(counts)
        rng = np.random.default_rng(3)
        data = {
            (number, name): rng.standard_normal(extent.count).astype(np.float32)
            for number, extent in enumerate(extents)
            for name in ARRAYS
        }
        for (number, name), array in data.items():
            extents[number].write(name, array)
        for (number, name), array in data.items():
            np.testing.assert_array_equal(extents[number].read(name), array)
        used = {device.channel_of(view) for view in extents[1].views("p")}
        assert used == set(range(channels))
        assert len(extents[0].views("p")) == 1


@pytest.mark.parametrize("channels", [2, 4])
def test_a_launch_has_a_part_for_each_channel_and_arrays_in_the_same_bank(channels):
    with nearstep.open(URL.format(channels)) as device:
        placement = Placement(device)
        extents = placement.place([3000, 1000])
        (launch,) = placement.launches((extent, 0) for extent in extents)
        assert launch.count == extents[1].start + 1000
        assert len(launch.parts) == channels
        assert sum(part["p"].size for part in launch.parts.values()) == launch.count
        for part in launch.parts.values():
            assert len({part[name].address % 1024 for name in ARRAYS}) == 1
            assert len({device.channel_of(part[name]) for name in ARRAYS}) == 1
