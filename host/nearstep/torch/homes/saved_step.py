"""What a generation on drives says about a step, besides the arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nearstep.torch.errors import StateError
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.homes.opening import describe, keys
from nearstep.torch.saved import count
from nearstep.torch.state import ParameterState
from nearstep_spec.rule.optimizer import Optimizer

VERSION = 1


class StepState(NamedTuple):
    """State of one parameter.

    Attributes
    ----------
    step : None if none is kept.
    moments : keys of those that the drives have.
    residual : whether the drives have what error feedback held back; None: there was something,
        and they have not.
    """

    step: int | None
    moments: Sequence[str]
    residual: bool | None = False


class SavedStep(NamedTuple):
    """What `pack` was given.

    Attributes
    ----------
    groups : options of each.
    layout : where the arrays lie: of `nearstep.torch.homes.durable.DurableHome`.
    """

    groups: Sequence[dict[str, Any]]
    states: Mapping[Tensor, StepState]
    layout: Mapping[str, Any] | None


def pack(
    title: str,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, Any],
    placed: Container[Tensor],
    arithmetic: str,
    layout: Mapping[str, Any] | None,
    *,
    save_residual: bool,
) -> dict[str, Any]:
    """Meta data of a generation.

    Parameters
    ----------
    title, groups, states, placed : of the optimizer: its name, groups, `state`, and the parameters
        that have a place.
    arithmetic : `digest` of what it computes.
    layout : as of `SavedStep`.
    save_residual : the drives have what error feedback held back.

    Raises
    ------
    StateError : state is not on the device, or an option of a group is none that JSON has.
    """
    names = keys(groups)
    return {
        "version": VERSION,
        "owner": _owner(title, groups),
        "rule": arithmetic,
        "layout": layout,
        "groups": [_options(group, index) for index, group in enumerate(groups)],
        "states": {
            names[p]: _state(names[p], state, save_residual=save_residual)
            for p, state in states.items()
            if p in placed and isinstance(state, ParameterState)
        },
    }


def unpack(
    meta: Mapping[str, Any], title: str, groups: Sequence[Mapping[str, Any]], arithmetic: str
) -> SavedStep:
    """What a generation says.

    Raises
    ------
    ResumeError : it is of no optimizer, or of another one, or of one that computed something else.
    """
    owner = _owner(title, groups)
    if meta.get("owner") != owner:
        raise ResumeError(f"a step of {owner}", str(meta.get("owner")))
    if meta.get("version") != VERSION:
        raise ResumeError(f"a step in version {VERSION}", f"version {meta.get('version')}")
    found = meta.get("rule")
    if found != arithmetic:
        expected = f"a step of {title} that computes {arithmetic}"
        raise ResumeError(expected, f"{found}: it was changed")
    if len(meta["groups"]) != len(groups):
        raise ResumeError(f"{len(groups)} groups", str(len(meta["groups"])))
    states = {
        p: StepState(**meta["states"][name])
        for p, name in keys(groups).items()
        if name in meta["states"]
    }
    options = [_unlisted(each) for each in meta["groups"]]
    return SavedStep(options, states, meta.get("layout"))


def digest(rule: Optimizer, source: str) -> str:
    """Of the arithmetic of all forms of an optimizer, and of its state.

    Parameters
    ----------
    source : as of `nearstep_spec.rule.file.load_with_digest`; empty of one of the package.
    """
    forms = [each.digest for each in rule.all_forms]
    text = json.dumps([forms, sorted(rule.state.items()), rule.counts, *filter(None, [source])])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _owner(title: str, groups: Iterable[Mapping[str, Any]]) -> str:
    return describe(title, [group["params"] for group in groups])


def _state(name: str, state: ParameterState, *, save_residual: bool) -> dict[str, Any]:
    counts = state.store is not None and state.store.layout.counts
    layout = () if state.store is None else state.store.layout.moments
    return {
        "step": count(name, state.step) if counts else None,
        "moments": [key for key in layout if state.has_moment(key)],
        "residual": False if state.residual is None else (save_residual or None),
    }


def _options(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: _plain(value, f"group {index}", key) for key, value in options.items()}


def _plain(value: Any, where: str, key: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(each, where, key) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StateError(where, f"have an option {key!r} that drives can keep", value)


def _unlisted(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with tuples where JSON has lists."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
