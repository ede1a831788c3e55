"""Bits of what clients get, for any numbers of clients and devices."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.coarse.service import Client

from .oracle import expected_sum


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
    config = service.server.engine.pool.device.config
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


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_bytes_of_one_client_come_to_others(serve, tcp: bool) -> None:
    service = serve(2, tcp=tcp)
    data = np.arange(100_001, dtype=np.uint32).view(np.uint8)

    def action(client: Client) -> bool:
        if client.rank == 1:
            client.put("a", data, readers=2)
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
