"""Expected tensors of a pool, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse import CoarsePool, PoolTensor
from nearstep_sim.golden.coarse import ring_all_reduce

Floats = NDArray[np.float32]

SMALL = "devices=4&groups=2&alus=4&entry_phits=8&buffer_entries=4&chunks_ahead=2&queue_jobs=2"
"""Entries of 32 elements, so that a few hundred are several chunks; one library serves all tests
with these options and the memory below."""

SMALL_MEMORY = "memory_bytes=1MiB&snapshot_pages=64"

SMALLEST = SMALL.replace("devices=4", "devices=2").replace("groups=2", "groups=1")
SMALL_RULES = "adam,sgd_momentum"
"""Options of devices with update kernels: one library for all fast tests with both."""


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
    """Return the expected result of a reduction: the golden ring, on the pool's split."""
    flat = [each.reshape(-1) for each in arrays]
    parts = [
        ring_all_reduce(
            [each[part.start : part.stop] for each in flat],
            operation=op,
            wire=wire,
            config=pool.device.config,
            reverse=part.reverse,
        )
        for part in pool.split(flat[0].size, wire, group)
    ]
    return np.concatenate(parts).reshape(arrays[0].shape)


def compare(tensor: PoolTensor, expected: Floats | Sequence[Floats]) -> int:
    """Compare the arrays of all devices, bit for bit; return the number of elements compared.

    Parameters
    ----------
    expected : of each device, or one for all.

    Raises
    ------
    AssertionError : shape or bits differ; names the device.
    """
    for device in range(tensor.rings.devices):
        want = expected if isinstance(expected, np.ndarray) else expected[device]
        got = tensor.read(device)
        assert got.shape == want.shape
        np.testing.assert_array_equal(
            got.view(np.uint32), want.view(np.uint32), err_msg=f"device {device}"
        )
    return tensor.rings.devices * tensor.size
