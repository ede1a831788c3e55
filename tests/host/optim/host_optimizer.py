"""An optimizer without a device of any data."""

from __future__ import annotations

from typing import Any

from nearstep.torch.layout import Layout
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep_spec.rule.optimizer import Optimizer


class HostOptimizer(DeviceOptimizer):
    """An optimizer of data that need not have a name."""

    def __init__(
        self,
        params: Any,
        definition: Optimizer,
        *,
        url: str = "host:",
        maximize: bool = False,
        **hyper: Any,
    ) -> None:
        self.definition, self.layout = definition, Layout.of(definition)
        common = {"maximize": maximize, "foreach": None, "differentiable": False, "fused": None}
        super().__init__(params, {**definition.defaults, **hyper, **common}, device=url)
