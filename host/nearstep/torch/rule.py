"""The data of an optimizer, applied to the options of parameter groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearstep.torch import convert, options
from nearstep.torch.errors import (
    HyperparameterError,
    ParameterError,
    StateError,
    UnsupportedOptionError,
)
from nearstep.torch.layout import Layout
from nearstep.torch.state import ParameterState, count
from nearstep_spec.rule.optimizer import (
    FIRST,
    PART,
    STEP,
    Choice,
    Flag,
    Form,
    Numbers,
    Optimizer,
    Part,
)


class Phase(NamedTuple):
    """What a run needs to know of a parameter besides its group.

    Attributes
    ----------
    step : t, from 1; 0 if no steps are counted.
    first : the step makes state that there is not yet.
    part : of a step that has two runs.
    """

    step: int
    first: bool
    part: Part = Part()


class BoundRule:
    """An optimizer as data, with the defaults of one optimizer of torch.

    Parameters
    ----------
    defaults : options of groups that were given none.
    named : what `rules=` in a device's name calls the rule, if it is one of a file.
    fixed : options that a loaded group cannot change.
    """

    def __init__(
        self,
        definition: Optimizer,
        layout: Layout,
        defaults: Mapping[str, Any],
        named: str,
        fixed: Mapping[str, Any],
    ) -> None:
        self.definition = definition
        self.layout = layout
        self.defaults = defaults
        self.named = named
        self._fixed = fixed

    def complete(self, group: dict[str, Any]) -> None:
        """Add the options that a loaded group lacks, as one that was saved by an older torch."""
        options.normalise(group, self.defaults)
        for name, kind in self.definition.hyper.items():
            if isinstance(kind, Flag):
                group.setdefault(name, kind.default)
        group.update(self._fixed)

    def check(self, group: Mapping[str, Any]) -> None:
        """Check the options of a group.

        Raises
        ------
        UnsupportedOptionError, MissingOptionError, HyperparameterError
        """
        options.reject_unsupported(group)
        options.check_complete(group, self.defaults)
        values = self._values(group)
        for name, kind in self.definition.hyper.items():
            if isinstance(kind, Flag):
                continue
            several = isinstance(kind, Numbers)
            parts = {f"{name}[{i}]": each for i, each in enumerate(values[name])} if several else {}
            for label, value in (parts or {name: values[name]}).items():
                if not kind.holds(value):
                    shown = value if several else group[name]
                    raise HyperparameterError(label, kind.expected, shown)
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
        if isinstance(kind, Choice):
            return kind.default if group[name] is None else group[name]
        if isinstance(kind, Numbers):
            return options.several(name, group[name], len(kind.default))
        return options.scalar(name, group[name])

    def _values(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._value(group, name) for name in self.definition.hyper}

    def form(self, group: Mapping[str, Any]) -> Form:
        """The form of the rule that the options of a group ask for."""
        for form in self.definition.choices:
            if not form.when or self._value(group, form.when):
                break
        return form

    def arrays(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Arrays of the rule of a group, each with the value of its elements before the first
        step."""
        initial = {
            array: options.scalar(name, self.defaults[name])
            for array, name in self.definition.initial.items()
        }
        return {name: initial.get(name, 0.0) for name in self.form(group).rule.arrays_in}

    def first_moments(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Keys of the moments that state has before the first step."""
        form = self.form(group)
        return self.layout.required if form.starts else self.definition.keys(form)

    def written(self, arrays: Iterable[str]) -> list[str]:
        """Keys of the moments that a rule with these arrays writes."""
        names = set(arrays)
        return [key for key, name in self.layout.moments.items() if name in names]

    def phase(
        self, group: Mapping[str, Any], label: str, state: Mapping[str, Any], times: int
    ) -> Phase:
        """The phase of a parameter.

        Neighbours in one phase share a run. A parameter that is in its group several `times` has
        as many runs, each with the t of the last, as in torch's fused step.

        Raises
        ------
        StateError : there is no state that the step needs, and the step cannot make it.
        """
        form = self.form(group)
        if self.has_two_runs and times > 1:
            raise ParameterError(label, f"in its group once for {self.definition.name}", times)
        extra = self.definition.extra[form.rule.name]
        missing = [key for key in extra if not _has(state, key)] if extra else []
        if missing and not form.starts:
            raise StateError(label, f"have {missing[0]!r} for {form.when}", sorted(state))
        if not self.definition.counts:
            return Phase(0, bool(missing))
        step = state.step if isinstance(state, ParameterState) else state.get("step")
        return Phase(count(label, step) + times, bool(missing))

    def given(self, group: Mapping[str, Any], phase: Phase) -> dict[str, Any]:
        """Arguments of `nearstep.updater.arguments.rule_arguments`: of parameters in one phase."""
        run = {STEP: phase.step or 1, FIRST: phase.first, PART: phase.part}
        return {**run, **self._values(group)}

    def lay_out(self, formats: Mapping[str, str]) -> Layout:
        """Set and return the layout of state in these formats, by array.

        Raises
        ------
        UnsupportedOptionError
        """
        self.layout = self.layout.on(formats)
        if self.has_two_runs and self.layout.scales:
            reason = f"each of the two runs of a step of {self.definition.name} would quantize it"
            raise UnsupportedOptionError("state_dtype", torch.uint8, reason)
        return self.layout

    @property
    def has_two_runs(self) -> bool:
        """Whether the host computes between two runs of a step."""
        return self.definition.between is not None

    def second(self, phase: Phase, label: str, parameter: Tensor, form: str) -> Phase:
        """The phase of a parameter in the second run of a step, which makes no state.

        Parameters
        ----------
        form : of the parameter in memory.

        Raises
        ------
        ParameterError
        """
        self.check_parameter(label, parameter)
        return Phase(phase.step, False, Part(1, tuple(parameter.shape), form))

    def check_parameter(self, label: str, parameter: Tensor) -> None:
        """Raise `ParameterError` unless the rule updates parameters of this shape."""
        wanted = self.definition.dimensions
        if wanted is not None and parameter.ndim != wanted:
            expected = f"of {wanted} dimensions for {self.definition.name}"
            raise ParameterError(label, expected, f"of shape {tuple(parameter.shape)}")

    def second_gradient(
        self,
        group: Mapping[str, Any],
        phase: Phase,
        gradient: Tensor,
        moments: Mapping[str, Tensor],
    ) -> Tensor:
        """Gradient of a parameter in the second run, as of `Optimizer.second_gradient`.

        Parameters
        ----------
        phase : as of `second`.
        moments : by array, after the first run.
        """
        negated = -gradient if group.get("maximize") else gradient
        arrays, dtype = {"g": negated, **moments}, gradient.dtype
        for moment in moments.values():
            dtype = torch.promote_types(dtype, moment.dtype)
        arrays = {name: array.to(dtype) for name, array in arrays.items()}
        made: Tensor = self.definition.second_gradient(arrays, self._values(group), phase.part)
        return made.to(convert.second_dtype(gradient.dtype))


def _has(state: Mapping[str, Any], key: str) -> bool:
    """Whether there is a moment, wherever it is."""
    if isinstance(state, ParameterState):
        return state.has_moment(key)
    return state.get(key) is not None
