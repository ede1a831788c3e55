"""The transaction streams of the 7-series integrated block, 128 bits wide."""

from amaranth.lib import data
from amaranth.lib.wiring import Out, Signature

from nearstep_hw.pcie.stream import DWORD_BITS, DWORD_BYTES

WIDTH = 128  # Gen2 x4 at 125 MHz
LANES = WIDTH // DWORD_BITS
HALF = LANES // 2  # a packet begins at lane 0 or in the middle
BARS = 8  # BAR 0 to 5, expansion ROM, reserved

RxUser = data.StructLayout(
    {
        "ecrc_error": 1,
        "poisoned": 1,
        "bar_hit": BARS,
        "start_byte": 4,
        "start": 1,
        "_reserved": 2,
        "end_byte": 4,
        "end": 1,
    }
)
"""`m_axis_rx_tuser`, with the first and last byte of packets in a beat (rx_is_sof, rx_is_eof).

Ref: PG054, "Receive Interface".
"""

TX_USER_BITS = 4  # source discontinue, streamed, poisoned, ECRC


class RxSignature(Signature):
    """Receive stream of the block: `m_axis_rx`, without TKEEP and TLAST, unused at this width.

    Packets follow each other without a gap: one may end in the lower half of a beat and the next
    begin in its upper half. The first byte of a dword on the link is its most significant.

    Members
    -------
    tdata, tuser, tvalid, tready : as PG054 names them, without prefix.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "tdata": Out(WIDTH),
                "tuser": Out(RxUser),
                "tvalid": Out(1),
                "tready": Out(1).flip(),
            }
        )


class TxSignature(Signature):
    """Transmit stream of the block: `s_axis_tx`. Every packet begins at lane 0.

    The block stores a packet before it sends it, unless TUSER says otherwise: TVALID may fall
    inside a packet.

    Members
    -------
    tdata, tkeep, tlast, tuser, tvalid, tready : as PG054 names them, without prefix.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "tdata": Out(WIDTH),
                "tkeep": Out(WIDTH // DWORD_BITS * DWORD_BYTES),
                "tlast": Out(1),
                "tuser": Out(TX_USER_BITS),
                "tvalid": Out(1),
                "tready": Out(1).flip(),
            }
        )
