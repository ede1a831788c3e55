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


@pytest.mark.parametrize(("density", "width", "rows", "groups", "page", "chips", "gib"), TABLE)
def test_two_ranks_double_the_channel_and_no_rank(
    density: str, width: str, rows: int, groups: int, page: int, chips: int, gib: int
) -> None:
    one, two = DramGeometry(density, width), DramGeometry(density, width, 2)
    assert (one.rank_bits, two.rank_bits) == (0, 1)
    assert two.rank_bytes == one.rank_bytes == one.capacity_bytes
    assert two.capacity_bytes == 2 * gib * GIB
    assert (two.banks, two.all_banks) == (one.banks, 2 * one.all_banks)
    assert two.address_bits == one.address_bits + 1


@pytest.mark.parametrize("ranks", [0, 3, 4, -1, True, "2", None])
def test_ranks_that_a_channel_cannot_have_are_refused(ranks: object) -> None:
    with pytest.raises(GeometryError, match=rf"ranks must be one of \(1, 2\), not {ranks!r}"):
        DramGeometry(ranks=ranks)
