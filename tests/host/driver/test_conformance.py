"""Every optimizer on every device: what is asked of a step is what the rule gives in numpy, bit for
bit, for any number of elements, any format of the gradients, any scale and any copy.

Optimizers, their rules, states, formats and hyper-parameters come from their data, devices from a
table: one more of either is one more row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import nearstep
from nearstep.updater.device import KernelDevice
from nearstep_spec.rule.rules import OPTIMIZERS, optimizer_named

from ..optimizers import FORMATS as EVERY_FORMAT
from ..optimizers import GROUPS, hyper_of
from .conftest import SIM_CARD_SHAPE, chosen
from .job import Job
from .patterns import FORMATS

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
URLS["sim-card-on-pcie"] = (f"sim:smartssd?{SIM_CARD_SHAPE}&bus=pcie", list(OPTIMIZERS))
IN_DEPTH = [name for name in URLS if name.startswith("sim") and "shipped" not in name]
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 257, 1001, 4099)
SCALES = (1.0, 2.0**-7, -0.3, 0.0)
SEED = 70


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
                arrays = form.rule.arrays_in
                job = Job(device, count, SEED + count, gradient=gradient, arrays=arrays)
                out = None if copy is None else job.copy(copy)
                named = {"copy_out_format": copy, "gradient_format": gradient}
                job.run(optimizer, copy_out=out, gradient_scale=scale, **named, **given)
                compared += job.check()
                expected += count * (len(form.rule.states) + (copy is not None))
                job.free(*([] if out is None else [out]))
    print(f"{compared} elements of {len(tried)} rules compared: {', '.join(sorted(tried))}")
    assert tried == set(device.config.rule_set.names)
    assert compared == expected >= len(tried) * sum(COUNTS)


@pytest.mark.parametrize("array", ["p", "m", "g"])
def test_one_wrong_bit_is_seen(array: str) -> None:
    with nearstep.open(f"{DEVICES['golden-numpy']}&{EVERY_FORMAT}") as device:
        job = Job(device, 129, SEED, gradient="bf16")
        before = job.before[array].copy()
        job.before[array].view(np.uint8)[-1] ^= 0x40
        job.run("adam", step=1)
        with pytest.raises(AssertionError, match=f"adam {array if array == 'g' else '.'} of 129"):
            job.check()
        job = Job(device, 129, SEED, gradient="bf16")
        assert job.before[array].tobytes() == before.tobytes()
        job.run("adam", step=1)
        assert job.check() == 3 * 129


def test_a_wrong_copy_or_counter_is_seen() -> None:
    with nearstep.open(f"{DEVICES['golden-numpy']}&{EVERY_FORMAT}") as device:
        job = Job(device, 129, SEED)
        copy = job.copy("fp16")
        job.run(copy_out=copy)
        copy[128:].fill(7)
        with pytest.raises(AssertionError, match=r"adam copy of 129 is wrong at \[128\]"):
            job.check()
        job.upload()
        run = job.run()
        run.counters["read_beats"] += 1
        with pytest.raises(AssertionError):
            job.check()
