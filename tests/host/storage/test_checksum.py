"""CRC-32 of whichever library is there."""

import zlib

import numpy as np

from nearstep.storage.checksum import crc32, engine


def test_the_sum_is_that_of_the_standard() -> None:
    assert crc32(b"123456789") == 0xCBF43926  # the check value of CRC-32/ISO-HDLC
    assert crc32(b"") == 0


def test_every_library_gives_the_same_sums() -> None:
    print(f"CRC-32 of {engine}; seed 1")
    rng = np.random.default_rng(1)
    sizes = [*range(70), *rng.integers(0, 1 << 20, 20)]
    for size in sizes:
        data = rng.integers(0, 256, size, np.uint8)
        assert crc32(data) == zlib.crc32(data)
    assert len(sizes) == 90
