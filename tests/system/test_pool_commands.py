"""Whatever the registers ask for, the RTL of a pool does as the golden pool does.

Rounds of jobs are drawn at random, good ones and bad ones, and given to both pools register by
register, in the same order; then registers and memory are compared. What depends on time is left
out: how far a job came that an error ended, and who of several finds one fault first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from nearstep.coarse.device import CoarseDevice
from nearstep.device import open_device
from nearstep.errors import WaitTimeoutError
from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY
from nearstep_spec.coarse.config import BEAT_BYTES, PAGE_BYTES
from nearstep_spec.coarse.registers import ErrorCause, ReduceOp, Wire

DEVICES, GROUPS = 4, 2
MEMORY = 1 << 20
OPTIONS = f"{SMALL}&{SMALL_MEMORY}"
URLS = {
    "golden": f"golden:coarse?{OPTIONS}",
    "ideal": f"sim:coarse?{OPTIONS}&memory=ideal&link_latency=5",
    "stalled": f"sim:coarse?{OPTIONS}&stall=0.3&seed=3&link_latency=40&drop=0.01&corrupt=0.01",
}
PAGES = 12
REGION = PAGES * PAGE_BYTES
"""Bytes at the beginning of each device's memory that jobs use; behind them lie copies of pages."""

SPOILS = (
    *("unaligned", "beyond", "far beyond", "overlap", "window", "operation", "wire", "place"),
    *("elements", "tag", "scale", "other operation", "other wire", "missing", "aborted"),
)
REFUSED = {
    "unaligned": ErrorCause.ALIGNMENT,
    "beyond": ErrorCause.WINDOW,
    "far beyond": ErrorCause.WINDOW,
    "overlap": ErrorCause.OVERLAP,
    "window": ErrorCause.WINDOW,
    "operation": ErrorCause.UNSUPPORTED,
    "wire": ErrorCause.UNSUPPORTED,
    "place": ErrorCause.UNSUPPORTED,
}


