"""Plans of policy memferry: a decision for each layer."""

from __future__ import annotations

import random
from collections.abc import Mapping

from torch import nn

from nearstep.memferry.cost import DECISIONS, Decision
from nearstep.memferry.plan import Plan as Places
from nearstep.torch.memferry import model_fingerprint
from nearstep.torch.memferry.layers import layers_of

from .training import Plan, made


def places(model: nn.Module, layers: Mapping[str, Decision]) -> Places:
    """A plan for a model."""
    fingerprint = model_fingerprint(model)
    return Places(fingerprint=fingerprint, budget_bytes=None, reserve=1.0, layers=layers)


def drawn(model: nn.Module, choose: random.Random) -> Places:
    """A plan with any decision for each layer."""
    return places(model, {name: choose.choice(DECISIONS) for name in layers_of(model)})


def everywhere(plan: Plan, decision: Decision) -> Places:
    """A plan with one decision for all layers."""
    model, _ = made(plan)
    return places(model, dict.fromkeys(layers_of(model), decision))
