"""BatchArbiter: order, batches, and who waits for whom."""

import random

import pytest

from nearstep_hw.dram.batch_arbiter import BatchArbiter
from nearstep_spec.dram.geometry import DramGeometry

from ..simulate import simulate

BATCH = 32
LAST = 7  # bursts of eight beats


def run(dut, cycles, reads, writes, few, ready=1.0, seed=0):
    """(cycle, write, bursts of the other direction since it was offered) of every burst that came
    out; `reads` and `writes` tell whether a burst comes in a cycle, and it stays until taken."""
    rng = random.Random(seed)
    found = []

    async def bench(ctx):
        number, others, offers = [0, 0], [0, 0], [False, False]
        for cycle in range(cycles):
            offers = [offers[0] or reads(cycle), offers[1] or writes(cycle)]
            for port, offer, next_ in zip((dut.i_read, dut.i_write), offers, number, strict=True):
                ctx.set(port.valid, offer)
                fields = {"write": 0, "id": 0, "address": next_, "last": LAST, "refusal": 0}
                ctx.set(port.payload, fields)
            ctx.set(dut.i_few, few(cycle))
            ctx.set(dut.o.ready, rng.random() < ready)
            taken = (
                ctx.get(dut.i_read.ready) and offers[0],
                ctx.get(dut.i_write.ready) and offers[1],
            )
            assert not (taken[0] and taken[1])
            if ctx.get(dut.o.valid) and ctx.get(dut.o.ready):
                burst = ctx.get(dut.o.payload)
                assert taken[burst.write]
                assert burst.address == number[burst.write]
                found.append((cycle, burst.write, others[burst.write]))
                number[burst.write] += 1
                others[1 - burst.write] += offers[1 - burst.write]
                others[burst.write] = 0
                offers[burst.write] = False
            else:
                assert not any(taken)
            await ctx.tick()

    simulate(dut, bench)
    return found


def arbiter():
    return BatchArbiter(DramGeometry(), id_width=2, batch_beats=BATCH)


def test_takes_turns_of_a_batch_when_both_have_bursts() -> None:
    found = run(arbiter(), 60, lambda _: True, lambda _: True, lambda _: False)
    kinds = [write for _, write, _ in found]
    bursts = BATCH // (LAST + 1)
    assert kinds[: 6 * bursts] == ([0] * bursts + [1] * bursts) * 3


def test_a_batch_goes_on_while_nobody_waits() -> None:
    found = run(arbiter(), 60, lambda _: True, lambda _: False, lambda _: True)
    assert found == [(cycle, 0, 0) for cycle in range(60)]


def test_waits_for_more_of_its_direction_until_few_beats_are_left() -> None:
    found = run(arbiter(), 40, lambda c: c < 2, lambda _: True, lambda c: c >= 20)
    assert [write for _, write, _ in found[:3]] == [0, 0, 1]
    assert found[2][0] == 21


def test_neither_direction_waits_longer_than_a_batch_of_the_other() -> None:
    seed = 3
    print(f"seed {seed}")
    rng = random.Random(seed)
    offers = [(rng.random() < 0.7, rng.random() < 0.7) for _ in range(4000)]
    found = run(
        arbiter(), 4000, lambda c: offers[c][0], lambda c: offers[c][1], lambda _: True, 0.7, seed
    )
    waited = [others for _, _, others in found]
    assert len(found) > 1000
    assert max(waited) == BATCH // (LAST + 1)


def test_refuses_a_batch_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1 beat, not 0"):
        BatchArbiter(DramGeometry(), id_width=2, batch_beats=0)
