"""torch's fused optimizers, of any number of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class OfTorch:
    """torch's fused optimizer; its kernel needs whole vectors, so zeros follow the parameters."""

    def __init__(self, first: Floats, kind: type[torch.optim.Optimizer], **hyper: Any) -> None:
        self.size = first.size
        self.p = torch.zeros(-(-self.size // 16) * 16, requires_grad=True)
        with torch.no_grad():
            self.p[: self.size] = torch.from_numpy(first)
        self.optimizer = kind([self.p], fused=True, **hyper)  # type: ignore[call-arg]

    def step(self, gradient: Floats) -> Floats:
        """The parameters after a step."""
        self.p.grad = torch.zeros_like(self.p)
        self.p.grad[: self.size] = torch.from_numpy(gradient)
        self.optimizer.step()
        return self.p.detach()[: self.size].numpy().copy()


def same(found: Floats, expected: Floats) -> int:
    """Compare bits; the number of elements."""
    np.testing.assert_array_equal(found.view("u4"), expected.view("u4"))
    return found.size
