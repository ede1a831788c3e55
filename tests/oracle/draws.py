"""Operands and hyper-parameters for every rule, drawn at random, awkward ones among them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_spec.rule.optimizer import Part

SPECIALS = np.array(
    [
        *(0x0000_0000, 0x0000_0001, 0x0000_0002, 0x007F_FFFF),  # zero, subnormals
        *(0x0080_0000, 0x0080_0001, 0x00FF_FFFF),  # the least normal ones
        *(0x3F00_0000, 0x3F7F_FFFF, 0x3F80_0000, 0x3F80_0001, 0x3FC0_0000),  # around 1
        *(0x1F80_0000, 0x5F80_0000, 0x7F00_0000, 0x7F7F_FFFF),  # squares at the ends of the range
        *(0x7F80_0000, 0x7FC0_0000),  # infinity, NaN
    ],
    np.uint32,
)
"""Patterns without a sign."""


def patterns(rng: np.random.Generator, count: int, *, signed: bool = True) -> NDArray[np.uint32]:
    """A third specials, a third any pattern, a third ordinary numbers; NaNs are default ones."""
    kind = rng.integers(0, 3, count)
    ordinary = rng.standard_normal(count) * 10.0 ** rng.uniform(-6, 2, count)
    bits = ordinary.astype(np.float32).view(np.uint32)
    bits = np.where(kind == 0, rng.choice(SPECIALS, count), bits)
    bits = np.where(kind == 1, rng.integers(0, 1 << 32, count, dtype=np.uint32), bits)
    sign = rng.integers(0, 2, count, dtype=np.uint32) << 31 if signed else np.uint32(0)
    bits = (bits & np.uint32(0x7FFF_FFFF)) | sign
    return np.where(np.isnan(bits.view(np.float32)), np.uint32(0x7FC0_0000), bits)


def crossed(arrays: int, values: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
    """Every combination of the values with both signs, a vector for each array."""
    both = np.concatenate([values, values | np.uint32(1 << 31)])
    both = both[~np.isnan(both.view(np.float32)) | (both >> 31 == 0)]
    return [each.reshape(-1) for each in np.meshgrid(*[both] * arrays, indexing="ij")]


def hyper(rule: str, rng: random.Random) -> dict[str, Any]:
    """Hyper-parameters that ask for a rule."""
    made: dict[str, Any] = {
        "lr": rng.choice([10 ** rng.uniform(-6, 1), 0.0, 1.0]),
        "weight_decay": rng.choice([0.0, 10 ** rng.uniform(-5, 0)]),
    }
    if rule.startswith("adam"):
        made["betas"] = (
            rng.choice([rng.random(), 0.9, 0.0, 0.5, 0.49999999]),
            rng.choice([1 - 10 ** rng.uniform(-5, 0), 0.999, 0.0]),
        )
        made |= {"amsgrad": rule == "adam_amsgrad", "step": rng.choice([1, 2, 10, 100_000])}
        made |= {"decoupled_weight_decay": rng.random() < 0.5}
    elif rule == "sgd":
        made["momentum"] = 0.0
    elif rule == "sgd_momentum":
        made |= {"momentum": rng.uniform(0.1, 0.99), "nesterov": rng.random() < 0.5}
        made["dampening"] = 0.0 if made["nesterov"] else rng.choice([0.0, 1.0, rng.random()])
        made["first"] = rng.random() < 0.3
    elif rule == "adagrad":
        made |= {"lr_decay": rng.choice([0.0, rng.random()]), "step": rng.choice([1, 2, 1000])}
    elif rule == "rmsprop":
        made["alpha"] = rng.choice([0.99, rng.random(), 0.0])
    elif rule == "adadelta":
        made["rho"] = rng.choice([0.9, rng.random(), 0.0])
    elif rule == "muon":
        made["momentum"] = rng.choice([0.95, rng.random(), 0.0, 0.5, 1.5])
        made["part"] = rng.choice([Part(), Part(1, (3, 2)), Part(1, (2, 5), "bf16")])
        made["adjust_lr_fn"] = rng.choice(["original", "match_rms_adamw"])
    if "sgd" not in rule:
        made["eps"] = rng.choice([10 ** rng.uniform(-12, -3), 0.0, 1e-46])
    return made
