"""Optimizers without a device: columns are the user's own tensors, which the processor updates."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, filterfalse, groupby, repeat
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from nearstep.device import open_processor
from nearstep.errors import ArgumentError
from nearstep.placement import LINE_ELEMENTS, padded
from nearstep.torch import convert
from nearstep.torch.checks import KnownTensors, check_gradient, check_parameter, label
from nearstep.torch.dtensor import alike, local, redistributed
from nearstep.torch.errors import UnsupportedOptionError
from nearstep.torch.flat_bucket import is_count
from nearstep.torch.formats import TENSORS, Formats, Quantized, dequantize, quantize
from nearstep.torch.homes.host import GRADIENT, HostHome, HostUpdate, SecondUpdate
from nearstep.torch.layout import Layout
from nearstep.torch.rule import BoundRule, Phase
from nearstep.torch.settings import Settings
from nearstep.torch.state import EXACT_STEPS, SavedState
from nearstep.torch.step import Scaling
from nearstep.torch.table import Owner, StateTable, labels_of
from nearstep.torch.traffic import Traffic
from nearstep.updater.arguments import RuleArguments, rule_arguments
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.optimizer import Form

MakeHome = Callable[[Layout], HostHome]
"""Makes a home of one's own of the layout of a parameter's state: `examples/shm_home.py`."""

NO_DEVICE = "the optimizer must have a device with memory: give it device="

_DTYPE, _GRAD = map(operator.attrgetter, ("dtype", "grad"))

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
        if settings.overflow is not None:
            reason = "a home of one's own keeps state where it says: leave drives to host:"
            raise UnsupportedOptionError("drives", settings.overflow.drives, reason)
        settings.check_optimizer(rule.definition)
        self.settings = settings
        self.rule = rule
        self._own = {k: v for e in rule.definition.all_forms for k, v in e.rule.formats.items()}
        quantized = self._formats(torch.float32).quantized
        self.layout = layout = rule.lay_out(quantized)
        self.traffic = Traffic()
        self.parameters = {}
        self.interrupted = None
        self._source = home
        self._home = home(layout) if callable(home) else HostHome(layout, open_processor(home))
        self._processor = self._home.processor
        self._known = KnownTensors()
        self._indices: dict[Tensor, int] = {}
        self._elements = 0  # of all that have an index

    @property
    def device(self) -> NoReturn:
        """There is none. Raises `ArgumentError`."""
        raise ArgumentError(NO_DEVICE)

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
        form = self.rule.form(group).ordered(self._processor.order)
        for dtype in {*map(_DTYPE, group["params"])} & convert.NAMES.keys():
            self._home.check(form, self._columns(form, dtype, dtype))

    def _formats(self, parameter: torch.dtype) -> Formats:
        """Formats of a parameter of this dtype, and of its state.

        Raises
        ------
        UnsupportedOptionError : the rule has others.
        """
        moments, dtype, own = self.rule.layout.moments, self.settings.state_dtype, self._own
        state = {"p": own.get("p", convert.NAMES[parameter])}
        for key, array in moments.items():
            if dtype is torch.uint8:
                wanted = self.rule.layout.quantized[key]
            else:
                wanted = convert.NAMES[parameter if dtype is None else dtype]
            state[array] = own.get(array, "fp32") if own else wanted
            if dtype is not None and TENSORS[state[array]] is not dtype:
                reason = f"{self.rule.definition.name} keeps {array} in {state[array]}"
                raise UnsupportedOptionError("state_dtype", dtype, reason)
        return Formats.of_tensors(state)

    def _columns(self, form: Form, parameter: torch.dtype, gradient: torch.dtype) -> Columns:
        """How the tensors of parameters and gradients of these dtypes, and their state, lie in
        memory."""
        formats = {**self._formats(parameter).state, GRADIENT: convert.NAMES[gradient]}
        return Columns.of(form.rule, formats, stochastic=self.settings.stochastic)

    def arguments(self, group: Mapping[str, Any], phase: Phase) -> RuleArguments:
        given = self.rule.given(group, phase)
        found = rule_arguments(self.rule.definition, self._processor.order, **given)
        found.check()
        return found

    def begin(self, owner: Owner) -> None:
        for group in owner.param_groups if self.rule.definition.from_start else ():
            for parameter in group["params"]:  # as in torch, of those that are fixed, too
                owner.state[parameter] = self._first(group, parameter)
        dtypes = {p.dtype for group in owner.param_groups for p in group["params"]}
        states = (form for dtype in dtypes for form in self._formats(dtype).state.values())
        if self.settings.stochastic and "bf16" not in states:
            reason = "no parameter and no state is in bf16: state_dtype=torch.bfloat16 makes it so"
            raise UnsupportedOptionError("rounding", "stochastic", reason)

    def _first(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """State of a parameter before its first step."""
        keys = self.rule.first_moments(group)
        arrays = self.rule.arrays(group)
        return self._home.first_state(parameter, keys, arrays, self._formats(parameter.dtype))

    def place(self, owner: Owner, group: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        """Number the elements of parameters, as on a device; they stay where they are."""
        unknown = filterfalse(self._indices.__contains__, parameters)
        new = [p for p in unknown if not is_lazy(p)]
        names = labels_of(owner.param_groups) if new else {}
        for each in new:
            check_parameter(names[each], each)
            self._formats(each.dtype).check(names[each], each)
            self._indices[each] = self._elements
            self._elements += padded(convert.size(each), 2 * LINE_ELEMENTS)

    def place_one(self, owner: Owner, parameter: Tensor) -> NoReturn:
        """There is no device to put a parameter on. Raises `ArgumentError`."""
        raise ArgumentError(NO_DEVICE)

    def load_all(self, owner: Owner, saved: Mapping[Tensor, SavedState]) -> None:
        """Load a checkpoint: the state is copied."""
        names = labels_of(owner.param_groups)
        for parameter, found in saved.items():
            check_parameter(names[parameter], parameter)
            formats = self._formats(parameter.dtype)
            state = self._home.first_state(parameter, found.moments, {}, formats)
            if found.step is not None:
                state["step"].copy_(found.step)
            for key, value in found.moments.items():
                form, scales = self.layout.quantized[key], self.layout.scales.get(key)
                if scales is not None:
                    quantized = value if isinstance(value, Quantized) else quantize(value, form)
                    state[scales].copy_(quantized.scales)
                    state[key].copy_(quantized.codes)
                else:
                    state[key].copy_(
                        dequantize(value, form) if isinstance(value, Quantized) else value
                    )
            owner.state[parameter] = {**state, **found.others}

    def reset(self) -> None:
        """Nothing is left half way but what a user sees."""

    def step(
        self,
        owner: Owner,
        scaling: Scaling,
        only: Container[Tensor] | None = None,
        *,
        ends: bool = True,
    ) -> bool:
        """Update every parameter that has a gradient: as of `nearstep.torch.update.Stepper`."""
        updates: list[HostUpdate] = []
        fresh: dict[Tensor, dict[str, Any]] = {}
        for index, group in enumerate(owner.param_groups):
            updates += self._updates(owner, group, index, only, fresh)
        keep, seed = partial(owner.state.update, fresh), self.settings.rounding_seed
        again = self._second(updates) if self.rule.has_two_runs else ()
        self.traffic.elements += self._home.update(updates, scaling.scale, keep, seed, again)
        self.traffic.steps += ends
        return True

    def _second(self, updates: Iterable[HostUpdate]) -> list[SecondUpdate]:
        """What computes the gradient of each parameter in the second run of a step, and the run.

        Gradients share memory: each is computed when the run before has ended.
        """
        singles = [each for update in updates for each in update.each()]
        most = max((convert.size(each.parameters[0]) for each in singles), default=0)
        memory = torch.empty(4 * most, dtype=torch.uint8, device="cpu")
        return [self._again(each, memory) for each in singles]

    def _again(self, update: HostUpdate, memory: Tensor) -> SecondUpdate:
        (parameter,), (gradient,), (state,) = update.parameters, update.gradients, update.states
        group, form = update.group, self._formats(parameter.dtype).state_of("p")
        first = Phase(update.arguments.step or 0, False)
        phase = self.rule.second(first, update.name, parameter, form)
        dtype = convert.second_dtype(gradient.dtype)
        flat = memory.view(dtype)[: convert.size(parameter)]
        made, done = alike(flat, parameter), list[bool]()

        def compute() -> None:
            if done:  # called again after Ctrl-C
                return
            moments = {a: state[key] for key, a in self.layout.moments.items() if key in state}
            try:
                whole = redistributed(gradient, parameter)
                found = self.rule.second_gradient(group, phase, whole, moments)
                local(made).copy_(local(redistributed(found, parameter)))
            except Exception as error:
                self.interrupted = type(error).__name__
                raise
            done.append(True)

        arguments = self.arguments(group, phase)
        columns = self._columns(arguments.form, parameter.dtype, dtype)
        again = update._replace(
            arguments=arguments, negate=False, columns=columns, gradients=[made]
        )
        return compute, again

    def _updates(
        self,
        owner: Owner,
        group: Mapping[str, Any],
        number: int,
        only: Container[Tensor] | None,
        fresh: dict[Tensor, dict[str, Any]],
    ) -> list[HostUpdate]:
        """Updates of a group; `fresh` gets states that are new."""
        given = group["params"]
        places: Iterable[int] = range(len(given))
        times = None  # a parameter may be in its group twice
        if len(set(map(id, given))) < len(given):
            times = Counter(map(id, given))
            places = sorted({id(p): at for at, p in reversed([*enumerate(given)])}.values())
        found = [*map(_GRAD, given)]
        positions = [at for at in places if found[at] is not None]
        if only is not None:
            positions = [at for at in positions if given[at] in only]
        if not positions:
            return []
        parameters: list[Tensor] = [given[at] for at in positions]
        gradients: list[Tensor] = [found[at] for at in positions]
        self.rule.check(group)
        try:
            indices = [*map(self._indices.__getitem__, parameters)]
        except KeyError:  # not all have a number yet
            self.place(owner, group, parameters)
            indices = [*map(self._indices.__getitem__, parameters)]
        extra = self.rule.definition.extra[self.rule.form(group).rule.name]
        saved = [*map(owner.state.get, parameters)]
        if not all(saved):
            for at in positions:
                check_parameter(label(group, number, at), given[at])
        states = [s or self._first(group, p) for s, p in zip(saved, parameters, strict=True)]
        repeated = [1 if times is None else times[id(p)] for p in parameters]
        counts = self._counts(states)
        phases: list[Phase | int] = [*map(operator.add, counts, repeated)]
        for index, count in enumerate(counts) if extra or min(counts) < 0 else ():
            if count < 0 or extra:
                name, p = label(group, number, positions[index]), parameters[index]
                phases[index], states[index] = self._began(
                    group, name, p, states[index], repeated[index]
                )
        chosen = defaultdict[tuple[Phase | int, torch.dtype, torch.dtype], list[int]](list)
        # Tuples are not kept: so many new objects would start collections of garbage.
        keys, end = zip(phases, map(_DTYPE, parameters), map(_DTYPE, gradients), strict=True), 0
        for key, alike_ones in groupby(keys):
            begin, end = end, end + sum(1 for _ in alike_ones)
            again = map(repeat, range(begin, end), repeated[begin:end])
            chosen[key] += range(begin, end) if times is None else chain.from_iterable(again)
        if any(map(operator.is_not, states, saved)):
            fresh.update(
                (p, state)
                for p, state, old in zip(parameters, states, saved, strict=True)
                if state is not old and state
            )
        updates = []
        for (phase, dtype, other), taken in chosen.items():
            at = positions[taken[0]]
            name = label(group, number, at)
            check_parameter(name, given[at])
            check_gradient(name, given[at], gradients[taken[0]])
            phase = Phase(phase, False) if isinstance(phase, int) else phase
            arguments = self.arguments(group, phase)
            updates.append(
                HostUpdate(
                    group,
                    number,
                    arguments,
                    bool(group.get("maximize")),
                    self._columns(arguments.form, dtype, other),
                    [*map(positions.__getitem__, taken)],
                    [*map(indices.__getitem__, taken)],
                    [*map(parameters.__getitem__, taken)],
                    [*map(gradients.__getitem__, taken)],
                    [*map(states.__getitem__, taken)],
                )
            )
        return updates

    def _began(
        self,
        group: Mapping[str, Any],
        name: str,
        parameter: Tensor,
        state: dict[str, Any],
        times: int,
    ) -> tuple[Phase, dict[str, Any]]:
        """Phase and state of a parameter that is looked at by itself."""
        phase = self.rule.phase(group, name, state, times)
        if phase.first:
            check_parameter(name, parameter)
            extra = self.rule.definition.extra[self.rule.form(group).rule.name]
            formats = self._formats(parameter.dtype)
            kept = {key: value for key, value in state.items() if value is not None}
            state = {**self._home.first_state(parameter, extra, {}, formats), **kept}
        if self.layout.counts and not is_count(state["step"]):
            step = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
            state = {**state, "step": step}
        return phase, state

    def _counts(self, states: Sequence[Mapping[str, Any]]) -> list[int]:
        """Step counts of states; -1 of one that has to be looked at by itself."""
        alone = [-1] * len(states)
        if not self.layout.counts:
            return alone
        steps: list[Any] = [state.get("step") for state in states]
        try:
            found = np.array([*map(Tensor.item, steps)])  # of a nested tensor there is none
        except (TypeError, ValueError, RuntimeError):
            return alone
        if not self._known.passed("step", steps, lambda: all(map(is_count, steps))):
            return alone
        whole = (found >= 0) & (found < EXACT_STEPS) & (found == np.trunc(found))
        counts: list[int] = np.where(whole, found, -1).astype(int).tolist()
        return counts
