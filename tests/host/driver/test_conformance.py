"""Every optimizer on every device: what is asked of a step is what the rule gives in numpy, bit for
bit, for any number of elements, any format of the gradients, any scale and any copy.

Optimizers, their rules, states, formats and hyper-parameters come from their data, devices from a
table: one more of either is one more row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import nearstep
from nearstep.updater.device import KernelDevice
from nearstep.updater.run import UpdateRun
from nearstep_sim.golden import fp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16, FP16
from nearstep_spec.rule.optimizer import Form, Optimizer
from nearstep_spec.rule.rules import OPTIMIZERS, optimizer_named
from nearstep_spec.updater.operands import element_bytes

from ..optimizers import FORMATS as EVERY_FORMAT
from ..optimizers import GROUPS, hyper_of
from .conftest import SIM_CARD_SHAPE, chosen
from .updates import FORMATS, accelerated, gradients, rounded, widened

SHAPE = "lanes=4&block_bytes=512&memory_bytes=1MiB"
DEVICES = {
    "golden-numpy": f"golden:axdimm?{SHAPE}&engine=numpy",
    "golden-cpp": f"golden:axdimm?{SHAPE}",
    "golden-dimm": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB",
    "golden-card": f"golden:smartssd?{SHAPE.replace('block', 'chunk')}",
    "sim-ideal": f"sim:axdimm?{SHAPE}&fu=native",
    "sim-stalled": f"sim:axdimm?{SHAPE}&memory=halfduplex&stall=0.3&seed=7",
    "sim-dimm": "sim:axdimm?memory=ddr4-1600&block_bytes=1024&functional_units=4&fu=native",
    "sim-card": f"sim:smartssd?{SHAPE.replace('block', 'chunk')}&fu=native&stall=0.2",
}
URLS = {
    f"{device}-{group}": (f"{url}&{EVERY_FORMAT}&rules={rules}", names)
    for device, url in DEVICES.items()
    for group, (rules, names) in GROUPS.items()
}
URLS["sim-card-as-it-is-shipped"] = (f"sim:smartssd?{SIM_CARD_SHAPE}", list(OPTIMIZERS))
IN_DEPTH = [name for name in URLS if name.startswith("sim") and "shipped" not in name]
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 257, 1001, 4099)
SCALES = (1.0, 2.0**-7, -0.3, 0.0)
SEED = 70


class Step:
    """Arrays of a rule on a device, and what they hold."""

    def __init__(self, device: KernelDevice, form: Form, count: int, gradient: str, seed: int):
        rng = np.random.default_rng(seed)
        self.device, self.form, self.gradient = device, form, gradient
        self.formats = dict.fromkeys(form.rule.arrays_in, "fp32") | dict(form.rule.formats)
        self.formats["g"] = gradient
        self.before: dict[str, NDArray] = {"g": gradients(rng, count, gradient)}
        for name in form.rule.states:
            values = (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 3, count)).astype("f4")
            self.before[name] = self.stored(name, values if name in "pm" else np.abs(values))
        self.buffers = {n: device.alloc(count, a.dtype) for n, a in self.before.items()}
        for name, values in self.before.items():
            self.buffers[name].write(values)

    def stored(self, name: str, values: NDArray[np.float32]) -> NDArray:
        """How numbers lie in memory."""
        form = self.formats[name]
        if form == "fp32":
            return values
        words = fp.narrow32(values, {"bf16": BF16, "fp16": FP16}[form])
        return words if form == "bf16" else words.view(np.float16)

    def run(self, optimizer: Optimizer, copy: str | None, scale: float, **hyper: object) -> int:
        """Make a step, with a copy in a format if there is one; the number of results compared."""
        count = self.before["p"].size
        out = None if copy is None else self.device.alloc(count, FORMATS[copy][1])
        with accelerated(self.device):
            run = self.device.update(
                optimizer,
                self.buffers,
                gradient_format=self.gradient,
                gradient_scale=scale,
                copy_out=out,
                copy_out_format=copy,
                **hyper,
            ).wait()
        step, first = hyper.pop("step"), hyper.pop("first")
        registers = self.form.registers(optimizer.defaults | hyper, step, first)
        given = {name: widened(array, self.formats[name]) for name, array in self.before.items()}
        given["g"] = fp.mul32(given["g"], np.full(count, scale, np.float32))
        made = evaluate(self.form.rule, given, registers)
        expected = self.before | {name: self.stored(name, each) for name, each in made.items()}
        compared = 0
        for name, buffer in self.buffers.items():
            what = f"{self.form.rule.name} {name} of {count}, {self.gradient}, {scale}, {hyper}"
            assert buffer.read().tobytes() == expected[name].tobytes(), what
            compared += count
        if out is not None:
            assert out.read().tobytes() == rounded(made["p"], copy)
            compared += count
            out.free()
        self.check_counters(run, copy)
        for buffer in self.buffers.values():
            buffer.free()
        return compared

    def check_counters(self, run: UpdateRun, copy: str | None) -> None:
        """The kernel read and wrote each array of the rule once, and no more."""
        config, count = self.device.config, self.before["p"].size
        names = self.form.rule.arrays_in

        def beats(form: str) -> int:
            return -(-count * element_bytes(form) // (config.lanes * element_bytes("fp32")))

        read = sum(beats(self.formats[name]) for name in names)
        written = sum(beats(self.formats[name]) for name in self.form.rule.states)
        written += beats(copy) if copy is not None else 0
        assert run.committed == count
        assert (run.counters["read_beats"], run.counters["write_beats"]) == (read, written)


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[KernelDevice, list[str]]]:
    url, names = URLS[request.param]
    with nearstep.open(url) as device:
        assert isinstance(device, KernelDevice)
        yield device, names


def test_a_step_is_that_of_the_rule(opened: tuple[KernelDevice, list[str]]) -> None:
    device, names = opened
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    compared = expected = 0
    tried: set[str] = set()
    for name in names:
        optimizer = optimizer_named(name)
        for rule, usual in optimizer.by_rule.items():
            if rule not in device.config.rule_set.names:
                continue
            form = usual.ordered(device.config.order)
            tried.add(rule)
            for number, count in enumerate(COUNTS):
                gradient = tuple(FORMATS)[number % 3]
                copies = (None, *device.config.copy_out_formats)
                copy = (
                    copies[int(rng.integers(len(copies)))] if "p" not in form.rule.formats else None
                )
                scale = SCALES[int(rng.integers(len(SCALES)))]
                hyper = hyper_of(optimizer, usual, rng)
                given = {
                    "step": int(rng.integers(1, 1000)),
                    "first": bool(rng.integers(2)),
                    **hyper,
                }
                step = Step(device, form, count, gradient, SEED + count)
                compared += step.run(optimizer, copy, scale, **given)
                expected += count * (len(form.rule.arrays_in) + (copy is not None))
    print(f"{compared} elements of {len(tried)} rules compared: {', '.join(sorted(tried))}")
    assert tried == set(device.config.rule_set.names)
    assert compared == expected >= len(tried) * 3 * sum(COUNTS)


@pytest.mark.parametrize("array", ["p", "m", "g"])
def test_one_wrong_bit_is_seen(array: str) -> None:
    with nearstep.open(f"{DEVICES['golden-numpy']}&{EVERY_FORMAT}") as device:
        optimizer = optimizer_named("adam")
        step = Step(device, optimizer.by_rule["adam"], 129, "bf16", SEED)
        before = step.before[array].copy()
        step.before[array].view(np.uint8)[-1] ^= 0x40
        with pytest.raises(AssertionError, match=f"adam {array if array == 'g' else '.'} of 129"):
            step.run(optimizer, None, 1.0, step=1, first=False)
        step = Step(device, optimizer.by_rule["adam"], 129, "bf16", SEED)
        assert step.before[array].tobytes() == before.tobytes()
        assert step.run(optimizer, None, 1.0, step=1, first=False) == 4 * 129
