"""Memory on a device ends with the optimizer, at once: no test here collects garbage."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

import nearstep
from nearstep.torch.errors import HyperparameterError

URL = "golden:axdimm?memory_bytes=1MiB&scan=yes&gradient_scale=yes&compression=fused"


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def read(optimizer):
    step(optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].mul_(2)
    return optimizer.state_dict()


def reload(optimizer):
    step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


def copied(optimizer):
    step(optimizer)
    copy.deepcopy(optimizer).step()


def scaled(optimizer):
    scaler = nearstep.optim.GradScaler()
    scaler.scale(torch.ones(()))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    scaler.step(optimizer)
    scaler.update()


def scheduled(optimizer):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(optimizer)
    scheduler.step()


def refused(optimizer):
    step(optimizer)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(HyperparameterError):
        optimizer.step()


def interrupted(optimizer):
    step(optimizer)

    def fail(*_, **__):
        raise KeyboardInterrupt

    optimizer._stepper._finish = fail
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    del optimizer._stepper._finish


USES = [lambda _: None, step, read, reload, copied, scaled, scheduled, refused, interrupted]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole", marks=pytest.mark.deep),
        pytest.param({"compression": 0.5}, id="compressed"),
    ],
)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__.strip("<>"))
def test_a_deleted_optimizer_gives_its_memory_back(use: Callable, options):
    p = torch.nn.Parameter(torch.ones(64))
    with nearstep.open(URL) as device:
        free = device.free_bytes
        optimizer = nearstep.optim.AdamW([p], device=device, **options)
        assert device.free_bytes < free
        use(optimizer)
        del optimizer
        assert device.free_bytes == free


@pytest.mark.parametrize("use", [step, scaled], ids=lambda use: use.__name__)
def test_a_device_opened_by_name_ends_with_its_last_optimizer(use):
    optimizer = nearstep.optim.AdamW([torch.nn.Parameter(torch.ones(64))], device=URL)
    use(optimizer)
    gone = [weakref.ref(each) for each in (optimizer, optimizer.device, optimizer.device.backend)]
    twin = copy.deepcopy(optimizer)
    del optimizer
    assert gone[0]() is None
    assert not twin.device.closed
    del twin
    assert [each() for each in gone] == [None, None, None]


FIRST = """
import gc
gc.disable()
import torch, nearstep
with nearstep.open("golden:axdimm?memory_bytes=1MiB") as device:
    free = device.free_bytes
    optimizer = nearstep.optim.AdamW([torch.nn.Parameter(torch.ones(64))], device=device)
    del optimizer
    print(free - device.free_bytes)
"""


@pytest.mark.deep
def test_the_first_optimizer_of_a_process_is_no_exception():
    """torch imports dynamo in the first call of what dynamo is to leave alone, and keeps a frame of
    that call."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


@pytest.mark.parametrize("url", [URL, "host:"])
def test_a_parameter_that_refers_to_its_optimizer_keeps_neither(url):
    """What ends a device's memory is kept by the interpreter: it must not refer to parameters."""
    p = torch.nn.Parameter(torch.ones(64))
    p.optimizer = nearstep.optim.AdamW([p], device=url)
    step(p.optimizer)
    gone = weakref.ref(p), weakref.ref(p.optimizer)
    del p
    gc.collect()
    assert [each() for each in gone] == [None, None]
