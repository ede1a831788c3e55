"""CRC-32 (polynomial 0x04C11DB7, as in Ethernet and zlib) of what lies on drives.

Of Intel's ISA-L, by the package `isal`, where that is installed: 26 GB/s on a core that makes
2 GB/s with zlib's. The sums are the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["crc32", "engine"]


def _fastest() -> tuple[str, Callable[[Any], int]]:
    try:
        return "isal", import_module("isal.isal_zlib").crc32
    except ImportError:
        return "zlib", zlib.crc32


engine, crc32 = _fastest()
