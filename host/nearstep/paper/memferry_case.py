"""A model on a machine of the MemFerry paper, under assumptions: times and memory of each system.

Rows of section V are made of these (`nearstep.paper.memferry`, whose `ASSUMPTIONS` they follow).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from nearstep.memferry.cost import Costs
from nearstep.memferry.modelled import DTYPE_BYTES, Setup, profile
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
    dtype : None: that of `ASSUMPTIONS` for the machine.
    reads : of matrices by direct host access.
    host : factor on the rate of the optimizer on the host.
    flops : factor on the rate of the GPU.
    batch : factor on the batch.
    recompute : activations are recomputed in backward: only outputs of layers, and all activations
        of one layer, are kept. Times are not changed.
    bucket : gradients that DeepSpeed collects; None: memory and order as native.
    beside : two buckets: backward continues while one is sent (`overlap_comm`).
    """

    dtype: str | None = None
    reads: str = "wave"
    host: float = 1.0
    flops: float = 1.0
    batch: float = 1.0
    recompute: bool = False
    bucket: int | None = BUCKET_ELEMENTS
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class MemferryCase:
    """A model on a machine.

    Attributes
    ----------
    planner : of MemFerry and GO-MemFerry.
    """

    model: Transformer
    machine: str = "memferry-a100"
    batch: int = 8
    sequence: int = 512
    options: Options = Options()
    planner: Planner = "best"

    @property
    def _batch(self) -> int:
        return max(int(self.batch * self.options.batch), 1)

    @property
    def _dtype(self) -> str:
        return self.options.dtype or ("tf32" if self.machine == "memferry-a100" else "fp32")

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.profile)

    @cached_property
    def platform(self) -> Platform:
        machine, gpus = load(self.machine), {}
        for name, part in machine.processors.items():
            flops = {
                dtype: replace(each, value=float(each) * self.options.flops)
                for dtype, each in part.flops.items()
            }
            gpus[name] = replace(part, flops=flops)
        return replace(machine, processors=gpus)

    @cached_property
    def profile(self) -> Profile:
        larger = self.machine == "memferry-a100"
        setup = Setup(
            batch=self._batch,
            sequence=self.sequence,
            dtype=self._dtype,  # type: ignore[arg-type]
            gpu="gpu0" if larger else "gpu",
            reads=self.options.reads,  # type: ignore[arg-type]
            host_params_per_s=HOST_PARAMS_PER_S[self.machine] * self.options.host,
        )
        return profile(self.platform, self.model, setup)

    @cached_property
    def memferry(self) -> Planned:
        return _planned(self.profile, 1.0, "keep", self.planner)

    @cached_property
    def go(self) -> Planned:
        """GO-MemFerry as in section V-A: all gradients are written to the host."""
        return _planned(self.profile, 0.0, "all", self.planner)

    @cached_property
    def _native(self) -> Timeline:
        return once(self.costs, native(self.costs), updates="all-gradients")

    @cached_property
    def _deepspeed(self) -> Timeline:
        return once(self.costs, native(self.costs), "all-gradients", self._bucket)

    @property
    def _bucket(self) -> Bucket | None:
        if self.options.bucket is None:
            return None
        width = DTYPE_BYTES[self._dtype]
        return Bucket(nbytes=self.options.bucket * width, beside=self.options.beside)

    @property
    def deepspeed_s(self) -> float:
        """Seconds of an iteration of DeepSpeed."""
        return self._deepspeed.makespan / 1e12

    @property
    def native_s(self) -> float:
        """Seconds of an iteration of native ZeRO-Offload."""
        return self._native.makespan / 1e12

    @property
    def seconds(self) -> Systems:
        """Seconds of an iteration of each system."""
        ours = self.memferry.total / 1e12, self.go.total / 1e12
        return Systems(self.deepspeed_s, self.native_s, *ours)

    @property
    def speedup(self) -> float:
        """Speedup of MemFerry over DeepSpeed."""
        return self.deepspeed_s * 1e12 / self.memferry.total

    @property
    def native_speedup(self) -> float:
        """Speedup of MemFerry over native ZeRO-Offload."""
        return self.native_s * 1e12 / self.memferry.total

    @property
    def go_speedup(self) -> float:
        """Speedup of GO-MemFerry over DeepSpeed."""
        return self.deepspeed_s * 1e12 / self.go.total

    @property
    def busy(self) -> Systems:
        """Share of an iteration in which the GPU computes."""
        ours = [once(self.costs, each.decisions) for each in (self.memferry, self.go)]
        found = (self._deepspeed, self._native, *ours)
        return Systems(*(each.busy(GPU) / each.makespan for each in found))

    @property
    def activation_bytes(self) -> int:
        if not self.options.recompute:
            return self.profile.activation_bytes
        width = DTYPE_BYTES[self._dtype]
        layers = self.model.layers(self._batch, self.sequence, width)
        kept = sum(layer.output_bytes for layer in layers)
        return kept + max(layer.activation_bytes for layer in layers)

    @property
    def memory(self) -> Systems:
        """Peak of the GPU's memory in bytes.

        DeepSpeed has buckets beside all parameters, from the begin of backward, and gradients that
        are not yet in one: those of the largest layer, after activations are freed.
        """
        plans = (native(self.costs), self.memferry.decisions, self.go.decisions)
        others = (self.costs.bytes_of(each) + self.activation_bytes for each in plans)
        return Systems(self.deepspeed_bytes, *others)

    @property
    def deepspeed_bytes(self) -> int:
        """Peak of the GPU's memory under DeepSpeed."""
        bucket = self._bucket
        if bucket is None:
            return self.costs.bytes_of(native(self.costs)) + self.activation_bytes
        gradient = max(layer.gradient_bytes for layer in self.profile.layers)
        buckets = (2 if bucket.beside else 1) * bucket.nbytes
        return self.profile.parameter_bytes + buckets + max(self.activation_bytes, gradient)


@lru_cache(maxsize=64)
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
