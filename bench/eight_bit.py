"""AdamW with moments in 8 bits, on the host: the prototype, to see what it trains to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from nearstep_sim.golden.blockwise import dequantize, quantize
from nearstep_sim.golden.rule_cpp import kernel
from nearstep_spec.rule.adam import ADAM, adam_scalars

SMALLEST = 4096
"""Parameters of fewer elements keep binary32 moments, as in the published form."""

SIGNED = {"m": True, "v": False}


class EightBitAdamW(torch.optim.Optimizer):
    """torch's fused AdamW, but that moments are kept in 8 bits between steps.

    Parameters
    ----------
    params : fp32.
    lr
    """

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.01})
        self._rule = kernel(ADAM)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                count = state["step"] = state.get("step", 0) + 1
                p = parameter.detach().reshape(-1).numpy()
                narrow = p.size >= SMALLEST
                arrays = {"p": p, "g": parameter.grad.reshape(-1).numpy()}
                for name, signed in SIGNED.items():
                    if name not in state:
                        arrays[name] = np.zeros(p.size, np.float32)
                    elif narrow:
                        arrays[name] = dequantize(state[name], signed=signed)
                    else:
                        arrays[name] = state[name]
                scalars = adam_scalars(
                    group["lr"], (0.9, 0.999), 1e-8, group["weight_decay"], count, True
                )
                self._rule(arrays, scalars)
                for name, signed in SIGNED.items():
                    values = arrays[name]
                    state[name] = quantize(values, signed=signed) if narrow else values
