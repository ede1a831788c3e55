"""Driver of a computational SSD: the update kernel beside its memory."""

from __future__ import annotations

from nearstep.backends.base import Backend
from nearstep.errors import MismatchError
from nearstep.registers import Registers
from nearstep.updater.channel import KernelChannel
from nearstep.updater.device import KernelDevice
from nearstep_spec.smartssd.config import SmartssdConfig


class SmartssdDevice(KernelDevice):
    """One card: an update kernel and its memory, which the host reaches at any time.

    Parameters
    ----------
    backend
    url

    Attributes
    ----------
    regs : registers as objects: `card.regs.updater0.status.busy`.
    card : what the card consists of.

    Raises
    ------
    MismatchError : the registers are not those of the backend's configuration.

    Ref: Smart-Infinity, section IV.
    """

    def __init__(self, backend: Backend, url: str) -> None:
        config = backend.config
        if not isinstance(config, SmartssdConfig):
            raise MismatchError("configuration", "of a card", f"a {type(config).__name__}")
        self.card = config
        regs = Registers(backend, config.maps())
        channels = [
            KernelChannel(backend, number, base, regs[f"updater{number}"])
            for number, (base, _) in enumerate(backend.regions)
        ]
        super().__init__(backend, url, config.kernel, regs, channels)
