"""Bits of what clients get, for any numbers of clients and devices."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep.coarse import routing
from nearstep.coarse.errors import ProfileError
from nearstep.coarse.routing import Profile, RoutingTable, routing_table
from nearstep.coarse.service import Client

from .oracle import expected_sum

F32 = NDArray[np.float32]


@pytest.mark.parametrize(
    ("clients", "devices", "tcp"),
    [
        *((c, d, False) for c, d in ((1, 2), (2, 4), (3, 2), (4, 4), (4, 2), (5, 2), (10, 3))),
        *((c, d, True) for c, d in ((2, 4), (4, 4), (5, 2))),
    ],
)
def test_bits_are_those_of_the_rings(serve, clients: int, devices: int, tcp: bool) -> None:
    seed = 100 * clients + devices
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    service = serve(devices, tcp=tcp)
    config = service.server.dispatcher.pool.device.config
    checked = 0
    kinds = [("sum", "fp32"), ("average", "fp32"), ("max", "fp32"), ("average", "bf16")]
    for operation, wire in kinds:
        elements = int(rng.integers(1, 5000))
        arrays = [rng.standard_normal(elements).astype(np.float32) for _ in range(clients)]
        for each in arrays:
            each[rng.integers(0, elements, 3)] = [np.nan, np.inf, -0.0]

        def action(client: Client, operation=operation, wire=wire, arrays=arrays) -> list:
            exchange = client.exchange(arrays[0].size, operation, wire)
            found = []
            for version in range(3):
                out = np.empty_like(arrays[0])
                exchange.reduce(arrays[(client.rank + version) % clients], out)
                found.append(out)
            exchange.close()
            return found

        results = service.run(clients, action)
        for version in range(3):
            expected = expected_sum(
                [arrays[(rank + version) % clients] for rank in range(clients)],
                devices=devices,
                operation=operation,
                wire=wire,
                shard_bytes=4096,
                config=config,
            )
            for found in results:
                np.testing.assert_array_equal(
                    found[version].view(np.uint32), expected.view(np.uint32)
                )
                checked += elements
    assert checked > 3 * 4 * clients
    service.wait_idle()


@pytest.mark.parametrize(("clients", "devices"), [(2, 3), (4, 4), (5, 2)])
def test_bits_where_tables_route_to_other_devices(serve, clients: int, devices: int) -> None:
    seed = 1000 * clients + devices
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    service = serve(devices, tcp=clients == 5)
    checked = 0
    for elements, shard_bytes in ((600, None), (7000, 4096), (7000, 6144), (9000, 1 << 20)):
        arrays = [rng.standard_normal(elements).astype(np.float32) for _ in range(clients)]
        tables = [
            RoutingTable(
                threshold_bytes=4096,
                latency_proxy=int(rng.integers(devices)),
                bandwidth_proxy=int(rng.integers(devices)),
            )
            for _ in range(clients)
        ]

        def action(client: Client, arrays=arrays, tables=tables, shard_bytes=shard_bytes) -> F32:
            client.routing = tables[client.rank]
            exchange = client.exchange(arrays[0].size, shard_bytes=shard_bytes)
            out = np.empty_like(arrays[0])
            for _ in range(2):
                exchange.reduce(arrays[client.rank], out)
            exchange.close()
            return out

        expected = expected_sum(
            arrays,
            devices=devices,
            operation="sum",
            wire="fp32",
            shard_bytes=shard_bytes or 4096,
            config=service.server.dispatcher.pool.device.config,
            places=[each.proxy_of(4 * elements) for each in tables],
        )
        for found in service.run(clients, action):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
            checked += elements
    assert checked == 23600 * clients
    service.wait_idle()


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_profile_has_times_of_all_devices_and_leaves_nothing(serve, tcp: bool) -> None:
    service = serve(3, tcp=tcp)
    sizes = (1024, 4096, 65536)
    before = service.server.dispatcher.pool.device.free_bytes

    def action(client: Client) -> Profile:
        for bad in ((1024,), (4096, 1024), (0, 1024)):
            with pytest.raises(ProfileError):
                client.profile(bad)
        return client.profile(sizes, repeats=2)

    for profile in service.run(2, action):
        assert profile.sizes == [*sizes]
        assert sorted(profile.proxies) == [0, 1, 2]
        assert routing_table(profile).latency_proxy == profile.latency_proxy
        assert routing.shard_bytes(profile) in sizes
    service.wait_idle()
    assert service.server.dispatcher.pool.device.free_bytes == before


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_bytes_of_one_client_come_to_others(serve, tcp: bool) -> None:
    service = serve(2, tcp=tcp)
    data = np.arange(100_001, dtype=np.uint32).view(np.uint8)

    def action(client: Client) -> bool:
        if client.rank == 1:
            client.keep("a", data)
            return True
        out = np.zeros_like(data)
        client.get("a", out)
        client.barrier()
        return bool((out == data).all())

    def all_of_them(client: Client) -> bool:
        found = action(client)
        if client.rank == 1:
            client.barrier()
        return found

    assert service.run(3, all_of_them) == [True] * 3
