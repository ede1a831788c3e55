"""Emulated memory: zeros that take no page, comparisons, and memory of the host in its place."""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise

import numpy as np
import pytest

from nearstep_sim.golden.fp import narrow32, widen32
from nearstep_sim.models.bulk import NumpyBulk, native_bulk
from nearstep_sim.models.memory import FORMATS, GUARD, UNWRITTEN, WRITTEN, EmulatedMemory
from nearstep_sim.smartssd.bar import MAX_PAYLOAD, MAX_READ_REQUEST, BarTraffic, cut, pieces

CAPACITY = 1 << 20
ZERO = np.zeros(4, np.uint8)


@pytest.fixture(params=[NumpyBulk, native_bulk], ids=["numpy", "native"])
def memory(request):
    made = EmulatedMemory(CAPACITY, request.param())
    made.mark(64, CAPACITY - 128, UNWRITTEN)
    return made


def pattern(size, seed=1):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def contents(memory, address, size):
    out = np.empty(size, np.uint8)
    memory.read(address, out)
    return out


@pytest.mark.parametrize("nbytes", [4, 64, 100, 4096, 70_000])
def test_zeros_are_written_over_what_was_there(memory, nbytes):
    memory.fill(64, nbytes, ZERO)
    assert memory.first_not(WRITTEN, 64, nbytes) is None
    memory.write(64, pattern(nbytes))
    memory.mark(64, nbytes, GUARD)  # freed, and allocated again
    memory.mark(64, nbytes, UNWRITTEN)
    memory.fill(64, nbytes, ZERO)
    assert not contents(memory, 64, nbytes).any()
    memory.fill(64, nbytes, np.array([1, 2, 3, 4], np.uint8))
    assert contents(memory, 64, nbytes).tolist() == [1, 2, 3, 4] * (nbytes // 4)


@pytest.mark.parametrize("nbytes", [1, 2, 63, 64, 70_001, 300_000])
def test_copies_and_comparisons_see_every_byte(memory, nbytes):
    data = pattern(nbytes + 3)[3:]  # not on a line
    memory.write(128, data)
    assert contents(memory, 128, nbytes).tobytes() == data.tobytes()
    assert memory.holds(128, data)
    for at in {0, nbytes // 2, nbytes - 1}:
        other = data.copy()
        other[at] ^= 1
        assert not memory.holds(128, other)


def test_loans_against_a_naive_model(memory):
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = np.zeros(8192, np.uint8)
    memory.fill(64, model.size, ZERO)
    lent, checked = {}, 0
    for turn in range(400):
        start = rng.randrange(0, model.size - 64) // 64 * 64
        size = rng.randrange(1, min(1500, model.size - start) + 1)
        data = pattern(size, turn)
        if rng.random() < 0.5:
            writes = rng.random() < 0.5
            assert memory.lend(64 + start, data, writes=writes)
            lent[start] = data, writes
        else:
            memory.write(64 + start, data)
        model[start : start + size] = data
        assert contents(memory, 64, model.size).tobytes() == model.tobytes()
        assert memory.holds(64, model)
        edges = [64, *memory.borders(64, model.size), 64 + model.size]
        for low, high in pairwise(edges):
            part = memory.view(low, high - low)
            assert part.tobytes() == model[low - 64 : high - 64].tobytes()
            assert part.base is not None or high == low  # no copy where it lies together
            checked += 1
        ranges, nbytes = [rng.randrange(0, model.size // 8) * 4 for _ in range(3)], 4096
        parts = memory.places([64 + each for each in ranges], nbytes).tolist()
        assert sum(size for size, *_ in parts) == nbytes
        assert all(size > 0 for size, *_ in parts)
        for column, first in enumerate(ranges, 1):
            joined = b"".join(ctypes.string_at(part[column], part[0]) for part in parts)
            assert joined == model[first : first + nbytes].tobytes()
            checked += 1
    assert checked > 1600


def test_what_is_lent_for_writing_is_written(memory):
    kept, given = pattern(256, 2), pattern(256, 3)
    before = kept.copy()
    assert memory.lend(128, kept)
    assert memory.lend(512, given, writes=True)
    memory.write(128, pattern(64, 4))
    memory.write(512 + 64, pattern(64, 5))
    assert kept.tobytes() == before.tobytes()
    assert given[64:128].tobytes() == pattern(64, 5).tobytes()
    memory.give_back(512)
    assert memory.first_not(UNWRITTEN, 512, 256) is None
    memory.give_back(128)  # it ended when it was written
    assert contents(memory, 128, 64).tobytes() == pattern(64, 4).tobytes()
    assert contents(memory, 192, 192).tobytes() == before[64:].tobytes()


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_patterns_of_16_bits_are_read_and_written_as_float32(memory, form):
    wide = np.random.default_rng(17).standard_normal(256).astype(np.float32)
    model = widen32(narrow32(wide, FORMATS[form]), FORMATS[form])
    kept, given = (narrow32(wide, FORMATS[form]) for _ in range(2))
    assert memory.lend(128, kept.view(np.uint8), form=form)
    assert memory.lend(2048, given.view(np.uint8), writes=True, form=form)
    checked = 0
    for address, nbytes in ((128, 1024), (2048, 1024), (2051, 6), (2300, 1), (2049, 1023)):
        start = (address - 128) % 1920
        assert contents(memory, address, nbytes).tobytes() == model.tobytes()[start:][:nbytes]
        assert memory.view(address, nbytes).size == nbytes
        checked += 1
    assert memory.view(2048, 64, form).ctypes.data == given.ctypes.data
    assert memory.place(2048, 64, form).ctypes.data == given.ctypes.data
    assert memory.place(2048, 64) is None
    assert [memory.form(each) for each in (64, 128, 3071, 3072)] == [None, form, form, None]
    values = wide[:20] * np.float32(3)
    memory.write(2048 + 40, values.view(np.uint8))
    assert (given[10:30] == narrow32(values, FORMATS[form])).all()
    memory.write(128 + 40, values.view(np.uint8))  # ends the loan, with a copy
    assert memory.form(128) is None
    mixed = model.copy()
    mixed[10:30] = values
    assert contents(memory, 128, 1024).tobytes() == mixed.tobytes()
    memory.places([2048], 1024)  # whoever needs addresses gets a copy
    mixed[10:30] = widen32(narrow32(values, FORMATS[form]), FORMATS[form])
    assert contents(memory, 2048, 1024).tobytes() == mixed.tobytes()
    assert checked == 5


def test_memory_is_lent_once(memory):
    data = pattern(1024)
    assert memory.lend(128, data[256:512])
    for other in (data, data[:300], data[400:], data[300:301], data[256:512]):
        assert not memory.lend(4096, other)
    assert memory.lend(4096, data[512:])
    memory.give_back(128)
    assert memory.lend(8192, data[:512])


def test_packets_are_those_of_every_request():
    rng, compared = random.Random(11), 0
    for _ in range(300):
        address, nbytes = rng.randrange(5000), rng.choice([0, 1, 3, 64, 255, 256, 257, 5001])
        traffic = BarTraffic()
        traffic.count_read(address, nbytes)
        traffic.count_write(address, nbytes)
        requests = cut(address, nbytes, MAX_READ_REQUEST)
        assert traffic.read_tlps == len(requests)
        assert traffic.completion_tlps == sum(pieces(*each, MAX_PAYLOAD) for each in requests)
        assert traffic.completion_bytes == sum(4 * pieces(*each, 4) for each in requests)
        writes = cut(address, nbytes, MAX_PAYLOAD)
        assert traffic.write_tlps == len(writes)
        assert traffic.write_bytes == sum(4 * pieces(*each, 4) for each in writes)
        compared += 1
    assert compared == 300
