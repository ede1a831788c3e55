"""A model on a machine of the MemFerry paper, under assumptions: times and memory of each system.

Rows of section V are made of these (`nearstep.paper.memferry`, whose `ASSUMPTIONS` they follow).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from nearstep.memferry.access import Reads
from nearstep.memferry.cost import Costs
from nearstep.memferry.modelled import DTYPE_BYTES, Dtype, Setup, profile
from nearstep.memferry.planner import Planned, Planner, make
from nearstep.memferry.profile import Profile
from nearstep.memferry.work import GPU, Bucket, native, once
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Platform
from nearstep_spec.platform.transformer import Transformer

HOST_PARAMS_PER_S = {"memferry-a100": 8 * 25.6e9 / 28, "memferry-v100": 2 * 21.328e9 / 28}
MOST_STATES = 400
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`, which backward allocates for any model
(`deepspeed/runtime/zero/stage_1_and_2.py`)."""


class Systems(NamedTuple):
    """A figure of each system."""

    deepspeed: float
    native: float
    memferry: float
    go: float


@dataclass(frozen=True, kw_only=True)
class Options:
    """Assumptions that can be changed.

    Attributes
    ----------
    planner : of MemFerry and GO-MemFerry.
    gpu : share of its peak that the GPU reaches; None: fitted by `nearstep.paper.memferry`.
    dtype : None: as in `ASSUMPTIONS` for the machine.
    reads : of matrices in forward by direct host access.
    writes : of gradients to the host; None: as in `ASSUMPTIONS` for the machine.
    host : factor on the rate of the optimizer on the host.
    batch : factor on the batch.
    batches : of figure 12, whose rows are means and extremes over these and the models.
    recompute : activations are computed again in backward: only outputs of layers, and all
        activations of one layer, are kept; None: where all of them do not fit.
    alike : activations are also computed again `MemferryCase.again`.
    copies : times that a parameter passes the link to a GPU of several.
    bucket : gradients that DeepSpeed collects; None: memory and order as native.
    beside : two buckets: backward continues while one is sent (`overlap_comm`).
    """

    planner: Planner = "greedy"
    gpu: float | None = None
    dtype: Dtype | None = None
    reads: Reads = "wave"
    writes: Literal["after", "beside"] | None = None
    host: float = 1.0
    batch: float = 1.0
    batches: tuple[int, ...] = (1, 2, 4, 8)
    recompute: bool | None = None
    alike: bool = True
    copies: int = 2
    bucket: int | None = BUCKET_ELEMENTS
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class MemferryCase:
    """A model on a machine.

    Attributes
    ----------
    batch : of each GPU.
    again : a model of the same figure computes activations again.
    """

    model: Transformer
    machine: str = "memferry-a100"
    batch: int = 8
    sequence: int = 512
    gpus: int = 1
    again: bool = False
    options: Options = Options()

    @property
    def _batch(self) -> int:
        return max(int(self.batch * self.options.batch), 1)

    @property
    def _dtype(self) -> Dtype:
        return self.options.dtype or ("tf32" if self.machine == "memferry-a100" else "fp32")

    @property
    def _gpu(self) -> str:
        return "gpu0" if self.machine == "memferry-a100" else "gpu"

    @cached_property
    def platform(self) -> Platform:
        machine, share = load(self.machine), self.options.gpu or 1.0
        gpus = {
            name: replace(
                part,
                flops={k: replace(v, value=float(v) * share) for k, v in part.flops.items()},
            )
            for name, part in machine.processors.items()
        }
        return replace(machine, processors=gpus)

    def _profile(self, tied: Literal["product", "embedding"], recompute: bool) -> Profile:
        options, larger = self.options, self.machine == "memferry-a100"
        setup = Setup(
            batch=self._batch,
            sequence=self.sequence,
            dtype=self._dtype,
            gpu=self._gpu,
            reads=options.reads,
            writes=options.writes or ("beside" if larger else "after"),
            tied=tied,
            recompute=recompute,
            copies=1 if self.gpus == 1 else options.copies,
            host_params_per_s=HOST_PARAMS_PER_S[self.machine] * options.host,
        )
        return profile(self.platform, self.model, setup)

    @cached_property
    def profile(self) -> Profile:
        """MemFerry's: the product loads a tied matrix, as the embedding reads rows in place."""
        return self._profile("product", self.recompute)

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.profile)

    @cached_property
    def base(self) -> Costs:
        """Costs of the baselines, whose embedding loads a tied matrix."""
        return Costs(self._profile("embedding", self.recompute))

    @cached_property
    def memferry(self) -> Planned:
        return _planned(self.profile, 1.0, "keep", self.options.planner)

    @cached_property
    def go(self) -> Planned:
        """GO-MemFerry as in section V-A: all gradients are written to the host."""
        return _planned(self.profile, 0.0, "all", self.options.planner)

    @cached_property
    def deepspeed(self) -> Timeline:
        """An iteration of DeepSpeed."""
        return once(self.base, native(self.base), "all-gradients", self._bucket)

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """An iteration of each of `Systems`."""
        theirs = once(self.base, native(self.base), "all-gradients")
        ours = (once(self.costs, each.decisions) for each in (self.memferry, self.go))
        return self.deepspeed, theirs, *ours

    @property
    def _bucket(self) -> Bucket | None:
        if self.options.bucket is None:
            return None
        width = DTYPE_BYTES[self._dtype]
        return Bucket(nbytes=self.options.bucket * width, beside=self.options.beside)

    @property
    def seconds(self) -> Systems:
        """Seconds of an iteration of each system."""
        return Systems(*(each.makespan / 1e12 for each in self.timelines))

    @property
    def speedup(self) -> float:
        """Speedup of MemFerry over DeepSpeed."""
        return self.seconds.deepspeed / self.seconds.memferry

    @property
    def native_speedup(self) -> float:
        """Speedup of MemFerry over native ZeRO-Offload."""
        return self.seconds.native / self.seconds.memferry

    @property
    def go_speedup(self) -> float:
        """Speedup of GO-MemFerry over DeepSpeed."""
        return self.seconds.deepspeed / self.seconds.go

    @property
    def busy(self) -> Systems:
        """Share of an iteration in which the GPU computes."""
        return Systems(*(each.busy(GPU) / each.makespan for each in self.timelines))

    @cached_property
    def capacity(self) -> int:
        """Bytes of the GPU's memory."""
        return int(float(load(self.machine).processors[self._gpu].memory_bytes or 0))

    @cached_property
    def kept_bytes(self) -> int:
        """Peak of native ZeRO-Offload if all activations are kept."""
        layers = self.model.layers(self._batch, self.sequence, DTYPE_BYTES[self._dtype])
        parameters = sum(each.parameter_count for each in layers) * DTYPE_BYTES[self._dtype]
        return 2 * parameters + sum(each.activation_bytes for each in layers)

    @property
    def recompute(self) -> bool:
        """Whether activations are computed again in backward (section II-A)."""
        chosen = self.options.recompute
        if chosen is not None:
            return chosen
        return self.kept_bytes > self.capacity or (self.again and self.options.alike)

    @property
    def activation_bytes(self) -> int:
        layers = self.model.layers(self._batch, self.sequence, DTYPE_BYTES[self._dtype])
        if not self.recompute:
            return sum(layer.activation_bytes for layer in layers)
        kept = sum(layer.output_bytes for layer in layers)
        return kept + max(layer.activation_bytes for layer in layers)

    @property
    def memory(self) -> Systems:
        """Peak of the GPU's memory in bytes.

        DeepSpeed has all parameters, buckets from the begin of backward on, and gradients that are
        not yet in a bucket: those of the largest layer, after activations are freed.
        """
        plan = native(self.base)
        ours = (self.costs.bytes_of(each.decisions) for each in (self.memferry, self.go))
        others = [each + self.activation_bytes for each in (self.base.bytes_of(plan), *ours)]
        bucket = self._bucket
        if bucket is None:
            return Systems(others[0], *others)
        gradient = max(layer.gradient_bytes for layer in self.profile.layers)
        buckets = (2 if bucket.beside else 1) * bucket.nbytes
        parameters, _ = self.base.taken(plan)
        return Systems(parameters + buckets + max(self.activation_bytes, gradient), *others)


@lru_cache(maxsize=256)
def _planned(
    profile: Profile, reserve: float, decisions: Literal["all", "keep"], planner: Planner
) -> Planned:
    """Make a plan, which does not depend on assumptions about memory and baselines."""
    return make(
        profile, reserve=reserve, decisions=decisions, planner=planner, most_states=MOST_STATES
    )


def sized(billions: float) -> Transformer:
    """A model of about so many billion parameters, by `ASSUMPTIONS`."""
    large = billions >= 4
    hidden, vocabulary = (4096, 130528) if large else (2048, 32768)
    blocks = max(round((billions * 1e9 - vocabulary * hidden) / (12 * hidden**2)), 1)
    return Transformer(
        name=f"gpt-{billions:g}b",
        source="MemFerry paper, section V-A: ranges of TransformerXL",
        stated=billions * 1e9,
        blocks=blocks,
        hidden=hidden,
        heads=hidden // 64,
        vocabulary=vocabulary,
        positions=4096,
    )
