"""Training with parameters that come to the compute device when they are used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from nearstep.errors import ArgumentError
from nearstep.memferry.plan import Plan
from nearstep.memferry.profile import Profile
from nearstep.torch.budget import budget_bytes
from nearstep.torch.errors import ParameterError, UnsupportedOptionError
from nearstep.torch.memferry.policy import in_place, plan_for
from nearstep.torch.offload.construction import end_waiting
from nearstep.torch.offload.copy import DeviceCopy
from nearstep.torch.offload.early import EarlyUpdates
from nearstep.torch.offload.errors import BudgetError, EngineCopyError, RecordingError
from nearstep.torch.offload.gradients import Gradients
from nearstep.torch.offload.in_place import NOTHING
from nearstep.torch.offload.ledger import Ledger
from nearstep.torch.offload.machine import Machine
from nearstep.torch.offload.mapped import check_mapped
from nearstep.torch.offload.modules import check_modules, hook_modules
from nearstep.torch.offload.names import Names, check_optimizer, smallest_budget
from nearstep.torch.offload.order import UseOrder
from nearstep.torch.offload.parameter import OffloadedParameter, Place, waiting_copy
from nearstep.torch.offload.pipeline import Pipeline
from nearstep.torch.offload.queued import QueuedSteps
from nearstep.torch.offload.recording import Recording
from nearstep.torch.offload.space import Space
from nearstep.torch.offload.streams import Streams
from nearstep.torch.offload.uses import Uses
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.torch.traffic import Traffic
from nearstep_spec.platform.machine import Platform

Policy = Literal["prefetch", "on-demand", "memferry"]
Updates = Literal["at-step", "in-backward"]

USES_PER_PERIOD = 64
"""Uses of each parameter after which the order of uses is taken to repeat, where nobody steps."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an engine has done since it was opened, in bytes where not said otherwise.

    Attributes
    ----------
    budget
    parameters : of all parameters.
    peak : most that was on the compute device: parameters, and gradients from before they are made
        until their owner has them; without what is in place by a plan.
    peak_parameters, peak_gradients : most of one of them.
    parameters_up, parameters_down : fetched from their owner, and sent there because they were
        changed here, or had never been there.
    gradients_down, gradients_up : sent to their owner, and fetched from there.
    fetches, prefetches : how many parameters were fetched when they were used, and before.
    releases : how many times a parameter gave up its memory.
    gradients : how many gradients went to their owner.
    steps : of the optimizer; with updates in backward, of modules.
    """

    budget: int
    parameters: int
    peak: int
    peak_parameters: int
    peak_gradients: int
    parameters_up: int
    parameters_down: int
    gradients_down: int
    gradients_up: int
    fetches: int
    prefetches: int
    releases: int
    gradients: int
    steps: int


class Engine:
    """Made by `offload`, which see.

    Attributes
    ----------
    budget : bytes.
    plan : by which parameters and gradients are in place; None of other policies than `memferry`.
    closed
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: DeviceOptimizer,
        budget: int | str,
        policy: Policy,
        updates: Updates,
        plan: Plan | None = None,
        profile: Profile | None = None,
    ) -> None:
        check_modules(model)
        self._names = Names(model, optimizer)
        parameters = list(self._names.parameters)
        self._bytes = sum(each.numel() * each.element_size() for each in parameters)
        self.budget = budget_bytes(budget, self._bytes)
        self.plan = plan_for(model, self.budget, plan, profile) if policy == "memferry" else None
        places = {} if self.plan is None else in_place(model, self.plan)
        if self._names.device.type != "cpu":
            check_mapped(self._names.device, places)
            places = {each: replace(found, gradient=False) for each, found in places.items()}
        smallest = smallest_budget(model, parameters, places)
        if self.budget < smallest:
            raise BudgetError(
                "parameters of one module with their gradients", smallest, self.budget
            )
        self._optimizer = optimizer
        self._early = EarlyUpdates(model, optimizer) if updates == "in-backward" else None
        copies = [
            DeviceCopy(
                index, name, parameter, optimizer, _like(parameter), places.get(parameter, NOTHING)
            )
            for index, (parameter, name) in enumerate(self._names.parameters.items())
        ]
        self._check_held(copies, smallest)
        self._start: dict[str, Any] = optimizer.traffic.as_dict()
        self._open(model, copies, policy)

    def _open(self, model: nn.Module, copies: list[DeviceCopy], policy: Policy) -> None:
        for copy in copies:
            end_waiting(copy.parameter)
        indices = [each.index for each in copies]
        order = UseOrder(indices + indices[::-1], USES_PER_PERIOD * max(1, len(indices)))
        ledger = Ledger(budget=self.budget)
        device = self._names.device
        streams = None if device.type == "cpu" else Streams(device)
        self._space = Space(
            copies, ledger, order, prefetches=policy != "on-demand", streams=streams
        )
        if streams is not None:
            streams.join_when_gone(self._space)
        self._gradients = Gradients(self._space, self._arrived)
        if self._early is not None:
            self._early.copies = copies
            self._space.give_up = self._early.give_up
        self._uses = Uses(self._space, self._gradients)
        self._places: list[Place] = []
        self._space.release_all()
        self._space.bring_in_place()
        ledger.reset_peaks()
        for copy in copies:
            parameter = copy.parameter
            parameter.__class__ = OffloadedParameter
            assert isinstance(parameter, OffloadedParameter)
            place = Place(self._uses, copy)
            self._places.append(place)
            parameter._place = weakref.ref(place)
            self._uses.hook(copy)
            gradient = copy.raw_gradient()
            if gradient is not None:
                self._gradients.complete(copy)
        self._remove: list[Callable[[], None]] = hook_modules(model, self._before_forward)
        self._optimizer.around_update = self._around_update
        self.closed = False

    def _check_held(self, copies: Sequence[DeviceCopy], smallest: int) -> None:
        """Raise `BudgetError` if what something refers to, and so cannot go, leaves no room."""
        stay = [
            copy
            for copy in copies
            if copy.present and copy.nbytes and not copy.can_go and not copy.in_place.forward
        ]
        needed = sum(copy.nbytes for copy in stay)
        if needed > self.budget:
            names = ", ".join(sorted(copy.name for copy in stay))
            what = f"parameters in memory that something refers to ({names})"
            raise BudgetError(what, max(needed, smallest), self.budget)

    def report(self) -> Report:
        """What has been done so far."""
        now, before = self._optimizer.traffic, Traffic(**self._start)
        ledger, counts = self._space.ledger, self._space.counts
        return Report(
            budget=self.budget,
            parameters=self._bytes,
            peak=ledger.peak,
            peak_parameters=ledger.parameters_peak,
            peak_gradients=ledger.gradients_peak,
            parameters_up=now.parameters_up - before.parameters_up,
            parameters_down=now.masters_down - before.masters_down,
            gradients_down=now.gradients_down - before.gradients_down,
            gradients_up=now.gradients_up - before.gradients_up,
            fetches=counts.fetches,
            prefetches=counts.prefetches,
            releases=counts.releases,
            gradients=counts.gradients,
            steps=now.steps - before.steps,
        )

    def close(self) -> None:
        """Make the model a plain one again, with all of its parameters and gradients here.

        Graphs that were made before work on. Where backward has updated parameters, and `step()`
        was not called, the optimizer refuses steps until a checkpoint is loaded. A second time
        there is nothing to do.

        Raises
        ------
        ClosedDeviceError : the device is closed, and with it the parameters are lost.
        """
        if self.closed:
            return
        self._space.land_all()
        if self._space.streams is not None:
            self._space.streams.close()
        self._space.give_up()
        for copy in self._space.copies:
            if not copy.present:
                copy.fetch()
            held = copy.resident.held
            if held is not None:
                with torch.no_grad():
                    copy.set_raw_gradient(held.fetch(copy.parameter))
                copy.resident.release_gradient()
        self._space.closed = True
        for remove in self._remove:
            remove()
        self._uses.unhook()
        for copy in self._space.copies:
            parameter = copy.parameter
            del parameter._place  # type: ignore[attr-defined]
            parameter.__class__ = Parameter
        self._optimizer.around_update = nullcontext
        self.closed = True

    @contextmanager
    def record(
        self,
        platform: str | Platform,
        *,
        compute: str | None = None,
        memory: str | None = None,
        hertz: float | None = None,
        overlaps: bool = True,
    ) -> Iterator[Recording]:
        """Have what is done in this `with` statement overlap, in the time of a machine.

        Layers compute as fast as a processor of the machine would (`computation.Computation`).
        Transfers and updates go on meanwhile: on a device with a clock they are the device's own,
        in its cycles; on others they take what the machine's links and its update rate say. Values
        are those that they are without. The thread that records trains; to others parameters and
        gradients raise `QueueThreadError` meanwhile.

        Parameters
        ----------
        platform, compute, memory, hertz : as of `machine.Machine.of`.
        overlaps : False does one thing after the other, for comparison.

        Raises
        ------
        ArgumentError, PlatformError : the machine cannot be had from the platform.
        UnsupportedOptionError : the optimizer has drives, or parameters are not on the CPU.
        RecordingError : one goes on already, or the engine is closed.
        """
        if self.closed or self._optimizer.device.queue is not None:
            raise RecordingError("closed" if self.closed else "recording already")
        if self._names.device.type != "cpu":
            raise UnsupportedOptionError(
                "record", self._names.device, "layers compute on the CPU while they are recorded"
            )
        if self._optimizer.store is not None:
            raise UnsupportedOptionError("drives", "given", "transfers of drives are not recorded")
        optimizer, device = self._optimizer, self._optimizer.device
        machine = Machine.of(platform, device, compute, memory, hertz)
        self._space.land_all()
        self._space.end_sending()
        pipeline = Pipeline(
            device,
            machine,
            optimizer.traffic,
            optimizer.settings.max_cycles,
            self._failed,
            overlaps=overlaps,
        )
        with (
            optimizer.stepping_by(
                lambda steps: QueuedSteps(steps, pipeline, self._names.parameters)
            ),
            pipeline.active(),
        ):
            self._space.pipeline = pipeline
            try:
                yield Recording(pipeline)
            finally:
                try:
                    with self._space.aside():
                        self._space.land_all()
                finally:
                    try:
                        pipeline.finish()
                    finally:
                        self._space.reap()
                        self._space.end_recording()

    def _failed(self, cause: BaseException, updates: bool) -> None:
        """Work that was recorded failed, and perhaps updates with it."""
        self._space.lose_readings()
        if updates:
            self._space.give_up()
            self._optimizer.interrupt(type(cause).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise EngineCopyError

    def __copy__(self) -> NoReturn:
        raise EngineCopyError

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise EngineCopyError

    def _before_forward(self, _: nn.Module) -> None:
        if torch._C._current_graph_task_id() < 0:
            self._names.check()

    def _arrived(self, copy: DeviceCopy) -> None:
        if self._early is not None:
            self._early.arrived(copy, self._update_early)

    def _update_early(self, copies: Sequence[DeviceCopy]) -> None:
        stay = [copy for copy in copies if copy.present and not self._space.released(copy)]
        with self._apart(stay):
            self._optimizer.update_held()

    @contextmanager
    def _around_update(self) -> Iterator[None]:
        self._names.check()
        self._gradients.end_stale()
        if self._early is not None:
            self._early.before_step()
        self._space.end_sending()
        for copy in self._space.copies:
            self._space.follow(copy)
        with self._space.aside():
            with self._apart(self._space.release_all()):
                yield
            if self._space.pipeline is not None:
                self._space.pipeline.finish()
            self._space.bring_in_place()
        self._space.reap()
        if self._early is not None:
            self._early.after_step()
        self._space.order.end_period()

    @contextmanager
    def _apart(self, stay: Sequence[DeviceCopy]) -> Iterator[None]:
        """Update on the device alone: parameters that have to stay here are fetched afterwards."""
        for copy in stay:
            copy.settle()
        try:
            with torch._C.DisableTorchFunctionSubclass():
                yield
        except BaseException:
            for copy in stay:
                copy.resident.stay()
            raise
        for copy in stay:
            copy.refresh()


def _like(parameter: Tensor) -> Tensor | None:
    """`DeviceCopy.like` of a parameter that `init` has sent away."""
    found = waiting_copy(parameter)
    return None if found is None or found.present else found.like


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    budget: int | str,
    policy: Policy = "prefetch",
    updates: Updates = "at-step",
    plan: Plan | None = None,
    profile: Profile | None = None,
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
    model : every parameter that requires a gradient is in a group of the optimizer.
    optimizer : of `nearstep.optim`, on any device, without compression.
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
        profile, within the budget.

    Raises
    ------
    BudgetError : the budget is smaller than what one module needs.
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
