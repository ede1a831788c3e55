"""Machines and models of the COARSE paper's evaluation, under assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from typing import Literal

from nearstep.coarse.dual import DualInputs, best_split
from nearstep.coarse.iteration import Block
from nearstep_spec.platform.layer import Layer
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Platform
from nearstep_spec.platform.models import MODELS

GRADIENT_BYTES = 4
BOTH_WAYS_BYTES_PER_S = 25e9
"""Rate of a PCIe 3.0 x16 link of a GPU: printed, section III-E and figure 8b."""

FIGURE_8 = {"p3": (9e9, 16e9), "sdsc": (25e9, 18e9)}
"""Rates both ways together between two GPUs at one switch, and at two."""

TENSOR_CORES = frozenset({"g4dn", "p3"})
"""Machines whose GPUs have tensor cores: TensorFlow's mixed precision needs them (Volta and later).
"""

SQUAD_TOKENS = 384
"""Tokens of BERT's own fine-tuning on SQuAD 1.1, and of NVIDIA's examples."""

BATCHES = {"bert-large": 2, "resnet50": 64}
"""Batch of each GPU (section V-D)."""

Dtype = Literal["mixed", "fp32"]
Share = Literal["links and pairs", "pairs", "uplinks"]
Split = Literal["T_train", "best"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Assumptions that can be changed.

    Attributes
    ----------
    gpu : share of its peak that a GPU reaches. None: fitted (`nearstep.paper.coarse`).
    dtype : `mixed`: fp16 on GPUs with tensor cores, `fp32` on all.
    tokens : of a sequence of BERT.
    share : limits that transfers share: `links and pairs`, a GPU's link each way, and the rate of
        figure 8 between two GPUs; `pairs`: those rates alone; `uplinks`: GPUs' links, and for all
        transfers that leave a switch the rate between two of its GPUs and others.
    split : m: that of `T_train`, or the `best` one of the modelled links.
    overlap : synchronization begins within backward, as in T_train; else after backward.
    dense_shared : DENSE's memory device serves workers one after the other.
    dense_turns : a worker of DENSE pushes everything before it pulls; else both overlap.
    server_bytes_per_s : of a GPU's link to DENSE's device, each way.
    read, write : factors by which loads and stores of the host are slower (figure 3).
    """

    gpu: float | None = None
    dtype: Dtype = "mixed"
    tokens: int = SQUAD_TOKENS
    share: Share = "links and pairs"
    split: Split = "T_train"
    overlap: bool = False
    dense_shared: bool = False
    dense_turns: bool = True
    server_bytes_per_s: float = BOTH_WAYS_BYTES_PER_S / 2
    read: float = 17.0
    write: float = 4.0


@cache
def platform(machine: str) -> Platform:
    """The platform file of `g4dn`, `p3` or `sdsc`."""
    return load(f"coarse-{machine}")


@dataclass(frozen=True)
class Work:
    """A model on a machine's GPU.

    Parameters
    ----------
    machine : `g4dn`, `p3` or `sdsc`.
    batch : None: the paper's.
    """

    model: str
    machine: str
    batch: int | None = None
    options: Options = Options()

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Layers in the order of forward."""
        tokens = self.options.tokens if self.model.startswith("bert") else 0
        batch = BATCHES[self.model] if self.batch is None else self.batch
        return tuple(MODELS[self.model].layers(batch, tokens))

    @property
    def flops_per_s(self) -> float:
        """Reached rate of a GPU."""
        mixed = self.options.dtype == "mixed" and self.machine in TENSOR_CORES
        peak = platform(self.machine).processors["gpu0"].flops["fp16" if mixed else "fp32"]
        return float(peak) * (1.0 if self.options.gpu is None else self.options.gpu)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients, n."""
        return GRADIENT_BYTES * sum(layer.parameter_count for layer in self.layers)

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_flops for layer in self.layers) / self.flops_per_s

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_flops for layer in self.layers) / self.flops_per_s

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def blocks(self) -> list[Block]:
        """Layers for `nearstep.coarse.iteration.iterate`."""
        return [
            Block(
                nbytes=GRADIENT_BYTES * layer.parameter_count,
                forward_s=layer.forward_flops / self.flops_per_s,
                backward_s=layer.backward_flops / self.flops_per_s,
            )
            for layer in self.layers
        ]

    def inputs(self, workers: int) -> DualInputs:
        """Inputs of the estimate in section III-F: rings of workers and of devices between
        switches."""
        rate = pair_bytes_per_s(self.machine, local=False)
        return DualInputs(
            workers=workers,
            nbytes=self.nbytes,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            proxy_bytes_per_s=rate,
            worker_bytes_per_s=rate,
        )


