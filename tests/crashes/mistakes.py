"""Mistakes that seeds have to find: of a store, and of trainings and ranks on stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nearstep.backends.base import Completion, Ended
from nearstep.storage.store import Store
from nearstep.torch.homes import resume
from nearstep.torch.homes.ranks import Ranks

from ..host.storage import mistakes
from ..host.storage.mistakes import Mistake


def ranks_decide_last(patch: pytest.MonkeyPatch) -> None:
    """A rank writes its superblock, and then asks the others."""
    commit = Store.commit

    def committed(store: Store, meta: Any = None, *, name: str = "", decide: Any = None) -> int:
        number = commit(store, meta, name=name)
        if decide is not None:
            decide()
        return number

    patch.setattr(Store, "commit", committed)


def ranks_without_votes(patch: pytest.MonkeyPatch) -> None:
    """A rank does not wait for the others."""
    patch.setattr(Ranks, "prepared", lambda ranks, made: None)


def ranks_with_the_newest_of_one(patch: pytest.MonkeyPatch) -> None:
    """All go on from what the first rank has."""

    def newest(ranks: Sequence[Mapping[int, Any]]) -> Any:
        return ranks[0][max(ranks[0])]

    patch.setattr(resume, "newest", newest)


def trainings_without_moments(patch: pytest.MonkeyPatch) -> None:
    """First moments are not written."""
    write = Store.submit_write

    def written(store: Store, name: str, *arguments: Any) -> Completion:
        return Ended() if name.endswith(".m") else write(store, name, *arguments)

    patch.setattr(Store, "submit_write", written)


MISTAKES: Sequence[Mistake] = (
    *mistakes.MISTAKES, ranks_decide_last, ranks_without_votes, ranks_with_the_newest_of_one,
    trainings_without_moments,
)  # fmt: skip

SURVIVOR = mistakes.without_checksums_of_indices
"""Not found within 800 seeds: other checks of an index (magic, generation, JSON, sizes, blocks on
no drive or of two extents) and the checksums of extents give typed errors in its place."""
