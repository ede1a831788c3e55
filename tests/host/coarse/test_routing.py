"""Routing tables, shard sizes and shards, compared with what defines them on random profiles."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nearstep.coarse.errors import ProfileError
from nearstep.coarse.routing import (
    FULL,
    SHARD_ALIGNMENT,
    Measurement,
    Profile,
    RoutingTable,
    partition,
    routing_table,
    shard_bytes,
)
from nearstep.errors import ArgumentError

same_each_time = settings(max_examples=100, deadline=None, derandomize=True, database=None)
KIB, MIB = 1 << 10, 1 << 20


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Of few sizes and coarse times, so that proxies often tie and curves cross more than once."""
    sizes = sorted(draw(st.sets(st.integers(1, 60), min_size=2, max_size=5)))
    count = draw(st.integers(1, 4))
    return Profile.of(
        {
            proxy: {size: draw(st.integers(1, 6)) / 4 for size in sizes}
            for proxy in draw(st.permutations(range(count)))
        }
    )


def seconds_at(measured: list[Measurement], size: Fraction) -> Fraction:
    """On the lines between measurements."""
    for low, high in pairwise(measured):
        if low.nbytes <= size <= high.nbytes:
            share = (size - low.nbytes) / (high.nbytes - low.nbytes)
            return Fraction(low.seconds) * (1 - share) + Fraction(high.seconds) * share
    raise AssertionError(size)


def test_a_table_is_what_defines_it() -> None:
    kinds: Counter[str] = Counter()

    @same_each_time
    @given(profile=profiles())
    def each(profile: Profile) -> None:
        table = routing_table(profile)
        curves = {proxy: list(measured) for proxy, measured in profile.proxies.items()}
        near, far = curves[table.latency_proxy], curves[table.bandwidth_proxy]
        assert all(near[0].seconds <= other[0].seconds for other in curves.values())
        assert all(far[-1].bytes_per_s >= other[-1].bytes_per_s for other in curves.values())
        if table.latency_proxy == table.bandwidth_proxy:
            assert table.threshold_bytes == 0
            kinds["one proxy"] += 1
            return
        assert near[0].seconds < far[0].seconds
        assert near[-1].seconds > far[-1].seconds
        low, high = profile.sizes[0], profile.sizes[-1]
        assert low <= table.threshold_bytes < high
        for size in range(table.threshold_bytes + 1, high + 1):
            assert seconds_at(far, Fraction(size)) <= seconds_at(near, Fraction(size))
            assert table.proxy_of(size) == table.bandwidth_proxy
        for size in range(low, table.threshold_bytes + 1):
            assert table.proxy_of(size) == table.latency_proxy
        # equal somewhere within the byte of the threshold, and the other way round before it
        gap = [
            seconds_at(far, Fraction(size)) - seconds_at(near, Fraction(size))
            for size in (table.threshold_bytes, table.threshold_bytes + 1)
        ]
        assert gap[0] >= 0 >= gap[1]
        kinds["two proxies"] += 1

    each()
    assert kinds["one proxy"] >= 10, kinds
    assert kinds["two proxies"] >= 20, kinds


def test_the_order_of_proxies_in_a_profile_changes_nothing() -> None:
    checks = Counter[bool]()

    @same_each_time
    @given(profile=profiles())
    def each(profile: Profile) -> None:
        turned = Profile(dict(reversed(profile.proxies.items())))
        assert routing_table(turned) == routing_table(profile)
        assert shard_bytes(turned) == shard_bytes(profile)
        checks[len(profile.proxies) > 1] += 1

    each()
    assert checks[True] >= 30, checks


def test_times_that_are_equal_at_one_size_give_that_size() -> None:
    near = {KIB: 1e-6, 64 * KIB: 9e-6, MIB: 100e-6}
    far = {KIB: 5e-6, 64 * KIB: 9e-6, MIB: 60e-6}
    table = routing_table(Profile.of({4: near, 7: far}))
    assert table == RoutingTable(threshold_bytes=64 * KIB, latency_proxy=4, bandwidth_proxy=7)
    assert table.proxy_of(64 * KIB) == 4
    assert table.proxy_of(64 * KIB + 1) == 7
    assert table.proxy_of(0) == 4
    assert table.proxy_of(1 << 40) == 7


def test_ties_go_to_the_better_one_otherwise_then_to_the_lower_number() -> None:
    same = {1: 1.0, 2: 2.0}
    assert Profile.of({3: same, 1: same}).latency_proxy == 1
    assert Profile.of({3: same, 1: same}).bandwidth_proxy == 1
    quick, slow = {1: 1.0, 2: 1.5}, {1: 1.25, 2: 2.0}
    assert Profile.of({0: same, 1: quick}).latency_proxy == 1
    assert Profile.of({0: slow, 1: same}).bandwidth_proxy == 1
    for profile in ({0: same, 1: quick}, {0: slow, 1: same}):
        assert routing_table(Profile.of(profile)).threshold_bytes == 0


