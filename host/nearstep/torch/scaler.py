"""Loss scaling without a pass over the gradients on the host, and with patience."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nearstep.deepspeed.config import LossScaling
from nearstep.errors import Fielded, NearstepError
from nearstep.torch.optimizer import DeviceOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that leaves the search for infinities to the device.

    torch's looks at every gradient on the host before it calls an optimizer that unscales by
    itself. This one does not, where the optimizer is nearstep's and its kernel scans gradients
    (`scan=yes`, `gradient_scale=yes`): the step sends the gradients, the kernel looks, and if
    it finds an infinity or a NaN the step ends there. For any other optimizer, and after
    `unscale_`, it is torch's scaler.

    Parameters
    ----------
    device : type of the device that the loss is on.
    init_scale, growth_factor, backoff_factor, growth_interval, enabled : as in torch.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        if not (isinstance(optimizer, DeviceOptimizer) and optimizer.looks_for_inf):
            return super()._check_inf_per_device(optimizer)
        found = torch.zeros((), dtype=torch.float32, device="cpu")
        optimizer.report_inf_to(found)
        by_device: dict[Any, Tensor] = {found.device: found}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = by_device
        return by_device


class LossScaleError(Fielded, NearstepError, ArithmeticError):
    """An overflow at the least scale: the gradients are infinite or NaN whatever the scale."""

    template = (
        "the loss scale must be at least {least:g}, and gradients overflow with it: the step was "
        "skipped"
    )
    least: float


class LossScaler(GradScaler):
    """`nearstep.optim.GradScaler` with the options that DeepSpeed's configurations have.

    A step with an overflow is skipped. The scale is halved by the `hysteresis`-th one, and by each
    one more: of those in a row if `consecutive`, else of those since the scale was last doubled.
    After `window` steps in a row without one it is doubled.

    Attributes
    ----------
    overflowed : whether the steps before the last `update` were skipped.
    """

    def __init__(self, options: LossScaling, device: str = "cpu") -> None:
        super().__init__(device, init_scale=options.scale)
        self.overflowed = False
        self._options = options
        self._good = 0
        self._left = options.hysteresis

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to what the steps since the last call have found.

        Parameters
        ----------
        new_scale : takes it instead.

        Raises
        ------
        LossScaleError : a dynamic scale is the least already. The scaler can go on.
        """
        found = [
            each
            for state in self._per_optimizer_states.values()
            for each in state["found_inf_per_device"].values()
        ]
        if new_scale is not None or not found:  # without a step torch says what is wrong
            super().update(new_scale)
            return
        self.overflowed = any(each.item() for each in found)
        scale = self.get_scale()
        super().update(self._adapted(scale))
        if self.overflowed and self._options.dynamic and scale <= self._options.least:
            raise LossScaleError(scale)

    def _adapted(self, scale: float) -> float:
        options = self._options
        if not options.dynamic:
            return scale
        if self.overflowed:
            self._good = 0
            self._left = max(self._left - 1, 0)
            return scale if self._left else max(scale / 2.0, options.least)
        self._good += 1
        if options.consecutive:
            self._left = options.hysteresis
        if self._good < options.window:
            return scale
        self._good, self._left = 0, options.hysteresis
        return min(scale * 2.0, 2.0**127)

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with what is counted besides."""
        return {**super().state_dict(), "good_steps": self._good, "overflows_left": self._left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scale and the counts of `state_dict`."""
        super().load_state_dict(state_dict)
        self._good = state_dict["good_steps"]
        self._left = state_dict["overflows_left"]
