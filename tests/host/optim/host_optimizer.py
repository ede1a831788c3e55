"""An optimizer of torch around `HostHome`: what a class does that has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nearstep.device import open_processor
from nearstep.torch.homes.host import HostHome, HostUpdate
from nearstep.torch.layout import Layout
from nearstep.torch.saved import count
from nearstep.updater.arguments import RuleArguments, rule_arguments
from nearstep_spec.rule.optimizer import Optimizer


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer given as data, without a device."""

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        definition: Optimizer,
        *,
        url: str = "host:",
        maximize: bool = False,
        **hyper: Any,
    ) -> None:
        self.definition = definition
        self.home = HostHome(Layout.of(definition), open_processor(url))
        super().__init__(params, {**definition.defaults, **hyper, "maximize": maximize})
        if definition.from_start:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = self._first_state(group, parameter)

    def _values(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self.definition.hyper}

    def _first_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        definition, layout = self.definition, self.home.layout
        form = definition.form(self._values(group))
        keys = layout.required if form.starts else definition.keys(form)
        initial = {array: group[name] for array, name in definition.initial.items()}
        return self.home.first_state(parameter, keys, initial)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
        return loss

    def _update(self) -> None:
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and bool(found):
            return
        updates: list[HostUpdate] = []
        fresh: dict[Tensor, dict[str, Any]] = {}
        for index, group in enumerate(self.param_groups):
            form = self.definition.form(self._values(group))
            arguments: dict[tuple[int, bool], RuleArguments] = {}
            given = [p for p in group["params"] if p.grad is not None]
            times = Counter(given)
            for position, p in enumerate(given):
                name = f"parameter {position} of group {index}"
                state = self.state[p] if self.state.get(p) else fresh.get(p)
                if state is None:
                    state = fresh[p] = self._first_state(group, p)
                extra = self.definition.extra[form.rule.name]
                missing = [key for key in extra if state.get(key) is None]
                if missing and form.starts:
                    made = self.home.first_state(p, missing, {})
                    fresh[p] = state = {**state, missing[0]: made[missing[0]]}
                step = 0
                if self.definition.counts:
                    step = count(name, state["step"]) + times[p]
                phase = step, bool(missing)
                if phase not in arguments:
                    arguments[phase] = rule_arguments(
                        self.definition,
                        self.home.processor.order,
                        step=step or 1,
                        first=phase[1],
                        **self._values(group),
                    )
                updates.append(
                    HostUpdate(name, arguments[phase], group["maximize"], p, p.grad, state)
                )
        self.home.update(updates, 1.0 if scale is None else float(scale))
        for p, state in fresh.items():
            if state:
                self.state[p] = state
