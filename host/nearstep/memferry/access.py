"""Cost of direct host access: rates of the link, and the number of reads of a matrix.

A matrix is read once by each wave of tiles: tiles of 128 x 128 outputs, one on each multiprocessor
at a time; the L2 cache keeps the reads of a wave.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, Self, get_args

from nearstep.errors import ArgumentError
from nearstep_spec.platform.machine import Platform

Reads = Literal["once", "wave", "tile"]
"""Reads of a matrix over the link: one, one for each wave of tiles, or one for each row of tiles.
"""

TILE = 128
MULTIPROCESSORS = {"A100": 108, "H100": 132, "H200": 132, "V100": 80}
"""Multiprocessors of GPUs, by a word of their title (datasheets of NVIDIA)."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Access of a GPU to the memory of a host.

    Attributes
    ----------
    down, up : bytes a second from the host, and to it.
    reads : how often a matrix is read.
    multiprocessors : of the GPU; 1 if `reads` does not depend on them.
    """

    down: float
    up: float
    reads: Reads
    multiprocessors: int

    @classmethod
    def of(cls, platform: Platform, host: str, gpu: str, reads: Reads) -> Self:
        """Access between two processors of a machine.

        Raises
        ------
        ArgumentError : there is no such GPU, or its multiprocessors are unknown and needed.
        """
        found = platform.processors.get(gpu)
        if found is None:
            raise ArgumentError(f"{platform.name}: there is no processor {gpu!r}")
        if reads not in get_args(Reads):
            raise ArgumentError(f"reads must be one of {get_args(Reads)}, not {reads!r}")
        down, up = (
            min(hop.bytes_per_s for hop in platform.route(*ends))
            for ends in ((host, gpu), (gpu, host))
        )
        known = [count for name, count in MULTIPROCESSORS.items() if name in found.title]
        if reads == "wave" and not known:
            names = ", ".join(MULTIPROCESSORS)
            raise ArgumentError(f"reads by wave needs a GPU of {names}, not {found.title}")
        return cls(down=down, up=up, reads=reads, multiprocessors=known[0] if known else 1)

    def matrix_reads(self, rows: int, columns: int) -> int:
        """Number of reads of a matrix for a product with so many outputs."""
        tiles = ceil(rows / TILE)
        if self.reads == "once":
            return 1
        if self.reads == "tile":
            return tiles
        return min(tiles, ceil(tiles * ceil(columns / TILE) / self.multiprocessors))
