"""Devices that the driver's tests run on, and what they compare with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

import nearstep
from nearstep.axdimm.channel import Channel
from nearstep.buffer import Buffer
from nearstep.updater.device import KernelDevice
from nearstep.updater.run import UpdateRun
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.adam import ORDERS
from nearstep_spec.updater.registers import ARRAYS

Floats = NDArray[np.float32]
Arrays = Mapping[str, Floats]

SHAPE = "lanes=4&block_bytes=512&memory_bytes=1MiB"
"""Small, so that a few thousand elements are many blocks of 128 elements."""

CARD_SHAPE = SHAPE.replace("block", "chunk")
SIM_CARD_SHAPE = "lanes=4&chunk_bytes=512&memory_bytes=4MiB"
"""Of every simulated card that has everything, and of that of ``tests/system/test_train_gpt.py``:
they share one build."""
ADAM = "rules=adam&gradient_formats=fp32&gradient_scale=no&copy_out_formats=&scan=no&compression="
"""What a kernel of an AXDIMM has if nothing is said."""

BLOCK = 128
BURSTS_AHEAD = 16

URLS = {
    "golden-numpy": f"golden:axdimm?{SHAPE}&engine=numpy",
    "golden-cpp": f"golden:axdimm?{SHAPE}&engine=cpp",
    "sim-ideal": f"sim:axdimm?{SHAPE}",
    "sim-halfduplex": f"sim:axdimm?{SHAPE}&memory=halfduplex&fu=native&stall=0.2&seed=7",
    "golden-card": f"golden:smartssd?{CARD_SHAPE}&{ADAM}",
    "sim-card": f"sim:smartssd?{SIM_CARD_SHAPE}",
    "sim-card-stalled": f"sim:smartssd?{CARD_SHAPE}&{ADAM}&fu=native&stall=0.2&seed=7",
}
ADAM_ALONE = [name for name in URLS if name != "sim-card"]
"""Those whose kernel has nothing else."""

DIMM_SHAPE = "block_bytes=512&functional_units=4"
DIMMS = {
    "golden-dimm": f"golden:axdimm?{DIMM_SHAPE}&channels=2&memory_bytes=2MiB",
    "sim-dimm": f"sim:axdimm?memory=ddr4-1600&{DIMM_SHAPE}&channels=2&fu=native",
    "sim-dimm-stalled": (
        f"sim:axdimm?memory=ddr4-1600&{DIMM_SHAPE}&channels=2&fu=native&stall=0.3&seed=7"
        "&scheduler=in-order&postpone=8"
    ),
}

EVERYTHING = (
    "rules=adam,sgd,sgd_momentum,adagrad&gradient_formats=fp32,fp16,bf16&gradient_scale=yes"
    "&copy_out_formats=fp16,bf16&scan=yes&compression=fused,scatter"
)
FULL = {
    "golden-numpy": f"golden:axdimm?{SHAPE}&engine=numpy&{EVERYTHING}",
    "golden-cpp": f"golden:axdimm?{SHAPE}&{EVERYTHING}",
    "golden-dimm": f"golden:axdimm?block_bytes=512&channels=2&memory_bytes=2MiB&{EVERYTHING}",
    "golden-card": f"golden:smartssd?{CARD_SHAPE}&{EVERYTHING}",
    "sim-ideal": f"sim:axdimm?{SHAPE}&{EVERYTHING}",
    "sim-card-stalled": f"sim:smartssd?{SIM_CARD_SHAPE}&{EVERYTHING}&stall=0.2&seed=7",
}
"""Devices whose kernels have everything that a kernel can have."""

BUILDS = {"sim-halfduplex", "sim-card-stalled"}
"""Of these devices only deep tests make the library; the other ones have the same hardware."""


def chosen(names: Iterable[str], deep: Collection[str]) -> list[object]:
    """Parameters of a fixture; those of ``deep`` are for deep tests."""
    return [pytest.param(n, marks=pytest.mark.deep) if n in deep else n for n in names]


everywhere = pytest.mark.parametrize("device", chosen([*URLS, *DIMMS], BUILDS), indirect=True)
"""For a test that holds on every device, DIMMs included."""

HYPER = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.05}


@dataclass
class Job:
    """Arrays on a device, their copies from before the run, and the run's parameters.

    On a DIMM the channel is in acceleration mode from :meth:`start` until arrays are looked at.
    """

    device: KernelDevice
    count: int
    seed: int
    channel: int = 0
    hyper: dict[str, object] = field(default_factory=lambda: dict(HYPER))
    step: int = 3
    decoupled: bool = True

    def __post_init__(self) -> None:
        print(f"seed {self.seed}")
        rng = np.random.default_rng(self.seed)
        before = {name: rng.standard_normal(self.count).astype(np.float32) for name in ARRAYS}
        before["v"] = np.square(before["v"])
        self.before: dict[str, Floats] = before
        self.buffers: dict[str, Buffer] = {
            name: self.device.alloc(self.count, channel=self.channel) for name in ARRAYS
        }
        self._mode = ExitStack()
        self.upload()

    def upload(self) -> None:
        self.take_back()
        for name, array in self.before.items():
            self.buffers[name].write(array)

    def take_back(self) -> None:
        """The channel is the host's again."""
        self._mode.close()

    def start(self) -> UpdateRun:
        channel = self.device.channels[self.channel]
        modes = isinstance(channel, Channel) and channel.arbiter is not None
        if modes and not channel.accelerated:
            self._mode.enter_context(self.device.acceleration(self.channel))
        return self.device.update(
            "adam",
            self.buffers,
            step=self.step,
            decoupled_weight_decay=self.decoupled,
            **self.hyper,
        )

    def expected(self) -> Arrays:
        """The golden rule's results."""
        rule, scalars = ORDERS[self.device.config.order]
        hyper = self.hyper
        values = scalars(
            hyper["lr"], hyper["betas"], hyper["eps"], hyper["weight_decay"], self.step,
            self.decoupled,
        )  # fmt: skip
        return evaluate(rule, self.before, values)

    def check(self, first: int = 0, stop: int | None = None) -> int:
        """Compare elements [first, stop) with the golden rule, bit for bit; the number compared."""
        self.take_back()
        expected = self.expected()
        compared = 0
        for name, array in expected.items():
            bits = self.buffers[name].read()[first:stop].view(np.uint32)
            np.testing.assert_array_equal(bits, array[first:stop].view(np.uint32), err_msg=name)
            compared += bits.size
        gradients = self.buffers["g"].read().view(np.uint32)
        np.testing.assert_array_equal(gradients, self.before["g"].view(np.uint32))
        return compared

    def check_untouched(self, first: int = 0) -> int:
        """Compare elements from ``first`` with what they were; the number compared."""
        self.take_back()
        compared = 0
        for name in ARRAYS:
            bits = self.buffers[name].read()[first:].view(np.uint32)
            np.testing.assert_array_equal(bits, self.before[name][first:].view(np.uint32))
            compared += bits.size
        return compared


@pytest.fixture(params=chosen(URLS, BUILDS))
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with nearstep.open((URLS | DIMMS)[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


@pytest.fixture(params=chosen(FULL, {"sim-ideal"}))
def full(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    """A device whose kernels have everything."""
    with nearstep.open(FULL[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


@pytest.fixture
def job(device: KernelDevice) -> Callable[..., Job]:
    """Makes a job on the device."""

    def make(count: int = 1001, seed: int = 1, **changes: object) -> Job:
        return Job(device, count, seed, **changes)

    return make
