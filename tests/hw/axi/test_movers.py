"""ReadMover and WriteMover on a memory: order, room, timing, faults, and ends."""

import random
from collections import deque

import numpy as np
import pytest

from nearstep_hw.axi.reader import ReadMover
from nearstep_hw.axi.writer import WriteMover
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.axi_memory import DECERR, STALL_MODES, AxiMemory, BurstError

from ..axi_port import AxiPins
from ..simulate import simulate

STREAMS, BEAT, BYTES, LONGEST = 3, 2, 1 << 12, 4
LANDING, AHEAD = 8, 4  # beats of a stream; bursts
BASES = (0x000, 0x400, 0x800)
SHAPE = {"streams": STREAMS, "address_width": 12, "beat_bytes": BEAT, "burst_beats": LONGEST}
TAIL, TAIL_OWN, TAIL_QUANTIZED = 1, 2, 0
SEED = 3


def bursts_of(rng, each, longest=LONGEST):
    """Bursts of every stream, one behind the other in memory: stream, address, beats, last."""
    at, found = 0, []
    for number in range(each):
        beats = rng.randint(1, longest)
        found += [
            (stream, base + at, beats, number == each - 1) for stream, base in enumerate(BASES)
        ]
        at += beats * BEAT
    return found


class Memory:
    """Memory, checker and pins of a port."""

    def __init__(self, port, channels, *, mode="free", errors=()):
        print(f"seed {SEED}")
        self.data = np.random.default_rng(SEED).integers(0, 256, BYTES, dtype=np.uint8)
        stalls = STALL_MODES[mode] if isinstance(mode, str) else mode
        self.memory = AxiMemory(
            self.data, beat_bytes=BEAT, stalls=stalls, seed=SEED, reorder=True, errors=errors
        )
        self.checker = AxiChecker(beat_bytes=BEAT, read_ids=STREAMS, write_ids=STREAMS)
        self.pins = AxiPins(port, channels)

    def edge(self, ctx):
        """What the port shows before a clock edge, for the edge."""
        seen = self.pins.sample(ctx)
        self.checker.step(seen)
        self.memory.step(seen)
        return seen


def offer(ctx, dut, bursts):
    ctx.set(dut.i.valid, bool(bursts))
    if bursts:
        stream, address, beats, last = bursts[0]
        fields = {"stream": stream, "address": address, "beats": beats}
        ctx.set(dut.i.payload, {**fields, "block_last": last, "run_last": last})


