"""CRC-32 (polynomial 0x04C11DB7, as in Ethernet and zlib) of data on drives.

Computed by Intel's ISA-L if the package `isal` is installed: 26 GB/s on a core that reaches 2 GB/s
with zlib. Both compute the same CRC.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module


def _fastest() -> tuple[str, Callable[..., int]]:
    try:
        return "isal", import_module("isal.isal_zlib").crc32
    except ImportError:
        return "zlib", zlib.crc32


engine, crc32 = _fastest()
