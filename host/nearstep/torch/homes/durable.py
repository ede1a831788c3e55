"""Homes on drives: every step is a transaction, which ends with a generation of the store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from nearstep.placement import Segment
from nearstep.storage.drive_errors import DriveTimeoutError, StorageError, UncertainCommitError
from nearstep.storage.store import Store
from nearstep.torch import convert
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.homes.generation import (
    SavedArrays,
    StepState,
    pack,
    read_residual,
    reshard,
    unpack,
    write_residuals,
)
from nearstep.torch.homes.home import DeviceHome
from nearstep.torch.homes.host_changes import ChangedParameterError
from nearstep.torch.homes.opening import OpenStore, keys
from nearstep.torch.homes.resume import REPLACES, Made
from nearstep.torch.homes.segments import GRADIENTS, HELD_BACK, DriveSegment, HeldStore
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.state import ParameterState
from nearstep.torch.step import StepPlan
from nearstep.torch.table import Owner, StateTable, labels_of

AnySegment = TypeVar("AnySegment", bound=DriveSegment)


class Savepoint:
    """State and parameters on the host as they are now; parameters from `keep` on."""

    def __init__(self, states: Any, parameters: Iterable[DeviceParameter]) -> None:
        self._states, self._found = states, dict(states)
        of_device = [each for each in states.values() if isinstance(each, ParameterState)]
        self._restore = [each.savepoint() for each in parameters]
        self._restore += [each.savepoint() for each in of_device]
        self._copies: list[tuple[Tensor, Tensor]] = []

    def keep(self, parameters: Iterable[DeviceParameter]) -> None:
        """Copy the parameters that the host has, before an update."""
        for each in parameters:
            if not each.offloaded:
                self._copies.append((each.parameter, each.parameter.detach().clone()))

    def restore(self) -> None:
        """Restore all of it. Nothing is in the memory of the device any more."""
        with torch.no_grad():
            for parameter, copy in self._copies:
                parameter.copy_(copy)
        for restore in self._restore:
            restore()
        self._states.clear()
        self._states.update(self._found)


class FailedStep(NamedTuple):
    """A step that is to be rolled back, unless its generation turns out to count.

    Attributes
    ----------
    parameters : that it was to update.
    generation : before its last commit: another one means that the step counts.
    is_lost : whether changes of parameters are lost; None: a generation has all of them.
    recovers : steps can be made once it has been rolled back.
    """

    savepoint: Savepoint
    parameters: Sequence[DeviceParameter]
    generation: int
    is_lost: bool | None
    recovers: bool


class DurableHome(DeviceHome, Generic[AnySegment]):
    """Columns of one optimizer on the drives of a store.

    Attributes
    ----------
    drives : whose store the segments share.
    segments : in the order in which a step updates them.
    recovers : after a rollback a device that failed in a step has left nothing undone, whatever
        failed: the drives have all that there was.
    """

    is_durable = True
    recovers = False

    kind: type[AnySegment]

    def __init__(self, table: StateTable, opened: OpenStore) -> None:
        super().__init__(table.device, table.formats, table.traffic)
        self.drives = HeldStore(opened.store, owns=opened.owns)
        self.segments: list[AnySegment] = []
        self._source = opened.source
        self._replaces = opened.replaces
        self._failed: FailedStep | None = None

    @property
    @abstractmethod
    def peak(self) -> int:
        """Most bytes of memory of the device that were in use."""

    @abstractmethod
    def units(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Parameters, each with those that share a segment with it."""

    def check_room(self, segment: AnySegment, arrays: Sequence[str], label: str) -> None:
        """Raise `MemoryTooSmallError` unless arrays of one unit fit into memory together."""

    def layout(self, names: Mapping[Tensor, str]) -> Mapping[str, Any] | None:
        """Where the arrays of parameters of these names are kept, for the meta data of a
        generation; None: of each there is a tensor."""
        return None

    @abstractmethod
    def prepare(self, parameters: Iterable[DeviceParameter], *, anew: bool = False) -> None:
        """A step of these begins; what it finds on the drives becomes a generation first.

        Parameters
        ----------
        anew : the step had begun, and then it was found that a parameter had been changed.
        """

    def keep(self, savepoint: Savepoint, parameters: Iterable[DeviceParameter]) -> None:
        """An update of these begins, which may have to be rolled back."""

    def restore(self, parameters: Iterable[DeviceParameter]) -> None:
        """After a rollback of an update of these: restore what else the host had."""

    @abstractmethod
    def load_unit(self, segment: AnySegment, arrays: Mapping[str, float]) -> None:
        """Load arrays of a unit, which are about to be updated."""

    def prefetch(self, segment: AnySegment, arrays: Mapping[str, float]) -> None:
        """Begin to load those of the next unit."""

    @abstractmethod
    def write_masters(self) -> None:
        """Write the parameters as they are on the host."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is in memory; what was written there alone is lost."""

    def segments_of(
        self,
        groups: Sequence[Mapping[str, Any]],
        parameters: Sequence[Tensor],
        arrays: Mapping[str, float],
        labels: Mapping[Tensor, str],
        *,
        narrow: bool,
    ) -> Sequence[tuple[Segment, Sequence[Tensor]]]:
        names, line = keys(groups), self._formats.line(narrow=narrow)
        made: list[tuple[Segment, Sequence[Tensor]]] = []
        for unit in self.units(parameters):
            segment = self.kind(
                self._device,
                [convert.size(p) for p in unit],
                line,
                self._formats.dtypes,
                self.drives,
                self._traffic,
                [names[p] for p in unit],
                len(self.segments) + len(made),
            )
            self.check_room(segment, list(arrays), labels[unit[0]])
            made.append((segment, unit))
        return made

    def kept(self, arrays: Mapping[str, float]) -> Mapping[str, float]:
        return {name: value for name, value in arrays.items() if name not in GRADIENTS}

    def add(self, segment: Segment, parameters: Sequence[DeviceParameter]) -> None:
        assert isinstance(segment, DriveSegment), "made by `segment`"
        segment.parameters = list(parameters)
        self.segments.append(segment)  # type: ignore[arg-type]

    def begin_life(self, owner: Owner) -> None:
        """Commit the parameters of the constructor, or resume from what the drives have."""
        overflow = owner.table.settings.overflow
        if overflow is not None and overflow.resume is not False:
            self._resume(owner)
        else:
            self.write_masters()
            self._commit(owner, Made(0, 0))
        self._source = None

    @property
    def _is_dirty(self) -> bool:
        """Whether something was written that no generation has."""
        return any(segment.dirty for segment in self.segments)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Gradients that are reserved in it do not outlast it."""
        for segment in self.segments:
            segment.in_step = True
        try:
            yield
        finally:
            for segment in self.segments:
                segment.in_step = False

    def step(self, owner: Owner, plan: StepPlan, apply: Callable[[StepPlan], bool]) -> bool:
        """Make a step of one unit of parameters after the other, and commit a generation of all.

        After an error everything is what it was before, unless the device failed and had something
        that the drives have not. Drives that do not answer then are asked again when the optimizer
        is next used (`check_whole`): if the generation counts, everything is what it was after the
        step. What was changed on the drives alone since the last generation is written first: if
        that fails, gradients are lost, and of parameters that are offloaded all changes, after
        which steps are refused.
        """
        table, states = owner.table, owner.state
        singles = plan.singles()
        is_lost: bool | None = any(
            "p" in segment.dirty and any(each.offloaded for each in segment.parameters)
            for segment in self.segments
        )
        generation = self.drives.store.generation
        savepoint = Savepoint(states, table.parameters.values())
        try:
            with self._in_step():
                for state in states.values():
                    if isinstance(state, ParameterState) and state.store is not None:
                        state.flush()
                counted = table.traffic.as_dict()
                for anew in (False, True):
                    self.prepare(singles, anew=anew)
                    if self._is_dirty:
                        made = _made(self.drives.store)
                        self._commit(owner, Made(made.steps, made.changes + 1))
                    generation, is_lost = self.drives.store.generation, None
                    try:
                        self._update(savepoint, plan, apply)
                        break
                    except ChangedParameterError:
                        if anew:
                            raise
                        is_lost = False  # nothing has reached the host
                        self.roll_back()
                        savepoint.restore()
                        table.recover()
                        table.traffic.go_back(counted)
                self._commit(owner, Made(_made(self.drives.store).steps + 1, 0))
        except BaseException as error:
            recovers = self.recovers or isinstance(error, StorageError)
            self._failed = FailedStep(savepoint, singles, generation, is_lost, recovers)
            self._undo(table, self._failed, error)
            raise
        return True

    def _update(
        self, savepoint: Savepoint, plan: StepPlan, apply: Callable[[StepPlan], bool]
    ) -> None:
        units = plan.of(self.segments)
        for (segment, unit), after in zip_longest(units, units[1:]):
            self.keep(savepoint, unit.singles())
            self.load_unit(segment, unit.needed())  # type: ignore[arg-type]
            if after is not None:
                self.prefetch(after[0], after[1].needed())  # type: ignore[arg-type]
            apply(unit)

    def _undo(self, table: StateTable, failed: FailedStep, error: BaseException) -> None:
        """Roll back a step, now if the drives answer."""
        if failed.is_lost:
            table.interrupt(table.parameters.values(), error)
        try:
            if isinstance(error, UncertainCommitError):
                raise error  # they did not
            self._finish_undo(table, failed, error)
        except StorageError:
            table.interrupt(table.parameters.values(), error)
        self._release(error)

    def _release(self, error: BaseException) -> None:
        """Unlock drives that had an error, so that an optimizer can be made anew, whoever refers to
        this one."""
        if isinstance(error, StorageError) and not isinstance(error, DriveTimeoutError):
            self.drives.release()  # after a timeout something may be under way still

    def _finish_undo(
        self, table: StateTable, failed: FailedStep, error: BaseException | None = None
    ) -> None:
        """Go back to before a step that failed; if its generation counts, to behind it."""
        counts = self.drives.store.generation != failed.generation
        if counts and failed.is_lost is None:
            self._clean()
        else:
            self.roll_back()
            failed.savepoint.restore()
            if failed.is_lost is None:
                self.restore(failed.parameters)
            elif not counts:
                self._lose_gradients(table, error)
        self._failed = None
        if failed.recovers and (counts or not failed.is_lost):
            table.recover()

    def check_whole(self, table: StateTable) -> None:
        """Roll back a step that could not be rolled back when it failed. Raises `StorageError`."""
        if self._failed is not None:
            self._finish_undo(table, self._failed)

    def write_failed(self, table: StateTable, error: Exception) -> None:
        """Go on after a write to the drives that failed outside of a step: as of
        `DeviceOptimizer.write_failed`."""
        if not isinstance(error, StorageError):
            return
        others = any(segment.dirty.difference(GRADIENTS) for segment in self.segments)
        self._lose_gradients(table, error)
        try:
            self.roll_back()
        except StorageError:
            others = True
        if others:
            table.interrupt(table.parameters.values(), error)

    def _lose_gradients(self, table: StateTable, error: BaseException | None) -> None:
        held = [r for r in table.parameters.values() if isinstance(r.held, DeviceGradient)]
        for resident in held:
            resident.release_gradient()
        if held and error is not None:
            error.add_note(f"{len(held)} gradients that were on the drives are lost")

    def load_checkpoint(self, owner: Owner, load: Callable[[], None]) -> None:
        """Load a checkpoint by `load`, and commit it."""
        table = owner.table
        if table.interrupted is not None:
            self.roll_back()
        self._failed = None
        table.interrupted = "load_state_dict"  # unless it ends
        try:
            load()
            self.write_masters()
            self._commit(owner, Made(_made(self.drives.store).steps + 1, 0))
        except StorageError as error:
            self._release(error)
            raise

    def commit(self, meta: Mapping[str, Any]) -> None:
        """Make all that was written a generation.

        If the last write fails, the drives are read to find out whether the generation counts. If
        it does, this returns; if not, the error of the write is raised.

        Raises
        ------
        UncertainCommitError : the drives could not be read.
        StorageError
        """
        try:
            self.drives.store.commit(meta)
        except UncertainCommitError as error:
            self.drives.doubt(error.generation)
            try:
                counts = self.drives.store.generation == error.generation
            except StorageError:
                raise error from error.__cause__
            if not counts:
                raise error.__cause__ or error from None
        self._clean()

    def _clean(self) -> None:
        """The last generation has all that was written."""
        for segment in self.segments:
            segment.dirty.clear()

    def roll_back(self) -> None:
        """Go back to the last generation, with nothing in memory."""
        self.drives.store.abort()  # waits for what is under way
        self.forget()
        for segment in self.segments:
            segment.dirty.clear()
            segment.find()

    def forget_gradients(self, segment: AnySegment) -> None:
        """Remove gradients from the drives that the device need not keep any more."""
        if any(isinstance(each.held, DeviceGradient) for each in segment.parameters):
            return
        for name in segment.on_drives.intersection(GRADIENTS):
            segment.remove(name)

    def _commit(self, owner: Owner, made: Made, **more: str) -> None:
        kept = pack(owner, self.layout(keys(owner.param_groups)))
        saves = owner.table.settings.save_residual
        written = write_residuals(self.segments, owner.state, save=saves)
        self.commit({**kept, "made": made, **more})
        for state in written:
            state.residual_saved()

    def _resume(self, owner: Owner) -> None:
        """Load parameters, state and options as the drives have them."""
        table, groups, settings = owner.table, owner.param_groups, owner.table.settings
        source = self.drives.store if self._source is None else self._source
        saved, states = unpack(source.meta, owner)
        left_out = any(each.residual is None for each in states.values())
        if left_out and settings.has_residual and settings.save_residual:
            expected = "what error feedback held back"
            actual = "a step that left it out: resume with save_residual=False, or without "
            raise ResumeError(expected, f"{actual}error_feedback, and begin with nothing held back")
        carried = self._reshard(owner, source, states)
        for group, options in zip(groups, saved, strict=True):
            group.update(options)
            table.rule.complete(group)
            table.check_group(group)
        owner.state.clear()
        for parameter, resident in table.parameters.items():
            found = states.get(parameter)
            resident.resume()
            if found is not None:
                arrays = {table.layout.moments[key]: 0.0 for key in found.moments}
                resident.extent.segment.reserve(arrays)
                step = found.step
                count = None if step is None else torch.tensor(float(step), device="cpu")
                state = ParameterState.of(resident, count, found.moments)
                if found.residual:
                    read_residual(resident, state)
                table.keep(owner, resident, state)
        if carried:
            replaced = str(source.drives[0].header.set_id)
            more = {REPLACES: replaced} if self._replaces else {}
            self._commit(owner, _made(source), **more)

    def _reshard(self, owner: Owner, source: Store, states: Mapping[Tensor, StepState]) -> bool:
        """Copy arrays from other drives, or to another layout; whether there are any."""
        table, names = owner.table, keys(owner.param_groups)
        if source is self.drives.store and source.meta.get("layout") == self.layout(names):
            return False
        arrays = SavedArrays(source.at(source.generation))
        for parameter, name in names.items():
            if parameter not in table.parameters and arrays.has(name, "p"):
                label = labels_of(owner.param_groups)[parameter]
                expected = f"nothing of {label}, which requires no gradient"
                raise ResumeError(expected, "a step of it")
        if source is self.drives.store:
            for name in self.drives.store.tensors:
                self.drives.store.remove(name)
            for segment in self.segments:
                segment.find()
        for parameter, resident in table.parameters.items():
            found = states.get(parameter)
            moments = () if found is None else found.moments
            wanted = ["p", *(table.layout.moments[key] for key in moments)]
            if found is not None and found.residual:
                wanted.append(HELD_BACK)
            resident.extent.segment.reserve(dict.fromkeys(wanted, 0.0))
            reshard(arrays, names[parameter], resident, wanted)
        return True


def _made(store: Store) -> Made:
    """How far the last generation of a store is."""
    return Made.of(store.meta, store.generation)
