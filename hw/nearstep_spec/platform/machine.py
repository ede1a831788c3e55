"""What a machine consists of, as plain data.

Every figure says where it comes from: a paper, a datasheet, a measurement, or a fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import networkx as nx

ORIGINS = ("paper", "datasheet", "measured", "fitted")
DUPLEX = ("full", "half")
DTYPES = ("fp32", "tf32", "fp16", "bf16")


class PlatformError(ValueError):
    """A description that contradicts itself or lacks something; the message names the entry."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number and where it comes from.

    Attributes
    ----------
    value : in bytes, seconds, or a second's worth of something.
    origin : one of `ORIGINS`.
    source : where it stands.
    """

    value: float
    origin: Literal["paper", "datasheet", "measured", "fitted"]
    source: str

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What computes: a GPU, a CPU, or a core of one.

    Attributes
    ----------
    title
    flops : floating-point operations a second, by dtype.
    memory_bytes : that work may use.
    memory_bytes_per_s
    adam_params_per_s : parameters that it updates in a second, if it does.
    """

    title: str
    flops: Mapping[str, Figure] = field(default_factory=dict)
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    adam_params_per_s: Figure | None = None


@dataclass(frozen=True, kw_only=True)
class Dimm:
    """A DIMM with update kernels, one for each channel of its DRAM.

    Attributes
    ----------
    title
    channels : how many.
    channel_bytes, channel_bytes_per_s : of each.
    adam_params_per_s : of all channels together.
    """

    title: str
    channels: Figure
    channel_bytes: Figure
    channel_bytes_per_s: Figure
    adam_params_per_s: Figure


@dataclass(frozen=True, kw_only=True)
class Drive:
    """An SSD.

    Attributes
    ----------
    title
    capacity_bytes
    read_bytes_per_s, write_bytes_per_s : of long sequential transfers.
    read_latency_s, write_latency_s : of one block at queue depth 1.
    queue_depth : requests under way that the rates need.
    """

    title: str
    capacity_bytes: Figure
    read_bytes_per_s: Figure
    write_bytes_per_s: Figure
    read_latency_s: Figure
    write_latency_s: Figure
    queue_depth: Figure


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection of two nodes.

    Attributes
    ----------
    ends : two names of parts or switches.
    bytes_per_s : each way.
    latency_s
    duplex : `half` if both ways share the rate.
    """

    ends: tuple[str, str]
    bytes_per_s: Figure
    latency_s: Figure
    duplex: Literal["full", "half"] = "full"


@dataclass(frozen=True, kw_only=True)
class Hop:
    """A link as one transfer goes through it.

    Attributes
    ----------
    link : name.
    direction : 0 from its first end to the second, 1 back; always 0 of half duplex, where both ways
        are one resource.
    """

    link: str
    direction: int


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A machine.

    Attributes
    ----------
    name, title
    processors, dimms, drives, links : by name; no name stands for two parts.
    switches : nodes that only connect.

    Raises
    ------
    PlatformError : a link ends at no node, a name stands for two, or a part cannot be reached.
    """

    name: str
    title: str
    processors: Mapping[str, Processor] = field(default_factory=dict)
    dimms: Mapping[str, Dimm] = field(default_factory=dict)
    drives: Mapping[str, Drive] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [*self.processors, *self.dimms, *self.drives, *self.switches]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlatformError(f"{self.name}: {twice[0]} stands for two parts")
        for name, link in self.links.items():
            for end in link.ends:
                if end not in names:
                    raise PlatformError(
                        f"{self.name}: links.{name}: ends must be parts or switches, not {end!r}"
                    )
            if link.ends[0] == link.ends[1]:
                raise PlatformError(f"{self.name}: links.{name}: ends must differ")
        alone = [name for name in names if name not in self._graph]
        if self.links and (alone or not nx.is_connected(self._graph)):
            raise PlatformError(
                f"{self.name}: every part must be reached by links"
                + (f", unlike {alone[0]}" if alone else "")
            )

    @cached_property
    def _graph(self) -> "nx.MultiGraph[str]":
        graph: nx.MultiGraph[str] = nx.MultiGraph()
        for name, link in self.links.items():
            graph.add_edge(*link.ends, key=name)
        return graph

    def route(self, start: str, stop: str) -> tuple[Hop, ...]:
        """The fewest links from one part to another; of equal routes the one whose nodes come
        first by name, and between two nodes the link declared first.

        Raises
        ------
        PlatformError : there is no such part.
        """
        for each in (start, stop):
            if each not in self._graph:
                raise PlatformError(f"{self.name}: there is no part {each!r} at a link")
        nodes = min(nx.all_shortest_paths(self._graph, start, stop))
        hops = []
        for here, there in zip(nodes, nodes[1:], strict=False):
            name = next(iter(self._graph[here][there]))
            link = self.links[name]
            backwards = link.duplex == "full" and link.ends[0] != here
            hops.append(Hop(link=name, direction=int(backwards)))
        return tuple(hops)
