"""Opens the drives of an optimizer: the host's, or those of the device's cards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nearstep.smartssd.device import SmartssdDevice
from nearstep.torch.homes.drive import DriveHome
from nearstep.torch.homes.durable import DurableHome
from nearstep.torch.homes.opening import OpenStore
from nearstep.torch.homes.peer import PeerHome
from nearstep.torch.homes.ranks import Ranks
from nearstep.torch.homes.segments import extents_of
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
            extent_bytes=extents_of(4 * device.card.subgroup, EXTENT_BYTES),
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
