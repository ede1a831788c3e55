"""Clients whose parameters and optimizer state are in the memory devices; DENSE is one device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from nearstep.backends.emulated import Injection
from nearstep.coarse import StorageOptimizer
from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import (
    DeviceLostError,
    DeviceMemoryError,
    JobError,
    RefusedError,
    UnlikeError,
)
from nearstep.coarse.service.messages import Update
from nearstep.coarse.service.stored import ServiceStore
from nearstep.errors import ArgumentError

from ..of_torch import OfTorch, same
from ..update_devices import RTL, of_rtl
from .conftest import SMALL, put_in, taken_from
from .oracle import F32, expected_sum

STEPS = 3
SHARD_BYTES = 4096
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
KINDS = {"adamw": (torch.optim.AdamW, ADAMW), "sgd": (torch.optim.SGD, SGD)}


def url(devices: int) -> str:
    return f"golden:coarse?devices={devices}&groups=2&{SMALL}&rules=adam,sgd,sgd_momentum"


def drawn(seed: int, clients: int, size: int) -> list[list[F32]]:
    """Gradients of each step and client."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return [
        [rng.standard_normal(size).astype(np.float32) for _ in range(clients)] for _ in range(STEPS)
    ]


def averaged(gradients: list[F32], devices: int, config: Any) -> F32:
    """The sum in the order of the devices, times 1 / clients."""
    if devices == 1:
        total = gradients[0].copy()
        for each in gradients[1:]:
            total += each
    else:
        total = expected_sum(
            gradients,
            devices=devices,
            operation="sum",
            wire="fp32",
            shard_bytes=SHARD_BYTES,
            config=config,
        )
    return total * np.float32(1 / len(gradients))


def stored_by(
    client: Client, values: F32, name: str, hyper: dict[str, Any], key: str = "model"
) -> StorageOptimizer:
    """A client's part of an optimizer in the devices."""
    return StorageOptimizer(ServiceStore(client, key), values, name, **hyper)


def stepped(stored: StorageOptimizer, gradient: F32, **hyper: Any) -> F32:
    """The parameters after a step."""
    out = np.empty_like(gradient)

    def fill(place: F32, start: int, stop: int) -> None:
        place[:] = gradient[start:stop]

    def take(values: F32, start: int, stop: int) -> None:
        out[start:stop] = values

    stored.update([fill], take, **hyper)
    return out


@pytest.mark.parametrize(
    ("clients", "devices", "tcp"),
    [
        *((c, d, False) for c, d in ((1, 2), (2, 4), (3, 2), (4, 4), (5, 2))),
        *((c, 1, False) for c in (1, 2, 3, 4)),
        *((c, d, True) for c, d in ((3, 2), (3, 1))),
    ],
)
def test_bits_are_those_of_torch_after_the_same_average(serve, clients, devices, tcp) -> None:
    service = serve(url=url(devices), tcp=tcp, shard_bytes=SHARD_BYTES)
    config = service.server.dispatcher.pool.device.config
    checked = 0
    for name, size in (("adamw", 5003), ("sgd", 1), ("adamw", 77)):
        kind, hyper = KINDS[name]
        gradients = drawn(clients * devices + size, clients, size)
        first = np.random.default_rng(1).standard_normal(size).astype(np.float32)

        def action(client: Client, name=name, hyper=hyper, first=first, gradients=gradients):
            mine = first if client.rank == 0 else first * 0  # those of client 0 count
            stored = stored_by(client, mine, name, hyper)
            found = [stepped(stored, gradients[step][client.rank]) for step in range(STEPS)]
            stored.free()
            return found

        results = service.run(clients, action)
        oracle = OfTorch(first, kind, **hyper)
        for step in range(STEPS):
            expected = oracle.step(averaged(gradients[step], devices, config))
            checked += sum(same(each[step], expected) for each in results)
    assert checked == clients * STEPS * (5003 + 1 + 77)
    service.wait_idle()
    free = service.server.dispatcher.pool.device
    assert free.capacity_bytes - free.free_bytes <= devices * 4 * 4096  # identities are kept


