"""Pools of COARSE devices against numpy alone, through random commands: all bits of all devices."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nearstep.coarse import CoarsePool
from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY

from . import memory_devices
from .memory_devices import FORMATS, NAN, MemoryDevices, numbers, patterns, rounded

SPECIAL = np.array(
    [
        *(0x0000_0000, 0x8000_0000, 0x0000_0001, 0x8000_0001, 0x007F_FFFF, 0x0080_0000),
        *(0x7F7F_FFFF, 0xFF7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0xFFC0_0001),
        *(0x7F80_0001, 0x477F_E000, 0x477F_F000, 0x3F80_0000, 0x3F80_8000, 0x3380_0000),
    ],
    np.uint32,
)
"""Zeros, subnormals, the greatest, infinities, NaN quiet and signalling; ends of binary16; ties."""

POOLS = {
    "four": f"{SMALL}&{SMALL_MEMORY}",
    "three, one ring": "devices=3&groups=1&entry_phits=4&memory_bytes=256KiB&snapshot_pages=64",
    "two, four rings": "devices=2&groups=4&entry_phits=4&memory_bytes=256KiB&snapshot_pages=64",
    "five": "devices=5&memory_bytes=1MiB&snapshot_pages=256",
}


def draw(rng: np.random.Generator, size: int) -> np.ndarray:
    """Any patterns, numbers near one another, and specials."""
    kind = rng.integers(3)
    if kind == 0:
        bits = rng.integers(0, 1 << 32, size, np.uint64).astype(np.uint32)
    else:
        spread = 1.0 if kind == 1 else np.exp2(rng.integers(-30, 30, size))
        bits = (rng.standard_normal(size) * spread).astype(np.float32).view(np.uint32)
    where = rng.random(size) < 0.1
    bits[where] = rng.choice(SPECIAL, size)[where]
    return bits


class Pair:
    """A pool and the oracle, which get the same commands."""

    def __init__(self, pool: CoarsePool, seed: int) -> None:
        print(f"seed {seed}")
        self.pool = pool
        self.random = np.random.default_rng(seed)
        config = pool.device.config
        self.oracle = MemoryDevices(pool.devices, pool.groups, config.entry_bytes)
        self.made: Counter[str] = Counter()
        self.compared = 0
        self.tensors = {}
        entry = config.entry_bytes // 4
        for number, size in enumerate(
            (
                int(self.random.integers(1, 40)),
                3 * entry + 5,
                int(self.random.integers(1, 9 * entry)),
            )
        ):
            name = f"tensor {number}"
            self.tensors[name] = pool.tensor(size)
            for device in range(pool.devices):
                self.write(name, device)

    def write(self, name: str, device: int) -> None:
        bits = draw(self.random, self.tensors[name].size)
        self.tensors[name].write(device, bits.view(np.float32))
        self.oracle.write(name, device, bits)

    def reduce(self) -> None:
        name = str(self.random.choice(list(self.tensors)))
        operation = str(self.random.choice(["sum", "average", "max"]))
        wire = str(self.random.choice(list(FORMATS)))
        group = int(self.random.integers(-1, self.pool.groups))
        ring = None if group < 0 else group
        self.pool.all_reduce(self.tensors[name], operation, wire, group=ring)
        self.oracle.all_reduce(name, operation, wire, ring)
        self.made.update([operation, wire, "all rings" if ring is None else f"ring {ring}"])
        self.compare(name)

    def compare(self, name: str) -> None:
        for device, want in enumerate(self.oracle.values[name]):
            got = self.tensors[name].read(device).view(np.uint32)
            np.testing.assert_array_equal(got, want, err_msg=f"{name} of device {device}")
            self.compared += want.size

    def snapshot(self, commands: int) -> None:
        """Frozen, changed by some commands, read, and perhaps brought back."""
        names = list(self.tensors)
        self.oracle.freeze()
        with self.pool.freeze([self.tensors[name] for name in names]) as frozen:
            for _ in range(commands):
                self.reduce()
                self.write(
                    str(self.random.choice(names)), int(self.random.integers(self.pool.devices))
                )
            for number, name in enumerate(names):
                for device, want in enumerate(self.oracle.frozen[name]):
                    got = frozen.read(number, device).view(np.uint32)
                    np.testing.assert_array_equal(got, want, err_msg=f"{name} of {device}, frozen")
                    self.compared += want.size
                    self.tensors[name].write(device, got.view(np.float32))
        self.oracle.restore()
        self.made["snapshot"] += 1

    def interrupt(self) -> None:
        """A job that a reset ends leaves the old values."""
        name = str(self.random.choice(list(self.tensors)))
        event = self.pool.submit(self.tensors[name])
        self.pool.reset()
        if event.done:
            self.oracle.all_reduce(name, "sum", "fp32")
        self.made["reset"] += 1
        self.compare(name)

    def run(self, commands: int) -> None:
        for _ in range(commands):
            kind = self.random.integers(8)
            if kind == 0:
                self.snapshot(2)
            elif kind == 1:
                self.interrupt()
            elif kind == 2:
                name = str(self.random.choice(list(self.tensors)))
                self.write(name, int(self.random.integers(self.pool.devices)))
            else:
                self.reduce()


def met(url: str, seed: int, commands: int) -> Counter[str]:
    with CoarsePool.open(url) as pool:
        pair = Pair(pool, seed)
        pair.run(commands)
        for name in pair.tensors:
            pair.compare(name)
        print(f"{url}: {dict(pair.made)}, {pair.compared} values")
        assert pair.compared > 50 * commands  # tensors may be small
        return pair.made


@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_golden_devices_have_the_bits_of_numpy_alone(options) -> None:
    made = met(f"golden:coarse?{options}", 190, 60)
    assert all(made[kind] for kind in (*FORMATS, "sum", "average", "max", "all rings", "ring 0"))
    assert made["snapshot"]
    assert made["reset"]


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_golden_devices_have_the_bits_of_numpy_alone_for_long(options, seed) -> None:
    assert met(f"golden:coarse?{options}", seed, 400)["snapshot"] > 20


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2))
def test_the_rtl_has_the_bits_of_numpy_alone(seed) -> None:
    made = met(f"sim:coarse?{POOLS['four']}&link_latency=10", seed, 150)
    assert all(made[kind] for kind in (*FORMATS, "sum", "average", "max", "snapshot", "reset"))


@pytest.mark.parametrize("wire", FORMATS)
def test_a_wrong_bit_is_found(wire) -> None:
    with CoarsePool.open(f"golden:coarse?{POOLS['four']}") as pool:
        pair = Pair(pool, 3)
        name = next(iter(pair.tensors))
        pool.all_reduce(pair.tensors[name], "sum", wire)
        pair.oracle.all_reduce(name, "sum", wire)
        pair.compare(name)
        pair.oracle.values[name][2][-1] ^= 1
        with pytest.raises(AssertionError, match=f"{name} of device 2"):
            pair.compare(name)


def test_the_order_of_a_ring_shows() -> None:
    """Otherwise the comparison would say nothing about it."""
    rng = np.random.default_rng(5)
    bits = [rng.standard_normal(3000).astype(np.float32).view(np.uint32) for _ in range(4)]
    found = []
    for ring in (0, 1):
        oracle = MemoryDevices(4, 2, 128)
        for device, each in enumerate(bits):
            oracle.write("x", device, each)
        oracle.all_reduce("x", "sum", "fp32", ring)
        found.append(oracle.values["x"][0])
    assert 100 < np.count_nonzero(found[0] != found[1]) < 3000


def test_rounding_is_that_of_the_host() -> None:
    """Of numpy's own types; all patterns of 16 bits, their ties, and any of 32 bits."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(over="ignore"):
        wide = halves.view(np.float16).astype(np.float32)
        ties = (
            wide.view(np.uint32)[:, None] + np.array([0, 0xFFF, 0x1000, 0x1001, 0x2000])
        ).ravel()
        ties = ties.astype(np.uint32)
        want = ties.view(np.float32).astype(np.float16).astype(np.float32)
    got = patterns(rounded(numbers(ties), FORMATS["fp16"])).view(np.float32)
    np.testing.assert_array_equal(got[~np.isnan(want)], want[~np.isnan(want)])
    assert np.isnan(got[np.isnan(want)]).all()
    rng = np.random.default_rng(6)
    any_bits = rng.integers(0, 1 << 32, 1 << 18, np.uint64).astype(np.uint32)
    nans = (any_bits & 0x7FFF_FFFF) > 0x7F80_0000
    np.testing.assert_array_equal(patterns(numbers(any_bits)), np.where(nans, NAN, any_bits))
    with np.errstate(all="ignore"):
        a, b = any_bits.view(np.float32).reshape(2, -1)
        for want, exact in ((a + b, numbers(a.view("u4")) + numbers(b.view("u4"))),
                            (a * b, numbers(a.view("u4")) * numbers(b.view("u4")))):  # fmt: skip
            got = patterns(rounded(exact, FORMATS["fp32"]))
            bits = np.where(np.isnan(want), NAN, want.view(np.uint32))
            np.testing.assert_array_equal(got, bits)


def test_the_oracle_uses_numpy_alone() -> None:
    tree = ast.parse(Path(memory_devices.__file__).read_text())
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names == {"__future__", "collections", "dataclasses", "numpy", "typing"}
    assert "float32" not in {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert "float16" not in {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
