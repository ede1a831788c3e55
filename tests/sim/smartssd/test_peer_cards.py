"""Drives of several simulated cards, and transfers in a graph of work, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nearstep.backends.emulated import Injection
from nearstep.backends.peer import PeerTraffic
from nearstep.errors import DeviceError, PeerWriteError
from nearstep.smartssd.device import SmartssdDevice
from nearstep.work.clock import QUANTUM_CYCLES, Clock
from nearstep.work.executor import execute
from nearstep.work.graph import Graph

from ...host.driver.job import Job
from .test_peer_cycles import HZ, memory, opened, some


def timeline(card: SmartssdDevice, moves: Sequence[Any]) -> int:
    graph = Graph()
    for number, move in enumerate(moves):
        graph.add(f"move {number}", f"line {number}", action=move)
    return execute(graph, Clock([card.backend])).entries[-1].end


@pytest.mark.parametrize("cards", [1, 2])
def test_a_graph_runs_transfers_beside_runs_on_one_clock(cards):
    with opened(fu="native", cards=cards) as device:
        works = [Job(device, 4000, 1 + n, channel=n) for n in range(cards)]
        others = [device.alloc(4000, channel=n) for n in range(cards)]
        values = [some(16_000, n).view(np.float32) for n in range(cards)]
        outs = [np.zeros(4000, np.float32) for _ in range(cards)]
        kernels = [work.start for work in works]
        comes = [
            lambda b=b, v=v: b.submit_peer_write(v) for b, v in zip(others, values, strict=True)
        ]
        together = timeline(device, [*kernels, *comes])
        for work in works:
            assert work.check() == 12_000
        goes = [lambda b=b, o=o: b.submit_peer_read(o) for b, o in zip(others, outs, strict=True)]
        timeline(device, goes)
        for out, value in zip(outs, values, strict=True):
            assert out.tobytes() == value.tobytes()
        for work in works:
            work.upload()
        alone = timeline(device, [work.start for work in works])
        assert together < alone + timeline(device, comes)


def test_cards_have_drives_of_their_own_on_one_clock():
    with opened(cards=2, drive_read_bytes_per_s=2 * HZ) as device:
        backend = device.backend
        span = backend.regions[1][0]
        data = [some(3000, seed) for seed in (1, 2)]
        transfers = [
            backend.submit_peer_write(number * span + 64, each) for number, each in enumerate(data)
        ]
        for transfer in transfers:
            assert transfer.backend is backend
            transfer.wait()
        assert abs(transfers[0].cycles - transfers[1].cycles) < 2
        assert device.cycles > 1500
        spread = [backend._time(number) for number in (0, 1)]
        assert max(spread) - min(spread) <= QUANTUM_CYCLES
        for number, each in enumerate(data):
            assert memory(device, number * span + 64, 3000).tobytes() == each.tobytes()
        one = PeerTraffic(write_tlps=12, write_bytes=3000)
        assert [card.peer_traffic for card in backend.cards] == [one, one]
        assert backend.peer_traffic == PeerTraffic(write_tlps=24, write_bytes=6000)
        assert backend.traffic.write_bytes == 0

        at = span + 64
        backend.inject(Injection(kind="decerr", write=True, peer=True, base=at, limit=at + 1))
        failed, fine = (backend.submit_peer_write(n * span + 64, data[n]) for n in (1, 0))
        with pytest.raises(PeerWriteError) as caught:
            failed.wait()
        assert caught.value.__notes__ == ["card 1 of 2"]
        assert fine.wait().done
        under_way = [backend.submit_peer_write(n * span + 64, data[n]) for n in (0, 1)]
        backend.reset_card(1)
        with pytest.raises(DeviceError, match="was given up"):
            under_way[1].wait()
        assert under_way[0].wait().done
