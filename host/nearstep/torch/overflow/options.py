"""Options of optimizers whose state lies on drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nearstep.errors import ArgumentError
from nearstep.plan.overflow import Eviction
from nearstep.storage.drive_set import check_places
from nearstep.storage.store import Store
from nearstep.torch.errors import HyperparameterError

Drives = Sequence[str | Path] | Store
"""Files of a set; or a store that the caller opened, and closes."""


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """State lies on drives as far as memory does not hold it.

    Attributes
    ----------
    drives
    memory : of the device, for parameters, gradients and state: bytes, text such as `64MiB`, or a
        share of all that, such as `25%`.
    eviction
    resume : go on from the last step that the drives have.
    """

    drives: Drives
    memory: int | str
    eviction: Eviction
    resume: bool

    @classmethod
    def given(
        cls, drives: Drives | None, memory: int | str | None, eviction: str, *, resume: bool
    ) -> Overflow | None:
        """Check what an optimizer was given; None if that is no drives.

        Raises
        ------
        HyperparameterError : one is missing that belongs to the others, or is of no use.
        ArgumentError : these cannot be drives.
        """
        if drives is None:
            for name, value, empty in (("memory", memory, None), ("resume", resume, False)):
                if value is not empty:
                    raise HyperparameterError(name, "given with drives alone", value)
        if eviction not in get_args(Eviction):
            raise HyperparameterError("eviction", f"one of {get_args(Eviction)}", eviction)
        if drives is None:
            return None
        if memory is None:
            raise HyperparameterError("memory", "given with drives", memory)
        if not isinstance(resume, bool):
            raise HyperparameterError("resume", "True or False", resume)
        if not isinstance(drives, Store):
            check_places(drives)
            if not all(isinstance(each, str | Path) for each in drives):
                raise ArgumentError(f"a drive must be given by its path, not {drives!r}")
        chosen: Eviction = "belady" if eviction == "belady" else "updated_first"
        return cls(drives=drives, memory=memory, eviction=chosen, resume=resume)
