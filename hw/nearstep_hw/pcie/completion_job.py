"""One completion to be sent: the payload between parts of the read path."""

from amaranth import unsigned
from amaranth.lib import data, enum
from amaranth.utils import bits_for, ceil_log2

from nearstep_hw.pcie.descriptor import MAX_PAYLOAD_BYTES, Status
from nearstep_hw.pcie.request import RequestHead
from nearstep_hw.pcie.route import REGISTER_BITS
from nearstep_hw.pcie.stream import DWORD_BYTES

MAX_PAYLOAD_DWORDS = MAX_PAYLOAD_BYTES // DWORD_BYTES


class Source(enum.Enum, shape=2):
    """Source of the payload of a completion."""

    MEMORY = 0
    REGISTERS = 1
    NOWHERE = 2  # a refusal


class WaitingRequest(data.StructLayout):
    """A waiting non-posted request.

    Members
    -------
    head : the request.
    source, status : of the completion; the status is valid with `NOWHERE`.
    dword : number of the first dword within the BAR.
    empty : no byte is read.
    """

    def __init__(self, address_width: int) -> None:
        super().__init__(
            {
                "head": RequestHead(),
                "source": Source,
                "status": Status,
                "dword": unsigned(address_width - 2),
                "empty": unsigned(1),
            }
        )


class CompletionJob(data.StructLayout):
    """One completion.

    Parameters
    ----------
    lanes : dwords of a beat of memory.

    Members
    -------
    head : head of the request.
    source, status : see `WaitingRequest`.
    lower_address, byte_count : of the completion's descriptor.
    dwords : dwords of payload.
    lane : lane of the first dword in the first beat, from memory.
    word : number of the first word, from registers.
    empty : no byte is read.
    last : the last completion of the request.
    """

    def __init__(self, lanes: int) -> None:
        super().__init__(
            {
                "head": RequestHead(),
                "source": Source,
                "status": Status,
                "lower_address": unsigned(7),
                "byte_count": unsigned(13),
                "dwords": unsigned(bits_for(MAX_PAYLOAD_DWORDS)),
                "lane": unsigned(ceil_log2(lanes)),
                "word": unsigned(REGISTER_BITS),
                "empty": unsigned(1),
                "last": unsigned(1),
            }
        )
