"""HoldLine against a list of when each thing was last hit."""

import random

import pytest

from nearstep_hw.dram.hold import HoldLine

from ..simulate import simulate

THINGS = 5


@pytest.mark.parametrize("distances", [{"a": 1, "b": 3}, {"a": 4}, {"a": 7, "b": 2, "c": 0}])
def test_holds_for_the_distance_of_every_event(distances: dict[str, int]) -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    dut = HoldLine(THINGS, distances)
    held = 0

    async def bench(ctx):
        nonlocal held
        free_from = [0] * THINGS
        for cycle in range(600):
            for name, distance in distances.items():
                hit = rng.getrandbits(THINGS) & rng.getrandbits(THINGS) & rng.getrandbits(THINGS)
                ctx.set(getattr(dut, f"i_{name}"), hit)
                now = list(free_from)
                for thing in range(THINGS):
                    if hit >> thing & 1:
                        now[thing] = max(now[thing], cycle + distance)
                if name == next(iter(distances)):
                    expected = sum((free_from[t] > cycle) << t for t in range(THINGS))
                    assert ctx.get(dut.o_held) == expected
                    held += expected.bit_count()
                free_from = now
            await ctx.tick()

    simulate(dut, bench)
    assert held > 100


@pytest.mark.parametrize(("things", "distance"), [(0, 1), (1, -1)])
def test_refuses_nothing_to_hold_and_negative_distances(things: int, distance: int) -> None:
    with pytest.raises(ValueError, match="not"):
        HoldLine(things, {"a": distance})
