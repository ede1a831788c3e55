"""Files for a loader that speaks USB's Device Firmware Upgrade."""

import struct
import zlib

__all__ = ["with_suffix"]

ANY_RELEASE, DFU_VERSION, SIGNATURE = 0xFFFF, 0x0100, b"UFD"
SUFFIX = struct.Struct("<HHHH3sB")
CHECKSUM = struct.Struct("<I")


def with_suffix(bitstream: bytes, vendor: int, product: int) -> bytes:
    """Append the DFU suffix of 16 bytes, which identifies the device, to a file.

    Ref: USB Device Class Specification for Device Firmware Upgrade 1.1, appendix B.
    """
    length = SUFFIX.size + CHECKSUM.size
    content = bitstream + SUFFIX.pack(ANY_RELEASE, product, vendor, DFU_VERSION, SIGNATURE, length)
    return content + CHECKSUM.pack(zlib.crc32(content) ^ 0xFFFFFFFF)
