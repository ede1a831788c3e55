"""The offload engine: parameters are fetched to the compute device when they are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor, nn

from nearstep.errors import ArgumentError
from nearstep.memferry.plan import Plan
from nearstep.memferry.profile import Profile
from nearstep.torch.budget import budget_bytes
from nearstep.torch.device_gradient import SparseGradient
from nearstep.torch.eager import eager
from nearstep.torch.errors import UnsupportedOptionError
from nearstep.torch.memferry.attribution import memory_of
from nearstep.torch.memferry.policy import in_place, plan_for
from nearstep.torch.memferry.tracer import ModelTracer, Profiling
from nearstep.torch.offload.averaging import Averager
from nearstep.torch.offload.cache import ParameterCache
from nearstep.torch.offload.compute_copy import NOTHING, ComputeCopy, InPlace
from nearstep.torch.offload.construction import end_waiting
from nearstep.torch.offload.early import EarlyUpdates
from nearstep.torch.offload.errors import (
    BudgetError,
    ChangedModelError,
    EngineCopyError,
    RecordingError,
    VectorWarning,
)
from nearstep.torch.offload.gradients import Gradients
from nearstep.torch.offload.ledger import Ledger
from nearstep.torch.offload.machine import Machine
from nearstep.torch.offload.mapped import MAPPERS, check_mapped
from nearstep.torch.offload.modules import check_modules, hook_modules
from nearstep.torch.offload.names import (
    Names,
    gradients_at_once,
    smallest_budget,
)
from nearstep.torch.offload.order import UseOrder
from nearstep.torch.offload.parameter import AccessHooks, OffloadedParameter, waiting_copy
from nearstep.torch.offload.recording import Recording
from nearstep.torch.offload.report import Report
from nearstep.torch.offload.shadow import Shadow
from nearstep.torch.offload.streams import Streams
from nearstep.torch.offload.wrapper import Wrapper, check_wrapper, unwrapped
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.torch.traffic import Traffic
from nearstep_spec.platform.machine import Platform

Policy = Literal["prefetch", "on-demand", "memferry"]
Updates = Literal["at-step", "in-backward"]

USES_PER_PERIOD = 64
"""Uses of each parameter after which a period ends without a step."""


class Engine:
    """The engine of one model and optimizer, made by `offload`.

    Attributes
    ----------
    budget : in bytes.
    plan : which parameters and gradients are in place; None with policies other than `memferry`,
        and until the first step has made a plan.
    profile : the profile that the plan was made for, if any.
    shadow : memory of the parameters in the plan; None without a plan, and on an accelerator that
        cannot access host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: DeviceOptimizer,
        budget: int | str,
        policy: Policy,
        updates: Updates,
        plan: Plan | None = None,
        profile: Profile | Profiling | None = None,
        reserve: float = 1.0,
    ) -> None:
        self.closed = True  # until all is made
        model, self._wrapper = unwrapped(model)
        compression = optimizer.settings.compression
        if compression is not None and self._wrapper is not None:
            reason = "gradients that workers average are sent whole"
            raise UnsupportedOptionError("compression", compression.share, reason)
        self._averager: Averager | None = None
        check_modules(model)
        self._model = model
        self._names = Names(model, optimizer)
        parameters = list(self._names.parameters)
        self._bytes = sum(each.numel() * each.element_size() for each in parameters)
        self.budget = budget_bytes(budget, self._bytes)
        self._reserve = reserve
        self.plan = None
        if policy == "memferry":
            self.plan = plan_for(model, self.budget, plan, profile, reserve)
        self.profile = profile if isinstance(profile, Profile) else None
        self.shadow: Shadow | None = None
        places = {} if self.plan is None else self._in_place(self.plan)
        direct = self.plan is None or any(p.forward or p.gradient for p in places.values())
        if policy == "memferry" and direct and self._names.device.type != "cpu":
            check_mapped(self._names.device)
        smallest = smallest_budget(model, self._names, places)
        if self.budget < smallest:
            what = "parameters of one module with their gradients"
            raise BudgetError(what, smallest, self.budget, parameters=self._bytes)
        with ExitStack() as undo:
            undo.callback(optimizer.keep_apart())
            undo.callback(self._names.separate())
            self._optimizer = optimizer
            self._early = EarlyUpdates(model, optimizer) if updates == "in-backward" else None
            copies = [
                ComputeCopy(
                    index,
                    name,
                    parameter,
                    optimizer,
                    _like(parameter),
                    places.get(parameter, NOTHING),
                )
                for index, (parameter, name) in enumerate(self._names.parameters.items())
            ]
            self._copies = {copy.parameter: copy for copy in copies}
            watch = None
            if policy == "memferry" and self.plan is None:
                how = profile if isinstance(profile, Profiling) else Profiling()
                watch = ModelTracer(model, how, self._key)
                undo.callback(watch.close)
            self._start: dict[str, Any] = optimizer.traffic.as_dict()
            if self._wrapper is not None:
                self._wrapper.take()
                undo.callback(self._wrapper.give_back)
            self._check_held(copies, smallest)
            self._set_up(copies, policy, watch)
            undo.callback(self._make_plain, copies)
            undo.callback(setattr, self._space, "torn", True)  # first of all
            self._open(copies, warns=plan is not None)
            self.closed = False
            undo.pop_all()

    def _set_up(self, copies: list[ComputeCopy], policy: Policy, watch: ModelTracer | None) -> None:
        """Make the parts of the engine, and touch no parameter."""
        indices = [each.index for each in copies]
        expected = [(i, False) for i in indices] + [(i, True) for i in reversed(indices)]
        order = UseOrder(expected, USES_PER_PERIOD * max(1, len(indices)))
        device = self._names.device
        streams = None if device.type == "cpu" else Streams(device)
        self._space = ParameterCache(
            copies, Ledger(), order, prefetches=policy != "on-demand", streams=streams
        )
        if streams is not None:
            streams.join_when_gone(self._space)
        self._gradients = Gradients(self._space, self._arrived)
        if self._optimizer.settings.compression is not None:
            self._gradients.compresses = self._optimizer
        if self._early is not None:
            self._space.give_up = self._early.give_up
            self._gradients.stay = self._optimizer.store is not None
        if self._wrapper is not None:
            self._average(self._wrapper, copies)
        self._uses = AccessHooks(self._space, self._gradients)
        self._space.watch = watch
        self._remove: list[Callable[[], None]] = []

    def _open(self, copies: Sequence[ComputeCopy], *, warns: bool) -> None:
        """Offload the parameters, and put hooks on parameters and modules."""
        for copy in copies:
            end_waiting(copy.parameter)
        self._space.release_all()
        if self.plan is not None:
            self._put_in_force(self.plan)
            self._take_places(self.plan)
        self._space.bring_in_place()
        self._space.ledger.limit(self.budget)
        for copy in copies:
            OffloadedParameter.make(copy, self._uses)
            self._uses.hook(copy)
            gradient = copy.raw_gradient()
            try:
                self._gradients.complete(copy)
            except BaseException:
                copy.set_raw_gradient(gradient)  # dropped for lack of room
                raise
            del gradient
        self._remove.extend(hook_modules(self._model, self._before_forward))
        if self._early is not None:
            handle = self._optimizer.register_state_dict_pre_hook(self._early.before_checkpoint)
            self._remove.append(handle.remove)
        self._optimizer.around_update = self._around_update
        if warns and self.shadow is not None and self.shadow.needs > self.budget:
            warnings.warn(VectorWarning(self.shadow.needs, self.budget), stacklevel=4)

    def _average(self, wrapper: Wrapper, copies: Sequence[ComputeCopy]) -> None:
        """Average gradients over the workers of a wrapper."""
        by_parameter = {copy.parameter: copy for copy in copies}
        own = [by_parameter[each] for each in wrapper.parameters]
        self._averager = Averager(wrapper.ddp, self._space, own, self._gradients.deliver)
        self._gradients.averages = self._averager
        wrapper.use(self._averager)

    def _check_held(self, copies: Sequence[ComputeCopy], smallest: int) -> None:
        """Raise `BudgetError` if parameters that cannot be freed, as their memory is referenced,
        exceed the budget."""
        stay = [
            copy
            for copy in copies
            if copy.present and copy.nbytes and not copy.can_go and not copy.in_place.forward
        ]
        needed = sum(copy.nbytes for copy in stay)
        if needed > self.budget:
            names = ", ".join(sorted(copy.name for copy in stay))
            what = f"parameters in memory that something refers to ({names})"
            raise BudgetError(what, max(needed, smallest), self.budget, parameters=self._bytes)

    def report(self) -> Report:
        """Return the counters since the engine was opened."""
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
            updates=counts.updates,
            steps=now.steps - before.steps,
        )

    def close(self) -> None:
        """Make the model plain again, with all parameters and gradients on the compute device; of
        compressed gradients only the pairs are kept, which the next step sends.

        Existing graphs remain usable. If backward has updated parameters since the last `step()`,
        the optimizer refuses steps until a checkpoint is loaded; with drives the updates are rolled
        back. Further calls do nothing.

        Raises
        ------
        ClosedDeviceError : the device is closed, so the parameters are lost.
        ChangedModelError : `torch.utils.swap_tensors` has put another tensor in place of a
            parameter. The engine is closed: other parameters are plain, and the tensor is as it
            was.
        """
        if self.closed:
            return
        swapped = () if self._space.closed else self._leave_swapped()
        self._make_plain(self._space.copies)
        if self._wrapper is not None:
            self._wrapper.give_back()
        self.closed = True
        for copy in swapped:
            raise ChangedModelError(copy.name, "replaced")

    def _leave_swapped(self) -> Sequence[ComputeCopy]:
        """Forget parameters in whose place `torch.utils.swap_tensors` has put plain tensors, which
        the next step sends; return them."""
        copies = self._space.copies
        swapped = [each for each in copies if not isinstance(each.parameter, OffloadedParameter)]
        for copy in swapped:
            copy.resident.keep()
            copy.resident.release_gradient()
        self._space.leave(swapped)
        return swapped

    def _make_plain(self, copies: Sequence[ComputeCopy]) -> None:
        """Fetch parameters and gradients, and remove all hooks."""
        if not self._space.closed:
            self._fetch_all(copies)
            self._space.closed = True
        for remove in self._remove:
            remove()
        self._uses.unhook()
        for copy in copies:
            if isinstance(copy.parameter, OffloadedParameter):
                copy.parameter.end()
        self._space.forget_memory()
        self._optimizer.around_update = nullcontext

    def _fetch_all(self, copies: Sequence[ComputeCopy]) -> None:
        """Fetch parameters and gradients into memory of their own."""
        if self._space.torn:
            self._space.mend()
        self._space.land_all()
        if self._space.streams is not None:
            self._space.streams.close()
            self._space.leave_places()
        self._space.give_up()
        self._end_watch()
        self._space.free_vector()
        for copy in copies:
            if not copy.present:
                copy.fetch()
            held = copy.resident.held
            if isinstance(held, SparseGradient):
                if held.spent:
                    copy.resident.release_gradient()
            elif held is not None:
                with torch.no_grad():
                    copy.set_raw_gradient(held.fetch(copy.parameter))
                copy.resident.release_gradient()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep gradients of backward in this `with` statement whole on the device of an optimizer
        that compresses them: later gradients are added, and the step compresses the sum, as without
        an engine.

        Enter it around every backward of a step except the last, for which it is optional. Without
        compression it has no effect.

        Raises
        ------
        ArgumentError : `updates="in-backward"`, where each step has one backward.
        """
        if self._early is not None:
            raise ArgumentError("to accumulate, updates must be 'at-step', not 'in-backward'")
        before, self._gradients.keeps_whole = self._gradients.keeps_whole, True
        try:
            yield
        finally:
            self._gradients.keeps_whole = before

    @contextmanager
    def record(
        self,
        platform: str | Platform,
        *,
        compute: str | None = None,
        memory: str | None = None,
        hertz: float | None = None,
        host_params_per_s: float | None = None,
        overlaps: bool = True,
    ) -> Iterator[Recording]:
        """Record the operations in this `with` statement, in the time of a machine.

        Layers take the time of a processor of the machine (`computation.Computation`). Transfers
        and updates overlap: on a device with a clock they take the device's own cycles, otherwise
        the time given by the machine's links and update rate. Results are the same as without a
        recording.

        Parameters
        ----------
        platform, compute, memory, hertz, host_params_per_s : as of `machine.Machine.of`.
        overlaps : False makes all operations sequential, for comparison.

        Raises
        ------
        ArgumentError, PlatformError : the platform lacks a part or a figure.
        UnsupportedOptionError : the optimizer has drives of cards or compresses gradients, or
            parameters are not on the CPU.
        RecordingError : a recording is open, or the engine is closed.
        """
        if self.closed or self._space.recording is not None:
            raise RecordingError("closed" if self.closed else "recording already")
        if self._names.device.type != "cpu":
            raise UnsupportedOptionError(
                "record", self._names.device, "layers compute on the CPU while they are recorded"
            )
        store = self._optimizer.store
        if store is not None and self._optimizer.device.drive_places:
            reason = "transfers of cards' drives are not recorded"
            raise UnsupportedOptionError("drives", "given", reason)
        compression = self._optimizer.settings.compression
        if compression is not None:
            reason = "transfers of compressed gradients are not recorded"
            raise UnsupportedOptionError("compression", compression.share, reason)
        device = self._optimizer.device
        drives = 0 if store is None else len(store.drives)
        machine = Machine.of(platform, device, compute, memory, hertz, host_params_per_s, drives)
        recording = Recording(
            self._optimizer.table,
            self._space.copies,
            machine,
            self.budget,
            overlaps=overlaps,
            sends=self._gradients.stay,
        )
        self._space.recording = recording
        self._optimizer.watch(recording)
        try:
            with recording.computation:
                yield recording
        finally:
            self._space.recording = None
            self._optimizer.watch(None)
            recording.finish()

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

    @eager
    def _before_forward(self, model: nn.Module) -> None:
        self._space.check_runs()
        if torch._C._current_graph_task_id() < 0:
            check_wrapper(model, self._wrapper)
            self._names.check()

    def _arrived(self, copy: ComputeCopy) -> None:
        if self._early is not None and not self.closed:
            self._early.arrived(copy, self._update_early)

    def _update_early(self, copies: Sequence[ComputeCopy]) -> None:
        rolls_back = self._gradients.stay
        if rolls_back and not self._optimizer.keeps_updates:
            for copy in self._space.copies:  # a rollback keeps what the program has changed
                copy.push_changes()
        stay = [copy for copy in copies if copy.present and not self._space.released(copy)]
        with self._apart(stay):
            self._optimizer.update_early({copy.parameter for copy in copies})
        self._space.counts.updates += 1
        recording = self._space.recording
        if recording is not None:
            if rolls_back:
                recording.spent(sum(copy.counted for copy in copies))
            else:
                recording.stepped()
        for copy in copies if rolls_back else ():
            self._gradients.spend(copy)

    @contextmanager
    def _around_update(self) -> Iterator[None]:
        self._space.check_runs()
        self._names.check()
        self._gradients.take_given_up()
        if self._space.torn:
            self._space.mend()
        if self._averager is not None:
            self._averager.check_finished()
        if self._early is not None:
            self._early.before_step()
        with self._space.aside():
            self._space.end_sending()
        for copy in self._space.copies:
            self._space.follow(copy)
        plan = self._plan_in_training()
        with self._space.aside():
            with self._apart(self._space.release_all()):
                yield
            if self._space.recording is not None:
                if self._optimizer.store is None:
                    self._space.recording.stepped()
                self._space.recording.finish()
            if plan is not None:
                self._end_watch()
                self._put_in_force(plan)
                self._gradients.recount_all()
                self._take_places(plan)
            self._space.bring_in_place()
            self._space.reap()
        if self._early is not None:
            self._early.after_step()
        self._space.order.end_period()

    def _key(self, tensor: Tensor) -> int:
        """Return the `attribution.Key` of a parameter, whose memory changes while it is
        offloaded."""
        copy = self._copies.get(tensor) or self._space.owner_at(memory_of(tensor))
        return 0 if copy is None else copy.index + 1

    def _plan_in_training(self) -> Plan | None:
        """Return a plan for the profile traced so far; None without a tracer or before training was
        traced."""
        if self._space.watch is None:
            return None
        gradients = {
            parameter: copy.like.numel() * copy.like.element_size()
            for parameter, copy in self._copies.items()
            if copy.resident.held is not None or copy.raw_gradient() is not None
        }
        found = self._space.watch.take(gradients)
        if found is None:
            return None
        self.profile = found
        return plan_for(self._model, self.budget, profile=found, reserve=self._reserve)

    def _end_watch(self) -> None:
        if self._space.watch is not None:
            self._space.watch.close()
            self._space.watch = None

    def _put_in_force(self, plan: Plan) -> None:
        for parameter, place in self._in_place(plan).items():
            self._copies[parameter].in_place = place
        self.plan = plan

    def _take_places(self, plan: Plan) -> None:
        device = self._names.device
        if device.type == "cpu" or device.type in MAPPERS:
            room = gradients_at_once(self._model, self._copies)
            named = [self._copies[parameter] for parameter in self._in_place(plan)]
            self.shadow = Shadow(named, room, device)
        self._space.follow_plan(self.shadow, self.budget)

    def _in_place(self, plan: Plan) -> Mapping[Tensor, InPlace]:
        places = in_place(self._model, plan)
        if self._names.device.type == "cpu":
            return places
        return {each: replace(found, is_apart=True) for each, found in places.items()}

    @contextmanager
    def _apart(self, stay: Sequence[ComputeCopy]) -> Iterator[None]:
        """Update on the device; then refresh the parameters that remain present."""
        try:
            for copy in stay:
                copy.settle()
            with torch._C.DisableTorchFunctionSubclass():
                yield
        except BaseException as error:
            for copy in stay:  # Ctrl-C may come behind an update: `mend` refreshes then
                if isinstance(error, Exception) or copy.resident.interrupted is not None:
                    copy.resident.keep()
            raise
        for copy in stay:
            copy.refresh()


def _like(parameter: Tensor) -> Tensor | None:
    """Return `ComputeCopy.like` of a parameter that `init` has offloaded; None if present."""
    found = waiting_copy(parameter)
    return None if found is None or found.present else found.like
