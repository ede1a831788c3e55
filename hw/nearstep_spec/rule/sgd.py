"""Stochastic gradient descent, with and without momentum, and the scalars of a step.

Ref: Sutskever et al., On the importance of initialization and momentum in deep learning (Nesterov).
"""

from collections.abc import Mapping
from typing import Any

from nearstep_spec.rule.expr import Condition, Value, fma, select
from nearstep_spec.rule.optimizer import Conflict, Flag, Form, Number, Optimizer
from nearstep_spec.rule.remainder import crossed
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scalars import float32

__all__ = ["OPTIMIZERS", "SGD", "SGD_MOMENTUM", "sgd_momentum_scalars", "sgd_scalars"]


def _sgd(
    p: Value, g: Value, *, decay: Value, step_size: Value, decays: Condition
) -> Mapping[str, Value]:
    """The order of operations of `torch.optim.SGD` with `fused=True` on a CPU."""
    # A switch, since fma(0, p, g) would make +0 of -0 and NaN of an infinite p.
    g = select(decays, fma(decay, p, g), g)
    return {"p": fma(step_size, g, p)}


def _sgd_momentum(
    p: Value,
    g: Value,
    m: Value,
    *,
    decay: Value,
    m_decay: Value,
    m_weight: Value,
    step_size: Value,
    decays: Condition,
    first: Condition,
    nesterov: Condition,
) -> Mapping[str, Value]:
    """`_sgd` with a momentum buffer, whose contents are ignored when `first` is set."""
    g = select(decays, fma(decay, p, g), g)
    m = select(first, g, fma(m_weight, g, m_decay * m))
    update = select(nesterov, fma(m_decay, m, g), m)
    return {"p": fma(step_size, update, p), "m": m}


SGD = Rule(
    "sgd",
    _sgd,
    states=("p",),
    inputs=("g",),
    scalars=("decay", "step_size"),
    switches=("decays",),
)

SGD_MOMENTUM = Rule(
    "sgd_momentum",
    _sgd_momentum,
    states=("p", "m"),
    inputs=("g",),
    scalars=("decay", "m_decay", "m_weight", "step_size"),
    switches=("decays", "first", "nesterov"),
)


def sgd_scalars(lr: float, weight_decay: float) -> dict[str, float | int]:
    """The registers of `SGD`: each scalar as a float that binary32 holds exactly."""
    return {
        "decay": float32(weight_decay),
        "step_size": float32(-lr),
        "decays": int(weight_decay != 0.0),
    }


def sgd_momentum_scalars(
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> dict[str, float | int]:
    """The registers of `SGD_MOMENTUM` for one step.

    Parameters
    ----------
    lr, momentum, dampening, weight_decay : a momentum of 0 is `SGD` in torch, which then keeps no
        buffer.
    first : the buffer is empty: it is set to the gradient, without dampening.

    Returns
    -------
    dict : each scalar as a float that binary32 holds exactly, each switch as 0 or 1.
    """
    return {
        **sgd_scalars(lr, weight_decay),
        "m_decay": float32(momentum),
        "m_weight": float32(1.0 - dampening),
        "first": int(first),
        "nesterov": int(nesterov),
    }


def _conflict(values: Mapping[str, Any]) -> Conflict | None:
    if values["nesterov"] and (values["momentum"] == 0.0 or values["dampening"] != 0.0):
        return "nesterov", "False without momentum, or with dampening"
    return None


OPTIMIZERS = (
    Optimizer(
        rule=SGD,
        scalars=sgd_scalars,
        hyper={
            "lr": Number(1e-3),
            "momentum": Number(0.0),
            "dampening": Number(0.0),
            "weight_decay": Number(0.0),
            "nesterov": Flag(),
        },
        state={"momentum_buffer": "m"},
        forms=(
            Form(
                rule=SGD_MOMENTUM,
                scalars=sgd_momentum_scalars,
                when="momentum",
                remainder=crossed(SGD_MOMENTUM),
            ),
        ),
        conflict=_conflict,
    ),
)
