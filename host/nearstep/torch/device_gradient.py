"""Gradients kept for the next step: on the device, or compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nearstep.placement import Extent
from nearstep.torch import convert
from nearstep.torch.compression import Compressed
from nearstep.torch.dtensor import local
from nearstep.torch.errors import GradientError
from nearstep.torch.traffic import Traffic

PART_ELEMENTS = 1 << 14
"""Elements of one fetch where gradients are accumulated."""


class DeviceGradient:
    """The gradient of one parameter in the device's array that steps read.

    Parameters
    ----------
    array : name of the device's array, in format `form`.
    gradient : first value, of a dtype that `form` represents exactly.
    wait : blocks until `gradient` has its values, which are sent when they are needed; None: the
        values are sent now.

    Attributes
    ----------
    dtype : dtype of the gradient.
    applied : steps ignore the gradient.
    """

    def __init__(
        self,
        extent: Extent,
        array: str,
        form: str,
        gradient: Tensor,
        traffic: Traffic,
        wait: Callable[[], None] | None = None,
    ) -> None:
        extent.segment.reserve({array: 0.0})
        self.form = form
        self.dtype = gradient.dtype
        self.applied = False
        self._extent = extent
        self.array = array
        self._traffic = traffic
        self._negated = False
        self._divisor = 1.0
        self._coming = None if wait is None else (gradient, wait)
        self._is_lent = False
        if wait is None:
            self._write(extent, gradient)

    def land(self) -> None:
        """Send the first value to the device, unless it has been sent."""
        if self._coming is not None:
            gradient, wait = self._coming
            wait()
            self._is_lent = self._extent.segment.host_array(self.array) is not None
            self._write(self._extent, gradient, lends=self._is_lent)
            self._coming = None

    def end(self) -> None:
        """Free the gradient; `land` may have lent its memory to the device, which is this
        process."""
        if self._is_lent:
            self._extent.end_loan(self.array)

    def add(self, gradient: Tensor) -> None:
        """Add another gradient as autograd does, rounded to the dtype of the first.

        The host fetches `PART_ELEMENTS` of the device's gradient at a time.
        """
        self._straighten()
        flat = gradient.detach().reshape(-1).cpu()
        for part, start in self._parts():
            values = self._read(part)
            values.add_(flat[start : start + part.count])
            self._write(part, values)

    def fetch(self, parameter: Tensor) -> Tensor:
        """Return the gradient as a new tensor like `parameter`, to which autograd can add."""
        whole = self.whole()
        with torch.inference_mode(False), torch.no_grad():
            gradient = torch.empty(parameter.shape, dtype=self.dtype, device=parameter.device)
            return gradient.copy_(whole.view(parameter.shape))

    def whole(self) -> Tensor:
        """Return the gradient as a new one-dimensional tensor on the host."""
        self._straighten()
        with torch.inference_mode(False), torch.no_grad():
            return self._read(self._extent)

    def restore(self, whole: Tensor) -> None:
        """Write the gradient again, after a run with another one: what `whole` returned."""
        self._write(self._extent, whole)

    def divide(self, scale: float) -> None:
        """Divide the gradient by `scale` before its next use."""
        self._straighten()
        self._divisor = scale

    def ready(self, *, negated: bool) -> None:
        """Prepare the device's array for a step, negated if `negated`."""
        self.land()
        if self._divisor != 1.0:
            self._straighten()
        if self._negated != negated:
            self._flip()

    def _straighten(self) -> None:
        """Undo a negation and apply a pending division in the device's array."""
        self.land()
        if self._negated:
            self._flip()
        if self._divisor != 1.0:
            for part, _ in self._parts():
                self._write(part, self._read(part).div_(self._divisor))
            self._divisor = 1.0

    def _flip(self) -> None:
        for part, _ in self._parts():
            array = part.read(self.array)
            self._traffic.gradients_up += array.nbytes
            self._traffic.gradients_down += array.nbytes
            part.write(self.array, convert.negated(array))
        self._negated = not self._negated

    def _parts(self) -> Iterator[tuple[Extent, int]]:
        extent = self._extent
        for start in range(0, extent.count, PART_ELEMENTS):
            count = min(PART_ELEMENTS, extent.count - start)
            yield Extent(extent.segment, extent.start + start, count), start

    def _read(self, part: Extent) -> Tensor:
        array = part.read(self.array)
        self._traffic.gradients_up += array.nbytes
        if array.dtype.name == "uint16":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array).to(self.dtype)

    def _write(self, part: Extent, values: Tensor, *, lends: bool = False) -> None:
        wide = self.form == "fp32"
        array = convert.to_float32(values) if wide else convert.to_words(values)
        self._traffic.gradients_down += array.nbytes
        if not (lends and part.lend(self.array, array)):
            part.write(self.array, array)


_GRAD: Any = Tensor.grad
"""torch's property, which offloaded parameters replace."""


class SparseGradient:
    """The compressed gradient of one parameter, and its residual.

    Valid for one step; the dense gradient has been freed.

    Parameters
    ----------
    make : waits for the gradient, and compresses it.
    residual : tensor that was added to the gradient, or None.

    Attributes
    ----------
    applied : steps ignore the gradient.
    spent : a step has sent the gradient.
    reason : why the gradient cannot be read, or added to.
    """

    reason = "it was compressed"

    def __init__(self, make: Callable[[], Compressed] | None, residual: Tensor | None) -> None:
        self.applied = False
        self.spent = False
        self._make = make
        self._compressed: Compressed | None = None
        self._residual = residual  # keeps its memory from reuse
        self._memory = _memory(residual)

    def land(self) -> Compressed:
        """Return the compressed gradient; compress it if needed."""
        if self._compressed is None:
            assert self._make is not None, "make is dropped after its call"
            self._compressed = self._make()
            self._make = None
        return self._compressed

    def check(self, label: str, parameter: Tensor) -> None:
        """Raise `GradientError` unless a step can use the gradient."""
        if self.spent:
            expected = "reset (zero_grad) after the step that has sent what was kept of it"
            raise GradientError(label, expected, "the one of that step")
        with torch._C.DisableTorchFunctionSubclass():
            other = _GRAD.__get__(parameter)
        if other is not None:
            raise GradientError(label, "one alone, since one was compressed", "two")

    def check_residual(self, label: str, residual: Tensor | None) -> None:
        """Raise `GradientError` unless `residual` is the one used for compression."""
        if _memory(residual) != self._memory:
            expected = "compressed with the residual that the state has at the step"
            raise GradientError(label, expected, "with another: it was changed after backward")


class SpentGradient(SparseGradient):
    """Stands for a whole gradient that has updated its parameter in backward, and is freed."""

    reason = "it was freed when it had updated the parameter"

    def __init__(self) -> None:
        super().__init__(None, None)
        self.spent = True


def _memory(tensor: Tensor | None) -> tuple[int, int] | None:
    """Return a tensor's address and version counter."""
    if tensor is None:
        return None
    part = local(tensor)
    return part.data_ptr(), part._version
