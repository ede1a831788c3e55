"""Configuration of several equal SmartSSD cards, and addresses of their registers: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from nearstep_spec.csr.model import RegisterMap
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig

MOST_CARDS = 64


@dataclass(frozen=True, kw_only=True)
class ArrayConfig:
    """Cards that own equal shares of an optimizer's elements, by block.

    Each card has its own BARs, in consecutive address ranges: card i has registers from
    `i * card.register_bytes`, and memory from `i * card.memory_bytes`.

    Parameters
    ----------
    card : configuration of each card.
    cards : number of cards, at most `MOST_CARDS`.

    Raises
    ------
    ConfigError

    Ref: Smart-Infinity, section IV-D.
    """

    card: SmartssdConfig = field(default_factory=SmartssdConfig)
    cards: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.cards <= MOST_CARDS:
            raise ConfigError(f"cards must be from 1 to {MOST_CARDS}, not {self.cards!r}")

    @property
    def kernel(self) -> UpdateKernelConfig:
        """The update kernel of each card."""
        return self.card.kernel

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of all cards."""
        return self.cards * self.card.memory_bytes

    def maps(self) -> dict[str, tuple[int, RegisterMap]]:
        """Register blocks: name to offset and register map; that of card i is `updaterI`."""
        own = self.card.maps()["updater0"][1]
        return {f"updater{i}": (i * self.card.register_bytes, own) for i in range(self.cards)}
