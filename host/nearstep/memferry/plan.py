"""Plans: a decision for each layer, as text that can be compared, edited and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearstep.memferry.cost import Costs, Decision, Mode
from nearstep.memferry.errors import FingerprintError, PlanError
from nearstep.scalars import is_whole

VERSION = 1
FIELDS = ("version", "fingerprint", "budget_bytes", "reserve", "layers")
LAYER_FIELDS = ("gradients", "mode")
GRADIENTS = ("gpu", "host", "none")
"""Gradients kept in GPU memory and sent, written to the host, or absent."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A decision for each layer.

    Attributes
    ----------
    fingerprint : of the profile's model.
    budget_bytes : of GPU memory for parameters and gradients; None of no limit.
    reserve : share of the gradients' bytes that GPU memory may keep.
    layers : decisions by name, in the order of the forward pass.
    """

    fingerprint: str
    budget_bytes: int | None
    reserve: float
    layers: Mapping[str, Decision]

    def to_json(self, costs: Costs) -> str:
        """Write the plan as text: keys sorted, a numbered line for each layer in the order of
        forward."""
        digits = len(str(max(len(costs) - 1, 0)))
        lines = []
        for i, (name, decision) in enumerate(self.layers.items()):
            gradients = "none" if not costs.trained[i] else GRADIENTS[decision.write]
            entry = json.dumps({"gradients": gradients, "mode": decision.mode.name})
            lines.append(f"  {json.dumps(f'{i:0{digits}} {name}')}: {entry}")
        layers = ",\n".join(lines)
        return (
            f'{{\n "budget_bytes": {json.dumps(self.budget_bytes)},\n'
            f' "fingerprint": {json.dumps(self.fingerprint)},\n'
            f' "layers": {{\n{layers}\n }},\n'
            f' "reserve": {json.dumps(self.reserve)},\n "version": {VERSION}\n}}\n'
        )


def from_json(text: str, costs: Costs) -> Plan:
    """Read a plan, and check it against the costs of a profile.

    Raises
    ------
    FingerprintError : the plan was made for another model.
    PlanError : the plan is invalid for this profile: the first fault is named, with its layer and
        field.
    """
    try:
        table = json.loads(text, object_pairs_hook=_once)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError("", "plan", "JSON", str(error)) from None
    if not isinstance(table, dict):
        raise PlanError("", "plan", "a table", table)
    PlanError.check_keys("", table, FIELDS, sorted(FIELDS))
    if table["version"] != VERSION:
        raise PlanError("", "version", str(VERSION), table["version"])
    if table["fingerprint"] != costs.profile.fingerprint:
        raise FingerprintError(costs.profile.fingerprint, str(table["fingerprint"]))
    budget, reserve = table["budget_bytes"], table["reserve"]
    if budget is not None and (not is_whole(budget) or budget < 0):
        raise PlanError("", "budget_bytes", "bytes from 0, or null", budget)
    number = isinstance(reserve, int | float) and not isinstance(reserve, bool)
    if not number or not 0 <= reserve <= 1:
        raise PlanError("", "reserve", "a share from 0 to 1", reserve)
    plan = Plan(
        fingerprint=table["fingerprint"],
        budget_bytes=budget,
        reserve=float(reserve),
        layers=_layers(table["layers"], costs),
    )
    check(plan, costs)
    return plan


def check(plan: Plan, costs: Costs) -> None:
    """Check that a plan keeps to its own limits.

    Raises
    ------
    PlanError : the first layer that exceeds them is named.
    """
    kept = used = 0
    most = allowance(plan.reserve, costs)
    for i, (name, decision) in enumerate(plan.layers.items()):
        _check_allowed(name, decision, i, costs)
        kept += int(costs.gradient_bytes[i, decision.index])
        used += int(costs.parameter_bytes[i, decision.index])
        if kept > most:
            expected = f"host: the reserve {plan.reserve} leaves {most} bytes"
            raise PlanError(name, "gradients", expected, "gpu")
        if plan.budget_bytes is not None and kept + used > plan.budget_bytes:
            expected = f"one with which the first {i + 1} layers take {plan.budget_bytes} bytes"
            raise PlanError(name, "mode", expected, f"{decision.mode.name}, with {kept + used}")


def allowance(reserve: float, costs: Costs) -> int:
    """Bytes of gradients that a reserve factor leaves in GPU memory."""
    return int(reserve * costs.profile.gradient_bytes)


def _layers(table: object, costs: Costs) -> dict[str, Decision]:
    if not isinstance(table, dict):
        raise PlanError("", "layers", "a table", table)
    names = [layer.name for layer in costs.profile.layers]
    digits = len(str(max(len(names) - 1, 0)))
    expected = [f"{i:0{digits}} {name}" for i, name in enumerate(names)]
    for key in expected:
        if key not in table:
            raise PlanError(key, "layer", "given", "missing")
    for key in table:
        if key not in expected:
            raise PlanError(key, "layer", "one of the profile", "unknown")
    return {
        name: _decision(name, table[key], i, costs)
        for i, (key, name) in enumerate(zip(expected, names, strict=True))
    }


def _decision(name: str, table: object, place: int, costs: Costs) -> Decision:
    if not isinstance(table, dict):
        raise PlanError(name, "layer", "a table", table)
    PlanError.check_keys(name, table, LAYER_FIELDS)
    mode, gradients = table["mode"], table["gradients"]
    if not isinstance(mode, str) or mode not in Mode.__members__:
        raise PlanError(name, "mode", f"one of {', '.join(Mode.__members__)}", mode)
    possible = GRADIENTS[:2] if costs.trained[place] else GRADIENTS[2:]
    if gradients not in possible:
        raise PlanError(name, "gradients", " or ".join(possible), gradients)
    decision = Decision(Mode[mode], gradients == "host")
    _check_allowed(name, decision, place, costs)
    return decision


def _check_allowed(name: str, decision: Decision, place: int, costs: Costs) -> None:
    """Raise `PlanError` unless the layer can do it."""
    if not costs.allowed[place, decision.index]:
        can = [each for each in Mode if costs.allowed[place, Decision(each, decision.write).index]]
        if can:
            expected = f"one of {', '.join(each.name for each in can)}"
            raise PlanError(name, "mode", expected, decision.mode.name)
        raise PlanError(name, "gradients", "gpu: this layer cannot write them", "host")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table; a duplicate key is an error."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise PlanError("", key, "given once", "given twice")
        found[key] = value
    return found
