"""Signals of an AXI4 port at one clock edge."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Address(NamedTuple):
    """Payload of AR or AW."""

    id: int
    addr: int
    len: int
    size: int
    burst: int


class ReadBeat(NamedTuple):
    """Payload of R."""

    id: int
    data: int
    resp: int
    last: int


class WriteBeat(NamedTuple):
    """Payload of W."""

    data: int
    strb: int
    last: int


class WriteResponse(NamedTuple):
    """Payload of B."""

    id: int
    resp: int


@dataclass(slots=True)
class AxiSample:
    """Payloads are None without valid; `ready` names the channels that are ready."""

    ar: Address | None = None
    r: ReadBeat | None = None
    aw: Address | None = None
    w: WriteBeat | None = None
    b: WriteResponse | None = None
    ready: frozenset[str] = field(default_factory=frozenset)

    def fires(self, channel: str) -> bool:
        """Whether a transfer happens at this edge."""
        return getattr(self, channel) is not None and channel in self.ready
