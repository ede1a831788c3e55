"""Update kernels in memory devices: the RTL has the bits of golden devices after every ring sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearstep.backends.emulated import Injection
from nearstep.coarse import CoarsePool
from nearstep.coarse.tensor import PoolTensor
from nearstep.errors import ArgumentError, BusyError, KernelError
from nearstep.updater.run import KernelRun
from nearstep_sim.coarse.pool_values import (
    SMALL,
    SMALL_MEMORY,
    SMALL_RULES,
    SMALLEST,
    compare,
    draw,
    reduced,
)
from nearstep_spec.updater.registers import ErrorCause

from .small_pool import random

ROOT = Path(__file__).parents[3]
SMALL_TWO = SMALL.replace("devices=4", "devices=2")
SETS = {
    "small": f"{SMALLEST}&{SMALL_MEMORY}&rules={SMALL_RULES}",
    "all": f"{SMALL_TWO}&{SMALL_MEMORY}&rules=adam,sgd,sgd_momentum,{ROOT}/examples/lion.py:LION",
}
"""Of devices: the library of fast tests, and one of two rings and of all rules."""
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("pgmv", {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": ("pgm", {"lr": 0.1, "momentum": 0.9}),
    "lion": ("pgm", {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.1}),
}
SIZES = (4099, 1, 640)
STEPS = 3
SEED = 5


def opened(kind: str, devices: str = "small", **options: object) -> CoarsePool:
    text = "".join(f"&{name}={value}" for name, value in options.items())
    return CoarsePool.open(f"{kind}:coarse?{SETS[devices]}{text}")


def start(
    pool: CoarsePool, optimizer: str, states: list[dict[str, Any]], g: PoolTensor, **more: Any
) -> list[KernelRun]:
    """A step on every device, of what it has itself."""
    return [
        pool.device.update(optimizer, {**states[device], "g": g.front(device)}, **more)
        for device in range(pool.devices)
    ]


def trained(
    kind: str, optimizer: str, size: int, devices: str, **options: object
) -> tuple[list[Any], int]:
    """States after some steps, on each device, and how many sums were checked on the way."""
    names, hyper = OPTIMIZERS[optimizer]
    rng, checked = random(SEED), 0
    with opened(kind, devices, **options) as pool:
        states = [
            {name: pool.device.alloc(size, channel=device) for name in names if name != "g"}
            for device in range(pool.devices)
        ]
        first = rng.standard_normal(size).astype(np.float32)
        for each in states:
            for name, buffer in each.items():
                buffer.write(first if name == "p" else np.zeros(size, np.float32))
        for step in range(1, STEPS + 1):
            gradients = draw(pool, size, rng)
            tensor = pool.tensor(gradients)
            pool.all_reduce(tensor)
            checked += compare(tensor, reduced(pool, gradients))
            more = {"step": step} if optimizer == "adamw" else {}
            more |= {"first": step == 1} if optimizer == "sgd" else {}
            runs = start(pool, optimizer, states, tensor, gradient_scale=0.5, **hyper, **more)
            for run in runs:
                run.wait()
                assert run.committed == size
            tensor.free()
        return [{name: each[name].read() for name in each} for each in states], checked


@pytest.mark.parametrize(
    "options",
    [{"fu": "rtl"}, {"fu": "native", "memory": "ideal", "stall": 0.2, "seed": 3}],
    ids=["rtl", "stalls"],
)
@pytest.mark.parametrize(
    ("optimizer", "devices"),
    [
        ("adamw", "small"),
        ("sgd", "small"),
        *(pytest.param(each, "all", marks=pytest.mark.deep) for each in OPTIMIZERS),
    ],
)
def test_rtl_and_golden_have_the_same_bits_after_ring_sums(optimizer, devices, options) -> None:
    checks = 0
    for size in SIZES if options["fu"] == "native" else SIZES[:1]:
        (golden, sums), (rtl, same_sums) = (
            trained("golden", optimizer, size, devices),
            trained("sim", optimizer, size, devices, **options),
        )
        assert sums == same_sums == 2 * STEPS * size
        assert len(golden) == len(rtl) == 2
        for device, (expected, found) in enumerate(zip(golden, rtl, strict=True)):
            for name in expected:
                where = f"{name} of device {device}"
                np.testing.assert_array_equal(
                    found[name].view("u4"), expected[name].view("u4"), err_msg=where
                )
                np.testing.assert_array_equal(  # replicas stay alike
                    found[name].view("u4"), golden[0][name].view("u4"), err_msg=where
                )
                checks += size
        assert not np.array_equal(golden[0]["m"], np.zeros(size, np.float32))
    arrays = len(OPTIMIZERS[optimizer][0]) - 1
    assert checks == 2 * arrays * sum(SIZES if options["fu"] == "native" else SIZES[:1])


@pytest.mark.parametrize("kind", ["golden", "sim"])
def test_a_snapshot_keeps_its_version_while_the_kernels_write(kind) -> None:
    size, rng, checks = 3000, random(6), 0
    with opened(kind, **({"fu": "native"} if kind == "sim" else {})) as pool:
        values = {name: pool.tensor(draw(pool, size, rng)) for name in "pmg"}
        before = {
            name: [each.read(d) for d in range(pool.devices)] for name, each in values.items()
        }
        states = [
            {name: values[name].front(device) for name in "pm"} for device in range(pool.devices)
        ]
        with pool.freeze([values["p"], values["m"]]) as frozen:
            for run in start(pool, "sgd", states, values["g"], lr=0.1, momentum=0.9):
                run.wait()
            for number, name in enumerate("pm"):
                for device in range(pool.devices):
                    now = values[name].read(device)
                    assert (now != before[name][device]).mean() > 0.9
                    np.testing.assert_array_equal(
                        frozen.read(number, device).view("u4"), before[name][device].view("u4")
                    )
                    checks += size
            copied = [each.pages_copied for each in pool.counters().devices]
        assert all(6 <= each <= 8 for each in copied), copied
    assert checks == 2 * 2 * size


@pytest.mark.parametrize("kind", ["golden", "sim"])
def test_rings_sum_while_the_kernels_update_and_buffers_in_use_are_refused(kind) -> None:
    size, rng, checks = 4096, random(7), 0
    with opened(kind, **({"fu": "native"} if kind == "sim" else {})) as pool:
        gradients = draw(pool, size, rng)
        g, other = pool.tensor(gradients), pool.tensor(gradients)
        p = [pool.device.alloc(size, channel=device) for device in range(pool.devices)]
        m = [pool.device.alloc(size, channel=device) for device in range(pool.devices)]
        for each in (*p, *m):
            each.fill(1.0)
        states = [{"p": p[device], "m": m[device]} for device in range(pool.devices)]
        runs = start(pool, "sgd", states, g, lr=0.5, momentum=0.5)
        event = pool.submit(other)
        if kind == "sim":  # nothing of golden takes time
            with pytest.raises(BusyError, match="which uses it as p"):
                p[0].write(np.zeros(size, np.float32))
            with pytest.raises(BusyError, match="has not ended"):
                start(pool, "sgd", states, g, lr=0.5, momentum=0.5)
        event.wait()
        for run in runs:
            run.wait()
        checks += compare(other, reduced(pool, gradients))
        for device in range(pool.devices):
            updated = np.float32(0.5) + gradients[device]
            np.testing.assert_array_equal(m[device].read(), updated)
            checks += size
    assert checks == 4 * size


@pytest.mark.parametrize("kind", ["golden", "sim"])
def test_a_fault_of_memory_ends_the_run_of_that_device_alone(kind) -> None:
    with opened(kind, **({"fu": "native"} if kind == "sim" else {})) as pool:
        g = pool.tensor(draw(pool, 64, random(8)))
        m, p = pool.tensor(64), pool.tensor(64)
        states = [{"p": p.front(device), "m": m.front(device)} for device in range(pool.devices)]
        bad = states[1]["p"].address
        pool.device.backend.inject(
            Injection(kind="slverr", write=False, base=bad, limit=bad + 64, times=1)
        )
        one, two = start(pool, "sgd", states, g, lr=1.0, momentum=0.9)
        one.wait()
        with pytest.raises(KernelError) as caught:
            two.wait()
        assert caught.value.address == bad
        pool.device.backend.heal()
        again = pool.device.update("sgd", {**states[1], "g": g.front(1)}, lr=1.0, momentum=0.9)
        assert again.wait().committed == 64
        np.testing.assert_array_equal(states[0]["p"].read(), -g.read(0))
        np.testing.assert_array_equal(states[1]["p"].read(), -g.read(1))


@pytest.mark.parametrize("kind", ["golden", "sim"])
def test_every_cause_of_a_kernel_is_shown(kind) -> None:
    size = 4096
    with opened(kind, **({"fu": "native"} if kind == "sim" else {})) as pool:
        backend, kernel = pool.device.backend, pool.device.nodes[0].updater
        g, m, p = (pool.tensor(size).front(0) for _ in "gmp")
        start_at = {"g_address": g.address, "m_address": m.address, "p_address": p.address}

        def ended(abort: bool = False, granted: bool = True, **changes: Any) -> ErrorCause:
            for name, value in {**start_at, "count": size, "rule": 1, **changes}.items():
                kernel[name].value = value
            kernel.formats.set(gradient=3 if changes.get("rule") == 7 else 0, copy_out=0)
            kernel.window0_limit.value = 1 << 20
            kernel.window0_permissions.bits = 0b111 * granted
            kernel.start.go = 1
            if abort:
                kernel.control.abort = 1
            backend.wait([kernel.status.poll(busy=0)], 50_000)
            return ErrorCause(kernel.error.cause)

        shown = [
            ended(),
            ended(rule=7),
            ended(p_address=p.address + 4),
            ended(p_address=1 << 40),
            ended(m_address=p.address),
            ended(granted=False),
        ]
        for write in (False, True):
            backend.inject(
                Injection(kind="slverr", write=write, base=p.address, limit=p.address + 1)
            )
            shown.append(ended())
            backend.heal()
        if kind == "sim":  # nothing of golden takes time
            shown.append(ended(abort=True))
        names = ["NONE", "UNSUPPORTED", "ALIGNMENT", "ADDRESS_RANGE", "OVERLAP", "WINDOW"]
        names += ["READ_RESPONSE", "WRITE_RESPONSE", "ABORTED"]
        assert [each.name for each in shown] == names[: len(shown)]
        assert ended() == ErrorCause.NONE


def test_devices_without_rules_have_no_kernel() -> None:
    with CoarsePool.open(f"golden:coarse?{SMALL_TWO}&{SMALL_MEMORY}") as pool:
        tensor = pool.tensor(64)
        with pytest.raises(ArgumentError, match="open it with rules=adam"):
            pool.device.update("adamw", {"p": tensor.front(0), "g": tensor.front(1)}, step=1)
