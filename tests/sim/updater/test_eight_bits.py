"""Golden kernels with states in 8 bits: bursts, lengths at START, and memory of the host.

`tests/host/driver` has the results of runs.
"""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.updater.device import KernelDevice
from nearstep_sim.updater.golden import KEPT_TRANSACTIONS
from nearstep_spec.updater.registers import ErrorCause, Stream

from ...host.driver.job import Job
from ...host.driver.start import DONE, Start

COMMON = "state_format=dynamic8&memory_bytes=1MiB"
KERNELS = {
    f"{engine}-{shape}": f"golden:axdimm?{COMMON}&engine={engine}&{options}"
    for engine in ("cpp", "numpy")
    for shape, options in {
        "1-lane": "lanes=1&block_bytes=1024",
        "8-lanes": "lanes=8&block_bytes=2048",
        "16-lanes-most": "lanes=16&block_bytes=16384",
    }.items()
}
CARD = f"golden:smartssd?{COMMON}&lanes=8&chunk_bytes=2048&rules=adam"
CARDS = {f"{engine}-card": f"{CARD}&engine={engine}" for engine in ("cpp", "numpy")}


def bursts(job: Job, *, write: bool) -> list[tuple[str, int, int]]:
    """Bursts of one direction, in order: stream, first and last byte."""
    config, found = job.device.config, []
    for first in range(0, job.count, config.block_elements):
        last = min(job.count, first + config.block_elements)
        for name in "pmv" if write else "pgmv":
            at, end = (
                job.buffers[name].address + job._place(name, each, job.formats[name])
                for each in (first, last)
            )
            if job.formats[name] not in ("fp32",) and last == job.count:
                end = job.buffers[name].address + job.buffers[name].nbytes
            while at < end:
                limit = min(end, (at // config.burst_bytes + 1) * config.burst_bytes)
                found.append((f"{name.upper()}_{'WRITE' if write else 'READ'}", at, limit))
                at = limit
    return found


@pytest.mark.parametrize("name", ["cpp-1-lane", "numpy-8-lanes", *CARDS])
def test_bursts_are_those_of_the_hardware(name):
    """Block by block one array after the other, cut at multiples of the longest: where addresses
    are logged, with an injection that hits nothing."""
    with nearstep.open((KERNELS | CARDS)[name]) as device:
        assert isinstance(device, KernelDevice)
        block, seen = device.config.block_elements, 0
        device.backend.inject(Injection(kind="slverr", write=True, base=1 << 40))
        for count in (block + 1, 2 * block - 3, 300 if block > 300 else 200):
            job = Job(device, count, seed=4)
            job.run()
            assert job.check() == 3 * count
            number = len(bursts(job, write=False)) + len(bursts(job, write=True))
            assert number < KEPT_TRANSACTIONS
            text = device.backend.transactions()[-number:]
            for write in (False, True):
                kind = "write" if write else "read"
                found = [line.split(" ", 1)[1] for line in text if line.startswith(kind)]
                wanted = [f"{n} {a:#x}..{e:#x}" for n, a, e in bursts(job, write=write)]
                assert found == wanted
                seen += len(found)
            job.free()
        assert seen >= 40


@pytest.mark.parametrize("url", CARDS.values(), ids=CARDS)
def test_arrays_are_as_long_as_their_scales_and_codes(url):
    """By the checks at START: the end of memory, overlaps, windows."""
    with nearstep.open(url) as device:
        count, beat = 2 * 512 + 33, 32
        start = Start(device, count)
        whole = start.bytes_of("m")
        assert whole == -(-(3 * beat + count) // beat) * beat
        arena = start.work.put(np.zeros(4 * whole, np.uint8))
        end = device.card.memory_bytes
        device.backend.write_memory(end - whole, np.zeros(whole, np.uint8))
        for places, expected in (
            ({"m": end - whole}, DONE[:2]),
            ({"m": end - whole + beat}, (ErrorCause.ADDRESS_RANGE, Stream.M_READ)),
            ({"m": arena.address, "v": arena.address + whole}, DONE[:2]),
            ({"m": arena.address, "v": arena.address + whole - beat},
             (ErrorCause.OVERLAP, Stream.V_READ)),
        ):  # fmt: skip
            start.reset()
            start.set(**{f"{name}_address": at for name, at in places.items()})
            assert start.outcome()[:2] == expected
            if expected != DONE[:2]:
                assert start.kernel.error_address.value == list(places.values())[-1]
            start.work.upload()
        start.reset()
        start.copy.fill(7)
        start.all_but("m", 0b111, beat)
        start.refuses(ErrorCause.WINDOW, Stream.M_READ)
        start.check_works()


@pytest.mark.parametrize("name", ["cpp-8-lanes", "numpy-8-lanes", "cpp-16-lanes-most"])
def test_lent_memory_whose_borders_cut_blocks(name):
    """Parts of any array, for writing or not: the results, and where they are."""
    with nearstep.open(KERNELS[name]) as device:
        block, lent = device.config.block_elements, 0
        for seed in range(8):
            job = Job(device, 4 * block + 300, seed=20 + seed)
            kept = []
            for array, buffer in job.buffers.items():
                writes = bool(job.rng.random() < 0.7) and array != "g"
                data = job.before[array].view(np.uint8)
                at, stop = sorted(job.rng.choice(data.size // 4, 2, replace=False) * 4)
                part = data[at:stop].copy()
                assert device.backend.lend_memory(buffer.address + at, part, writes=writes)
                kept.append((array, at, stop, part, writes))
            job.start().wait()
            after, before = job.expected(), job.before
            assert job.check() == 3 * job.count
            for array, at, stop, part, writes in kept:
                wanted = (after if writes else before)[array].view(np.uint8)
                assert (part == wanted[at:stop]).all()
                device.backend.end_loan(job.buffers[array].address + at)
                lent += 1
            job.free()
        assert lent == 32
