"""Configuration of a DRAM channel: plain data."""

from dataclasses import dataclass
from typing import Annotated, Literal

from nearstep_spec.codec import Option
from nearstep_spec.dram.address import DEFAULT_MAPPING, MAPPINGS, AddressMapping
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import DramTiming, dram_timing

Density = Annotated[
    Literal["4Gb", "8Gb", "16Gb", "32Gb"], Option(meaning="of a DRAM chip; 32Gb: two dies, x16")
]
Width = Annotated[Literal["x8", "x16"], Option(meaning="data pins of a DRAM chip")]
Mapping = Annotated[
    str,
    Option(
        meaning="order of the address bits in a channel, from the top",
        choices=MAPPINGS,
        allowed="or any other order of the four words",
    ),
]


@dataclass(frozen=True, kw_only=True)
class DramConfig:
    """One rank of DDR4-1600 on a channel.

    Parameters
    ----------
    density, width : of the DRAM chips.
    mapping : order of the address bits inside the channel.

    Raises
    ------
    ValueError : with the value and what is allowed.
    """

    density: Density = "8Gb"
    width: Width = "x8"
    mapping: Mapping = DEFAULT_MAPPING

    def __post_init__(self) -> None:
        assert self.address_mapping  # it checks all three

    @property
    def address_mapping(self) -> AddressMapping:
        return AddressMapping(DramGeometry(self.density, self.width), self.mapping)

    @property
    def timing(self) -> DramTiming:
        return dram_timing("DDR4-1600", self.density, self.width)
