"""The host's copy of a parameter may change at any time, by any means: the device follows."""

from __future__ import annotations

import pytest
import torch

import nearstep
from nearstep.torch.convert import fingerprint
from nearstep.torch.errors import ParameterError

from .conftest import like_torch


def scale_in_place(p):
    with torch.no_grad():
        p.mul_(0.5)


def clip(p):
    with torch.no_grad():
        p.clamp_(-0.1, 0.1)


def initialise(p):
    torch.manual_seed(3)
    torch.nn.init.normal_(p)


def through_data(p):
    p.data.add_(1.0)


def through_numpy(p):
    p.detach().numpy()[...] = 0.25


def one_element_through_numpy(p):
    p.detach().numpy().reshape(-1)[-1] += 1.0


def swap_two_elements_through_data(p):
    p.data.reshape(-1)[:2] = p.data.reshape(-1)[:2].flip(0).clone()


def other_storage(p):
    p.data = torch.full_like(p.data, 0.75)


def load(p):
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(p.detach())  # shares storage
    model.load_state_dict({"p": torch.linspace(-1, 1, p.numel()).view_as(p)})


CHANGES = [
    scale_in_place,
    clip,
    initialise,
    through_data,
    through_numpy,
    one_element_through_numpy,
    swap_two_elements_through_data,
    other_storage,
    load,
]


@like_torch
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_a_parameter_on_the_host_is_found(
    change, device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
        for parameters in (ours, theirs):
            change(parameters[1])
    down = optimizer.traffic.masters_down
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    assert optimizer.traffic.masters_down - down == 4 * ours[1].numel()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_a_change_before_the_first_step(device, make_parameters, give_gradients, assert_equal_bits):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    reference = torch.optim.AdamW(theirs, fused=True)
    for parameters in (ours, theirs):
        through_data(parameters[0])
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_a_write_that_changes_no_bit_sends_nothing(device, make_parameters, give_gradients):
    ours = make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    give_gradients(ours)
    optimizer.step()
    down = optimizer.traffic.masters_down
    with torch.no_grad():
        ours[0].copy_(ours[0].clone())
    optimizer.step()
    assert optimizer.traffic.masters_down == down


def test_autograd_notices_that_a_step_changed_a_parameter(device):
    p = torch.ones(16, requires_grad=True)
    optimizer = nearstep.optim.AdamW([p], device=device)
    loss = p.square().sum()
    p.grad = torch.ones(16)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_of_another_size_is_refused(device, make_parameters, give_gradients):
    ours = make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    give_gradients(ours)
    optimizer.step()
    ours[1].grad = None
    ours[1].data = torch.ones(5)
    ours[1].grad = torch.ones(5)
    with pytest.raises(ParameterError, match="parameter 1 of group 0 must be of 64 elements"):
        optimizer.step()


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


def other_order(p):
    p.data = p.data.reshape(-1).as_strided(p.shape, (1, p.shape[0]))


def shared_between_processes(p):
    p.share_memory_()
    p.data.mul_(2.0)


def negative_view(p):
    p.data = torch._neg_view(p.data)


@pytest.mark.parametrize(
    "change",
    [other_order, shared_between_processes, negative_view, other_storage],
    ids=lambda change: change.__name__,
)
def test_other_memory_or_another_view_of_the_same_is_found(change, device):
    """A twin has the same values, in the memory that it always had."""
    p = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    twin = p.detach().clone().requires_grad_()
    optimizers = [nearstep.optim.AdamW([each], lr=1e-2, device=device) for each in (p, twin)]
    for turn in range(4):
        if turn == 2:
            change(p)
            twin.data.copy_(p.data)
        for each in (p, twin):
            each.grad = torch.linspace(turn, -1, 24).view(4, 6)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(p.detach().resolve_neg(), twin.detach())
    assert not torch.equal(twin.detach(), torch.linspace(-1, 1, 24).view(4, 6))
