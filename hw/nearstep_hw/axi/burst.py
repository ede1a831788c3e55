"""Layout of a burst between the parts of a mover."""

from amaranth import unsigned
from amaranth.lib import data
from amaranth.utils import bits_for


class BurstLayout(data.StructLayout):
    """A burst of whole beats of one stream.

    Parameters
    ----------
    streams : number of streams.
    address_width : bits of a byte address.
    burst_beats : beats of the longest burst.

    Members
    -------
    stream : 0 to `streams` - 1; also the AXI ID.
    address : byte address of the first beat, a multiple of a beat.
    beats : 1 to `burst_beats`.
    block_last : the burst ends its stream's block.
    run_last : the burst ends its stream.
    """

    def __init__(self, *, streams: int, address_width: int, burst_beats: int) -> None:
        super().__init__(
            {
                "stream": unsigned(id_width(streams)),
                "address": unsigned(address_width),
                "beats": unsigned(bits_for(burst_beats)),
                "block_last": unsigned(1),
                "run_last": unsigned(1),
            }
        )


def id_width(streams: int) -> int:
    """Return the bits of a stream number; at least one."""
    return max(1, bits_for(streams - 1))
