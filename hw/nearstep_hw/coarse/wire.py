"""Interfaces between sync cores, ring buffers and links."""

from amaranth.hdl import unsigned
from amaranth.lib import data, enum

from nearstep_spec.coarse.config import (
    ELEMENT_BITS,
    MAX_GROUPS,
    PHIT_BYTES,
    SEQUENCE_BITS,
    TAG_BITS,
)

PHIT_BITS = 8 * PHIT_BYTES
CRC_BITS = 32
MEMBER_BITS = 8
EPOCH_BITS = 4
ADDEND_BITS = 16  # of the fields of register `addends`
MAP_BITS = 11
"""Entries, from the first missing one on, whose acceptance a header reports."""


class Operation(enum.Enum, shape=2):
    """Operation of a job on the elements of all devices."""

    SUM = 0
    AVERAGE = 1
    MAX = 2


class Wire(enum.Enum, shape=2):
    """Format of elements on a link."""

    FP32 = 0
    FP16 = 1
    BF16 = 2


class JobLayout(data.StructLayout):
    """A job of a sync core.

    `source` and `destination` are byte addresses, `scale` the factor of an average (fp32),
    `tag` any number that identifies the job to all devices. `beyond` has a bit for each address
    that exceeds `address_width`: it is outside every window. An exact sum has `count` arrays of
    each device, and a `divisor` other than 0.

    Parameters
    ----------
    address_width : bits of a byte address.
    exact : cores have exact sums.
    """

    def __init__(self, *, address_width: int, exact: bool = False) -> None:
        super().__init__(
            {
                "source": address_width,
                "destination": address_width,
                "elements": ELEMENT_BITS,
                "scale": 32,
                "tag": TAG_BITS,
                "operation": Operation,
                "wire": Wire,
                "beyond": 2,
                **({"count": ADDEND_BITS, "divisor": ADDEND_BITS} if exact else {}),
            }
        )


class DescriptionLayout(data.StructLayout):
    """Description of a job, equal on all devices of a ring: the only phit of the first entry of
    each job.

    Parameters
    ----------
    exact : cores have exact sums.
    """

    def __init__(self, *, exact: bool) -> None:
        super().__init__(
            {
                "elements": ELEMENT_BITS,
                "scale": 32,
                "tag": TAG_BITS,
                "operation": Operation,
                "wire": Wire,
                "members": MEMBER_BITS,
                **({"divisor": ADDEND_BITS} if exact else {}),
            }
        )


EntryPhit = data.StructLayout({"data": PHIT_BITS, "last": 1})
"""A phit of an entry between a sync core and its ring buffers; `last` ends the entry."""

LinkPhit = data.StructLayout({"data": PHIT_BITS, "head": 1, "last": 1})
"""A phit on a link; `head` begins a frame, `last` ends it."""


class FrameKind(enum.Enum, shape=3):
    """Kind of a frame."""

    CONTROL = 1  # one phit: acknowledgements, credits and serial number
    ENTRY = 2  # header, entry, trailer
    ABORT = 3  # one phit: origin of the fault


HEADER = data.StructLayout(
    {
        "kind": FrameKind,
        "epoch": EPOCH_BITS,
        "group": 2,
        "sequence": SEQUENCE_BITS,
        "length": 8,  # phits of the entry, less one; in a CONTROL frame, 1: an answer is wanted
        "serial": SEQUENCE_BITS,  # transmissions of entries of `group`, with this one
        "told": 2,  # the group of `passed` and `accepted`
        "passed": SEQUENCE_BITS,  # all transmissions up to this serial number were received or lost
        "accepted": MAP_BITS,  # a bit for each entry from `received` on
        "received": data.ArrayLayout(SEQUENCE_BITS, MAX_GROUPS),  # number of entries, of each group
        "consumed": data.ArrayLayout(SEQUENCE_BITS, MAX_GROUPS),
        "crc": unsigned(CRC_BITS),  # of the bits below
    }
)
"""First phit of every frame. The entry's slot is `sequence` modulo the depth of its group's
RecvBuf.
"""

ABORT = data.StructLayout(
    {
        "kind": FrameKind,
        "epoch": EPOCH_BITS,
        "cause": 8,
        "device": MEMBER_BITS,  # that detected the fault
        "port": 1,  # of the fault
        "reserved": PHIT_BITS - CRC_BITS - 3 - EPOCH_BITS - 8 - MEMBER_BITS - 1,
        "crc": unsigned(CRC_BITS),
    }
)
"""The phit of a frame of kind ABORT."""

TRAILER = data.StructLayout({"reserved": PHIT_BITS - CRC_BITS, "crc": unsigned(CRC_BITS)})
"""Last phit of a frame of kind ENTRY; `crc` is that of the entry's phits."""
