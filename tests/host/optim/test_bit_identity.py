"""Steps on the device against `torch.optim` with `fused=True`, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

import nearstep

from .conftest import on_all

CAPABILITY = torch.backends.cpu.get_cpu_capability()

pytestmark = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"ATen's capability is {CAPABILITY}; its fused Adam is vectorised for AVX2 and AVX512",
)

CLASSES = {
    "Adam": (nearstep.optim.Adam, torch.optim.Adam),
    "AdamW": (nearstep.optim.AdamW, torch.optim.AdamW),
}

OPTIONS = {
    "default": {},
    "no_decay": {"weight_decay": 0.0},
    "decay": {"lr": 3e-3, "weight_decay": 0.1},
    "betas_of_llms": {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "second_form_of_lerp": {"lr": 1e-2, "betas": (0.3, 0.99)},
    "beta1_at_the_border": {"lr": 1e-2, "betas": (0.5, 0.9)},
    "betas_zero": {"lr": 1e-2, "betas": (0.0, 0.0)},
    "eps_zero": {"eps": 0.0},
    "eps_large": {"lr": 0.5, "eps": 1e-2},
    "lr_zero": {"lr": 0.0, "weight_decay": 0.1},
    "maximize": {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_ten_steps_equal_torch_fused(
    name, options, device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    mine, torchs = CLASSES[name]
    optimizer = mine(ours, device=device, **options)
    reference = torchs(theirs, fused=True, **options)
    for _ in range(10):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


@on_all("device")
def test_groups_with_their_own_options_equal_torch(
    device, make_parameters, give_gradients, assert_equal_bits
):
    def groups(parameters):
        return [
            {"params": parameters[:1], "lr": 1e-2},
            {"params": parameters[1:2], "weight_decay": 0.0},
            {"params": parameters[2:], "betas": (0.8, 0.9), "eps": 1e-6},
        ]

    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(groups(ours), weight_decay=0.2, device=device)
    reference = torch.optim.AdamW(groups(theirs), weight_decay=0.2, fused=True)
    for _ in range(4):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


@pytest.mark.parametrize("size", [1, 2, 7, 15, 17, 31, 100, 1023, 4097])
def test_sizes_that_are_not_multiples_of_16_differ_only_in_torchs_scalar_tail(
    size, device, make_parameters, give_gradients
):
    ours, theirs = make_parameters([(size,)]), make_parameters([(size,)])
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(6):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    whole = size - size % 16
    mine, other = optimizer.state[ours[0]], reference.state[theirs[0]]
    for name, a, b in (
        ("p", ours[0].detach(), theirs[0].detach()),
        ("exp_avg", mine["exp_avg"], other["exp_avg"]),
        ("exp_avg_sq", mine["exp_avg_sq"], other["exp_avg_sq"]),
    ):
        differ = (a.view(torch.int32) != b.view(torch.int32)).nonzero().flatten().tolist()
        print(f"{name}: {len(differ)} of {size % 16} values of the tail differ from torch's")
        assert not [index for index in differ if index < whole]
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)


def test_scalar_parameters_and_empty_ones_step_like_torchs(device, make_parameters, give_gradients):
    shapes = [(), (0,), (16,), (0, 4)]
    ours, theirs = make_parameters(shapes), make_parameters(shapes)
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)
        assert optimizer.state[a]["step"] == reference.state[b]["step"] == 3
        assert optimizer.state[a]["exp_avg"].shape == a.shape


def test_only_empty_parameters(device):
    empty = torch.zeros(0, requires_grad=True)
    empty.grad = torch.zeros(0)
    optimizer = nearstep.optim.AdamW([empty], device=device)
    optimizer.step()
    assert optimizer.state[empty]["step"] == 1
    assert optimizer.traffic.launches == 0


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "strided"])
def test_parameters_and_gradients_that_are_not_contiguous(
    layout, device, make_parameters, give_gradients, assert_equal_bits
):
    def lay_out(tensor):
        if layout == "transposed":
            return tensor.detach().clone().transpose(0, 1)
        if layout == "channels_last":
            return tensor.detach().clone(memory_format=torch.channels_last)
        wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor.detach()
        return wide[..., ::2]

    shape = [(4, 8, 2, 16)]
    ours = [lay_out(make_parameters(shape)[0]).requires_grad_()]
    theirs = [ours[0].detach().clone(memory_format=torch.contiguous_format).requires_grad_()]
    assert not ours[0].is_contiguous()
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(3):
        give_gradients(ours, theirs)
        ours[0].grad = lay_out(ours[0].grad) if layout != "transposed" else ours[0].grad
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_an_expanded_gradient(device, make_parameters, assert_equal_bits):
    ours, theirs = make_parameters([(16, 16)]), make_parameters([(16, 16)])
    optimizer = nearstep.optim.AdamW(ours, device=device)
    reference = torch.optim.AdamW(theirs, fused=True)
    ours[0].grad = torch.full((), 0.25).expand(16, 16)
    theirs[0].grad = torch.full((16, 16), 0.25)
    optimizer.step()
    reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_nan_and_inf_gradients_follow_ieee_754_as_in_torch(device, make_parameters):
    ours, theirs = make_parameters([(64,)]), make_parameters([(64,)])
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    gradient = torch.linspace(-1, 1, 64)
    gradient[3], gradient[17], gradient[40] = math.nan, math.inf, -math.inf
    gradient[50], gradient[51] = 3e38, -0.0
    for _ in range(3):
        ours[0].grad, theirs[0].grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    mine, other = optimizer.state[ours[0]], reference.state[theirs[0]]
    for a, b in (
        (ours[0].detach(), theirs[0].detach()),
        (mine["exp_avg"], other["exp_avg"]),
        (mine["exp_avg_sq"], other["exp_avg_sq"]),
    ):
        assert torch.equal(a.isnan(), b.isnan())
        finite = ~a.isnan()
        assert torch.equal(a[finite].view(torch.int32), b[finite].view(torch.int32))
        assert 0 < int(a.isnan().sum()) < 64


def test_a_learning_rate_in_a_tensor(device, make_parameters, give_gradients, assert_equal_bits):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, lr=torch.tensor(1e-2), device=device)
    reference = torch.optim.AdamW(theirs, lr=torch.tensor(1e-2), fused=True)
    for scale in (1.0, 0.5, 0.25):
        for chosen in (optimizer, reference):
            chosen.param_groups[0]["lr"].fill_(1e-2 * scale)
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)
