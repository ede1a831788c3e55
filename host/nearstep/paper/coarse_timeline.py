"""Dual synchronization, shards and many devices on the timeline, for the COARSE paper's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nearstep.coarse.dual import DualInputs, best_split
from nearstep.coarse.iteration import DOWN, UP, Block, Paths, iterate, pipeline
from nearstep.coarse.scale import Fabric, all_reduce_cycles
from nearstep.paper.coarse import BERT, KNEE, RESNET
from nearstep.paper.coarse_case import Options, Work, pair_bytes_per_s
from nearstep.work.timeline import Timeline

MACHINES = (("p3", 4), ("sdsc", 2), ("g4dn", 2), ("g4dn", 4))
"""Machines, each with its number of workers."""

SWEEP = 16
"""Parts of n in a search for a better m on the timeline."""

SIZES = (4 << 20, 40 << 20, 2 << 20, 18 << 20)
"""Tensors of 64 MiB in all, as unequal as figure 9's."""

DEVICES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RACK = 32
TENSORS = (4 << 20, 64 << 20)
UPLINKS = (1, 2)


@dataclass(frozen=True)
class Run:
    """Dual synchronization of a model on a machine.

    Attributes
    ----------
    inputs : of the estimate: figure 8's rate between switches for both rings.
    client_bytes_per_s : between a worker and the proxy with the highest rate, each way.
    """

    machine: str
    workers: int
    model: str
    inputs: DualInputs
    blocks: Sequence[Block]
    client_bytes_per_s: float

    @property
    def m(self) -> int:
        """m*, of the closed form."""
        return best_split(self.inputs)

    def estimated(self, m: int) -> float:
        """T_train for this m."""
        return float(self.inputs.train_s(m))

    def on_timeline(self, m: int) -> float:
        """Seconds of an iteration on the timeline."""
        link = self.client_bytes_per_s
        run = iterate(self.blocks, self.inputs, m, client_bytes_per_s=link, shard=KNEE)
        return run.seconds

    def sweep(self) -> list[tuple[int, float]]:
        """Seconds on the timeline by m, from 0 to n."""
        n = self.inputs.nbytes
        return [(m, self.on_timeline(m)) for m in (n * i // SWEEP for i in range(SWEEP + 1))]


def runs(gpu: float) -> Iterator[Run]:
    """Runs of all of the paper's machines and models, at a share of the GPUs' peaks."""
    for machine, workers in MACHINES:
        for model in (BERT, RESNET):
            work = Work(model, machine, options=Options(gpu=gpu))
            link = max(pair_bytes_per_s(machine, local=local) for local in (True, False))
            yield Run(machine, workers, model, work.inputs(workers), work.blocks, link)


@dataclass(frozen=True)
class Pushed:
    """Pushes, sums and pulls of `SIZES` between a P100 and its device.

    Attributes
    ----------
    shard_bytes : None: whole tensors.
    bound : seconds of the slower of the link and the sum.
    """

    shard_bytes: int | None
    timeline: Timeline
    bound: float

    @property
    def kind(self) -> str:
        """Size of what is pushed, as text."""
        if self.shard_bytes is None:
            return "whole"
        return f"shards of {self.shard_bytes >> 20} MiB"

    @property
    def ms(self) -> float:
        """Milliseconds of all."""
        return 1e3 * float(self.timeline.seconds or 0)

    @property
    def over_bound(self) -> float:
        return self.ms / 1e3 / self.bound

    @property
    def busy(self) -> tuple[float, float]:
        """Shares of the time in which the link is busy, up and down."""
        timeline = self.timeline
        up, down = (timeline.busy(way) / timeline.makespan for way in (UP, DOWN))
        return up, down


def pushed() -> list[Pushed]:
    """Push whole tensors, and shards of the size that reaches the full rate in print."""
    link, ring = (pair_bytes_per_s("sdsc", local=local) for local in (True, False))
    found = []
    for shard in (None, KNEE):
        paths = Paths(client_bytes_per_s=link, sync_bytes_per_s=ring, shard_bytes=shard)
        found.append(Pushed(shard, pipeline(SIZES, paths), sum(SIZES) / min(link, ring)))
    return found


@dataclass(frozen=True)
class Cost:
    """Cost of a sum over many devices.

    Attributes
    ----------
    nbytes : of the tensor on each device.
    """

    fabric: Fabric
    nbytes: int
    cycles: int

    @property
    def mib(self) -> int:
        return self.nbytes >> 20

    @property
    def rings(self) -> str:
        """Rings of the fabric, as text."""
        fabric = self.fabric
        if fabric.racks == 1:
            return "one"
        links = "uplink" if fabric.uplinks == 1 else "uplinks"
        return f"{fabric.racks} racks of {fabric.devices}, {fabric.uplinks} {links}"

    @property
    def cycles_per_kib(self) -> float:
        return 1024 * self.cycles / self.nbytes

    @property
    def of_bound(self) -> float:
        """Share of the time that payload alone needs on the busiest link."""
        return self.fabric.bound(self.nbytes) / self.cycles


def costs(devices: Sequence[int] = DEVICES, tensors: Sequence[int] = TENSORS) -> Iterator[Cost]:
    """Costs of one ring of all devices, and beyond 64 devices of rings of racks."""
    for nbytes in tensors:
        for count in devices:
            fabrics = [Fabric(devices=count)]
            if count > 2 * RACK:
                fabrics += [
                    Fabric(devices=RACK, racks=count // RACK, uplinks=uplinks)
                    for uplinks in UPLINKS
                ]
            for fabric in fabrics:
                yield Cost(fabric, nbytes, all_reduce_cycles(fabric, nbytes))
