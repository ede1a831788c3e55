"""Gathers: every client gets the bytes of all, from memory that all share."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import ClientLostError, RefusedError, UnlikeError, UnsharedError


def gathered(client: Client, nbytes: int, versions: int, late: float) -> list[np.ndarray]:
    """Results of several versions; a client fills and reads late, each time another one."""
    exchange = client.exchange(nbytes, "gather")
    rng, found = np.random.default_rng(client.rank), []

    def pause() -> None:
        if rng.random() < late:
            time.sleep(0.002)

    for version in range(versions):
        own, out = of(client.rank, version, nbytes), np.zeros((client.clients, nbytes), np.uint8)

        def fill(part: np.ndarray, start: int, stop: int, own: np.ndarray = own) -> None:
            pause()
            part[:] = own[start:stop]

        def take(parts: np.ndarray, start: int, stop: int, out: np.ndarray = out) -> None:
            pause()
            out[:, start:stop] = parts

        exchange.run(fill, take, turn=version + 1)
        found.append(out)
    exchange.close()
    return found


def of(rank: int, version: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng((rank, version)).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize(
    ("clients", "nbytes", "options"),
    [
        (2, 1, {}),
        (3, 4097, {"scheduler": "fcfs"}),
        (4, 3 * 4096 + 5, {}),  # an odd number of shards
        (2, 8 * 4096, {"tcp": True, "share_memory": True}),
    ],
)
def test_every_client_gets_the_bytes_of_all(serve, clients: int, nbytes: int, options) -> None:
    service = serve(2, **options)
    free = service.server.dispatcher.pool.device.free_bytes
    descriptors, checked = len(os.listdir("/proc/self/fd")), 0

    def action(client: Client) -> list[np.ndarray]:
        return [*gathered(client, nbytes, 5, 0.3), *gathered(client, nbytes, 2, 0)]

    for found in service.run(clients, action):
        for number, each in enumerate(found):
            version = number if number < 5 else number - 5
            assert (each == [of(rank, version, nbytes) for rank in range(clients)]).all()
            checked += each.size
    assert checked == 7 * clients * clients * nbytes
    service.wait_idle()
    assert service.server.dispatcher.pool.device.free_bytes == free
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/fd")) > descriptors:  # mappings hold none
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_gathers_that_cannot_be_are_refused_and_a_lost_client_ends_them(serve) -> None:
    def refused(client: Client) -> float:
        with pytest.raises(UnsharedError, match=r"clients \[0, 1\] do not share memory"):
            client.exchange(100, "gather")
        out = np.empty(10, np.float32)
        client.exchange(10).reduce(np.ones(10, np.float32), out)
        return float(out[0])

    assert serve(2, tcp=True).run(2, refused) == [2.0, 2.0]

    def action(client: Client) -> int:
        with pytest.raises(UnlikeError, match=r"clients \[0\]: gather of 100 bytes"):
            client.exchange(100 + client.rank, "gather")
        with pytest.raises(RefusedError, match="sum or average, not 'gather'"):
            client.exchange(100, "gather", addends=1)
        if client.rank:
            client.close(leave=False)
            return 0
        with pytest.raises(ClientLostError) as lost:
            gathered(client, 100, 1, 0)
        return lost.value.ranks[0]

    assert serve(2).run(2, action) == [1, 0]
