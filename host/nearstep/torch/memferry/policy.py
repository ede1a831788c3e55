"""Plans for the offload engine: which parameters and gradients of a model are in place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from nearstep.errors import ArgumentError
from nearstep.memferry import planner
from nearstep.memferry.cost import Costs, Decision, Mode
from nearstep.memferry.errors import FingerprintError, PlanError
from nearstep.memferry.plan import Plan, check
from nearstep.memferry.profile import Profile
from nearstep.torch.memferry.layers import layers_of, model_fingerprint
from nearstep.torch.memferry.tracer import Profiling
from nearstep.torch.offload.compute_copy import InPlace


def plan_for(
    model: nn.Module,
    budget: int,
    plan: Plan | None = None,
    profile: Profile | Profiling | None = None,
    reserve: float = 1.0,
) -> Plan | None:
    """Return a plan checked against a model; None if the model must be profiled first.

    Parameters
    ----------
    budget : bytes of device memory, for a new plan.
    plan : plan to check; None: make one with the planner from the profile.
    profile : if given with a plan, the plan is checked against it.
    reserve : as of `nearstep.memferry.planner.make`, for a new plan.

    Raises
    ------
    ArgumentError : the plan or the profile has another type.
    FingerprintError : the plan or the profile is of another model.
    PlanError : the plan names an unknown layer, differs from the profile, or exceeds its own
        budget.
    PlanBudgetError : no plan fits the budget.
    """
    if plan is None and (profile is None or isinstance(profile, Profiling)):
        return None
    for what, kind, value in (("plan", Plan, plan), ("profile", Profile, profile)):
        if value is not None and not isinstance(value, kind):
            raise ArgumentError(f"{what} must be a {kind.__name__}, not {type(value).__name__}")
    assert not isinstance(profile, Profiling), "looked at"
    expected = model_fingerprint(model)
    for each in (plan, profile):
        if each is not None and each.fingerprint != expected:
            raise FingerprintError(expected, each.fingerprint)
    if plan is None:
        assert profile is not None, "one of them is given"
        plan = planner.make(profile, budget=budget, reserve=reserve).plan
    elif profile is not None:
        names = [layer.name for layer in profile.layers]
        if [*plan.layers] != names:
            raise PlanError("", "layers", f"those of the profile, {names}", [*plan.layers])
        check(plan, Costs(profile))
    known = layers_of(model)
    for name, decision in plan.layers.items():
        if name not in known:
            raise PlanError(name, "layer", "a module with parameters of its own", "unknown")
        if not isinstance(decision, Decision):
            raise PlanError(name, "mode", "a Decision", decision)
    return plan


def in_place(model: nn.Module, plan: Plan) -> Mapping[Tensor, InPlace]:
    """Return the in-place accesses of each parameter in a plan, in the order of the plan.

    A parameter of several layers is in place if all these layers are; its gradient follows the
    first layer. A parameter of no layer in the plan is fetched on use.
    """
    known = layers_of(model)
    decisions: dict[Tensor, list[Decision]] = {}
    for name, decision in plan.layers.items():
        for parameter in known[name].parameters:
            decisions.setdefault(parameter, []).append(decision)
    return {
        parameter: InPlace(
            forward=all(each.mode is not Mode.GFGB for each in found),
            backward=all(each.mode is Mode.DHA for each in found),
            gradient=found[0].write,
        )
        for parameter, found in decisions.items()
    }
