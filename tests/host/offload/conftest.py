"""One thread of torch: sums do not depend on the machine, and small operations are quick.

Layers compute on `$NEARSTEP_TEST_COMPUTE`: `cpu`, `cuda`, or `accel`, which needs no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from . import accelerator

ON_ACCELERATOR = os.environ.get("NEARSTEP_TEST_COMPUTE") == "accel"
if ON_ACCELERATOR:
    accelerator.load()


@pytest.fixture(autouse=True)
def no_hazards() -> Iterator[None]:
    """Have nothing left to chance by an order of streams."""
    yield
    assert not ON_ACCELERATOR or accelerator.hazards() == []


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Have torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
