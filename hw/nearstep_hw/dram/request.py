"""Payloads between the parts of the controller: bursts, beats and rows."""

from amaranth import Const, Mux, Value, unsigned
from amaranth.lib import data
from amaranth.utils import exact_log2

from nearstep_hw.axi.signature import MAX_BURST_BEATS, PAGE_BYTES, BurstType, Response
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry

__all__ = [
    "BEAT_SHIFT",
    "PAGE_BEATS",
    "BeatLayout",
    "BurstLayout",
    "RowLayout",
    "any_rank",
    "bank_width",
    "of_rank",
    "rank_select",
    "refusal",
]

BEAT_SHIFT = exact_log2(BEAT_BYTES)
MAX_BURST_BITS = exact_log2(MAX_BURST_BEATS)
PAGE_BEATS = PAGE_BYTES // BEAT_BYTES  # longest burst of full beats that AXI allows


class BurstLayout(data.StructLayout):
    """A burst inside one page.

    Members
    -------
    write : 1 for a write.
    id : AXI ID.
    address : number of the first beat in the channel.
    last : beats after the first; fewer than `PAGE_BEATS` unless refused.
    refusal : the error response to an invalid burst, else OKAY.
    """

    def __init__(self, geometry: DramGeometry, *, id_width: int) -> None:
        super().__init__(
            {
                "write": unsigned(1),
                "id": unsigned(id_width),
                "address": unsigned(geometry.address_bits - BEAT_SHIFT),
                "last": unsigned(MAX_BURST_BITS),
                "refusal": Response,
            }
        )


def refusal(
    geometry: DramGeometry, *, address: Value, beats_less_one: Value, size: Value, burst: Value
) -> Value:
    """Return the response to an AXI request that the channel cannot serve, OKAY for the others.

    DECERR: the address is outside the channel. SLVERR: not INCR, not of full beats, or across a
    page.
    """
    first = address[BEAT_SHIFT:][: exact_log2(PAGE_BEATS)]
    crosses = (first + beats_less_one) >= PAGE_BEATS
    unsupported = (burst != BurstType.INCR) | (size != BEAT_SHIFT) | crosses
    outside = (address >> geometry.address_bits).any()
    return Mux(outside, Response.DECERR, Mux(unsupported, Response.SLVERR, Response.OKAY))


def bank_width(geometry: DramGeometry) -> int:
    """Return the bits of a bank's number among all banks of the channel."""
    return geometry.bank_bits + geometry.bank_group_bits + geometry.rank_bits


def rank_select(geometry: DramGeometry, bank: Value) -> Value:
    """Return a bit for each rank, high for the rank of `bank`."""
    above = bank[geometry.bank_bits + geometry.bank_group_bits :]
    return (1 << above)[: geometry.ranks] if geometry.ranks > 1 else Const(1, 1)


def of_rank(bits: Value, rank: Value) -> Value:
    """Return the bit of `bits`, one for each rank, that `rank_select` selects."""
    return bits if len(bits) == 1 else (bits & rank).any()


def any_rank(bits: Value) -> Value:
    """Return whether one of `bits`, one for each rank, is high."""
    return bits if len(bits) == 1 else bits.any()


class BeatLayout(data.StructLayout):
    """A beat, which is one column command.

    Members
    -------
    write : 1 for a write.
    id : AXI ID.
    last : the last beat of its burst.
    opens : the row is opened for this beat.
    bank : number among all banks of the channel: rank, bank group, bank, from the high bits.
    row, column : the column counts bursts of eight.
    """

    def __init__(self, geometry: DramGeometry, *, id_width: int) -> None:
        super().__init__(
            {
                "write": unsigned(1),
                "id": unsigned(id_width),
                "last": unsigned(1),
                "opens": unsigned(1),
                "bank": unsigned(bank_width(geometry)),
                "row": unsigned(geometry.row_bits),
                "column": unsigned(geometry.burst_column_bits),
            }
        )


class RowLayout(data.StructLayout):
    """A row to be opened.

    Members
    -------
    bank : number among all banks.
    row : row to open.
    """

    def __init__(self, geometry: DramGeometry) -> None:
        super().__init__(
            {
                "bank": unsigned(bank_width(geometry)),
                "row": unsigned(geometry.row_bits),
            }
        )
