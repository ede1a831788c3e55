"""What `nearstep.offload` is."""

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
) -> Engine:
    """Have the parameters of a model come to the compute device when they are used, and go again.

    ::

        optimizer = nearstep.optim.AdamW(model.parameters(), device="golden:axdimm")
        engine = nearstep.offload(model, optimizer, budget="25%")
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Parameters and optimizer state are the optimizer's, on its device; `docs/offload.md` says what
    is where, and when. Training has the bits that it has without.

    Parameters
    ----------
    model : every parameter that requires a gradient is in a group of the optimizer. A
        `torch.nn.parallel.DistributedDataParallel` is one of several workers, whose gradients are
        averaged before owners get them.
    optimizer : of `nearstep.optim`, on any device. Where it compresses gradients, each step has one
        backward, unless others are made in `engine.accumulate()`.
    budget : of the memory that parameters and gradients may have on the compute device: bytes, text
        such as `2GiB`, or a share of the parameters' bytes, such as `25%`.
    policy : `prefetch` fetches parameters before they are used, in the order of the step before, as
        far as the budget goes; `on-demand` when they are used. `memferry` is `prefetch` with a plan
        that says what the compute device gets at in the host's memory instead (`docs/memferry.md`).
    updates : `at-step`; or `in-backward`, which updates the parameters of a module as soon as
        backward has made all of their gradients. That is right where each step has one backward,
        and nothing is done with gradients or options between backward and step: what can be seen
        to be otherwise raises `EarlyUpdateError`.
    plan, profile : of the model, with policy `memferry`; without a plan one is made for the
        profile, within the budget. Without both the first step runs as with `prefetch`, and is
        profiled; its plan is in force from its end on. A `Profiling` says on which machine.

    Raises
    ------
    BudgetError : the budget is smaller than what one module needs.
    WrapperError : a part of the model is in a wrapper of its own.
    PlanError, PlanBudgetError : the plan or the profile is of another model, or nothing fits.
    BudgetFormatError, ParameterError, UnsupportedOptionError, ArgumentError : the budget or the
        policy cannot be read, or a parameter, module or optimizer is of a kind that cannot be
        offloaded. Nothing has been changed.
    """
    if policy not in get_args(Policy):
        raise ArgumentError(f"policy must be one of {get_args(Policy)}, not {policy!r}")
    if updates not in get_args(Updates):
        raise ArgumentError(f"updates must be one of {get_args(Updates)}, not {updates!r}")
    if policy != "memferry" and (plan is not None or profile is not None):
        raise ArgumentError(f"plan and profile are for policy memferry, not {policy!r}")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    found = check_optimizer(optimizer)
    for parameter in model.parameters():
        if isinstance(parameter, OffloadedParameter) and waiting_copy(parameter) is None:
            raise ParameterError("a parameter of the model", "with no engine yet", "offloaded")
    with torch.inference_mode(False):  # what it makes outlives that
        return Engine(model, found, budget, policy, updates, plan, profile)


class Offload:
    """`_offload`, which has `init` as an attribute."""

    init = Init
    __call__ = staticmethod(_offload)


offload = Offload()
