"""Seeds of crashes bring back what is guaranteed, or a typed error; and mistakes are found."""

from __future__ import annotations

import pytest

from ..host.storage.mistakes import (
    Mistake,
    over_the_last_superblock,
    superblock_first,
    without_checksums_of_extents,
    without_flushes,
)
from .__main__ import KINDS, Campaign, found_at, run
from .life import Tally
from .mistakes import MISTAKES

WITHIN = 400
"""Seeds within which every mistake is found."""


def test_seeds_bring_back_what_is_guaranteed_or_a_typed_error() -> None:
    campaign = Campaign()
    for seed in range(60):
        campaign.add(seed)
    print(campaign)
    assert not campaign.failed
    assert campaign.seeds.keys() == KINDS.keys()
    assert campaign.outcomes["generations read, bit by bit"] > 100
    assert campaign.outcomes["the generation in progress"] > 3
    assert sum(count for name, count in campaign.outcomes.items() if "typed error" in name) > 2
    assert len(+campaign.faults) > 8


@pytest.mark.deep
def test_many_seeds_bring_back_what_is_guaranteed_or_a_typed_error() -> None:
    campaign = Campaign()
    for seed in range(1_000, 11_000):
        campaign.add(seed)
    print(campaign)
    assert not campaign.failed
    assert campaign.outcomes["an older generation, and said so"] > 10


def test_a_seed_replays_equal() -> None:
    digests = set()
    for seed in range(12):
        first, second = Tally(), Tally()
        assert run(seed, first) == run(seed, second)
        assert first == second
        digests.add(first.digest)
    assert len(digests) > 8


@pytest.mark.parametrize(
    "mistake",
    [without_flushes, superblock_first, over_the_last_superblock, without_checksums_of_extents],
)
def test_a_mistake_is_found_and_its_seed_replays(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = found_at(mistake, range(80))
    assert seed is not None
    mistake(monkeypatch)
    first, second = Campaign(), Campaign()
    for each in (first, second):
        each.add(seed)
        assert len(each.failed) == 1
    assert str(first) == str(second)
    assert str(first).endswith(f"replay: .venv/bin/python -m tests.crashes --seeds {seed}")


@pytest.mark.deep
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found(mistake: Mistake) -> None:
    assert found_at(mistake, range(WITHIN)) is not None
