"""Optimizers of torch, each of the data of one."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from torch.optim.optimizer import ParamsT

from nearstep.device import Device
from nearstep.run import Run
from nearstep.torch import options
from nearstep.torch.errors import HyperparameterError, StateError
from nearstep.torch.layout import Layout
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.settings import OnDevice, Settings
from nearstep.torch.state import ParameterState
from nearstep.torch.step import NUMBERING, Arrays, GradientOptions
from nearstep_spec.rule.file import is_in_file, load_with_digest
from nearstep_spec.rule.optimizer import FIRST, STEP, Flag, Form, Numbers, Optimizer
from nearstep_spec.rule.rules import OPTIMIZERS, optimizer_named

_ON_DEVICE = (
    inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, annotation="str | Device"),
    *inspect.signature(Settings.given).parameters.values(),
)
"""Parameters that are in `OnDevice`, as signatures show them."""


class RuleOptimizer(DeviceOptimizer):
    """An optimizer of torch that is what the data of an optimizer says.

    A subclass names one of nearstep, and has the constructor of torch's class;
    `nearstep.optim.from_rule` makes one of any.

    Attributes
    ----------
    definition
    """

    definition: Optimizer
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, optimizer: str = "") -> None:
        if optimizer:
            cls.definition = OPTIMIZERS[optimizer]
            cls.layout = Layout.of(cls.definition)
            own = list(inspect.signature(cls.__init__).parameters.values())[1:-1]
            cls.__signature__ = inspect.Signature([*own, *_ON_DEVICE])

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **on: Unpack[OnDevice]) -> None:
        for name in on:
            if name not in OnDevice.__annotations__:
                raise TypeError(
                    f"{type(self).__name__}() got an unexpected keyword argument {name!r}"
                )
        given: dict[str, Any] = dict(on)
        if "device" not in given:
            raise TypeError(
                f"{type(self).__name__}() missing 1 required keyword-only argument: 'device'"
            )
        device: str | Device = given.pop("device")
        super().__init__(params, defaults, device, Settings.given(**given))

    def _begin(self) -> None:
        if self.definition.from_start:
            self._make_first_states()
        super()._begin()

    def _make_first_states(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._residents:  # those that are lazy, or fixed, are not
                    arrays = self._arrays(group)
                    self._ready_state(self._residents[parameter], group, None, arrays)

    def _complete(self, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        super()._complete(group, defaults)
        for name, kind in self.definition.hyper.items():
            if isinstance(kind, Flag):  # groups saved by an older torch may lack it
                group.setdefault(name, kind.default)

    def _check_options(self, group: Mapping[str, Any]) -> None:
        values = self._values(group)
        for name, kind in self.definition.hyper.items():
            if isinstance(kind, Flag):
                continue
            several = isinstance(kind, Numbers)
            parts = {f"{name}[{i}]": each for i, each in enumerate(values[name])} if several else {}
            for label, value in (parts or {name: values[name]}).items():
                if not kind.holds(value):
                    raise HyperparameterError(
                        label, kind.expected, value if several else group[name]
                    )
        conflict = self.definition.conflict
        found = None if conflict is None else conflict(values)
        if found is not None:
            name, expected = found
            raise HyperparameterError(name, expected, group[name])

    def _value(self, group: Mapping[str, Any], name: str) -> Any:
        """A hyper-parameter of a group as numbers or a truth value of Python."""
        kind = self.definition.hyper[name]
        if isinstance(kind, Flag):
            return bool(group[name])
        if isinstance(kind, Numbers):
            return options.several(name, group[name], len(kind.default))
        return options.scalar(name, group[name])

    def _values(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._value(group, name) for name in self.definition.hyper}

    def _form(self, group: Mapping[str, Any]) -> Form:
        # Of every parameter: it looks at no more than it must.
        for form in self.definition.choices:
            if not form.when or self._value(group, form.when):
                break
        return form

    def _rule(self, group: Mapping[str, Any]) -> str:
        return self._form(group).rule.name

    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        initial = {
            array: options.scalar(name, self.defaults[name])
            for array, name in self.definition.initial.items()
        }
        return {name: initial.get(name, 0.0) for name in self._form(group).rule.arrays_in}

    def _first_moments(self, group: Mapping[str, Any]) -> Sequence[str]:
        form = self._form(group)
        return self.layout.required if form.starts else self.definition.keys(form)

    def _phase(
        self, group: Mapping[str, Any], resident: DeviceParameter, state: ParameterState, times: int
    ) -> Hashable:
        """t, or 0 if none is kept; and whether the step makes state that there is not yet.

        Raises
        ------
        StateError : there is none, and the step cannot make it.
        """
        form = self._form(group)
        extra = self.definition.extra[form.rule.name]
        missing = [key for key in extra if not state.has_moment(key)] if extra else []
        if missing and not form.starts:
            raise StateError(resident.label, f"have {missing[0]!r} for {form.when}", sorted(state))
        step = super()._phase(group, resident, state, times) if self.definition.counts else 0
        return step, bool(missing)

    def _arguments(self, group: Mapping[str, Any], phase: Hashable) -> dict[str, Any]:
        assert isinstance(phase, tuple)
        step, first = phase
        return {STEP: step or 1, FIRST: first, **self._values(group)}

    def _start(
        self, arrays: Arrays, group: Mapping[str, Any], phase: Hashable, gradient: GradientOptions
    ) -> Run:
        options = {name: value for name, value in gradient.items() if name != NUMBERING}
        return self.device.update(
            self.definition,
            {name: arrays[name] for name in self._form(group).rule.arrays_in},
            **self._arguments(group, phase),
            **options,
            rounding=self._settings.rounding_of(gradient[NUMBERING]),
        )


class NamedOptimizer(RuleOptimizer):
    """What `nearstep.optim.from_rule` makes.

    Attributes
    ----------
    name : that it was made of.
    """

    def __init__(
        self,
        name: str,
        params: ParamsT,
        hyper: Mapping[str, Any],
        *,
        maximize: bool,
        **on: Unpack[OnDevice],
    ) -> None:
        self._define(name)
        defaults: dict[str, Any] = {}
        for key, kind in self.definition.hyper.items():
            if key not in hyper and kind.default is None:
                raise HyperparameterError(key, "given: it has no default", None)
            defaults[key] = hyper.get(key, kind.default)
            if isinstance(kind, Flag) and not isinstance(defaults[key], bool):
                raise HyperparameterError(key, "True or False", defaults[key])
        unknown = [each for each in hyper if each not in defaults]
        if unknown:
            expected = f"of {', '.join(self.definition.hyper)}"
            raise HyperparameterError(f"a hyper-parameter of {name}", expected, unknown[0])
        common = {"maximize": maximize, "foreach": None, "differentiable": False, "fused": None}
        super().__init__(params, {**defaults, **common}, **on)

    @property
    def _title(self) -> str:
        return self.name

    @property
    def _source(self) -> str:
        return self._digest

    def _define(self, name: str) -> None:
        self.name = name
        self._rules_name = name if is_in_file(name) else ""
        found = load_with_digest(name) if is_in_file(name) else (optimizer_named(name), "")
        self.definition, self._digest = found
        self.layout = Layout.of(self.definition)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizer": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "optimizer" in state:
            self._define(state.pop("optimizer"))
        super().__setstate__(state)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, self.name, 1)
