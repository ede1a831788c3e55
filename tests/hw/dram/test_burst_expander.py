"""BurstExpander against the address mapping."""

import random

import pytest

from nearstep_hw.dram.burst_expander import BurstExpander
from nearstep_hw.dram.request import PAGE_BEATS
from nearstep_spec.dram.address import MAPPINGS, AddressMapping
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.timing import BURST_LENGTH

from ..simulate import giving, simulate, taking

ID_WIDTH = 2


@pytest.mark.parametrize("order", MAPPINGS)
@pytest.mark.parametrize("part", [("8Gb", "x8"), ("16Gb", "x16")])
def test_beats_are_where_the_mapping_puts_them(order: str, part: tuple[str, str]) -> None:
    check(AddressMapping(DramGeometry(*part), order))


@pytest.mark.parametrize("interleave", [4096, 16384, 1 << 20, 8 << 30])
def test_beats_are_in_the_rank_where_the_mapping_puts_them(interleave: int) -> None:
    for order in (MAPPINGS[0], MAPPINGS[-1]):
        check(AddressMapping(DramGeometry("16Gb", "x16", 2), order, interleave))


def check(mapping: AddressMapping) -> None:
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    geometry = mapping.geometry
    dut = BurstExpander(mapping, id_width=ID_WIDTH)
    bursts = []
    for _ in range(30):
        first = rng.randrange(PAGE_BEATS)
        page = rng.randrange(geometry.capacity_bytes // BEAT_BYTES // PAGE_BEATS)
        beats = rng.randint(1, PAGE_BEATS - first)
        bursts.append((rng.randrange(2), rng.randrange(4), page * PAGE_BEATS + first, beats))
    expected = []
    for write, id_, first, beats in bursts:
        for beat in range(first, first + beats):
            place = mapping.decode(beat * BEAT_BYTES)
            group = place.rank << geometry.bank_group_bits | place.bank_group
            bank = group << geometry.bank_bits | place.bank
            column = place.column // BURST_LENGTH
            expected.append((write, id_, beat == first + beats - 1, bank, place.row, column))
    found, idle = [], 0
    shown = [
        {"write": write, "id": id_, "address": first, "last": beats - 1, "refusal": 0}
        for write, id_, first, beats in bursts
    ]

    async def count(ctx):
        nonlocal idle
        while len(found) < len(expected):
            idle += not ctx.get(dut.o.valid)
            await ctx.tick()

    simulate(
        dut,
        giving(dut.i, shown, lambda: rng.random() < 0.3 and rng.randrange(80)),
        taking(dut.o, found, len(expected), lambda: rng.random() < 0.8),
        count,
    )
    assert not any(beat.opens for beat in found)
    names = ("write", "id", "last", "bank", "row", "column")
    assert [tuple(getattr(beat, name) for name in names) for beat in found] == expected
    assert len(found) > 300
    assert idle > 0


def test_bursts_follow_each_other_without_a_gap() -> None:
    dut = BurstExpander(AddressMapping(), id_width=ID_WIDTH)
    valid = []

    async def bench(ctx):
        ctx.set(dut.i.payload, {"write": 0, "id": 0, "address": 0, "last": 3, "refusal": 0})
        ctx.set(dut.i.valid, 1)
        ctx.set(dut.o.ready, 1)
        for _ in range(20):
            await ctx.tick()
            valid.append(ctx.get(dut.o.valid))

    simulate(dut, bench)
    assert valid == [1] * 20
