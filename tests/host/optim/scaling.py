"""Optimizers, scalers and devices of the tests of loss scaling and clipping."""

from __future__ import annotations

import torch

import nearstep

RULES = "rules=adam,sgd,sgd_momentum,adagrad"


KERNEL = (
    f"{RULES}&scan=yes&gradient_scale=yes&compression=fused"
    "&gradient_formats=fp32,fp16,bf16&memory_bytes=64MiB"
)


URLS = {
    "kernel": f"golden:axdimm?{KERNEL}",
    "dimm": f"golden:axdimm?channels=2&block_bytes=512&{KERNEL}",
    "card": "golden:smartssd?memory_bytes=64MiB",
}


KINDS = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "weight_decay": 0.01},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9, "maximize": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
}


SCALERS = {"torch": torch.amp.GradScaler, "nearstep": nearstep.optim.GradScaler}


def pair(kind, ours, theirs, device, **options):
    name = kind.split()[0]
    return (
        getattr(nearstep.optim, name)(ours, device=device, **KINDS[kind], **options),
        getattr(torch.optim, name)(theirs, fused=True, **KINDS[kind]),
    )


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
