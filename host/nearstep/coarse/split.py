"""Parts of a tensor, one for each ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nearstep_spec.coarse.config import CoarseConfig


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements [start, stop) of a tensor that one ring reduces.

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
        """Whether the ring runs from device 1 to device 0, as those of odd groups do."""
        return bool(self.group % 2)


def split(
    config: CoarseConfig, elements: int, wire: str, groups: Sequence[int]
) -> tuple[Part, ...]:
    """Return the parts of a tensor for the rings of `groups`.

    Whole entries (`CoarseConfig.entry_elements`) are dealt out in order and evenly; the first
    groups get one more where needed. Groups without elements are left out, but an empty tensor has
    one empty part.
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
