"""What clients and the service hold: descriptors and mapped memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from nearstep.coarse.service import Client
from nearstep.coarse.service.arena import KEPT_BYTES, SLAB_BYTES
from nearstep.coarse.service.plan import WINDOW_BYTES

from .conftest import Service
from .dying import descriptors

SIDES = 2
"""Clients and the service are in one process: each segment is mapped by both."""


def mapped_bytes() -> int:
    """Of segments, in this process."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:nearstep" in line:
            low, high = (int(each, 16) for each in line.split()[0].split("-"))
            found += high - low
    return found


def alone(service: Service, action: Callable[[Client], int]) -> int:
    return service.run(1, action)[0]


def test_tensors_of_many_sizes_hold_no_descriptors(serve) -> None:
    service = serve(2, url="golden:coarse?devices=2&memory_bytes=64MiB")

    def action(client: Client) -> int:
        before = descriptors()
        out = np.empty(2000, np.float32)
        exchanges = [client.exchange(1 + each) for each in range(2000)]
        for exchange in exchanges[::100]:
            part = out[: exchange.elements]
            exchange.reduce(np.ones_like(part), part)
            assert (part == 1).all()
        assert descriptors() == before
        return len(exchanges)

    assert alone(service, action) == 2000


def test_memory_of_a_large_tensor_is_bounded_and_given_back(serve) -> None:
    service = serve(2, url="golden:coarse?devices=2&memory_bytes=1GiB")
    large = KEPT_BYTES + 1

    def action(client: Client) -> int:
        before = mapped_bytes()
        exchange = client.exchange(64 << 20, shard_bytes=4 << 20)
        assert mapped_bytes() - before == SIDES * 2 * WINDOW_BYTES
        client.keep("a", np.ones(large, np.uint8))
        out = np.zeros(large, np.uint8)
        client.get("a", out)
        assert out.all()
        exchange.close()
        client.barrier()
        kept = mapped_bytes() - before
        assert kept <= SIDES * (KEPT_BYTES + SLAB_BYTES)
        return kept

    before = mapped_bytes()
    assert alone(service, action) > 0
    service.wait_idle()
    assert mapped_bytes() == before


def test_places_are_used_again_and_many_share_a_segment(serve) -> None:
    service = serve(2)

    def action(client: Client) -> int:
        places = [client._arena.take(1 + each % 5000) for each in range(10_000)]
        seen = {(each.segment, each.offset) for each in places}
        assert len(seen) == len(places)
        segments = {each.segment for each in places}
        for each in places:
            client._arena.give(each)
        again = {client._arena.take(4096).segment for _ in places[:1000]}
        assert again <= segments
        return len(segments)

    assert alone(service, action) == -(-8192 // 1024) + -(-1808 // 512)
