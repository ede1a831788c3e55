"""Snapshots without devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from nearstep.storage.snapshot_file import open_file, save

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class HostSnapshot:
    """Values of tensors, for each tensor those of each device, in memory of the host."""

    values: Sequence[Sequence[Floats]]

    def read(self, tensor: int, device: int) -> Floats:
        return self.values[tensor][device]

    def save(self, path: Path, opener: Callable[[Path], BinaryIO] = open_file) -> Path:
        """Save the tensors under their numbers."""
        shapes = {str(i): each[0].shape for i, each in enumerate(self.values)}
        return save(path, shapes, len(self.values[0]), self.read, opener=opener)


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
