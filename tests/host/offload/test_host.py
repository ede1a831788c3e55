"""An optimizer without a device: the engine fetches parameters that the processor updates."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nearstep
from nearstep.errors import ArgumentError
from nearstep.torch.errors import UnsupportedOptionError
from nearstep.torch.homes.host import HostHome
from nearstep.torch.layout import Layout
from nearstep.torch.offload.errors import BudgetError

from .models import WIDTH
from .training import COMPUTE, CPU, HOST, bits, stack, state_of, steps

LAYER = 4 * (WIDTH * WIDTH + WIDTH)
made = partial(stack, on=CPU, device=HOST)

pytestmark = pytest.mark.skipif(
    COMPUTE.type != "cpu", reason="host: without an engine updates tensors on the CPU alone"
)


@pytest.mark.parametrize("policy", ["prefetch", "memferry"])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"state_dtype": torch.bfloat16, "rounding": "stochastic"},
        {"state_dtype": torch.uint8},
        {"amsgrad": True, "maximize": True},
        {"width": 13},
        {"drives": True},
        {"drives": True, "dtype": torch.bfloat16},
        {"drives": True, "state_dtype": torch.uint8, "width": 40},
    ],
    ids=str,
)
def test_bits_are_those_without_an_engine(
    options: dict[str, Any], updates: Any, policy: Any, tmp_path: Path
) -> None:
    """Also before the engine is opened, with state that it takes, and after it is closed."""
    found = []
    for name in ("plain", "offloaded"):
        on = {"drives": [tmp_path / name], "memory": "1MiB"} if options.get("drives") else {}
        model, optimizer = made(**{**options, **on} if on else options)
        seen: Any = [steps(model, optimizer)]
        if name == "offloaded":
            optimizer.zero_grad()
            engine = nearstep.offload(
                model, optimizer, budget="60%", policy=policy, updates=updates
            )
            seen.append(steps(model, optimizer, 3))
            assert engine.report().peak <= engine.budget
            engine.close()
        else:
            seen.append(steps(model, optimizer, 3))
        seen.append(steps(model, optimizer))
        found.append([seen, state_of(model, optimizer)])
    assert found[0] == found[1]


def test_an_optimizer_stays_as_it_is_if_memory_is_held() -> None:
    recurrent = nn.LSTM(4, 4)
    weights = list(recurrent.parameters())
    memory = torch.cat([p.detach().flatten() for p in weights])
    for p, part in zip(weights, memory.split([p.numel() for p in weights]), strict=True):
        p.data = part.view(p.shape)  # as cuDNN flattens weights
    model = nn.ModuleList([recurrent, *(nn.Linear(WIDTH, WIDTH) for _ in range(3))])
    optimizer = nearstep.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    table, states = optimizer.table, dict(optimizer.state)
    memories = [p.data_ptr() for p in model.parameters()]
    held = [p.detach() for p in model.parameters()]
    for updates in ("at-step", "in-backward"):
        with pytest.raises(BudgetError, match="refers to"):
            nearstep.offload(model, optimizer, budget=2 * LAYER, updates=updates)
    assert optimizer.table is table
    assert all(optimizer.state[p] is state for p, state in states.items())
    assert memories == [p.data_ptr() for p in model.parameters()]
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 for p in states)
    del held


def test_gradients_that_were_there_before_are_no_updates_of_backward() -> None:
    plain, (model, optimizer) = made(), made()
    steps(*plain, 3)
    steps(model, optimizer, 1)  # leaves gradients
    with nearstep.offload(model, optimizer, budget="60%", updates="in-backward"):
        steps(model, optimizer, 1, seed=1)
        steps(model, optimizer, 1, seed=2)
        assert state_of(model, optimizer) == state_of(*plain)


def test_scalers_copies_and_checkpoints() -> None:
    found = []
    for offloads in (False, True):
        model, optimizer = made()
        scaler = nearstep.optim.GradScaler("cpu", init_scale=1024.0)
        if offloads:
            nearstep.offload(model, optimizer, budget="300%")
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, WIDTH)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        twin = pickle.loads(pickle.dumps(optimizer))
        assert twin.table.source == HOST
        assert bits(twin.state_dict()["state"]) == bits(saved[1]["state"])
        steps(model, optimizer)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        found.append([steps(model, optimizer), state_of(model, optimizer), scaler.get_scale()])
    assert found[0] == found[1]


class OwnHome(HostHome):
    """A home of the user's."""


def test_what_is_refused_is_refused_before_anything_changes() -> None:
    mixed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).half())
    own = nn.Linear(WIDTH, WIDTH)

    def home(layout: Layout) -> HostHome:
        return OwnHome(layout, nearstep.device.open_processor(HOST))

    for model, device, budget, error, text in (
        (mixed, HOST, "300%", UnsupportedOptionError, "one dtype"),
        (own, home, "300%", ArgumentError, "device with memory"),
        (own, HOST, 1, BudgetError, "at least"),
    ):
        optimizer = nearstep.optim.AdamW(model.parameters(), device=device)
        with pytest.raises(error, match=text):
            nearstep.offload(model, optimizer, budget=budget)
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        with pytest.raises(ArgumentError, match="device with memory"):
            _ = optimizer.device
