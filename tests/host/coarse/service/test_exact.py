"""Exact sums of clients: the bits of integers, however the addends are divided."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep.coarse.errors import ExactSumError
from nearstep.coarse.routing import RoutingTable
from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import RefusedError, UnlikeError
from nearstep.coarse.service.plan import Layout

from ....oracle.exact_sums import exact_sum

F32 = NDArray[np.float32]
EXACT = "golden:coarse?groups=2&entry_phits=8&memory_bytes=4MiB&exact=fp32,bf16"
FEW = 60


def test_addends_of_16_bits_are_cut_by_their_own_bytes() -> None:
    """A sum in the order of the ring is cut as one of float32, which its bits depend on."""
    elements, least = 1 << 23, 2 << 20
    found = {
        (form, addends): [
            stop - start for start, stop in Layout.of(elements, least, addends, form).shards
        ]
        for form in ("fp32", "bf16")
        for addends in (0, 1)
    }
    halves = found.pop(("bf16", 1))
    assert halves == 8 * [1 << 20]
    assert [*found.values()] == 3 * [16 * [1 << 19]]


@pytest.mark.parametrize(
    ("clients", "devices", "options"),
    [
        (8, 4, {}),
        (4, 3, {}),
        (2, 1, {"tcp": True}),
        (1, 2, {}),
        (4, 8, {"tcp": True}),
        (3, 2, {"scheduler": "fcfs"}),
    ],
)
def test_bits_are_those_of_integers(serve, clients: int, devices: int, options: dict) -> None:
    print(f"seed {10 * clients + devices}")
    rng = np.random.default_rng(10 * clients + devices)
    service = serve(url=f"{EXACT}&devices={devices}", **options)
    addends, elements, checked = 24 // clients, 4099, 0  # in three shards
    rows = (rng.standard_normal((24, elements)) * 2.0 ** rng.integers(-20, 20, elements)).astype(
        "f"
    )
    rows[1], rows[2, 5], rows[3, 6], rows[:, 7] = -rows[0], np.inf, np.nan, -0.0
    free = service.server.dispatcher.pool.device.free_bytes
    words = [rows[:, i].view(np.uint32).tolist() for i in range(FEW)]
    for operation, wire in (("sum", "fp32"), ("average", "bf16")):

        def action(client: Client, operation=operation, wire=wire) -> list[F32]:
            if client.rank == 1:  # its device changes no bit
                client.routing = RoutingTable(
                    threshold_bytes=0, latency_proxy=0, bandwidth_proxy=devices - 1
                )
            exchange = client.exchange(elements, operation, wire, addends=addends)
            found = []
            for version in range(3):  # each client has others' rows in turn
                rank = (client.rank + version) % clients
                own = rows[rank * addends : (rank + 1) * addends]
                found.append(np.empty(elements, np.float32))
                exchange.reduce(own if addends > 1 else own[0], found[-1])
            exchange.close()
            return found

        divisor = 24 if operation == "average" else 1
        expected = [exact_sum(column, wire, divisor) for column in words]
        results = [each.view(np.uint32) for one in service.run(clients, action) for each in one]
        for each in results:
            assert each[:FEW].tolist() == expected
            assert (each == results[0]).all()
            checked += 1
    assert checked == 6 * clients
    service.wait_idle()
    assert service.server.dispatcher.pool.device.free_bytes == free


def test_exact_sums_that_cannot_be_are_refused_before_anything_is_pushed(serve) -> None:
    service = serve(url=f"{EXACT}&devices=2")

    def action(client: Client) -> F32:
        with pytest.raises(ExactSumError, match="addends of an exact sum must be at most 1024"):
            client.exchange(100, addends=513)
        with pytest.raises(RefusedError, match="wire of an exact sum must be fp32, bf16"):
            client.exchange(100, wire="fp16", addends=1)
        with pytest.raises(RefusedError, match="op of an exact sum must be sum or average"):
            client.exchange(100, "max", addends=1)
        with pytest.raises(UnlikeError, match="exact of 1 addends each"):
            client.exchange(100, addends=client.rank)
        out = np.empty(100, np.float32)
        client.exchange(100, addends=1).reduce(np.full(100, 0.1, np.float32), out)
        return out

    for each in service.run(2, action):
        assert (each == np.float32(0.2)).all()
    plain = serve(2)

    def refused(client: Client) -> None:
        with pytest.raises(RefusedError, match="opened without exact="):
            client.exchange(100, addends=1)

    plain.run(2, refused)


def test_devices_on_which_many_clients_meet_refuse_more_than_1024_addends(serve) -> None:
    """All devices have as many arrays as the one with most."""
    service = serve(url=f"{EXACT}&devices=8")

    def action(client: Client) -> None:
        client.routing = RoutingTable(threshold_bytes=0, latency_proxy=0, bandwidth_proxy=0)
        with pytest.raises(RefusedError, match="addends of an exact sum must be at most 1024"):
            client.exchange(100, addends=100)

    service.run(2, action)
