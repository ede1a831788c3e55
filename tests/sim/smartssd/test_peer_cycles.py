"""The drive's side of `sim:smartssd` in time: beside the kernel and the host, at a rate, and what
becomes of transfers that do not end."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import nearstep
from nearstep.backends.base import Completion
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    ArgumentError,
    BusyError,
    ClosedDeviceError,
    DeviceError,
    OptionError,
    PeerReadError,
    PeerWriteError,
    WaitTimeoutError,
)
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.smartssd.bar import BarTraffic

from ...host.driver.job import Job
from ..verilate.test_simulation import interrupted
from .test_card import SIMS, URLS

BASE = 2 << 20
"""Beyond what is allocated."""
HZ = 200_000_000
PIPELINE = 100
"""Cycles from a request to its answer, where nothing else is under way: more than it takes."""
BOTH = {"drive_read_bytes_per_s": 2 * HZ, "drive_write_bytes_per_s": 2 * HZ}
"""An eighth of what the port moves, each."""
REQUEST = {"write": 256, "read": 512}
"""Bytes of one request, by the direction that the card sees."""
Bytes = np.ndarray


def opened(name: str = "sim", **options: object) -> SmartssdDevice:
    device = nearstep.open(URLS[name] + "".join(f"&{n}={v}" for n, v in options.items()))
    assert isinstance(device, SmartssdDevice)
    return device


def some(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def submit(card: SmartssdDevice, kind: str, address: int, data: Bytes) -> Completion:
    return getattr(card.backend, f"submit_peer_{kind}")(address, data)


def memory(card: SmartssdDevice, address: int, nbytes: int) -> Bytes:
    out = np.zeros(nbytes, np.uint8)
    card.backend.read_memory(address, out)
    return out


@pytest.mark.parametrize("name", SIMS)
def test_a_subgroup_comes_and_goes_while_the_other_is_updated(name):
    """Kernel, reads and writes of a full-duplex drive overlap; each has its bits."""
    alone: dict[str, int] = {}
    with opened(name, **BOTH, drive_duplex="full") as card:
        work = Job(card, 8000, 1)
        alone["kernel"] = work.start().wait().cycles
        coming, going = card.alloc(4000), card.alloc(4000)
        work.check()
        values, left = (some(16_000, seed).view(np.float32) for seed in (2, 3))
        going.write(left)
        card.backend.flush()
        out = np.zeros(4000, np.float32)
        alone["coming"] = coming.submit_peer_write(values).wait().cycles
        alone["going"] = going.submit_peer_read(out).wait().cycles
        coming.fill(0.0)
        out[:] = 0
        card.backend.flush()

        host = BarTraffic(**vars(card.backend.traffic))
        begun = card.cycles
        run = work.start()
        transfers = [coming.submit_peer_write(values), going.submit_peer_read(out)]
        assert card.backend.traffic.write_tlps - host.write_tlps > 0  # registers of the run
        for access in (coming.read, lambda: going.fill(0.0), coming.free):
            with pytest.raises(BusyError, match="a transfer"):
                access()
        for transfer in transfers:
            transfer.wait()
        assert not run.ended
        run.wait()
        took = card.cycles - begun
        assert work.check() == 24_000
        assert out.tobytes() == left.tobytes()
        assert coming.read().tobytes() == values.tobytes()
        assert all(transfer.done for transfer in transfers)
        assert max(alone.values()) <= took < sum(alone.values())


@pytest.mark.parametrize("duplex", ["half", "full"])
@pytest.mark.parametrize("name", SIMS)
def test_both_directions_go_on_at_once_and_each_in_its_order(name, duplex):
    """On a half-duplex drive they share its time: together they take as long as one after the
    other."""
    with opened(name, **BOTH, drive_duplex=duplex) as card:
        there = some(60_000, 4)
        card.backend.write_memory(BASE, there)
        card.backend.flush()
        alone = []
        for kind in ("write", "read"):
            begun = card.cycles
            submit(card, kind, BASE + 100_000, some(10_000, 5)).wait()
            alone.append(card.cycles - begun)
        begun = card.cycles
        data = [some(n, n) for n in (5000, 1, 300, 4699)]
        outs = [np.zeros(n, np.uint8) for n in (1, 6000, 3999)]
        starts = np.cumsum([0, *map(len, data)])
        writes = [
            submit(card, "write", BASE + 120_000 + at, each)
            for at, each in zip(starts, data, strict=False)
        ]
        reads = [submit(card, "read", BASE + 7 * len(out), out) for out in outs]
        seen: list[list[Completion]] = [[], []]
        while not all(each.ended for each in (*writes, *reads)):
            card.backend.advance(1 << 20)  # until something ends
            for order, transfers in zip(seen, (writes, reads), strict=True):
                ended = [each for each in transfers if each.ended]
                assert ended[: len(order)] == order == transfers[: len(order)]
                order[:] = ended
        took = card.cycles - begun
        assert (len(seen[0]), len(seen[1])) == (4, 3)
        if duplex == "full":
            assert took < 0.7 * sum(alone)
        else:
            assert 10_000 <= took < 10_000 + PIPELINE
        assert memory(card, BASE + 120_000, 10_000).tobytes() == np.concatenate(data).tobytes()
        for out in outs:
            at = 7 * len(out)
            assert out.tobytes() == there[at : at + len(out)].tobytes()


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize(
    ("rate", "hz", "latency"),
    [(4 * HZ, HZ, 0), (333_333_333, HZ, 1e-6), (3_200_000_000, 250_000_000, 5e-6), (1_000, 999, 0)],
)
def test_a_drive_moves_bytes_at_its_rate(kind, rate, hz, latency):
    """From submission to end: its latency, bytes / rate, and what a last request takes."""
    which = {"write": "drive_read_bytes_per_s", "read": "drive_write_bytes_per_s"}[kind]
    options = {which: rate, "clock_hz": hz, "drive_latency_s": latency}
    request = REQUEST[kind]
    after = []
    with opened(**options) as card:
        submit(card, kind, BASE, np.zeros(1, np.uint8)).wait()  # turns the memory's port
        for count in (1, 2, 7, 64):
            cycles = submit(card, kind, BASE, np.zeros(count * request, np.uint8)).wait().cycles
            due = round(latency * hz) - (-count * request * hz // rate)
            after.append(cycles - due)
            card.backend.advance(1000)
        free = submit(card, "read" if kind == "write" else "write", BASE, np.zeros(512, np.uint8))
        assert free.wait().cycles < round(latency * hz) + PIPELINE
    assert all(0 < each < PIPELINE for each in after), after
    if rate / hz < 16:  # the port's beat: each request finds nobody before it
        assert len(set(after)) == 1, after


def test_transfers_of_a_queue_have_the_rate_and_share_the_latency():
    rate, total = 3 * HZ, 0
    with opened(drive_read_bytes_per_s=rate, drive_latency_s=2e-6) as card:
        transfers = []
        for number, nbytes in enumerate((100, 4096, 1, 777, 2000)):
            transfers.append(submit(card, "write", BASE + 5000 * number, some(nbytes, number)))
        for number, nbytes in enumerate((100, 4096, 1, 777, 2000)):
            total += nbytes
            least = 400 - (-total * HZ // rate)
            assert least < transfers[number].wait().cycles < least + PIPELINE
        idle = card.cycles
        card.backend.advance(10_000)  # a drive that does nothing saves nothing up
        assert card.cycles == idle + 10_000
        again = submit(card, "write", BASE, some(4096, 9)).wait().cycles
        assert again > 400 + 4096 * HZ / rate
        assert total == 6974


def test_a_drive_that_is_held_up_is_ahead_by_its_buffer_at_most():
    """One answer is 100,000 cycles late: the drive has 128 KiB then, and no more."""
    with opened(drive_read_bytes_per_s=2 * HZ) as card:
        late = Injection(kind="late", write=True, peer=True, nth=2, delay=100_000)
        card.backend.inject(late)
        cycles = submit(card, "write", BASE, some(1000 * 256, 1)).wait().cycles
        buffered = (128 << 10) // 256
        rest = 1000 - 3 - 32 - buffered  # before; posted; and what it has then at once
        assert abs(cycles - (3 * 128 + 100_000 + rest * 128)) < 3 * 128, cycles


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("drive_read_bytes_per_s", 0),
        ("drive_write_bytes_per_s", -1),
        ("drive_write_bytes_per_s", "1.5"),
        ("drive_latency_s", -1e-9),
        ("drive_latency_s", "nan"),
        ("clock_hz", 0),
    ],
)
def test_a_pace_that_no_drive_has_is_refused(option, value):
    with pytest.raises(OptionError, match=option):
        opened(**{option: value})


def test_a_card_without_a_clock_has_no_pace():
    with pytest.raises(OptionError, match="drive_latency_s"):
        nearstep.open(f"{URLS['golden']}&drive_latency_s=1e-6")


def test_a_drive_that_never_rests_leaves_the_port_to_the_host():
    took = []
    with opened() as card:
        for drive in (False, True):
            transfers = [submit(card, "read", BASE, np.zeros(200_000, np.uint8))] if drive else []
            card.backend.advance(500)
            begun = card.cycles
            memory(card, BASE, 8192)
            took.append(card.cycles - begun)
            assert not any(each.ended for each in transfers)
    assert took[1] < 2.2 * took[0]


def test_reads_of_the_host_wait_for_its_own_writes_alone():
    with opened(latency=200) as card:
        transfer = submit(card, "write", BASE + 65_536, some(100_000, 1))
        card.backend.advance(500)
        data = some(64, 2)
        card.backend.write_memory(BASE, data)
        assert memory(card, BASE, 64).tobytes() == data.tobytes()
        card.backend.flush()
        assert not transfer.ended
        assert transfer.wait().done


@pytest.mark.parametrize("kind", ["slverr", "decerr"])
def test_traffic_is_that_of_the_card_without_a_clock(kind):
    """Packets and errors of the same transfers, some of which fail."""
    seen = []
    for name in ("golden", "sim"):
        rng = np.random.default_rng(31)
        with opened(name) as card:
            card.backend.write_memory(BASE, some(20_000, 1))
            for write in (False, True):
                at = BASE + 5000
                card.backend.inject(
                    Injection(kind=kind, write=write, peer=True, base=at, limit=at + 700, times=9)
                )
            errors = []
            for number in range(60):
                nbytes, at = int(rng.integers(1, 3000)), int(rng.integers(0, 17_000))
                way = ("read", "write")[number % 2]
                transfer = submit(card, way, BASE + at, np.full(nbytes, number, np.uint8))
                try:
                    transfer.wait()
                except (PeerReadError, PeerWriteError) as error:
                    errors.append((number, type(error), error.address, error.status))
            seen.append((card.backend.peer_traffic, errors, memory(card, BASE, 20_000).tobytes()))
    assert seen[0] == seen[1]
    assert len(seen[0][1]) >= 4
    assert seen[0][0].write_tlps > 100


def test_an_error_is_that_of_its_transfer_alone():
    with opened() as card:
        at = BASE + 8192
        card.backend.inject(Injection(kind="slverr", write=True, peer=True, base=at, limit=at + 1))
        data = [some(4096, seed) for seed in range(4)]
        transfers = [submit(card, "write", BASE + 4096 * n, each) for n, each in enumerate(data)]
        out = np.zeros(4096, np.uint8)
        reading = submit(card, "read", BASE + 20_000, out)
        for number in (3, 0, 1):
            assert transfers[number].wait().done
        assert transfers[2].ended
        assert not transfers[2].done
        assert transfers[2].cycles is None
        with pytest.raises(PeerWriteError, match="SLVERR") as caught:
            transfers[2].wait()
        assert caught.value.address == at
        assert reading.wait().done
        card.backend.flush()
        data[2][:256] = memory(card, at, 256)
        assert memory(card, BASE, 4 * 4096).tobytes() == np.concatenate(data).tobytes()


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_request_that_is_never_answered_ends_its_transfer_in_a_timeout(kind):
    wrong = {"write": PeerWriteError, "read": PeerReadError}[kind]
    with opened(fu="native") as card:
        work = Job(card, 300, 1)
        card.backend.write_memory(BASE, some(8192, 1))
        card.backend.flush()
        card.backend.inject(Injection(kind="never", write=kind == "write", peer=True, nth=2))
        data = np.full(4096, 7, np.uint8)
        stuck = submit(card, kind, BASE, data)
        with pytest.raises(wrong, match="not timeout") as caught:
            stuck.wait()
        assert caught.value.address == BASE + 2 * REQUEST[kind]
        before = data.copy()
        card.backend.heal()
        card.reset()
        assert data.tobytes() == before.tobytes()
        work.start().wait()
        assert work.check() == 900
        submit(card, kind, BASE, data).wait()


@pytest.mark.parametrize("kind", ["write", "read"])
def test_an_answer_after_the_timeout_is_nobodys(kind):
    """The bytes are the caller's again; the next transfer is as if there had been none."""
    with opened(fu="native") as card:
        there = some(8192, 1)
        card.backend.write_memory(BASE, there)
        card.backend.flush()
        late = Injection(kind="late", write=kind == "write", peer=True, nth=2, delay=300_000)
        card.backend.inject(late)
        data = np.full(4096, 7, np.uint8)
        transfer = submit(card, kind, BASE, data)
        with pytest.raises((PeerWriteError, PeerReadError), match="not timeout"):
            transfer.wait()
        data[:] = 9
        card.backend.advance(100_000)  # in which the answers come
        assert (data == 9).all()
        again = some(4096, 2) if kind == "write" else np.zeros(4096, np.uint8)
        assert submit(card, kind, BASE + 4096, again).wait().cycles < 2000
        found = memory(card, BASE, 8192)
        assert again.tobytes() == found[4096:].tobytes()
        if kind == "read":
            assert found.tobytes() == there.tobytes()
        else:
            assert (found[: 2 * REQUEST[kind]] == 7).all()