@dataclass
class Job:
    """What each device is told; a ring of all devices."""

    group: int
    elements: int
    operation: int
    wire: int
    tag: int
    source: list[int]
    destination: list[int]
    changes: dict[int, dict[str, int]] = field(default_factory=dict)
    missing: int | None = None

    @property
    def nbytes(self) -> int:
        return -(-4 * self.elements // BEAT_BYTES) * BEAT_BYTES

    def told(self, device: int) -> dict[str, int]:
        names = ("elements", "operation", "wire", "tag")
        same = {name: getattr(self, name) for name in names}
        places = {"source": self.source[device], "destination": self.destination[device]}
        scale = 0x3E800000 if self.operation == ReduceOp.AVERAGE else 0x3F800000
        return {**same, **places, "scale": scale, **self.changes.get(device, {})}


class Round:
    """Jobs in the order in which they are pushed, and a snapshot, drawn at random."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.spoil = str(rng.choice(SPOILS)) if rng.random() < 0.5 else ""
        self.victim = int(rng.integers(DEVICES))
        self.limits = [REGION] * DEVICES
        self.positions: dict[int, int] = {}
        self.words = rng.standard_normal((DEVICES, REGION // 4)).astype(np.float32)
        odd = rng.random(self.words.shape) < 0.02
        special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38], np.float32)
        self.words[odd] = rng.choice(special, int(odd.sum()))
        self.at = [0] * DEVICES
        groups = rng.permutation([0, 0, 1, 1])[: int(rng.integers(1, 4))]  # queues take two
        self.jobs = [self._job(*each) for each in enumerate(groups)]
        self.bad = self.jobs[int(rng.integers(len(self.jobs)))]
        if self.spoil:
            self._spoil()
        self.snapshot = rng.random() < 0.4
        self.frozen = [self._range() for _ in range(DEVICES)]
        self.pushes = self._pushes()

    def _job(self, number: int, group: int) -> Job:
        rng = self.rng
        elements = int(rng.choice([0, 1, 16, 100, 128, 129, int(rng.integers(1, 1500))]))
        job = Job(
            group=int(group),
            elements=elements,
            operation=int(rng.integers(3)),
            wire=int(rng.integers(3)),
            tag=int(rng.integers(1 << 14)) * 3 + number,
            source=[],
            destination=[],
        )
        for device in range(DEVICES):
            ends = []
            for _ in range(2):
                self.at[device] += BEAT_BYTES * int(rng.integers(0, 3))
                ends.append(self.at[device])
                self.at[device] += job.nbytes
            rng.shuffle(ends)
            job.source.append(ends[0])
            job.destination.append(ends[1])
        assert max(self.at) <= REGION
        return job

    def _spoil(self) -> None:
        rng, job, victim = self.rng, self.bad, self.victim
        end = str(rng.choice(["source", "destination"]))
        if self.spoil in ("overlap", "window") and not job.elements:
            self.spoil = "tag"
        change: dict[str, int] = {}
        if self.spoil == "unaligned":
            change = {end: job.told(victim)[end] + int(rng.choice([4, 1, 63]))}
        elif self.spoil == "beyond":
            change = {end: REGION + BEAT_BYTES * int(rng.integers(0 if job.elements else 1, 50))}
        elif self.spoil == "far beyond":
            change = {end: job.told(victim)[end] + (1 << int(rng.integers(20, 64)))}
        elif self.spoil == "overlap":
            change = {"destination": job.source[victim]}
        elif self.spoil == "window":
            self.bad = job = max((each for each in self.jobs if each.elements), key=self._end)
            self.limits[victim] = self._end(job) - BEAT_BYTES
        elif self.spoil == "operation":
            change = {"operation": 3}
        elif self.spoil == "wire":
            change = {"wire": 3}
        elif self.spoil == "place":
            self.positions[job.group] = DEVICES + int(rng.integers(4))
        elif self.spoil == "elements":
            change = {"elements": max(0, job.elements - 1) or job.elements + 1}
        elif self.spoil == "tag":
            change = {"tag": job.tag ^ 1 << int(rng.integers(16))}
        elif self.spoil == "scale":
            job.operation = ReduceOp.MAX
            change = {"scale": 0x40000000}
        elif self.spoil == "other operation":
            job.operation, change = ReduceOp.SUM, {"operation": ReduceOp.MAX}
        elif self.spoil == "other wire":
            job.wire, change = Wire.FP16, {"wire": Wire.BF16}
        else:  # a device never gets it, nor any behind it
            self.bad = job = [each for each in self.jobs if each.group == job.group][-1]
            job.missing = int(rng.integers(DEVICES))
            if self.spoil == "missing":
                self.spoil = "aborted"
        job.changes[victim] = change

    def _end(self, job: Job) -> int:
        """Behind all that a job touches on the victim."""
        return max(job.source[self.victim], job.destination[self.victim]) + job.nbytes

    def differ(self, device: int) -> tuple[ErrorCause, ...]:
        """What a device can find, besides that another has, where the job of one differs."""
        if self.spoil in REFUSED or self.spoil == "aborted":
            return ()
        after = (self.victim + (-1 if self.bad.group else 1)) % DEVICES
        return (ErrorCause.MISMATCH,) if device in (self.victim, after) else ()

    def _range(self) -> tuple[int, int]:
        first = int(self.rng.integers(PAGES))
        return first, int(self.rng.integers(1, PAGES - first + 1))

    def _pushes(self) -> list[tuple[int, Job]]:
        """Every device gets the jobs of a group in one order, in between those of others."""
        queues = [[job for job in self.jobs if job.missing != d] for d in range(DEVICES)]
        left = [(device, job) for device, jobs in enumerate(queues) for job in jobs]
        pushes = []
        while left:
            device = left[int(self.rng.integers(len(left)))][0]
            pushes.append((device, queues[device].pop(0)))
            left.remove(pushes[-1])
        return pushes


class Side:
    """One of the pools."""

    def __init__(self, url: str) -> None:
        device = open_device(url, CoarseDevice)
        self.device = device
        self.backend = device.backend
        self.nodes = device.nodes
        self.epoch = 0
        self.golden = url.startswith("golden")

    def prepare(self, each: Round) -> None:
        self.epoch = (self.epoch + 1) % 16
        for number, node in enumerate(self.nodes):
            node.pool.snapshot_control.close = 1
            node.pool.link.set(device=number, epoch=self.epoch, used=3)
            node.pool.retry.value = 512
            node.pool.control.abort = 1
        for number, node in enumerate(self.nodes):
            self.backend.wait([node.pool.status.poll(busy=0)], 20_000)
            self.backend.wait([node.pool.snapshot.poll(open=0)], 20_000)
            node.pool.window_base.value = 0
            node.pool.window_limit.value = each.limits[number]
            for group in range(GROUPS):
                place = (DEVICES - number) % DEVICES if group else number
                if number == each.victim:
                    place = each.positions.get(group, place)
                send = 1 - group
                ports = {"send_port": send, "receive_port": 1 - send}
                node[f"sync{group}"].ring.set(members=DEVICES, position=place, **ports)
            whole = np.zeros(2 * REGION, np.uint8)  # with the copies of the round before
            whole[:REGION] = each.words[number].view(np.uint8)
            self.backend.write_memory(number * MEMORY, whole)
            if each.snapshot:
                first, pages = each.frozen[number]
                node.pool.snapshot_base.value = first * PAGE_BYTES
                node.pool.snapshot_area.value = (PAGES + first) * PAGE_BYTES
                node.pool.snapshot_pages.value = pages
                node.pool.start.go = 1
                self.backend.wait([node.pool.snapshot.poll(open=1)], 20_000)

    def push(self, each: Round) -> None:
        for device, job in each.pushes:
            core, told = self.nodes[device][f"sync{job.group}"], job.told(device)
            for name in ("source", "destination", "elements"):
                core[name].value = told[name]
            core.scale.value = np.uint32(told["scale"]).view(np.float32)
            core.job.bits = told["operation"] | told["wire"] << 2 | told["tag"] << 16
            core.start.go = 1

    def end(self, each: Round) -> None:
        """Let all jobs end, well or not."""
        if each.bad.missing is not None:
            core = self.nodes[each.victim][f"sync{each.bad.group}"]
            with pytest.raises(WaitTimeoutError):
                self.backend.wait([core.completed.poll(value=9)], 20 if self.golden else 6000)
            waiting = [n for n in self.nodes if n[f"sync{each.bad.group}"].status.busy]
            assert len(waiting) == DEVICES - 1
            waiting[0][f"sync{each.bad.group}"].control.abort = 1
        for node in self.nodes:
            if each.spoil:
                self.backend.wait([node.pool.status.poll(error=1)], 60_000)
            for group in range(GROUPS):
                self.backend.wait([node[f"sync{group}"].status.poll(busy=0)], 200_000)

    def outcome(self, each: Round) -> list[dict[str, int]]:
        found = []
        for node in self.nodes:
            while (state := node.pool.snapshot.get())["written"] != state["taken"]:
                pass  # a page is on its way to the area
            registers = {
                "cause": int(node.pool.error.cause),
                "stream": int(node.pool.error.stream),
                "address": node.pool.error_address.value % MEMORY,
                "origin": int(node.pool.error_link.cause),
                "device": int(node.pool.error_link.device),
                "error": node.pool.status.error,
                "copied": node.pool.snapshot_copied.value if each.snapshot else 0,
                "failed": node.pool.snapshot.failed,
            }
            for group in range(GROUPS):
                core = node[f"sync{group}"]
                registers[f"completed{group}"] = core.completed.value
                registers[f"waiting{group}"] = core.jobs.waiting
                registers[f"overflow{group}"] = core.jobs.overflow
                registers[f"done{group}"] = core.status.done
                registers[f"busy{group}"] = core.status.busy
                assert int(core.error.cause) == registers["cause"]
            found.append(registers)
        return found

    def memory(self, device: int) -> np.ndarray:
        """The region of jobs, and that of copies."""
        out = np.empty(2 * REGION, np.uint8)
        self.backend.read_memory(device * MEMORY, out)
        return out


@pytest.fixture(scope="module")
def sides() -> Iterator[dict[str, Side]]:
    made = {name: Side(url) for name, url in URLS.items()}
    for side in made.values():
        for device in range(DEVICES):
            side.backend.write_memory(device * MEMORY, np.zeros(2 * REGION, np.uint8))
    yield made
    for side in made.values():
        side.device.close()


def frozen(each: Round, outcome: list[dict[str, int]], device: int, memory: np.ndarray) -> None:
    """What the snapshot shows is what was there when it was opened."""
    first, pages = each.frozen[device]
    before = each.words[device].view(np.uint8)
    for page in range(pages):
        copied = outcome[device]["copied"] >> page & 1
        at = (first + page) * PAGE_BYTES
        shown = memory[at + (REGION if copied else 0) :][:PAGE_BYTES]
        np.testing.assert_array_equal(shown, before[at:][:PAGE_BYTES])


def compare(each: Round, golden: Side, side: Side, context: str) -> int:
    """Registers and memory of two pools after a round; the number of bytes compared."""
    expected, found = golden.outcome(each), side.outcome(each)
    compared = 0
    if not each.spoil:
        assert found == expected, context
    else:
        causes = [one["cause"] for one in found]
        wanted = [one["cause"] for one in expected]
        assert all(one["error"] for one in found), context
        for device, (cause, want) in enumerate(zip(causes, wanted, strict=True)):
            assert cause in (want, ErrorCause.PEER, *each.differ(device)), context
        assert set(causes) == set(wanted), context
        for one in found:
            origin = found[one["device"]]
            assert one["origin"] == origin["cause"] != ErrorCause.PEER, context
            quiet = ("failed", "done0", "done1", "busy0", "busy1")
            assert not [name for name in quiet if one[name]], context
        if each.spoil in REFUSED:
            assert causes[each.victim] == REFUSED[each.spoil], context
            for name in ("cause", "stream", "address", "origin", "device"):
                assert [one[name] for one in found] == [one[name] for one in expected], context
    for device in range(DEVICES):
        want, got = golden.memory(device), side.memory(device)
        if each.spoil:  # how much of it is written, and copied before, depends on time
            for memory in (want, got):
                memory[REGION:] = 0
                for job in each.jobs:
                    memory[job.told(device)["destination"] % MEMORY :][: job.nbytes] = 0
        differs = np.flatnonzero(want != got)
        assert not differs.size, f"device {device} at {differs[:8]} {context}"
        compared += want.size
        if each.snapshot:
            frozen(each, found, device, side.memory(device))
    return compared


def agree(sides: dict[str, Side], rounds: int, seed: int) -> Counter[str]:
    """Draw rounds and compare; counts what they were."""
    rng = np.random.default_rng(seed)
    golden = sides["golden"]
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        each = Round(rng)
        for side in sides.values():
            side.prepare(each)
            side.push(each)
            side.end(each)
        for name in ("ideal", "stalled"):
            jobs = [vars(job) for job in each.jobs]
            context = f"{name}, seed {seed}: {each.spoil} of device {each.victim}, {jobs}"
            seen["bytes"] += compare(each, golden, sides[name], context)
        seen[each.spoil or "good"] += 1
        seen["snapshots"] += each.snapshot
        seen["jobs"] += len(each.jobs)
    print(f"seed {seed}: {dict(seen)}")
    return seen


@pytest.mark.deep
@pytest.mark.parametrize("seed", [0, 1])
def test_random_rounds_end_as_on_the_golden_pool(sides, seed) -> None:
    seen = agree(sides, 12, seed)
    assert seen["good"] > 2
    assert seen["snapshots"] > 0
    assert seen["bytes"] == 12 * 2 * DEVICES * 2 * REGION


@pytest.mark.deep
def test_many_random_rounds_end_as_on_the_golden_pool(sides) -> None:
    seen = agree(sides, 500, 77)
    assert {"good", *SPOILS} - {"missing"} <= seen.keys()
