"""Address mappings: one to one, and dealt out in the order of their names."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearstep_spec.dram.address import (
    DEFAULT_MAPPING,
    MAPPINGS,
    AddressError,
    AddressMapping,
    DramAddress,
)
from nearstep_spec.dram.geometry import RANKS, DramGeometry
from nearstep_spec.dram.timing import PARTS

ALL_ORDERS = ["-".join(p) for p in permutations(["row", "column", "bank", "bankgroup"])]
geometries = st.sampled_from([DramGeometry(*part, ranks) for part in PARTS for ranks in RANKS])


@st.composite
def _mappings(draw: st.DrawFn) -> AddressMapping:
    geometry = draw(geometries)
    interleave = 1 << draw(st.integers(12, geometry.rank_bytes.bit_length() - 1))
    return AddressMapping(geometry, draw(st.sampled_from(ALL_ORDERS)), interleave)


mappings = _mappings()


@given(mappings, st.data())
def test_address_to_place_and_back_is_the_identity(
    mapping: AddressMapping, data: st.DataObject
) -> None:
    beats = mapping.geometry.capacity_bytes // 64
    address = 64 * data.draw(st.integers(0, beats - 1))
    place = mapping.decode(address)
    assert mapping.encode(place) == address
    g = mapping.geometry
    assert 0 <= place.bank_group < g.bank_groups
    assert 0 <= place.bank < g.banks_per_group
    assert 0 <= place.row < g.rows
    assert 0 <= place.column < g.columns
    assert place.column % 8 == 0
    assert 0 <= place.rank < g.ranks


@given(mappings, st.data())
def test_place_to_address_and_back_is_the_identity(
    mapping: AddressMapping, data: st.DataObject
) -> None:
    g = mapping.geometry
    place = DramAddress(
        data.draw(st.integers(0, g.bank_groups - 1)),
        data.draw(st.integers(0, g.banks_per_group - 1)),
        data.draw(st.integers(0, g.rows - 1)),
        8 * data.draw(st.integers(0, g.columns // 8 - 1)),
        data.draw(st.integers(0, g.ranks - 1)),
    )
    assert mapping.decode(mapping.encode(place)) == place


@pytest.mark.parametrize("order", ALL_ORDERS)
def test_fields_cover_the_address_once_in_the_order_of_the_name(order: str) -> None:
    mapping = AddressMapping(DramGeometry(), order)
    shift = 6
    for word in reversed(order.split("-")):
        assert mapping.fields[word].shift == shift
        shift += mapping.fields[word].width
    assert 1 << shift == mapping.geometry.capacity_bytes


def test_default_walks_bank_groups_then_banks_then_columns() -> None:
    mapping = AddressMapping()
    assert mapping.order == DEFAULT_MAPPING
    places = [mapping.decode(64 * beat) for beat in range(2049)]
    assert [p.bank_group for p in places[:5]] == [0, 1, 2, 3, 0]
    assert [p.bank for p in places[:17:4]] == [0, 1, 2, 3, 0]
    assert [p.column for p in places[:33:16]] == [0, 8, 16]
    # 16 banks x 128 bursts = 128 KiB before the row changes
    assert {p.row for p in places[:2048]} == {0}
    assert places[2048] == DramAddress(0, 0, 1, 0)


def test_bank_group_high_keeps_a_quarter_of_the_channel_in_one_group() -> None:
    mapping = AddressMapping(DramGeometry(), "bankgroup-row-column-bank")
    quarter = mapping.geometry.capacity_bytes // 4
    assert mapping.decode(quarter - 64).bank_group == 0
    assert mapping.decode(quarter) == DramAddress(1, 0, 0, 0)


def test_named_mappings_are_valid_and_distinct() -> None:
    assert len(set(MAPPINGS)) == len(MAPPINGS) == 5
    for order in MAPPINGS:
        AddressMapping(DramGeometry(), order)


@pytest.mark.parametrize("order", ["row-column-bank", "row-column-bank-rank", "rocobabg", ""])
def test_other_orders_are_refused(order: str) -> None:
    with pytest.raises(AddressError, match="once each"):
        AddressMapping(DramGeometry(), order)


def test_bad_addresses_and_places_are_refused() -> None:
    mapping = AddressMapping()
    for address in (-64, mapping.geometry.capacity_bytes):
        with pytest.raises(AddressError, match="outside the channel"):
            mapping.decode(address)
    with pytest.raises(AddressError, match="multiple of 64"):
        mapping.decode(32)
    with pytest.raises(AddressError, match="multiple of 8"):
        mapping.encode(DramAddress(0, 0, 0, 4))
    with pytest.raises(AddressError, match="row must be 0 to 65535"):
        mapping.encode(DramAddress(0, 0, 1 << 16, 0))


@pytest.mark.parametrize("interleave", [4096, 16384, 1 << 17, 8 << 30])
def test_ranks_take_turns_every_interleave_bytes(interleave: int) -> None:
    one = AddressMapping(DramGeometry())
    two = AddressMapping(DramGeometry(ranks=2), interleave=interleave)
    turns = [0, interleave - 64, interleave, 2 * interleave - 64, two.geometry.capacity_bytes - 64]
    assert [two.decode(address).rank for address in turns] == [0, 0, 1, 1, 1]
    # Inside a rank the order is that of one rank.
    for address in turns:
        inside = address // (2 * interleave) * interleave + address % interleave
        assert two.decode(address) == one.decode(inside)._replace(rank=two.decode(address).rank)
    assert two.fields == one.fields


@pytest.mark.parametrize("interleave", [0, -4096, 64, 2048, 12288, 16 << 30])
@pytest.mark.parametrize("ranks", [1, 2])
def test_interleavings_that_cut_a_burst_or_exceed_a_rank_are_refused(
    ranks: int, interleave: int
) -> None:
    with pytest.raises(
        AddressError, match=f"power of two from 4096 to {8 << 30}.*not {interleave}"
    ):
        AddressMapping(DramGeometry(ranks=ranks), interleave=interleave)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(AddressError, match="rank must be 0 to 0, not 1"):
        AddressMapping().encode(DramAddress(0, 0, 0, 0, 1))
    with pytest.raises(AddressError, match="rank must be 0 to 1, not 2"):
        AddressMapping(DramGeometry(ranks=2)).encode(DramAddress(0, 0, 0, 0, 2))
