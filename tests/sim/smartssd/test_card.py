"""`sim:smartssd` and `golden:smartssd` through their BARs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from urllib.parse import parse_qsl

import numpy as np
import pytest

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    ArgumentError,
    BusError,
    CompletionError,
    OutOfBoundsError,
    PostedWriteError,
    ProtocolError,
    RegisterAccessError,
)
from nearstep.registers import FieldValueError
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.smartssd.bar import BarBackend, BarTraffic
from nearstep_sim.smartssd.card import CardBackend
from nearstep_sim.smartssd.golden import GoldenCard
from nearstep_sim.smartssd.options import GoldenCardOptions, VerilatedCardOptions
from nearstep_sim.smartssd.pcie_card import PcieCardBackend
from nearstep_spec.codec import from_text

from ...host.driver.job import Job

OPTIONS = "lanes=4&chunk_bytes=512&memory_bytes=4MiB"
"""Those of `SIM_CARD_SHAPE` of `tests/host/driver`: they share one build."""
URLS = {
    "golden": f"golden:smartssd?{OPTIONS}",
    "sim": f"sim:smartssd?{OPTIONS}",
    "sim-stalled": f"sim:smartssd?{OPTIONS}&fu=native&memory=ideal&stall=0.3&seed=5",
    "pcie": f"sim:smartssd?{OPTIONS}&bus=pcie",
    "pcie-stalled": f"sim:smartssd?{OPTIONS}&bus=pcie&reorder=yes&memory=ideal&stall=0.3&seed=5",
}
DEEP = ("sim-stalled", "pcie", "pcie-stalled")
SIMS = ["sim", *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP)]
PAGE = 4096
REGION = 3 * PAGE  # bytes that tests change, between guards of a page
BASE = 2 * PAGE


@pytest.fixture(
    params=["golden", *SIMS],
)
def card(request: pytest.FixtureRequest) -> Iterator[SmartssdDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        assert isinstance(opened, SmartssdDevice)
        assert isinstance(opened.backend, BarBackend)
        yield opened


class Mirror:
    """A region of the card's memory with a guard on both sides, and what should be there."""

    def __init__(self, backend: BarBackend, seed: int) -> None:
        print(f"seed {seed}")
        self.backend = backend
        self.random = np.random.default_rng(seed)
        self.first = BASE - PAGE
        self.bytes = self.random.integers(0, 256, REGION + 2 * PAGE, dtype=np.uint8)
        backend.write_memory(self.first, self.bytes)

    def write(self, address: int, nbytes: int) -> None:
        data = self.random.integers(0, 256, nbytes, dtype=np.uint8)
        at = address - self.first
        self.bytes[at : at + nbytes] = data
        self.backend.write_memory(address, data)

    def check(self, address: int, nbytes: int) -> None:
        out = np.full(nbytes + 2, 0xA5, np.uint8)
        self.backend.read_memory(address, out[1:-1])
        at = address - self.first
        np.testing.assert_array_equal(out[1:-1], self.bytes[at : at + nbytes])
        assert (out[0], out[-1]) == (0xA5, 0xA5)

    def check_all(self) -> int:
        self.check(self.first, self.bytes.size)
        return self.bytes.size


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(0x40, 1), (0x40, 2), (0x40, 3), (0x40, 5), (0x40, 12), (0x40, 16), (0x40, 0),
     (0x41, 4), (0x42, 4), (0x43, 4), (0x44, 8), (0x42, 8)],
)  # fmt: skip
def test_a_register_access_of_another_size_or_alignment_is_refused(card, address, nbytes):
    kernel = card.regs.updater0
    kernel.count.value = 7
    place = kernel.count.address + address - 0x40
    before = card.backend.traffic
    shown = BarTraffic(**vars(before))
    with pytest.raises(RegisterAccessError, match=r"must be of 4 or 8 bytes, aligned, not") as read:
        card.backend.read_bar0(place, nbytes)
    with pytest.raises(RegisterAccessError):
        card.backend.write_bar0(place, ~0, nbytes)
    assert (read.value.address, read.value.nbytes) == (place, nbytes)
    assert card.backend.traffic == shown
    assert kernel.count.value == 7


def test_an_access_of_8_bytes_is_two_of_4_the_low_first(card):
    at = card.regs.updater0.count.address
    shown = BarTraffic(**vars(card.backend.traffic))
    card.backend.write_bar0(at, 0x0000_0003_8000_0001, 8)
    assert card.backend.read_bar0(at, 8) == 0x0000_0003_8000_0001
    assert [card.backend.read_bar0(at + 4 * i) for i in (0, 1)] == [0x8000_0001, 3]
    seen = card.backend.traffic
    assert seen.write_tlps - shown.write_tlps == 2
    assert (seen.read_tlps - shown.read_tlps, seen.completion_bytes - shown.completion_bytes) == (
        4,
        16,
    )
    with pytest.raises(BusError):  # of two words one is not there
        card.backend.read_bar0(0xFF8, 8)


