"""How training code uses an optimizer besides steps: hooks, the profiler, closed devices."""

from __future__ import annotations

import pytest
import torch

import nearstep
from nearstep.errors import ClosedDeviceError

from .beside import Beside


def test_step_hooks_and_the_profiler_see_the_step(device):
    beside, seen = Beside("AdamW", device), []
    optimizer = beside.mine.optimizer
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    beside.give()
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert seen == ["pre", "post"]
    names = {event.name for event in profile.events()}
    assert "Optimizer.step#AdamW.step" in names
    handle.remove()
    optimizer.step()
    assert seen == ["pre", "post", "pre"]


def test_a_step_on_a_closed_device():
    with nearstep.open("golden:axdimm?memory_bytes=1MiB") as device:
        beside = Beside("AdamW", device)
    beside.give()
    with pytest.raises(ClosedDeviceError):
        beside.mine.optimizer.step()


def test_the_paper_order_trains_too():
    beside = Beside("AdamW", "golden:axdimm?memory_bytes=1MiB&order=paper")
    beside.step(4)
    for a, b in zip(*(side.parameters for side in beside), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
