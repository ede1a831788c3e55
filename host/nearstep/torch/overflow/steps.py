"""Steps of optimizers whose state lies on drives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearstep.placement import Extent
from nearstep.storage.drive_errors import DriveTimeoutError, StorageError, UncertainCommitError
from nearstep.storage.store import Store
from nearstep.torch import convert
from nearstep.torch.attached import AttachedOptimizer
from nearstep.torch.cards.host_changes import ChangedParameterError
from nearstep.torch.cards.sets import REPLACES
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.flat_bucket import FlatBucket
from nearstep.torch.overflow.drive_segment import GRADIENTS, HELD_BACK, DriveSegment
from nearstep.torch.overflow.drive_tier import DriveTier
from nearstep.torch.overflow.errors import ResumeError
from nearstep.torch.overflow.opening import keys
from nearstep.torch.overflow.ranks import Made
from nearstep.torch.overflow.residuals import read_residual, write_residuals
from nearstep.torch.overflow.saved_arrays import reshard, saved_arrays
from nearstep.torch.overflow.saved_step import SavedStep, digest, pack, unpack
from nearstep.torch.overflow.undo import Undo
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.saved import SavedState
from nearstep.torch.state import ParameterState
from nearstep.torch.step import Update
from nearstep.torch.work import Work


class FailedStep(NamedTuple):
    """A step that is to be undone, unless its generation turns out to count.

    Attributes
    ----------
    undo
    residents : that it was to update.
    generation : before its last commit: another one means that this counts.
    is_lost : whether changes of parameters are; None: all that there was is in a generation.
    recovers : steps can be made once it has been undone.
    """

    undo: Undo
    residents: Sequence[DeviceParameter]
    generation: int
    is_lost: bool | None
    recovers: bool


class OverflowSteps(AttachedOptimizer):
    """What an optimizer on a device has for drives; `_tier` is None without them."""

    _failed_step: FailedStep | None = None

    @abstractmethod
    def _apply(self, work: Work) -> dict[Extent, Update] | None:
        """Send, update and fetch; None if the step is to be skipped."""

    @abstractmethod
    def _keep(self, resident: DeviceParameter, state: ParameterState) -> None:
        """Show the state to the user, and to checkpoints, if there is any."""

    @abstractmethod
    def _reserve_pairs(self, extents: Sequence[Extent]) -> None:
        """Have room for compressed gradients, if they are."""

    @abstractmethod
    def _load(self, saved: Mapping[Tensor, SavedState]) -> None:
        """Send saved state to the device."""

    @property
    def store(self) -> Store | None:
        """The drives that state lies on, if it was given any.

        Its generation is the last step. Nobody else writes to it.
        """
        return None if self._tier is None else self._tier.drives.last

    @property
    def memory_peak(self) -> int | None:
        """With drives: most bytes of the device's memory that were in use at once since the
        optimizer was made, or since its last step that failed; None without."""
        return None if self._tier is None else self._tier.peak

    def _begin(self) -> None:
        """All parameters of the constructor are there: begin, or go on with what drives have."""
        if self._tier is None:
            return
        self._tier.begin()
        if self._settings.overflow is not None and self._settings.overflow.resume is not False:
            self._resume(self._tier)
        else:
            self._tier.write_masters()
            self._commit(self._tier, Made(0, 0))

    @property
    def _title(self) -> str:
        """What the optimizer is called on drives."""
        return type(self).__name__

    @property
    def _source(self) -> str:
        """What steps depend on besides the rules: of a file, SHA-256 of its text."""
        return ""

    @property
    def _computes(self) -> str:
        """What a generation on drives says of the arithmetic."""
        formats = self._formats.state
        return " ".join(
            [
                digest(self.definition, self._source),
                *(f"{k}:{v}" for k, v in sorted(formats.items())),
            ]
        )

    def _place_on_drives(
        self,
        tier: DriveTier[Any],
        new: Sequence[Tensor],
        arrays: Mapping[str, float],
        line: int,
        dtypes: Mapping[str, np.dtype],
    ) -> None:
        """Make units of new parameters; those that are small share one with their neighbours."""
        names = keys(self.param_groups)
        labels = self._labels()
        made: list[tuple[DriveSegment, list[Tensor]]] = []
        for unit in tier.units(new):
            counts = [convert.size(p) for p in unit]
            segment = tier.segment(counts, line, dtypes, [names[p] for p in unit])
            tier.check_room(segment, list(arrays), labels[unit[0]])
            made.append((segment, unit))
        kept = {name: value for name, value in arrays.items() if name not in GRADIENTS}
        for segment, unit in made:
            counts = [convert.size(p) for p in unit]
            extents = self._placement.place_in(segment, counts, kept)
            self._reserve_pairs(extents)
            tier.add(segment)
            for p, extent in zip(unit, extents, strict=True):
                resident = tier.resident(
                    p,
                    labels[p],
                    extent,
                    self.layout,
                    self._traffic,
                    self._formats,
                    narrow=any(self._formats.narrow(each.dtype) for each in new),
                    moves=True,
                )
                self._residents[p] = resident
                segment.residents.append(resident)

    def _load_on_drives(self, tier: DriveTier[Any], saved: Mapping[Tensor, SavedState]) -> None:
        if self._interrupted is not None:
            tier.go_back()
        self._failed_step = None
        self._interrupted = "load_state_dict"  # unless it ends
        try:
            self._load(saved)
            tier.write_masters()
            self._commit(tier, Made(_made(tier.store).steps + 1, 0))
        except StorageError as error:
            self._release(tier, error)
            raise

    def _apply_by_units(self, tier: DriveTier[Any], work: Work) -> dict[Extent, Update]:
        """The same, of one unit of parameters after the other, and a generation of all on drives.

        After an error everything is what it was before, unless the device failed and had something
        that the drives have not. Drives that do not answer then are asked again when the optimizer
        is next used (`_check_whole`): if the generation counts, everything is what it was after the
        step. What was changed on the drives alone since the last generation is written first: if
        that fails, gradients are lost, and of parameters that are away all changes, after which
        steps are refused.
        """
        is_lost: bool | None = tier.has_changed_away
        generation = tier.store.generation
        undo = Undo(self.state, self._residents.values())
        try:
            with tier.step():
                for state in self.state.values():
                    if isinstance(state, ParameterState) and state.store is not None:
                        state.flush()
                counted = self._traffic.as_dict()
                tier.prepare(resident for resident, _, _ in work.checked)
                if tier.is_dirty:
                    self._commit_changes(tier)
                generation = tier.store.generation
                is_lost = None
                try:
                    updates = self._update_units(tier, undo, work)
                except ChangedParameterError:
                    is_lost = False  # nothing has reached the host
                    tier.go_back()
                    undo.restore()
                    self._recover()
                    self._traffic.go_back(counted)
                    tier.prepare((resident for resident, _, _ in work.checked), anew=True)
                    if tier.is_dirty:
                        self._commit_changes(tier)
                    generation = tier.store.generation
                    is_lost = None
                    updates = self._update_units(tier, undo, work)
                self._commit(tier, Made(_made(tier.store).steps + 1, 0))
        except BaseException as error:
            recovers = tier.recovers or isinstance(error, StorageError)
            residents = [resident for resident, _, _ in work.checked]
            self._failed_step = FailedStep(undo, residents, generation, is_lost, recovers)
            self._go_back(tier, self._failed_step, error)
            raise
        return updates

    def _update_units(self, tier: DriveTier[Any], undo: Undo, work: Work) -> dict[Extent, Update]:
        updates: dict[Extent, Update] = {}
        units = list(work.units(tier.segments))
        for unit, after in zip_longest(units, units[1:]):
            tier.keep(undo, (resident for resident, _, _ in unit.checked))
            tier.bring(unit.segment, unit.needed())
            if after is not None:
                tier.prefetch(after.segment, after.needed())
            updates |= self._apply(unit) or {}
        return updates

    def _recover(self) -> None:
        """What has failed half way is undone."""
        self._interrupted = None
        for resident in self._residents.values():
            resident.interrupted = None

    def _go_back(self, tier: DriveTier[Any], failed: FailedStep, error: BaseException) -> None:
        """Undo a step, now if the drives answer."""
        if failed.is_lost:
            self._interrupt(self._residents.values(), error)
        try:
            if isinstance(error, UncertainCommitError):
                raise error  # they did not
            self._finish_undo(tier, failed, error)
        except StorageError:
            self._interrupt(self._residents.values(), error)
        self._release(tier, error)

    def _release(self, tier: DriveTier[Any], error: BaseException) -> None:
        """Unlock drives that had an error, so that an optimizer can be made anew, whoever refers to
        this one."""
        if isinstance(error, StorageError) and not isinstance(error, DriveTimeoutError):
            tier.drives.release()  # after a timeout something may be under way still

    def _finish_undo(
        self, tier: DriveTier[Any], failed: FailedStep, error: BaseException | None = None
    ) -> None:
        """Go back to before a step that failed; if its generation counts, to behind it."""
        counts = tier.store.generation != failed.generation
        if counts and failed.is_lost is None:
            tier.clean()
        else:
            tier.go_back()
            failed.undo.restore()
            if failed.is_lost is None:
                tier.restore(failed.residents)
            elif not counts:
                self._lose_gradients(error)
        self._failed_step = None
        if failed.recovers and (counts or not failed.is_lost):
            self._recover()

    def _check_whole(self, action: str) -> None:
        """As for other optimizers, after a step that could not be undone has been.

        Raises
        ------
        InterruptedStepError
        StorageError : the drives do not answer yet.
        """
        if self._tier is not None and self._failed_step is not None:
            self._finish_undo(self._tier, self._failed_step)
        super()._check_whole(action)

    def write_failed(self, error: Exception) -> None:
        """Go on after a write to the drives that failed outside of a step.

        What was written since the last generation is lost: gradients that the device was to keep,
        which it keeps no more. If anything else was, the optimizer refuses steps until a checkpoint
        is loaded.

        Parameters
        ----------
        error : nothing is done unless it is one of the drives.
        """
        tier, residents = self._tier, list(self._residents.values())
        if tier is None or not isinstance(error, StorageError):
            return
        others = tier.has_changes_besides_gradients
        self._lose_gradients(error)
        try:
            tier.go_back()
        except StorageError:
            others = True
        if others:
            self._interrupt(residents, error)

    def _lose_gradients(self, error: BaseException | None) -> None:
        held = [r for r in self._residents.values() if isinstance(r.held, DeviceGradient)]
        for resident in held:
            resident.release_gradient()
        if held and error is not None:
            error.add_note(f"{len(held)} gradients that were on the drives are lost")

    def _commit_changes(self, tier: DriveTier[Any]) -> None:
        """Commit what the host changed since the last generation."""
        steps, changes = _made(tier.store)
        self._commit(tier, Made(steps, changes + 1))

    def _commit(self, tier: DriveTier[Any], made: Made, **more: str) -> None:
        layout = tier.layout(keys(self.param_groups))
        groups, computes, saves = self.param_groups, self._computes, self._settings.save_residual
        kept = pack(
            self._title, groups, self.state, self._residents, computes, layout, save_residual=saves
        )
        written = write_residuals(tier.segments, self.state, save=saves)
        tier.commit({**kept, "made": made, **more})
        for state in written:
            state.residual_saved()

    def _resume(self, tier: DriveTier[Any]) -> None:
        """Have parameters, state and options as the drives have them."""
        source = tier.store if tier.source is None else tier.source
        saved = unpack(source.meta, self._title, self.param_groups, self._computes)
        left_out = any(each.residual is None for each in saved.states.values())
        if left_out and self._settings.has_residual and self._settings.save_residual:
            expected = "what error feedback held back"
            actual = "a step that left it out: resume with save_residual=False, or without "
            raise ResumeError(expected, f"{actual}error_feedback, and begin with nothing held back")
        carried = self._carry(tier, source, saved)
        for group, options in zip(self.param_groups, saved.groups, strict=True):
            group.update(options)
            self._complete(group, self.defaults)
            self._check_group(group, self.defaults)
        self.state.clear()
        for parameter, resident in self._residents.items():
            found = saved.states.get(parameter)
            resident.resume()
            if found is not None:
                arrays = {self.layout.moments[key]: 0.0 for key in found.moments}
                resident.extent.segment.reserve(arrays)
                step = found.step
                count = None if step is None else torch.tensor(float(step), device="cpu")
                state = ParameterState.of(resident, count, found.moments)
                if found.residual:
                    read_residual(resident, state)
                self._keep(resident, state)
        if carried:
            replaced = str(source.drives[0].header.set_id)
            more = {REPLACES: replaced} if tier.replaces else {}
            self._commit(tier, _made(source), **more)

    def _carry(self, tier: DriveTier[Any], source: Store, saved: SavedStep) -> bool:
        """Copy what lies on other drives, or elsewhere on these; whether anything does."""
        names = keys(self.param_groups)
        if source is tier.store and saved.layout == tier.layout(names):
            return False
        labels = self._labels()
        arrays = saved_arrays(source.at(source.generation))
        for parameter, name in names.items():
            if parameter not in self._residents and arrays.has(name, "p"):
                expected = f"nothing of {labels[parameter]}, which requires no gradient"
                raise ResumeError(expected, "a step of it")
        if source is tier.store:
            tier.clear()
        for parameter, resident in self._residents.items():
            found = saved.states.get(parameter)
            moments = () if found is None else found.moments
            wanted = ["p", *(self.layout.moments[key] for key in moments)]
            if found is not None and found.residual:
                wanted.append(HELD_BACK)
            resident.extent.segment.reserve(dict.fromkeys(wanted, 0.0))
            reshard(arrays, names[parameter], resident, wanted)
        return True

    def _interrupt(
        self, residents: Iterable[DeviceParameter | FlatBucket], error: BaseException
    ) -> None:
        self._interrupted = type(error).__name__
        for resident in residents:
            resident.interrupt(self._interrupted)


def _made(store: Store) -> Made:
    """How far the last generation of a store is."""
    return Made.of(store.meta, store.generation)
