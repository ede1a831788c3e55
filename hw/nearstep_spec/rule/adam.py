"""Adam and AdamW as update rules, and the scalars that the host computes for a step.

Ref: AXDIMM, Algorithm 1; Loshchilov and Hutter, Decoupled Weight Decay Regularization, Algorithm 2;
Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, Algorithm 2 (AMSGrad).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from nearstep_spec.rule.expr import Condition, Value, equal, fma, maximum, select, sqrt
from nearstep_spec.rule.optimizer import Flag, Form, Hyper, Number, Numbers, Optimizer
from nearstep_spec.rule.remainder import crossed
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scalars import float32

__all__ = [
    "ADAM",
    "ADAM_AMSGRAD",
    "ADAM_PAPER",
    "OPTIMIZERS",
    "ORDERS",
    "adam_paper_scalars",
    "adam_scalars",
]


def _moments(
    p: Value,
    g: Value,
    m: Value,
    v: Value,
    decay: Value,
    m_weight: Value,
    v_weight: Value,
    v_decay: Value,
    decoupled: Condition,
    m_from_g: Condition,
) -> tuple[Value, Value, Value]:
    """Return p, decayed if decay is decoupled, and the new m and v."""
    # One unit serves both modes, because fma(decay, p, -0) is decay * p.
    decayed = fma(decay, p, select(decoupled, -0.0, g))
    p = select(decoupled, decayed, p)
    g = select(decoupled, g, decayed)
    m = fma(m_weight, g - m, select(m_from_g, g, m))
    v = fma(v_weight * g, g, v_decay * v)
    return p, m, v


def _adam(
    p: Value,
    g: Value,
    m: Value,
    v: Value,
    *,
    decay: Value,
    m_weight: Value,
    v_weight: Value,
    v_decay: Value,
    v_correction: Value,
    eps: Value,
    step_size: Value,
    decoupled: Condition,
    m_from_g: Condition,
) -> Mapping[str, Value]:
    """The order of operations of `torch.optim.Adam` and `AdamW` with `fused=True` on a CPU."""
    p, m, v = _moments(p, g, m, v, decay, m_weight, v_weight, v_decay, decoupled, m_from_g)
    denominator = sqrt(v) / v_correction + eps
    return {"p": p + step_size * m / denominator, "m": m, "v": v}


def _adam_amsgrad(
    p: Value,
    g: Value,
    m: Value,
    v: Value,
    v_max: Value,
    *,
    decay: Value,
    m_weight: Value,
    v_weight: Value,
    v_decay: Value,
    v_correction: Value,
    eps: Value,
    step_size: Value,
    decoupled: Condition,
    m_from_g: Condition,
) -> Mapping[str, Value]:
    """`_adam` with `amsgrad=True`."""
    p, m, v = _moments(p, g, m, v, decay, m_weight, v_weight, v_decay, decoupled, m_from_g)
    # Of two zeros torch's vectorised maximum returns the second, v, whose sign may be -.
    v_max = select(equal(v_max, v), v, maximum(v_max, v))
    denominator = sqrt(v_max) / v_correction + eps
    return {"p": p + step_size * m / denominator, "m": m, "v": v, "v_max": v_max}


def _adam_paper(
    p: Value,
    g: Value,
    m: Value,
    v: Value,
    *,
    decay: Value,
    m_decay: Value,
    m_weight: Value,
    v_decay: Value,
    v_weight: Value,
    m_correction: Value,
    v_correction: Value,
    eps: Value,
    lr: Value,
    decoupled: Condition,
) -> Mapping[str, Value]:
    """Algorithm 1 line by line, every operation rounded; `decoupled` is AdamW's decay."""
    decayed = decay * p
    g = select(decoupled, g, g + decayed)
    p = select(decoupled, decayed, p)
    m = m_decay * m + m_weight * g
    v = v_decay * v + v_weight * (g * g)
    m_hat = m / m_correction
    v_hat = v / v_correction
    return {"p": p - lr * m_hat / (sqrt(v_hat) + eps), "m": m, "v": v}


ADAM = Rule(
    "adam",
    _adam,
    states=("p", "m", "v"),
    inputs=("g",),
    scalars=(
        "decay", "m_weight", "v_weight", "v_decay", "v_correction", "eps", "step_size"
    ),
    switches=("decoupled", "m_from_g"),
)  # fmt: skip

