"""ChunkBuffer against lists of rows: the second of two writes wins, and what was read is zero."""

import random

from nearstep_hw.updater.pairs.chunk_buffer import ChunkBuffer

from ...simulate import simulate

BANKS, ROWS = 2, 4


def test_two_writes_into_one_row_are_one_of_the_second_and_a_row_that_was_read_is_zero():
    """Of the ports of a bank two never write one row: block RAM does not say which would win."""
    print("seed 4")
    rng = random.Random(4)
    dut = ChunkBuffer(banks=BANKS, rows=ROWS)
    module = dut.elaborate(None)
    ports = [getattr(module.submodules, f"bank{k}").write_ports for k in range(BANKS)]
    rows = [[(0, 0)] * ROWS for _ in range(BANKS)]
    seen = {"read": 0, "both": 0, "same": 0}

    async def bench(ctx):
        expected = None
        for _ in range(600):
            reads = rng.random() < 0.3
            row = rng.randrange(ROWS)
            ctx.set(dut.i_read, reads)
            ctx.set(dut.i_row, row)
            for k, bank in enumerate(dut.write):
                given = {}
                for name in ("a", "b"):
                    enabled = not reads and rng.random() < 0.7
                    given[name] = (enabled, rng.randrange(ROWS), rng.getrandbits(32))
                    for field, value in zip(("en", "row", "value"), given[name], strict=True):
                        ctx.set(getattr(bank, f"{name}_{field}"), value)
                a, b = ports[k]
                together = ctx.get(a.en) and ctx.get(b.en)
                assert not together or ctx.get(a.addr) != ctx.get(b.addr)
                seen["both"] += bool(together)
                seen["same"] += given["a"][:2] == given["b"][:2] == (True, given["a"][1])
                for enabled, at, value in given.values():
                    if enabled:
                        rows[k][at] = (value, 1)
            if reads:
                expected = [bank[row] for bank in rows]
                for bank in rows:
                    bank[row] = (0, 0)
                seen["read"] += any(present for _, present in expected)
            await ctx.tick()
            if reads:
                found = [ctx.get(dut.o_row[k]) for k in range(BANKS)]
                assert [(cell.value, cell.present) for cell in found] == expected

    simulate(module, bench)
    assert min(seen.values()) > 50, seen
