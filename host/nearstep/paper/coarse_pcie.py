"""Rates of a PCI Express 3.0 link by size of packets, for the COARSE paper's prototype.

Ref: PCI Express Base Specification 3.0; Intel AN 708, *Understanding PCI Express Throughput*: 5 to
7 double words beside the payload of a packet, and link-layer packets of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from nearstep.errors import ArgumentError

LANE_BYTES_PER_S = 8e9 * 128 / 130 / 8
REQUEST_BYTES = 24
"""Bytes of a write beside its payload, with an address of 64 bits: framing, header, CRC."""

COMPLETION_BYTES = 20
"""Bytes of the answer to a read beside its payload."""

LINK_LAYER_BYTES = 16
"""Bytes of an acknowledgement and credits, sent the other way for each packet."""

ROUND_TRIP_S = 550e-9
"""Round trip of a read of 64 bytes. Neugebauer et al., *Understanding PCIe performance for end host
networking*, SIGCOMM 2018: the median between a card and a Haswell Xeon, rounded."""

LOAD_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Pcie:
    """A link of the third generation.

    Attributes
    ----------
    payload : most bytes in a packet; every part must take 128.

    Raises
    ------
    ArgumentError : lanes or payload are not in the standard.
    """

    lanes: int
    payload: int = 128

    def __post_init__(self) -> None:
        if self.lanes not in (1, 2, 4, 8, 16):
            raise ArgumentError(f"lanes must be 1, 2, 4, 8 or 16, not {self.lanes!r}")
        if self.payload not in (128, 256, 512, 1024, 2048, 4096):
            raise ArgumentError(f"payload must be a power of two from 128, not {self.payload!r}")

    @property
    def bytes_per_s(self) -> float:
        """Rate of all bytes, each way, after 128/130 coding."""
        return self.lanes * LANE_BYTES_PER_S

    def writes(self, size: int) -> float:
        """Payload a second of writes of this size, one way."""
        return self.bytes_per_s * size / (size + REQUEST_BYTES)

    @property
    def one_way(self) -> float:
        """Payload a second of the largest writes."""
        return self.writes(self.payload)

    @property
    def both_ways(self) -> float:
        """Payload a second of the largest writes both ways together, beside packets of the link
        layer."""
        whole = self.payload + REQUEST_BYTES + LINK_LAYER_BYTES
        return 2 * self.bytes_per_s * self.payload / whole

    @property
    def reads(self) -> float:
        """Payload a second of reads, with enough of them in flight."""
        return self.bytes_per_s * self.payload / (self.payload + COMPLETION_BYTES)

    @property
    def loads(self) -> float:
        """Bytes a second of loads of 64 bytes, one after the other."""
        return LOAD_BYTES / (ROUND_TRIP_S + LOAD_BYTES / self.bytes_per_s)

    def knee(self, fraction: float, latency_s: float) -> int:
        """The least power of two of bytes that reaches a fraction of the rate of writes."""
        size = 1
        while size / self.one_way < fraction * (latency_s + size / self.one_way):
            size *= 2
        return size

    def latency_before(self, size: int, fraction: float) -> float:
        """Seconds before a transfer of this size with which it reaches the fraction."""
        return size / self.one_way * (1 / fraction - 1)
