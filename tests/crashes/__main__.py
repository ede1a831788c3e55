"""Crashes of stores, trainings and ranks: does anything but a guaranteed generation, or a typed
error, come back?

python -m tests.crashes --seeds 0:100000

A seed determines everything: the workload, the faults and the cuts. A failing seed is printed with
the command that replays it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field

import pytest
from rich.console import Console
from rich.progress import track

from ..host.storage.mistakes import Mistake
from . import ranks, stores, trainings
from .life import Tally
from .mistakes import MISTAKES

KINDS = {
    "store": (stores.StoreLife, 8),
    "training": (trainings.Training, 1),
    "ranks": (ranks.Group, 1),
}
"""What a seed is about, and how often."""
SHOWN = 4


@dataclass
class Campaign:
    """What many seeds met."""

    seeds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)

    def add(self, seed: int) -> None:
        tally = Tally()
        try:
            kind = run(seed, tally)
        except Exception as error:
            self.failed.append((seed, "".join(traceback.format_exception(error, limit=-3))[-900:]))
            return
        self.seeds[kind] += 1
        self.faults += tally.faults
        self.outcomes += tally.outcomes

    def __str__(self) -> str:
        lines = [f"{self.seeds.total() + len(self.failed)} seeds, {len(self.failed)} failed"]
        for title, counts in (
            ("seeds", self.seeds),
            ("faults", self.faults),
            ("outcomes", self.outcomes),
        ):
            lines.append(f"{title}:")
            lines += [f"{count:10,} {name}" for name, count in sorted(counts.items()) if count]
        for seed, why in self.failed[:SHOWN]:
            lines.append(f"{why}replay: .venv/bin/python -m tests.crashes --seeds {seed}")
        return "\n".join(lines)


def run(seed: int, tally: Tally) -> str:
    """Run one seed; what it was about."""
    rng = random.Random(f"crash {seed}")
    (kind,) = rng.choices([*KINDS], [weight for _, weight in KINDS.values()])
    KINDS[kind][0](rng, tally).run()
    return kind


def found_at(mistake: Mistake, seeds: range) -> int | None:
    """The first seed that a mistake fails; None: it survives."""
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        for seed in seeds:
            try:
                run(seed, Tally())
            except Exception:
                return seed
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, or one seed")
    parser.add_argument("--mistakes", action="store_true", help="seeds that find each mistake")
    given = parser.parse_args()
    first, colon, end = given.seeds.partition(":")
    seeds = range(int(first), int(end) if colon else int(first) + 1)
    if given.mistakes:
        alive = 0
        for mistake in track(MISTAKES, "mistakes", console=Console(stderr=True)):
            seed = found_at(mistake, seeds)
            alive += seed is None
            said = "survives" if seed is None else f"is found by seed {seed}"
            print(f"{mistake.__name__.replace('_', ' ')}: {said}", flush=True)
        count = len(MISTAKES)
        print(f"{count - alive} of {count} mistakes are found within {len(seeds)} seeds")
        return bool(alive)
    campaign = Campaign()
    with contextlib.suppress(KeyboardInterrupt):  # what was seen until then is printed
        for seed in track(seeds, "seeds", console=Console(stderr=True)):
            campaign.add(seed)
    print(campaign)
    return bool(campaign.failed)


if __name__ == "__main__":
    sys.exit(main())
