"""The function `nearstep.offload`."""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn

from nearstep.errors import ArgumentError
from nearstep.memferry.plan import Plan
from nearstep.memferry.profile import Profile
from nearstep.torch.errors import ParameterError
from nearstep.torch.memferry.tracer import Profiling
from nearstep.torch.offload.construction import Init
from nearstep.torch.offload.engine import Engine, Policy, Updates
from nearstep.torch.offload.names import check_optimizer
from nearstep.torch.offload.parameter import OffloadedParameter, waiting_copy


def _offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    budget: int | str,
    policy: Policy = "prefetch",
    updates: Updates = "at-step",
    plan: Plan | None = None,
    profile: Profile | Profiling | None = None,
    reserve: float | None = None,
) -> Engine:
    """Offload a model: fetch each parameter before use and free it afterwards.

    ::

        optimizer = nearstep.optim.AdamW(model.parameters(), device="golden:axdimm")
        engine = nearstep.offload(model, optimizer, budget="25%")
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Parameters and optimizer state are kept on the optimizer's device (`docs/offload.md`). Training
    is bit-identical to training without offload.

    Parameters
    ----------
    model : every parameter that requires a gradient is in a group of the optimizer. Gradients of a
        `torch.nn.parallel.DistributedDataParallel` are averaged over workers before they are sent.
    optimizer : of `nearstep.optim`, on any device; without one, this machine's processor updates
        parameters and state in memory of its own (`host:`). With compression each step has one
        backward, besides those in `engine.accumulate()`.
    budget : maximum memory of parameters and gradients on the compute device: bytes, text such as
        `2GiB`, or a share of the parameters' bytes such as `25%`.
    policy : `prefetch` fetches parameters before use, in the order of the last step, within the
        budget; `on-demand` fetches on use. `memferry` is `prefetch` with a plan of which data the
        compute device accesses in host memory instead (`docs/memferry.md`).
    updates : `at-step`; or `in-backward`, which updates the parameters of a module as soon as
        backward has made all of their gradients. This requires one backward per step, and no access
        to gradients or options between backward and step; a detected violation raises
        `EarlyUpdateError`.
    plan, profile : of the model, with policy `memferry`; without a plan, the planner makes one from
        the profile within the budget. Without both, the first step runs as with `prefetch` and is
        profiled; its plan applies from the end of that step. A `Profiling` names the machine.
    reserve : with policy `memferry` and without a plan: share of the gradients' bytes, from 0 to 1,
        that memory of the compute device may keep; the default is 1.

    Raises
    ------
    BudgetError : the budget is smaller than one module needs.
    WrapperError : a part of the model has its own wrapper.
    PlanError, PlanBudgetError : the plan or the profile is of another model, or nothing fits.
    BudgetFormatError, ParameterError, UnsupportedOptionError, ArgumentError : an argument is
        invalid, or a parameter, module or optimizer cannot be offloaded. Nothing was changed.
    """
    if policy not in get_args(Policy):
        raise ArgumentError(f"policy must be one of {get_args(Policy)}, not {policy!r}")
    if updates not in get_args(Updates):
        raise ArgumentError(f"updates must be one of {get_args(Updates)}, not {updates!r}")
    if policy != "memferry" and (plan is not None or profile is not None):
        raise ArgumentError(f"plan and profile are for policy memferry, not {policy!r}")
    if reserve is not None:
        if policy != "memferry" or plan is not None:
            raise ArgumentError("reserve is for policy memferry without a plan, which has its own")
        number = isinstance(reserve, int | float) and not isinstance(reserve, bool)
        if not number or not 0 <= reserve <= 1:
            raise ArgumentError(f"reserve must be a share from 0 to 1, not {reserve!r}")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    found = check_optimizer(optimizer)
    for parameter in model.parameters():
        if isinstance(parameter, OffloadedParameter) and waiting_copy(parameter) is None:
            raise ParameterError("a parameter of the model", "with no engine yet", "offloaded")
    with torch.inference_mode(False):  # so that the engine makes no inference tensors
        return Engine(
            model,
            found,
            budget,
            policy,
            updates,
            plan,
            profile,
            reserve=1.0 if reserve is None else reserve,
        )


class Offload:
    """`_offload` as a callable with the attribute `init`."""

    init = Init
    __call__ = staticmethod(_offload)


offload = Offload()
