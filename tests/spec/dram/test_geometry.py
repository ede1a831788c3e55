"""Geometry against JESD79-4's addressing tables."""

import pytest

from nearstep_spec.dram.geometry import DramGeometry, GeometryError

GIB = 1 << 30

# density, width: row bits, bank group bits, page bytes, chips, GiB of a 64-bit rank
TABLE = [
    ("4Gb", "x8", 15, 2, 1024, 8, 4),
    ("8Gb", "x8", 16, 2, 1024, 8, 8),
    ("16Gb", "x8", 17, 2, 1024, 8, 16),
    ("4Gb", "x16", 15, 1, 2048, 4, 2),
    ("8Gb", "x16", 16, 1, 2048, 4, 4),
    ("16Gb", "x16", 17, 1, 2048, 4, 8),
    ("32Gb", "x16", 17, 2, 1024, 8, 16),  # four packages, each of two dies
]


@pytest.mark.parametrize(("density", "width", "rows", "groups", "page", "chips", "gib"), TABLE)
def test_geometry_is_the_standard_s(
    density: str, width: str, rows: int, groups: int, page: int, chips: int, gib: int
) -> None:
    g = DramGeometry(density, width)
    assert (g.row_bits, g.bank_group_bits, g.bank_bits, g.column_bits) == (rows, groups, 2, 10)
    assert (g.page_bytes, g.chips) == (page, chips)
    assert g.capacity_bytes == gib * GIB
    assert 1 << g.address_bits == g.capacity_bytes
    # the bits of one part come to its density
    dies = int(width[1:]) // g.chip_bits
    assert g.rows * g.columns * g.banks * g.chip_bits * dies == int(density[:-2]) * GIB
    assert (g.row_bytes, g.row_beats) == (8192, 128)


@pytest.mark.parametrize(("density", "width"), [("64Gb", "x8"), ("32Gb", "x8"), ("8Gb", "x4")])
def test_an_unknown_part_is_refused(density: str, width: str) -> None:
    with pytest.raises(GeometryError, match="must be one of"):
        DramGeometry(density, width)
