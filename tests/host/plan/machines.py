"""Small models and machines for tests."""

import random

from nearstep.plan.iteration import Roles
from nearstep.plan.pieces import Layer
from nearstep_spec.platform.machine import Dimm, Drive, Figure, Link, Platform, Processor


def figure(value: float) -> Figure:
    return Figure(value=value, origin="paper", source="a test")


def machine(link: float = 8e9, drive: float = 2e9, channel: float = 1e12) -> Platform:
    """A GPU, a DIMM of two channels behind a link of both directions together, and a drive."""
    processor = Processor(title="x", memory_bytes=figure(1e12), memory_bytes_per_s=figure(1e13))
    return Platform(
        name="x",
        title="x",
        processors={"gpu": processor, "cpu": processor},
        dimms={
            "dimm": Dimm(
                title="x",
                channels=figure(2),
                channel_bytes=figure(1e12),
                channel_bytes_per_s=figure(channel),
                adam_params_per_s=figure(8e8),
            )
        },
        drives={"ssd": Drive(title="x", capacity_bytes=figure(1e12))},
        links={
            "pcie": Link(ends=("cpu", "gpu"), bytes_per_s=figure(16e9)),
            "ddr": Link(ends=("cpu", "dimm"), bytes_per_s=figure(link), duplex="half"),
            "nvme": Link(ends=("cpu", "ssd"), bytes_per_s=figure(drive), duplex="half"),
        },
    )


DIMM = Roles(
    compute="gpu",
    memory=("dimm.0", "dimm.1"),
    drives="ssd",
    updates="memory",
    params_per_s=4e8,
)
HOST = Roles(compute="gpu", memory=("cpu",), drives="ssd", updates="processor", params_per_s=1.4e8)


def random_layers(choose: random.Random) -> list[Layer]:
    """Of some parameters, perhaps with a head that borrows the first layer's."""
    layers = [
        Layer(
            name=f"layer{i}",
            parameters=tuple(choose.randint(1, 4000) for _ in range(choose.randint(1, 4))),
            forward_s=choose.random() * 1e-6,
            backward_s=choose.random() * 2e-6,
        )
        for i in range(choose.randint(1, 6))
    ]
    if choose.random() < 0.5:
        layers.append(Layer(name="head", parameters=(), borrowed=((0, 0),), forward_s=1e-6))
    return layers
