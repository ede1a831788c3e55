"""Update rules as the papers and torch write them, for any arithmetic of `arithmetic`.

Nothing here comes from `nearstep_spec.rule`. Where torch's kernels round is what their C++ says:
`a * b + c` of its vectors is one operation, and numbers of the host are binary64 until a vector is
made of them.

Ref: AXDIMM, Algorithm 1; Smart-Infinity, section V-A; torch/csrc and ATen of torch 2.13:
native/cpu/FusedAdamKernel.cpp, FusedSGDKernel.cpp, FusedAdagradKernel.cpp; torch.optim's rmsprop.py
and adadelta.py; Reddi, Kale and Kumar, On the Convergence of Adam and Beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Numbers = dict[str, Any]
Hyper = Mapping[str, Any]


def axpby(kind: Any, x: Numbers, h: Hyper) -> Numbers:
    """Both vectors are multiplied by their coefficients and added; the second product is rounded,
    the first goes into the sum as it is."""
    return {"z": kind.fma(kind.number(h["a"]), x["x"], kind.number(h["b"]) * x["y"])}


def adam(kind: Any, x: Numbers, h: Hyper) -> Numbers:
    """Adam and AdamW of torch, `fused=True`; with `amsgrad` the maximum of second moments."""
    (beta1, beta2), step = h["betas"], h["step"]
    p, g = _decayed(kind, x, h)
    weight = kind.number(1 - beta1)
    # lerp: two forms, so that m is g exactly if the weight is 1
    if float(weight) < 0.5:
        m = kind.fma(weight, g - x["m"], x["m"])
    else:
        m = kind.fma(weight - kind.number(1.0), g - x["m"], g)
    v = kind.fma(kind.number(1 - beta2) * g, g, kind.number(beta2) * x["v"])
    made = {"m": m, "v": v}
    if h["amsgrad"]:
        v = made["v_max"] = kind.larger(x["v_max"], v)
    denominator = kind.sqrt(v) / kind.number(math.sqrt(1 - beta2**step)) + kind.number(h["eps"])
    step_size = kind.number(-(h["lr"] / (1 - beta1**step)))
    return {"p": p + step_size * m / denominator, **made}


def _decayed(kind: Any, x: Numbers, h: Hyper) -> tuple[Any, Any]:
    p, g, decay = x["p"], x["g"], h["weight_decay"]
    if not decay:
        return p, g
    if h["decoupled_weight_decay"]:
        return p * kind.number(1 - h["lr"] * decay), g
    return p, kind.fma(p, kind.number(decay), g)


def adam_paper(kind: Any, x: Numbers, h: Hyper) -> Numbers:
    """Algorithm 1 of AXDIMM, line by line, every operation rounded; AdamW's decay, which the paper
    has not, takes the place of its first line."""
    (beta1, beta2), step, number = h["betas"], h["step"], kind.number
    theta, g = x["p"], x["g"]
    if h["weight_decay"] and h["decoupled_weight_decay"]:
        theta = number(1 - h["lr"] * h["weight_decay"]) * theta
    elif h["weight_decay"]:
        g = g + number(h["weight_decay"]) * theta
    m = number(beta1) * x["m"] + number(1 - beta1) * g
    v = number(beta2) * x["v"] + number(1 - beta2) * (g * g)
    m_hat = m / number(1 - beta1**step)
    v_hat = v / number(1 - beta2**step)
    theta = theta - number(h["lr"]) * m_hat / (kind.sqrt(v_hat) + number(h["eps"]))
    return {"p": theta, "m": m, "v": v}


def _regularised(kind: Any, x: Numbers, h: Hyper) -> Any:
    decay = h["weight_decay"]
    return kind.fma(x["p"], kind.number(decay), x["g"]) if decay else x["g"]


def sgd(kind: Any, x: Numbers, h: Hyper) -> Numbers:
    """SGD of torch, `fused=True`; with a momentum its buffer, which is g after the first step."""
    g, momentum, made = _regularised(kind, x, h), h["momentum"], {}
    if momentum:
        if h["first"]:
            m = g
        else:
            m = kind.fma(kind.number(1 - h["dampening"]), g, kind.number(momentum) * x["m"])
        made["m"] = m
        g = kind.fma(kind.number(momentum), m, g) if h["nesterov"] else m
    return {"p": kind.fma(kind.number(-h["lr"]), g, x["p"]), **made}


def adagrad(kind: Any, x: Numbers, h: Hyper) -> Numbers:
    """Adagrad of torch, `fused=True`."""
    g = _regularised(kind, x, h)
    v = kind.fma(g, g, x["v"])
    rate = h["lr"] / (1 + (h["step"] - 1) * h["lr_decay"])
    p = x["p"] + kind.number(-rate) * g / (kind.sqrt(v) + kind.number(h["eps"]))
    return {"p": p, "v": v}


def rmsprop(kind: Any, x: Numbers, h: Hyper) -> Numbers:
    """RMSprop of torch, not centered, without momentum."""
    g, alpha = _regularised(kind, x, h), h["alpha"]
    v = kind.fma(kind.number(1 - alpha) * g, g, kind.number(alpha) * x["v"])
    p = x["p"] + kind.number(-h["lr"]) * g / (kind.sqrt(v) + kind.number(h["eps"]))
    return {"p": p, "v": v}


def adadelta(kind: Any, x: Numbers, h: Hyper) -> Numbers:
    """Adadelta of torch."""
    g, rho, number = _regularised(kind, x, h), h["rho"], kind.number
    v = kind.fma(number(1 - rho) * g, g, number(rho) * x["v"])
    eps = number(h["eps"])
    delta = kind.sqrt(x["d"] + eps) / kind.sqrt(v + eps) * g
    d = kind.fma(number(1 - rho) * delta, delta, number(rho) * x["d"])
    return {"p": kind.fma(number(-h["lr"]), delta, x["p"]), "v": v, "d": d}


def muon(kind: Any, x: Numbers, h: Hyper) -> Numbers:
    """Muon of torch: what it does before the iteration of Newton and Schulz, and after it."""
    number, p, g, m = kind.number, x["p"], x["g"], x["m"]
    if not h["part"].number:
        weight = np.float32(1 - h["momentum"])
        is_small = abs(weight) < 0.5
        rest = weight if is_small else weight - np.float32(1)
        m = kind.fma(number(float(rest)), g - m, m if is_small else g)
        return {"p": number(1 - h["lr"] * h["weight_decay"]) * p, "m": m}
    rows, columns = h["part"].shape
    ratio = max(1, rows / columns) ** 0.5
    if h["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * max(rows, columns) ** 0.5
    factor = -h["lr"] * ratio
    if h["part"].format == "bf16":
        fraction, exponent = math.frexp(np.float32(factor))
        factor = math.ldexp(float(np.rint(fraction * 256)) / 256, exponent)
    return {"p": kind.fma(number(factor), g, p), "m": m}


Formula = Callable[[Any, Numbers, Hyper], Numbers]

FORMULAS: dict[str, tuple[str, Formula, tuple[str, ...]]] = {
    "adam": ("adam", adam, ("p", "g", "m", "v")),
    "adam_amsgrad": ("adam", adam, ("p", "g", "m", "v", "v_max")),
    "adam_paper": ("adam", adam_paper, ("p", "g", "m", "v")),
    "sgd": ("sgd", sgd, ("p", "g")),
    "sgd_momentum": ("sgd", sgd, ("p", "g", "m")),
    "adagrad": ("adagrad", adagrad, ("p", "g", "v")),
    "rmsprop": ("rmsprop", rmsprop, ("p", "g", "v")),
    "muon": ("muon", muon, ("p", "g", "m")),
    "adadelta": ("adadelta", adadelta, ("p", "g", "v", "d")),
}
"""Of each rule the optimizer, the formula, and the arrays that it reads."""
