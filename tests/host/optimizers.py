"""Optimizers for conformance suites: those of the package, and those of the examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nearstep_spec.rule.optimizer import Choice, Flag, Form, Numbers, Optimizer
from nearstep_spec.rule.rules import OPTIMIZERS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LION, MIXED, NARROW = (
    f"{EXAMPLES}/{each}"
    for each in ("lion.py:LION", "adam_bf16.py:ADAM_BF16", "adam_bf16.py:ADAM_ALL_BF16")
)
_OF_FP32 = sorted({rule for each in OPTIMIZERS.values() for rule in each.by_rule})
GROUPS = {
    "all": (f"{','.join(_OF_FP32)},{LION}", [*OPTIMIZERS, LION]),
    "mixed": (MIXED, [MIXED]),
    "narrow": (NARROW, [NARROW]),
}
"""Rules that one kernel can have, and the optimizers that are tried with them."""

FORMATS = "gradient_formats=fp32,fp16,bf16&gradient_scale=yes&copy_out_formats=fp16,bf16"
"""Options of a device that has every format."""

ORDINARY = (3e-3, 0.5)
"""Hyper-parameters lie between these, where they may."""


def hyper_of(optimizer: Optimizer, form: Form, rng: np.random.Generator) -> dict[str, Any]:
    """Hyper-parameters that ask for a form of an optimizer."""
    others = {each.when for each in optimizer.forms} - {form.when}
    made: dict[str, Any] = {}
    for name, kind in optimizer.hyper.items():
        if isinstance(kind, Flag):
            made[name] = name == form.when or bool(name not in others and rng.integers(2))
        elif isinstance(kind, Choice):
            made[name] = str(rng.choice(kind.names))
        elif isinstance(kind, Numbers):
            made[name] = tuple(rng.uniform(0.5, 0.99) for _ in kind.default)
        elif kind.whole:
            made[name] = int(rng.integers(1, 5))
        else:
            made[name] = 0.0 if name in others else float(rng.uniform(*ORDINARY))
    while optimizer.conflict is not None and (wrong := optimizer.conflict(made)) is not None:
        made[wrong[0]] = False if isinstance(optimizer.hyper[wrong[0]], Flag) else 0.0
    return made
