"""Compressed gradients that wait on the host for a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nearstep.torch.compression import Compressed
from nearstep.torch.dtensor import local
from nearstep.torch.errors import GradientError

_GRAD: Any = Tensor.grad
"""The property of torch: that of a parameter that is offloaded looks for this one."""


class SparseGradient:
    """What is to be sent of the gradient of one parameter, which is gone, and what stays of it.

    It is of one step: what a second one would send is chosen among what is gone.

    Parameters
    ----------
    make : compresses the gradient: waits for it, if it is not there yet.
    residual : that the gradient was added to; None is nothing.

    Attributes
    ----------
    applied : steps leave it out.
    spent : a step has sent it.
    """

    def __init__(self, make: Callable[[], Compressed], residual: Tensor | None) -> None:
        self.applied = False
        self.spent = False
        self._make: Callable[[], Compressed] | None = make
        self._compressed: Compressed | None = None
        self._residual = residual  # its memory is nobody else's
        self._memory = _memory(residual)

    def land(self) -> Compressed:
        """Have it compressed, if that is still to be done."""
        if self._compressed is None:
            assert self._make is not None, "it goes when it has been called"
            self._compressed = self._make()
            self._make = None
        return self._compressed

    def check(self, label: str, parameter: Tensor) -> None:
        """Raise `GradientError` unless a step can use it.

        Parameters
        ----------
        label : what the parameter is called.
        parameter : that has no gradient besides.
        """
        if self.spent:
            expected = "reset (zero_grad) after the step that has sent what was kept of it"
            raise GradientError(label, expected, "the one of that step")
        with torch._C.DisableTorchFunctionSubclass():
            other = _GRAD.__get__(parameter)
        if other is not None:
            raise GradientError(label, "one alone, since one was compressed", "two")

    def check_residual(self, label: str, residual: Tensor | None) -> None:
        """Raise `GradientError` unless the state has the residual that it was compressed with."""
        if _memory(residual) != self._memory:
            expected = "compressed with the residual that the state has at the step"
            raise GradientError(label, expected, "with another: it was changed after backward")


def _memory(tensor: Tensor | None) -> tuple[int, int] | None:
    """Where a tensor is, and how many times it has been changed there."""
    if tensor is None:
        return None
    part = local(tensor)
    return part.data_ptr(), part._version
