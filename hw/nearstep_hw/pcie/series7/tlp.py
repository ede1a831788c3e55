"""Headers of transaction layer packets, and the order of their bytes."""

from amaranth import Cat, Value, unsigned
from amaranth.lib import data, enum

from nearstep_hw.pcie.stream import DWORD_BITS, DWORD_BYTES

BYTE_BITS = 8


class PacketType(enum.Enum, shape=5):
    """The field Type of the packets that the adapter distinguishes.

    Ref: PCIe Base Specification, table 2-3.
    """

    MEMORY = 0b00000
    LOCKED_READ = 0b00001
    IO = 0b00010
    COMPLETION = 0b01010
    LOCKED_COMPLETION = 0b01011
    FETCH_ADD = 0b01100
    SWAP = 0b01101
    COMPARE_AND_SWAP = 0b01110


PacketHead = data.StructLayout(
    {
        "dwords": unsigned(10),  # of payload; 0 is 1024
        "address_type": unsigned(2),
        "attributes": unsigned(2),  # no snoop, relaxed ordering
        "poisoned": unsigned(1),
        "digest": unsigned(1),
        "hints": unsigned(1),
        "_reserved0": unsigned(1),
        "id_ordering": unsigned(1),
        "_reserved1": unsigned(1),
        "traffic_class": unsigned(3),
        "_reserved2": unsigned(1),
        "packet_type": PacketType,
        "long": unsigned(1),  # a header of four dwords
        "payload": unsigned(1),
        "prefix": unsigned(1),
    }
)
"""The first dword of every packet. Ref: PCIe Base Specification, figure 2-5."""

RequestWord = data.StructLayout(
    {"first_be": unsigned(4), "last_be": unsigned(4), "tag": unsigned(8), "requester": unsigned(16)}
)
"""The second dword of a request."""

CompletionHead = data.StructLayout(
    {
        "head": PacketHead,
        "byte_count": unsigned(12),  # 0 is 4096
        "modified": unsigned(1),
        "status": unsigned(3),
        "completer": unsigned(16),
        "lower_address": unsigned(7),
        "_reserved": unsigned(1),
        "tag": unsigned(8),
        "requester": unsigned(16),
    }
)
"""The header of a completion. Ref: PCIe Base Specification, figure 2-36."""


def swapped(value: Value) -> Value:
    """Reverse the bytes of each dword."""
    dwords = [value.word_select(index, DWORD_BITS) for index in range(len(value) // DWORD_BITS)]
    return Cat(
        dword.word_select(DWORD_BYTES - 1 - byte, BYTE_BITS)
        for dword in dwords
        for byte in range(DWORD_BYTES)
    )
