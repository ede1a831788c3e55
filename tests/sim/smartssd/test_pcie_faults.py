"""The card as it is shipped, while a device on its bus keeps no rule of PCIe: it answers as the
standard says, nothing is written but what may be, and runs have the golden bits.

Beside the packets go errors of its memory, aborts of runs, and resets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl

import numpy as np
import pytest

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.device import drive
from nearstep.errors import ArgumentError, DeviceError, KernelError, ProtocolError
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.models.memory import LINE_BYTES, WRITTEN
from nearstep_sim.smartssd.options import PcieCardOptions
from nearstep_sim.smartssd.pcie_card import Answer, PcieCardBackend
from nearstep_spec.codec import from_text
from nearstep_spec.pcie import MSIX_PBA_OFFSET, MSIX_TABLE_OFFSET

from ...host.driver.job import Job
from .link_packets import CA, MEMORY_BASE, SC, Fate, Packet, Places, Rules, Vandal, read_bytes
from .test_card import OPTIONS

pytestmark = pytest.mark.deep

LOOKED_AT = 4 << 20
"""Bytes of memory that are compared; whatever is beyond must never be written."""

PACKETS = {"shipped": 40_000, "stalled": 10_000}
URLS = {"shipped": "bus=pcie", "stalled": f"{OPTIONS}&bus=pcie&reorder=yes&stall=0.2"}
"""The card with all its defaults; one of 4 lanes where packets pass each other and all stalls."""

BATCH = 50
COUNT = 3000
PLACES = Places(
    scratch=range(3 << 20, (3 << 20) + (64 << 10)),
    constant=range((3 << 20) + (128 << 10), (3 << 20) + (192 << 10)),
    arrays=range(1 << 20),
)


def rules_of(device: SmartssdDevice) -> Rules:
    """From the card's register map, and the table of MSI-X: one vector, one word pair pending."""
    readable, writable = set(), set()
    for offset, block in device.backend.config.maps().values():
        for register in block:
            words = [offset + register.offset + 4 * word for word in range(register.words)]
            readable.update(words)
            if register.writable:
                writable.update(words)
    table = range(MSIX_TABLE_OFFSET, MSIX_TABLE_OFFSET + 16, 4)
    readable.update(table)
    writable.update(table)
    readable.update((MSIX_PBA_OFFSET, MSIX_PBA_OFFSET + 4))
    memory = device.backend.config.memory_bytes
    return Rules(memory, 2 * memory, readable, writable)


