"""Choice of a tensor's proxy and shards: pure functions of a client's measurements.

Ref: COARSE paper, sections III-E and IV-B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, Self

from nearstep.coarse.errors import ProfileError
from nearstep.errors import ArgumentError
from nearstep.scalars import check_whole, is_whole

SHARD_ALIGNMENT = 1 << 11
"""Bytes; every shard starts at a multiple, and all but a tensor's last one end at a multiple: a
border of the rings' entries in every format of the links."""

FULL = 0.95
"""Share of the highest measured rate that counts as the full rate."""


class Measurement(NamedTuple):
    """Size and time, in seconds, of a transfer between a client and a proxy."""

    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> Fraction:
        """Exact quotient of size and time."""
        return self.nbytes / Fraction(self.seconds)


def check_sizes(sizes: Sequence[int], proxy: int | None = None) -> None:
    """Check the sizes, in bytes, of a profile; `proxy` is named in errors.

    Raises
    ------
    ProfileError : fewer than two sizes, or sizes not whole, not above 0, or not ascending.
    """
    if len(sizes) < 2:
        raise ProfileError(proxy, f"there must be two sizes or more, not {len(sizes)}")
    if not all(is_whole(size) and size > 0 for size in sizes):
        raise ProfileError(proxy, f"sizes must be integers above 0, not {sizes}")
    if not all(low < high for low, high in pairwise(sizes)):
        raise ProfileError(proxy, f"sizes must ascend, not {sizes}")


def check_shard_bytes(shard_bytes: int) -> None:
    """Check the least size of a shard of a service."""
    if not is_whole(shard_bytes) or shard_bytes < 1 or shard_bytes % SHARD_ALIGNMENT:
        raise ArgumentError(
            f"shard_bytes must be a positive multiple of {SHARD_ALIGNMENT}, not {shard_bytes!r}"
        )


@dataclass(frozen=True)
class Profile:
    """A client's measurements: time by size, to each proxy.

    Parameters
    ----------
    proxies : measurements of each proxy, by its number, in ascending order of size. All proxies
        have the same sizes, at least two.

    Raises
    ------
    ProfileError : no proxy; fewer than two sizes; sizes not whole, not above 0, not ascending or
        not those of the first proxy; or a time not above 0 and finite.
    """

    proxies: Mapping[int, Sequence[Measurement]]

    def __post_init__(self) -> None:
        if not self.proxies:
            raise ProfileError(None, "there must be at least one proxy")
        for proxy, measured in self.proxies.items():
            sizes = [each.nbytes for each in measured]
            check_sizes(sizes, proxy)
            if sizes != (expected := self.sizes):
                raise ProfileError(
                    proxy, f"sizes must be those of the first, {expected}, not {sizes}"
                )
            for each in measured:
                if not 0 < each.seconds < math.inf:
                    raise ProfileError(proxy, f"seconds must be above 0 and finite, not {each}")

    @classmethod
    def of(cls, seconds: Mapping[int, Mapping[int, float]]) -> Self:
        """Return the profile of seconds by proxy and size, given in any order."""
        return cls(
            {
                proxy: tuple(Measurement(*each) for each in sorted(times.items()))
                for proxy, times in seconds.items()
            }
        )

    @property
    def sizes(self) -> list[int]:
        """Measured sizes in bytes, ascending."""
        return [each.nbytes for each in next(iter(self.proxies.values()))]

    @property
    def latency_proxy(self) -> int:
        """The proxy with the shortest time for the smallest size.

        Ties: the higher rate at the largest size, then the lowest number.
        """
        return min(self.proxies, key=lambda proxy: (*self._ends(proxy), proxy))

    @property
    def bandwidth_proxy(self) -> int:
        """The proxy with the highest rate at the largest size.

        Ties: the shorter time for the smallest size, then the lowest number.
        """
        return min(self.proxies, key=lambda proxy: (*self._ends(proxy)[::-1], proxy))

    def _ends(self, proxy: int) -> tuple[float, float]:
        measured = self.proxies[proxy]
        return measured[0].seconds, measured[-1].seconds


@dataclass(frozen=True, kw_only=True)
class RoutingTable:
    """Choice of the proxy for each of a client's tensors, by size.

    Parameters
    ----------
    threshold_bytes : larger tensors use `bandwidth_proxy`, all others `latency_proxy`.
    """

    threshold_bytes: int
    latency_proxy: int
    bandwidth_proxy: int

    def __post_init__(self) -> None:
        check_whole("threshold_bytes", self.threshold_bytes, 0)

    def proxy_of(self, nbytes: int) -> int:
        """Return the number of the proxy for a tensor of `nbytes` bytes."""
        check_whole("nbytes", nbytes, 0)
        return self.bandwidth_proxy if nbytes > self.threshold_bytes else self.latency_proxy


def routing_table(profile: Profile) -> RoutingTable:
    """Return the routing table of a client.

    The threshold S is the size from which on the bandwidth proxy is nowhere slower than the latency
    proxy, with times interpolated linearly between measurements, rounded down to whole bytes. S is
    0 if one proxy is both.
    """
    near, far = profile.latency_proxy, profile.bandwidth_proxy
    threshold = 0 if near == far else math.floor(_crossing(profile, near, far))
    return RoutingTable(threshold_bytes=threshold, latency_proxy=near, bandwidth_proxy=far)


def _crossing(profile: Profile, near: int, far: int) -> Fraction:
    """Return the smallest size from which on `far` is nowhere slower."""
    more = [
        Fraction(b.seconds) - Fraction(a.seconds)
        for a, b in zip(profile.proxies[near], profile.proxies[far], strict=True)
    ]
    last = max(i for i, each in enumerate(more) if each > 0)  # not the last one: see the profile
    low, high = profile.sizes[last], profile.sizes[last + 1]
    return low + (high - low) * more[last] / (more[last] - more[last + 1])


def shard_bytes(profile: Profile, fraction: float = FULL) -> int:
    """Return S', the smallest measured size at which the bandwidth proxy has its full rate.

    Parameters
    ----------
    fraction : share of the highest rate of any size that counts as full; above 0, at most 1.

    Raises
    ------
    ArgumentError : `fraction` is out of range.
    """
    if not 0 < fraction <= 1:
        raise ArgumentError(f"fraction must be above 0 and to 1, not {fraction!r}")
    measured = profile.proxies[profile.bandwidth_proxy]
    full = Fraction(fraction) * max(each.bytes_per_s for each in measured)
    return next(each.nbytes for each in measured if each.bytes_per_s >= full)


class Shard(NamedTuple):
    """Bytes of a tensor that are pushed, summed and pulled on their own."""

    offset: int
    nbytes: int


def partition(nbytes: int, shard_bytes: int) -> tuple[Shard, ...]:
    """Cut a tensor into shards, none smaller than `shard_bytes` unless the tensor is smaller.

    There are as many shards as possible, in order, at multiples of `SHARD_ALIGNMENT`; their sizes
    differ by less than twice that alignment. A tensor smaller than `shard_bytes`, even an empty
    one, is one shard.
    """
    check_whole("nbytes", nbytes, 0)
    check_whole("shard_bytes", shard_bytes, 1)
    units = nbytes // SHARD_ALIGNMENT
    count = max(1, units // -(-shard_bytes // SHARD_ALIGNMENT))
    each, over = divmod(units, count)
    starts = [(i * each + min(i, over)) * SHARD_ALIGNMENT for i in range(count)]
    return tuple(Shard(low, high - low) for low, high in pairwise([*starts, nbytes]))
