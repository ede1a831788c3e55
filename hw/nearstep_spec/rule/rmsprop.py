"""RMSprop as an update rule, and the scalars that the host computes for a step.

Ref: Tieleman and Hinton, Lecture 6.5: rmsprop.
"""

from collections.abc import Mapping

from nearstep_spec.rule.expr import Condition, Value, fma, select, sqrt
from nearstep_spec.rule.optimizer import Number, Optimizer
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scalars import float32

__all__ = ["OPTIMIZERS", "RMSPROP", "rmsprop_scalars"]


def _rmsprop(
    p: Value,
    g: Value,
    v: Value,
    *,
    decay: Value,
    v_decay: Value,
    v_weight: Value,
    eps: Value,
    step_size: Value,
    decays: Condition,
) -> Mapping[str, Value]:
    """The order of operations of `torch.optim.RMSprop`, neither centered nor with momentum."""
    # A switch, since fma(0, p, g) would make +0 of -0 and NaN of an infinite p.
    g = select(decays, fma(decay, p, g), g)
    v = fma(v_weight * g, g, v_decay * v)
    return {"p": p + step_size * g / (sqrt(v) + eps), "v": v}


RMSPROP = Rule(
    "rmsprop",
    _rmsprop,
    states=("p", "v"),
    inputs=("g",),
    scalars=("decay", "v_decay", "v_weight", "eps", "step_size"),
    switches=("decays",),
)


def rmsprop_scalars(
    lr: float, alpha: float, eps: float, weight_decay: float
) -> dict[str, float | int]:
    """The registers of `RMSPROP`.

    Returns
    -------
    dict : each scalar as a float that binary32 holds exactly, each switch as 0 or 1.
    """
    return {
        "decay": float32(weight_decay),
        "v_decay": float32(alpha),
        "v_weight": float32(1.0 - alpha),
        "eps": float32(eps),
        "step_size": float32(-lr),
        "decays": int(weight_decay != 0.0),
    }


OPTIMIZERS = (
    Optimizer(
        rule=RMSPROP,
        scalars=rmsprop_scalars,
        hyper={
            "lr": Number(1e-2),
            "alpha": Number(0.99),
            "eps": Number(1e-8),
            "weight_decay": Number(0.0),
        },
        state={"square_avg": "v"},
        counts=True,
    ),
)
