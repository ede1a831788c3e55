"""Optimizers of the example, of nearstep and of torch, and what each needs of a device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nearstep
from nearstep_spec.rule.file import is_in_file
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import optimizer_named
from nearstep_spec.updater.operands import element_bytes

DEVICE = "sim:axdimm?memory=ddr4-1600&channels=2"

ROUNDINGS = ("nearest", "stochastic")
"""Of states in bfloat16."""

DRIVES = ("gpt0.drive", "gpt1.drive")
"""Files in the place of drives."""


@contextmanager
def new_drives(folder: Path | None) -> Iterator[None]:
    """Make the folder of drives; if what is done in this `with` statement fails, nothing that is
    new in it stays, nor the folder if it is new."""
    folders = [] if folder is None else [folder, *folder.parents]
    made = [each for each in folders if not os.path.lexists(each)]
    files = [] if folder is None else [folder / name for name in DRIVES]
    files = [each for each in files if not os.path.lexists(each)]
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for each in files:
            with suppress(OSError):  # what is the matter is being said
                each.unlink()
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise


class NoDrivesError(ValueError):
    """State lies on no drives: there is nothing to go on from."""


def begun(folder: Path | None, device: nearstep.Device) -> bool:
    """Whether there are drives of a run already: in `folder`, or those of the device's cards.

    Raises
    ------
    NoDrivesError : there is neither.
    """
    if folder is not None:
        return any(os.path.lexists(folder / name) for name in DRIVES)
    if not device.drive_places:
        raise NoDrivesError("state must be on drives: with --drives, or with drive= in --device")
    return any(Path(device.drive_places[0]).parent.glob("card*.nearstep"))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer, and what it is trained with if nothing else is given.

    Attributes
    ----------
    name : of nearstep's optimizers, or `FILE.py:NAME`.
    lr : peak learning rate.
    options
    in_torch : its class in `torch.optim`, and in `nearstep.optim`; empty if torch has none.
    """

    name: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    in_torch: str = ""

    @property
    def rule(self) -> Rule:
        """What the kernel runs."""
        definition = optimizer_named(self.name)
        return definition.form({**definition.defaults, **self.options}).rule

    @property
    def rules(self) -> str:
        """What the device's `rules=` must have."""
        return self.name if is_in_file(self.name) else self.rule.name

    def bytes_moved(self, formats: Mapping[str, str] | None = None) -> int:
        """By an update near memory, for each parameter; gradients in fp32, states in `formats`,
        or those of the rule."""
        rule = self.rule
        known = rule.formats if formats is None else formats
        passes = (*rule.arrays_in, *rule.arrays_out)
        return sum(element_bytes(known.get(name, "fp32")) for name in passes)


KINDS = {
    "adamw": Kind(name="adamw", lr=2e-3, in_torch="AdamW"),
    "adam": Kind(name="adam", lr=2e-3, in_torch="Adam"),
    "sgd": Kind(name="sgd", lr=0.1, options={"momentum": 0.9}, in_torch="SGD"),
    "adagrad": Kind(name="adagrad", lr=2e-2, in_torch="Adagrad"),
}


def kind_named(name: str) -> Kind:
    """One of `KINDS`, or an optimizer of a file.

    Raises
    ------
    ValueError : there is none.
    """
    if name in KINDS:
        return KINDS[name]
    if not is_in_file(name):
        raise ValueError(f"{name!r} is not one of {', '.join(KINDS)}, or FILE.py:NAME")
    optimizer = optimizer_named(name)
    if len(optimizer.by_rule) != 1:
        raise ValueError(f"{name!r} must have one rule, not {', '.join(optimizer.by_rule)}")
    lr = optimizer.defaults.get("lr")
    if lr is None:
        raise ValueError(f"{name!r} must have a hyper-parameter lr with a default")
    return Kind(name=name, lr=lr)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An optimizer and how its gradients are treated.

    Attributes
    ----------
    kind
    lr : peak learning rate.
    compression : share of each gradient that is sent.
    error_feedback
    max_grad_norm
    drives : folder of files that state lies on as far as `memory` of the device does not hold it.
    memory
    resume : go on from the last step that drives have, those of `drives` or of the device's cards.
    rounding : of states in bfloat16: nearest or stochastic.
    """

    kind: Kind
    lr: float
    compression: float | None = None
    error_feedback: bool = True
    max_grad_norm: float | None = None
    drives: Path | None = None
    memory: str | None = None
    resume: bool = False
    rounding: str = "nearest"

    @property
    def device(self) -> str:
        """The default device, with what the kernel needs for this."""
        name = DEVICE
        if self.kind.rules != "adam":
            name += f"&rules={self.kind.rules}"
        if self.compression is not None:
            name += "&compression=fused"
        if self.max_grad_norm is not None:
            name += "&scan=yes&gradient_scale=yes"
        if self.rounding != "nearest":
            name += "&state_format=bf16&stochastic_rounding=yes"
        return name

    @property
    def baseline(self) -> str:
        """What it is compared with."""
        return f"torch.optim.{self.kind.in_torch}(fused=True)"

    def on(
        self, device: nearstep.Device, groups: Iterable[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """nearstep's, with its steps on `device`."""
        name = self.kind.in_torch
        make = (
            getattr(nearstep.optim, name)
            if name
            else partial(nearstep.optim.from_rule, self.kind.name)
        )
        optimizer: torch.optim.Optimizer = make(
            groups,
            lr=self.lr,
            device=device,
            compression=self.compression,
            error_feedback=self.error_feedback,
            max_grad_norm=self.max_grad_norm,
            **self._overflow,
            resume=self.resume,
            rounding=self.rounding,
            **self.kind.options,
        )
        return optimizer

    @property
    def _overflow(self) -> dict[str, Any]:
        if self.drives is None:
            return {}
        files = [self.drives / name for name in DRIVES]
        return {"drives": files, "memory": self.memory}

    def in_torch(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """torch's, on whole gradients; who trains with it clips them."""
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.kind.in_torch)(
            groups, lr=self.lr, fused=True, **self.kind.options
        )
        return optimizer
