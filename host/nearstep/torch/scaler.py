"""Loss scaling without a pass over the gradients on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
