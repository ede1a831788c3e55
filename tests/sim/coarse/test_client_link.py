"""The links of clients to a simulated pool: their rate, their latency, and what goes wrong."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.backends.emulated import Injection
from nearstep.errors import CompletionError, DeviceError, OutOfBoundsError, PostedWriteError
from nearstep_sim.coarse.pool_values import reduced

from .small_pool import DEVICES, MEMORY, backend, opened, random

pytestmark = pytest.mark.usefixtures("top")

PHIT = 16


@pytest.mark.parametrize(("interval", "latency"), [(1, 1), (1, 300), (3, 50)])
def test_a_transfer_takes_its_bytes_and_the_latency(interval: int, latency: int) -> None:
    with opened(client_interval=interval, client_latency=latency) as pool:
        link, nbytes = backend(pool), 32 << 10
        data = random(2).integers(0, 256, nbytes, np.uint8)
        out = np.zeros(nbytes, np.uint8)
        least = interval * nbytes // PHIT
        up = link.submit_write(0, data).wait().cycles
        down = link.submit_read(0, out).wait().cycles
        assert up is not None
        assert down is not None
        assert least + latency < up < least + latency + 200
        assert least + 2 * latency < down < least + 2 * latency + 200
        np.testing.assert_array_equal(out, data)


def test_directions_and_clients_do_not_share_a_link() -> None:
    with opened(client_latency=10) as pool:
        link, nbytes = backend(pool), 32 << 10
        data = random(3).integers(0, 256, (DEVICES, nbytes), np.uint8)
        for device, each in enumerate(data):
            link.write_memory(device * MEMORY, each)
        out = np.zeros_like(data)
        moves = []
        for device in range(DEVICES):
            moves.append(link.submit_read(device * MEMORY, out[device]))
            moves.append(link.submit_write(device * MEMORY + nbytes, data[device]))
        for move in moves:
            cycles = move.wait().cycles
            assert cycles is not None
            assert nbytes // PHIT < cycles < 1.15 * nbytes // PHIT
        np.testing.assert_array_equal(out, data)
        for device, each in enumerate(data):
            again = np.zeros(nbytes, np.uint8)
            link.read_memory(device * MEMORY + nbytes, again)
            np.testing.assert_array_equal(again, each)


def test_transfers_of_one_direction_follow_each_other() -> None:
    """Of any size and place; bytes around them stay."""
    with opened(client_latency=40) as pool:
        link, rng = backend(pool), random(4)
        image = rng.integers(0, 256, 1 << 14, np.uint8)
        link.write_memory(MEMORY, image)
        moves, ends, at = [], [], 0
        while at < image.size - 3000:
            at += int(rng.integers(1, 500))
            size = int(rng.integers(1, 2500))
            data = rng.integers(0, 256, size, np.uint8)
            moves.append(link.submit_write(MEMORY + at, data))
            image[at : at + size] = data
            at += size
        out = np.zeros(image.size, np.uint8)
        begun = link.cycles or 0
        for move in moves:
            ends.append((move.wait().cycles or 0) + begun)
        assert ends == sorted(ends)
        assert ends[-1] - begun < 40 + 1.2 * image.size / PHIT
        link.submit_read(MEMORY, out).wait()
        np.testing.assert_array_equal(out, image)
        assert len(moves) >= 6, len(moves)


def test_clients_push_while_the_rings_sum() -> None:
    with opened(link_latency=10, client_latency=20) as pool:
        arrays = [random(5 + d).standard_normal(1500).astype(np.float32) for d in range(DEVICES)]
        first, second = pool.tensor(arrays), pool.tensor(1500)
        event = pool.submit(first)
        pushes = [second.submit_write(d, each) for d, each in enumerate(arrays)]
        event.wait()
        for push in pushes:
            push.wait()
        for device in range(DEVICES):
            np.testing.assert_array_equal(second.read(device), arrays[device])
            expected = reduced(pool, arrays)
            np.testing.assert_array_equal(first.read(device), expected)


class TestWhatGoesWrong:
    def test_a_response_with_an_error_fails_its_transfer_alone(self) -> None:
        with opened() as pool:
            link, base = backend(pool), MEMORY
            data, out = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
            link.write_memory(base, data)
            for write, kind in ((True, PostedWriteError), (False, CompletionError)):
                link.inject(
                    Injection(
                        kind="slverr", write=write, host=True, base=base + 2048, limit=base + 2112
                    )
                )
                submit = link.submit_write if write else link.submit_read
                bad, good = submit(base, data if write else out), submit(base + 4096, data)
                with pytest.raises(kind) as caught:
                    bad.wait()
                assert MEMORY + 2048 <= caught.value.address < MEMORY + 3072
                assert good.wait().error is None
                link.heal()

    def test_a_reset_gives_up_what_has_not_ended(self) -> None:
        with opened() as pool:
            link = backend(pool)
            moves = [link.submit_write(0, np.ones(8192, np.uint8)) for _ in range(2)]
            moves.append(link.submit_read(0, np.zeros(8192, np.uint8)))
            link.advance(300)
            link.reset()
            for move in moves:
                assert move.ended
                with pytest.raises(DeviceError, match="was given up"):
                    move.wait()
            out = np.zeros(64, np.uint8)
            link.submit_write(64, np.full(64, 7, np.uint8)).wait()
            link.submit_read(64, out).wait()
            assert (out == 7).all()

    def test_a_closed_pool_ends_its_transfers(self) -> None:
        with opened() as pool:
            move = backend(pool).submit_write(0, np.ones(8192, np.uint8))
        assert move.ended
        assert move.error is not None

    def test_beyond_the_memory_nothing_is_begun(self) -> None:
        with opened() as pool:
            link = backend(pool)
            begun = link.cycles
            with pytest.raises(OutOfBoundsError):
                link.submit_write(DEVICES * MEMORY - 32, np.ones(64, np.uint8))
            assert link.cycles == begun


def test_a_direct_window_takes_no_time() -> None:
    with opened(window="direct") as pool:
        link = backend(pool)
        begun = link.cycles
        data, out = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
        assert link.submit_write(0, data).ended
        assert link.submit_read(0, out).ended
        assert link.cycles == begun
        np.testing.assert_array_equal(out, data)


def test_bytes_of_two_devices_go_through_both_windows() -> None:
    with opened() as pool:
        link, data = backend(pool), np.arange(128, dtype=np.uint8)
        assert link.submit_write(MEMORY - 64, data).wait().error is None
        out = np.zeros(128, np.uint8)
        assert link.submit_read(MEMORY - 64, out).ended
        np.testing.assert_array_equal(out, data)
