"""Offload of the example's model: by use, or by MemFerry's plan; and a picture of an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import typer
from trainer import Trainer

import nearstep
from nearstep.cli.files import check_picture, check_writable
from nearstep.cli.plan import show
from nearstep.errors import ArgumentError
from nearstep.memferry import work
from nearstep.memferry.cost import Costs
from nearstep.memferry.planner import Planned
from nearstep.torch.memferry import Profiling
from nearstep.torch.offload import Engine
from nearstep.torch.offload.engine import Policy, Updates
from nearstep.torch.offload.errors import BudgetError
from nearstep.work.trace import picture
from nearstep_spec.platform.load import load

POLICIES = get_args(Policy)
UPDATES = get_args(Updates)
PLATFORM, GPU, MEMORY = "axdimm", "gpu", "axdimm"
"""The machine that plans are made for, and that recordings have the time of."""


def check_options(policy: str, updates: str, timeline: Path | None, *, offload: bool) -> None:
    """Refuse what cannot be, before anything is trained."""
    for name, given, known in (("policy", policy, POLICIES), ("updates", updates, UPDATES)):
        if given not in known:
            reason = f"{given!r} is not one of {', '.join(known)}"
            raise typer.BadParameter(reason, param_hint=f"--{name}")
    if updates != "at-step" and not offload:
        raise typer.BadParameter("needs --offload", param_hint="--updates")
    if timeline is None:
        return
    if not offload:
        raise typer.BadParameter("needs --offload", param_hint="--timeline")
    check_picture(timeline, "--timeline")
    check_writable("--timeline", timeline)


def offloaded(trainer: Trainer, budget: str, policy: Policy, updates: Updates) -> Engine:
    """Have the parameters of a trainer's model on its optimizer's device.

    A plan is made in the first step, for the machine.
    """
    try:
        return nearstep.offload(
            trainer.model,
            trainer.optimizer,
            budget=budget,
            policy=policy,
            updates=updates,
            profile=machine(policy),
        )
    except (ArgumentError, BudgetError) as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error


def machine(policy: Policy) -> Profiling | None:
    """What a plan of the policy is made for, if it makes one."""
    if policy != "memferry":
        return None
    rate = float(load(PLATFORM).dimms[MEMORY].adam_params_per_s)
    return Profiling(platform=PLATFORM, gpu=GPU, host=f"{MEMORY}.0", host_params_per_s=rate)


def show_plan(engine: Engine) -> None:
    """Print the plan of an engine, if it has one."""
    if engine.plan is None or engine.profile is None:
        return
    costs = Costs(engine.profile)
    decisions = [*engine.plan.layers.values()]
    made = Planned(engine.plan, costs, costs.times(decisions).total, None, {})
    show(made, work.once(costs, decisions), "memferry")


@contextmanager
def drawn(engine: Engine, path: Path) -> Iterator[None]:
    """Draw what is done in this `with` statement, in the time of the machine."""
    with engine.record(PLATFORM, compute=GPU, memory=MEMORY) as recording:
        yield
    timeline = recording.timeline
    title = f"an iteration on {PLATFORM} in {engine.budget:,} bytes: {timeline.seconds:.4g} s"
    picture(timeline, path, title)
