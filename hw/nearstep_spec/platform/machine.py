"""The parts of a machine, as plain data.

Every figure has an origin: a paper, a datasheet, a measurement, or a fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from nearstep_spec.errors import NearstepError

if TYPE_CHECKING:
    import networkx as nx

Origin = Literal["paper", "datasheet", "measured", "fitted"]
ORIGINS = ("paper", "datasheet", "measured", "fitted")
Duplex = Literal["full", "half"]
DUPLEX = ("full", "half")
DTYPES = ("fp32", "tf32", "fp16", "bf16")
MOST_CHANNELS = 64
"""Most channels of a DIMM."""


class PlatformError(NearstepError, ValueError):
    """A description that contradicts itself or is incomplete; the message names the entry.

    Attributes
    ----------
    path : of the invalid entry, such as `("links", "pcie", "ends")`; empty if there is none.
    """

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        self.path = path
        super().__init__(message)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number and its origin.

    Attributes
    ----------
    value : a count, bytes, seconds, or a rate per second.
    origin : one of `ORIGINS`.
    source : document or measurement.
    """

    value: float
    origin: Origin
    source: str

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A GPU, a CPU, or the FPGA of a card. Unknown figures are None.

    Attributes
    ----------
    flops : floating-point operations a second, by dtype; of dense matrices.
    memory_bytes : of its own memory.
    memory_bytes_per_s : reads and writes together.
    adam_params_per_s : parameters updated in a second, in its own memory.
    """

    title: str
    flops: Mapping[str, Figure] = field(default_factory=dict)
    memory_bytes: Figure | None = None
    memory_bytes_per_s: Figure | None = None
    adam_params_per_s: Figure | None = None


@dataclass(frozen=True, kw_only=True)
class Dimm:
    """A DIMM with an update kernel on each channel of its DRAM.

    Channel `i` of the DIMM `dimm` is the end `dimm.i` of a route.

    Attributes
    ----------
    channels : how many.
    channel_bytes : of each.
    channel_bytes_per_s : of each, reads and writes together.
    adam_params_per_s : of all channels together.
    """

    title: str
    channels: Figure
    channel_bytes: Figure
    channel_bytes_per_s: Figure
    adam_params_per_s: Figure


@dataclass(frozen=True, kw_only=True)
class Drive:
    """An SSD. Unknown figures are None: then only links bound its transfers.

    Attributes
    ----------
    read_bytes_per_s, write_bytes_per_s : of long sequential transfers of one direction.
    read_latency_s, write_latency_s : of one block at queue depth 1.
    queue_depth : requests in flight that the rates need.
    duplex : `half` if reads and writes share the drive's time; else one does not slow the other.
    """

    title: str
    capacity_bytes: Figure
    read_bytes_per_s: Figure | None = None
    write_bytes_per_s: Figure | None = None
    read_latency_s: Figure | None = None
    write_latency_s: Figure | None = None
    queue_depth: Figure | None = None
    duplex: Duplex = "full"

    def hops(self, name: str, direction: int) -> tuple["Hop", ...]:
        """Return the hop of a read (0) or a write (1) of a drive of this name, if the rate is
        known."""
        rate = (self.read_bytes_per_s, self.write_bytes_per_s)[direction]
        latency = (self.read_latency_s, self.write_latency_s)[direction]
        if rate is None:
            return ()
        way = "" if self.duplex == "half" else (" read", " write")[direction]
        return (
            Hop(
                link=name,
                direction=direction,
                lane=f"{name}{way}",
                bytes_per_s=float(rate),
                latency_s=0.0 if latency is None else float(latency),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection of two nodes.

    Attributes
    ----------
    ends : two names of parts or switches.
    bytes_per_s : each way, or of both together if half duplex.
    back_bytes_per_s : from the second end to the first, if different.
    latency_s : None if unknown, which counts as zero.
    duplex : `half` if both ways share the rate.
    """

    ends: tuple[str, str]
    bytes_per_s: Figure
    back_bytes_per_s: Figure | None = None
    latency_s: Figure | None = None
    duplex: Duplex = "full"