def test_a_fill_is_counted_as_its_writes(card):
    buffer = card.alloc((2 << 20) // 4, np.float32)
    assert buffer.address % (1 << 20)
    before = card.backend.traffic.write_tlps
    buffer.fill(1.0)
    assert card.backend.traffic.write_tlps - before == 8194


def test_an_end_of_a_run_is_a_message_or_pending():
    with nearstep.open(URLS["golden"]) as card:
        job = Job(card, 64, seed=3)
        job.upload()
        sent = []
        for masked, runs in ((False, 3), (True, 2), (False, 0), (False, 1)):
            card.backend.allow_messages(enabled=True, masked=masked)
            for _ in range(runs):
                job.start().wait()
            sent.append(card.backend.messages)
        job.start().wait()
        card.backend.allow_messages(enabled=True, masked=True)
        assert [*sent, card.backend.messages] == [3, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(2**40 + 7, 4), (-1, 4), (1 << 32, 4), (1 << 64, 8), (-1, 8), ("7", 4), (7.0, 4), (None, 8)],
)
def test_a_value_that_registers_cannot_hold_is_refused(card, value, nbytes):
    at = card.regs.updater0.count.address
    card.backend.write_bar0(at, 5, 8)
    shown = BarTraffic(**vars(card.backend.traffic))
    with pytest.raises(FieldValueError, match=rf"^{nbytes} bytes of registers at .* must be"):
        card.backend.write_bar0(at, value, nbytes)
    assert card.backend.traffic == shown
    assert card.backend.read_bar0(at, 8) == 5


def test_an_access_builds_no_register_map(monkeypatch):
    with nearstep.open(URLS["golden"]) as card:

        def build(kernel):
            pytest.fail("a register map was built")

        monkeypatch.setattr("nearstep_spec.smartssd.config.adam_kernel_map", build)
        card.backend.write_bar0(card.regs.updater0.count.address, 5)
        assert card.regs.updater0.count.value == 5


def test_accesses_outside_the_bars_are_refused(card):
    backend = card.backend
    for access in (
        lambda: backend.read_bar0(4096),
        lambda: backend.write_bar0(4096, 0),
        lambda: backend.read_register(-4),
        lambda: backend.read_memory(card.capacity_bytes - 3, np.zeros(4, np.uint8)),
        lambda: backend.write_memory(card.capacity_bytes, np.zeros(1, np.uint8)),
        lambda: backend.write_memory(-1, np.zeros(1, np.uint8)),
    ):
        with pytest.raises(OutOfBoundsError):
            access()


def test_writes_of_every_small_size_and_alignment_change_their_bytes_only(card):
    mirror = Mirror(card.backend, seed=1)
    cases = 0
    for start in range(BASE + PAGE - 36, BASE + PAGE + 6):
        for nbytes in (*range(18), 31, 32, 33, 63, 64, 65, 67):
            mirror.write(start, nbytes)
            cases += 1
        mirror.check(start - 70, 300)
    assert cases == 42 * 25
    assert mirror.check_all() == REGION + 2 * PAGE


def test_reads_of_every_small_size_and_alignment_across_a_page(card):
    mirror = Mirror(card.backend, seed=2)
    cases = 0
    for start in range(BASE + PAGE - 36, BASE + PAGE + 6):
        for nbytes in (*range(18), 31, 32, 33, 63, 64, 65, 67):
            mirror.check(start, nbytes)
            cases += 1
    assert cases == 42 * 25


def test_long_writes_and_reads_at_any_place(card):
    seed = 3
    mirror, rng = Mirror(card.backend, seed), random.Random(seed)
    for _ in range(60):
        nbytes = rng.choice((255, 256, 257, 511, 512, 513, 1000, 4096, 5001))
        mirror.write(BASE + rng.randrange(REGION - nbytes), nbytes)
        mirror.check(BASE + rng.randrange(REGION - nbytes), nbytes)
    assert mirror.check_all() == REGION + 2 * PAGE


def split(address: int, nbytes: int, unit: int) -> list[range]:
    """A range byte by byte: a new part begins at each multiple of `unit`."""
    parts: list[range] = []
    for byte in range(address, address + nbytes):
        if not parts or byte % unit == 0:
            parts.append(range(byte, byte + 1))
        else:
            parts[-1] = range(parts[-1].start, byte + 1)
    return parts


