"""Optimizers of the example, of nearstep and of torch, and what each needs of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import nearstep

DEVICE = "sim:axdimm?memory=ddr4-1600&channels=2"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer.

    Attributes
    ----------
    name: str
        Class in ``nearstep.optim`` and ``torch.optim``.
    rule: str
        What the kernel needs.
    lr: float
        Peak learning rate, if none is given.
    reads, writes: str
        Arrays of a step.
    options: Mapping[str, Any]
    """

    name: str
    rule: str
    lr: float
    reads: str
    writes: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def beats(self) -> int:
        """Arrays that pass the memory port of a kernel; so many beats for each of parameters."""
        return len(self.reads) + len(self.writes)


KINDS = {
    "adamw": Kind(name="AdamW", rule="adam", lr=2e-3, reads="pgmv", writes="pmv"),
    "adam": Kind(name="Adam", rule="adam", lr=2e-3, reads="pgmv", writes="pmv"),
    "sgd": Kind(
        name="SGD",
        rule="sgd_momentum",
        lr=0.1,
        reads="pgm",
        writes="pm",
        options={"momentum": 0.9},
    ),
    "adagrad": Kind(name="Adagrad", rule="adagrad", lr=2e-2, reads="pgv", writes="pv"),
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An optimizer and how its gradients are treated.

    Attributes
    ----------
    kind: Kind
    lr: float
        Peak learning rate.
    compression: float | None
        Share of each gradient that is sent.
    error_feedback: bool
    max_grad_norm: float | None
    """

    kind: Kind
    lr: float
    compression: float | None = None
    error_feedback: bool = True
    max_grad_norm: float | None = None

    @property
    def device(self) -> str:
        """The default device, with what the kernel needs for this."""
        name = DEVICE
        if self.kind.rule != "adam":
            name += f"&rules={self.kind.rule}"
        if self.compression is not None:
            name += "&compression=fused"
        if self.max_grad_norm is not None:
            name += "&scan=yes&gradient_scale=yes"
        return name

    @property
    def baseline(self) -> str:
        """What it is compared with."""
        return f"torch.optim.{self.kind.name}(fused=True)"

    def on(
        self, device: nearstep.Device, groups: Iterable[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """nearstep's, with its steps on ``device``."""
        optimizer: torch.optim.Optimizer = getattr(nearstep.optim, self.kind.name)(
            groups,
            lr=self.lr,
            device=device,
            compression=self.compression,
            error_feedback=self.error_feedback,
            max_grad_norm=self.max_grad_norm,
            **self.kind.options,
        )
        return optimizer

    def in_torch(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """torch's, on whole gradients; who trains with it clips them."""
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.kind.name)(
            groups, lr=self.lr, fused=True, **self.kind.options
        )
        return optimizer
