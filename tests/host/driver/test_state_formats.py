"""Rules whose states have 16 bits in memory, through the driver, on every emulated device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

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
from nearstep_spec.rule.rules import optimizer_named
from nearstep_spec.updater.registers import GradientFormat

from .conftest import chosen
from .job import Job, accelerated

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
FAST = {"golden-numpy-mv", "golden-numpy-pmv", "golden-cpp-pmv", "golden-dimm-pmv"}
IN_DEPTH = set(URLS) - FAST
COUNTS = (1, 3, 8, 127, 128, 129, 255, 256, 257, 1001, 5003)


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with nearstep.open(URLS[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


def narrow_states(device: KernelDevice) -> str:
    return "".join(device.config.rule_set.whole.formats)


def make(device: KernelDevice, count: int, seed: int, gradient: str | None = None) -> Job:
    """A job whose own step is the optimizer's."""
    name = device.config.rule_set.names[0]
    return Job(device, count, seed, gradient=gradient, optimizer=name)


@pytest.mark.parametrize("gradient", ["fp32", "bf16"])
def test_a_step_is_that_of_the_widened_arrays_rounded_once(device, gradient):
    checked = 0
    for count in COUNTS:
        work = make(device, count, seed=count, gradient=gradient)
        run = work.run(gradient_format=gradient)
        checked += work.check()
        narrow = len(narrow_states(device)) + (gradient == "bf16")
        lanes = device.config.lanes
        beats = (4 - narrow) * -(-count // lanes) + narrow * -(-count // (2 * lanes))
        assert run.counters["read_beats"] == beats
        work.free()
    assert checked == 3 * sum(COUNTS)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_a_copy_is_of_the_binary32_results(device, form):
    for count in (1, 129, 1001):
        work = make(device, count, seed=count)
        work.run(copy_out=work.copy(form), copy_out_format=form)
        assert work.check() == 4 * count


def test_special_values_of_a_state_are_widened_and_rounded_as_any_other(device):
    """Infinities, NaN, zeros, subnormal numbers, and a result that overflows when it is rounded."""
    patterns = np.array(
        [0x0000, 0x8000, 0x0001, 0x807F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x0080], np.uint16
    )
    work = make(device, patterns.size**2, seed=1)
    for name, values in (("m", np.repeat(patterns, patterns.size)),
                         ("v", np.tile(patterns & 0x7FFF, patterns.size))):  # fmt: skip
        work.before[name] = values
        work.buffers[name].write(values)
    work.run()
    assert work.check() == 3 * patterns.size**2


def test_buffers_of_another_dtype_are_refused_before_anything_is_touched(device):
    work = make(device, 100, seed=2)
    for name in narrow_states(device):
        kept = work.buffers[name]
        for dtype in (np.float32, np.float16):
            work.buffers[name] = device.alloc(100, dtype)
            expected = f"{name}: dtype must be uint16 that holds bfloat16, not {np.dtype(dtype)}"
            with pytest.raises(DtypeError, match=expected):
                work.run()
            work.buffers[name].free()
        work.buffers[name] = kept
    work.run()
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
            work = make(device, 5003, seed=4)
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
            whole = caught.value.committed
            assert whole < 5003
            assert work.check(0, whole) == 3 * whole
            work.free()
            again = make(device, 1001, seed=5)
            again.run()
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
