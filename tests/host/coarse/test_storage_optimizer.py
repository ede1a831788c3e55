"""An optimizer in the memory devices has the bits of torch's after the same average."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nearstep.coarse import CoarsePool, StorageOptimizer
from nearstep.coarse.errors import SnapshotError
from nearstep.errors import ArgumentError, DtypeError, OptionError, ShapeError
from nearstep_sim.coarse.pool_values import Floats
from nearstep_sim.golden.coarse import ring_all_reduce
from nearstep_spec.rule.rules import optimizer_named

from ..optimizers import EXAMPLES
from .of_torch import OfTorch, same
from .update_devices import RULES, device_url, of_rtl

SIZES = (1, 17, 4099)
STEPS = 3
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
"""Whose first step is not as the others are."""


def opened(devices: int, kind: str = "golden", rules: str = RULES) -> CoarsePool:
    return CoarsePool.open(device_url(kind, devices, rules))


def drawn(clients: int, shape: Any, seed: int) -> list[list[Floats]]:
    """Gradients of each step and client."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return [
        [rng.standard_normal(shape).astype(np.float32) for _ in range(clients)]
        for _ in range(STEPS)
    ]


def averaged(pool: CoarsePool, gradients: list[Floats]) -> Floats:
    """What the devices must make of the gradients of all clients."""
    size = gradients[0].size
    if pool.devices == 1:
        total = gradients[0].copy()
        for each in gradients[1:]:
            total += each
    else:
        nothing = np.full(size, np.float32(-0.0))
        each = [*gradients, *[nothing] * (pool.devices - len(gradients))]
        total = np.concatenate(
            [
                ring_all_reduce(
                    [one[part.start : part.stop] for one in each],
                    operation="sum",
                    wire="fp32",
                    config=pool.device.config,
                    reverse=part.reverse,
                )
                for part in pool.split(size)
            ]
        )
    return total * np.float32(1 / len(gradients))


def trained(pool: CoarsePool, clients: int, size: int, name: str, kind: Any, hyper: Any) -> int:
    """Steps beside torch; the number of parameters that were compared."""
    first = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    oracle, checked = OfTorch(first, kind, **hyper), 0
    with StorageOptimizer(pool, first, name, clients=clients, **hyper) as stored:
        for gradients in drawn(clients, size, seed=100 * clients + size):
            stored.step(gradients)
            expected = oracle.step(averaged(pool, gradients))
            for device in range(pool.devices):
                checked += same(stored.read(device), expected)
        assert stored.steps == STEPS
    return checked


