"""What waits in a queue, against a list of it."""

import random
from collections import deque

from nearstep_hw.dram.foresight import Foresight

from ..simulate import simulate

RANKS, BURSTS, ENOUGH = 2, 6, 2


def test_it_says_what_a_list_of_the_bursts_says() -> None:
    dut = Foresight(ranks=RANKS, bursts=BURSTS, enough=ENOUGH)
    seed = 20
    print(f"seed {seed}")
    source = random.Random(seed)
    queue: deque[tuple[int, bool]] = deque()
    seen = {"full": 0, "empty": 0, "ahead": 0, "not yet": 0}

    async def bench(ctx: object) -> None:
        for cycle in range(4000):
            busy = 0.8 if cycle // 100 % 2 else 0.3
            enter = len(queue) < BURSTS and source.random() < busy
            leave = bool(queue) and source.random() < 0.5
            burst = (int(source.random() < 0.3), source.random() < 0.8)
            for name, value in (
                ("i_enter", enter),
                ("i_rank", burst[0]),
                ("i_long", burst[1]),
                ("i_leave", leave),
            ):
                ctx.set(getattr(dut, name), value)
            ranks = [rank for rank, _ in queue]
            for rank in range(RANKS):
                first = ranks.index(rank) if rank in ranks else len(queue)
                ahead = sum(long for _, long in list(queue)[:first]) >= ENOUGH
                assert ctx.get(dut.o_waiting[rank]) == (rank in ranks)
                assert ctx.get(dut.o_ahead[rank]) == ahead
                seen["ahead" if ahead else "not yet"] += 1
            seen["full"] += len(queue) == BURSTS
            seen["empty"] += not queue
            await ctx.tick()
            if leave:
                queue.popleft()
            if enter:
                queue.append(burst)

    simulate(dut, bench)
    assert min(seen.values()) > 100, seen
