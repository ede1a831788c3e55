"""Options of emulated SmartSSD cards, as they stand in a device name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from nearstep.backends.options import Family, Variant
from nearstep_sim.updater.options import FIXED, Engine
from nearstep_sim.verilate.options import Memory, SimulationOptions
from nearstep_spec.codec import Nested, Option
from nearstep_spec.smartssd.array import MOST_CARDS, ArrayConfig
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import ConfigError

DriveRate = Annotated[
    int | None,
    Option(
        meaning="bytes a second of the drive, to the card's memory (read) or from it (write)",
        low=1,
        high=1 << 40,
        unset="as fast as the port",
    ),
]

LinkRate = Annotated[
    int | None,
    Option(
        meaning="bytes a second of the host's link, each way, shared by the transfers of a step: "
        "to all cards (uplink), or to each card",
        low=1,
        high=1 << 40,
        unset="as fast as the ports",
    ),
]


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """Options that every emulated SmartSSD has, those of the card and its kernel among them."""

    card: Annotated[SmartssdConfig, Nested(omit=FIXED)] = field(default_factory=SmartssdConfig)
    cards: Annotated[
        int,
        Option(
            meaning="equal cards, each the owner of a share of the elements",
            allowed=f"from 1 to {MOST_CARDS}",
        ),
    ] = 1
    drive: Annotated[
        str | None,
        Option(
            meaning="drives of the cards, a file each, for the state of optimizers",
            allowed="a directory",
            unset="no drives",
        ),
    ] = None

    def __post_init__(self) -> None:
        ArrayConfig(card=self.card, cards=self.cards)  # checks the number
        if self.drive == "":
            raise ConfigError("drive must be a directory, not ''; '.' is the current one")
        self.card.maps()  # raises if rules of a file have names of other registers

    @property
    def memory_bytes(self) -> int:
        """Size of the card's DRAM."""
        return self.card.memory_bytes

    @property
    def drive_places(self) -> Sequence[str]:
        """The cards' drives."""
        if self.drive is None:
            return ()
        return [
            str(Path(self.drive, f"card{number}of{self.cards}.nearstep"))
            for number in range(self.cards)
        ]

    def config(self) -> SmartssdConfig:
        """Configuration of the card."""
        return self.card


@dataclass(frozen=True, kw_only=True)
class GoldenCardOptions(CardOptions):
    """Options of `golden:smartssd`."""

    engine: Engine = "cpp"


@dataclass(frozen=True, kw_only=True)
class SimulatedCardOptions(SimulationOptions, CardOptions):
    """Options of a card whose cycles are simulated, however the host reaches it."""

    memory: Memory = "halfduplex"
    drive_read_bytes_per_s: DriveRate = None
    drive_write_bytes_per_s: DriveRate = None
    drive_duplex: Annotated[
        Literal["half", "full"],
        Option(
            meaning="whether a drive with both rates reads or writes (half), as the machine of "
            "`nearstep platform show smart-infinity`, or does both at once"
        ),
    ] = "half"
    drive_latency_s: Annotated[
        float,
        Option(meaning="seconds before the first byte of a drive's transfer", low=0, high=1),
    ] = 0.0
    uplink_bytes_per_s: LinkRate = None
    uplink_duplex: Annotated[
        Literal["full", "half"],
        Option(meaning="whether the uplink's rate is each way's, or that of both together"),
    ] = "full"
    link_bytes_per_s: LinkRate = None
    clock_hz: Annotated[
        int,
        Option(
            meaning="cycles in a second of drives and links; the paper's clock, for nearstep has "
            "no measured one",
            low=1,
            high=1 << 32,
        ),
    ] = 200_000_000

    def __post_init__(self) -> None:
        SimulationOptions.__post_init__(self)
        CardOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class VerilatedCardOptions(SimulatedCardOptions):
    """Options of `sim:smartssd`. (`bus=pcie` is a device of its own: `PcieCardOptions`.)"""

    bus: Annotated[
        Literal["bar"],
        Option(meaning="between host and card; bar: the ports of registers and of the memory BAR"),
    ] = "bar"
    top: Annotated[
        Literal["parts", "whole"],
        Option(
            meaning="RTL; parts: the card and its units, joined in C++; whole: the Verilog of "
            "`nearstep rtl smartssd_card` as one object, of equal bits and cycles, slower"
        ),
    ] = "parts"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top == "whole" and self.fu != "rtl":
            raise ConfigError(f"fu must be rtl with top=whole, whose units are RTL, not {self.fu}")


@dataclass(frozen=True, kw_only=True)
class PcieCardOptions(SimulatedCardOptions):
    """Options of `sim:smartssd?bus=pcie`: the card as it is shipped, with its endpoint."""

    bus: Annotated[
        Literal["pcie"],
        Option(meaning="between host and card; pcie: packets at the PCIe block of the card"),
    ] = "pcie"
    fu: Annotated[Literal["rtl"], Option(meaning="functional units: those of the card")] = "rtl"
    reorder: Annotated[
        bool,
        Option(meaning="whether packets pass each other at random wherever PCIe lets them"),
    ] = False


GOLDEN = Family(
    "golden:smartssd",
    (
        Variant(
            options=GoldenCardOptions,
            opens="nearstep_sim.smartssd.golden:open_golden",
            summary="a SmartSSD card, without a clock",
        ),
    ),
)
SIM = Family(
    "sim:smartssd",
    (
        Variant(
            options=VerilatedCardOptions,
            opens="nearstep_sim.smartssd.card:open_card",
            summary="the RTL of a SmartSSD card",
        ),
        Variant(
            options=PcieCardOptions,
            opens="nearstep_sim.smartssd.pcie_card:open_pcie_card",
            summary="the RTL of a SmartSSD card as it is shipped, with its PCIe endpoint",
            when=("bus", "pcie"),
        ),
    ),
)