def test_traffic_is_counted_as_packets_and_words(card):
    seed = 4
    print(f"seed {seed}")
    rng, backend = random.Random(seed), card.backend
    backend.write_memory(BASE, np.zeros(REGION, np.uint8))
    wanted = BarTraffic(**vars(backend.traffic))
    for _ in range(200):
        nbytes = rng.choice((1, 2, 3, 4, 5, 63, 64, 255, 256, 257, 600, 1030))
        address = BASE + rng.randrange(REGION - nbytes)
        backend.write_memory(address, np.zeros(nbytes, np.uint8))
        parts = split(address, nbytes, 256)
        wanted.write_tlps += len(parts)
        wanted.write_bytes += sum(4 * len({byte // 4 for byte in part}) for part in parts)
        backend.read_memory(address, np.zeros(nbytes, np.uint8))
        for part in split(address, nbytes, 512):
            completions = split(part.start, len(part), 256)
            wanted.read_tlps += 1
            wanted.completion_tlps += len(completions)
            wanted.completion_bytes += sum(4 * len({b // 4 for b in each}) for each in completions)
    assert wanted.write_tlps > 200
    assert backend.traffic == wanted


@pytest.mark.parametrize("name", SIMS)
def test_a_posted_write_takes_its_time_and_nothing_passes_it(name):
    with nearstep.open(f"{URLS[name]}&latency=300") as card:
        backend = card.backend
        for access in (
            lambda: backend.flush(),
            lambda: backend.read_register(0),
            lambda: backend.write_register(card.regs.updater0.count.address, 1),
            lambda: backend.wait([card.regs.updater0.status.poll(busy=0)], 10_000),
        ):
            begin = card.cycles
            backend.write_memory(BASE, np.full(4, 9, np.uint8))
            assert card.cycles - begin < 100
            access()
            assert card.cycles - begin >= 300
        data = np.arange(64, dtype=np.uint8)
        backend.write_memory(BASE, data)
        found = np.zeros(64, np.uint8)
        backend.read_memory(BASE, found)
        np.testing.assert_array_equal(found, data)


def test_one_subgroup_is_moved_while_the_other_is_updated(card):
    """What double buffering is for: both give the right bits, in every order of the beats."""
    works = [Job(card, 2000, seed) for seed in (1, 2)]
    checked = overlapped = 0
    for turn in range(6):
        current, other = works[turn % 2], works[1 - turn % 2]
        run = current.start()
        if turn:
            checked += other.check()  # reads, while the run goes on
        other.before = other.numbers()
        other.upload()
        overlapped += not run.ended
        run.wait()
        if turn == 5:
            checked += current.check()
    assert checked == 6 * 3 * 2000
    if card.cycles is None:
        assert overlapped > 0
    assert card.regs.updater0.status.done


@pytest.mark.parametrize("name", SIMS)
def test_the_run_goes_on_while_the_host_moves_data(name):
    with nearstep.open(URLS[name]) as card:
        work, other = Job(card, 8000, 1), card.alloc(1000)
        run = work.start()
        values = np.arange(1000, dtype=np.float32)
        other.write(values)
        np.testing.assert_array_equal(other.read(), values)
        assert not run.ended
        run.wait()
        assert work.check() == 24_000
        np.testing.assert_array_equal(other.read(), values)


@pytest.mark.parametrize("kind", ["slverr", "decerr"])
def test_a_posted_write_that_fails_shows_at_the_next_access(card, kind):
    mirror, backend = Mirror(card.backend, seed=6), card.backend
    at = BASE + 512
    accesses = (
        lambda: backend.flush(),
        lambda: backend.read_register(0),
        lambda: backend.write_register(card.regs.updater0.count.address, 1),
        lambda: backend.read_memory(BASE, np.zeros(4, np.uint8)),
        lambda: backend.wait([card.regs.updater0.status.poll(busy=0)], 1000),
    )
    for access in accesses:
        injection = Injection(kind=kind, write=True, host=True, base=at, limit=at + 256)
        backend.inject(injection)
        backend.write_memory(BASE, np.full(1024, 3, np.uint8))  # four packets, the third fails
        with pytest.raises(PostedWriteError) as caught:
            access()
        assert (caught.value.address, caught.value.status) == (at, kind.upper())
        assert caught.value.transactions
        kept = mirror.bytes[PAGE:][:1024].copy()
        mirror.bytes[PAGE:][:1024] = 3
        mirror.bytes[PAGE:][512:768] = kept[512:768]
        access()  # told once
        assert mirror.check_all() == REGION + 2 * PAGE
    assert card.regs.updater0.count.value == 1
    backend.heal()


@pytest.mark.parametrize("kind", ["slverr", "decerr"])
def test_a_read_that_fails_is_not_completed(card, kind):
    mirror, backend = Mirror(card.backend, seed=7), card.backend
    at = BASE + 512
    backend.inject(Injection(kind=kind, write=False, host=True, base=at, limit=at + 1))
    before = BarTraffic(**vars(backend.traffic))
    out = np.full(1536, 0x77, np.uint8)
    with pytest.raises(CompletionError) as caught:
        backend.read_memory(BASE, out)
    shipped = isinstance(backend, PcieCardBackend)
    status = "COMPLETER ABORT" if shipped else kind.upper()  # which memory's answer is not told
    assert (caught.value.address, caught.value.status) == (at, status)
    np.testing.assert_array_equal(out[:512], mirror.bytes[PAGE:][:512])
    assert (out[512:1024] == 0x77).all()
    assert backend.traffic.completion_bytes - before.completion_bytes == 1024
    assert mirror.check_all() == REGION + 2 * PAGE


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_memory_that_never_answers_ends_in_a_timeout_and_a_reset_helps(card, write):
    mirror, backend = Mirror(card.backend, seed=8), card.backend
    backend.flush()
    backend.inject(Injection(kind="never", write=write, host=True))
    if write:
        backend.write_memory(BASE, mirror.bytes[PAGE:][:64].copy())
        with pytest.raises(PostedWriteError, match="not timeout"):
            backend.flush()
    else:
        with pytest.raises(CompletionError, match="not timeout"):
            backend.read_memory(BASE, np.zeros(64, np.uint8))
    backend.heal()
    card.reset()
    assert mirror.check_all() == REGION + 2 * PAGE
    work = Job(card, 300, 1)
    work.start().wait()
    assert work.check() == 900


def test_faults_of_the_memory_hit_who_they_are_for(card):
    """Those for the host leave a run alone, and the other way round."""
    work = Job(card, 1000, 3)
    backend = card.backend
    backend.flush()
    backend.inject(Injection(kind="slverr", write=False, host=True, times=1000))
    work.start().wait()
    backend.heal()
    assert work.check() == 3000
    backend.inject(Injection(kind="slverr", write=False, times=1000))
    work.upload()
    np.testing.assert_array_equal(work.buffers["g"].read(), work.before["g"])
    with pytest.raises(nearstep.errors.BusResponseError):
        work.start().wait()


def test_a_reset_loses_no_posted_write(card):
    mirror = Mirror(card.backend, seed=9)
    mirror.write(BASE + 100, 3000)
    card.reset()
    assert mirror.check_all() == REGION + 2 * PAGE
    assert card.regs.updater0.status.busy == 0


def test_a_kernel_without_bar_knows_no_faults_towards_the_host():
    with (
        nearstep.open("golden:axdimm?engine=numpy&memory_bytes=64KiB") as device,
        pytest.raises(ArgumentError, match="host must be False"),
    ):
        device.backend.inject(Injection(kind="slverr", write=True, host=True))


def test_the_checker_of_the_bar_fires():
    """Packets of a link with larger pages would cross one of AXI."""
    options = from_text(VerilatedCardOptions, dict(parse_qsl(OPTIONS)))
    for access, channel in ((CardBackend.write_memory, "AW"), (CardBackend.read_memory, "AR")):
        backend = CardBackend(options, max_payload=2 * PAGE, max_read_request=2 * PAGE)
        with pytest.raises(ProtocolError, match="do not cross 4 KiB") as caught:
            access(backend, PAGE - 32, np.zeros(64, np.uint8))
        assert caught.value.channel == channel
        backend.reset()
        backend.write_memory(0, np.zeros(64, np.uint8))
        backend.flush()
        backend.close()


def test_a_kind_of_card_that_overrides_what_others_call_sees_every_access():
    seen: list[str] = []

    class Watched(GoldenCard):
        def check_register(self, address: int, nbytes: int = 4) -> None:
            seen.append("check")
            super().check_register(address, nbytes)

        def flush(self) -> None:
            seen.append("flush")
            super().flush()

    with nearstep.open(URLS["golden"]) as opened:
        count = opened.regs.updater0.count.address
    card = Watched(from_text(GoldenCardOptions, dict(parse_qsl(OPTIONS))))
    card.write_memory(0, np.zeros(64, np.uint8))
    assert seen == []
    card.read_register(count)
    assert seen == ["check", "flush"]
    card.write_register(count, 1)
    assert seen == 2 * ["check", "flush"]
    card.read_memory(0, np.empty(64, np.uint8))
    assert seen == [*2 * ["check", "flush"], "flush"]
    card.close()


@pytest.mark.parametrize("extra", ["", "&memory=ideal&stall=0.4"], ids=["halfduplex", "stalled"])
def test_native_units_give_the_bits_and_the_cycles_of_rtl(extra):
    found = []
    for fu in ("rtl", "native"):
        with nearstep.open(f"{URLS['sim']}{extra}&fu={fu}") as card:
            work = Job(card, 5003, 4)
            run = work.start().wait()
            assert work.check() == 3 * 5003
            found.append((run.cycles, card.cycles, card.backend.traffic))
            counters = card.backend.memory_counters
            assert counters["read_beats"] >= run.counters["read_beats"]
    assert found[0] == found[1]