@dataclass(frozen=True, kw_only=True)
class Hop:
    """A link, or the memory at an end of a route, used by one transfer.

    Attributes
    ----------
    link : name of the link, of a processor's `NAME memory`, of a channel or of a drive.
    direction : of a link 0 from its first end to the second, 1 back; of an end 0 for a read, 1 for
        a write.
    lane : transfers with the same lane share its time.
    bytes_per_s : of the lane, if all of its bytes go in this direction.
    """

    link: str
    direction: int
    lane: str
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A machine.

    Attributes
    ----------
    processors, dimms, drives, links : by name; no name stands for two parts.
    switches : nodes that only connect.

    Raises
    ------
    PlatformError : there is no part, a name is used twice, a link ends at no node or has rates that
        contradict its duplex, a DIMM has not 1 to `MOST_CHANNELS` channels, a drive has a latency
        without its rate, or a part cannot be reached.
    """

    name: str
    title: str
    processors: Mapping[str, Processor] = field(default_factory=dict)
    dimms: Mapping[str, Dimm] = field(default_factory=dict)
    drives: Mapping[str, Drive] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self._check_names()
        for name, link in self.links.items():
            self._check_link(name, link, names)
        for name, drive in self.drives.items():
            self._check_drive(name, drive)
        for name, dimm in self.dimms.items():
            if dimm.channels.value not in range(1, MOST_CHANNELS + 1):
                raise PlatformError(
                    f"must be a whole number to {MOST_CHANNELS}, not {dimm.channels.value!r}",
                    ("dimms", name, "channels"),
                )
        import networkx as nx  # imported late: it loads slowly

        lone = [name for name in names if name not in self._graph]
        if len(names) > 1 and lone:
            raise PlatformError(f"{lone[0]} must be at a link", (names[lone[0]], lone[0]))
        if len(names) > 1 and not nx.is_connected(self._graph):
            first, *_, last = sorted(map(sorted, nx.connected_components(self._graph)))
            raise PlatformError(f"there must be a route from {first[0]} to {last[0]}", ("links",))

    def _check_names(self) -> dict[str, str]:
        """Map the names of all nodes to their tables."""
        names: dict[str, str] = {}
        for table in ("processors", "dimms", "drives", "switches"):
            for name in getattr(self, table):
                if name in names:
                    raise PlatformError(f"{name} stands for two parts", (table, name))
                names[name] = table
        if not names:
            raise PlatformError("there must be at least one part")
        return names

    def _check_drive(self, name: str, drive: Drive) -> None:
        for way in ("read", "write"):
            latency, rate = f"{way}_latency_s", f"{way}_bytes_per_s"
            if getattr(drive, latency) is not None and getattr(drive, rate) is None:
                raise PlatformError(f"needs {rate}", ("drives", name, latency))

    def _check_link(self, name: str, link: Link, names: Mapping[str, str]) -> None:
        for end in link.ends:
            if end not in names:
                known = ", ".join(sorted(names))
                raise PlatformError(
                    f"must be of {known}, not {end!r}",
                    ("links", name, "ends"),
                )
        if link.ends[0] == link.ends[1]:
            raise PlatformError(f"must differ, not {link.ends}", ("links", name, "ends"))
        if link.duplex == "half" and link.back_bytes_per_s is not None:
            raise PlatformError(
                "both ways of half duplex have one rate", ("links", name, "back_bytes_per_s")
            )

    @cached_property
    def _graph(self) -> "nx.MultiGraph[str]":
        import networkx as nx

        graph: nx.MultiGraph[str] = nx.MultiGraph()
        for name, link in self.links.items():
            graph.add_edge(*link.ends, key=name)
        return graph

    def route(self, start: str, stop: str) -> tuple[Hop, ...]:
        """Return the hops of a transfer: the memory or drive at the start, the fewest links, and
        the memory or drive at the stop.

        A processor on the way is a root of links: its memory is not used. Of routes with equally
        many links the one with the first nodes by name is taken, and of links between two nodes the
        one declared first.

        Parameters
        ----------
        start, stop : names of processors, drives or switches, or channels of a DIMM as `dimm.0`.

        Raises
        ------
        PlatformError : there is no such part, or both are one node.
        """
        import networkx as nx

        nodes = self._node(start), self._node(stop)
        if nodes[0] == nodes[1]:
            raise PlatformError(f"{self.name}: {start} and {stop} are at no two ends of links")
        path = min(nx.all_shortest_paths(self._graph, *nodes))
        between = [self._hop(here, there) for here, there in pairwise(path)]
        return (*self._port(start, 0), *between, *self._port(stop, 1))

    def _node(self, end: str) -> str:
        """Return the node of a part or a channel."""
        nodes = {name: name for name in self.processors}
        for name, dimm in self.dimms.items():
            nodes |= {f"{name}.{channel}": name for channel in range(int(dimm.channels.value))}
        nodes |= {name: name for name in (*self.drives, *self.switches)}
        if end not in nodes:
            known = ", ".join(nodes)
            raise PlatformError(f"{self.name}: there is no part {end!r}; there are {known}")
        return nodes[end]

    def _hop(self, here: str, there: str) -> Hop:
        name = next(iter(self._graph[here][there]))
        link = self.links[name]
        direction = int(link.ends[0] != here)
        rate = (link.back_bytes_per_s if direction else None) or link.bytes_per_s
        return Hop(
            link=name,
            direction=direction,
            lane=name if link.duplex == "half" else f"{name} {here}>{there}",
            bytes_per_s=float(rate),
            latency_s=0.0 if link.latency_s is None else float(link.latency_s),
        )

    def _port(self, end: str, direction: int) -> tuple[Hop, ...]:
        """Return the hop of a memory, channel or drive at an end, if its rate is known."""
        if end in self.drives:
            return self.drives[end].hops(end, direction)
        if end in self.switches:
            return ()
        if end in self.processors:
            name, rate = f"{end} memory", self.processors[end].memory_bytes_per_s
        else:
            name, rate = end, self.dimms[end.rpartition(".")[0]].channel_bytes_per_s
        if rate is None:
            return ()
        return (Hop(link=name, direction=direction, lane=name, bytes_per_s=float(rate)),)