def read(bursts, *, mode="free", own=(), cut=False, errors=(), consume=0.5, ahead=AHEAD):
    """What a mover asked for and what landed, in cycles; the landing space is never overrun."""
    dut = ReadMover(**SHAPE, landing_beats=LANDING, bursts_ahead=ahead, own=own, cut=cut)
    world = Memory(dut.bus, ("ar", "r"), mode=mode, errors=errors)
    rng = random.Random(SEED)
    left = deque(bursts)
    held, asked = [0] * STREAMS, [0] * STREAMS
    log = {"ar": [], "taken": [], "landed": [], "fault": [], "full": 0, "end": 0}

    async def bench(ctx):
        outstanding = 0
        for stream, base in enumerate(BASES):
            ctx.set(dut.i_base[stream], base)
        for cycle in range(3000):
            offer(ctx, dut, left)
            world.pins.answer(ctx, world.memory)
            together = [stream for stream in range(STREAMS) if stream not in own]
            gain = all(held[stream] for stream in together) and rng.random() < consume
            gains = [held[stream] > 0 and rng.random() < consume for stream in own]
            ctx.set(dut.i_credit, gain)
            if own:
                ctx.set(dut.i_credit_own, sum(bit << k for k, bit in enumerate(gains)))
            idle, taken = ctx.get(dut.o_idle), bool(left) and ctx.get(dut.i.ready)
            fault = ctx.get(dut.fault.valid)
            told = (ctx.get(dut.fault.stream), ctx.get(dut.fault.address))
            response = ctx.get(dut.fault.response).value
            landed = ctx.get(dut.o_beat)
            seen = world.edge(ctx)
            assert landed == (1 << seen.r.id if seen.r else 0)
            assert idle == (outstanding == 0 and seen.ar is None)
            if seen.r:
                log["landed"].append((seen.r.id, seen.r.data))
                held[seen.r.id] += 1
                outstanding -= seen.r.last
                assert fault == (seen.r.resp != 0)
                if fault:
                    log["fault"].append((*told, response))
            if seen.fires("ar"):
                outstanding += 1
                log["ar"].append((cycle, seen.ar.id, seen.ar.addr, seen.ar.len + 1))
                asked[seen.ar.id] += seen.ar.len + 1
                assert outstanding <= ahead
                log["full"] += outstanding == ahead
            if taken:
                log["taken"].append(cycle)
                left.popleft()
            for stream in range(STREAMS):
                goes = gains[own.index(stream)] if stream in own else gain
                held[stream] -= goes
                asked[stream] -= goes
                assert 0 <= held[stream] <= asked[stream] <= LANDING
            await ctx.tick()
            if not left and not outstanding and seen.ar is None and not taken:
                log["end"] = cycle
                break
        world.checker.finish()
        assert ctx.get(dut.o_idle)

    simulate(dut, bench)
    assert [each[1:] for each in log["ar"]] == [burst[:3] for burst in bursts]
    for stream in range(STREAMS):
        words = world.data.view(np.uint16)[BASES[stream] // BEAT :]
        got = [data for which, data in log["landed"] if which == stream]
        assert got == words[: len(got)].tolist()
        assert len(got) == sum(burst[2] for burst in bursts if burst[0] == stream)
    return log


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("own", [(), (2, 0)])
def test_what_is_read_lands_in_order_and_in_its_place(own, cut):
    for mode in ("free", "both"):
        log = read(bursts_of(random.Random(SEED), 12), mode=mode, own=own, cut=cut)
        assert len(log["ar"]) == 12 * STREAMS
        assert log["full"] > 0


def test_a_burst_is_asked_for_in_every_cycle_a_cycle_after_it_was_taken():
    bursts = bursts_of(random.Random(SEED), 6, longest=1)
    log = read(bursts, consume=1.0, ahead=16)
    assert log["taken"] == list(range(len(bursts)))
    assert [cycle for cycle, *_ in log["ar"]] == [cycle + 1 for cycle in log["taken"]]
    log = read(bursts, consume=1.0, ahead=16, cut=True)
    assert log["taken"] == [1 + 2 * k for k in range(len(bursts))]


def test_as_many_bursts_are_outstanding_as_may_be_and_as_many_beats_as_there_is_room_for():
    """Nothing is answered: the mover stops at `bursts_ahead`, and at the end of the space."""
    for beats, wanted in ((1, [1] * AHEAD), (LONGEST, [LONGEST] * 2)):
        dut = ReadMover(**SHAPE, landing_beats=LANDING, bursts_ahead=AHEAD)
        asked = []

        async def bench(ctx, dut=dut, beats=beats, asked=asked):
            ctx.set(dut.bus.ar.ready, 1)
            for _ in range(20):
                offer(ctx, dut, [(1, 0x400, beats, 0)])
                if ctx.get(dut.bus.ar.valid):
                    asked.append(ctx.get(dut.bus.ar.payload.len) + 1)
                await ctx.tick()
            assert not ctx.get(dut.o_idle)

        simulate(dut, bench)
        assert asked == wanted


def test_a_beat_that_is_answered_with_an_error_tells_its_burst():
    bursts = bursts_of(random.Random(SEED), 6)
    for stream, nth in ((0, 0), (1, 2), (2, 5)):
        errors = (BurstError(write=False, nth=nth, id=stream, response=DECERR),)
        log = read(bursts, mode="both", errors=errors)
        address = [burst[1] for burst in bursts if burst[0] == stream][nth]
        assert log["fault"] == [(stream, address, DECERR)]


def test_a_mover_that_is_stopped_takes_no_burst_and_finishes_those_it_took():
    dut = ReadMover(**SHAPE, landing_beats=LANDING, bursts_ahead=AHEAD)

    async def bench(ctx):
        offer(ctx, dut, [(0, 0, 2, 0)])
        await ctx.tick()
        ctx.set(dut.i_stop, 1)
        assert not ctx.get(dut.i.ready)
        assert ctx.get(dut.bus.ar.valid)
        await ctx.tick().repeat(3)
        assert ctx.get(dut.bus.ar.valid)
        assert not ctx.get(dut.o_idle)
        ctx.set(dut.bus.ar.ready, 1)
        await ctx.tick()
        assert not ctx.get(dut.bus.ar.valid)
        ctx.set(dut.bus.r.valid, 1)
        for last in (0, 1):
            assert not ctx.get(dut.o_idle)
            ctx.set(dut.bus.r.payload.last, last)
            await ctx.tick()
        ctx.set(dut.bus.r.valid, 0)
        assert ctx.get(dut.o_idle)

    simulate(dut, bench)


def write(bursts, *, mode="free", own=(), quantized=(), cut=False, errors=(), produce=0.7):
    """What a mover wrote, cycle by cycle; memory is what the streams gave it."""
    dut = WriteMover(
        **SHAPE,
        buffer_beats=2 * LANDING,
        bursts_ahead=AHEAD,
        own=own,
        quantized=quantized,
        cut=cut,
    )
    world = Memory(dut.bus, ("aw", "w", "b"), mode=mode, errors=errors)
    before = world.data.copy()
    rng = random.Random(SEED)
    left, queues = deque(bursts), [deque() for _ in range(STREAMS)]
    total = [sum(b[2] for b in bursts if b[0] == stream) for stream in range(STREAMS)]
    words = [[rng.getrandbits(8 * BEAT) for _ in range(count)] for count in total]
    made = [0] * STREAMS
    log = {"aw": [], "w": [], "taken": [], "done": [0] * STREAMS, "fault": [], "end": 0}

    def tell(ctx):
        place = ctx.get(dut.fault.stream), ctx.get(dut.fault.address)
        log["fault"].append((*place, ctx.get(dut.fault.response).value))

    async def bench(ctx):
        ctx.set(dut.i_tail, TAIL)
        if own:
            ctx.set(dut.i_tail_own, TAIL_OWN)
        if quantized:
            ctx.set(dut.i_tail_quantized, TAIL_QUANTIZED)
        unanswered = 0
        for cycle in range(4000):
            offer(ctx, dut, left)
            world.pins.answer(ctx, world.memory)
            together = [stream for stream in range(STREAMS) if stream not in own]
            room = [len(queue) < 2 * LANDING for queue in queues]
            more = [made[stream] < total[stream] for stream in range(STREAMS)]
            gain = all(room[s] for s in together) and any(more[s] for s in together)
            gain = gain and rng.random() < produce
            gains = [room[s] and more[s] and rng.random() < produce for s in own]
            ctx.set(dut.i_credit, gain)
            if own:
                ctx.set(dut.i_credit_own, sum(bit << k for k, bit in enumerate(gains)))
            for data, queue in zip(dut.data, queues, strict=True):
                ctx.set(data.valid, bool(queue))
                ctx.set(data.payload, queue[0] if queue else 0xDEAD)
            taken = bool(left) and ctx.get(dut.i.ready)
            done, fault = ctx.get(dut.o_block_done), ctx.get(dut.fault.valid)
            if fault:
                tell(ctx)
            given = [
                ctx.get(data.ready) and bool(q) for data, q in zip(dut.data, queues, strict=True)
            ]
            idle = ctx.get(dut.o_idle)
            seen = world.edge(ctx)
            assert idle == (unanswered == 0 and seen.aw is None)
            if seen.fires("aw"):
                log["aw"].append((cycle, seen.aw.id, seen.aw.addr, seen.aw.len + 1))
            if seen.w:
                log["w"].append(cycle)
            if taken:
                log["taken"].append(cycle)
                left.popleft()
            unanswered += taken - seen.fires("b")
            for stream, queue in enumerate(queues):
                log["done"][stream] += done >> stream & 1
                if given[stream]:
                    queue.popleft()
                if gains[own.index(stream)] if stream in own else gain:
                    if made[stream] < total[stream]:
                        queue.append(words[stream][made[stream]])
                    made[stream] += 1
            await ctx.tick()
            if not left and not unanswered and not taken:
                log["end"] = cycle
                break
        if cut and ctx.get(dut.fault.valid):
            tell(ctx)
        late = ctx.get(dut.o_block_done) if cut else 0
        log["done"] = [count + (late >> s & 1) for s, count in enumerate(log["done"])]
        world.checker.finish()

    simulate(dut, bench)
    assert [each[1:] for each in log["aw"]] == [burst[:3] for burst in bursts]
    wanted = before.copy()
    for stream, each in enumerate(words):
        at = BASES[stream]
        new = np.array(each, np.uint16).view(np.uint8)
        last = wanted[at + new.size - BEAT : at + new.size].copy()
        wanted[at : at + new.size] = new
        tail = TAIL_QUANTIZED if stream in quantized else TAIL_OWN if stream in own else TAIL
        for byte in range(BEAT):
            if not tail >> byte & 1:
                wanted[at + new.size - BEAT + byte] = last[byte]
    return log, world.data, wanted


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("own", "quantized"), [((), ()), ((2, 0), (0,))])
def test_what_is_written_is_in_its_place_and_ends_as_it_is_told(own, quantized, cut):
    for mode in ("free", "both"):
        # Streams that gain together have as many beats.
        bursts = [(n % 3, BASES[n % 3] + n // 3 * 6, 3, n >= 30) for n in range(33)]
        log, found, wanted = write(bursts, mode=mode, own=own, quantized=quantized, cut=cut)
        assert (found == wanted).all()
        assert len(log["w"]) >= 3 * 33
        assert log["done"] == [1] * STREAMS
        assert not log["fault"]


def test_w_begins_three_cycles_after_a_burst_is_taken_and_then_moves_in_every_cycle():
    bursts = [(n % 3, BASES[n % 3] + n // 3 * 8, 4, n >= 9) for n in range(12)]
    log, found, wanted = write(bursts, produce=1.0)
    assert (found == wanted).all()
    assert [cycle for cycle, *_ in log["aw"]] == [cycle + 1 for cycle in log["taken"]]
    assert log["w"][0] == log["aw"][0][0] + 3
    assert log["w"] == list(range(log["w"][0], log["w"][0] + 48))


def test_a_burst_that_is_answered_with_an_error_is_told_and_its_blocks_are_not_done():
    bursts = [(n % 3, BASES[n % 3] + n // 3 * 6, 3, n >= 30) for n in range(33)]
    for stream, nth in ((0, 0), (1, 4), (2, 10)):
        errors = (BurstError(write=True, nth=nth, id=stream, response=DECERR),)
        for cut in (False, True):
            log, *_ = write(bursts, mode="both", errors=errors, cut=cut)
            assert log["fault"] == [(stream, BASES[stream] + 6 * nth, DECERR)]
            assert log["done"] == [int(each != stream) for each in range(STREAMS)]
