"""Opens the drives of an optimizer: the host's, or those of the device's cards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nearstep.placement import Placement
from nearstep.smartssd.device import SmartssdDevice
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.torch.cards.tier import CardTier
from nearstep.torch.execution import StepExecutor
from nearstep.torch.homes.peer import PeerHome
from nearstep.torch.layout import Layout
from nearstep.torch.overflow.drive_tier import DriveTier
from nearstep.torch.overflow.held_store import HeldStore
from nearstep.torch.overflow.opening import OpenStore
from nearstep.torch.overflow.options import Overflow
from nearstep.torch.overflow.tier import Tier
from nearstep.torch.settings import Settings
from nearstep.torch.traffic import Traffic
from nearstep.updater.device import KernelDevice

EXTENT_BYTES = 4 << 20
"""Bytes of an extent of cards' drives at most: subgroups are read and written whole, and each
extent takes the host's time."""


class OnDrives(NamedTuple):
    """The drives of an optimizer.

    Attributes
    ----------
    opened
    tier
    steps : that use them; None: as without drives.
    """

    opened: OpenStore
    tier: DriveTier[Any]
    steps: StepExecutor | None


def on_drives(
    device: KernelDevice,
    placement: Placement,
    settings: Settings,
    traffic: Traffic,
    layout: Layout,
    title: str,
    groups: Sequence[Any],
) -> OnDrives:
    """Open the drives that an optimizer has according to its settings.

    Raises
    ------
    ResumeError, StorageError
    """
    options = settings.overflow
    assert options is not None, "there are drives"
    moments = len(layout.moments)
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
        )
        drives = HeldStore(opened.store, owns=opened.owns)
        home = PeerHome(device, traffic, opened.store, naive=settings.naive)
        steps = StepExecutor(device, placement, settings, traffic, home)
        tier = CardTier(drives, device, traffic, home.prefetcher, home.checks)
        tier.source, tier.replaces = opened.source, opened.replaces
        return OnDrives(opened, tier, steps)
    opened = OpenStore(options, title, groups, moments)
    return OnDrives(opened, _tier(options, opened, device, traffic, len(layout.required)), None)


def extent_bytes(subgroup_bytes: int) -> int:
    """Extents that subgroups of so many bytes of an array consist of, if there are such: what is
    written in part is read first."""
    whole = subgroup_bytes // BLOCK_BYTES
    if not whole or subgroup_bytes % BLOCK_BYTES:
        return BLOCK_BYTES
    most = min(EXTENT_BYTES // BLOCK_BYTES, whole)
    return BLOCK_BYTES * max(each for each in range(1, most + 1) if whole % each == 0)


def _tier(
    options: Overflow, opened: OpenStore, device: KernelDevice, traffic: Traffic, moments: int
) -> Tier:
    try:
        drives = HeldStore(opened.store, owns=opened.owns)
        tier = Tier(options, drives, opened.memory(moments), device, traffic)
    except BaseException:
        opened.give_up()
        raise
    tier.source = opened.source
    return tier
