"""Golden model of the rings of COARSE memory devices: the result of every device.

Bit-exact, on whole tensors. The device that begins a sum depends on the element's part of its
chunk, since each part starts at another position of the ring.

Ref: COARSE paper, section IV-A and figure 11; IEEE 754-2019, 9.6 (maximum).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.fp import QUIET_NAN32, add32, canonical32, mul32, narrow32, widen32
from nearstep_spec.coarse.config import BEAT_ELEMENTS, CoarseConfig
from nearstep_spec.fp import BF16, FP16

__all__ = [
    "OPERATIONS",
    "element_parts",
    "maximum32",
    "ring_all_reduce",
    "ring_order",
    "short_part",
]

BLOCK_ELEMENTS = 1 << 14
"""Elements of a tensor processed at once, through all hops: they fit a cache."""

OPERATIONS = ("sum", "average", "max")

F32 = NDArray[np.float32]

_HALVES = {"fp16": FP16, "bf16": BF16}
_SIGN = np.int64(1 << 31)


def maximum32(a: F32, b: F32) -> F32:
    """Return the greater of float32 a and b: +0 is greater than -0, a NaN gives the default quiet
    NaN.
    """
    greater = np.where(_key(a) >= _key(b), a, b)
    return np.where(np.isnan(a) | np.isnan(b), QUIET_NAN32, greater)


def element_parts(elements: int, *, members: int, entry_beats: int) -> NDArray[np.int64]:
    """Return the part of each element of a tensor within its chunk.

    Ring position p begins part p; positions p + 1, p + 2, ... modulo `members` add to the part.
    """
    found = np.empty(elements, np.int64)
    for region, size in _regions(elements, members, entry_beats):
        for part in range(members):
            _part(found[region], part, members, size)[...] = part
    return found


def ring_all_reduce(
    tensors: Sequence[F32],
    *,
    operation: str,
    wire: str,
    config: CoarseConfig,
    reverse: bool = False,
    scale: np.float32 | None = None,
    out: F32 | None = None,
) -> F32:
    """Return the result of all devices of a ring after a job.

    Parameters
    ----------
    tensors : of each device, 1-D float32, of one length.
    operation : `sum`, `average` (the sum times `scale`) or `max`.
    wire : format on the links; partial results are rounded to it at every hop.
    config : of the devices.
    reverse : the ring runs from device 1 to device 0 to the last one, and so on.
    scale : of an average; None is float32(1 / devices).
    out : array for the result; None makes a new one.

    Raises
    ------
    ValueError : unlike tensors, fewer than two, or an unknown operation or format.
    """
    members = len(tensors)
    if members < 2:
        raise ValueError(f"A ring has at least 2 devices, not {members}")
    if operation not in OPERATIONS or wire not in config.wire_formats:
        raise ValueError(
            f"Operation must be one of {OPERATIONS} and wire one of {config.wire_formats}, "
            f"not {operation!r} and {wire!r}"
        )
    length = len(tensors[0])
    for tensor in tensors:
        if tensor.dtype != np.float32 or tensor.shape != (length,):
            raise ValueError(
                f"Tensors must be float32 of shape {(length,)}, "
                f"not {tensor.dtype} of {tensor.shape}"
            )
    local = [tensors[device] for device in ring_order(members, reverse)]
    factor = np.float32(1 / members) if scale is None else np.float32(scale)
    result = np.empty(length, np.float32) if out is None else out
    for region, size in _regions(length, members, config.entry_beats(wire)):
        for part in range(members):
            travelling = [
                _part(local[(part + hop) % members][region], part, members, size)
                for hop in range(members)
            ]
            place = _part(result[region], part, members, size)
            rows = max(1, BLOCK_ELEMENTS // size if place.ndim == 2 else place.size)
            for row in range(0, len(place), rows):
                block = slice(row, row + rows)
                _ring([each[block] for each in travelling], operation, wire, factor, place[block])
    return result


def ring_order(members: int, reverse: bool) -> list[int]:
    """The device at each position of a ring."""
    return [(members - position) % members if reverse else position for position in range(members)]


def short_part(elements: int, members: int, entry: int) -> int:
    """Elements of a part of the short chunk that follows chunks with parts of `entry`."""
    beats = -(-(elements % (members * entry)) // BEAT_ELEMENTS)
    return -(-beats // members) * BEAT_ELEMENTS


def _regions(elements: int, members: int, entry_beats: int) -> list[tuple[slice, int]]:
    """Whole chunks of a tensor, and the last one; and the elements of a part in each of them."""
    entry = entry_beats * BEAT_ELEMENTS
    whole = elements - elements % (members * entry)
    last = short_part(elements, members, entry)
    found = [(slice(0, whole), entry), (slice(whole, elements), last)]
    return [(region, size) for region, size in found if region.stop > region.start]


def _part(region: NDArray[Any], part: int, members: int, size: int) -> NDArray[Any]:
    """A view of part `part` of all chunks of a region."""
    if region.size % (members * size):
        return region[part * size : (part + 1) * size]
    return region.reshape(-1, members, size)[:, part]


def _ring(tensors: Sequence[F32], operation: str, wire: str, scale: np.float32, out: F32) -> None:
    """Reduce one part over all hops to `out`, beginning with the first of `tensors`."""
    if wire == "fp32" and operation != "max":
        with np.errstate(all="ignore"):
            np.add(tensors[0], tensors[1], out=out)
            for mine in tensors[2:]:
                np.add(out, mine, out=out)
            if operation == "average":
                np.multiply(out, scale, out=out)
            doubtful = np.isnan(np.add.reduce(out, axis=None))
        if doubtful:  # a NaN stays one: once is enough
            out[...] = canonical32(out)
        return
    total = _travel(tensors[0], wire)
    for hop, mine in enumerate(tensors[1:], 2):
        total = maximum32(total, mine) if operation == "max" else add32(total, mine)
        if hop == len(tensors) and operation == "average":
            total = mul32(total, np.full(total.shape, scale, np.float32))
        total = _travel(total, wire)
    out[...] = total


def _travel(x: F32, wire: str) -> F32:
    """Return `x` as received by the next device."""
    if wire == "fp32":
        return x
    return widen32(narrow32(x, _HALVES[wire]), _HALVES[wire])


def _key(x: F32) -> NDArray[np.int64]:
    """An integer that orders like `x`, -0 below +0."""
    bits = x.view(np.uint32).astype(np.int64)
    return np.where(bits & _SIGN, _SIGN - 1 - bits, bits)
