"""Counters of the devices of a pool."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from nearstep.registers import BlockRegisters, Registers
from nearstep_spec.coarse.config import PORTS
from nearstep_spec.coarse.registers import LINK_COUNTERS, SYNC_COUNTERS

COUNTER_BITS = 64


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Base of counters; `after - before` is the difference, of integers modulo 2**64."""

    def __sub__(self, before: Self) -> Self:
        names = [each.name for each in fields(self)]
        return type(self)(**{n: _minus(getattr(self, n), getattr(before, n)) for n in names})


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, tuple):
        return tuple(map(_minus, after, before))
    if isinstance(after, Counters):
        return after - before
    return None if None in (after, before) else (after - before) % (1 << COUNTER_BITS)


@dataclass(frozen=True, kw_only=True)
class LinkCounters(Counters):
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
class CoreCounters(Counters):
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
class DeviceCounters(Counters):
    """Counters of one device.

    Attributes
    ----------
    links : by port; port 1 sends to the next device, port 0 to the one before.
    cores : by group.
    pages_copied : by the open snapshot, or the last one.
    snapshot_stall : cycles in which a write waited for a page to be copied.
    """

    links: tuple[LinkCounters, ...]
    cores: tuple[CoreCounters, ...]
    pages_copied: int
    snapshot_stall: int

    def __sub__(self, before: Self) -> Self:
        return replace(
            super().__sub__(before),
            pages_copied=self.pages_copied,
            snapshot_stall=self.snapshot_stall,
        )


@dataclass(frozen=True, kw_only=True)
class PoolCounters(Counters):
    """Counters of all devices.

    Attributes
    ----------
    cycles : device cycle of the reading, or cycles between; None without a clock.
    """

    cycles: int | None
    devices: tuple[DeviceCounters, ...]


def read_counters(node: Registers, groups: int) -> DeviceCounters:
    """Read the counters of one device, latched block by block in one cycle each."""
    node.pool.control.latch = 1
    return DeviceCounters(
        links=tuple(
            LinkCounters(**_values(node.pool, LINK_COUNTERS, f"link{port}_"))
            for port in range(PORTS)
        ),
        cores=tuple(_read_core(node[f"sync{group}"]) for group in range(groups)),
        pages_copied=int(node.pool.snapshot_pages_copied.value),
        snapshot_stall=int(node.pool.snapshot_stall.value),
    )


def _read_core(core: BlockRegisters) -> CoreCounters:
    core.control.latch = 1
    return CoreCounters(**_values(core, SYNC_COUNTERS, ""))


def _values(block: BlockRegisters, names: dict[str, str], prefix: str) -> dict[str, int]:
    return {name: int(block[prefix + name].value) for name in names}
