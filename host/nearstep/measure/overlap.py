"""Overlap in an offloaded model: a stack of equal layers, with overlap and without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from nearstep.errors import ArgumentError
from nearstep.optim import AdamW
from nearstep.torch.offload import Report, offload
from nearstep.torch.offload.engine import Updates
from nearstep.torch.offload.recording import Phase, backward_and_update
from nearstep.work.timeline import Timeline

STEPS = 3
"""Steps of a training. The second is recorded: the order of uses is not known in the first."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Linear layers without bias, each followed by a tanh, and their training.

    Attributes
    ----------
    device : name of the optimizer's device.
    platform : machine that computes.
    compute : its processor; None if it is the only one.
    host_params_per_s : rate of updates on the host, if the platform has none.
    layers, width : number of layers, each of width x width parameters.
    batch : rows of the input.
    room : the budget, as a multiple of the bytes of a layer's parameters.
    updates : as of `nearstep.offload`.

    Raises
    ------
    ArgumentError : a number is below 1; `train`: torch cannot allocate the layers.
    """

    device: str
    platform: str = "axdimm"
    compute: str | None = None
    host_params_per_s: float | None = None
    layers: int = 12
    width: int = 256
    batch: int = 4096
    room: int = 5
    updates: Updates = "in-backward"
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "width", "batch", "room"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def budget(self) -> int:
        """Budget in bytes."""
        return self.room * 4 * self.width * self.width

    def train(self, *, offloads: bool = True, overlaps: bool | None = None) -> Trained:
        """Train, and record the second step unless `overlaps` is None."""
        try:
            model, x = self._made()
        except (RuntimeError, TypeError) as error:  # torch's error, with a C++ stack
            reason = str(error).splitlines()[0]
            what = f"layers={self.layers}, width={self.width}, batch={self.batch}"
            raise ArgumentError(f"torch must be able to allocate {what}: {reason}") from None
        optimizer = AdamW(model.parameters(), lr=1e-3, device=self.device)
        timeline = report = None

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        if not offloads:
            for _ in range(STEPS):
                step()
        else:
            with offload(model, optimizer, budget=self.budget, updates=self.updates) as engine:
                for number in range(STEPS):
                    if number == 1 and overlaps is not None:
                        with engine.record(
                            self.platform,
                            compute=self.compute,
                            host_params_per_s=self.host_params_per_s,
                            overlaps=overlaps,
                        ) as recording:
                            step()
                        timeline = recording.timeline
                    else:
                        step()
                report = engine.report()
        left = [parameter.detach().clone() for parameter in model.parameters()]
        moments = [
            optimizer.state[parameter][name].clone()
            for parameter in model.parameters()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return Trained(left=[*left, *moments], timeline=timeline, report=report)

    def _made(self) -> tuple[nn.Sequential, Tensor]:
        """The layers, and an input."""
        generator = torch.Generator().manual_seed(self.seed)
        model = nn.Sequential()
        for _ in range(self.layers):
            layer = nn.Linear(self.width, self.width, bias=False)
            with torch.no_grad():
                layer.weight.copy_(_random(self.width, self.width, generator=generator))
            model.extend([layer, nn.Tanh()])
        return model, _random(self.batch, self.width, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a training.

    Attributes
    ----------
    left : resulting parameters and moments.
    timeline : of the recorded step.
    report : of the engine.
    """

    left: list[Tensor]
    timeline: Timeline | None
    report: Report | None

    @cached_property
    def phase(self) -> Phase:
        """Phase of backward and update."""
        assert self.timeline is not None, "a step was recorded"
        return backward_and_update(self.timeline)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A stack trained three times: recorded with overlap, recorded without overlap, and without
    offload.

    Attributes
    ----------
    bits : different in both recordings from training without offload.
    """

    stack: Stack
    overlapped: Trained
    serial: Trained
    bits: int

    @classmethod
    def of(cls, stack: Stack) -> Overlap:
        """Train a stack three times."""
        plain = stack.train(offloads=False)
        overlapped, serial = stack.train(overlaps=True), stack.train(overlaps=False)
        bits = sum(_differing(each.left, plain.left) for each in (overlapped, serial))
        return cls(stack=stack, overlapped=overlapped, serial=serial, bits=bits)

    @property
    def bounds(self) -> Mapping[str, int]:
        """Cycles of backward and update in which each resource is held without overlap, not delayed
        by other operations.
        """
        return self.serial.phase.busy

    @property
    def ratio(self) -> float:
        """Time of backward and update over that of the busiest resource."""
        return self.overlapped.phase.duration / max(self.overlapped.phase.longest, 1)

    @property
    def ratio_of_bounds(self) -> float:
        """Time of backward and update over the longest of `bounds`."""
        return self.overlapped.phase.duration / max(self.serial.phase.longest, 1)

    @property
    def gain(self) -> float:
        """Time of backward and update without overlap over that with it."""
        return self.serial.phase.duration / max(self.overlapped.phase.duration, 1)


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(rows, columns, generator=generator)
    return values.mul_(columns**-0.5)


def _differing(left: list[Tensor], right: list[Tensor]) -> int:
    """Number of bits that differ."""
    return sum(
        int(np.bitwise_count(a.numpy().view(np.uint32) ^ b.numpy().view(np.uint32)).sum())
        for a, b in zip(left, right, strict=True)
    )
