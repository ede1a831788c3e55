"""Snapshots without devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class HostSnapshot:
    """Values of tensors, for each tensor those of each device, in memory of the host."""

    values: Sequence[Sequence[Floats]]

    @property
    def devices(self) -> int:
        return len(self.values[0])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(each[0].shape for each in self.values)

    def read(self, tensor: int, device: int) -> Floats:
        return self.values[tensor][device]


def random_snapshot(devices: int, shapes: Sequence[tuple[int, ...]], seed: int) -> HostSnapshot:
    """Of any bit patterns; the seed is printed."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return HostSnapshot(
        [
            [rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32) for _ in range(devices)]
            for shape in shapes
        ]
    )