def test_a_wait_that_is_too_short_lets_the_transfer_go_on():
    with opened() as card:
        data = some(4096, 1)
        transfer = submit(card, "write", BASE, data)
        begun = card.cycles
        with pytest.raises(WaitTimeoutError, match="drive's write of 4096 bytes") as caught:
            transfer.wait(50)
        assert caught.value.max_cycles == 50
        assert card.cycles == begun + 50
        with pytest.raises(ArgumentError, match="max_cycles"):
            transfer.wait(-1)
        assert transfer.wait(100_000).done
        assert memory(card, BASE, 4096).tobytes() == data.tobytes()


@pytest.mark.parametrize("name", SIMS)
@pytest.mark.parametrize("after", [0, 3, 47, 200, 1000])
def test_a_reset_gives_up_what_is_under_way_and_nothing_of_it_comes_late(name, after):
    size = 100_000
    with opened(name) as card:
        card.backend.write_memory(BASE, np.zeros(2 * size, np.uint8))
        card.backend.flush()
        work = Job(card, 2000, 1)
        out, data = np.full(size, 5, np.uint8), np.full(size, 6, np.uint8)
        work.start()  # first: behind PCIe, registers wait for the packets in front of them
        transfers = [
            submit(card, "write", BASE, data),
            submit(card, "read", BASE + size, out),
            submit(card, "write", BASE + size, data),
        ]
        card.backend.advance(after)
        card.reset()
        for transfer, what in zip(transfers, ("write", "read", "write"), strict=True):
            assert transfer.ended
            with pytest.raises(DeviceError, match=f"drive's {what} of {size} .* was given up"):
                transfer.wait()
        kept, there = out.copy(), memory(card, BASE, 2 * size)
        data[:] = 99
        work.upload()
        work.start().wait()
        assert work.check() == 6000
        again = some(3000, 7)
        submit(card, "write", BASE + 50, again).wait()
        there[50:3050] = again
        assert memory(card, BASE, 2 * size).tobytes() == there.tobytes()
        assert out.tobytes() == kept.tobytes()


