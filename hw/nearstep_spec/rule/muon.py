"""Muon: momentum that the host makes orthogonal between the two runs of a step.

Ref: Jordan et al., Muon: An optimizer for hidden layers in neural networks; Liu et al., Muon is
Scalable for LLM Training, 2.2 (`match_rms_adamw`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nearstep_spec.rule.expr import Condition, Value, fma, select
from nearstep_spec.rule.optimizer import Choice, Flag, Number, Numbers, Optimizer, Part
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scalars import bfloat16, float32

__all__ = ["MUON", "OPTIMIZERS", "muon_scalars", "orthogonalised"]

ORIGINAL, MATCH_RMS_ADAMW = "original", "match_rms_adamw"


def _muon(
    p: Value,
    g: Value,
    m: Value,
    *,
    decay: Value,
    m_weight: Value,
    step_size: Value,
    m_from_g: Condition,
    second: Condition,
) -> Mapping[str, Value]:
    """The order of operations of `torch.optim.Muon` on a CPU.

    The first run decays p and moves m towards g. The second run adds g, which the host has made of
    m, to p.
    """
    # One unit serves both runs, because fma(decay, p, -0) is decay * p.
    factor, other = select(second, step_size, decay), select(second, p, -0.0)
    mean = fma(m_weight, g - m, select(m_from_g, g, m))
    return {"p": fma(factor, select(second, g, p), other), "m": select(second, m, mean)}


MUON = Rule(
    "muon",
    _muon,
    states=("p", "m"),
    inputs=("g",),
    scalars=("decay", "m_weight", "step_size"),
    switches=("m_from_g", "second"),
)


def _factor(lr: float, adjust_lr_fn: str, part: Part) -> float:
    """Factor of the update of a matrix, which torch rounds to bf16 for parameters in bf16."""
    rows, columns = part.shape
    ratio = math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == MATCH_RMS_ADAMW:
        ratio = 0.2 * math.sqrt(max(rows, columns))
    return (bfloat16 if part.format == "bf16" else float32)(-(lr * ratio))


def _is_product_rounded(part: Part) -> bool:
    """Whether torch rounds the product of factor and update to bf16, before it adds the product to
    parameters in bf16: the update of a tall matrix is a transposed one."""
    return part.format == "bf16" and part.shape[0] > part.shape[1] > 1


def muon_scalars(
    lr: float, weight_decay: float, momentum: float, adjust_lr_fn: str, part: Part
) -> dict[str, float | int]:
    """The registers of `MUON` for a run.

    Returns
    -------
    dict : each scalar as a float that binary32 holds exactly, each switch as 0 or 1.
    """
    m_weight = float32(1.0 - momentum)
    m_from_g = abs(m_weight) >= 0.5
    step_size = 1.0
    if part.number and not _is_product_rounded(part):
        step_size = _factor(lr, adjust_lr_fn, part)
    return {
        "decay": float32(1.0 - lr * weight_decay),
        "m_weight": m_weight - 1.0 if m_from_g else m_weight,
        "step_size": step_size,
        "m_from_g": int(m_from_g),
        "second": part.number,
    }


def orthogonalised(
    g: Any,
    m: Any,
    momentum: float,
    nesterov: bool,
    ns_coefficients: Sequence[float],
    ns_steps: float,
    eps: float,
    lr: float,
    adjust_lr_fn: str,
    part: Part,
) -> Any:
    """Return the update, a tensor in bf16, of a gradient and its momentum, tensors of two
    dimensions, by the iteration of Newton and Schulz in the order of operations of torch.
    """
    update = g.lerp(m, momentum) if nesterov else m
    matrix = update.bfloat16()
    is_tall = matrix.shape[0] > matrix.shape[1]
    if is_tall:
        matrix = matrix.T
    a, b, c = ns_coefficients
    matrix = matrix / matrix.norm().clamp(min=eps)
    for _ in range(int(ns_steps)):
        gram = matrix @ matrix.T
        matrix = matrix.addmm(gram.addmm(gram, gram, beta=b, alpha=c), matrix, beta=a)
    matrix = matrix.T if is_tall else matrix
    return matrix * _factor(lr, adjust_lr_fn, part) if _is_product_rounded(part) else matrix


OPTIMIZERS = (
    Optimizer(
        rule=MUON,
        scalars=muon_scalars,
        hyper={
            "lr": Number(1e-3),
            "weight_decay": Number(0.1),
            "momentum": Number(0.95),
            "nesterov": Flag(True),
            "ns_coefficients": Numbers(
                (3.4445, -4.775, 2.0315), low=-math.inf, below=math.inf, allowed="finite"
            ),
            "eps": Number(1e-7),
            "ns_steps": Number(5, below=100, whole=True),
            "adjust_lr_fn": Choice(ORIGINAL, (ORIGINAL, MATCH_RMS_ADAMW)),
        },
        state={"momentum_buffer": "m"},
        between=orthogonalised,
        dimensions=2,
    ),
)
