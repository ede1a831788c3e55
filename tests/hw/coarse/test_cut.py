"""How a tensor is cut into chunks, and the steps of a job, against plain arithmetic."""

import random
from dataclasses import replace

import pytest

from nearstep_hw.coarse.cut import TensorCut
from nearstep_hw.coarse.entry import most_woven
from nearstep_hw.coarse.walker import EntryWalker
from nearstep_hw.coarse.wire import Wire
from nearstep_spec.coarse.config import BEAT_ELEMENTS, CoarseConfig

from ..simulate import simulate

CONFIG = CoarseConfig(entry_phits=16, chunks_ahead=3)


def _cut(elements, members, size):
    """Chunks, beats of an entry of the last chunk, and how many beats of that chunk exist."""
    beats = max(1, -(-elements // BEAT_ELEMENTS))
    chunks = -(-beats // (members * size))
    rest = beats - (chunks - 1) * members * size
    return chunks, -(-rest // members), rest if elements else 0


def test_cut_of_any_number_of_elements():
    rng = random.Random(31)
    dut = TensorCut(CONFIG)
    cases = [(0, 2), (1, 2), (16, 3), (17, 2), (2**32 - 1, 255), (2**32 - 1, 2), (2**32 - 15, 3)]
    cases += [(rng.getrandbits(rng.randrange(1, 33)), rng.randrange(2, 256)) for _ in range(40)]
    cases += [(k * members * 64, members) for members in (2, 3, 7) for k in (1, 2, 5)]
    checks = 0

    async def bench(ctx):
        nonlocal checks
        for elements, members in cases:
            for wire in Wire:
                size = CONFIG.entry_beats(wire.name.lower())
                ctx.set(dut.i_elements, elements)
                ctx.set(dut.i_members, members)
                ctx.set(dut.i_wire, wire)
                ctx.set(dut.i_start, 1)
                await ctx.tick()
                ctx.set(dut.i_start, 0)
                waited = 1
                while not ctx.get(dut.o_done):
                    await ctx.tick()
                    waited += 1
                assert waited == TensorCut.latency
                chunks, tail, exist = _cut(elements, members, size)
                assert ctx.get(dut.o_chunks) == chunks
                assert ctx.get(dut.o_entry_beats) == size
                assert ctx.get(dut.o_chunk_beats) == size * members
                assert ctx.get(dut.o_tail_beats) == tail
                assert ctx.get(dut.o_tail_exist) == exist
                checks += 1

    simulate(dut, bench)
    assert checks == 3 * (7 + 40 + 9)


def _batches(members, chunks):
    """(round, chunk) of each step."""
    order = []
    batches = [
        range(k, min(k + CONFIG.chunks_ahead, chunks))
        for k in range(0, chunks, CONFIG.chunks_ahead)
    ]
    order += [(0, c) for c in batches[0]]
    for number, batch in enumerate(batches):
        order += [(k, c) for k in range(1, 2 * members - 2) for c in batch]
        following = batches[number + 1] if number + 1 < len(batches) else []
        for i, c in enumerate(batch):
            order.append((2 * members - 2, c))
            order += [(0, following[i])] if i < len(following) else []
    return order


def _woven(members, chunks):
    """(round, chunk) of each step with the rounds of chunks interleaved."""
    last, lag = 2 * members - 2, 2 if members == 2 else 1
    order = [(0, 0)]
    for head in range(chunks + lag * last):
        order += [(k, head - lag * k) for k in range(1, last + 1)] + [(0, head + 1)]
    return [(k, c) for k, c in order if 0 <= c < chunks]


def _steps(order, members, position, chunks, size, tail, exist):
    """(at, beats, wire beats, receive, local, send, write, final, tail, end) of each step."""
    steps = []
    for k, c in order:
        last = c == chunks - 1
        wire = tail if last else size
        offset = (position - k) % members * wire
        here = max(0, min(wire, exist - offset)) if last else size
        ends = last and 0 < exist - offset <= wire
        flags = (k > 0, k < members, k < 2 * members - 2, k >= members - 1, k == members - 1)
        end = k == 2 * members - 2 and last
        steps.append((c * members * size + offset, here, wire, *flags, ends, end))
    return [tuple(map(int, step)) for step in steps]


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_steps_come_in_the_order_of_rounds_and_batches(members, loads):
    dut = EntryWalker(CONFIG, loads=loads)
    size = CONFIG.entry_beats("fp32")
    names = (
        "at", "beats", "wire_beats", "receive", "local", "send", "write", "final", "tail", "end"
    )  # fmt: skip
    checks = 0

    async def bench(ctx):
        nonlocal checks
        for elements in (0, 16, 16 * 5, 16 * size * members, 16 * size * members * 7 + 33, 4000):
            for position in range(members):
                chunks, tail, exist = _cut(elements, members, size)
                order = _batches(members, chunks)
                expected = _steps(order, members, position, chunks, size, tail, exist)
                if loads:
                    expected = [step for step in expected if step[4]]
                for name, value in {
                    "i_members": members,
                    "i_position": position,
                    "i_chunks": chunks,
                    "i_entry_beats": size,
                    "i_chunk_beats": size * members,
                    "i_tail_beats": tail,
                    "i_tail_exist": exist,
                    "i_start": 1,
                }.items():
                    ctx.set(getattr(dut, name), value)
                await ctx.tick()
                ctx.set(dut.i_start, 0)
                ctx.set(dut.o.ready, 1)
                got, quiet = [], 0
                while quiet < 3 * members + 20:
                    quiet += 1
                    if ctx.get(dut.o.valid):
                        got.append(tuple(ctx.get(getattr(dut.o.payload, n)) for n in names))
                        quiet = 0
                    await ctx.tick()
                assert got == expected
                checks += len(got)

    simulate(dut, bench)
    assert checks > 100


@pytest.mark.parametrize("members", [2, 3, 4, 6])
def test_woven_rounds_are_received_as_they_are_sent_and_fit_into_buffers(members):
    config = CoarseConfig(exact=("bf16",))
    assert most_woven(config) == 6
    for chunks in (1, 2, 5, 40):
        order = _woven(members, chunks)
        assert len(set(order)) == len(order) == chunks * (2 * members - 1)
        sent = [(k + 1, c) for k, c in order if k < 2 * members - 2]
        assert sent == [(k, c) for k, c in order if k]
        way, most = 0, 0
        for k, _ in order:
            entries = [min(j, members - 1) if j < members else 1 for j in (k, k + 1)]
            way += entries[1] if k < 2 * members - 2 else 0
            most = max(most, way)
            way -= entries[0] if k else 0
        assert way == 0
        assert most <= 2 * config.buffer_entries - 2
    assert most >= members * (members + 1) // 2 - 1


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize("halves", [False, True])
def test_woven_steps_join_the_last_round_and_the_first(members, loads, halves):
    dut = EntryWalker(replace(CONFIG, exact=("bf16",)), loads=loads)
    size, last = CONFIG.entry_beats("bf16"), 2 * members - 2
    names = (
        "at", "beats", "wire_beats", "receive", "local", "send", "write", "final", "tail", "end",
        "list", "addends", "apart",
    )  # fmt: skip
    checks = joints = 0

    async def bench(ctx):
        nonlocal checks, joints
        for beats in (0, 1, size * members, size * members * 2, size * members * 19 + 3):
            position = beats % members
            chunks, tail, exist = _cut(beats * BEAT_ELEMENTS, members, size)
            order = _woven(members, chunks)
            expected = []
            plain = _steps(order, members, position, chunks, size, tail, exist)
            for (k, c), (before, d), step in zip(order, [(-1, 0), *order], plain, strict=False):
                joint = halves and not loads and k == 0 and before == last
                if joint and c < chunks - 1 and d < chunks - 1:
                    *old, _ = expected.pop()
                    old[4] = old[5] = 1
                    expected.append((*old, 1))
                    joints += 1
                elif step[4] or not loads:
                    shares = int(halves and k < members - 1 and k > 0)
                    expected.append((*step, int(k < members), k, shares))
            for name, value in {
                "i_members": members,
                "i_position": position,
                "i_chunks": chunks,
                "i_entry_beats": size,
                "i_chunk_beats": size * members,
                "i_tail_beats": tail,
                "i_tail_exist": exist,
                "i_exact": 1,
                "i_woven": 1,
                "i_halves": halves,
                "i_start": 1,
            }.items():
                ctx.set(getattr(dut, name), value)
            await ctx.tick()
            ctx.set(dut.i_start, 0)
            ctx.set(dut.o.ready, 1)
            got, quiet = [], 0
            while quiet < 6 * members + 20:
                quiet += 1
                if ctx.get(dut.o.valid):
                    step = [ctx.get(getattr(dut.o.payload, n)) for n in names]
                    step[-1] &= step[3]  # without a received list there is nothing to share
                    got.append(tuple(step))
                    quiet = 0
                await ctx.tick()
            assert got == expected
            checks += len(got)

    simulate(dut, bench)
    assert checks >= 50
    assert (joints > 5) == (halves and not loads)
