"""Cards behind a PCIe endpoint, whose messages of MSI-X reach the host."""

from __future__ import annotations

from abc import abstractmethod

from nearstep.backends.base import Backend
from nearstep_spec.smartssd.config import SmartssdConfig


class EndpointBackend(Backend):
    """A card with one vector of MSI-X, which is sent at the end of a run.

    As long as messages are not allowed a vector is pending; it is sent once afterwards.
    """

    config: SmartssdConfig

    @abstractmethod
    def flush(self) -> None:
        """Wait for posted writes to memory.

        Raises
        ------
        PostedWriteError : one has failed.
        """

    @property
    @abstractmethod
    def messages(self) -> int:
        """Number of messages that were sent since the device was opened."""

    @abstractmethod
    def allow_messages(self, *, enabled: bool, masked: bool) -> None:
        """Set what configuration space says of MSI-X; kept by a reset.

        Parameters
        ----------
        enabled : the function has MSI-X enabled, and may master the bus.
        masked : all of its vectors are masked.
        """
