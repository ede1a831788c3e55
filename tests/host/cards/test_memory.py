"""What a process holds of a model whose state is on the drives of cards: subgroups, whatever the
size of the model, and the bounce buffers of the drives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearstep.storage.bounces import BOUNCE_BYTES

SUBGROUP = 1 << 20
HELD = 3 * 16 * SUBGROUP
"""Bytes of three subgroups of parameters, gradients and both moments."""

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 19)}
"""Freed arrays go back to the system. Otherwise glibc keeps some, in an arena of each thread: up to
9 MB more, which depend on when threads run."""

SCRIPT = Path(__file__).with_name("holding.py")


def held(elements: int, cards: int, folder: Path) -> int:
    folder.mkdir()
    given = [str(each) for each in (elements, SUBGROUP, cards, folder)]
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *given],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | GIVEN_BACK,
    )
    if "direct=False" in found.stderr:
        pytest.skip(f"there is no O_DIRECT in {folder}")
    assert found.returncode == 0, found.stderr
    return int(found.stdout)


@pytest.mark.deep
@pytest.mark.parametrize("cards", [1, 2])
def test_a_process_holds_three_subgroups_of_models_of_several_sizes(
    cards: int, tmp_path: Path
) -> None:
    counts = (16 << 20, 32 << 20, 48 << 20)
    found = [held(count, cards, tmp_path / str(count)) for count in counts]
    ragged = held(36 << 20, cards, tmp_path / "ragged")  # of parameters of 4.5 subgroups
    subgroups, bounces = HELD * cards, BOUNCE_BYTES * cards
    print(f"held {found} and {ragged} bytes, of {subgroups} and {bounces}")
    # Results of two cards are interleaved on the host, 1 MiB at a time; gradients are split.
    assert max(*found, ragged) <= (1.05 if cards == 1 else 1.2) * subgroups + bounces
    assert max(found) <= min(found) + bounces
    assert max(found) < 12 * counts[-1] / 3
