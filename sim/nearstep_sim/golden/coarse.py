"""Golden model of the rings of COARSE memory devices: what every device holds in the end.

Bit-exact, on whole tensors. Which device begins a sum depends on where an element lies, since the
parts of a chunk travel the ring from different positions.

Ref: COARSE paper, section IV-A and figure 11; IEEE 754-2019, 9.6 (maximum).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.fp import QUIET_NAN32, add32, mul32, narrow32, widen32
from nearstep_spec.coarse.config import BEAT_ELEMENTS, CoarseConfig
from nearstep_spec.fp import BF16, FP16

__all__ = ["OPERATIONS", "element_parts", "maximum32", "ring_all_reduce"]

OPERATIONS = ("sum", "average", "max")

F32 = NDArray[np.float32]

_HALVES = {"fp16": FP16, "bf16": BF16}
_SIGN = np.int64(1 << 31)


def maximum32(a: F32, b: F32) -> F32:
    """The greater of float32 a and b: +0 is greater than -0, a NaN gives the default quiet NaN."""
    greater = np.where(_key(a) >= _key(b), a, b)
    return np.where(np.isnan(a) | np.isnan(b), QUIET_NAN32, greater)


def element_parts(elements: int, *, members: int, entry_beats: int) -> NDArray[np.int64]:
    """For each element of a tensor the part of its chunk that it belongs to.

    Part p starts at ring position p and grows at p + 1, p + 2, ... modulo `members`.
    """
    beats = max(1, -(-elements // BEAT_ELEMENTS))
    chunk = members * entry_beats
    beat = np.arange(elements, dtype=np.int64) // BEAT_ELEMENTS
    tail = beats - beats % chunk
    tail_beats = max(1, -(-(beats - tail) // members))
    return np.where(beat < tail, beat % chunk // entry_beats, (beat - tail) // tail_beats)


def ring_all_reduce(
    tensors: Sequence[F32],
    *,
    operation: str,
    wire: str,
    config: CoarseConfig,
    reverse: bool = False,
) -> F32:
    """What all devices of a ring hold after a job.

    Parameters
    ----------
    tensors : of each device, 1-D float32, of one length.
    operation : `sum`, `average` (the sum times float32(1 / devices)) or `max`.
    wire : format on the links; partial results are rounded to it at every hop.
    config : of the devices.
    reverse : the ring runs from device 1 to device 0 to the last one, and so on.

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
    positions = [(members - d) % members if reverse else d for d in range(members)]
    local = np.stack([tensors[positions.index(p)] for p in range(members)])
    part = element_parts(length, members=members, entry_beats=config.entry_beats(wire))
    column = np.arange(length)

    total = _travel(local[part, column], wire)
    for hop in range(1, members):
        mine = local[(part + hop) % members, column]
        total = maximum32(total, mine) if operation == "max" else add32(total, mine)
        if hop == members - 1 and operation == "average":
            total = mul32(total, np.full(length, 1 / members, np.float32))
        total = _travel(total, wire)
    return total


def _travel(x: F32, wire: str) -> F32:
    """`x` as the next device gets it."""
    if wire == "fp32":
        return x
    return widen32(narrow32(x, _HALVES[wire]), _HALVES[wire])


def _key(x: F32) -> NDArray[np.int64]:
    """An integer that orders like `x`, -0 below +0."""
    bits = x.view(np.uint32).astype(np.int64)
    return np.where(bits & _SIGN, _SIGN - 1 - bits, bits)
