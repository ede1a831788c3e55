"""BankUse against a queue of banks."""

import random
from collections import deque

from nearstep_hw.dram.bank_use import BankUse

from ..simulate import simulate

BANKS, BEATS = 4, 6


def test_a_bank_is_used_while_a_beat_of_it_is_inside() -> None:
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    dut = BankUse(banks=BANKS, beats=BEATS)
    full = empty = both = 0

    async def bench(ctx):
        nonlocal full, empty, both
        inside: deque[int] = deque()
        for cycle in range(4000):
            assert ctx.get(dut.o_used) == sum(1 << bank for bank in set(inside))
            assert ctx.get(dut.o_beats) == len(inside)
            full += len(inside) == BEATS
            empty += not inside
            eager = (cycle // 100) % 2
            leave = bool(inside) and rng.random() < (0.8, 0.4)[eager]
            enter = len(inside) < BEATS and rng.random() < (0.4, 0.8)[eager]
            both += leave and enter
            bank = rng.randrange(BANKS)
            ctx.set(dut.i_enter, enter)
            ctx.set(dut.i_enter_bank, bank)
            ctx.set(dut.i_leave, leave)
            ctx.set(dut.i_leave_bank, inside[0] if inside else 0)
            await ctx.tick()
            if leave:
                inside.popleft()
            if enter:
                inside.append(bank)

    simulate(dut, bench)
    assert min(full, empty, both) > 100
