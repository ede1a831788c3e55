"""Counters of the devices of a pool."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from nearstep.registers import BlockRegisters, Registers
from nearstep_spec.coarse.config import PORTS
from nearstep_spec.coarse.registers import LINK_COUNTERS, SYNC_COUNTERS

COUNTER_BITS = 64


@dataclass(frozen=True)
class Counts:
    """Counters of one block; `after - before` is the difference modulo 2**64."""

    def __sub__(self, before: Self) -> Self:
        counted = {
            each.name: (getattr(self, each.name) - getattr(before, each.name)) % (1 << COUNTER_BITS)
            for each in fields(self)
        }
        return type(self)(**counted)


@dataclass(frozen=True, kw_only=True)
class LinkCounters(Counts):
    """Counters of one end of a link.

    Attributes
    ----------
    sent_phits, payload_phits : phits of 16 bytes sent; phits of entries among them.
    replays : entries sent again.
    received_entries, bad_frames, gaps, duplicates : entries accepted; frames dropped; gaps in the
        sequence of entries; entries received again.
    stall : cycles in which a phit waited for the link.
    """

    sent_phits: int
    payload_phits: int
    replays: int
    received_entries: int
    bad_frames: int
    gaps: int
    duplicates: int
    stall: int


@dataclass(frozen=True, kw_only=True)
class CoreCounters(Counts):
    """Counters of a sync core: cycles with a running job, beats of its ALUs, and stalls by cause.

    Attributes
    ----------
    stall_local, stall_receive, stall_send, stall_write : in cycles.
    """

    cycles: int
    beats: int
    stall_local: int
    stall_receive: int
    stall_send: int
    stall_write: int


@dataclass(frozen=True, kw_only=True)
class DeviceCounters:
    """Counters of one device.

    Attributes
    ----------
    links : by port; port 1 sends to the next device, port 0 to the one before.
    cores : by group.
    pages_copied : of the open snapshot, or of the last one.
    snapshot_stall : cycles in which a write waited for a page to be copied.
    """

    links: tuple[LinkCounters, ...]
    cores: tuple[CoreCounters, ...]
    pages_copied: int
    snapshot_stall: int

    def __sub__(self, before: Self) -> DeviceCounters:
        return DeviceCounters(
            links=tuple(a - b for a, b in zip(self.links, before.links, strict=True)),
            cores=tuple(a - b for a, b in zip(self.cores, before.cores, strict=True)),
            pages_copied=self.pages_copied,
            snapshot_stall=self.snapshot_stall,
        )


@dataclass(frozen=True, kw_only=True)
class PoolCounters:
    """Counters of all devices; `after - before` is the difference.

    Attributes
    ----------
    cycles : device cycle of the reading, or cycles between; None without a clock.
    """

    cycles: int | None
    devices: tuple[DeviceCounters, ...]

    def busy_share(self, device: int, port: int) -> float | None:
        """Return the share of cycles in which a direction of a link carried a phit; None without a
        clock."""
        return self._share(self.devices[device].links[port].sent_phits)

    def payload_share(self, device: int, port: int) -> float | None:
        """Return the share of cycles in which a direction carried a phit of an entry; None without
        a clock."""
        return self._share(self.devices[device].links[port].payload_phits)

    def _share(self, phits: int) -> float | None:
        return phits / self.cycles if self.cycles else None

    def __sub__(self, before: Self) -> PoolCounters:
        clocks = self.cycles is not None and before.cycles is not None
        return PoolCounters(
            cycles=(self.cycles or 0) - (before.cycles or 0) if clocks else None,
            devices=tuple(
                after - then for after, then in zip(self.devices, before.devices, strict=True)
            ),
        )


def read_counters(node: Registers, groups: int) -> DeviceCounters:
    """Read the counters of one device, latched block by block in one cycle each."""
    node.pool.control.latch = 1
    return DeviceCounters(
        links=tuple(
            LinkCounters(**_values(node.pool, LINK_COUNTERS, f"link{port}_"))
            for port in range(PORTS)
        ),
        cores=tuple(_core(node[f"sync{group}"]) for group in range(groups)),
        pages_copied=int(node.pool.snapshot_pages_copied.value),
        snapshot_stall=int(node.pool.snapshot_stall.value),
    )


def _core(core: BlockRegisters) -> CoreCounters:
    core.control.latch = 1
    return CoreCounters(**_values(core, SYNC_COUNTERS, ""))


def _values(block: BlockRegisters, names: dict[str, str], prefix: str) -> dict[str, int]:
    return {name: int(block[prefix + name].value) for name in names}
