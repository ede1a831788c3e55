"""Small models and machines for tests."""

import random

from nearstep.plan.iteration import Roles
from nearstep.plan.pieces import Layer
from nearstep.plan.ranks import NETWORK
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


def star(gpus: int, drives: int = 0, seed: int | None = None) -> Platform:
    """GPUs, a processor and drives at a switch; links of 1 GB/s, or random ones."""
    rng = random.Random(seed)

    def rate() -> float:
        return 1e9 if seed is None else rng.randint(1, 20) * 1e8

    parts = [*(f"gpu{i}" for i in range(gpus)), "cpu", *(f"ssd{i}" for i in range(drives))]
    return Platform(
        name="star",
        title="a star",
        processors={name: Processor(title=name[:3]) for name in parts[: gpus + 1]},
        drives={
            name: Drive(
                title="a drive",
                capacity_bytes=figure(1e9),
                read_bytes_per_s=figure(rate()),
                write_bytes_per_s=figure(rate()),
                duplex="half",
            )
            for name in parts[gpus + 1 :]
        },
        switches=("switch", NETWORK),
        links={
            f"l{i}": Link(
                ends=(part, "switch"),
                bytes_per_s=figure(rate()),
                duplex="full" if seed is None or rng.random() < 0.7 else "half",
            )
            for i, part in enumerate(parts)
        }
        | {"uplink": Link(ends=("switch", NETWORK), bytes_per_s=figure(rate()))},
    )


def copies(machine: Platform, count: int) -> Platform:
    """Machines whose network is one part."""

    def named(k: int, name: str) -> str:
        return name if name == NETWORK else f"m{k}.{name}"

    def all_of(table: str) -> dict[str, object]:
        parts = getattr(machine, table).items()
        return {named(k, name): part for k in range(count) for name, part in parts}

    links = {
        f"m{k}.{name}": Link(
            ends=(named(k, link.ends[0]), named(k, link.ends[1])),
            bytes_per_s=link.bytes_per_s,
            back_bytes_per_s=link.back_bytes_per_s,
            duplex=link.duplex,
        )
        for k in range(count)
        for name, link in machine.links.items()
    }
    switches = {named(k, each) for k in range(count) for each in machine.switches}
    return Platform(
        name="cluster",
        title="machines",
        processors=all_of("processors"),  # type: ignore[arg-type]
        drives=all_of("drives"),  # type: ignore[arg-type]
        switches=tuple(sorted(switches)),
        links=links,
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