ADAM_AMSGRAD = Rule(
    "adam_amsgrad",
    _adam_amsgrad,
    states=("p", "m", "v", "v_max"),
    inputs=("g",),
    scalars=ADAM.scalars,
    switches=ADAM.switches,
)

ADAM_PAPER = Rule(
    "adam_paper",
    _adam_paper,
    states=("p", "m", "v"),
    inputs=("g",),
    scalars=(
        "decay", "m_decay", "m_weight", "v_decay", "v_weight", "m_correction", "v_correction",
        "eps", "lr",
    ),
    switches=("decoupled",),
)  # fmt: skip


def _decay(lr: float, weight_decay: float, decoupled: bool) -> tuple[float, int]:
    # Without decay, AdamW's form does not change p and g: p * 1.
    if weight_decay == 0.0:
        return 1.0, 1
    return (1.0 - lr * weight_decay, 1) if decoupled else (weight_decay, 0)


def adam_scalars(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled_weight_decay: bool,
) -> dict[str, float | int]:
    """The registers of `ADAM`, or of `ADAM_AMSGRAD`, for one step.

    Computed in binary64 and rounded once to binary32, as torch's fused kernel does; but the second
    form of the interpolation of m subtracts 1 from the rounded weight.

    Parameters
    ----------
    betas : each in [0, 1).
    step : t, from 1.
    decoupled_weight_decay : AdamW when true, L2 regularisation when false.

    Returns
    -------
    dict : each scalar as a float that binary32 holds exactly, each switch as 0 or 1.
    """
    beta1, beta2 = betas
    decay, is_decoupled = _decay(lr, weight_decay, decoupled_weight_decay)
    m_weight = float32(1.0 - beta1)
    m_from_g = abs(m_weight) >= 0.5
    return {
        "decay": float32(decay),
        "m_weight": m_weight - 1.0 if m_from_g else m_weight,
        "v_weight": float32(1.0 - beta2),
        "v_decay": float32(beta2),
        "v_correction": float32(math.sqrt(1.0 - beta2**step)),
        "eps": float32(eps),
        "step_size": float32(-(lr / (1.0 - beta1**step))),
        "decoupled": is_decoupled,
        "m_from_g": int(m_from_g),
    }


def adam_paper_scalars(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled_weight_decay: bool,
) -> dict[str, float | int]:
    """The registers of `ADAM_PAPER`; parameters as for `adam_scalars`."""
    beta1, beta2 = betas
    decay, is_decoupled = _decay(lr, weight_decay, decoupled_weight_decay)
    return {
        "decay": float32(decay),
        "m_decay": float32(beta1),
        "m_weight": float32(1.0 - beta1),
        "v_decay": float32(beta2),
        "v_weight": float32(1.0 - beta2),
        "m_correction": float32(1.0 - beta1**step),
        "v_correction": float32(1.0 - beta2**step),
        "eps": float32(eps),
        "lr": float32(lr),
        "decoupled": is_decoupled,
    }


#: Rule and scalars of each order of operations, by the name that configurations use.
ORDERS: Mapping[str, tuple[Rule, Callable[..., dict[str, float | int]]]] = MappingProxyType(
    {"default": (ADAM, adam_scalars), "paper": (ADAM_PAPER, adam_paper_scalars)}
)

_ADAM = Optimizer(
    rule=ADAM,
    scalars=adam_scalars,
    remainder=crossed(ADAM),
    hyper={
        "lr": Number(1e-3),
        "betas": Numbers((0.9, 0.999)),
        "eps": Number(1e-8),
        "weight_decay": Number(0.0),
        "amsgrad": Flag(),
        "decoupled_weight_decay": Flag(),
    },
    state={"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "v_max"},
    counts=True,
    forms=(
        Form(
            rule=ADAM_AMSGRAD,
            scalars=adam_scalars,
            when="amsgrad",
            remainder=crossed(ADAM_AMSGRAD),
        ),
    ),
    orders={"paper": Form(rule=ADAM_PAPER, scalars=adam_paper_scalars)},
)
_DECOUPLED: Mapping[str, Hyper] = {
    "weight_decay": Number(1e-2),
    "decoupled_weight_decay": Flag(True),
}

OPTIMIZERS = (_ADAM, replace(_ADAM, name="adamw", hyper={**_ADAM.hyper, **_DECOUPLED}))
