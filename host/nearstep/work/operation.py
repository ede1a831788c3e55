"""Operations of a graph of work."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nearstep.backends.base import Completion
from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole
from nearstep_spec.platform.machine import Hop, Platform

if TYPE_CHECKING:
    from nearstep.buffer import Buffer

Action = Callable[[], Completion | None]
"""Starts an operation; returns None if the operation has already ended."""


class Range(NamedTuple):
    """Bytes [start, stop) of a space. Empty ranges have no hazards.

    Attributes
    ----------
    space : address space: a device, a file, the host's memory by any name.
    """

    space: Hashable
    start: int
    stop: int

    @classmethod
    def of(cls, buffer: Buffer) -> Range:
        """The memory of a buffer."""
        return cls(buffer.device, buffer.address, buffer.address + buffer.nbytes)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A duration model: a latency, and bytes at a rate."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < float("inf"):
            raise ArgumentError(f"bytes_per_s must be above 0 and finite, not {self.bytes_per_s}")
        if not 0 <= self.latency_s < float("inf"):
            raise ArgumentError(f"latency_s must be from 0 and finite, not {self.latency_s}")

    def seconds(self, nbytes: int) -> float:
        """Return the time of a transfer of this size."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes moved over links shared with other transfers.

    A transfer waits for the latencies of its route, then has its max-min fair share of each link
    until its last byte (`nearstep.work.flow`).

    Parameters
    ----------
    route : at least one hop. A half-duplex link may be in it twice.

    Raises
    ------
    ArgumentError : bytes or a latency are negative, a rate is not above 0, or there is no hop.
    """

    nbytes: int
    route: tuple[Hop, ...]

    def __post_init__(self) -> None:
        if not (is_whole(self.nbytes) and self.nbytes >= 0):
            raise ArgumentError(f"nbytes must be an integer from 0, not {self.nbytes!r}")
        if not self.route:
            raise ArgumentError("route must have a hop")
        for hop in self.route:
            if not 0 < hop.bytes_per_s < float("inf"):
                raise ArgumentError(f"bytes_per_s must be above 0 and finite, not {hop}")
            if not 0 <= hop.latency_s < float("inf"):
                raise ArgumentError(f"latency_s must be from 0 and finite, not {hop}")

    @classmethod
    def between(cls, platform: Platform, start: str, stop: str, nbytes: int) -> Transfer:
        """Make a transfer from one part of a machine to another.

        Raises
        ------
        ArgumentError : `nbytes` is negative.
        PlatformError : there is no such part, or both are the same.
        """
        return cls(nbytes=nbytes, route=platform.route(start, stop))

    @property
    def latency_s(self) -> float:
        """Of all hops together."""
        return sum(hop.latency_s for hop in self.route)

    @property
    def seconds(self) -> float:
        """How long it takes by itself."""
        return self.latency_s + self.nbytes / min(hop.bytes_per_s for hop in self.route)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Operation:
    """An operation of a step, made by `nearstep.work.graph.Graph.add`.

    Attributes
    ----------
    index : position in the program.
    holds : resources used exclusively, at least one; a transfer may have none.
    needs : dependencies, ascending: named ones, and those of its hazards.
    action : starts it. None: nothing but time passes.
    seconds : modelled duration. None: that of its transfer and of its action's completion, on a
        device with a clock.
    transfer : bytes over links.
    priority : of operations that could start, the lowest is first, then program order.
    """

    index: int
    name: str
    holds: tuple[str, ...]
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    needs: tuple[int, ...]
    action: Action | None
    seconds: float | None
    transfer: Transfer | None
    priority: int

    def __str__(self) -> str:
        return f"{self.index}: {self.name}"
