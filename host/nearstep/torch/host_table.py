"""Optimizers without a device: columns are the user's own tensors, which the processor updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from nearstep.device import open_processor
from nearstep.errors import ArgumentError
from nearstep.torch.checks import label
from nearstep.torch.flat_bucket import is_count
from nearstep.torch.formats import Coded, decoded
from nearstep.torch.homes.host import HostHome, HostUpdate
from nearstep.torch.layout import Layout
from nearstep.torch.rule import BoundRule, Phase
from nearstep.torch.settings import Settings
from nearstep.torch.state import SavedState
from nearstep.torch.step import Scaling
from nearstep.torch.table import Owner, StateTable
from nearstep.torch.traffic import Traffic
from nearstep.updater.arguments import RuleArguments, rule_arguments

MakeHome = Callable[[Layout], HostHome]
"""Makes a home of one's own of the layout of a parameter's state: `examples/shm_home.py`."""

_NO_DEVICE = "the optimizer must have a device with memory: give it device="

HOST = "host:"
"""Name of this machine's processor; options follow a question mark."""


class HostTable(StateTable):
    """Parameters, and state as torch has it, without extents: nothing is copied or sent.

    Parameters
    ----------
    home : `host:`, with options of `nearstep.device.open_processor`; or what makes the home.
    settings, rule : as of `StateTable`.
    """

    def __init__(self, home: str | MakeHome, settings: Settings, rule: BoundRule) -> None:
        settings.check_host()
        self.settings = settings
        self.rule = rule
        self.layout = layout = rule.layout
        self.traffic = Traffic()
        self.parameters = {}
        self.interrupted = None
        self._source = home
        self._home = home(layout) if callable(home) else HostHome(layout, open_processor(home))
        self._processor = self._home.processor

    @property
    def device(self) -> NoReturn:
        """There is none. Raises `ArgumentError`."""
        raise ArgumentError(_NO_DEVICE)

    @property
    def source(self) -> str | MakeHome:
        return self._source

    @property
    def scans(self) -> bool:
        return True

    def check_open(self, action: str) -> None:
        """The processor is always there."""

    def check_group(self, group: Mapping[str, Any]) -> None:
        self.rule.check(group)
        self._home.check(self.rule.form(group).ordered(self._processor.order))

    def arguments(self, group: Mapping[str, Any], phase: Phase) -> RuleArguments:
        given = self.rule.given(group, phase)
        found = rule_arguments(self.rule.definition, self._processor.order, **given)
        found.check()
        return found

    def begin(self, owner: Owner) -> None:
        for group in owner.param_groups if self.rule.definition.from_start else ():
            for parameter in group["params"]:  # as in torch, of those that are fixed, too
                owner.state[parameter] = self._first(group, parameter)

    def _first(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """State of a parameter before its first step."""
        keys = self.rule.first_moments(group)
        return self._home.first_state(parameter, keys, self.rule.arrays(group))

    def place(self, owner: Owner, group: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        """Parameters stay where they are."""

    def place_one(self, owner: Owner, parameter: Tensor) -> NoReturn:
        """There is no device to put a parameter on. Raises `ArgumentError`."""
        raise ArgumentError(_NO_DEVICE)

    def load_all(self, owner: Owner, saved: Mapping[Tensor, SavedState]) -> None:
        """Load a checkpoint: the state is copied."""
        for parameter, found in saved.items():
            state = self._home.first_state(parameter, found.moments, {})
            if found.step is not None:
                state["step"].copy_(found.step)
            for key, value in found.moments.items():
                state[key].copy_(
                    decoded(value, self.layout.coded[key]) if isinstance(value, Coded) else value
                )
            owner.state[parameter] = {**state, **found.others}

    def reset(self) -> None:
        """Nothing is left half way but what a user sees."""

    def step(self, owner: Owner, scaling: Scaling, *, held_only: bool = False) -> bool:
        """Update every parameter that has a gradient: as of `nearstep.torch.update.Stepper`.

        With `held_only` there is nothing to do: no device keeps a gradient.
        """
        if held_only:
            return True
        states, updates = owner.state, list[HostUpdate]()
        fresh: dict[Tensor, dict[str, Any]] = {}
        for index, group in enumerate(owner.param_groups):
            found: dict[Phase, RuleArguments] = {}
            given: dict[Tensor, list[int]] = {}  # positions: a parameter may have several
            for position, p in enumerate(group["params"]):
                if p.grad is not None:
                    given.setdefault(p, []).append(position)
            if given:
                self.check_group(group)
            for p, positions in given.items():
                name, gradient = label(group, index, positions[0]), p.grad
                assert gradient is not None, "it has positions"
                state = states.get(p) or self._first(group, p)
                phase = self.rule.phase(group, name, state, len(positions))
                if phase.first:
                    extra = self.rule.definition.extra[self.rule.form(group).rule.name]
                    kept = {key: value for key, value in state.items() if value is not None}
                    state = {**self._home.first_state(p, extra, {}), **kept}
                if self.layout.counts and not is_count(state["step"]):
                    step = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
                    state = {**state, "step": step}
                fresh[p] = state
                if phase not in found:
                    found[phase] = self.arguments(group, phase)
                update = HostUpdate(name, found[phase], group["maximize"], p, gradient, state)
                updates += [update] * len(positions)
        kept = {p: state for p, state in fresh.items() if state}
        self._home.update(updates, scaling.scale, partial(states.update, kept))
        self.traffic.steps += 1
        self.traffic.elements += sum(each.parameter.numel() for each in updates)
        return True