@pytest.mark.parametrize("rtl", of_rtl(2) + of_rtl(1))
def test_on_rtl(serve, rtl) -> None:
    service = serve(url=rtl, shard_bytes=SHARD_BYTES)
    pool = service.server.dispatcher.pool
    config, devices = pool.device.config, pool.devices
    gradients = drawn(devices, 2, 1500)
    first = np.linspace(-1, 1, 1500, dtype=np.float32)

    def action(client: Client) -> list[F32]:
        stored = stored_by(client, first, "adamw", ADAMW)
        return [stepped(stored, gradients[step][client.rank]) for step in range(2)]

    results = service.run(2, action)
    oracle, checked = OfTorch(first, torch.optim.AdamW, **ADAMW), 0
    for step in range(2):
        expected = oracle.step(averaged(gradients[step], devices, config))
        checked += sum(same(each[step], expected) for each in results)
    assert checked == 2 * 2 * 1500


@pytest.mark.parametrize(("before", "behind"), [(2, 2), (1, 1), (4, 1), (1, 4)])
def test_a_job_resumes_bit_for_bit_from_a_snapshot(serve, tmp_path, before, behind) -> None:
    """Two clients; their average is the same on any number of devices."""
    size, path = 3001, str(tmp_path / "state")
    gradients = drawn(3, 2, size)
    first = np.ones(size, np.float32)

    def train(client: Client) -> list[F32]:
        stored = stored_by(client, first, "adamw", ADAMW)
        found = []
        for step in range(STEPS):
            found.append(stepped(stored, gradients[step][client.rank]))
            client.barrier()
            if client.rank == 0 and step == 0:
                stored.snapshot(path)
            client.barrier()
        return found

    def resume(client: Client) -> list[F32]:
        stored = stored_by(client, first * 5, "adamw", ADAMW)
        stepped(stored, gradients[2][client.rank])
        client.barrier()
        if client.rank == 0:
            stored.restore(path)
        client.barrier()
        stored.restore()
        assert stored.steps == 1
        assert (stored.state("m") != 0).any()
        with pytest.raises(ArgumentError, match="must be None, the client's own, not 1"):
            stored.read(device=1)
        return [stored.read(), *(stepped(stored, gradients[step][client.rank]) for step in (1, 2))]

    expected = serve(url=url(before)).run(2, train)
    found = serve(url=url(behind)).run(2, resume)
    checked = sum(
        same(found[rank][step], expected[rank][step]) for rank in range(2) for step in range(STEPS)
    )
    assert checked == 2 * STEPS * size


def test_hyper_parameters_change_and_sums_go_on_beside(serve) -> None:
    service = serve(url=url(2), shard_bytes=SHARD_BYTES)
    gradients = drawn(8, 2, 2000)

    def action(client: Client) -> int:
        stored = stored_by(client, np.ones(2000, np.float32), "sgd", {"lr": 1.0})
        exchange = client.exchange(1000)
        expected, checked = np.ones(2000, np.float32), 0
        for step, each in enumerate(gradients):
            found = stepped(stored, each[client.rank], lr=0.5**step)
            average = (each[0] + each[1]) * np.float32(0.5)
            wanted = expected.astype(np.float64) - 0.5**step * average.astype(np.float64)
            expected = wanted.astype(np.float32)  # one rounding, as of an FMA
            checked += same(found, expected)
            out = np.empty(1000, np.float32)
            exchange.reduce(np.full(1000, client.rank + 1, np.float32), out)
            assert (out == 3).all()
        return checked

    assert service.run(2, action) == [STEPS * 2000] * 2