@same_each_time
@given(profile=profiles(), fraction=st.floats(0.01, 1))
def test_shards_are_the_smallest_size_at_the_full_rate(profile: Profile, fraction: float) -> None:
    measured = profile.proxies[profile.bandwidth_proxy]
    found = shard_bytes(profile, fraction)
    rates = {each.nbytes: each.bytes_per_s for each in measured}
    least = Fraction(fraction) * max(rates.values())
    full = [size for size, rate in rates.items() if rate >= least]
    assert found == min(full)


def test_latency_and_rate_give_the_knee() -> None:
    def seconds(size: int) -> float:
        return 10e-6 + size / 10e9

    profile = Profile.of({0: {4**i * KIB: seconds(4**i * KIB) for i in range(9)}})
    assert shard_bytes(profile) == 4 * MIB  # 1 MiB has 91 % of the highest rate
    assert shard_bytes(profile, 0.9) == MIB
    assert shard_bytes(profile, 1.0) == 64 * MIB
    assert FULL == 0.95


@same_each_time
@given(nbytes=st.integers(0, 640_000), size=st.integers(1, 96_000))
@example(nbytes=2048, size=2048)
@example(nbytes=6143, size=2048)
@example(nbytes=2047, size=1)
@example(nbytes=1 << 45, size=1 << 44)
def test_shards_cover_a_tensor_and_none_is_smaller(nbytes: int, size: int) -> None:
    shards = partition(nbytes, size)
    assert shards[0].offset == 0
    assert sum(each.nbytes for each in shards) == nbytes
    for before, after in pairwise(shards):
        assert after.offset == before.offset + before.nbytes
        assert after.offset % SHARD_ALIGNMENT == 0
    sizes = [each.nbytes for each in shards]
    assert max(sizes) - min(sizes) < 2 * SHARD_ALIGNMENT
    least = math.ceil(size / SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    if nbytes >= least:
        assert min(sizes) >= least >= size
    assert len(shards) == max(1, nbytes // least)  # no more would do


@pytest.mark.parametrize(
    ("proxies", "proxy", "message"),
    [
        ({}, None, "at least one proxy"),
        ({2: [Measurement(1, 1.0)]}, 2, "two sizes or more, not 1"),
        ({0: [Measurement(2, 1.0), Measurement(1, 1.0)]}, 0, r"ascend, not \[2, 1\]"),
        ({0: [Measurement(1, 1.0), Measurement(1, 1.0)]}, 0, r"ascend, not \[1, 1\]"),
        ({0: [Measurement(0, 1.0), Measurement(1, 1.0)]}, 0, "integers above 0"),
        ({0: [Measurement(True, 1.0), Measurement(2, 1.0)]}, 0, "integers above 0"),
        ({0: [Measurement(1.5, 1.0), Measurement(2, 1.0)]}, 0, "integers above 0"),
        ({0: [Measurement(1, 0.0), Measurement(2, 1.0)]}, 0, "above 0 and finite"),
        ({0: [Measurement(1, 1.0), Measurement(2, math.inf)]}, 0, "above 0 and finite"),
        ({0: [Measurement(1, 1.0), Measurement(2, math.nan)]}, 0, "above 0 and finite"),
        (
            {
                5: [Measurement(1, 1.0), Measurement(2, 1.0)],
                6: [Measurement(1, 1.0), Measurement(3, 1.0)],
            },
            6,
            r"those of the first, \[1, 2\], not \[1, 3\]",
        ),
    ],
)
def test_a_bad_profile_is_refused(proxies, proxy, message) -> None:
    with pytest.raises(ProfileError, match=message) as found:
        Profile(proxies)
    assert found.value.proxy == proxy


def test_bad_numbers_are_refused() -> None:
    table = RoutingTable(threshold_bytes=1, latency_proxy=0, bandwidth_proxy=1)
    profile = Profile.of({0: {1: 1.0, 2: 1.0}})
    calls = [
        lambda: RoutingTable(threshold_bytes=-1, latency_proxy=0, bandwidth_proxy=0),
        lambda: RoutingTable(threshold_bytes=0.5, latency_proxy=0, bandwidth_proxy=0),
        lambda: table.proxy_of(-1),
        lambda: table.proxy_of(True),
        lambda: partition(-1, 1),
        lambda: partition(1.0, 1),
        lambda: partition(1, 0),
        lambda: shard_bytes(profile, 0.0),
        lambda: shard_bytes(profile, 1.01),
        lambda: shard_bytes(profile, math.nan),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="must be"):
            call()