def pair_bytes_per_s(machine: str, *, local: bool) -> float:
    """Return the rate each way between two GPUs, at one switch or at two; without switches that of
    a link.
    """
    both = FIGURE_8.get(machine, (BOTH_WAYS_BYTES_PER_S,) * 2)
    return both[not local] / 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Workers and memory devices among the GPUs of a machine.

    Attributes
    ----------
    workers : p, of all nodes; distributed over switches round robin, like devices.
    devices : equal to `workers`, or a divisor: workers share them.
    """

    machine: str
    workers: int
    devices: int
    nodes: int = 1


def lowest(lines: Sequence[tuple[float, float]]) -> float:
    """Find the lowest point of the upper envelope of lines from 0 to 1, given by both ends."""

    def highest(part: float) -> float:
        return max(first + (last - first) * part for first, last in lines)

    found = [highest(0.0), highest(1.0)]
    for (a, b), (c, d) in combinations(lines, 2):
        if (steeper := (d - c) - (b - a)) and 0 < (part := (a - c) / steeper) < 1:
            found.append(highest(part))
    return min(found)


class Communication:
    """Compute the seconds of a synchronization: those of the busiest link and direction."""

    def __init__(self, layout: Layout, options: Options) -> None:
        self.layout = layout
        self.options = options

    def all_reduce_s(self, nbytes: int) -> float:
        """Seconds of a ring of all workers."""
        return max(nbytes * each for each in self._loads(0.0).values())

    def coarse_s(self, work: Work) -> float:
        """Seconds of sums of n - m bytes by the workers and of m by the devices that training waits
        for."""
        n, hidden = work.nbytes, work.backward_s if self.options.overlap else 0.0
        none, whole = self._loads(0.0), self._loads(1.0)
        lines = [(n * none[name] - hidden, n * whole[name] - hidden) for name in none]
        lines.append((n * none["worker ring"], n * whole["worker ring"]))  # after backward
        if self.options.split == "best":
            return lowest(lines)
        part = best_split(work.inputs(self.layout.workers)) / n
        return max(first + (last - first) * part for first, last in lines)

    def _loads(self, part: float) -> Mapping[str, float]:
        """Seconds for a byte of n on each link, with a part of it for the devices."""
        layout = self.layout
        p, d = layout.workers, layout.devices
        rest, shared = 1.0 - part, p / d
        ring, among = 2 * (p - 1) / p * rest, 2 * (d - 1) / d * part
        remote = pair_bytes_per_s(layout.machine, local=False)
        near = pair_bytes_per_s(layout.machine, local=True)
        best = max(remote, near)
        loads = {
            "worker ring": ring / remote,
            "device ring": among / remote,
            "push": part / best,
        }
        if self.options.share != "pairs":
            link = BOTH_WAYS_BYTES_PER_S / 2
            loads["worker link"] = (ring + part) / link
            loads["device link"] = (among + shared * part) / link
        if self.options.share == "uplinks":
            loads["uplink"] = (ring + among + (part if best == remote != near else 0.0)) / remote
        if layout.nodes > 1:
            network = float(platform(layout.machine).links["ethernet"].bytes_per_s)
            loads["network"] = (ring + among) / network
        return loads

    def dense_s(self, nbytes: int) -> float:
        """Seconds of pushes to one memory device and pulls from it, by stores and loads."""
        options = self.options
        push, pull = (
            nbytes * x / options.server_bytes_per_s for x in (options.write, options.read)
        )
        each = push + pull if options.dense_turns else max(push, pull)
        return each * (self.layout.workers if options.dense_shared else 1)
