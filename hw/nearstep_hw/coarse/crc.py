"""The CRC of headers and entries on a link."""

from amaranth.lib.crc import Processor
from amaranth.lib.crc.catalog import CRC32_ETHERNET

from nearstep_hw.coarse.wire import CRC_BITS, PHIT_BITS

HEADER_BITS = PHIT_BITS - CRC_BITS
"""What the CRC of a header covers: the bits below it."""


def header_crc() -> Processor:
    """CRC-32 of the low bits of a header, one word; equals `zlib.crc32` of its first 12 bytes."""
    return CRC32_ETHERNET(data_width=HEADER_BITS).create()


def entry_crc() -> Processor:
    """CRC-32 of an entry, a phit a cycle; equals `zlib.crc32` of its bytes."""
    return CRC32_ETHERNET(data_width=PHIT_BITS).create()
