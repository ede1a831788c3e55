"""Rings of sync cores against the golden model; jobs that cannot be done; errors of the memory."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from nearstep_sim.bench.operands import operands
from nearstep_sim.coarse.sync_ring import STALLS, Job, SyncRing
from nearstep_sim.golden.coarse import OPERATIONS, ring_all_reduce
from nearstep_sim.golden.coarse_cpp import exact_sum
from nearstep_sim.models.memory import POISON
from nearstep_sim.verilate.harness import CInjection
from nearstep_spec.coarse.config import BEAT_BYTES, CoarseConfig
from nearstep_spec.coarse.registers import ErrorCause, ReduceOp, Stream, Wire

MEBIBYTE = 1 << 20
SMALL = {"entry_phits": 8, "chunks_ahead": 3, "local_beats": 32, "memory_bytes": MEBIBYTE}
CONFIG = CoarseConfig(alus=8, **SMALL)
FORMATS = {"wire_formats": ("fp32", "bf16"), "exact": ("bf16",)}
EXACT = CoarseConfig(alus=8, buffer_entries=8, **SMALL, **FORMATS)
SOURCE, DESTINATION = 4096 - 5 * BEAT_BYTES, MEBIBYTE // 2 + 3 * BEAT_BYTES
SLVERR, DECERR, _, LATE = range(4)
LATE_WRITES = CInjection(kind=LATE, write=1, limit=MEBIBYTE, times=1 << 20, delay=1000)

pytestmark = pytest.mark.deep
"""Fast tests run sync cores in the pool: `tests/host/coarse` and `tests/sim/coarse`."""


@pytest.fixture(scope="module")
def rings():
    made = {}

    def ring(members: int, config: CoarseConfig = CONFIG) -> SyncRing:
        if (members, config) not in made:
            made[members, config] = SyncRing(config, members)
        return made[members, config]

    yield ring
    for each in made.values():
        each.close()


@dataclass
class Checks:
    """Words compared with the model, and with what they were before."""

    results: int = 0
    sources: int = 0


def _span(elements: int) -> int:
    return -(-elements // 16) * BEAT_BYTES


def _load(ring: SyncRing, tensors, source=SOURCE, destination=DESTINATION) -> None:
    """Put the tensors into their memories; nothing but they and the results may be touched."""
    length = len(tensors[0])
    ring.forget([(a, a + _span(length)) for a in (source, destination)])
    for core, tensor in enumerate(tensors):
        ring.fill(core, source, tensor)


def _check(ring, tensors, reports, golden, *, source=SOURCE, destination=DESTINATION) -> Checks:
    """All cores have done their job, hold the same bits as `golden`, and nothing else changed."""
    checks = Checks()
    length = len(golden)
    for core, (tensor, report) in enumerate(zip(tensors, reports, strict=True)):
        assert (report.done, report.errors) == (1, 0), (core, report.done, report.cause)
        assert report.fault.kind == 0, (report.fault.rule, report.fault.detail)
        assert report.violations == 0
        assert report.writes == -(-length // 16)
        got = ring.take(core, destination, _span(length) // 4)
        assert np.array_equal(got[:length], golden.view(np.uint32)), core
        assert np.all(got[length:] == POISON), "written behind the last element"
        left = ring.take(core, source, length)
        assert np.array_equal(left, tensor.view(np.uint32)), "the source changed"
        checks.results += length
        checks.sources += length
    return checks


def _tensors(members: int, length: int, seed: int) -> list:
    made = operands([str(d) for d in range(members)], max(length, 1), seed)
    return [each[:length] for each in made.values()]


def _reduce(ring, tensors, operation, wire, *, reverse=False, divisor=0, **options) -> Checks:
    members = ring.members
    positions = [(members - d) % members if reverse else d for d in range(members)]
    job = Job(
        source=SOURCE,
        destination=DESTINATION,
        elements=len(tensors[0]),
        operation=ReduceOp[operation.upper()],
        wire=Wire[wire.upper()],
        scale=1 / members,
        tag=len(tensors[0]) & 0xFFFF,
        divisor=divisor,
    )
    _load(ring, tensors)
    reports = ring.run([job] * members, positions=positions, **options)
    golden = ring_all_reduce(
        tensors, operation=operation, wire=wire, config=ring.config, reverse=reverse
    )
    if divisor:
        exact_sum(tensors, [golden], wire=wire, divisor=divisor)
    return _check(ring, tensors, reports, golden)


def _sizes(config: CoarseConfig, members: int, wire: str, rng) -> list[int]:
    chunk = members * config.entry_elements(wire)
    batch = chunk * config.chunks_ahead
    return [
        0, 1, 15, 16, 17, 16 * members - 1, chunk - 1, chunk, chunk + 1, chunk + 17, batch,
        batch + 1, 2 * batch + chunk - 33, 3 * batch, *rng.integers(2, 4 * batch, 3).tolist(),
    ]  # fmt: skip


def _all_sizes(ring, mode: str, seed: int) -> int:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    words, runs = 0, 0
    for wire in ring.config.wire_formats:
        for length in _sizes(ring.config, ring.members, wire, rng):
            for operation in OPERATIONS:
                runs += 1
                tensors = _tensors(ring.members, length, seed + runs)
                checks = _reduce(
                    ring, tensors, operation, wire, reverse=bool(rng.integers(2)), stall=mode,
                    memory_stall=float(rng.choice([0.0, 0.3])), seed=seed + runs,
                    memory_latency=int(rng.choice([1, 10, 100])),
                    half_duplex=bool(rng.integers(2)), link_latency=int(rng.choice([0, 8, 90])),
                )  # fmt: skip
                words += checks.results
    assert runs == len(ring.config.wire_formats) * len(OPERATIONS) * 17
    return words


@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize("members", [2, 3, 4])
def test_all_devices_hold_what_the_model_says(rings, members: int, mode: str) -> None:
    assert _all_sizes(rings(members), mode, 100 * members) > 50_000


@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize("members", [2, 5])
@pytest.mark.parametrize("alus", [4, 16])
def test_fewer_and_more_alus_give_the_same(rings, alus: int, members: int, mode: str) -> None:
    ring = rings(members, CoarseConfig(alus=alus, **SMALL))
    assert _all_sizes(ring, mode, 1000 * alus + members) > 50_000


@pytest.mark.parametrize("members", [2, 3, 7])
def test_entries_of_one_beat_and_no_short_formats(rings, members: int) -> None:
    config = CoarseConfig(
        alus=16, entry_phits=4, chunks_ahead=1, local_beats=32, memory_bytes=MEBIBYTE,
        wire_formats=("fp32",),
    )  # fmt: skip
    assert _all_sizes(rings(members, config), "both", members) > 1000


def test_many_devices_in_both_directions(rings) -> None:
    tensors = _tensors(9, 3001, 9)
    for reverse in (False, True):
        checks = _reduce(rings(9), tensors, "sum", "bf16", reverse=reverse, stall="both")
        assert checks.results == 9 * 3001


def test_a_device_waits_for_the_jobs_of_the_others(rings) -> None:
    ring, length = rings(3), 3000
    tensors = _tensors(3, length, 12)
    _load(ring, tensors)
    job = Job(source=SOURCE, destination=DESTINATION, elements=length)
    early = ring.run([job, None, None])
    assert [(r.done, r.errors, r.busy > 0) for r in early] == [
        (0, 0, True),
        (0, 0, False),
        (0, 0, False),
    ]
    late = ring.run([None, job, job])
    golden = ring_all_reduce(tensors, operation="sum", wire="fp32", config=CONFIG)
    assert _check(ring, tensors, late, golden).results == 3 * length


@pytest.mark.parametrize(
    ("options", "strobe", "least"),
    [
        ({"memory_latency": 500}, "stall_local", 400),
        ({"link_latency": 500}, "stall_receive", 400),
        ({"stall": "sink"}, "stall_send", 400),
        ({"inject": (0, LATE_WRITES)}, "stall_write", 400),
    ],
)
def test_what_the_alus_wait_for_is_told(rings, options, strobe: str, least: int) -> None:
    ring, length = rings(2), 8000
    tensors = _tensors(2, length, 13)
    counts = []
    for changes in ({}, options):
        _load(ring, tensors)
        job = Job(source=SOURCE, destination=DESTINATION, elements=length)
        report = ring.run([job] * 2, **changes)[0]
        assert report.done == 1
        counts.append(getattr(report, strobe))
    assert counts[1] - counts[0] > least, counts


def test_a_wrong_result_is_found(rings) -> None:
    ring, tensors = rings(2), _tensors(2, 100, 3)
    golden = ring_all_reduce(tensors, operation="max", wire="fp32", config=CONFIG)
    job = Job(source=SOURCE, destination=DESTINATION, elements=100, operation=ReduceOp.MAX)
    _load(ring, tensors)
    reports = ring.run([job] * 2)
    _check(ring, tensors, reports, golden)
    golden.view(np.uint32)[99] ^= 1
    with pytest.raises(AssertionError):
        _check(ring, tensors, reports, golden)


def test_an_access_outside_the_tensors_is_found(rings) -> None:
    ring, tensors = rings(2), _tensors(2, 100, 3)
    _load(ring, tensors)
    reports = ring.run([Job(source=SOURCE, destination=DESTINATION, elements=113)] * 2)
    assert all(report.fault.kind for report in reports)


def test_a_ring_without_room_for_the_chunks_ahead_stands_still() -> None:
    config = CoarseConfig(alus=8, entry_phits=8, chunks_ahead=12, memory_bytes=MEBIBYTE)
    ring = SyncRing(config, 2)
    tensors = _tensors(2, 24 * 32, 4)
    _load(ring, tensors)
    job = Job(source=SOURCE, destination=DESTINATION, elements=24 * 32)
    stuck = ring.run([job] * 2, slots=1)
    assert [report.done for report in stuck] == [0, 0]
    assert ring.clear()
    assert _reduce(ring, tensors, "sum", "fp32", slots=config.chunks_ahead + 2).results
    ring.close()


ALL = MEBIBYTE
BAD_JOBS = {
    "operation": (Job(source=0, destination=ALL // 2, elements=5, operation=3), {},
                  ErrorCause.UNSUPPORTED, Stream.NONE, None),
    "wire": (Job(source=0, destination=ALL // 2, elements=5, wire=3), {},
             ErrorCause.UNSUPPORTED, Stream.NONE, None),
    "one member": (Job(source=0, destination=ALL // 2, elements=5), {"members": 1},
                   ErrorCause.UNSUPPORTED, Stream.NONE, None),
    "source not aligned": (Job(source=32, destination=ALL // 2, elements=5), {},
                           ErrorCause.ALIGNMENT, Stream.SOURCE, 32),
    "destination not aligned": (Job(source=0, destination=ALL // 2 + 4, elements=5), {},
                                ErrorCause.ALIGNMENT, Stream.DESTINATION, ALL // 2 + 4),
    "source below the window": (Job(source=0, destination=ALL // 2, elements=5),
                                {"window": (64, ALL)}, ErrorCause.WINDOW, Stream.SOURCE, 0),
    "source above the window": (Job(source=ALL - 64, destination=0, elements=17), {},
                                ErrorCause.WINDOW, Stream.SOURCE, ALL - 64),
    "destination above the window": (Job(source=0, destination=ALL - 64, elements=17), {},
                                     ErrorCause.WINDOW, Stream.DESTINATION, ALL - 64),
    "window of half a beat less": (Job(source=0, destination=ALL - 64, elements=1),
                                   {"window": (0, ALL - 32)},
                                   ErrorCause.WINDOW, Stream.DESTINATION, ALL - 64),
    "as many elements as there are numbers": (Job(source=0, destination=64, elements=2**32 - 1),
                                              {}, ErrorCause.WINDOW, Stream.SOURCE, 0),
    "destination in the source": (Job(source=0, destination=64, elements=17), {},
                                  ErrorCause.OVERLAP, Stream.DESTINATION, 64),
    "source in the destination": (Job(source=64, destination=0, elements=17), {},
                                  ErrorCause.OVERLAP, Stream.DESTINATION, 0),
    "in place": (Job(source=64, destination=64, elements=1), {},
                 ErrorCause.OVERLAP, Stream.DESTINATION, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_job_that_cannot_be_done_is_refused_before_anything_is_read(rings, name: str) -> None:
    job, options, cause, stream, address = BAD_JOBS[name]
    ring, tensors = rings(2), _tensors(2, 100, 6)
    _load(ring, tensors)
    for report in ring.run([job] * 2, **options):
        assert (report.errors, report.done, report.cause, report.stream) == (1, 0, cause, stream)
        assert (report.reads, report.writes, report.phits, report.fault.kind) == (0, 0, 0, 0)
        assert address is None or report.address == address
    later = ring.run([Job(source=SOURCE, destination=DESTINATION, elements=100)] * 2)
    assert all((r.busy, r.done, r.errors, r.phits) == (0, 0, 0, 0) for r in later)
    _recovers(ring, tensors)


def test_a_position_outside_the_ring_is_refused(rings) -> None:
    ring, tensors = rings(3), _tensors(3, 100, 6)
    _load(ring, tensors)
    job = Job(source=SOURCE, destination=DESTINATION, elements=100)
    reports = ring.run([job] * 3, members=2)
    assert reports[2].cause == ErrorCause.UNSUPPORTED
    assert reports[2].phits == 0
    _recovers(ring, tensors)


def test_a_format_that_was_left_out_is_refused(rings) -> None:
    config = CoarseConfig(
        alus=16, entry_phits=4, chunks_ahead=1, local_beats=32, memory_bytes=MEBIBYTE,
        wire_formats=("fp32",),
    )  # fmt: skip
    ring = rings(2, config)
    job = Job(source=0, destination=4096, elements=5, wire=Wire.BF16)
    assert [r.cause for r in ring.run([job] * 2)] == [ErrorCause.UNSUPPORTED] * 2
    assert ring.clear()


def _recovers(ring: SyncRing, tensors) -> None:
    """After a clear the next job is right."""
    assert ring.clear()
    assert _reduce(ring, tensors, "average", "fp16").results == sum(map(len, tensors))


@pytest.mark.parametrize(
    "change",
    [
        {"elements": 101},
        {"elements": 0},
        {"operation": ReduceOp.MAX},
        {"wire": Wire.BF16},
        {"scale": 0.25},
        {"tag": 0x8000},
    ],
    ids=lambda change: "-".join(map(str, change)),
)
def test_another_job_of_the_device_before_is_found(rings, change) -> None:
    ring, tensors = rings(3), _tensors(3, 112, 7)
    _load(ring, tensors)
    job = Job(source=SOURCE, destination=DESTINATION, elements=100)
    reports = ring.run([job, job.but(**change), job])
    for core in (1, 2):  # the one that differs, and the one behind it
        report = reports[core]
        assert (report.errors, report.cause) == (1, ErrorCause.MISMATCH)
        assert (report.stream, report.writes, report.done) == (Stream.RECEIVE, 0, 0)
    assert [(report.done, report.fault.kind) for report in reports] == [(0, 0)] * 3
    _recovers(ring, tensors)


@pytest.mark.parametrize("nth", [0, 3, 11])
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(("kind", "response"), [(SLVERR, 2), (DECERR, 3)])
def test_an_error_of_the_memory_ends_the_job_and_keeps_the_source(
    rings, kind: int, response: int, write: bool, nth: int
) -> None:
    ring, length = rings(3), 3000
    tensors = _tensors(3, length, 8)
    _load(ring, tensors)
    fault = CInjection(kind=kind, write=write, limit=MEBIBYTE, nth=nth, times=1)
    job = Job(source=SOURCE, destination=DESTINATION, elements=length)
    reports = ring.run([job] * 3, inject=(1, fault), memory_latency=40)
    report = reports[1]
    cause = ErrorCause.WRITE_RESPONSE if write else ErrorCause.READ_RESPONSE
    base = DESTINATION if write else SOURCE
    assert (report.errors, report.cause, report.response) == (1, cause, response)
    assert report.stream == (Stream.DESTINATION if write else Stream.SOURCE)
    assert base <= report.address < base + _span(length)
    assert [(each.done, each.fault.kind, each.violations) for each in reports] == [(0, 0, 0)] * 3
    assert ring.clear()
    for core, tensor in enumerate(tensors):
        assert np.array_equal(ring.take(core, SOURCE, length), tensor.view(np.uint32))
    _recovers(ring, tensors)


def test_a_halt_at_any_time_and_a_clear_leave_nothing_behind(rings) -> None:
    ring = rings(3)
    rng = np.random.default_rng(55)
    print("seed 55")
    cycles = [*range(1, 80, 7), *rng.integers(80, 2500, 25).tolist()]
    for number, cycle in enumerate(cycles):
        tensors = _tensors(3, 3000, number)
        _load(ring, tensors)
        _wire, job = (
            list(Wire)[number % 3],
            Job(source=SOURCE, destination=DESTINATION, elements=3000),
        )
        reports = ring.run([job] * 3, max_cycles=cycle, stall="both", seed=number,
                           memory_latency=50)  # fmt: skip
        assert [(r.done, r.fault.kind, r.violations) for r in reports] == [(0, 0, 0)] * 3
        _recovers(ring, tensors)
    assert len(cycles) >= 30


def test_a_halted_core_takes_no_job(rings) -> None:
    ring, tensors = rings(2), _tensors(2, 100, 6)
    _load(ring, tensors)
    job = Job(source=SOURCE, destination=DESTINATION, elements=100)
    reports = ring.run([job] * 2, halted=True)
    assert all((r.busy, r.phits, r.reads) == (0, 0, 0) for r in reports)
    _recovers(ring, tensors)


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_link_or_the_alus_are_busy_in_every_cycle(rings, wire: str, members: int) -> None:
    """But for the begin and the end of a job, which take as long for one of half the length."""
    config = CoarseConfig(memory_bytes=2 * MEBIBYTE)
    ring, length = rings(members, config), 1 << 17
    tensors = [np.ones(length, np.float32)] * members
    ring.forget([(0, 2 * MEBIBYTE)])
    runs = []
    for elements in (length // 2, length):
        for core in range(members):
            ring.fill(core, 0, tensors[core])
        job = Job(source=0, destination=MEBIBYTE, elements=elements, wire=Wire[wire.upper()])
        runs.append(ring.run([job] * members, slots=2 * config.buffer_entries))
    for half, whole in zip(*runs, strict=True):
        assert half.done == whole.done == 1
        cycles = whole.cycles - half.cycles
        beats = (whole.beats - half.beats) / cycles
        phits = (whole.phits - half.phits) / cycles
        print(f"{members} devices, {wire}: {whole.cycles} cycles, {beats:.3f} beats and "
              f"{phits:.3f} phits a cycle")  # fmt: skip
        assert max(beats, phits) > 0.999
        assert whole.reads == whole.writes == length // 16


def _entries(members: int) -> int:
    """Entries between two cores that `most_woven` reserves."""
    return (members * (members + 1) // 2 - 1) * (2 if members == 2 else 1) + members - 1


@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize(("alus", "members"), [(8, 2), (8, 3), (8, 4), (4, 3), (16, 3)])
def test_exact_sums_with_interleaved_rounds(rings, alus: int, members: int, mode: str) -> None:
    ring = rings(members, replace(EXACT, alus=alus))
    assert _entries(members) <= 2 * ring.config.buffer_entries - 2
    print("seed 71")
    rng = np.random.default_rng(71)
    chunk = members * ring.config.entry_elements("bf16")
    sizes = (1, 17, chunk, chunk + 17, 2 * chunk - 1, 9 * chunk + 40, 20 * chunk)
    words = 0
    for number, length in enumerate(sizes):
        tensors = _tensors(members, length, 71 + number)
        for operation, divisor in (("sum", 1), ("average", 0), ("sum", members)):
            words += _reduce(
                ring, tensors, operation, "bf16", divisor=divisor, stall=mode, seed=number,
                reverse=bool(rng.integers(2)), memory_stall=float(rng.choice([0.0, 0.3])),
                memory_latency=int(rng.choice([1, 10, 100])), link_latency=int(rng.choice([0, 90])),
                slots=_entries(members) + bool(not divisor) * SMALL["chunks_ahead"],
            ).results  # fmt: skip
    assert words == 3 * members * sum(sizes)


def test_a_halt_of_interleaved_rounds_and_a_clear_leave_nothing_behind(rings) -> None:
    ring, checks = rings(3, EXACT), 0
    print("seed 72")
    rng = np.random.default_rng(72)
    tensors = _tensors(3, 3000, 72)
    job = Job(source=SOURCE, destination=DESTINATION, elements=3000, wire=Wire.BF16, divisor=1)
    for cycle in [*range(1, 80, 13), *rng.integers(80, 1300, 24).tolist()]:
        _load(ring, tensors)
        reports = ring.run([job] * 3, max_cycles=cycle, stall="both", memory_latency=50)
        assert [(r.done, r.fault.kind, r.violations) for r in reports] == [(0, 0, 0)] * 3
        assert ring.clear()
        checks += bool(_reduce(ring, tensors, "sum", "bf16", divisor=1, slots=14).results)
    assert checks == 31


@pytest.mark.parametrize("members", [2, 3, 4])
def test_an_exact_sum_takes_at_most_half_as_long_again(rings, members: int) -> None:
    config = CoarseConfig(memory_bytes=2 * MEBIBYTE, exact=("bf16",))
    ring, elements, cycles = rings(members, config), 1 << 18, []
    for divisor in (0, 1):
        ring.forget([(0, 2 * MEBIBYTE)])
        for core in range(members):
            ring.fill(core, 0, np.ones(elements, np.float32))
        job = Job(source=0, destination=MEBIBYTE, elements=elements, wire=Wire.BF16,
                  divisor=divisor)  # fmt: skip
        reports = ring.run([job] * members, slots=2 * config.buffer_entries)
        assert all(report.done for report in reports)
        cycles.append(max(report.cycles for report in reports))
    print(f"{members} devices: {cycles} cycles, {cycles[1] / cycles[0]:.3f}")
    assert cycles[1] <= 1.5 * cycles[0]
