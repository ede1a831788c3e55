"""Sums over many memory devices on a timeline: one ring, and rings of rings, as modelled.

All devices do the same at the same time, so one of them stands for all; a frame that it sends is
one that it gets from the device before it a hop later. Its constants are those of the device.

Ref: COARSE paper, section IV-A and figure 11.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nearstep.errors import ArgumentError
from nearstep.scalars import check_whole
from nearstep.work.clock import Clock
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation
from nearstep_spec.coarse.config import FRAME_PHITS, PHIT_BYTES, CoarseConfig

DIRECTIONS = 2

LINK_LATENCY = 100
"""Cycles from one end of a link to the other, as `sim:coarse` has them."""

CORE_LATENCY = 165
"""Cycles from the last phit of an entry to the first one of its sum. Measured: a chunk alone takes
395 cycles more for each hop on `sim:coarse` of 4 and of 8 devices, with 130 phits in a frame."""

MEMORY_LATENCY = 303
"""Cycles to read the first entry and to write the last one. Measured: as above, without hops."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Devices and what joins them.

    Parameters
    ----------
    devices : of a rack, in two rings of opposite directions.
    racks : in two rings, too. A device exchanges with those at its place in the other racks.
    uplinks : links of a rack to the next one, each as fast as a device's; its devices share them.
    uplink_latency : cycles.
    config : entries, and chunks that take turns.
    link_latency, core_latency, memory_latency : cycles.
    """

    devices: int
    racks: int = 1
    uplinks: int = 1
    uplink_latency: int = 1000
    config: CoarseConfig = field(default_factory=CoarseConfig)
    link_latency: int = LINK_LATENCY
    core_latency: int = CORE_LATENCY
    memory_latency: int = MEMORY_LATENCY

    def __post_init__(self) -> None:
        for name in ("devices", "racks", "uplinks"):
            check_whole(name, getattr(self, name), 1)
        for name in ("uplink_latency", "link_latency", "core_latency", "memory_latency"):
            check_whole(name, getattr(self, name), 0)

    @property
    def members(self) -> int:
        """Devices of all racks."""
        return self.devices * self.racks

    @property
    def frame(self) -> int:
        """Cycles of a full entry on a link."""
        return self.config.entry_phits + FRAME_PHITS

    @property
    def chunk_bytes(self) -> int:
        """Of a tensor, an entry for each device."""
        return self.members * self.config.entry_bytes

    def bound(self, nbytes: int) -> float:
        """Cycles that payload alone takes on the busiest link, in both directions of all."""
        within = self._share(self.devices) * nbytes
        between = self._share(self.racks) * nbytes / self.uplinks
        return max(within, between) / PHIT_BYTES

    @staticmethod
    def _share(members: int) -> float:
        """Of a tensor, what goes over a link each way: half of 2 (N - 1) / N; two have one link."""
        return 1.0 if members == 2 else (members - 1) / members


def all_reduce_cycles(fabric: Fabric, nbytes: int) -> int:
    """Cycles of the sum of a tensor of this size, fp32 on the links.

    Half of it is on the ring of either direction. What is not whole chunks is rounded up: a device
    sends shorter entries there, and is faster. Of one rack it is a ring: reduce-scatter and
    all-gather, 2 (N - 1) steps. Of several, a chunk is reduce-scattered in the rack, then each
    device's part is summed with those of the other racks, 2 (G - 1) steps on uplinks that the
    devices of a rack share, then it is all-gathered in the rack. Chunks take turns, so that both
    kinds of links are busy at once.

    Raises
    ------
    ArgumentError : there are fewer than two devices, or `nbytes` is no integer from 1.
    """
    check_whole("nbytes", nbytes, 1)
    if fabric.members < 2:
        raise ArgumentError(f"devices must be two or more, not {fabric.members}")
    graph = Graph()
    chunks = -(-nbytes // (DIRECTIONS * fabric.chunk_bytes))
    meet = 2 in (fabric.devices, fabric.racks)  # then both directions share a link
    for direction in range(DIRECTIONS if meet else 1):
        _Ring(fabric, graph, direction).add(chunks)
    timeline = execute(graph, Clock(hertz=1.0))
    return timeline.makespan + fabric.memory_latency


@dataclass(frozen=True)
class _Hop:
    """A way of entries to the next device.

    Attributes
    ----------
    cycles : of an entry.
    latency : cycles, with the next core's.
    entries : that go one after the other.
    """

    lane: str
    cycles: float
    latency: int
    entries: int


class _Ring:
    """The chunks of one direction, as one device sees them."""

    def __init__(self, fabric: Fabric, graph: Graph, direction: int) -> None:
        self.graph = graph
        self.name = f"ring {direction}"
        self.turns = fabric.config.chunks_ahead
        # two members have one link, and each way both directions' frames
        link = "link" if fabric.devices == 2 else f"link {direction}"
        uplink = "uplink" if fabric.racks == 2 else f"uplink {direction}"
        shared = fabric.devices * fabric.frame / fabric.uplinks
        core = fabric.core_latency
        inside = _Hop(link, fabric.frame, fabric.link_latency + core, fabric.racks)
        outside = _Hop(uplink, shared, fabric.uplink_latency + core, 1)
        half = [inside] * (fabric.devices - 1)
        self.hops = [*half, *[outside] * (2 * (fabric.racks - 1)), *half]

    def add(self, chunks: int) -> None:
        """As many chunks as take turns at once: one begins when the one before it has been sent.

        The older one goes first, so that on its way between racks the next one is within them.
        """
        sent: list[list[Operation]] = [[] for _ in range(self.turns)]
        for chunk in range(chunks):
            turn = chunk % self.turns
            arrived = sent[turn]
            for hop in self.hops:
                frames, arrived = self._send(hop, f"{self.name} turn {turn}", arrived)
            sent[turn] = frames[-1:]

    def _send(
        self, hop: _Hop, name: str, before: list[Operation]
    ) -> tuple[list[Operation], list[Operation]]:
        """Send entries over a hop, each when it has come; where there were others, when all have.

        Returns
        -------
        tuple[list[Operation], list[Operation]] : what they are on the link, and their arrivals.
        """
        frames: list[Operation] = []
        arrived: list[Operation] = []
        for entry in range(hop.entries):
            after = [before[entry]] if len(before) == hop.entries else before
            frames.append(self.graph.add("frame", hop.lane, after=after, seconds=hop.cycles))
            way = f"{name} entry {entry}"
            arrived.append(self.graph.add("hop", way, after=frames[-1:], seconds=hop.latency))
        return frames, arrived
