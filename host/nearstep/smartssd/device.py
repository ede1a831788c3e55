"""Driver of a computational SSD: the update kernel beside its memory."""

from __future__ import annotations

from collections.abc import Sequence

from nearstep.backends.base import Backend
from nearstep.errors import MismatchError
from nearstep.registers import Registers
from nearstep.updater.channel import KernelChannel
from nearstep.updater.device import KernelDevice
from nearstep_spec.smartssd.array import ArrayConfig
from nearstep_spec.smartssd.config import SmartssdConfig


class CardChannel(KernelChannel):
    """The kernel and the memory of one card."""

    def reset_kernel(self) -> None:
        """Reset the card; other cards continue.

        Raises
        ------
        WaitTimeoutError
        """
        reset_card = getattr(self.backend, "reset_card", None)
        if reset_card is None:
            super().reset_kernel()
            return
        if self.run is not None:
            self.run.forget("the kernel was reset")
        reset_card(self.number)


class SmartssdDevice(KernelDevice):
    """Cards, each with an update kernel and memory that the host can access at any time.

    Each card is a channel: arrays are striped over the cards by blocks, so that each owns the same
    share of the elements of any tensors (section IV-D).

    Attributes
    ----------
    regs : registers as objects: `card.regs.updater0.status.busy`; that of card i is `updaterI`.
    card : configuration of each card.

    Raises
    ------
    MismatchError : the registers are not those of the backend's configuration.

    Ref: Smart-Infinity, section IV.
    """

    def __init__(self, backend: Backend, url: str) -> None:
        config = backend.config
        if not isinstance(config, SmartssdConfig | ArrayConfig):
            raise MismatchError("configuration", "of a card", f"a {type(config).__name__}")
        self.card = config.card if isinstance(config, ArrayConfig) else config
        regs = Registers(backend, config.maps())
        channels = [
            CardChannel(backend, number, base, regs[f"updater{number}"])
            for number, (base, _) in enumerate(backend.regions)
        ]
        super().__init__(backend, url, config.kernel, regs, channels)

    @property
    def drive_places(self) -> Sequence[str]:
        return self.backend.drive_places
