"""Ranks, banks, rows and columns of DDR4 on a 64-bit channel, as plain data.

Ref: JESD79-4, "DDR4 SDRAM Addressing".
"""

from dataclasses import dataclass

from nearstep_spec.dram.timing import BURST_LENGTH, TimingError, die_of
from nearstep_spec.errors import NearstepError

__all__ = ["BEAT_BYTES", "CHANNEL_BITS", "RANKS", "DramGeometry", "GeometryError"]

CHANNEL_BITS = 64  # data pins of a channel, without the eight of an ECC module
BEAT_BYTES = CHANNEL_BITS // 8 * BURST_LENGTH  # bytes of one column command

RANKS = (1, 2)  # that share the data pins of a channel

_ROW_BITS = {"4Gb": 15, "8Gb": 16, "16Gb": 17}


class GeometryError(NearstepError, ValueError):
    """A density, width or number of ranks that is not in the table."""


@dataclass(frozen=True)
class DramGeometry:
    """Ranks of equal chips on a 64-bit channel. Banks, rows and columns are those of a rank.

    A chip is a die: a part of 32Gb is two of them.

    Parameters
    ----------
    density : bits of a part: 4Gb, 8Gb, 16Gb, or 32Gb of two dies.
    width : data pins of a part: x8 or x16; of 32Gb x16.
    ranks : 1 or 2, each with its own chip select.

    Raises
    ------
    GeometryError : with the value and what is allowed.
    """

    density: str = "8Gb"
    width: str = "x8"
    ranks: int = 1

    def __post_init__(self) -> None:
        try:
            die_of(self.density, self.width)
        except TimingError as error:
            raise GeometryError(str(error)) from None
        if self.ranks not in RANKS or isinstance(self.ranks, bool):
            raise GeometryError(f"ranks must be one of {RANKS}, not {self.ranks!r}")

    @property
    def rank_bits(self) -> int:
        """Bits that number the ranks of the channel."""
        return self.ranks.bit_length() - 1

    @property
    def _die(self) -> tuple[str, str]:
        return die_of(self.density, self.width)

    @property
    def chip_bits(self) -> int:
        """Data pins of a chip."""
        return int(self._die[1][1:])

    @property
    def chips(self) -> int:
        """Chips of a rank."""
        return CHANNEL_BITS // self.chip_bits

    @property
    def bank_group_bits(self) -> int:
        """Four bank groups in x8 parts, two in x16."""
        return 2 if self.chip_bits == 8 else 1

    @property
    def bank_bits(self) -> int:
        """Four banks in a bank group."""
        return 2

    @property
    def row_bits(self) -> int:
        """Equal for x8 and x16: a x16 row is twice as long and there are half as many banks."""
        return _ROW_BITS[self._die[0]]

    @property
    def column_bits(self) -> int:
        """Bits of a column address, the three inside a burst included."""
        return 10

    @property
    def burst_column_bits(self) -> int:
        """Bits that number the bursts of a row."""
        return self.column_bits - (BURST_LENGTH.bit_length() - 1)

    @property
    def bank_groups(self) -> int:
        return 1 << self.bank_group_bits

    @property
    def banks_per_group(self) -> int:
        return 1 << self.bank_bits

    @property
    def banks(self) -> int:
        """Banks of a rank, in all groups."""
        return self.bank_groups * self.banks_per_group

    @property
    def all_banks(self) -> int:
        """Banks of the channel, in all ranks."""
        return self.ranks * self.banks

    @property
    def rows(self) -> int:
        return 1 << self.row_bits

    @property
    def columns(self) -> int:
        return 1 << self.column_bits

    @property
    def page_bytes(self) -> int:
        """Bytes of a row in one chip (JEDEC's page size)."""
        return self.columns * self.chip_bits // 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all chips of a rank."""
        return self.page_bytes * self.chips

    @property
    def row_beats(self) -> int:
        """64-byte beats of a row in all chips of a rank."""
        return self.row_bytes // BEAT_BYTES

    @property
    def rank_bytes(self) -> int:
        """Bytes of a rank: 8 GiB with 8Gb x8, 16 GiB with 16Gb x8."""
        return self.row_bytes * self.rows * self.banks

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the channel, all ranks."""
        return self.ranks * self.rank_bytes

    @property
    def address_bits(self) -> int:
        """Bits of a byte address in the channel."""
        return self.capacity_bytes.bit_length() - 1
