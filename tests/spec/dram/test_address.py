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
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import PARTS

ALL_ORDERS = ["-".join(p) for p in permutations(["row", "column", "bank", "bankgroup"])]
geometries = st.sampled_from([DramGeometry(*part) for part in PARTS])
mappings = st.builds(AddressMapping, geometries, st.sampled_from(ALL_ORDERS))


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
