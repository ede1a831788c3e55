"""Processes that share the parameters of an optimizer, each with drives of its own."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from nearstep.storage.blocks import BlockFile
from nearstep.storage.store import Store
from nearstep.torch.homes import resume
from nearstep.torch.homes.errors import RanksDisagreeError, RanksFailedError, SharedDriveError
from nearstep.torch.homes.resume import Made
from nearstep.torch.settings import Drives, Overflow

BEGIN, COMMIT = range(2)
"""What a vote is about: a step that begins, a generation that can be committed."""

ACTIONS = "begin a step after", "commit"

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Identity of a running system."""


class Vote(NamedTuple):
    """The state of a rank, sent to all others.

    Attributes
    ----------
    failed : an error ended its part of the operation.
    flag : of `Ranks.any`.
    steps, changes : of the generation.
    """

    failed: bool
    action: int
    steps: int
    changes: int
    flag: bool = False

    def __str__(self) -> str:
        if self.failed:
            return "fail: its own error says why"
        changes = f" and {self.changes} changes" if self.changes else ""
        return f"{ACTIONS[self.action]} step {self.steps}{changes}"


class Ranks:
    """Processes that commit generations together: all commit one, or none.

    A commit has two phases. When payload and index of a generation are durable on all ranks
    (`prepared`), each writes its superblock. A rank takes part only after its commit before has
    returned: so if any rank has a generation, all have the one before, which the two slots of their
    stores keep. The newest generation that all have is the one to resume from.

    Each operation (a step, a checkpoint that is loaded, the constructor) has the same votes on all
    ranks, unless one fails: it votes so in the place of its next vote, and ends the operation on
    all.

    Parameters
    ----------
    life : part of the name of each generation: text that these processes share, and that those
        which resume from their drives do not have.
    group : process group of all; None: this process is alone.
    """

    def __init__(self, life: str = "", group: Any = None) -> None:
        self.life = life
        self._group = group
        self._is_open = False

    @classmethod
    def meet(cls, owner: str, computes: str, options: Overflow) -> Self:
        """Compare what all ranks of the default group are about to do, before drives are touched.

        Parameters
        ----------
        owner : name of the optimizer and its parameters on drives.
        computes : its arithmetic, and formats of its state.

        Raises
        ------
        RanksDisagreeError, SharedDriveError : on all ranks.
        RanksFailedError : a rank makes no such optimizer.
        """
        if resume.is_alone():
            return cls()
        resumes = "other drives" if options.others else options.resume
        same = {"parameters": owner, "rule and formats": computes}
        resumes = options.kept or (True if options.generation is not None else resumes)
        same["resume"] = str(resumes)
        own = {**same, "drives": _identities(options.drives), "life": secrets.token_hex(8)}
        is_gloo = dist.get_backend() == "gloo"
        ranks = cls("", dist.group.WORLD if is_gloo else dist.new_group(backend="gloo"))
        values = ranks.exchange(own)
        absent = [rank for rank, each in values.items() if not isinstance(each, dict)]
        if absent:
            raise RanksFailedError("make the optimizer", f"ranks {absent} make another")
        for what in same:
            if len({each[what] for each in values.values()}) > 1:
                said = "; ".join(f"rank {rank}: {each[what]}" for rank, each in values.items())
                raise RanksDisagreeError(what, said)
        users: dict[str, list[int]] = {}
        names: dict[str, str] = {}
        for rank, each in values.items():
            for identity, name in each["drives"].items():
                names.setdefault(identity, name)
                users.setdefault(identity, []).append(rank)
        for identity, found in users.items():
            if len(found) > 1:
                raise SharedDriveError(names[identity], found)
        ranks.life = values[0]["life"]
        return ranks

    def exchange(self, own: Any) -> dict[int, Any]:
        """Gather a value in JSON from each rank.

        Shared parameters do not use the default group's store, whose keys may be those of processes
        that have ended, as when torchrun restarts them.

        Raises
        ------
        RanksFailedError : the connection is lost.
        """
        if self._group is None:
            return resume.exchange(own)
        values: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(values, own, group=self._group)
        except RuntimeError as error:
            reason = f"the connection is lost: {error}"
            raise RanksFailedError("say what they have", reason) from error
        return dict(enumerate(values))

    def failed(self) -> None:
        """Send other ranks, in the place of `resume.agree`, that this process cannot resume."""
        self._is_open = False
        if self._group is None:
            resume.failed()
            return
        with suppress(RanksFailedError):
            self.exchange([])

    @property
    def is_alone(self) -> bool:
        """Whether no other process shares the parameters."""
        return self._group is None

    @contextmanager
    def together(self) -> Iterator[None]:
        """An operation of all ranks: an error of this one ends it on all."""
        self._is_open = True
        try:
            yield
        except Exception:
            if self._is_open:
                with suppress(RanksFailedError):
                    self._vote(Vote(True, BEGIN, 0, 0))
            raise
        finally:
            self._is_open = False

    def end(self) -> None:
        """The operation has ended: others know of an error of this rank already."""
        self._is_open = False

    def any(self, made: Made, *, flag: bool) -> bool:
        """Begin a step after a generation; return whether a flag is set on any rank.

        Raises
        ------
        RanksFailedError
        """
        return any(each.flag for each in self._vote(Vote(False, BEGIN, *made[:2], flag)))

    def prepared(self, made: Made) -> None:
        """Wait until a generation can be committed on all ranks: its payload and index are durable.

        Raises
        ------
        RanksFailedError : none commits it; after a lost connection, perhaps some do.
        """
        self._vote(Vote(False, COMMIT, *made[:2]))

    def _vote(self, own: Vote) -> list[Vote]:
        """Return the votes of all ranks.

        Raises
        ------
        RanksFailedError : the votes differ, or a rank has failed.
        """
        if self._group is None:
            return [own]
        mine = torch.tensor(own, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        try:
            dist.all_gather(found, mine, group=self._group)
        except RuntimeError as error:
            self._is_open = False
            raise RanksFailedError(str(own), f"the connection is lost: {error}") from error
        votes = [Vote(*each.tolist()) for each in found]
        others = {n: each for n, each in enumerate(votes) if each[:4] != own[:4] or each.failed}
        if others:
            self._is_open = False
            said = "; ".join(f"rank {rank}: {each}" for rank, each in others.items())
            raise RanksFailedError(str(own), said)
        return votes


def _identities(drives: Drives | None) -> Mapping[str, str]:
    """Names of drives, by what is the same for one file or block device on all ranks."""
    if isinstance(drives, Store):
        places: Sequence[Any] = [
            each.name for each in drives.drives if isinstance(each.blocks, BlockFile)
        ]
    else:
        places = drives or ()
    system = BOOT_ID.read_text().strip() if BOOT_ID.exists() else os.uname().nodename
    return {f"{system} {_identity(Path(each))}": str(each) for each in places}


def _identity(path: Path) -> str:
    with suppress(OSError):
        found = os.stat(path)
        if stat.S_ISBLK(found.st_mode):
            return f"device {found.st_rdev}"
        return f"file {found.st_dev} {found.st_ino}"
    with suppress(OSError):
        found = os.stat(path.absolute().parent)
        return f"new file {found.st_dev} {found.st_ino} {path.name}"
    return str(path.absolute())
