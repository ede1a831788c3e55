"""Homes on drives: every step is a transaction that commits a generation of the store."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from nearstep.placement import Segment
from nearstep.storage.drive_errors import DriveTimeoutError, StorageError, UncertainCommitError
from nearstep.storage.generation import GenerationView
from nearstep.storage.store import Store
from nearstep.torch import convert
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.homes.generation import (
    SavedArrays,
    StepState,
    pack,
    parts_of,
    read_residual,
    reshard,
    unpack,
    write_residuals,
)
from nearstep.torch.homes.home import DeviceHome
from nearstep.torch.homes.host_changes import ChangedParameterError
from nearstep.torch.homes.opening import OpenStore, places
from nearstep.torch.homes.resume import REPLACES, Made
from nearstep.torch.homes.segments import (
    GRADIENTS,
    HELD_BACK,
    DriveSegment,
    HeldStore,
    StripedSegment,
)
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.state import ParameterState
from nearstep.torch.step import StepPlan
from nearstep.torch.table import Owner, StateTable

AnySegment = TypeVar("AnySegment", bound=DriveSegment)

AHEAD_UNITS = 16
"""Units that are loaded before their updates, at most."""


class Savepoint:
    """State and parameters on the host as they are now; parameters copied by `keep`."""

    def __init__(self, states: Any, parameters: Iterable[DeviceParameter]) -> None:
        self._states, self._found = states, dict(states)
        of_device = [each for each in states.values() if isinstance(each, ParameterState)]
        self._restore = [each.savepoint() for each in parameters]
        self._restore += [each.savepoint() for each in of_device]
        self._copies: dict[Tensor, Tensor] = {}

    def __contains__(self, parameter: DeviceParameter) -> bool:
        """Whether there is a copy of a parameter."""
        return parameter.parameter in self._copies

    def keep(self, parameters: Iterable[DeviceParameter]) -> None:
        """Copy the parameters that the host has, before an update."""
        for each in parameters:
            if not each.offloaded:
                self._copies[each.parameter] = each.parameter.detach().clone()

    def restore(self) -> None:
        """Restore state and parameters. The device's memory is empty."""
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                parameter.copy_(copy)
        for restore in self._restore:
            restore()
        self._states.clear()
        self._states.update(self._found)


@dataclass
class BegunStep:
    """A step that has begun: if it fails it is rolled back, unless its generation was committed.

    Attributes
    ----------
    parameters : that it has updated, or has begun to.
    generation : before the step's last commit: if the drives have another, the step counts.
    is_lost : whether changes of parameters are lost; None: a generation has all of them.
    early : it has updates in backward, whose gradients are freed.
    recovers : steps can run after the rollback.
    """

    savepoint: Savepoint
    parameters: list[DeviceParameter]
    generation: int
    is_lost: bool | None
    early: bool
    recovers: bool = True


class Watch(Protocol):
    """Records what a home does."""

    @property
    def now(self) -> int:
        """Cycle of the device; 0 without a clock."""

    def moved(self, segment: StripedSegment, array: str, begun: int, *, stores: bool) -> None:
        """Record a transfer of a whole array, in memory of the device, from or to the drives.

        Parameters
        ----------
        begun : cycle of the device before it transferred the array.
        """

    def stepped(self) -> None:
        """Record the update of a unit."""


