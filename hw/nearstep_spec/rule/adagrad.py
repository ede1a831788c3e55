"""Adagrad as an update rule, and the scalars that the host computes for a step.

Ref: Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning.
"""

import math
from collections.abc import Mapping

from nearstep_spec.rule.expr import Condition, Value, fma, select, sqrt
from nearstep_spec.rule.optimizer import Number, Optimizer
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scalars import LARGEST, float32

__all__ = ["ADAGRAD", "OPTIMIZERS", "adagrad_scalars"]


def _adagrad(
    p: Value,
    g: Value,
    v: Value,
    *,
    decay: Value,
    eps: Value,
    step_size: Value,
    decays: Condition,
) -> Mapping[str, Value]:
    """The order of operations of `torch.optim.Adagrad` with `fused=True` on a CPU."""
    # A switch, since fma(0, p, g) would make +0 of -0 and NaN of an infinite p.
    g = select(decays, fma(decay, p, g), g)
    v = fma(g, g, v)
    return {"p": p + step_size * g / (sqrt(v) + eps), "v": v}


ADAGRAD = Rule(
    "adagrad",
    _adagrad,
    states=("p", "v"),
    inputs=("g",),
    scalars=("decay", "eps", "step_size"),
    switches=("decays",),
)


def adagrad_scalars(
    lr: float, lr_decay: float, weight_decay: float, eps: float, step: int
) -> dict[str, float | int]:
    """The registers of `ADAGRAD` for one step.

    The sum of squares `v` starts at the initial accumulator value, which the host writes.

    Parameters
    ----------
    step : t, from 1.

    Returns
    -------
    dict : each scalar as a float that binary32 holds exactly, each switch as 0 or 1.
    """
    return {
        "decay": float32(weight_decay),
        "eps": float32(eps),
        "step_size": float32(-(lr / (1.0 + (step - 1) * lr_decay))),
        "decays": int(weight_decay != 0.0),
    }


OPTIMIZERS = (
    Optimizer(
        rule=ADAGRAD,
        scalars=adagrad_scalars,
        hyper={
            "lr": Number(1e-2),
            "lr_decay": Number(0.0),
            "weight_decay": Number(0.0),
            "initial_accumulator_value": Number(
                0.0, below=math.nextafter(LARGEST, math.inf), allowed="an fp32 number"
            ),
            "eps": Number(1e-10),
        },
        state={"sum": "v"},
        counts=True,
        initial={"v": "initial_accumulator_value"},
        from_start=True,
    ),
)
