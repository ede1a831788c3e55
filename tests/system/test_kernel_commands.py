"""Whatever the registers ask for, the RTL of the kernel does as the golden device does.

Runs are drawn at random, good ones and bad ones, and programmed into both devices register by
register; then registers and all of memory are compared.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

import nearstep
from nearstep.registers import BlockRegisters
from nearstep.updater.device import KernelDevice
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import (
    Compression,
    CopyOutFormat,
    ErrorCause,
    GradientFormat,
    RunKind,
)

from ..host.driver.conftest import SIM_CARD_SHAPE

SMALL = {
    "fused": "lanes=2&block_bytes=64&compression=fused",
    "scatter": ("lanes=4&block_bytes=256&compression=scatter&copy_out_formats=bf16"),
    "scan": "lanes=8&functional_units=2&block_bytes=256&scan=yes",
}
EVERYTHING_AT_ONCE = "everything"
"""The kernel of a card. What it does not show is left to the deep tests."""

NAMES = {
    EVERYTHING_AT_ONCE: f"smartssd?{SIM_CARD_SHAPE}",
    **{name: f"axdimm?memory_bytes=64KiB&{options}" for name, options in SMALL.items()},
}
MEMORY_BYTES = 1 << 16
"""Of those of the device, as many are compared."""

ODD_VALUES = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 1, 0x80000001, 0x7F7FFFFF])


@dataclass(frozen=True)
class Devices:
    """The same kernel behind a numpy model, and in RTL behind good and bad memories."""

    config: UpdateKernelConfig
    golden: KernelDevice
    sims: dict[str, KernelDevice]

    @property
    def every(self) -> list[KernelDevice]:
        return [self.golden, *self.sims.values()]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name == EVERYTHING_AT_ONCE else [pytest.mark.deep])
        for name in NAMES
    ],
)
def devices(request):
    name = NAMES[request.param]
    with ExitStack() as stack:

        def opened(url: str) -> KernelDevice:
            device = nearstep.open(url)
            stack.callback(device.close)
            assert isinstance(device, KernelDevice)
            return device

        golden = opened(f"golden:{name}&engine=numpy")
        sims = {
            "ideal": opened(f"sim:{name}&memory=ideal"),
            "stalled": opened(f"sim:{name}&memory=halfduplex&stall=0.4&seed=3"),
        }
        yield Devices(golden.config, golden, sims)


class Draw:
    """A run, drawn at random; most are good."""

    def __init__(self, config: UpdateKernelConfig, rng: np.random.Generator) -> None:
        self.config, self.rng = config, rng
        lanes = config.lanes
        self.count = int(rng.choice([0, 1, lanes, rng.integers(1, 9 * config.block_elements)]))
        self.rule = int(rng.integers(len(config.rules)))
        self.form = GradientFormat[str(rng.choice(config.gradient_formats)).upper()]
        self.operation = RunKind.SCAN if config.scan and rng.random() < 0.3 else RunKind.UPDATE
        if self.operation is RunKind.SCAN and self._chance(0.3):
            self.rule = 77  # a scan has no rule
        self.compression = Compression.NONE
        self.copy_out = CopyOutFormat.NONE
        if self.operation is RunKind.UPDATE:
            if config.compression and rng.random() < 0.8:
                self.compression = Compression[str(rng.choice(config.compression)).upper()]
            if config.copy_out_formats and rng.random() < 0.5:
                self.copy_out = CopyOutFormat[str(rng.choice(config.copy_out_formats)).upper()]
        self.index = self._indices()
        self._place()

    def _chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def _indices(self) -> np.ndarray:
        rng, count = self.rng, self.count
        if self.compression is Compression.NONE or not count:
            return np.zeros(0, np.uint32)
        total = int(rng.choice([0, 1, count, rng.integers(0, count + 1), 2 * count]))
        index = np.sort(rng.integers(0, count, total))
        if self.compression is Compression.SCATTER:
            index = index[np.lexsort((rng.random(total), index // self.config.block_elements))]
        if total and self._chance(0.4):
            index[rng.integers(total)] = rng.choice([count, 0, count // 2, 2**32 - 1])
        return index.astype(np.uint32)

    def _place(self) -> None:
        """Arrays in memory, apart from each other, with a window each; now and then not."""
        config, rng = self.config, self.rng
        beat = config.beat_bytes
        names = [*config.arrays]
        names += ["index"] if config.compression else []
        names += ["copy_out"] if self.copy_out is not CopyOutFormat.NONE else []
        paired = self.compression is not Compression.NONE
        half = self.form is not GradientFormat.FP32
        sizes = dict.fromkeys(names, 4 * self.count)
        sizes["g"] = (len(self.index) if paired else self.count) * (2 if half else 4)
        sizes["index"] = 4 * len(self.index)
        sizes["copy_out"] = 2 * self.count
        rng.shuffle(names)
        at = 0
        self.address: dict[str, int] = {}
        for name in names:
            at += int(rng.integers(0, 4)) * beat
            self.address[name] = at
            at += -(-max(sizes[name], 1) // beat) * beat
        assert at <= MEMORY_BYTES
        self.sizes = sizes
        windows = []
        for name in names[: config.windows]:
            first = self.address[name]
            limit = first + -(-sizes[name] // beat) * beat
            writes = name not in ("g", "index")
            windows.append([first, limit, int(name != "copy_out"), int(writes)])
        if self._chance(0.15):
            self._spoil(names, windows)
        self.windows = windows

    def _spoil(self, names: list[str], windows: list[list[int]]) -> None:
        rng, name = self.rng, str(self.rng.choice(names))
        kind = rng.integers(4)
        if kind == 0:
            self.address[name] += int(rng.integers(1, self.config.beat_bytes))
        elif kind == 1:
            self.address[name] = (1 << self.config.address_width) - self.config.beat_bytes
        elif kind == 2:
            self.address[name] = self.address[str(rng.choice(names))]
        else:
            windows[int(rng.integers(len(windows)))][int(rng.integers(1, 4))] = 0

    def fill(self, devices: list[KernelDevice]) -> None:
        """Write the arrays; values with a few odd ones among them."""
        rng = self.rng
        for name, size in self.sizes.items():
            if name not in self.address:
                continue
            words = rng.normal(size=-(-size // 4)).astype(np.float32).view(np.uint32)
            if name in ("v", "m") and words.size:
                words &= 0x7FFFFFFF
            odd = rng.random(words.size) < 0.05
            words[odd] = rng.choice(ODD_VALUES, int(odd.sum()))
            if name == "g" and self.form is not GradientFormat.FP32:
                words = rng.integers(0, 1 << 32, words.size, dtype=np.uint64).astype(np.uint32)
            if name == "index":
                words = self.index
            data = words.view(np.uint8)[:size]
            for device in devices:
                if self.address[name] + size <= MEMORY_BYTES:
                    device.backend.write_memory(self.address[name], np.ascontiguousarray(data))

    def program(self, kernel: BlockRegisters) -> None:
        """Everything but START."""
        config, rng = self.config, np.random.default_rng(self.count)
        kernel.control.abort = 1
        for name, address in self.address.items():
            kernel[f"{name}_address"].value = address
        if "copy_out" not in self.address:
            kernel["copy_out_address"].value = 0
        kernel.count.value = self.count
        if len(config.rules) > 1:
            kernel.rule.value = self.rule
        kernel.formats.set(gradient=int(self.form), copy_out=int(self.copy_out))
        if config.gradient_scale:
            kernel.gradient_scale.value = float(rng.choice([1.0, 0.125, 3.0]))
        if config.scan:
            kernel.operation.set(kind=int(self.operation))
        if config.compression:
            kernel.compression.set(form=int(self.compression))
            kernel.pairs.value = len(self.index)
        for name in config.rule_set.whole.scalars:
            if name != "gradient_scale":
                kernel[name].value = float(rng.random())
        kernel.mode.set(**{name: int(rng.integers(2)) for name in config.rule_set.switches})
        for k in range(config.windows):
            base, limit, read, write = self.windows[k] if k < len(self.windows) else (0, 0, 0, 0)
            kernel[f"window{k}_base"].value = base
            kernel[f"window{k}_limit"].value = limit
            kernel[f"window{k}_permissions"].set(read=read, write=write, valid=1)


def kernel_of(device: KernelDevice) -> BlockRegisters:
    return device.channels[0].kernel


def outcome(device: KernelDevice, config: UpdateKernelConfig) -> dict[str, int]:
    """Registers that both kinds of device have to agree on."""
    kernel = kernel_of(device)
    names = ["duplicates"] if config.compression else []
    if not kernel.status.error:
        names += ["committed", "read_beats", "write_beats"]
    result = {
        "error": kernel.status.error,
        "done": kernel.status.done,
        "cause": kernel.error.cause,
        "stream": kernel.error.stream,
        "address": kernel.error_address.value,
        **{name: kernel[name].value for name in names},
    }
    if config.scan:
        result |= {"found_inf": kernel.scan.found_inf, "sum": kernel.sum_of_squares.value}
    return result


def memory(device: KernelDevice) -> np.ndarray:
    data = np.zeros(MEMORY_BYTES, np.uint8)
    device.backend.read_memory(0, data)
    return data


def agree(devices, runs: int, seed: int) -> Counter:
    """Draw runs and compare; counts what they were and how they ended."""
    config, golden = devices.config, devices.golden
    rng = np.random.default_rng(seed)
    seen: Counter = Counter()
    for _ in range(runs):
        draw = Draw(config, rng)
        draw.fill(devices.every)
        for device in devices.every:
            kernel = kernel_of(device)
            draw.program(kernel)
            kernel.start.go = 1
            device.backend.wait([kernel.status.poll(busy=0)], 200_000)
        expected, expected_memory = outcome(golden, config), memory(golden)
        for name, device in devices.sims.items():
            context = f"{name}, seed {seed}: {vars(draw)}"
            assert outcome(device, config) == expected, context
            differs = np.flatnonzero(memory(device) != expected_memory)
            assert not differs.size, f"{differs[:8]} {context}"
        kind = draw.operation if draw.operation is RunKind.SCAN else draw.compression
        seen[kind.name, ErrorCause(expected["cause"]).name] += 1
        if draw.copy_out is not CopyOutFormat.NONE and expected["done"]:
            seen["copied"] += 1
    print(f"seed {seed}: {dict(seen)}")
    return seen


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))]
)
def test_random_commands_end_as_on_the_golden_device(devices, seed) -> None:
    seen = agree(devices, 60, seed)
    config = devices.config
    assert sum(count for key, count in seen.items() if key != "copied") == 60
    if config.compression:
        forms = {name.upper() for name in config.compression}
        assert {form for form, cause in (k for k in seen if k != "copied") if cause == "NONE"} >= (
            forms
        )
        assert any(key[1].startswith("PAIR_") for key in seen if key != "copied")


@pytest.mark.deep
def test_many_random_commands_end_as_on_the_golden_device(devices) -> None:
    assert sum(agree(devices, 1500, 77).values()) >= 1500