class DurableHome(DeviceHome, Generic[AnySegment]):
    """Columns of one optimizer on the drives of a store.

    Attributes
    ----------
    drives : the store that the segments share.
    segments : in the order of their updates in a step.
    recovers : a rollback repairs every failure of the device, since the drives have all data.
    watch : told of transfers and updates, while they are recorded.
    ranks : processes that share the parameters, and commit together.
    """

    is_durable = True
    recovers = False

    kind: type[AnySegment]

    def __init__(self, table: StateTable, opened: OpenStore) -> None:
        super().__init__(table.device, table.formats, table.traffic)
        self.drives = HeldStore(opened.store, owns=opened.owns)
        self.ranks = opened.ranks
        self.segments: list[AnySegment] = []
        self.watch: Watch | None = None
        self._source, self._restored = opened.source, opened.restored
        self._replaces = opened.replaces
        self._failed: BegunStep | None = None
        self._open: BegunStep | None = None
        self._shards: tuple[list[int], list[Tensor], Mapping[str, Any]] | None = None
        self._names: dict[Tensor, str] = {}
        source = opened.store if opened.source is None else opened.source
        meta = source.meta if opened.restored is None else opened.restored.meta
        # In a step to resume from; None: group and place are the names there.
        self._saved: Sequence[Sequence[str]] | None = meta.get("keys") if meta else ()
        self._unwritten: list[AnySegment] = []  # the next commit writes their parameters

    def names(self, groups: Sequence[Mapping[str, Any]]) -> Mapping[Tensor, str]:
        """Names of the parameters on the drives, which a parameter keeps while groups come and go:
        as the step that is resumed has them, or group and place; what others have, with a `+`."""
        new = {p: at for p, at in places(groups).items() if p not in self._names}
        taken = set[str]()
        if new and self._saved is not None:
            taken.update(self._names.values(), *self._saved)
            taken.update(each.rpartition(".")[0] for each in self.drives.store.tensors)
        for parameter, (number, position) in new.items():
            try:
                name = (self._saved or ())[number][position]
            except IndexError:
                name = f"{number}.{position}"
                while name in taken:
                    name += "+"
            taken.add(name)
            self._names[parameter] = name
        return self._names

    @property
    @abstractmethod
    def peak(self) -> int:
        """Most bytes of the device's memory that were in use at once."""

    @abstractmethod
    def units(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Group parameters by the segment that they are to share."""

    def check_room(self, segment: AnySegment, arrays: Sequence[str], label: str) -> None:
        """Raise `MemoryTooSmallError` unless arrays of one unit fit into memory together."""

    def layout(self, names: Mapping[Tensor, str]) -> Mapping[str, Any] | None:
        """Return the layout of the arrays for a generation's meta data; None: a tensor for each
        parameter and array."""
        return None

    @abstractmethod
    def prepare(
        self, parameters: Iterable[DeviceParameter], *, anew: bool = False, small: bool = False
    ) -> None:
        """Prepare a step of these; data already changed on the drives is committed first.

        Parameters
        ----------
        anew : the step is repeated, since a parameter was found to be changed, or has several
            parts: changes are looked for now.
        small : no step follows that would send changed parameters which are small.
        """

    def keep(self, savepoint: Savepoint, parameters: Iterable[DeviceParameter]) -> None:
        """Save in `savepoint` what a rollback of an update of these needs."""

    def restore(self, parameters: Iterable[DeviceParameter]) -> None:
        """Restore these parameters on the host, of which there is no copy, after a rollback."""

    @abstractmethod
    def load_unit(self, segment: AnySegment, arrays: Mapping[str, float]) -> None:
        """Load the arrays of a unit before its update."""

    def prefetch(self, later: Sequence[tuple[AnySegment, Mapping[str, float]]]) -> None:
        """Begin to load the arrays of later units, the next one first."""

    def updated(self, segment: AnySegment, arrays: Mapping[str, float]) -> None:
        """Note that the arrays of a unit have been updated, and are not again in this step."""

    @abstractmethod
    def write_masters(self, segments: Iterable[AnySegment]) -> None:
        """Write the host's parameters of segments."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all arrays in memory, unwritten changes included."""

    def segments_of(
        self,
        groups: Sequence[Mapping[str, Any]],
        parameters: Sequence[Tensor],
        arrays: Mapping[str, float],
        labels: Mapping[Tensor, str],
        *,
        narrow: bool,
    ) -> Sequence[tuple[Segment, Sequence[Tensor]]]:
        names, line = self.names(groups), self._formats.line(narrow=narrow)
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
                self._formats.quantized,
            )
            self.check_room(segment, list(arrays), labels[unit[0]])
            made.append((segment, unit))
        return made

    def kept(self, arrays: Mapping[str, float]) -> Mapping[str, float]:
        return {name: value for name, value in arrays.items() if name not in GRADIENTS}

    def add(self, segment: Segment, parameters: Sequence[DeviceParameter]) -> None:
        assert isinstance(segment, DriveSegment), "made by `segments_of`"
        segment.parameters = list(parameters)
        self.segments.append(segment)  # type: ignore[arg-type]
        self._unwritten.append(segment)  # type: ignore[arg-type]

    def begin_life(self, owner: Owner) -> None:
        """Commit the constructor's parameters, or resume from the drives."""
        overflow = owner.table.settings.overflow
        if overflow is not None and overflow.resume is not False:
            self._resume(owner)
        else:
            self._commit(owner, 0)
        self._source = self._restored = None
        self._saved = ()

    @property
    def _is_dirty(self) -> bool:
        """Whether data was written that no generation has."""
        return any(segment.dirty for segment in self.segments)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Mark a step: gradients reserved during it do not outlast it."""
        for segment in self.segments:
            segment.in_step = True
        try:
            yield
        finally:
            for segment in self.segments:
                segment.in_step = False

    @property
    def is_open(self) -> bool:
        """Whether backward has made updates that no generation has."""
        return self._open is not None

    def step(
        self,
        owner: Owner,
        plan: StepPlan,
        apply: Callable[[StepPlan], bool],
        *,
        ends: bool = True,
        name: str = "",
    ) -> bool:
        """Update one unit of parameters after the other, and commit a generation of all.

        With a name the plan is empty, and the generation is kept; changes by the program of any
        parameter are part of it, and parameters that have had no gradient yet.

        Updates in backward (`ends` is False) leave the step open: a later call goes on with it, and
        the last one commits. Errors, and `give_up`, roll all of them back.

        An error restores the state before the step, unless the device failed and had data that the
        drives have not. If the drives do not answer, they are read again at the optimizer's next
        use (`check_whole`): a generation that was committed counts as the step. Data changed on
        the drives since the last generation is committed first: if that fails, gradients and all
        changes of offloaded parameters are lost; with lost parameters steps are refused.
        """
        table, states = owner.table, owner.state
        for group in owner.param_groups if name else ():
            table.place(owner, group, [each for each in group["params"] if each.requires_grad])
        begins = self._open is None
        step = self._open or self._begin(owner, early=not ends)
        try:
            with self._in_step():
                for state in states.values() if begins else ():
                    if isinstance(state, ParameterState) and state.store is not None:
                        state.flush()
                counted = table.traffic.as_dict()
                units = plan.of(self.segments)[:AHEAD_UNITS]
                first: list[tuple[Any, Any]] = [(each, unit.needed()) for each, unit in units]
                self.prefetch(first)
                for anew in (False, True):
                    if begins:  # a change that is found later is rolled back with the step
                        some = ends and not name
                        every = plan.singles() if some else list(table.parameters.values())
                        self.prepare(every, anew=anew or not ends, small=bool(name))
                        made = _made(self.drives.store)
                        if self.ranks.any(made, flag=self._is_dirty):
                            self._commit(owner, made.steps, made.changes + 1)
                        step.generation, step.is_lost = self.drives.store.generation, None
                        self._open = None if ends else step
                    try:
                        self._update(step, plan, apply)
                        break
                    except ChangedParameterError:
                        if anew:
                            raise
                        self.roll_back()
                        step.savepoint.restore()
                        self.restore(each for each in step.parameters if each not in step.savepoint)
                        step.is_lost = False  # the host is as before
                        table.recover()
                        table.traffic.go_back(counted)
                if ends:
                    steps, changes, _ = _made(self.drives.store)
                    after = (steps, changes + 1) if name else (steps + 1, 0)
                    self._commit(owner, *after, name)
                    self._open = None
        except BaseException as error:
            step.recovers = self.recovers or isinstance(error, StorageError)
            self._failed, self._open = step, None
            self._undo(table, step, error)
            raise
        return True

    def _begin(self, owner: Owner, *, early: bool) -> BegunStep:
        is_lost = any(
            "p" in segment.dirty and any(each.offloaded for each in segment.parameters)
            for segment in self.segments
        )
        savepoint = Savepoint(owner.state, owner.table.parameters.values())
        return BegunStep(savepoint, [], self.drives.store.generation, is_lost, early)

    def give_up(self, table: StateTable) -> bool:
        """Roll back the updates that backward has made since the last step; return whether there
        were any."""
        if self._open is None:
            return False
        self._failed, self._open = self._open, None
        self._failed.recovers = table.interrupted is None
        try:
            self._finish_undo(table, self._failed)
        except StorageError as error:
            table.interrupt(table.parameters.values(), error)
        return True

    def _update(self, step: BegunStep, plan: StepPlan, apply: Callable[[StepPlan], bool]) -> None:
        units = [unit for _, unit in plan.of(self.segments)]
        needed: list[tuple[Any, Mapping[str, float]]] = [
            (segment, unit.needed()) for segment, unit in plan.of(self.segments)
        ]
        for index, unit in enumerate(units):
            self.keep(step.savepoint, unit.singles())
            step.parameters += unit.singles()
            self.load_unit(*needed[index])
            self.prefetch(needed[index + 1 : index + 1 + AHEAD_UNITS])
            apply(unit)
            if self.watch is not None:
                self.watch.stepped()
            self.updated(*needed[index])

    def _undo(self, table: StateTable, failed: BegunStep, error: BaseException) -> None:
        """Roll back a step now, or at the next use if the drives do not answer."""
        if failed.is_lost:
            table.interrupt(table.parameters.values(), error)
        try:
            if isinstance(error, UncertainCommitError):
                raise error  # the drives did not answer
            self._finish_undo(table, failed, error)
        except StorageError:
            table.interrupt(table.parameters.values(), error)
        self._release(error)

    def _release(self, error: BaseException) -> None:
        """Unlock drives after an error, so that a new optimizer can open them while this one is
        still referenced."""
        if isinstance(error, StorageError) and not isinstance(error, DriveTimeoutError):
            self.drives.release()  # after a timeout a transfer may still run

    def _finish_undo(
        self, table: StateTable, failed: BegunStep, error: BaseException | None = None
    ) -> None:
        """Restore the state before a failed step, or after it if its generation counts."""
        counts = self.drives.store.generation != failed.generation
        if counts and failed.is_lost is None:
            self._clean()
        else:
            self.roll_back()
            failed.savepoint.restore()
            if failed.is_lost is None:
                self.restore(each for each in failed.parameters if each not in failed.savepoint)
            elif not counts:
                self._lose_gradients(table, error)
        if failed.early and not counts:
            for each in table.parameters.values():
                if each.held is not None:
                    each.spend_gradient()
        self._failed = None
        if failed.recovers and (counts or not failed.is_lost):
            table.recover()

    def check_whole(self, table: StateTable) -> None:
        """Roll back a failed step that is still pending. Raises `StorageError`."""
        if self._failed is not None:
            self._finish_undo(table, self._failed)
        self.drives.check()

    def write_failed(self, table: StateTable, error: Exception) -> None:
        """Recover from a failed write to the drives outside of a step: as of
        `DeviceOptimizer.write_failed`."""
        if not isinstance(error, StorageError) or self.give_up(table):
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
        is_partial = table.interrupted is not None or self.is_open
        self._failed = self._open = None
        table.interrupted = "load_state_dict"  # cleared by the caller
        try:
            if is_partial:
                self.roll_back()
            load()
            self._unwritten = list(self.segments)
            self._commit(owner, _made(self.drives.store).steps + 1)
        except StorageError as error:
            self._release(error)
            raise

    def commit(self, meta: Mapping[str, Any], name: str = "") -> None:
        """Commit all writes as a generation, on all ranks or on none.

        If the last write fails, the drives are read: if the generation counts, return; else raise
        the error of the write.

        Raises
        ------
        UncertainCommitError : the drives could not be read.
        StorageError
        """
        try:
            made = Made(*meta["made"])
            decide = partial(self.ranks.prepared, made)
            self.drives.store.commit(meta, name=name, decide=decide)
        except UncertainCommitError as error:
            self.drives.doubt()
            try:
                counts = self.drives.store.generation == error.generation
            except StorageError:
                raise error from error.__cause__
            if not counts:
                raise error.__cause__ or error from None
        self._clean()

    def _clean(self) -> None:
        """Record that the last generation has all writes."""
        self.drives.own()
        self._unwritten.clear()
        for segment in self.segments:
            segment.dirty.clear()

    def roll_back(self) -> None:
        """Restore the last generation, with nothing in memory."""
        self.drives.store.abort()  # waits for transfers in flight
        self.drives.own()
        self.forget()
        for segment in self.segments:
            segment.dirty.clear()
            segment.find()

    def forget_gradients(self, segment: AnySegment) -> None:
        """Remove gradients from the drives, unless the device is to keep one of the segment."""
        if any(isinstance(each.held, DeviceGradient) for each in segment.parameters):
            return
        for name in segment.on_drives.intersection(GRADIENTS):
            segment.remove(name)

    def _commit(
        self, owner: Owner, steps: int, changes: int = 0, name: str = "", **more: str
    ) -> None:
        self.write_masters(self._unwritten)
        names = self.names(owner.param_groups)
        kept = pack(owner, names, self.layout(names), self._parts(owner))
        made = Made(steps, changes, self.ranks.life)
        saves = owner.table.settings.save_residual
        written = write_residuals(self.segments, owner.state, save=saves)
        self.commit({**kept, "made": made, **more}, name)
        for state in written:
            state.residual_saved()

    def _parts(self, owner: Owner) -> Mapping[str, Any]:
        """Return `parts_of` the optimizer."""
        groups = [each["params"] for each in owner.param_groups]
        sizes, given = [len(owner.table.parameters), *map(len, groups)], [*chain(*groups)]
        if (
            self._shards is None
            or self._shards[0] != sizes
            or not all(map(operator.is_, self._shards[1], given))
        ):
            self._shards = sizes, given, parts_of(owner, self.names(owner.param_groups))
        return self._shards[2]

    def _resume(self, owner: Owner) -> None:
        """Load parameters, state and options from the drives."""
        table, groups, settings = owner.table, owner.param_groups, owner.table.settings
        source = self.drives.store if self._source is None else self._source
        view = source.at(source.generation) if self._restored is None else self._restored
        names = self.names(groups)
        saved, states = unpack(view.meta, owner, names)
        left_out = any(each.residual is None for each in states.values())
        if left_out and settings.has_residual and settings.save_residual:
            expected = "what error feedback held back"
            actual = "a step that left it out: resume with save_residual=False, or without "
            raise ResumeError(expected, f"{actual}error_feedback, and begin with nothing held back")
        arrays = SavedArrays(view)
        held = {p for group in groups for p in group["params"] if arrays.has(names[p], "p")}
        for group in groups:  # frozen ones, too
            table.place(owner, group, [p for p in group["params"] if p.requires_grad or p in held])
        carried = self._reshard(owner, source, view, arrays, states)
        for group, options in zip(groups, saved, strict=True):
            group.update(options)
            table.rule.complete(group)
            table.check_group(group)
        owner.state.clear()
        for parameter, resident in table.parameters.items():
            found = states.get(parameter)
            if parameter in held:
                resident.resume()
            if found is not None:
                moments = {table.layout.moments[key]: 0.0 for key in found.moments}
                resident.extent.segment.reserve(moments)
                step = found.step
                count = None if step is None else torch.tensor(float(step), device="cpu")
                state = ParameterState.of(resident, count, found.moments)
                if found.residual:
                    read_residual(resident, state)
                table.keep(owner, resident, state)
        self._unwritten = [
            segment
            for segment in self.segments
            if not held.issuperset(each.parameter for each in segment.parameters)
        ]
        made = Made.of(view.meta, view.number)
        if self.ranks.any(made, flag=carried or self._is_dirty):
            replaced = str(source.drives[0].header.set_id)
            more = {REPLACES: replaced} if self._replaces else {}
            self._commit(owner, made.steps, made.changes, **more)

    def _reshard(
        self,
        owner: Owner,
        source: Store,
        view: GenerationView,
        arrays: SavedArrays,
        states: Mapping[Tensor, StepState],
    ) -> bool:
        """Copy arrays from other drives or another layout; return whether the drives are to have
        another generation."""
        table, names = owner.table, self.names(owner.param_groups)
        if source is self.drives.store and view.meta.get("layout") == self.layout(names):
            return self._restored is not None
        if source is self.drives.store:
            for name in self.drives.store.tensors:
                self.drives.store.remove(name)
            for segment in self.segments:
                segment.find()
        for parameter, resident in table.parameters.items():
            found = states.get(parameter)
            if not arrays.has(names[parameter], "p"):
                continue  # without a gradient so far
            moments = () if found is None else found.moments
            wanted = ["p", *(table.layout.moments[key] for key in moments)]
            if found is not None and found.residual:
                wanted.append(HELD_BACK)
            resident.extent.segment.reserve(dict.fromkeys(wanted, 0.0))
            reshard(arrays, names[parameter], resident, wanted)
        return True


def _made(store: Store) -> Made:
    """Return the number of steps and changes of a store's last generation."""
    return Made.of(store.meta, store.generation)
