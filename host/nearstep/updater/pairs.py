"""Compressed gradients: pairs of index and value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError, DtypeError, ShapeError
from nearstep_spec.updater.config import UpdateKernelConfig

COUNT_LIMIT = 1 << 32
"""Runs with pairs, and scans, have fewer elements and pairs than this."""


@dataclass(frozen=True)
class Pairs:
    """Gradients of some elements; all others are +0.

    Of pairs with equal indices the last counts; `nearstep.updater.run.UpdateRun.duplicates` is the
    number of the others. There may be more pairs than elements, or none.

    Parameters
    ----------
    index : uint32: elements of p, counted from its first.
    value : a gradient for each index, in one of the formats of gradients.
    form : `fused`: ascending indices, equal ones allowed. `scatter`: ascending blocks of p, of
        `device.config.block_elements` elements, in any order within a block. The kernel checks all
        indices before any write. `FILE.py:NAME`, as in the device's compression=: `index` has the
        words and `value` the values of records of that decompressor.

    Ref: Smart-Infinity, section IV-C.
    """

    index: Buffer
    value: Buffer
    form: str = "fused"

    @property
    def size(self) -> int:
        """Number of pairs."""
        return self.index.size

    def check(self, config: UpdateKernelConfig) -> None:
        """Check that the kernel supports the pairs, without reading indices.

        Raises
        ------
        ArgumentError : the kernel does not have the form, or there are too many pairs.
        DtypeError, ShapeError
        """
        if self.form not in config.compression:
            raise ArgumentError(
                f"form of pairs must be a form of the kernel "
                f"({', '.join(config.compression) or 'none'}), not {self.form!r}: "
                "name it in the device's compression="
            )
        for name, buffer in (("index", self.index), ("value", self.value)):
            if not isinstance(buffer, Buffer):
                raise DtypeError(f"{name} of pairs", "Buffer", type(buffer).__name__)
        if self.index.dtype != np.uint32:
            raise DtypeError("index of pairs", "uint32", self.index.dtype)
        if self.value.size != self.index.size:
            raise ShapeError(
                "value of pairs", f"of {self.index.size} elements", f"of {self.value.size}"
            )
        check_count("pairs", self.size)


def check_count(what: str, count: int) -> None:
    """Raise `ArgumentError` unless indices can count to `count`."""
    if count >= COUNT_LIMIT:
        raise ArgumentError(f"{what} must be fewer than 2**32, not {count}")