class Bench:
    """A card, what its memory should hold, and packets for it."""

    def __init__(self, device: SmartssdDevice, backend: PcieCardBackend, seed: str) -> None:
        print(f"seed {seed}")
        self.device, self.backend = device, backend
        self.rules = rules_of(device)
        self.vandal = Vandal(self.rules, PLACES, seed)
        self.random = np.random.default_rng(list(seed.encode()))
        self.memory = np.array([], np.uint8)
        self.kinds: Counter[str] = Counter()
        self.checks = 0
        self.failing = False  # memory may answer others with errors
        self.fill()

    def fill(self) -> None:
        """Known bytes wherever no array is."""
        first = PLACES.arrays.stop
        content = self.random.integers(0, 256, LOOKED_AT - first, dtype=np.uint8)
        self.backend.write_memory(first, content)
        self.backend.flush()
        self.memory = content

    def batch(self, count: int = BATCH) -> None:
        """Send packets, wait until all are answered, and look at every answer."""
        sent = [self.vandal.packet() for _ in range(count)]
        before = self.backend.pcie_counters
        for packet in sent:
            self.backend.send(packet.words())
            if self.rules.writes(packet):
                self.write(packet)
        self.backend.settle()
        self.backend.read_register(0)  # comes behind all that is posted
        after = self.backend.pcie_counters
        fates = Counter(self.rules.fate(packet).value for packet in sent)
        for fate in (Fate.MALFORMED, Fate.UNEXPECTED, Fate.CONFIGURATION, Fate.UNCLAIMED):
            assert after[fate.value] - before[fate.value] == fates[fate.value], fate
            self.checks += 1
        self.look_at(sent, self.backend.answers())
        for packet in sent:
            self.kinds[f"{packet.kind} {self.rules.fate(packet).value}"] += 1

    def write(self, packet: Packet) -> None:
        at = packet.address - MEMORY_BASE - PLACES.arrays.stop
        data = np.array(packet.payload, np.uint32).view(np.uint8)
        enabled = np.array(packet.enables())
        self.memory[at : at + data.size][enabled] = data[enabled]

    def look_at(self, sent: list[Packet], answers: list[Answer]) -> None:
        """Each request that has an answer has its own, and no other has one."""
        found: dict[tuple[int, int], list[list[Answer]]] = defaultdict(list)
        open_: dict[tuple[int, int], list[Answer]] = {}
        for answer in answers:
            key = answer.requester, answer.tag
            open_.setdefault(key, []).append(answer)
            if answer.ends:
                found[key].append(open_.pop(key))
        assert not open_, open_
        wanted: dict[tuple[int, int], list[Packet]] = defaultdict(list)
        for packet in sent:
            if self.rules.status(packet) is not None:
                wanted[packet.requester, packet.tag].append(packet)
        assert found.keys() == wanted.keys()
        for key, packets in wanted.items():
            got = found[key]
            assert len(got) == len(packets), key
            if len(packets) == 1:
                self.compare(packets[0], got[0])
            else:  # two of one tag: which is which cannot be told
                ended = sorted(each[-1].status for each in got)
                if not self.failing:
                    assert ended == sorted(self.rules.status(each) or SC for each in packets)
                self.checks += 1

    def compare(self, packet: Packet, answers: list[Answer]) -> None:
        status = self.rules.status(packet)
        ended = answers[-1].status
        if not (self.failing and packet.bar == "memory" and ended == CA):
            assert ended == status, (packet, answers[-1])
        for answer in answers:
            assert (answer.traffic_class, answer.attributes) == (
                packet.traffic_class,
                packet.attributes,
            )
            self.checks += 1
        if ended != SC:
            copy = answers[-1].request
            if copy:  # of the card, not of the block
                assert copy[0] == packet.first | packet.last << 4
                assert copy[1] & ~3 == packet.address & 0xFFFF_FFFC
                assert copy[2] == packet.address >> 32
            return
        left, at = max(1, self._bytes(packet)), packet.address + self._leading(packet)
        content = b""
        for answer in answers:
            assert (answer.byte_count, answer.lower_address) == (left, at & 0x7F), packet
            size = 4 * len(answer.payload) - (at & 3)
            content += np.array(answer.payload, np.uint32).tobytes()
            left, at = left - size, at + size
        assert len(content) == 4 * packet.dwords
        offset = packet.address - MEMORY_BASE
        inside = PLACES.constant
        if packet.bar == "memory" and inside.start <= offset < inside.stop - len(content):
            begin = offset - PLACES.arrays.stop
            expected = self.memory[begin : begin + len(content)].tolist()
            assert read_bytes(packet, content) == read_bytes(packet, expected), packet
            self.checks += len(content)

    @staticmethod
    def _leading(packet: Packet) -> int:
        enabled = packet.enables()
        return enabled.index(True) if packet.first else 0

    def _bytes(self, packet: Packet) -> int:
        """From the first to the last byte that is enabled."""
        places = [at for at, enabled in enumerate(packet.enables()) if enabled]
        return places[-1] - places[0] + 1 if places else 0

    def look_at_memory(self) -> None:
        """Nothing was written but what was to be."""
        found = np.empty_like(self.memory)
        self.backend.read_memory(PLACES.arrays.stop, found)
        wrong = np.flatnonzero(found != self.memory)
        assert not wrong.size, f"{wrong.size} bytes, first {PLACES.arrays.stop + wrong[0]:#x}"
        beyond = self.backend._memory.state[LOOKED_AT // LINE_BYTES :]
        assert not (beyond == WRITTEN).any()
        self.checks += found.size + beyond.size


@contextmanager
def opened(name: str) -> Iterator[Bench]:
    options = from_text(PcieCardOptions, dict(parse_qsl(URLS[name])))
    backend = PcieCardBackend(options, bar_bytes=2 * options.memory_bytes)
    with drive(backend, "sim:smartssd?bus=pcie") as device:
        assert isinstance(device, SmartssdDevice)
        yield Bench(device, backend, f"vandal {name}")


def faulty_run(bench: Bench, job: Job, kind: str) -> str:
    """A run with packets beside it, and what comes of it."""
    device, backend = bench.device, bench.backend
    kernels = PLACES.arrays
    run = job.start()
    bench.batch()
    if kind == "memory":
        write = bool(bench.random.integers(2))
        backend.inject(
            Injection(kind="slverr", write=write, base=kernels.start, limit=kernels.stop)
        )
    elif kind == "others":
        area = PLACES.constant
        bench.failing = True
        backend.inject(
            Injection(kind="decerr", write=False, host=True, base=area.start, limit=area.stop,
                      times=1000)
        )  # fmt: skip
    elif kind == "abort":
        run.abort()
    elif kind == "reset":
        device.reset()
    bench.batch()
    if kind == "reset":
        job.upload()
        return "reset"
    try:
        run.wait()
        outcome = "done" if run.done else "aborted"
    except KernelError as error:
        outcome = type(error).__name__
    backend.heal()
    bench.failing = False
    if outcome == "done":
        assert job.check() == 3 * COUNT
    else:
        job.upload()
    return outcome


KINDS = ("nothing", "memory", "others", "abort", "reset")


@pytest.mark.parametrize("name", URLS)
def test_packets_that_break_rules_beside_faults_of_everything_else(name: str) -> None:
    outcomes: Counter[str] = Counter()
    wanted = PACKETS[name]
    with opened(name) as bench:
        job = Job(bench.device, COUNT, 1)
        sent = 0
        number = 0
        while sent < wanted:
            kind = KINDS[number % len(KINDS)]
            outcomes[f"{kind}: {faulty_run(bench, job, kind)}"] += 1
            for _ in range(8):
                bench.batch()
            bench.look_at_memory()
            job.run()
            compared = job.check()
            assert compared == 3 * COUNT
            bench.checks += compared
            sent += 10 * BATCH
            number += 1
        counters = bench.backend.pcie_counters
    print(f"{sent} packets, {bench.checks} checks, {dict(outcomes)}, {counters}")
    for kind, number in sorted(bench.kinds.items()):
        print(f"{number:7} {kind}")
    assert sent >= wanted
    assert sum(bench.kinds.values()) == sent
    assert len({name.split(":")[0] for name in outcomes}) == len(KINDS)
    assert outcomes["abort: done"] < outcomes.total()
    assert counters["malformed"] > wanted // 100
    assert min(counters[each] for each in ("unexpected", "configuration", "unclaimed")) > 0


def test_an_answer_to_nobody_is_a_fault() -> None:
    """The checks of this file see what they are for."""
    with opened("stalled") as bench:
        bench.batch()
        wrong = Packet("read", MEMORY_BASE + PLACES.constant.start, 4, 0xF, 0xF, tag=3)
        bench.backend.send(wrong.words())
        bench.backend.settle()
        (answer,) = bench.backend.answers()
        other = Answer(**{**vars(answer), "byte_count": 12})
        with pytest.raises(AssertionError):
            bench.compare(wrong, [other])
        with pytest.raises(AssertionError):
            bench.look_at([wrong, wrong], [answer])
        bench.memory[7] ^= 1
        with pytest.raises(AssertionError, match="1 bytes, first"):
            bench.look_at_memory()
        with pytest.raises(ArgumentError, match="requester must be at least 0x300"):
            bench.backend.send(Packet("read", MEMORY_BASE, 1, requester=0x200).words())
    assert issubclass(ProtocolError, DeviceError)
    assert nearstep.errors.ProtocolError is ProtocolError
