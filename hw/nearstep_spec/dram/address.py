"""Byte addresses of a channel to rank, bank group, bank, row and column, and back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.timing import BURST_LENGTH
from nearstep_spec.errors import NearstepError

__all__ = [
    "DEFAULT_INTERLEAVE",
    "DEFAULT_MAPPING",
    "LEAST_INTERLEAVE",
    "MAPPINGS",
    "AddressError",
    "AddressMapping",
    "BitField",
    "DramAddress",
]

DEFAULT_MAPPING = "row-column-bank-bankgroup"

MAPPINGS = (
    DEFAULT_MAPPING,  # neighbouring beats in all bank groups, then in all banks
    "row-bank-column-bankgroup",  # neighbouring beats in all bank groups; a row of each, then on
    "row-bankgroup-bank-column",  # a row at a time, then the next bank of the same group
    "bankgroup-row-column-bank",  # the bank group is the top of the address
    "bankgroup-bank-row-column",  # every bank is one contiguous piece
)
"""Mappings worth comparing. Any order of the four words is accepted."""

DEFAULT_INTERLEAVE = 16384
"""Bytes in one rank before the other: a block of the update kernel, see docs/dram-controller.md."""

LEAST_INTERLEAVE = 4096  # an AXI burst is inside a page of 4 KiB, and so inside a rank

_BEAT_SHIFT = BEAT_BYTES.bit_length() - 1
_BURST_SHIFT = BURST_LENGTH.bit_length() - 1


class AddressError(NearstepError, ValueError):
    """An address outside the channel or not on a beat, or an invalid mapping."""


class BitField(NamedTuple):
    """Bits `shift` to `shift + width - 1` of a byte address."""

    shift: int
    width: int

    def of(self, address: int) -> int:
        return (address >> self.shift) & ((1 << self.width) - 1)


class DramAddress(NamedTuple):
    """Coordinates of a beat. `column` is the first of eight columns, a multiple of eight."""

    bank_group: int
    bank: int
    row: int
    column: int
    rank: int = 0


@dataclass(frozen=True)
class AddressMapping:
    """Assignment of the bits of an address.

    With two ranks one bit of the address selects the rank; the remaining bits are an address inside
    the rank, assigned by the order.

    Parameters
    ----------
    geometry : the channel.
    order : the words `row`, `column`, `bank` and `bankgroup` from the high to the low bits of the
        beat number, joined by hyphens. The column word numbers bursts, not single columns.
    interleave : bytes in one rank before the other, a power of two from `LEAST_INTERLEAVE` to the
        size of a rank, which makes the rank the top of the address. Without effect on one rank.

    Raises
    ------
    AddressError : the order is not these four words, or the interleaving is invalid.
    """

    geometry: DramGeometry = field(default_factory=DramGeometry)
    order: str = DEFAULT_MAPPING
    interleave: int = DEFAULT_INTERLEAVE

    def __post_init__(self) -> None:
        if sorted(self.order.split("-")) != ["bank", "bankgroup", "column", "row"]:
            raise AddressError(
                "mapping must hold row, column, bank and bankgroup once each, joined by hyphens, "
                f"not {self.order!r}"
            )
        most = self.geometry.rank_bytes
        given = self.interleave
        if not LEAST_INTERLEAVE <= given <= most or given & (given - 1):
            raise AddressError(
                f"interleave must be a power of two from {LEAST_INTERLEAVE} to {most}, the bytes "
                f"of a rank, not {given!r}"
            )

    @property
    def rank(self) -> BitField:
        """Bits of a byte address that select the rank; none with one rank."""
        return BitField(self.interleave.bit_length() - 1, self.geometry.rank_bits)

    @property
    def fields(self) -> dict[str, BitField]:
        """Bits of a byte address inside a rank, by word, from the low end up."""
        widths = {
            "row": self.geometry.row_bits,
            "column": self.geometry.burst_column_bits,
            "bank": self.geometry.bank_bits,
            "bankgroup": self.geometry.bank_group_bits,
        }
        found = {}
        shift = _BEAT_SHIFT
        for word in reversed(self.order.split("-")):
            found[word] = BitField(shift, widths[word])
            shift += widths[word]
        return found

    def decode(self, address: int) -> DramAddress:
        """Place of the beat at a byte address.

        Raises
        ------
        AddressError : the address is outside the channel or not on a beat.
        """
        if not 0 <= address < self.geometry.capacity_bytes:
            raise AddressError(
                f"address {address:#x} is outside the channel of "
                f"{self.geometry.capacity_bytes:#x} bytes"
            )
        if address % BEAT_BYTES:
            raise AddressError(f"address {address:#x} is not a multiple of {BEAT_BYTES}")
        bits = self.fields
        rank = self.rank.of(address)
        low = (1 << self.rank.shift) - 1
        address = (address >> self.rank.width & ~low) | (address & low)
        return DramAddress(
            rank=rank,
            bank_group=bits["bankgroup"].of(address),
            bank=bits["bank"].of(address),
            row=bits["row"].of(address),
            column=bits["column"].of(address) << _BURST_SHIFT,
        )

    def encode(self, place: DramAddress) -> int:
        """Byte address of a beat.

        Raises
        ------
        AddressError : a coordinate is outside the geometry, or the column inside a burst.
        """
        if place.column % BURST_LENGTH:
            raise AddressError(f"column {place.column} is not a multiple of {BURST_LENGTH}")
        bits = self.fields
        address = 0
        for word, value in (
            ("bankgroup", place.bank_group),
            ("bank", place.bank),
            ("row", place.row),
            ("column", place.column >> _BURST_SHIFT),
        ):
            if not 0 <= value < 1 << bits[word].width:
                raise AddressError(
                    f"{word} must be 0 to {(1 << bits[word].width) - 1}, not {value!r}"
                )
            address |= value << bits[word].shift
        if not 0 <= place.rank < self.geometry.ranks:
            raise AddressError(f"rank must be 0 to {self.geometry.ranks - 1}, not {place.rank!r}")
        low = (1 << self.rank.shift) - 1
        high = (address & ~low) << self.rank.width
        return high | place.rank << self.rank.shift | (address & low)
