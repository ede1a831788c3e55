"""WriteResponses and CommitCounter against plain lists."""

import random

import pytest

from nearstep_hw.axi.burst import BurstLayout
from nearstep_hw.axi.write_responses import WriteResponses
from nearstep_hw.updater.commit import CommitCounter

from ..simulate import simulate

STREAMS = 3
OKAY, SLVERR = 0, 2


@pytest.mark.parametrize("error_rate", [0.0, 0.02])
def test_blocks_are_done_when_all_their_bursts_are_acknowledged(error_rate):
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    layout = BurstLayout(streams=STREAMS, address_width=34, burst_beats=64)
    dut = WriteResponses(layout, streams=STREAMS, address_width=34, bursts_ahead=4)
    open_bursts = [[] for _ in range(STREAMS)]
    faulty = set()
    done = faults = full = 0

    async def bench(ctx):
        nonlocal done, faults, full
        for _ in range(1500):
            stream = rng.randrange(STREAMS)
            address = rng.randrange(1 << 34)
            last = rng.random() < 0.4
            burst = {"stream": stream, "address": address, "beats": 1}
            ctx.set(dut.i_burst, {**burst, "block_last": last, "run_last": 0})
            answered = rng.randrange(STREAMS)
            response = SLVERR if rng.random() < error_rate else OKAY
            ctx.set(dut.b.valid, rng.random() < 0.5)
            ctx.set(dut.b.payload.id, answered)
            ctx.set(dut.b.payload.resp, response)
            room = ctx.get(dut.o_room)
            assert room == (len(open_bursts[stream]) < 4)
            full += not room
            ctx.set(dut.i_issue, room and rng.random() < 0.5)
            assert ctx.get(dut.o_idle) == (not any(open_bursts))
            wanted_done, wanted_fault = 0, None
            if ctx.get(dut.b.valid) and open_bursts[answered]:
                at, ends = open_bursts[answered].pop(0)
                if response != OKAY:
                    wanted_fault = at
                    faults += 1
                elif ends and answered not in faulty:
                    wanted_done = 1 << answered
                    done += 1
            assert ctx.get(dut.o_block_done) == wanted_done
            assert ctx.get(dut.fault.valid) == (wanted_fault is not None)
            if wanted_fault is not None:
                assert ctx.get(dut.fault.address) == wanted_fault
                assert ctx.get(dut.fault.stream) == answered
                assert ctx.get(dut.fault.response).value == response
                faulty.add(answered)
            if ctx.get(dut.i_issue):
                open_bursts[stream].append((address, last))
            await ctx.tick()

    simulate(dut, bench)
    assert full > 20, full
    assert done > (60 if not error_rate else 5), done
    assert (faults > 0) == (error_rate > 0)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200, 256])
def test_committed_is_what_every_stream_has_written(count):
    seed = count
    print(f"seed {seed}")
    rng = random.Random(seed)
    block = 64
    dut = CommitCounter(streams=STREAMS, block_elements=block, count_width=33, blocks_ahead=4)
    blocks = -(-count // block)
    written = [0] * STREAMS
    checks = 0

    async def bench(ctx):
        nonlocal checks
        ctx.set(dut.i_count, count)
        while min(written) < blocks:
            bits = 0
            for stream in range(STREAMS):
                may = written[stream] < blocks and written[stream] - min(written) < 3
                if may and rng.random() < 0.3:
                    bits |= 1 << stream
                    written[stream] += 1
            ctx.set(dut.i_block_done, bits)
            await ctx.tick()
            checks += 1
            found = ctx.get(dut.o_committed)
            assert found in (count, found // block * block)
            assert found <= min(written) * block
        ctx.set(dut.i_block_done, 0)
        for _ in range(3):
            await ctx.tick()
        assert ctx.get(dut.o_committed) == count
        assert ctx.get(dut.o_whole)
        ctx.set(dut.i_clear, 1)
        await ctx.tick()
        assert ctx.get(dut.o_committed) == 0
        assert not ctx.get(dut.o_whole)

    simulate(dut, bench)
    assert checks > 0
