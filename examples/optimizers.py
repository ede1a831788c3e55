"""Optimizers of the example, of nearstep and of torch, and what each needs of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import nearstep
from nearstep_spec.rule.rules import optimizer_named

DEVICE = "sim:axdimm?memory=ddr4-1600&channels=2"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer.

    Attributes
    ----------
    name: str
        Class in ``nearstep.optim`` and ``torch.optim``; of an optimizer in a file
        ``FILE.py:NAME``, and torch has none.
    rule: str
        What the kernel needs.
    lr: float
        Peak learning rate, if none is given.
    reads, writes: Sequence[str]
        Arrays of a step.
    options: Mapping[str, Any]
    """

    name: str
    rule: str
    lr: float
    reads: Sequence[str]
    writes: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_file(self) -> bool:
        """Whether it is an optimizer of a file."""
        return ":" in self.name

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


def kind_named(name: str) -> Kind:
    """One of :data:`KINDS`, or an optimizer of a file.

    Raises
    ------
    ValueError
        There is none.
    """
    if name in KINDS:
        return KINDS[name]
    if ":" not in name:
        raise ValueError(f"{name!r} is not one of {', '.join(KINDS)}, or FILE.py:NAME")
    optimizer = optimizer_named(name)
    if len(optimizer.by_rule) != 1:
        raise ValueError(f"{name!r} must have one rule, not {', '.join(optimizer.by_rule)}")
    lr = optimizer.defaults.get("lr")
    if lr is None:
        raise ValueError(f"{name!r} must have a hyper-parameter lr with a default")
    rule = optimizer.rule
    return Kind(
        name=name,
        rule=name,
        lr=lr,
        reads=rule.arrays_in,
        writes=rule.arrays_out,
    )


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
        name = self.kind.name
        in_file = self.kind.in_file
        make = partial(nearstep.optim.of, name) if in_file else getattr(nearstep.optim, name)
        optimizer: torch.optim.Optimizer = make(
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
