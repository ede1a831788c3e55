"""The order of posted and other requests against a list."""

import random

import pytest
from amaranth.sim import SimulatorContext

from nearstep_hw.pcie.order import PostedOrder

from ..simulate import simulate

SETTLED = 4 + 16  # cycles after which requests that may go are cleared


@pytest.mark.parametrize(("writes", "requests"), [(32, 16), (4, 16), (32, 4)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))]
)
def test_requests_go_when_the_writes_before_them_are_done(writes, requests, seed):
    rng = random.Random(f"{writes} {requests} {seed}")
    dut = PostedOrder(writes=writes, requests=requests)
    checks = {"gone": 0, "held": 0, "full": 0}

    async def body(ctx: SimulatorContext) -> None:
        taken = done = 0
        waiting: list[list[int]] = []  # writes taken before each request, cycles since done
        for _ in range(6000):
            if rng.random() < 0.01:
                chances = [rng.choice((0.05, 0.5, 0.98)) for _ in range(4)]
            elif not checks["gone"]:
                chances = [0.5] * 4
            take = bool(ctx.get(dut.o_room)) and rng.random() < chances[0]
            finish = done < taken and rng.random() < chances[1]
            ask = not take and len(waiting) < requests and rng.random() < chances[2]
            cleared = bool(ctx.get(dut.o_cleared))
            assert not cleared or waiting[0][0] <= done
            go = cleared and rng.random() < chances[3]
            assert ctx.get(dut.o_done) == (taken == done)
            assert ctx.get(dut.o_room) == (taken - done < writes)
            for request in waiting:
                request[1] += request[0] <= done
            assert cleared or not waiting or waiting[0][1] <= SETTLED
            checks["held"] += bool(waiting) and not cleared
            checks["full"] += taken - done == writes
            for port, value in (
                (dut.i_taken, take), (dut.i_done, finish), (dut.i_request, ask), (dut.i_go, go)
            ):  # fmt: skip
                ctx.set(port, value)
            await ctx.tick()
            if ask:
                waiting.append([taken, 0])
            if go:
                checks["gone"] += 1
                waiting.pop(0)
            taken, done = taken + take, done + finish

    simulate(dut, body)
    print(checks)
    assert checks["gone"] > 100
    assert checks["held"] > 100
