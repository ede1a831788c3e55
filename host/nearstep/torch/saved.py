"""Saved state of one parameter: what a checkpoint of torch's has, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from nearstep.torch import options
from nearstep.torch.errors import HyperparameterError, StateError
from nearstep.torch.layout import Layout, scales_of
from nearstep.torch.quantized import Coded, check_codes, check_scales
from nearstep.torch.state import RESIDUAL, ParameterState, check_moment, check_residual
from nearstep.updater.checks import STEPS

MASTER = "master_param"
"""Key of the fp32 master of a 16-bit parameter. torch has no such key and ignores it."""


EXACT_STEPS = 1 << 24
"""Whole numbers below it are fp32 values."""


@dataclass(frozen=True)
class Verbatim:
    """A value that `Optimizer.load_state_dict` is to pass on as it is, not cast to 16 bits."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """State of one parameter that is not on a device.

    Attributes
    ----------
    step : fp32 scalar; None if the layout has none.
    moments : by key; of the parameter's shape, or in 8 bits.
    master : fp32 master of a 16-bit parameter.
    others : values under keys that are not torch's.
    """

    step: Tensor | None
    moments: Mapping[str, Tensor | Coded]
    master: Tensor | None
    others: Mapping[str, Any]

    @classmethod
    def of(cls, layout: Layout, label: str, parameter: Tensor, saved: Mapping[str, Any]) -> Self:
        """Check `saved`, the state of `parameter` as torch's optimizer or `export` has it.

        Raises
        ------
        StateError
        """
        if is_lazy(parameter):
            raise StateError(label, "wait until the parameter has a shape", sorted(saved))
        values = {k: v.value if isinstance(v, Verbatim) else v for k, v in saved.items()}
        missing = [key for key in layout.keys if key not in values]
        if missing:
            raise StateError(label, f"have {missing}", sorted(values))
        step = None
        if layout.counts:
            whole = count(label, values.pop("step"))
            step = torch.tensor(float(whole), dtype=torch.float32, device="cpu")
        for key in layout.optional:
            if values.get(key) is None:
                values.pop(key, None)
                values.pop(scales_of(key), None)
        moments = {
            key: _moment(label, parameter, key, values) for key in layout.moments if key in values
        }
        master = values.pop(MASTER, None)
        if master is not None:
            master = check_moment(label, parameter, MASTER, master)
        if RESIDUAL in values:
            values[RESIDUAL] = check_residual(label, parameter, values[RESIDUAL]).clone()
        return cls(step=step, moments=moments, master=master, others=values)


def _moment(label: str, parameter: Tensor, key: str, values: dict[str, Any]) -> Tensor | Coded:
    """Take a moment from saved values: a tensor, or codes and scales.

    Raises
    ------
    StateError
    """
    value, scales = values.pop(key), scales_of(key)
    if scales not in values:
        if isinstance(value, Tensor) and value.dtype == torch.uint8:
            found = sorted({key, *values})
            raise StateError(label, f"have {scales!r} with {key!r} of torch.uint8", found)
        return check_moment(label, parameter, key, value)
    codes = check_codes(label, parameter, key, value)
    return Coded(codes, check_scales(label, parameter, scales, values.pop(scales)))


def count(label: str, step: object) -> int:
    """The value of `step`, a number or a tensor of one element, as an int.

    Raises
    ------
    StateError : it is not a whole number of at least 0, or a run could not have the next one.
    """
    try:
        value = options.scalar("step", step)
    except HyperparameterError:
        value = math.nan
    if 0 <= value < EXACT_STEPS and value == int(value):
        return int(value)
    with np.errstate(over="ignore"):
        kept = float(np.float32(value))
    if not 0 <= kept < STEPS or value != int(value):
        raise StateError(label, "have a whole number below 2**63 as 'step'", step)
    return int(value)


def export(state: ParameterState) -> dict[str, Any]:
    """A plain dict with what torch's optimizer has, and the master of a 16-bit parameter."""
    resident = state.store
    values = state.snapshot()
    if resident is not None and resident.keeps_master:
        values[MASTER] = resident.fetch_master()
    return values
