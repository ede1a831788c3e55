"""What the tensors of a pool must hold, and whether they do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse import CoarsePool, PoolTensor
from nearstep_sim.golden.coarse import ring_all_reduce

Floats = NDArray[np.float32]


def draw(pool: CoarsePool, elements: int, rng: np.random.Generator) -> list[Floats]:
    """An array of normal numbers for each device."""
    return [rng.standard_normal(elements).astype(np.float32) for _ in range(pool.devices)]


def reduced(
    pool: CoarsePool,
    arrays: Sequence[Floats],
    op: str = "sum",
    wire: str = "fp32",
    group: int | None = None,
) -> Floats:
    """What all devices must hold after a reduction: the golden ring, on the pool's split."""
    parts = [
        ring_all_reduce(
            [each[part.start : part.stop] for each in arrays],
            operation=op,
            wire=wire,
            config=pool.device.config,
            reverse=part.reverse,
        )
        for part in pool.split(arrays[0].size, wire, group)
    ]
    return np.concatenate(parts)


def compare(tensor: PoolTensor, expected: Floats | Sequence[Floats]) -> int:
    """Compare the arrays of all devices, bit for bit; the number of elements compared.

    Parameters
    ----------
    tensor : of one dimension.
    expected : of each device, or one that all have.

    Raises
    ------
    AssertionError : names the device.
    """
    for device in range(tensor.pool.devices):
        want = expected if isinstance(expected, np.ndarray) else expected[device]
        got = tensor.read(device)
        np.testing.assert_array_equal(
            got.view(np.uint32), want.view(np.uint32), err_msg=f"device {device}"
        )
    return tensor.pool.devices * tensor.size
