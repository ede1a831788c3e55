"""Gradients as the elements of largest magnitude, and what becomes of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from nearstep.backends.base import TakeLargest
from nearstep.torch import convert
from nearstep.torch.errors import HyperparameterError
from nearstep.torch.recycled import empty
from nearstep.torch.topk import NOTHING, kept_of, take_largest
from nearstep.updater.checks import is_real, real

FORMS = ("fused", "scatter")

_LIMITS: Mapping[str, float] = MappingProxyType(
    {"fp16": torch.finfo(torch.float16).max, "bf16": torch.finfo(torch.bfloat16).max}
)


@dataclass(frozen=True, eq=False)
class Compressed:
    """One gradient, compressed.

    Attributes
    ----------
    index : positions in the flat parameter, ascending.
    value : what is sent for them: float32, float16, or uint16 that holds bfloat16.
    residual : what the next step adds to its gradient, of the parameter's size: a tensor on an
        accelerator where the gradient is (`nearstep.torch.chosen`). None without error feedback.
    """

    index: NDArray[np.intp]
    value: NDArray[np.generic]
    residual: NDArray[np.float32] | torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How gradients are compressed; `nearstep.torch.topk` says which elements are kept.

    Parameters
    ----------
    share : share of the elements that is kept, above 0 and at most 1.
    error_feedback : what was not sent is added to the gradient of the next step.
    form : `fused` or `scatter`: the form of pairs that the kernel is to take. The pairs are sorted
        either way.
    format : `fp32`, `fp16` or `bf16`: what kept values are rounded to, to nearest even. A number
        too large for 16 bits becomes the largest that they have.

    Raises
    ------
    HyperparameterError
    """

    share: float
    error_feedback: bool = True
    form: str = "fused"
    format: str = "fp32"

    def __post_init__(self) -> None:
        share = real("compression", self.share) if is_real(self.share) else math.nan
        if not 0.0 < share <= 1.0:
            raise HyperparameterError("compression", "a share above 0 and at most 1", self.share)
        if not isinstance(self.error_feedback, bool | np.bool_):
            raise HyperparameterError("error_feedback", "True or False", self.error_feedback)
        check_pairs(self.form, self.format)
        object.__setattr__(self, "share", share)

    @property
    def limit(self) -> float | None:
        """The largest finite number that is sent; None if any may be."""
        return _LIMITS.get(self.format)

    @property
    def pair_bytes(self) -> int:
        """Of the index and the value of one element."""
        return 8 if self.format == "fp32" else 6

    def kept_of(self, size: int) -> int:
        """Elements that are kept of a gradient of `size` elements."""
        return kept_of(size, self.share)

    def compress(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        *,
        take: TakeLargest = take_largest,
        memory: Callable[[int], NDArray[np.float32]] = empty,
    ) -> Compressed:
        """Choose what to send of a flat gradient, to which the residual is added first.

        With error feedback, a finite sum equals what is sent for it plus what stays, exactly; what
        a number too large for 16 bits leaves is rounded to fp32. NaN and infinities leave nothing
        behind where they are sent.

        Parameters
        ----------
        gradient
        residual : None is nothing.
        take : does what `nearstep.torch.topk.take_largest` does.
        memory : gives an array of so many elements, for what stays.
        """
        rest = memory(gradient.size) if self.error_feedback else None
        with np.errstate(over="ignore", invalid="ignore"):
            index, wanted = take(gradient, residual, rest, self.share)
            value = self._rounded(wanted)
            if rest is not None and self.format != "fp32":
                lost = wanted - convert.widen(value)
                rest[index] = np.where(np.isfinite(lost) & (lost != 0.0), lost, NOTHING)
        return Compressed(index, value, rest)

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[np.generic]:
        if self.limit is None:
            return values
        limit = np.float32(self.limit)
        bounded = np.where(np.isinf(values), values, np.clip(values, -limit, limit))
        return convert.narrow(bounded, self.format)


def check_pairs(form: object, format: object) -> None:
    """Raise `HyperparameterError` unless there are a form and a format of this name."""
    if form not in FORMS:
        raise HyperparameterError("compression_form", f"one of {FORMS}", form)
    if format not in convert.NAMES.values():
        expected = f"one of {tuple(convert.NAMES.values())}"
        raise HyperparameterError("compression_format", expected, format)
