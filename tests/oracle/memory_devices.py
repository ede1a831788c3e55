"""COARSE memory devices in numpy alone, from the paper: what every device holds after each command.

Nothing of nearstep is used, and no arithmetic of float32 or float16: values are float64, in which
sums and products of two numbers of 24 bits are exact, or rounded so that a second rounding to 24
bits or fewer gives what one would (53 >= 2 x 24 + 2).

Ref: COARSE paper, section IV-A and figure 11 (rings of sync cores, chunks and entries), IV-C
(snapshots); Figueroa, When is double rounding innocuous?, 1995; IEEE 754-2019, 4.3.1 and 9.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Bits = NDArray[np.uint32]

NAN = 0x7FC0_0000
LINE = 16  # elements of a line of DRAM: what a sync core reads and writes at once


class Format(NamedTuple):
    """Digits of a significand, least exponent of a normal number, greatest exponent, and bytes."""

    digits: int
    least: int
    greatest: int
    nbytes: int


FORMATS = {
    "fp32": Format(24, -126, 127, 4),
    "fp16": Format(11, -14, 15, 2),
    "bf16": Format(8, -126, 127, 2),
}


def rounded(x: F64, wanted: Format) -> F64:
    """`x` rounded to the nearest number of a format, ties to the even one; too much is infinite."""
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))
    quantum = np.exp2(np.maximum(exponent - 1, wanted.least) - (wanted.digits - 1.0))
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.rint(x / quantum) * quantum
    most = (2.0 - 2.0 ** (1 - wanted.digits)) * 2.0**wanted.greatest
    return np.where(np.abs(near) > most, np.copysign(np.inf, x), near)


def numbers(bits: Bits) -> F64:
    """Patterns of binary32 as float64."""
    magnitude = (bits & 0x7FFF_FFFF).astype(np.int64)
    exponent, fraction = magnitude >> 23, magnitude & 0x7F_FFFF
    normal = np.ldexp((fraction | np.where(exponent > 0, 1 << 23, 0)).astype(np.float64),
                      np.maximum(exponent, 1).astype(np.int32) - 150)  # fmt: skip
    special = np.where(fraction == 0, np.inf, np.nan)
    return np.copysign(np.where(exponent == 255, special, normal), np.where(bits >> 31, -1.0, 1.0))


def patterns(x: F64) -> Bits:
    """Numbers of binary32 in float64 as patterns; a NaN is the default quiet NaN."""
    bits = np.abs(np.where(np.isfinite(x), x, 0.0))
    _, exponent = np.frexp(bits)
    power = np.maximum(exponent - 1, -126)
    significand = np.ldexp(bits, (23 - power).astype(np.int32)).astype(np.int64)
    found = np.where(
        significand >> 23, (power + 127) << 23 | (significand & 0x7F_FFFF), significand
    )
    found = np.where(np.isinf(x), 0x7F80_0000, found) | np.where(np.signbit(x), 1 << 31, 0)
    return np.where(np.isnan(x), NAN, found).astype(np.uint32)


def combined(operation: str, a: F64, b: F64) -> F64:
    """A sum, or the greater of two: NaN if either is, +0 above -0."""
    if operation != "max":
        with np.errstate(invalid="ignore", over="ignore"):
            return rounded(a + b, FORMATS["fp32"])
    greater = np.where((a > b) | ((a == b) & ~np.signbit(a)), a, b)
    return np.where(np.isnan(a) | np.isnan(b), np.nan, greater)


@dataclass
class Ring:
    """A group of sync cores, one on each device.

    Attributes
    ----------
    devices : in the order in which the ring visits them.
    entry_bytes : of the buffers, and of what a link carries at once.
    """

    devices: Sequence[int]
    entry_bytes: int

    def run(self, tensors: Sequence[F64], operation: str, wire: str, scale: float) -> list[F64]:
        """What each device holds in the end, in the order of `tensors`."""
        results = [np.zeros_like(each) for each in tensors]
        size, members = len(tensors[0]), len(self.devices)
        chunk = members * (self.entry_bytes // FORMATS[wire].nbytes)
        for start in range(0, size, chunk):
            lines = -(-min(chunk, size - start) // LINE)
            part = -(-lines // members) * LINE
            self._chunk(tensors, results, (start, part, size), (operation, wire, scale))
        return results

    def _chunk(
        self,
        tensors: Sequence[F64],
        results: list[F64],
        place: tuple[int, int, int],
        job: tuple[str, str, float],
    ) -> None:
        """Iterations of figure 11c: all send an entry to the next, receive one, and combine it."""
        (start, part, size), (operation, wire, scale) = place, job
        members = len(self.devices)

        def entry(number: int) -> slice:
            first = start + number % members * part
            return slice(min(first, size), min(first + part, size))

        last = members - 1
        sent = [
            rounded(tensors[self.devices[place]][entry(place)], FORMATS[wire])
            for place in range(members)
        ]
        for iteration in range(1, 2 * members - 1):
            received = [sent[place - 1] for place in range(members)]
            for place, device in enumerate(self.devices):
                where = entry(place - iteration)
                value = received[place]
                if iteration <= last:
                    value = combined(operation, value, tensors[device][where])
                if iteration == last and operation == "average":
                    with np.errstate(invalid="ignore", over="ignore"):
                        value = rounded(value * scale, FORMATS["fp32"])
                sent[place] = rounded(value, FORMATS[wire])
                if iteration >= last:
                    results[device][where] = sent[place]


class MemoryDevices:
    """Devices with tensors, the rings between them, and one snapshot at a time.

    Parameters
    ----------
    devices, groups, entry_bytes : as of the pool that it is compared with.
    """

    def __init__(self, devices: int, groups: int, entry_bytes: int) -> None:
        self.devices = devices
        self.entry_bytes = entry_bytes
        forward = list(range(devices))
        backward = [0, *reversed(forward[1:])]
        self.rings = [Ring(backward if g % 2 else forward, entry_bytes) for g in range(groups)]
        self.values: dict[str, list[Bits]] = {}
        self.frozen: dict[str, list[Bits]] = {}

    def write(self, name: str, device: int, bits: Bits) -> None:
        """The array of a tensor on a device."""
        self.values.setdefault(name, [bits] * self.devices)[device] = bits.copy()

    def all_reduce(self, name: str, operation: str, wire: str, group: int | None = None) -> None:
        """Of a tensor that is summed alone, all rings get a share, in whole entries."""
        before = [numbers(bits) for bits in self.values[name]]
        rings = self.rings if group is None else [self.rings[group]]
        entry = self.entry_bytes // FORMATS[wire].nbytes
        entries = -(-before[0].size // entry)
        scale = float(rounded(np.array(1 / self.devices), FORMATS["fp32"]))
        after: list[list[Bits]] = [[] for _ in before]
        start = 0
        for number, ring in enumerate(rings):
            share = entries // len(rings) + (number < entries % len(rings))
            stop = start + share * entry
            found = ring.run([each[start:stop] for each in before], operation, wire, scale)
            for device, each in enumerate(found):
                after[device].append(patterns(each))
            start = stop
        self.values[name] = [np.concatenate(each) for each in after]

    def freeze(self) -> None:
        """A snapshot of all tensors."""
        self.frozen = {name: list(each) for name, each in self.values.items()}

    def restore(self) -> None:
        """All tensors are what they were at the snapshot."""
        self.values = {name: list(each) for name, each in self.frozen.items()}
