"""Opens the drives of an optimizer: the host's, or those of the device's cards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nearstep.smartssd.device import SmartssdDevice
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.torch.homes.drive import DriveHome
from nearstep.torch.homes.durable import DurableHome
from nearstep.torch.homes.opening import OpenStore
from nearstep.torch.homes.peer import PeerHome
from nearstep.torch.homes.ranks import Ranks
from nearstep.torch.table import StateTable

EXTENT_BYTES = 4 << 20
"""Bytes of an extent of new drives at most: each extent takes the host's time."""


def open_home(
    table: StateTable, title: str, groups: Sequence[Any], ranks: Ranks | None
) -> tuple[OpenStore, DurableHome[Any]]:
    """Open the drives of an optimizer.

    Parameters
    ----------
    ranks : processes that share its parameters; None: it has whole ones.
    """
    device, settings, options = table.device, table.settings, table.settings.overflow
    assert options is not None, "there are drives"
    moments = len(table.layout.moments)
    if device.drive_places and isinstance(device, SmartssdDevice):
        opened = OpenStore(
            options,
            title,
            groups,
            moments,
            residual=settings.has_residual and settings.save_residual,
            block=device.stripe_bytes,
            extent_bytes=extent_bytes(4 * device.card.subgroup),
            cards=True,
            ranks=ranks,
        )
        return opened, PeerHome(table, device, opened)
    opened = OpenStore(options, title, groups, moments, extent_bytes=EXTENT_BYTES, ranks=ranks)
    try:
        memory = opened.memory(len(table.layout.required))
        return opened, DriveHome(table, opened, options.eviction, memory)
    except BaseException:
        opened.give_up()
        raise


def extent_bytes(subgroup_bytes: int) -> int:
    """Extents that subgroups of so many bytes of an array consist of, if there are such: what is
    written in part is read first."""
    whole = subgroup_bytes // BLOCK_BYTES
    if not whole or subgroup_bytes % BLOCK_BYTES:
        return BLOCK_BYTES
    most = min(EXTENT_BYTES // BLOCK_BYTES, whole)
    return BLOCK_BYTES * max(each for each in range(1, most + 1) if whole % each == 0)
