"""Adadelta as an update rule, and the scalars that the host computes for a step.

Ref: Zeiler, ADADELTA: An Adaptive Learning Rate Method, algorithm 1.
"""

from collections.abc import Mapping

from nearstep_spec.rule.expr import Condition, Value, fma, select, sqrt
from nearstep_spec.rule.optimizer import Number, Optimizer
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scalars import float32

__all__ = ["ADADELTA", "OPTIMIZERS", "adadelta_scalars"]


def _adadelta(
    p: Value,
    g: Value,
    v: Value,
    d: Value,
    *,
    decay: Value,
    rho: Value,
    weight: Value,
    eps: Value,
    step_size: Value,
    decays: Condition,
) -> Mapping[str, Value]:
    """The order of operations of `torch.optim.Adadelta`."""
    # A switch, since fma(0, p, g) would make +0 of -0 and NaN of an infinite p.
    g = select(decays, fma(decay, p, g), g)
    v = fma(weight * g, g, rho * v)
    delta = sqrt(d + eps) / sqrt(v + eps) * g
    return {"p": fma(step_size, delta, p), "v": v, "d": fma(weight * delta, delta, rho * d)}


ADADELTA = Rule(
    "adadelta",
    _adadelta,
    states=("p", "v", "d"),
    inputs=("g",),
    scalars=("decay", "rho", "weight", "eps", "step_size"),
    switches=("decays",),
)


def adadelta_scalars(
    lr: float, rho: float, eps: float, weight_decay: float
) -> dict[str, float | int]:
    """The registers of `ADADELTA`.

    Returns
    -------
    dict : each scalar as a float that binary32 holds exactly, each switch as 0 or 1.
    """
    return {
        "decay": float32(weight_decay),
        "rho": float32(rho),
        "weight": float32(1.0 - rho),
        "eps": float32(eps),
        "step_size": float32(-lr),
        "decays": int(weight_decay != 0.0),
    }


OPTIMIZERS = (
    Optimizer(
        rule=ADADELTA,
        scalars=adadelta_scalars,
        hyper={
            "lr": Number(1.0),
            "rho": Number(0.9),
            "eps": Number(1e-6),
            "weight_decay": Number(0.0),
        },
        state={"square_avg": "v", "acc_delta": "d"},
        counts=True,
    ),
)
