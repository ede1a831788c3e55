"""The gate for requests that are not posted, between a block and a card that are lists."""

import random
from collections import deque

import pytest
from amaranth.sim import SimulatorContext

from nearstep_hw.pcie.series7.np_gate import EXTRA, RESERVED, NonPostedGate

from ..simulate import simulate

SPACE = 16
COUNT = 200
STILL = 100  # cycles without an answer, enough to fill the space
HEARS = 2  # cycles until the block hears what the gate says


class Block:
    """Shows requests as long as it may, and then `EXTRA` more; each stays until it is taken."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.told = deque([False] * HEARS)
        self.shown = self.ever = False
        self.extra = self.taken = self.early = 0

    def take(self) -> bool:
        """Whether a request is taken in this cycle."""
        heard = self.told[0]
        self.ever |= heard
        self.extra = 0 if heard else self.extra
        if not self.shown and self.taken < COUNT and (heard or self.extra < EXTRA):
            self.shown, self.extra = True, self.extra + (not heard)
        take = self.shown and self.rng.random() < 0.7
        self.shown &= not take
        self.taken += take
        self.early += take and not self.ever
        return take

    def hear(self, ok: int) -> None:
        self.told.append(bool(ok))
        self.told.popleft()


@pytest.mark.parametrize("delay", [0, 3, 12, 40])
def test_no_more_requests_come_than_there_is_space_for(delay):
    """Credits come `delay` cycles late, as through a clock crossing, the first ones too."""
    rng = random.Random(delay)
    dut = NonPostedGate(SPACE)
    block = Block(rng)
    seen = {"full": 0, "most": 0}

    async def body(ctx: SimulatorContext) -> None:
        waiting, owed = 0, SPACE
        credits = deque([0] * delay)
        answers, left = False, STILL
        while block.taken < COUNT or waiting:
            if not left:
                if not answers and block.taken < COUNT:
                    assert waiting >= SPACE - RESERVED, "held back although there is space"
                    seen["full"] += 1
                answers, left = not answers, STILL if answers else rng.randrange(1, STILL)
            left -= 1
            take = block.take()
            answer = answers and waiting > 0 and rng.random() < 0.5
            credits.append(int(owed > 0))
            owed += answer - (owed > 0)
            ctx.set(dut.i_credit, credits.popleft())
            ctx.set(dut.i_take, take)
            _, _, ok = await ctx.tick().sample(dut.o_ok)
            block.hear(ok)
            waiting += take - answer
            seen["most"] = max(seen["most"], waiting)
            assert waiting <= SPACE, "more requests than there is space for"

    simulate(dut, body)
    print(f"seed {delay}: {seen}, {block.early} before the block may show any")
    assert block.taken == COUNT
    assert block.early == EXTRA
    assert seen["full"] > 2
    assert seen["most"] > SPACE - RESERVED


def test_the_gate_needs_space_for_more_than_it_reserves():
    with pytest.raises(ValueError, match=f"more than {RESERVED}, not {RESERVED}"):
        NonPostedGate(RESERVED)