def test_a_closed_card_moves_nothing_and_its_transfers_say_so():
    card = opened()
    transfer = submit(card, "read", BASE, np.zeros(4096, np.uint8))
    card.close()
    assert transfer.ended
    with pytest.raises(ClosedDeviceError, match="drive's read of 4096 bytes"):
        transfer.wait()


def test_what_interrupts_the_host_does_not_stop_the_drive():
    with opened() as card:
        data = some(300_000, 1)
        transfer = submit(card, "write", BASE, data)
        own = np.zeros(400_000, np.uint8)

        def write() -> None:
            card.backend.write_memory(BASE + 1_000_000, own)

        assert interrupted(card.backend, 2, write) == "card_write"
        own[:] = 1
        assert interrupted(card.backend, 1, transfer.wait) == "card_advance"
        assert transfer.wait().done
        assert memory(card, BASE, data.size).tobytes() == data.tobytes()
        card.backend.flush()
        assert not memory(card, BASE + 1_000_000, own.size)[:1000].any()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_advance_returns_when_a_transfer_ends():
    with opened() as card:
        transfer = submit(card, "write", BASE, some(1000, 1))
        begun = card.cycles
        card.backend.advance(1 << 20, [card.regs.updater0.status.poll(busy=1)])
        assert transfer.ended
        assert card.cycles - begun == transfer.cycles
        card.backend.advance(300)  # that it has ended before ends nothing
        assert card.cycles - begun == transfer.cycles + 300


def test_a_transfer_that_ends_with_a_slice_of_the_simulation_is_seen():
    """A wait gives Python the processor every 4096 cycles; the end ends it in each."""
    seen = set()
    with opened(fu="native", drive_read_bytes_per_s=2 * HZ) as card:
        data = some(10_000, 1)
        whole = [submit(card, "write", BASE, data).wait().cycles for _ in range(2)][-1]
        for early in range(whole - 4096 - 3, whole - 4096 + 4):
            transfer = submit(card, "write", BASE, data)
            card.backend.advance(early)
            begun = card.cycles
            card.backend.advance(20_000)
            assert transfer.ended
            seen.add(card.cycles - begun)
    assert seen == {4096 + at for at in range(-3, 4)}
