"""Modelled time of sums over many memory devices: one ring, or rings of rings.

All devices work in lockstep, so one of them represents all: a frame that it sends is also one that
it receives from its predecessor a hop later. The constants are those of the device.

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
"""Cycles from one end of a link to the other; the default of `sim:coarse`."""

CORE_LATENCY = 165
"""Cycles from the last phit of an entry to the first phit of its sum, measured: one chunk alone
takes 395 cycles more for each hop on `sim:coarse` of 4 and of 8 devices, with frames of 130
phits."""

MEMORY_LATENCY = 303
"""Cycles to read the first entry and to write the last one; the same measurement without hops."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Devices and their links.

    Parameters
    ----------
    devices : of a rack, in two rings of opposite directions.
    racks : also in two rings; a device exchanges with the devices at its position in other racks.
    uplinks : links from a rack to the next, each as fast as a device's, shared by its devices.
    uplink_latency, link_latency, core_latency, memory_latency : cycles.
    config : size of an entry, and number of chunks in flight.
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
        """Number of devices of all racks."""
        return self.devices * self.racks

    @property
    def frame(self) -> int:
        """Cycles of a frame with a full entry on a link."""
        return self.config.entry_phits + FRAME_PHITS

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk: an entry for each device."""
        return self.members * self.config.entry_bytes

    def bound(self, nbytes: int) -> float:
        """Return the cycles that payload alone takes on the busiest link, with both directions in
        use."""
        within = self._share(self.devices) * nbytes
        between = self._share(self.racks) * nbytes / self.uplinks
        return max(within, between) / PHIT_BYTES

    @staticmethod
    def _share(members: int) -> float:
        """Return the share of a tensor sent over a link each way: half of 2 (N - 1) / N; two
        devices have one link."""
        return 1.0 if members == 2 else (members - 1) / members


def all_reduce_cycles(fabric: Fabric, nbytes: int) -> int:
    """Return the cycles of the sum of a tensor of `nbytes` bytes, fp32 on the links.

    The ring of each direction sums half of the tensor. The size is rounded up to whole chunks; a
    device sends shorter entries in the last one and is faster. One rack is a ring: reduce-scatter
    and all-gather, 2 (N - 1) steps. With several racks, a chunk is reduce-scattered in the rack,
    each device's part is summed with those of the other racks in 2 (G - 1) steps on the shared
    uplinks, and the chunk is all-gathered in the rack. Chunks take turns, so that links and uplinks
    are busy at once.

    Raises
    ------
    ArgumentError : fewer than two devices, or `nbytes` is no integer from 1.
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
    """A hop of entries to the next device.

    Attributes
    ----------
    lane : lane of the link in the graph.
    cycles : cycles of an entry on the link.
    latency : cycles, including those of the next core.
    entries : number of entries sent one after the other.
    """

    lane: str
    cycles: float
    latency: int
    entries: int


class _Ring:
    """The chunks of one direction, seen from one device."""

    def __init__(self, fabric: Fabric, graph: Graph, direction: int) -> None:
        self.graph = graph
        self.name = f"ring {direction}"
        self.turns = fabric.config.chunks_ahead
        # two members share one link for the frames of both directions
        link = "link" if fabric.devices == 2 else f"link {direction}"
        uplink = "uplink" if fabric.racks == 2 else f"uplink {direction}"
        shared = fabric.devices * fabric.frame / fabric.uplinks
        core = fabric.core_latency
        inside = _Hop(link, fabric.frame, fabric.link_latency + core, fabric.racks)
        outside = _Hop(uplink, shared, fabric.uplink_latency + core, 1)
        half = [inside] * (fabric.devices - 1)
        self.hops = [*half, *[outside] * (2 * (fabric.racks - 1)), *half]

    def add(self, chunks: int) -> None:
        """Add chunks, `turns` of them in flight: one starts when the last frame of the one `turns`
        before it has been sent.

        Older chunks are added first, so that the next chunk uses the rack's links while the older
        one uses the uplinks.
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
        """Send entries over a hop, each when it has arrived; after a hop of another number of
        entries, when all have arrived.

        Returns
        -------
        tuple[list[Operation], list[Operation]] : the frames on the link, and their arrivals.
        """
        frames: list[Operation] = []
        arrived: list[Operation] = []
        for entry in range(hop.entries):
            after = [before[entry]] if len(before) == hop.entries else before
            frames.append(self.graph.add("frame", hop.lane, after=after, seconds=hop.cycles))
            way = f"{name} entry {entry}"
            arrived.append(self.graph.add("hop", way, after=frames[-1:], seconds=hop.latency))
        return frames, arrived