def test_what_cannot_be_is_refused_and_the_job_goes_on(serve) -> None:
    service = serve(url=url(2))
    first = np.ones(100, np.float32)

    def action(client: Client) -> list[str]:
        found = []
        for options, kind, text in (
            (("adagrad", {}), RefusedError, "rule must be a rule of the kernel"),
            (("adamw", {"lr": -1.0}), RefusedError, "lr must be finite and not negative"),
            (("adamw", {"lr": client.rank}), UnlikeError, "for adamw"),
        ):
            with pytest.raises(kind, match=text):
                stored_by(client, first, *options)
            client.barrier()
            found.append(text)
        with pytest.raises(RefusedError, match="kept as 'none/p' before"):
            client.exchange(100, "average", update=Update("none", "adamw", ""))
        with pytest.raises(RefusedError, match="operation of an update must be average, not sum"):
            client.exchange(100, "sum", update=Update("model", "adamw", ""))
        with pytest.raises(RefusedError, match="has 400 bytes, not 404"):
            client.exchange(101, "average", update=Update("model", "adamw", ""))
        with pytest.raises(RefusedError, match="must be a JSON object"):
            client.exchange(100, "average", update=Update("model", "adamw", "[1]"))
        with pytest.raises(DeviceMemoryError):
            stored_by(client, np.ones(800_000, np.float32), "adamw", {}, "large")
        stored = stored_by(client, first, "sgd", {"lr": 0.5})
        found.append(str(stepped(stored, first)[0]))
        return found

    results = service.run(2, action)
    assert [each[-1] for each in results] == ["0.5", "0.5"]
    assert all(len(each) == 4 for each in results)


def test_one_device_sums_nothing_by_itself(serve) -> None:
    def action(client: Client) -> bool:
        with pytest.raises(RefusedError, match="one device has no ring"):
            client.exchange(100)
        return True

    assert serve(url=url(1)).run(2, action) == [True] * 2


def test_clients_that_do_not_agree_on_a_step_end_the_job(serve) -> None:
    service = serve(url=url(2))

    def action(client: Client) -> str:
        stored = stored_by(client, np.ones(100, np.float32), "sgd", {"lr": 0.5})
        with pytest.raises(JobError) as caught:
            stepped(stored, np.ones(100, np.float32), lr=0.1 * (1 + client.rank))
        return str(caught.value)

    for said in service.run(2, action):
        assert "push step 1" in said
        assert "and another step 1" in said

    def well(client: Client) -> float:
        stored = stored_by(client, np.ones(100, np.float32), "sgd", {"lr": 0.5})
        return float(stepped(stored, np.ones(100, np.float32))[99])

    assert service.run(2, well) == [0.5, 0.5]


def test_who_looks_at_parameters_while_they_are_updated_gets_old_or_new_ones(serve) -> None:
    """In the RTL, where an update takes some time."""
    service = serve(url=RTL, shard_bytes=1 << 20)
    first = np.ones(60_000, np.float32)

    def action(client: Client) -> set[float]:
        stored = stored_by(client, first, "sgd", {"lr": 0.5, "momentum": 0.5})
        update = stored.store._exchange
        update.begin(1)
        put_in(update, 1.0)
        update.push(0)
        found, out = set(), np.empty_like(first)
        while not update.ready(0):
            client.get("model/p", out.view(np.uint8))
            assert len(set(out.tolist())) == 1
            found.add(float(out[0]))
        return found

    for found in service.run(2, action):
        assert 1.0 in found
        assert found <= {1.0, 0.5}


def test_no_snapshot_is_of_half_a_step(serve, tmp_path) -> None:
    service = serve(url=url(2), shard_bytes=SHARD_BYTES)
    first = np.ones(5000, np.float32)

    def action(client: Client) -> float:
        stored = stored_by(client, first, "sgd", {"lr": 0.5})
        update = stored.store._exchange
        update.begin(1)
        put_in(update, 1.0)
        update.push(0)
        update.wait(0)  # updated, and other shards are not
        client.barrier()
        if client.rank == 0:
            for act in (client.save, lambda path, keys: client.load(path)):
                with pytest.raises(RefusedError, match="must be between two steps"):
                    act(str(tmp_path / "x"), ["model/p"])
        client.barrier()
        for shard in range(1, len(update.shards)):
            update.push(shard)
        update.wait(len(update.shards) - 1)
        client.barrier()
        if client.rank == 0:
            client.save(str(tmp_path / "x"), ["model/p"])
        return float(taken_from(update)[-1])

    assert service.run(2, action) == [0.5, 0.5]
    assert [each.name for each in tmp_path.glob("x*")] == ["x.000001"]