@pytest.mark.parametrize("clients", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", [4, 1], ids=["coarse", "dense"])
def test_bits_are_those_of_torch_after_the_same_average(devices, clients) -> None:
    checked = 0
    with opened(devices) as pool:
        free = pool.device.free_bytes
        for size in SIZES:
            checked += trained(pool, clients, size, "adamw", torch.optim.AdamW, ADAMW)
        checked += trained(pool, clients, SIZES[1], "sgd", torch.optim.SGD, SGD)
        assert pool.device.free_bytes == free
    assert checked == devices * STEPS * (sum(SIZES) + SIZES[1])


@pytest.mark.parametrize("url", of_rtl(2) + of_rtl(1))
def test_on_rtl(url) -> None:
    with CoarsePool.open(url) as pool:
        checked = trained(pool, 2, 700, "adamw", torch.optim.AdamW, ADAMW)
        counters, devices = pool.counters(), pool.devices
    assert checked == devices * STEPS * 700
    links = [link.sent_phits for each in counters.devices for link in each.links]
    assert any(links) == (devices > 1), links


def test_a_rule_of_a_file_and_a_learning_rate_that_changes() -> None:
    sizes = 0
    with opened(2) as pool, opened(1) as dense:
        first = np.linspace(-1, 1, 333, dtype=np.float32)
        both = [StorageOptimizer(each, first, "lion", clients=2, lr=1e-2) for each in (pool, dense)]
        m = p = np.float32(0)
        p, m = first.astype(np.float64), np.zeros(333)
        for number, gradients in enumerate(drawn(2, 333, seed=9)):
            for each in both:
                each.step(gradients, lr=1e-2 / (number + 1))
            g = (gradients[0].astype(np.float64) + gradients[1]) / 2
            p = p - 1e-2 / (number + 1) * np.sign(0.9 * m + 0.1 * g)
            m = 0.99 * m + 0.01 * g
            sizes += same(both[0].read(), both[1].read())  # of two clients every order is the same
            np.testing.assert_allclose(both[0].read(), p, rtol=1e-5, atol=1e-6)
    assert sizes == STEPS * 333


@pytest.mark.parametrize("devices", [2, 1])
def test_a_snapshot_goes_on_bit_for_bit_in_another_pool(devices, tmp_path) -> None:
    shape = (5, 67)
    steps = drawn(2, shape, seed=4)
    first = np.ones(shape, np.float32)
    with opened(devices) as pool, StorageOptimizer(pool, first, clients=2, **ADAMW) as stored:
        stored.step(steps[0])
        file = stored.snapshot(tmp_path / "state")
        for each in steps[1:]:
            stored.step(each)
        expected = {name: stored.state(name) for name in "pmv"}
    with opened(devices) as pool, StorageOptimizer(pool, first * 7, clients=2, **ADAMW) as stored:
        stored.step(steps[2])
        with pytest.raises(SnapshotError):
            stored.restore(tmp_path / "other")
        stored.restore(file)
        assert stored.steps == 1
        for each in steps[1:]:
            stored.step(each)
        checked = sum(same(stored.state(name, pool.devices - 1), expected[name]) for name in "pmv")
        assert stored.steps == STEPS
    assert checked == 3 * 5 * 67


def test_what_is_refused_touches_nothing() -> None:
    first = np.ones(20, np.float32)
    with opened(2) as pool:
        free = pool.device.free_bytes
        for arguments, options, kind, text in (
            ((first,), {"clients": 3}, ArgumentError, "clients must be from 1 to 2"),
            ((first, "adagrad"), {}, ArgumentError, "rule must be a rule of the kernel"),
            ((first, "none"), {}, ArgumentError, "optimizer must be of"),
            ((first, "adamw"), {"momentum": 1}, ArgumentError, "no hyper-parameter 'momentum'"),
            ((first.astype(np.float64),), {}, DtypeError, "float32"),
        ):
            with pytest.raises(kind, match=text):
                StorageOptimizer(pool, *arguments, **options)
        assert pool.device.free_bytes == free
        with StorageOptimizer(pool, first) as stored:
            for gradients, options, kind, text in (
                ([first], {}, ArgumentError, "must be 2 gradients, not 1"),
                ([first, first[1:]], {}, ShapeError, "gradients"),
                ([first, first], {"lr": -1.0}, ArgumentError, "lr must be finite and not negative"),
            ):
                with pytest.raises(kind, match=text):
                    stored.step(gradients, **options)
            assert (stored.read() == first).all()
            assert stored.steps == 0
            with pytest.raises(ArgumentError, match="state must be of p, m, v, not 'x'"):
                stored.state("x")
        with pytest.raises(ArgumentError, match="must be made with reduced=True"):
            pool.all_reduce(pool.tensor((4,), reduced=False))
    with opened(1, rules="adam") as pool:
        with pytest.raises(ArgumentError, match=r"cannot reduce on .*: one device has no ring"):
            pool.all_reduce(pool.tensor(4))
        with pytest.raises(ArgumentError, match="not sgd"):
            StorageOptimizer(pool, first, clients=2)
        with StorageOptimizer(pool, first) as stored:
            stored.step([first])
    with pytest.raises(OptionError, match=r"devices must lie in \[2, 64\] without rules, not 1"):
        CoarsePool.open("golden:coarse?devices=1")


def test_states_in_8_bits_are_refused_before_anything_is_sent(tmp_path):
    file = tmp_path / "adam_8.py"
    text = (EXAMPLES / "adam_bf16.py").read_text()
    file.write_text(
        text.replace('{"m": "bf16", "v": "bf16"}', '{"m": "dynamic8", "v": "dynamic8u"}')
    )
    name = f"{file}:ADAM_BF16"
    with opened(2, rules=name) as pool:
        free = pool.device.free_bytes
        expected = "state m of adam_bf16 must be fp32 in a pool, not dynamic8"
        with pytest.raises(ArgumentError, match=expected):
            StorageOptimizer(pool, np.zeros(100, np.float32), optimizer_named(name))
        assert pool.device.free_bytes == free
