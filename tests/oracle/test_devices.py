"""Golden devices, and the RTL, against formulas in plain numpy: random steps, bit for bit.

What a device must give comes from `steps`, which shares no code with the rules as they are
programmed, nor with what generates the hardware.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.updater.device import KernelDevice

from .steps import Task

EVERYTHING = (
    "gradient_formats=fp32,fp16,bf16&gradient_scale=yes&copy_out_formats=fp16,bf16&scan=yes"
    "&compression=fused,scatter"
)
ALL = "adam,adam_amsgrad,sgd,sgd_momentum,adagrad,rmsprop,adadelta"
PAPER = "adam,sgd,sgd_momentum,adagrad"
SHAPE, BLOCKS = "lanes=4&memory_bytes=4MiB", "block_bytes=512"
DEVICES = {
    "kernel": f"golden:axdimm?{SHAPE}&{BLOCKS}&{EVERYTHING}&rules={ALL}",
    "kernel-numpy": f"golden:axdimm?{SHAPE}&{BLOCKS}&engine=numpy&{EVERYTHING}&rules={ALL}",
    "dimm": f"golden:axdimm?channels=2&memory_bytes=8MiB&{BLOCKS}&{EVERYTHING}&rules={PAPER}",
    "dimm-paper": f"golden:axdimm?channels=2&memory_bytes=8MiB&rules={PAPER}&order=paper",
    "kernel-paper": f"golden:axdimm?{SHAPE}&{EVERYTHING}&rules={PAPER}&order=paper&engine=numpy",
    "card": "golden:smartssd?memory_bytes=16MiB&chunk_bytes=1024",
    "cards": f"golden:smartssd?cards=3&{SHAPE}&chunk_bytes=512&rules={ALL}",
}
RTL = {
    "sim-dimm": f"sim:axdimm?memory=ddr4-1600&channels=2&{BLOCKS}&{EVERYTHING}&rules={PAPER}",
    "sim-dimm-paper": "sim:axdimm?memory=ddr4-1600&rules=adam&order=paper&functional_units=4",
    "sim-card": "sim:smartssd?lanes=4&chunk_bytes=512&memory_bytes=4MiB",
    "sim-card-all": f"sim:smartssd?{SHAPE}&chunk_bytes=512&rules={ALL}",
    "sim-cards": "sim:smartssd?cards=2&lanes=4&chunk_bytes=512&memory_bytes=4MiB",
}
SEED = 2026


def rounds(device: KernelDevice, seed: int, times: int, longest: int) -> Counter[str]:
    """Tasks on all channels at once, again and again; elements compared of each kind of task."""
    print(f"seed {seed}")
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    rules = list(device.config.rule_set.names)
    compared: Counter[str] = Counter()
    for _ in range(times):
        channels = range(device.channel_count)
        some = rng.sample(channels, rng.randint(1, len(channels)))
        tasks = [Task(device, rng, numbers, rules, channel, longest) for channel in some]
        if isinstance(device, AxdimmDevice) and device.dimm is not None:
            with device.acceleration(*some):
                for run in [task.start() for task in tasks]:
                    run.wait()
        else:
            for run in [task.start() for task in tasks]:
                run.wait()
        for task in tasks:
            elements = task.check()
            compared.update({task.rule: elements, task.form: elements, task.pairs: elements})
            compared.update({f"copy {task.copy}": elements, f"channel {task.channel}": elements})
            task.free()
    print(f"{sum(compared[rule] for rule in [*rules, 'scan'])} elements: {dict(compared)}")
    return compared


def check(url: str, times: int, longest: int, seed: int = SEED) -> None:
    with nearstep.open(url) as device:
        assert isinstance(device, KernelDevice)
        compared = rounds(device, seed, times, longest)
        config = device.config
        expected = {*config.rule_set.names, *config.gradient_formats, *config.compression}
        expected |= {f"copy {each}" for each in config.copy_out_formats}
        expected |= {f"channel {each}" for each in range(device.channel_count)}
        expected |= {"scan"} if config.scan else set()
        assert {each for each in expected if not compared[each]} == set()


@pytest.mark.parametrize("name", DEVICES)
def test_random_steps_on_golden_devices(name: str) -> None:
    check(DEVICES[name], times=60, longest=700)


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", DEVICES)
def test_many_random_steps_on_golden_devices(name: str, seed: int) -> None:
    check(DEVICES[name], times=300, longest=5000, seed=seed)


@pytest.mark.deep
@pytest.mark.parametrize("name", RTL)
def test_random_steps_on_the_rtl(name: str) -> None:
    check(RTL[name], times=120, longest=900)


def test_a_wrong_bit_is_seen() -> None:
    with nearstep.open(DEVICES["kernel-numpy"]) as device:
        assert isinstance(device, KernelDevice)
        seen = 0
        for seed in range(6):
            rng = random.Random(seed)
            task = Task(device, rng, np.random.default_rng(seed), ["adam"], 0, 300)
            task.start().wait()
            assert task.check() > 0
            target = task.buffers["g" if task.rule == "scan" else "p"]
            held = target.read()
            held.view(np.uint8)[-1] ^= 1
            target.write(held)
            with pytest.raises(AssertionError, match="is wrong at byte"):
                task.check()
            seen += 1
            task.free()
        assert seen == 6


def test_a_write_beside_an_array_is_seen() -> None:
    with nearstep.open(DEVICES["kernel-numpy"]) as device:
        assert isinstance(device, KernelDevice)
        task = Task(device, random.Random(3), np.random.default_rng(3), ["sgd"], 0, 300)
        task.start().wait()
        assert task.check() > 0
        task._guards[0][0].fill(3)
        with pytest.raises(AssertionError, match="wrote beside its arrays"):
            task.check()
