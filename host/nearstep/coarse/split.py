"""Which ring sums which elements of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nearstep_spec.coarse.config import CoarseConfig


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements [start, stop) of a tensor, which one ring sums.

    Attributes
    ----------
    group : the sync core on each device.
    """

    group: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def reverse(self) -> bool:
        """Whether the ring runs from device 1 to device 0: that of an odd group."""
        return bool(self.group % 2)


def split(
    config: CoarseConfig, elements: int, wire: str, groups: Sequence[int]
) -> tuple[Part, ...]:
    """Parts of a tensor for the rings of `groups`.

    Whole entries (`CoarseConfig.entry_elements`) are dealt out in order, as many to each
    group as to the others, the first ones one more where they do not come out even. Groups that get
    none are left out; of a tensor without elements, the first has a part without elements.
    """
    size = config.entry_elements(wire)
    entries = -(-elements // size)
    each, over = divmod(entries, len(groups))
    parts: list[Part] = []
    start = 0
    for index, group in enumerate(groups):
        stop = min(elements, start + (each + (index < over)) * size)
        if stop > start or not parts:
            parts.append(Part(group=group, start=start, stop=stop))
        start = stop
    return tuple(parts)