@pytest.mark.parametrize("kind", ["slverr", "never"])
@pytest.mark.parametrize("devices", [2, 1])
def test_a_memory_that_fails_ends_the_job_and_not_the_service(serve, devices, kind) -> None:
    service = serve(url=url(devices))
    pool = service.server.dispatcher.pool

    def action(client: Client) -> str:
        stored = stored_by(client, np.ones(100, np.float32), "adamw", {"lr": 0.5})
        client.barrier()
        if client.rank == 0:
            (job,) = service.server.dispatcher.jobs.values()
            for number in range(devices):
                base = job._values._tensors["model/p"].front(number).address
                fault = Injection(kind=kind, write=True, base=base, limit=base + 64)
                pool.device.backend.inject(fault)
        client.barrier()
        with pytest.raises(DeviceLostError) as caught:
            stepped(stored, np.ones(100, np.float32))
        return str(caught.value)

    for said in service.run(2, action):
        assert "the memory devices failed" in said
    pool.device.backend.heal()
    service.wait_idle()

    def well(client: Client) -> float:
        stored = stored_by(client, np.ones(100, np.float32), "sgd", {"lr": 0.5})
        return float(stepped(stored, np.ones(100, np.float32))[99])

    assert service.run(2, well) == [0.5, 0.5]


@pytest.mark.parametrize("devices", [2, 1])
def test_a_client_that_leaves_in_a_step_is_named_and_other_jobs_go_on(serve, devices) -> None:
    service = serve(url=url(devices), shard_bytes=SHARD_BYTES)
    first = np.ones(5000, np.float32)
    begun = threading.Barrier(2)

    def leaving(client: Client) -> tuple[int, ...]:
        stored = stored_by(client, first, "sgd", {"lr": 0.5})
        stepped(stored, first)
        client.barrier()
        if client.rank == 1:
            return ()
        with pytest.raises(JobError) as caught:
            stepped(stored, first)
        return caught.value.ranks

    def other(client: Client) -> float:
        stored = stored_by(client, first, "sgd", {"lr": 0.125})
        begun.wait(60)
        for _ in range(4):
            last = stepped(stored, first)
        return float(last[-1])

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(service.run, 2, leaving)
        two = threads.submit(service.run, 2, other)
        assert two.result() == [0.5, 0.5]
        assert one.result() == [(1,), ()]
    service.wait_idle()


def test_hyper_parameters_that_cannot_be_are_refused_before_anything_is_pushed(serve) -> None:
    service = serve(url=url(2))
    first = np.ones(100, np.float32)

    def action(client: Client) -> list[float]:
        stored = stored_by(client, first, "sgd", {"lr": 0.5})
        found = [float(stepped(stored, first)[0])]
        for hyper, kind, text in (
            ({"lr": -1.0}, RefusedError, "lr must be finite and not negative"),
            ({"lr": "x"}, RefusedError, "lr must be"),
            ({"nothing": 1}, RefusedError, "no hyper-parameter 'nothing'"),
            ({"momentum": 0.5}, RefusedError, "must leave the states"),
            ({"lr": {1, 2}}, ArgumentError, "JSON's types"),
        ):
            with pytest.raises(kind, match=text):
                stepped(stored, first, **hyper)
            assert stored.steps == 1
        found.append(float(stepped(stored, first, lr=0.25)[0]))
        return found

    assert service.run(2, action) == [[0.5, 0.25]] * 2
    service.wait_idle()


@pytest.mark.parametrize(
    ("step", "hyper", "text"),
    [
        (0, "", "step must be"),
        (1, "{", "hyper-parameters must be a JSON object"),
        (1, '{"momentum": 0.5}', "hyper-parameters must leave the states"),
        (1, '{"nothing": 1}', "no hyper-parameter 'nothing'"),
        (1, '{"lr": "x"}', "lr must be"),
    ],
)
def test_steps_that_cannot_be_end_the_job_with_the_reason(serve, step, hyper, text) -> None:
    service = serve(url=url(2))

    def action(client: Client) -> str:
        first = np.ones(100, np.float32)
        if client.rank == 0:
            client.keep("model/p", first.view(np.uint8))
        client.barrier()
        update = Update("model", "sgd", '{"lr": 0.5}')
        exchange = client.exchange(100, "average", update=update)
        with pytest.raises(JobError) as caught:
            exchange.run(lambda *_: None, lambda *_: None, step=step, hyper=hyper)
        return str(caught.value)

    for said in service.run(2, action):
        assert text in said
