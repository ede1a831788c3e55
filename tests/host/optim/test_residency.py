"""The host's copy of a parameter may change at any time, by any means: the device follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nearstep
from nearstep.torch.convert import fingerprint
from nearstep.torch.errors import ParameterError

from .beside import Beside
from .conftest import like_torch


def set_data(p, value):
    p.data = value


def swap_two_elements(p):
    p.data.reshape(-1)[:2] = p.data.reshape(-1)[:2].flip(0).clone()


def load(p):
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(p.detach())  # shares storage
    model.load_state_dict({"p": torch.linspace(-1, 1, p.numel()).view_as(p)})


CHANGES = {
    "scale in place": lambda p: p.detach().mul_(0.5),
    "clip": lambda p: p.detach().clamp_(-0.1, 0.1),
    "initialise": lambda p: torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(3)),
    "through data": lambda p: p.data.add_(1.0),
    "through numpy": lambda p: p.detach().numpy().fill(0.25),
    "one element through numpy": lambda p: np.add.at(p.detach().numpy().reshape(-1), -1, 1.0),
    "swap two elements through data": swap_two_elements,
    "other storage": lambda p: set_data(p, torch.full_like(p.data, 0.75)),
    "load": load,
}


@like_torch
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_parameter_on_the_host_is_found(change, home):
    beside = Beside("AdamW", home)
    for _ in range(4):  # one before the first step
        for side in beside:
            CHANGES[change](side.parameters[1])
        down = beside.mine.optimizer.traffic.masters_down
        beside.step()
    if home != "host:":
        size = beside.mine.parameters[1].numel()
        assert beside.mine.optimizer.traffic.masters_down - down == 4 * size
    beside.check()


def test_a_write_that_changes_no_bit_sends_nothing(device):
    beside = Beside("AdamW", device)
    beside.step()
    down = beside.mine.optimizer.traffic.masters_down
    with torch.no_grad():
        beside.mine.parameters[0].copy_(beside.mine.parameters[0].clone())
    beside.mine.optimizer.step()
    assert beside.mine.optimizer.traffic.masters_down == down


def test_autograd_notices_that_a_step_changed_a_parameter(home):
    strided = torch.ones(16, 32)[:, ::2]
    for p in (torch.ones(16).requires_grad_(), strided.requires_grad_()):
        optimizer = nearstep.optim.AdamW([p], device=home)
        loss, before = p.square().sum(), p._version
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert p._version > before
        if home == "host:":
            keys = ("exp_avg", "exp_avg_sq")
            assert min(optimizer.state[p][key]._version for key in keys) > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_parameter_of_another_size_is_refused(device):
    beside = Beside("AdamW", device)
    beside.step()
    p = beside.mine.parameters[1]
    p.grad = None
    p.data = torch.ones(5)
    p.grad = torch.ones(5)
    with pytest.raises(ParameterError, match="parameter 1 of group 0 must be of 64 elements"):
        beside.mine.optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_fingerprint_sees_every_single_bit(dtype):
    torch.manual_seed(7)
    tensor = torch.randn(33).to(dtype)
    reference = fingerprint(tensor)
    data = tensor.untyped_storage()
    found = 0
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert fingerprint(tensor) != reference
            data[byte] ^= 1 << bit
            found += 1
    assert fingerprint(tensor) == reference
    assert found == 33 * tensor.element_size() * 8


VIEWS = {
    "other order": lambda p: set_data(p, p.data.reshape(-1).as_strided(p.shape, (1, p.shape[0]))),
    "shared between processes": lambda p: p.share_memory_().data.mul_(2.0),
    "negative view": lambda p: set_data(p, torch._neg_view(p.data)),
    "other storage": CHANGES["other storage"],
}


@pytest.mark.parametrize("change", VIEWS)
def test_other_memory_or_another_view_of_the_same_is_found(change, home):
    """A twin has the same values, in the memory that it always had."""
    p = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    twin = p.detach().clone().requires_grad_()
    optimizers = [nearstep.optim.AdamW([each], lr=1e-2, device=home) for each in (p, twin)]
    for turn in range(4):
        if turn == 2:
            VIEWS[change](p)
            twin.data.copy_(p.data)
        for each in (p, twin):
            each.grad = torch.linspace(turn, -1, 24).view(4, 6)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(p.detach().resolve_neg(), twin.detach())
    assert not torch.equal(twin.detach(), torch.linspace(-1, 1, 24).view(4, 6))
