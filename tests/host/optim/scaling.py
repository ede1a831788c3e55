"""Scalers and devices of the tests of loss scaling and clipping."""

from __future__ import annotations

import torch

import nearstep

from .beside import KINDS as EVERY_KIND
from .beside import Beside

KERNEL = (
    "rules=adam,sgd,sgd_momentum,adagrad&scan=yes&gradient_scale=yes&compression=fused"
    "&gradient_formats=fp32,fp16,bf16&memory_bytes=64MiB"
)
URLS = {
    "kernel": f"golden:axdimm?{KERNEL}",
    "dimm": f"golden:axdimm?channels=2&block_bytes=512&{KERNEL}",
    "card": "golden:smartssd?memory_bytes=64MiB",
}
KINDS = [kind for kind in EVERY_KIND if kind != "amsgrad"]
SCALERS = {"torch": torch.amp.GradScaler, "nearstep": nearstep.optim.GradScaler}


def scalers(kind, **options):
    """One for ours and one for torch's, each with a scale."""
    made = SCALERS[kind]("cpu", **options), torch.amp.GradScaler("cpu", **options)
    for scaler in made:
        scaler.scale(torch.ones(()))
    return made


def scaled(parameters, factor, bad=None):
    for p in parameters:
        if p.grad is not None:
            p.grad *= factor
    if bad is not None:
        parameters[1].grad.view(-1)[3] = bad


def scaled_step(beside: Beside, both, bad=None, between=lambda side, scaler: None) -> list:
    """A step of both with their scalers, of gradients of which one may be bad."""
    beside.give()
    given = []
    for side, scaler in zip(beside, both, strict=True):
        scaled(side.parameters, scaler.get_scale(), bad)
        between(side, scaler)
        given.append([p.grad.clone() for p in side.parameters])
        scaler.step(side.optimizer)
        scaler.update()
    assert both[0].state_dict() == both[1].state_dict()
    return given[0]
