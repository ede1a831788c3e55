"""Rules whose states have 16 bits in memory, through the driver, on every emulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    ArgumentError,
    BusResponseError,
    DtypeError,
    OptionError,
)
from nearstep.updater.device import KernelDevice
from nearstep_sim.golden import fp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16, FP16
from nearstep_spec.rule.adam import ADAM, adam_scalars
from nearstep_spec.rule.rules import optimizer_named
from nearstep_spec.updater.registers import GradientFormat

from .conftest import chosen

FILE = Path(__file__).resolve().parents[3] / "examples" / "adam_bf16.py"
NAMES = {"mv": f"{FILE}:ADAM_BF16", "pmv": f"{FILE}:ADAM_ALL_BF16"}
"""Optimizer by the states that have 16 bits."""

REST = "gradient_formats=fp32,bf16&copy_out_formats=fp16,bf16"
SHAPE = "lanes=4&block_bytes=512&memory_bytes=1MiB"
DEVICES = {
    "golden-numpy": f"golden:axdimm?{SHAPE}&engine=numpy",
    "golden-cpp": f"golden:axdimm?{SHAPE}",
    "golden-dimm": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB",
    "golden-card": "golden:smartssd?lanes=4&chunk_bytes=512&memory_bytes=1MiB",
    "sim-ideal": "sim:axdimm?lanes=1&block_bytes=512&memory_bytes=1MiB",
    "sim-stalled": f"sim:axdimm?{SHAPE}&memory=halfduplex&stall=0.3&seed=7",
    "sim-dimm": "sim:axdimm?memory=ddr4-1600&block_bytes=512&functional_units=4&fu=native",
    "sim-card": "sim:smartssd?lanes=4&chunk_bytes=512&memory_bytes=1MiB&fu=native&stall=0.2",
}
URLS = {
    f"{name}-{states}": f"{device}&{REST}&rules={NAMES[states]}"
    for name, device in DEVICES.items()
    for states in NAMES
}
FAST = {"golden-numpy-mv", "golden-numpy-pmv", "golden-cpp-pmv", "golden-dimm-pmv", "sim-ideal-pmv"}
IN_DEPTH = set(URLS) - FAST
COUNTS = (1, 3, 8, 127, 128, 129, 255, 256, 257, 1001, 5003)
HYPER = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
STEP = 3
SCALARS = adam_scalars(*HYPER.values(), STEP, True)
FORMATS = {"bf16": BF16, "fp16": FP16}


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


def accelerated(device: KernelDevice) -> object:
    return device.acceleration() if device.channels[0].has_modes else nullcontext()


def narrow_states(device: KernelDevice) -> str:
    return "".join(device.config.rule_set.whole.formats)


def wide(array: NDArray) -> NDArray[np.float32]:
    return fp.widen32(array, BF16) if array.dtype == np.uint16 else array


class Work:
    """Arrays of one run, on the device and here."""

    def __init__(self, device: KernelDevice, count: int, seed: int, gradient: str = "fp32") -> None:
        rng = np.random.default_rng(seed)
        self.device, self.gradient = device, gradient
        self.narrow = narrow_states(device) + ("g" if gradient == "bf16" else "")
        self.before: dict[str, NDArray] = {}
        for name in "pgmv":
            values = rng.standard_normal(count) * 2.0 ** rng.integers(-20, 3, count)
            values = np.abs(values) if name == "v" else values
            self.before[name] = self.stored(name, values.astype(np.float32))
        self.buffers = {n: device.alloc(count, a.dtype) for n, a in self.before.items()}
        for name, values in self.before.items():
            self.buffers[name].write(values)

    def stored(self, name: str, values: NDArray[np.float32]) -> NDArray:
        return fp.narrow32(values, BF16) if name in self.narrow else values

    def start(self, **options: object):
        name = self.device.config.rule_set.names[0]
        return self.device.update(
            name, self.buffers, step=STEP, gradient_format=self.gradient, **HYPER, **options
        )

    def expected(self) -> dict[str, NDArray]:
        made = evaluate(ADAM, {n: wide(a) for n, a in self.before.items()}, SCALARS)
        return {name: self.stored(name, made[name]) for name in "pmv"}

    def check(self) -> int:
        expected = self.expected()
        for name, values in expected.items():
            assert self.buffers[name].read().tobytes() == values.tobytes(), name
        assert self.buffers["g"].read().tobytes() == self.before["g"].tobytes()
        return sum(values.size for values in expected.values())

    def free(self) -> None:
        for buffer in self.buffers.values():
            buffer.free()


@pytest.mark.parametrize("gradient", ["fp32", "bf16"])
def test_a_step_is_that_of_the_widened_arrays_rounded_once(device, gradient):
    checked = 0
    for count in COUNTS:
        work = Work(device, count, seed=count, gradient=gradient)
        with accelerated(device):
            run = work.start().wait()
        checked += work.check()
        wide_arrays = 4 - len(work.narrow)
        lanes = device.config.lanes
        beats = wide_arrays * -(-count // lanes) + len(work.narrow) * -(-count // (2 * lanes))
        assert run.counters["read_beats"] == beats
        work.free()
    assert checked == 3 * sum(COUNTS)


@pytest.mark.parametrize("form", FORMATS)
def test_a_copy_is_of_the_binary32_results(device, form):
    for count in (1, 129, 1001):
        work = Work(device, count, seed=count)
        copy = device.alloc(count, np.uint16 if form == "bf16" else np.float16)
        with accelerated(device):
            work.start(copy_out=copy, copy_out_format=form).wait()
        assert work.check() == 3 * count
        made = evaluate(ADAM, {n: wide(a) for n, a in work.before.items()}, SCALARS)["p"]
        assert copy.read().tobytes() == fp.narrow32(made, FORMATS[form]).tobytes()


def test_special_values_of_a_state_are_widened_and_rounded_as_any_other(device):
    """Infinities, NaN, zeros, subnormal numbers, and a result that overflows when it is rounded."""
    patterns = np.array(
        [0x0000, 0x8000, 0x0001, 0x807F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x0080], np.uint16
    )
    work = Work(device, patterns.size**2, seed=1)
    for name, values in (("m", np.repeat(patterns, patterns.size)),
                         ("v", np.tile(patterns & 0x7FFF, patterns.size))):  # fmt: skip
        work.before[name] = values
        work.buffers[name].write(values)
    with accelerated(device):
        work.start().wait()
    assert work.check() == 3 * patterns.size**2


def test_buffers_of_another_dtype_are_refused_before_anything_is_touched(device):
    work = Work(device, 100, seed=2)
    for name in narrow_states(device):
        kept = work.buffers[name]
        for dtype in (np.float32, np.float16):
            work.buffers[name] = device.alloc(100, dtype)
            expected = f"{name}: dtype must be uint16 that holds bfloat16, not {np.dtype(dtype)}"
            with accelerated(device), pytest.raises(DtypeError, match=expected):
                work.start()
            work.buffers[name].free()
        work.buffers[name] = kept
    with accelerated(device):
        work.start().wait()
    assert work.check() == 300


def test_the_device_says_which_format_a_state_has(device):
    kernel = device.channels[0].kernel
    formats = device.config.rule_set.whole.formats
    for name in "pmv":
        expected = GradientFormat[formats.get(name, "fp32").upper()]
        assert getattr(kernel.state_formats, name) == expected


@pytest.mark.parametrize("name", chosen(URLS, IN_DEPTH))
def test_after_a_fault_or_an_abort_what_is_committed_is_whole(name):
    with nearstep.open(URLS[name]) as device:
        silent = name.startswith("sim-dimm")  # a DDR4 channel answers no write
        for fault in ("abort",) if silent else ("error", "abort"):
            work = Work(device, 5003, seed=4)
            begin = work.buffers["v"].address
            if fault == "error":
                device.backend.inject(
                    Injection(kind="slverr", write=True, base=begin + 4000, limit=begin + 4002)
                )
            with accelerated(device):
                run = work.start()
                if fault == "abort":
                    run.abort()
                    with pytest.raises(AbortedError) as caught:
                        run.wait()
                else:
                    with pytest.raises(BusResponseError) as caught:
                        run.wait()
            whole, expected = caught.value.committed, work.expected()
            assert whole < 5003
            for state, values in expected.items():
                found = work.buffers[state].read()
                assert found[:whole].tobytes() == values[:whole].tobytes()
            work.free()
            again = Work(device, 1001, seed=5)
            with accelerated(device):
                again.start().wait()
            assert again.check() == 3003
            again.free()


def test_rules_of_one_kernel_agree_on_the_format_of_a_state():
    url = f"golden:axdimm?{SHAPE}&rules=adam,{NAMES['mv']}"
    with pytest.raises(OptionError, match="State 'm' is bf16 here, and fp32 in another rule"):
        nearstep.open(url)


def test_another_format_is_another_rule(tmp_path):
    other = tmp_path / "adam_bf16.py"
    other.write_text(FILE.read_text().replace('"v": "bf16"', '"v": "fp16"'))
    with nearstep.open(f"golden:axdimm?{SHAPE}&rules={NAMES['mv']}") as device:
        arrays = {n: device.alloc(4, np.uint16 if n in "mv" else np.float32) for n in "pgmv"}
        with pytest.raises(ArgumentError, match="computes something else in the kernel"):
            device.update(optimizer_named(f"{other}:ADAM_BF16"), arrays, step=1)
