"""Dual synchronization: split of gradients between memory devices and workers.

Ref: COARSE paper, section III-F.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from nearstep.errors import ArgumentError
from nearstep.scalars import check_whole, is_whole

Seconds = float | Fraction


@dataclass(frozen=True, kw_only=True)
class DualInputs:
    """Inputs of the estimate of an iteration's time.

    Inputs are converted exactly, so that T_train is a fraction without rounding.

    Parameters
    ----------
    workers : p, as many as memory devices.
    nbytes : n, of all gradients.
    forward_s, backward_s : T_FP and T_BP, without synchronization.
    proxy_bytes_per_s, worker_bytes_per_s : BW_proxy and BW_GPU, of a ring of either, each way.

    Raises
    ------
    ArgumentError : p is no integer from 1, n none from 0, a time is negative or not finite, or a
        rate is not above 0 and finite.
    """

    workers: int
    nbytes: int
    forward_s: Seconds
    backward_s: Seconds
    proxy_bytes_per_s: Seconds
    worker_bytes_per_s: Seconds

    def __post_init__(self) -> None:
        check_whole("workers", self.workers, 1)
        check_whole("nbytes", self.nbytes, 0)
        for name in ("forward_s", "backward_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ArgumentError(f"{name} must be from 0 and finite, not {value!r}")
        for name in ("proxy_bytes_per_s", "worker_bytes_per_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ArgumentError(f"{name} must be above 0 and finite, not {value!r}")

    @property
    def ring(self) -> Fraction:
        """Bytes sent by each member of a ring per byte of the tensor: 2 (p - 1) / p."""
        return Fraction(2 * (self.workers - 1), self.workers)

    def proxy_s(self, nbytes: int) -> Fraction:
        """Return T_sync(proxy) of `nbytes`, in seconds."""
        return self.ring * nbytes / Fraction(self.proxy_bytes_per_s)

    def worker_s(self, nbytes: int) -> Fraction:
        """Return T_sync(GPU) of `nbytes`, in seconds."""
        return self.ring * nbytes / Fraction(self.worker_bytes_per_s)

    def train_s(self, m: int) -> Fraction:
        """Return T_train: seconds of an iteration in which the memory devices sum `m` bytes.

        Raises
        ------
        ArgumentError : `m` is no integer from 0 to n.
        """
        if not (is_whole(m) and 0 <= m <= self.nbytes):
            raise ArgumentError(f"m must be an integer from 0 to {self.nbytes}, not {m!r}")
        forward, backward = Fraction(self.forward_s), Fraction(self.backward_s)
        workers = forward + backward + self.worker_s(self.nbytes - m)
        return max(workers, forward + self.proxy_s(m))


def best_split(inputs: DualInputs) -> int:
    """Return the m, in bytes, with the shortest T_train; the smallest of equal ones.

    The workers' time decreases with m and the proxies' increases, both linearly. The lines cross at

        m* = (T_BP / c + n / BW_GPU) / (1 / BW_proxy + 1 / BW_GPU),   c = 2 (p - 1) / p

    The result is m*, rounded to the better integer; or n, if the proxies' time is shorter even at
    n, as with a long backward. With p = 1 nothing is synchronized, and m is 0.
    """
    if not inputs.ring:
        return 0
    proxy, worker = Fraction(inputs.proxy_bytes_per_s), Fraction(inputs.worker_bytes_per_s)
    crossing = Fraction(inputs.backward_s) / inputs.ring + inputs.nbytes / worker
    low = min(math.floor(crossing / (1 / proxy + 1 / worker)), inputs.nbytes)
    return min((low, min(low + 1, inputs.nbytes)), key=lambda m: (inputs.train_s(m), m))


@dataclass(frozen=True)
class Buckets:
    """Buckets of the devices and of the workers, by position in backward order.

    Attributes
    ----------
    devices : summed by the memory devices; the first ones.
    workers : summed by the workers; the others, which the next forward needs first.
    """

    devices: range
    workers: range


def best_buckets(sizes_in_backward_order: Sequence[int], inputs: DualInputs) -> Buckets:
    """Return the split of whole buckets with the shortest T_train; of equal ones the fewest for
    devices.

    Parameters
    ----------
    sizes_in_backward_order : bytes of each bucket or tensor, in backward order.

    Raises
    ------
    ArgumentError : the sum of the sizes is not n.
    """
    for size in sizes_in_backward_order:
        check_whole("sizes", size, 0)
    sums = [*accumulate(sizes_in_backward_order, initial=0)]
    if sums[-1] != inputs.nbytes:
        raise ArgumentError(f"buckets must have n = {inputs.nbytes} bytes, not {sums[-1]}")
    count = min(range(len(sums)), key=lambda i: (inputs.train_s(sums[i]), i))
    return Buckets(devices=range(count), workers=range(count, len(sums) - 1))
