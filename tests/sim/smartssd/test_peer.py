"""The drive's side of `golden:smartssd` and `sim:smartssd`: a peer that needs no host's link."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.backends.peer import PeerTraffic
from nearstep.errors import (
    ArgumentError,
    BusyError,
    ClosedDeviceError,
    CompletionError,
    MemoryBarError,
    MismatchError,
    OutOfBoundsError,
    PeerReadError,
    PeerWriteError,
    PostedWriteError,
    ShapeError,
    UninitialisedError,
)
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.smartssd.bar import BarBackend, BarTraffic
from nearstep_sim.smartssd.pcie_card import PcieCardBackend

from ...host.driver.job import Job
from .test_card import BASE, PAGE, REGION, SIMS, URLS, split


@pytest.fixture(
    params=["golden", *SIMS],
)
def card(request: pytest.FixtureRequest) -> Iterator[SmartssdDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        assert isinstance(opened, SmartssdDevice)
        yield opened


def patterned(backend: BarBackend, rng: np.random.Generator) -> np.ndarray:
    """Random bytes of the region, in memory, too."""
    data = rng.integers(0, 256, REGION, dtype=np.uint8)
    backend.write_memory(BASE, data)
    return data


def test_bytes_of_every_size_and_place_arrive(card):
    seed = 21
    print(f"seed {seed}")
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    backend, checked = card.backend, 0
    there = patterned(backend, rng)
    for _ in range(60):
        nbytes = choose.choice((1, 2, 3, 5, 63, 64, 65, 255, 256, 257, 512, 513, 1000, 4096))
        at, back = (choose.randrange(REGION - nbytes) for _ in range(2))
        data = rng.integers(0, 256, nbytes, dtype=np.uint8)
        backend.submit_peer_write(BASE + at, data).wait()
        there[at : at + nbytes] = data
        out = np.full(nbytes + 2, 0xA5, np.uint8)
        backend.submit_peer_read(BASE + back, out[1:-1]).wait()
        np.testing.assert_array_equal(out[1:-1], there[back : back + nbytes])
        assert (out[0], out[-1]) == (0xA5, 0xA5)
        checked += nbytes
    found = np.zeros(REGION, np.uint8)
    backend.read_memory(BASE, found)
    np.testing.assert_array_equal(found, there)
    assert checked > 20_000


def test_traffic_is_the_drives_and_the_hosts_link_sees_nothing(card):
    seed = 22
    print(f"seed {seed}")
    rng, backend = random.Random(seed), card.backend
    backend.write_memory(BASE, np.zeros(REGION, np.uint8))
    backend.flush()
    host, wanted = BarTraffic(**vars(backend.traffic)), PeerTraffic()
    for _ in range(60):
        nbytes = rng.choice((0, 1, 3, 4, 5, 64, 255, 256, 257, 600, 1030))
        address = BASE + rng.randrange(REGION - nbytes)
        backend.submit_peer_write(address, np.zeros(nbytes, np.uint8)).wait()
        parts = split(address, nbytes, 256)
        wanted.write_tlps += len(parts)
        wanted.write_bytes += sum(4 * len({byte // 4 for byte in part}) for part in parts)
        backend.submit_peer_read(address, np.zeros(nbytes, np.uint8)).wait()
        for part in split(address, nbytes, 512):
            completions = split(part.start, len(part), 256)
            wanted.read_tlps += 1
            wanted.completion_tlps += len(completions)
            wanted.completion_bytes += sum(4 * len({b // 4 for b in each}) for each in completions)
    assert wanted.write_tlps > 60
    assert backend.peer_traffic == wanted
    assert backend.traffic == host


def test_the_hosts_engine_moves_what_its_processor_does(card):
    """The same bytes and packets; an error is the host's, not the drive's."""
    seed = 24
    print(f"seed {seed}")
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    buffer = card.alloc(3000)
    backend, moved = card.backend, 0
    for _ in range(20):
        start = choose.randrange(2000)
        part = buffer[start : start + choose.randrange(1, 1000)]
        data = rng.standard_normal(part.size).astype(np.float32)
        spent = []
        for write in (part.submit_dma_write, part.write):
            before = BarTraffic(**vars(backend.traffic))
            done = write(data)
            if done is not None:
                done.wait()
            after = backend.traffic
            spent.append([getattr(after, n) - was for n, was in vars(before).items()])
        assert spent[0][:2] == spent[1][:2]
        assert spent[0][1] == part.nbytes
        out = np.zeros(part.size, np.float32)
        part.submit_dma_read(out).wait()
        assert out.tobytes() == data.tobytes()
        moved += part.size
    assert moved > 5000
    assert backend.peer_traffic == PeerTraffic()
    with pytest.raises(ShapeError):
        buffer.submit_dma_write(np.zeros(5, np.float32))


@pytest.mark.parametrize("write", [True, False])
def test_the_hosts_engine_says_what_memory_refused(write):
    with nearstep.open(URLS["sim"]) as card:
        buffer = card.alloc(1000)
        buffer.write(np.ones(1000, np.float32))
        card.backend.flush()
        card.backend.inject(Injection(kind="slverr", write=write, host=True, times=1))
        data = np.zeros(1000, np.float32)
        failing = buffer.submit_dma_write(data) if write else buffer.submit_dma_read(data)
        with pytest.raises(PostedWriteError if write else CompletionError) as caught:
            failing.wait()
        assert (caught.value.address, caught.value.status) == (buffer.address, "SLVERR")
        assert buffer.read().size == 1000  # the next one is answered


@pytest.mark.parametrize("kind", ["slverr", "decerr"])
def test_a_transfer_with_a_request_that_fails_says_which(card, kind):
    backend, rng = card.backend, np.random.default_rng(23)
    there = patterned(backend, rng)
    at = BASE + 512
    backend.inject(Injection(kind=kind, write=True, peer=True, base=at, limit=at + 256))
    backend.inject(Injection(kind=kind, write=False, peer=True, base=at, limit=at + 256))
    own = np.full(1024, 9, np.uint8)
    backend.write_memory(BASE, there[:1024])  # those of the host are not hit
    backend.read_memory(BASE, own)
    np.testing.assert_array_equal(own, there[:1024])

    failed = backend.submit_peer_write(BASE, np.full(1024, 3, np.uint8))
    with pytest.raises(PeerWriteError, match="drive's write to memory") as caught:
        failed.wait()
    assert (failed.ended, failed.done, failed.error) == (True, False, caught.value)
    assert (caught.value.address, caught.value.status) == (at, kind.upper())
    assert caught.value.transactions
    there[:512] = there[768:1024] = 3

    out = np.full(1536, 0x77, np.uint8)
    with pytest.raises(PeerReadError, match="drive's read of memory") as read:
        backend.submit_peer_read(BASE, out).wait()
    shipped = isinstance(backend, PcieCardBackend)
    status = "COMPLETER ABORT" if shipped else kind.upper()
    assert (read.value.address, read.value.status) == (at, status)
    np.testing.assert_array_equal(out[:512], there[:512])
    assert (out[512:1024] == 0x77).all()
    np.testing.assert_array_equal(out[1024:], there[1024:1536])

    backend.flush()  # the host hears nothing of it
    after = np.zeros(REGION, np.uint8)
    backend.submit_peer_read(BASE, after).wait()  # once each
    np.testing.assert_array_equal(after, there)


def test_faults_for_a_drive_hit_neither_host_nor_kernel(card):
    work, backend = Job(card, 1000, 3), card.backend
    for write in (False, True):
        backend.inject(Injection(kind="slverr", write=write, peer=True, times=1000))
    work.start().wait()
    assert work.check() == 3000
    backend.flush()
    for transfer in (
        backend.submit_peer_write(BASE, np.zeros(64, np.uint8)),
        backend.submit_peer_read(BASE, np.zeros(64, np.uint8)),
    ):
        with pytest.raises(MemoryBarError):
            transfer.wait()
    backend.heal()
    backend.submit_peer_write(BASE, np.zeros(64, np.uint8)).wait()


def test_an_injection_hits_the_host_or_the_drive():
    with pytest.raises(ArgumentError, match="hits one of them"):
        Injection(kind="slverr", write=True, host=True, peer=True)
    with (
        nearstep.open("golden:axdimm?engine=numpy&memory_bytes=64KiB") as device,
        pytest.raises(ArgumentError, match="peer must be False"),
    ):
        device.backend.inject(Injection(kind="slverr", write=True, peer=True))


def test_ranges_outside_the_memory_are_refused(card):
    backend, end = card.backend, card.capacity_bytes
    some = np.zeros(64, np.uint8)
    for access in (
        lambda: backend.submit_peer_write(end - 63, some),
        lambda: backend.submit_peer_read(end - 63, some),
        lambda: backend.submit_peer_write(-1, some),
        lambda: backend.submit_peer_read(-1, some),
    ):
        with pytest.raises(OutOfBoundsError):
            access()
    assert backend.peer_traffic == PeerTraffic()


def test_a_buffer_is_filled_by_the_drive_and_read_by_it(card):
    buffer = card.alloc(1000)
    values = np.random.default_rng(24).standard_normal(1000).astype(np.float32)
    host = BarTraffic(**vars(card.backend.traffic))
    buffer.submit_peer_write(values).wait()
    out = np.zeros(1000, np.float32)
    buffer.submit_peer_read(out).wait()
    assert out.tobytes() == values.tobytes()
    assert card.backend.traffic == host
    assert buffer.read().tobytes() == values.tobytes()


def test_an_array_of_a_run_is_not_the_drives(card):
    work = Job(card, 4000, 5)
    run = work.start()
    out = np.zeros(4000, np.float32)
    for access in (
        lambda: work.buffers["p"].submit_peer_read(out),
        lambda: work.buffers["g"].submit_peer_write(out),
    ):
        with pytest.raises(BusyError, match="4000 elements"):
            access()
    work.buffers["g"].submit_peer_read(out).wait()  # which the run reads alone
    assert out.tobytes() == work.before["g"].tobytes()
    run.wait()
    assert work.check() == 12_000


def test_a_device_without_a_drive_says_so():
    with nearstep.open("golden:axdimm?engine=numpy&memory_bytes=64KiB") as device:
        buffer = device.alloc(16)
        for access in (buffer.submit_peer_write, buffer.submit_peer_read):
            with pytest.raises(MismatchError, match="one with a drive beside its memory"):
                access(np.zeros(16, np.float32))


def test_a_kernel_works_on_what_the_drive_brought_and_nobody_else_wrote(card):
    """Lines that the drive has written count as written, those beside them not."""
    work = Job(card, 1000, 6)
    for name in work.buffers:
        work.buffers[name].free()
        work.buffers[name] = card.alloc(1000)
        if name != "g":
            work.buffers[name].submit_peer_write(work.before[name]).wait()
    short = work.buffers["g"][:900]
    short.submit_peer_write(work.before["g"][:900]).wait()
    with pytest.raises(UninitialisedError):
        work.start().wait()
    card.reset()
    for name, buffer in work.buffers.items():
        buffer.submit_peer_write(work.before[name]).wait()
    work.start().wait()
    assert work.check() == 3000


class TestWindow:
    """Memory of a card without a clock, as the drive sees it in the same process."""

    @pytest.fixture
    def card(self) -> Iterator[SmartssdDevice]:
        with nearstep.open(URLS["golden"]) as opened:
            yield opened

    def test_it_is_the_memory_itself_and_counts_like_a_transfer(self, card):
        rng, backend = np.random.default_rng(25), card.backend
        there = patterned(backend, rng)
        for at, nbytes in ((0, PAGE), (5, 300), (250, 1), (77, 0), (511, 1027)):
            expected = PeerTraffic(**vars(backend.peer_traffic))
            data = rng.integers(0, 256, nbytes, dtype=np.uint8)
            backend.submit_peer_write(BASE + at, there[at : at + nbytes].copy())
            backend.submit_peer_read(BASE + at, np.zeros(nbytes, np.uint8))
            submitted = backend.peer_traffic
            window = backend.peer_window(BASE + at, nbytes)
            np.testing.assert_array_equal(window, there[at : at + nbytes])
            backend.end_peer_read(BASE + at, nbytes)
            window[:] = there[at : at + nbytes] = data
            backend.end_peer_write(BASE + at, nbytes)
            for name, value in vars(backend.peer_traffic).items():
                assert value - getattr(submitted, name) == getattr(submitted, name) - getattr(
                    expected, name
                )
        found = np.zeros(REGION, np.uint8)
        backend.read_memory(BASE, found)
        np.testing.assert_array_equal(found, there)

    def test_its_pages_are_those_of_the_addresses(self, card):
        for at in (0, PAGE, BASE + PAGE):
            window = card.backend.peer_window(at, 100)
            assert window.ctypes.data % PAGE == 0
            assert not window.flags.owndata

    def test_what_is_written_counts_as_written_and_the_rest_of_a_line_is_poisoned(self, card):
        backend = card.backend
        other = card.alloc(1 << 12)  # lines in which nobody has written
        start = other.address + 100
        window = backend.peer_window(start, 200)
        window[:] = 7
        backend.end_peer_write(start, 200)
        by_window = np.zeros(384, np.uint8)
        backend.read_memory(other.address + 64, by_window)
        assert (by_window[36:236] == 7).all()
        assert by_window[:36].tobytes() == (b"\xff\xad\xde\xff" * 9)
        assert by_window[236:256].tobytes() == (b"\xff\xad\xde\xff" * 5)
        assert not by_window[256:].any()
        backend.submit_peer_write(start + 1024, np.full(200, 7, np.uint8))
        by_port = np.zeros(384, np.uint8)
        backend.read_memory(other.address + 64 + 1024, by_port)
        assert by_port.tobytes() == by_window.tobytes()

    def test_zeros_after_it_are_written_where_it_left_something(self, card):
        buffer = card.alloc(1024)
        window = card.backend.peer_window(buffer.address, buffer.nbytes)
        window[:] = 9
        buffer.fill(0.0)  # before anybody said that it was written
        assert not buffer.read().any()

    def test_what_is_lent_is_in_it(self, card):
        buffer = card.alloc(1000)
        values = np.arange(1000, dtype=np.float32)
        assert buffer.lend(values)
        window = card.backend.peer_window(buffer.address, buffer.nbytes)
        assert window.view(np.float32).tobytes() == values.tobytes()

    def test_there_is_none_where_a_request_could_fail(self, card):
        card.backend.inject(Injection(kind="slverr", write=True, peer=True))
        assert card.backend.peer_window(BASE, 64) is None
        card.backend.heal()
        assert card.backend.peer_window(BASE, 64) is not None
        with pytest.raises(OutOfBoundsError):
            card.backend.peer_window(card.capacity_bytes, 1)

    def test_a_closed_card_has_none(self, card):
        backend = card.backend
        card.close()
        for access in (
            lambda: backend.peer_window(BASE, 64),
            lambda: backend.submit_peer_read(BASE, np.zeros(64, np.uint8)),
        ):
            with pytest.raises(ClosedDeviceError):
                access()


def test_cards_have_drives_of_their_own():
    with nearstep.open(f"{URLS['golden']}&cards=3") as device:
        backend = device.backend
        span = backend.regions[1][0]
        data = [np.full(100 * n, n, np.uint8) for n in (1, 2, 3)]
        for number, each in enumerate(data):
            assert backend.submit_peer_write(number * span + 8, each).done
        window = backend.peer_window(2 * span + 8, 300)
        assert window.tobytes() == data[2].tobytes()
        backend.end_peer_read(2 * span + 8, 300)
        assert [card.peer_traffic.write_bytes for card in backend.cards] == [100, 200, 300]
        assert backend.peer_traffic.write_bytes == 600
        assert backend.peer_traffic.completion_bytes == 300
        at = span + 8
        backend.inject(Injection(kind="decerr", write=True, peer=True, base=at, limit=at + 1))
        failed = backend.submit_peer_write(at, data[1])
        with pytest.raises(PeerWriteError) as caught:
            failed.wait()
        assert caught.value.__notes__ == ["card 1 of 3"]
