"""Processes of one job that go on from drives, each from its own, at one step."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from nearstep.torch.homes.errors import RanksDifferError

TIMEOUT_S = 120.0
"""Seconds after which a rank that does not resume is named."""

_calls = itertools.count()


class Made(NamedTuple):
    """How far a generation is.

    Attributes
    ----------
    steps : and checkpoints that were loaded.
    changes : generations since, of what the host changed between steps.
    """

    steps: int
    changes: int

    @classmethod
    def of(cls, meta: Mapping[str, Any], generation: int) -> Made:
        """What the meta data of a generation says; of one that does not, its number."""
        return cls(*meta.get("made", (generation if meta else 0, 0)))


def agree(generations: Mapping[int, Mapping[str, Any]], last: int, *, common: bool) -> int:
    """Find the generation that this process goes on from.

    All processes of the default group of `torch.distributed`, if there is one, say what they have,
    through the store of the group.

    Parameters
    ----------
    generations : meta data of those that this process has, by number.
    last : the one that it goes on from unless `common`.
    common : go on from the last step that all have.

    Raises
    ------
    RanksDifferError : the last steps differ, or no step is `common`; or a process does not resume.
    """
    own = {number: Made.of(meta, number) for number, meta in generations.items()}
    ranks = _exchange({last: own[last], **own})
    shared = set.intersection(*(set(each.values()) for each in ranks.values()))
    if common:
        if not shared:
            raise RanksDifferError(_steps(ranks), None)
        return max(number for number, made in own.items() if made == max(shared))
    if len({next(iter(each.values()), None) for each in ranks.values()}) > 1:
        raise RanksDifferError(_steps(ranks), max(shared).steps if shared else None)
    return last


def failed() -> None:
    """Say that this process cannot resume, so that others need not wait for it."""
    if not _alone():
        _tell({})


def _exchange(own: Mapping[int, Made]) -> dict[int, dict[int, Made]]:
    """Generations of each rank, the last one first."""
    if _alone():
        return {0: dict(own)}
    store, call = _tell(own)
    keys = [f"{call}/{rank}" for rank in range(dist.get_world_size())]
    found: dict[int, dict[int, Made]] = {}
    end = time.monotonic() + TIMEOUT_S
    for rank, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(1.0, end - time.monotonic())))
        except RuntimeError:  # torch's own, of a time that is over
            found[rank] = {}
            continue
        said = json.loads(store.get(key))
        found[rank] = {number: Made(*made) for number, made in said}
    return found


def _tell(own: Mapping[int, Made]) -> tuple[Any, int]:
    """Say what this process has; the store that all use, and which exchange it is."""
    from torch._C._distributed_c10d import PrefixStore  # some builds of torch have none

    call = next(_calls)
    group = dist.distributed_c10d._get_default_group()
    store = PrefixStore("nearstep/resume", dist.distributed_c10d._world.pg_map[group][1])
    store.set(f"{call}/{dist.get_rank()}", json.dumps(list(own.items())))
    return store, call


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _steps(ranks: Mapping[int, Mapping[int, Made]]) -> dict[int, dict[int, int]]:
    return {
        rank: {number: made.steps for number, made in each.items()} for rank, each in ranks.items()
    }
