"""Releases of torch: those that are too old are refused by a sentence."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import torch

from nearstep.errors import NearstepError
from nearstep.torch import eager
from nearstep.torch.errors import LOWEST, TorchVersionError, check_torch

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


@pytest.mark.parametrize("version", ["2.5.1", "2.10.0+cpu", "1.13"])
def test_an_old_torch_is_refused_where_it_is_first_needed(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(NearstepError) as caught:
        importlib.reload(eager)
    assert str(caught.value) == (
        f"torch must be 2.11 or newer, not {version}: pip install 'nearstep[torch]'"
    )
    assert caught.type.__name__ == TorchVersionError.__name__
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1", "3.0", "of a fork"])
def test_others_are_taken(version: str) -> None:
    check_torch(version)


def test_the_range_of_the_package_begins_with_what_is_not_refused() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    (wanted,) = (each for each in extras["torch"] if each.startswith("torch"))
    (pinned,) = (each for each in extras["dev"] if each.startswith("torch"))
    low = re.match(r"torch>=(\d+)\.(\d+),<", wanted)
    assert low is not None
    assert tuple(map(int, low.groups())) == LOWEST
    assert pinned == "torch==2.13.0"
