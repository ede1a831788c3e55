"""What the parts of the controller hand on: bursts and beats."""

from amaranth import unsigned
from amaranth.lib import data
from amaranth.utils import bits_for, exact_log2

from nearstep_hw.axi.signature import PAGE_BYTES
from nearstep_hw.dram.geometry import BEAT_BYTES, DramGeometry

__all__ = ["BEAT_SHIFT", "PAGE_BEATS", "BeatLayout", "BurstLayout", "RowLayout"]

BEAT_SHIFT = exact_log2(BEAT_BYTES)
PAGE_BEATS = PAGE_BYTES // BEAT_BYTES  # longest burst of full beats that AXI allows


class BurstLayout(data.StructLayout):
    """A burst inside one page.

    Members
    -------
    write : 1 for a write.
    id : AXI ID.
    address : number of the first beat in the channel.
    last : beats after the first.
    """

    def __init__(self, geometry: DramGeometry, *, id_width: int) -> None:
        super().__init__(
            {
                "write": unsigned(1),
                "id": unsigned(id_width),
                "address": unsigned(geometry.address_bits - BEAT_SHIFT),
                "last": unsigned(bits_for(PAGE_BEATS - 1)),
            }
        )


class BeatLayout(data.StructLayout):
    """A beat, which is one column command.

    Members
    -------
    write : 1 for a write.
    id : AXI ID.
    last : ends its burst.
    opens : its row is opened for it.
    bank : number among all banks, the bank group in the high bits.
    row, column : the column counts bursts of eight.
    """

    def __init__(self, geometry: DramGeometry, *, id_width: int) -> None:
        super().__init__(
            {
                "write": unsigned(1),
                "id": unsigned(id_width),
                "last": unsigned(1),
                "opens": unsigned(1),
                "bank": unsigned(geometry.bank_bits + geometry.bank_group_bits),
                "row": unsigned(geometry.row_bits),
                "column": unsigned(geometry.burst_column_bits),
            }
        )


class RowLayout(data.StructLayout):
    """A row to be opened.

    Members
    -------
    bank : number among all banks.
    row : of the bank.
    """

    def __init__(self, geometry: DramGeometry) -> None:
        super().__init__(
            {
                "bank": unsigned(geometry.bank_bits + geometry.bank_group_bits),
                "row": unsigned(geometry.row_bits),
            }
        )
