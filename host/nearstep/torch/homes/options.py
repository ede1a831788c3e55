"""Options of optimizers whose state lies on drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from nearstep.device import Device
from nearstep.errors import ArgumentError
from nearstep.plan.overflow import Eviction
from nearstep.scalars import is_whole
from nearstep.storage.drive_set import check_places
from nearstep.storage.store import Store
from nearstep.torch.errors import HyperparameterError

Drives = Sequence[str | Path] | Store
"""Files of a set; or a store that the caller opened, and closes."""

Resume = bool | int | str | Path | Sequence[str | Path]
"""Whether to go on from the last step of the drives; `COMMON`; a generation of them; or other
drives that have the step, all of a set, or their folder."""

COMMON = "common"
"""Go on from the last step that the drives of all processes of a job have."""


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """State lies on drives as far as memory does not hold it.

    Attributes
    ----------
    drives : None: the device's own.
    memory : of the device, for parameters, gradients and state: bytes, text such as `64MiB`, or a
        share of all that, such as `25%`. None with drives of the device: each has its card's.
    resume : go on from the last step that the drives have, that all ranks have (`COMMON`), or that
        these others have; or from this generation.
    """

    drives: Drives | None
    memory: int | str | None
    eviction: Eviction
    resume: bool | int | str | Sequence[str | Path]

    @property
    def others(self) -> Sequence[str | Path]:
        """Drives that a step is copied from."""
        return () if isinstance(self.resume, int | str) else self.resume

    @property
    def generation(self) -> int | None:
        """To go on from; None: the last, or the common one."""
        return None if isinstance(self.resume, bool | str | Sequence) else self.resume

    @classmethod
    def given(
        cls, drives: Drives | None, memory: int | str | None, eviction: str, *, resume: Resume
    ) -> Overflow | None:
        """Check what an optimizer was given; None if that is nothing.

        Raises
        ------
        HyperparameterError : something is none of what it can be.
        ArgumentError : these cannot be drives.
        """
        if eviction not in get_args(Eviction):
            raise HyperparameterError("eviction", f"one of {get_args(Eviction)}", eviction)
        is_path = isinstance(resume, str | Path) and resume != COMMON
        found = (cast(str | Path, resume),) if is_path else cast(Any, resume)
        if not (isinstance(found, bool) or is_whole(found) or found == COMMON or _are_paths(found)):
            expected = "True, False, 'common', a generation, or paths of drives to copy a step from"
            raise HyperparameterError("resume", expected, resume)
        if drives is None and memory is None and found is False:
            return None
        if drives is not None and not isinstance(drives, Store):
            check_places(drives)
            if not _are_paths(drives):
                raise ArgumentError(f"a drive must be given by its path, not {drives!r}")
        chosen: Eviction = "belady" if eviction == "belady" else "updated_first"
        return cls(drives=drives, memory=memory, eviction=chosen, resume=found)

    @classmethod
    def on(cls, device: Device, given: Overflow | None) -> Overflow | None:
        """What was given to an optimizer on a device, which may have drives of its own; None: there
        are none.

        Raises
        ------
        HyperparameterError : one is missing that belongs to the others, or is of no use.
        ArgumentError : a store has not a drive for each channel of the device.
        """
        own = device.drive_places
        if own:
            found = cls(drives=None, memory=None, eviction="updated_first", resume=False)
            found = found if given is None else given
            if found.memory is not None:
                expected = "left out: each drive has the memory of its card"
                raise HyperparameterError("memory", expected, found.memory)
            if found.drives is None:
                return replace(found, drives=own)
            if not isinstance(found.drives, Store):
                expected = "left out, or a Store: the device has drives of its own"
                raise HyperparameterError("drives", expected, found.drives)
            if len(found.drives.drives) != device.channel_count:
                raise ArgumentError(
                    f"drives must be {device.channel_count}, one a card, "
                    f"not {len(found.drives.drives)}"
                )
            return found
        if given is None:
            return None
        if given.drives is None:
            name = "memory" if given.memory is not None else "resume"
            raise HyperparameterError(name, "given with drives alone", getattr(given, name))
        if given.memory is None:
            raise HyperparameterError("memory", "given with drives", given.memory)
        return given


def _are_paths(given: object) -> bool:
    listed = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    return listed and all(isinstance(each, str | Path) for each in cast(Sequence[object], given))
