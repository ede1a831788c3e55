"""What a process holds of a model whose state is on the drives of cards: subgroups, whatever the
size of the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUBGROUP = 1 << 20
HELD = 3 * 16 * SUBGROUP
"""Bytes of three subgroups of parameters, gradients and both moments."""

SCRIPT = Path(__file__).with_name("holding.py")


def held(elements: int, cards: int, folder: Path) -> int:
    folder.mkdir()
    given = [str(each) for each in (elements, SUBGROUP, cards, folder)]
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *given], capture_output=True, text=True, check=False
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
    print(f"held {found} and {ragged} bytes, of {HELD * cards}")
    # What comes of two cards is put to its places, 1 MiB at a time; gradients are cut up.
    assert max(*found, ragged) <= (1.1 if cards == 1 else 1.25) * HELD * cards
    assert max(found) <= 1.05 * min(found)
    assert max(found) < 12 * counts[-1] / 3
