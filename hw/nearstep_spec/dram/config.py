"""Configuration of a DRAM channel: plain data."""

from dataclasses import dataclass
from typing import Annotated, Literal

from nearstep_spec.codec import Option
from nearstep_spec.dram.address import DEFAULT_INTERLEAVE, DEFAULT_MAPPING, MAPPINGS, AddressMapping
from nearstep_spec.dram.geometry import RANKS, DramGeometry
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
Ranks = Annotated[int, Option(meaning="ranks of a channel", choices=RANKS)]
Interleave = Annotated[
    int,
    Option(
        meaning="bytes in one rank of a channel before the other",
        allowed="a power of two from 4096 to the bytes of a rank",
    ),
]


@dataclass(frozen=True, kw_only=True)
class DramConfig:
    """The DDR4-1600 of a channel.

    Parameters
    ----------
    density, width : of the DRAM chips.
    mapping : order of the address bits inside a rank.
    ranks, interleave : see `DramGeometry` and `AddressMapping`.

    Raises
    ------
    ValueError : with the value and what is allowed.
    """

    density: Density = "8Gb"
    width: Width = "x8"
    mapping: Mapping = DEFAULT_MAPPING
    ranks: Ranks = 1
    interleave: Interleave = DEFAULT_INTERLEAVE

    def __post_init__(self) -> None:
        assert self.address_mapping  # its constructor checks every option

    @property
    def address_mapping(self) -> AddressMapping:
        return AddressMapping(
            DramGeometry(self.density, self.width, self.ranks), self.mapping, self.interleave
        )

    @property
    def timing(self) -> DramTiming:
        return dram_timing("DDR4-1600", self.density, self.width)
