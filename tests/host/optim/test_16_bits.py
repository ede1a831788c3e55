"""fp16 and bf16 parameters: an fp32 master and fp32 moments on the device."""

from __future__ import annotations

import copy

import pytest
import torch

import nearstep

DTYPES = [torch.float16, torch.bfloat16]


def steps(count, ours, masters, optimizer, reference, give_gradients):
    """Steps of both, the reference with fp32 masters and the same gradients, widened."""
    for _ in range(count):
        give_gradients(ours)
        for p, master in zip(ours, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        reference.step()


@pytest.fixture(params=DTYPES, ids=str)
def trained(request, device, make_parameters, give_gradients):
    """16-bit parameters and fp32 masters of them, after five equal steps."""
    ours = make_parameters(dtype=request.param)
    masters = [p.detach().float().requires_grad_() for p in ours]
    optimizer = nearstep.optim.AdamW(ours, lr=1e-3, device=device)
    reference = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    steps(5, ours, masters, optimizer, reference, give_gradients)
    return ours, masters, optimizer, reference


def assert_rounded(ours, masters, optimizer, reference):
    for p, master in zip(ours, masters, strict=True):
        assert torch.equal(p.view(torch.int16), master.detach().to(p.dtype).view(torch.int16))
        for key in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[p][key]
            assert moment.dtype == torch.float32
            assert torch.equal(moment, reference.state[master][key])


def test_parameters_are_the_rounded_fp32_masters(trained):
    assert_rounded(*trained)


def test_updates_below_the_precision_of_the_parameter_add_up(device):
    p = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    optimizer = nearstep.optim.AdamW([p], lr=1e-4, weight_decay=0.0, device=device)
    for _ in range(60):  # each moves by 1e-4, a fortieth of the distance to the next bf16
        p.grad = torch.ones(16, dtype=torch.bfloat16)
        optimizer.step()
    torch.testing.assert_close(p.float(), torch.full((16,), 1 - 60e-4), atol=2e-3, rtol=0)
    assert p.detach().max() < 1.0


def test_a_checkpoint_keeps_moments_and_masters_in_fp32(trained, device, give_gradients):
    ours, masters, optimizer, reference = trained
    saved = optimizer.state_dict()
    for index, master in enumerate(masters):
        assert saved["state"][index]["exp_avg"].dtype == torch.float32
        assert torch.equal(saved["state"][index]["master_param"], master)
    resumed = [p.detach().clone().requires_grad_() for p in ours]
    second = nearstep.optim.AdamW(resumed, device=device)
    second.load_state_dict(saved)
    assert torch.equal(second.state_dict()["state"][0]["master_param"], masters[0])
    steps(3, resumed, masters, second, reference, give_gradients)
    assert_rounded(resumed, masters, second, reference)


def test_the_model_may_be_loaded_after_the_optimizer(trained, device, give_gradients):
    ours, masters, optimizer, reference = trained
    resumed = [torch.zeros_like(p).requires_grad_() for p in ours]
    second = nearstep.optim.AdamW(resumed, device=device)
    second.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(resumed, ours, strict=True):
            p.copy_(q)
    steps(3, resumed, masters, second, reference, give_gradients)
    assert_rounded(resumed, masters, second, reference)


def test_deepcopy_keeps_the_masters(trained, give_gradients):
    ours, masters, optimizer, reference = trained
    copied, twin = copy.deepcopy((ours, optimizer))
    steps(3, copied, masters, twin, reference, give_gradients)
    assert_rounded(copied, masters, twin, reference)


def test_torch_loads_the_checkpoint_and_ignores_the_masters(trained, give_gradients):
    ours, _, optimizer, _ = trained
    resumed = [p.detach().clone().requires_grad_() for p in ours]
    second = torch.optim.AdamW(resumed)
    second.load_state_dict(optimizer.state_dict())
    give_gradients(resumed)
    second.step()
    assert second.state[resumed[0]]["step"] == 6


def test_clipping_changes_only_the_masters_of_elements_that_it_changed(trained, give_gradients):
    ours, masters, optimizer, reference = trained
    with torch.no_grad():
        for p, master in zip(ours, masters, strict=True):
            limit = 0.5  # has 16 bits
            beyond = p.abs() > limit
            p.clamp_(-limit, limit)
            master[beyond] = p[beyond].float()
            assert 0 < int(beyond.sum()) < p.numel()
    steps(2, ours, masters, optimizer, reference, give_gradients)
    assert_rounded(ours, masters, optimizer, reference)


def test_a_model_that_is_narrowed_after_the_optimizer_was_made(device, give_gradients):
    torch.manual_seed(5)
    model = torch.nn.Linear(16, 16)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-3, device=device)
    reference = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    steps(2, list(model.parameters()), masters, optimizer, reference, give_gradients)
    model.bfloat16()  # the masters keep the bits that the parameters lose
    model.zero_grad()
    steps(2, list(model.parameters()), masters, optimizer, reference, give_gradients)
    assert_rounded(list(model.parameters()), masters, optimizer, reference)


def test_gradients_of_another_precision_than_the_parameters(device, make_parameters):
    ours, theirs = make_parameters([(16,)]), make_parameters([(16,)])
    optimizer = nearstep.optim.AdamW(ours, device=device)
    reference = torch.optim.AdamW(theirs, fused=True)
    gradient = torch.linspace(-1, 1, 16).bfloat16()
    ours[0].grad_dtype = torch.bfloat16
    ours[0].grad = gradient
    theirs[0].grad = gradient.float()
    optimizer.step()
    reference.step()
    assert torch.equal(ours[0], theirs[0])
