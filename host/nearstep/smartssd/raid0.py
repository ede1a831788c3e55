"""The baseline of cards with drives: the same drives as RAID0, and the update on the host."""

from __future__ import annotations

from dataclasses import dataclass

from nearstep.backends.peer import HostLinks
from nearstep.errors import ArgumentError
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Range, Transfer
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.machine import Drive

BLOCKS_HELD = 5
"""Blocks in the memory of the host: two are read, one is updated, two are written."""


@dataclass(frozen=True, kw_only=True)
class Raid0:
    """Drives behind an expansion, and the host whose processor updates their contents.

    Parameters
    ----------
    drives : number; each array is striped evenly over them.
    drive : each of them, with rates.
    links : of the host to each drive, and the one that all share.
    memory_bytes_per_s : of the host's memory, which bounds the update.

    Raises
    ------
    ArgumentError : there is no drive.

    Ref: Smart-Infinity, section II-A and figure 1c (ZeRO-Infinity).
    """

    drives: int
    drive: Drive
    links: HostLinks
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.drives < 1:
            raise ArgumentError(f"drives must be at least 1, not {self.drives}")

    def update(
        self, elements: int, block: int, *, states: int = 3, gradient_bytes: int = 4
    ) -> Timeline:
        """Model the timeline of an update: block after block states and gradients are read, updated
        and written back, and reads, updates and writes of several blocks overlap.

        Writes of gradients in the backward pass are not included.

        Parameters
        ----------
        elements : of the model.
        block : elements of a block, on all drives together.
        states : arrays of 4 bytes an element that are read and written, the parameters among them.
        gradient_bytes : of an element.

        Raises
        ------
        ArgumentError : `elements` or `block` is below 1.
        """
        if elements < 1 or block < 1:
            raise ArgumentError(f"elements and block must be at least 1, not {elements}, {block}")
        graph = Graph()
        arrays = {"g": gradient_bytes} | {f"s{number}": 4 for number in range(states)}
        for number, first in enumerate(range(0, elements, block)):
            count = min(block, elements - first)
            rooms = {
                array: Range((array, number % BLOCKS_HELD), 0, size * self.drives)
                for array, size in arrays.items()
            }
            for array, room in rooms.items():
                self._move(graph, 1, array, number, count * arrays[array], room)
            written = [array for array in arrays if array != "g"]
            touched = sum(arrays.values()) + 4 * states
            graph.add(
                f"update {number}",
                "cpu",
                reads=rooms.values(),
                writes=[rooms[array] for array in written],
                seconds=count * touched / self.memory_bytes_per_s,
            )
            for array in written:
                self._move(graph, 0, array, number, count * arrays[array], rooms[array])
        return execute(graph)

    def _move(
        self, graph: Graph, direction: int, array: str, number: int, nbytes: int, room: Range
    ) -> None:
        """Add transfers of each drive's part of an array of a block, to the drives (0) or from them
        (1).
        """
        share = (room.stop - room.start) // self.drives
        name = ("write", "read")[direction]
        for drive in range(self.drives):
            part = Range(room.space, share * drive, share * (drive + 1))
            own = self.drive.hops(f"drive {drive}", 1 - direction)
            size = nbytes * (drive + 1) // self.drives - nbytes * drive // self.drives
            graph.add(
                f"{name} {array} {number}",
                f"drive {drive} {name}",
                reads=[] if direction else [part],
                writes=[part] if direction else [],
                transfer=Transfer(nbytes=size, route=(*own, *self.links.route(drive, direction))),
                priority=direction,
            )
