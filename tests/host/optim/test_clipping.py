"""Clipping on the device: the norm of the scan, and one factor with the scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import BusResponseError
from nearstep.torch.errors import GradientError, HyperparameterError, UnsupportedOptionError
from nearstep.torch.execution import gradient_factor, gradient_norm
from nearstep_sim.golden.scan import scan

from .conftest import like_torch
from .scaling import KINDS, SCALERS, URLS, pair, scaled, scalers


@pytest.fixture
def device(scaling_device):
    return scaling_device


def test_the_factor_is_that_of_clip_grad_norm():
    compared = 0
    for norm in (0.0, 1e-7, 0.5, 1.0, 3.0, 1e30):
        for bound in (0.0, 1e-3, 1.0, 2.0):
            p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
            p.grad = torch.tensor([norm], dtype=torch.float64)
            torch.nn.utils.clip_grad_norm_([p], bound)
            assert gradient_factor(norm, bound) * norm == pytest.approx(p.grad.item(), rel=1e-12)
            assert gradient_factor(norm, bound, 8.0) == gradient_factor(norm, bound) / 8.0
            compared += 1
    assert compared == 24
    assert gradient_factor(math.nan, None) == 1.0
    assert gradient_factor(math.nan, None, 4.0) == 0.25
    assert gradient_norm(64.0, 4.0) == 2.0


@like_torch
@pytest.mark.parametrize("kind", KINDS)
def test_a_clipped_step_is_torchs_on_gradients_times_the_factor(
    kind, make_parameters, give_gradients, assert_equal_bits
):
    """With one channel and one run the norm is that of the golden scan of all gradients."""
    ours, theirs = make_parameters(), make_parameters()
    bound, clipped = 50.0, 0
    with nearstep.open(URLS["kernel"]) as device:
        optimizer, reference = pair(kind, ours, theirs, device, max_grad_norm=bound)
        for turn in range(5):
            give_gradients(ours, theirs)
            if turn == 2:
                scaled(ours, 1e-3)
                scaled(theirs, 1e-3)
            every = torch.cat([p.grad.reshape(-1) for p in theirs]).numpy()
            _, squares = scan(every, lanes=device.config.lanes)
            assert math.sqrt(squares) == pytest.approx(np.linalg.norm(every), rel=1e-5)
            factor = np.float32(gradient_factor(math.sqrt(squares), bound))
            clipped += factor < 1.0
            scaled(theirs, float(factor))
            optimizer.step()
            reference.step()
            assert_equal_bits(ours, theirs, optimizer, reference)
        assert 0 < clipped < 5
        assert optimizer.traffic.scans == 5


def test_clipping_is_that_of_torch_to_rounding(device, make_parameters, give_gradients):
    ours, theirs = make_parameters(), make_parameters()
    groups = [{"params": ours[:1]}, {"params": ours[1:], "lr": 0.5}]
    other = [{"params": theirs[:1]}, {"params": theirs[1:], "lr": 0.5}]
    optimizer = nearstep.optim.SGD(groups, lr=0.1, device=device, max_grad_norm=1.0)
    reference = torch.optim.SGD(other, lr=0.1)
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        assert torch.nn.utils.clip_grad_norm_(theirs, 1.0) > 1.0
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
def test_scale_and_bound_make_one_factor(
    scaler, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    scale = 2.0**9
    with nearstep.open(URLS["kernel"]) as device:
        optimizer, reference = pair("AdamW", ours, theirs, device, max_grad_norm=3.0)
        each, _ = scalers(scaler, init_scale=scale)
        for _ in range(3):
            give_gradients(ours, theirs)
            scaled(ours, scale)
            every = torch.cat([p.grad.reshape(-1) for p in ours]).numpy()
            _, squares = scan(every, lanes=device.config.lanes)
            factor = gradient_factor(gradient_norm(squares, scale), 3.0, scale)
            scaled(theirs, scale)
            scaled(theirs, float(np.float32(factor)))
            each.step(optimizer)
            each.update(scale)
            reference.step()
            assert_equal_bits(ours, theirs, optimizer, reference)


def test_with_compression_the_norm_is_that_of_what_is_sent(device, make_parameters, give_gradients):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.SGD(
        ours, lr=1.0, device=device, max_grad_norm=0.5, compression=0.01, error_feedback=False
    )
    give_gradients(ours, theirs)
    before = [p.detach().clone() for p in ours]
    optimizer.step()
    moved = torch.cat([(p.detach() - b).reshape(-1) for p, b in zip(ours, before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)
    assert int((moved != 0).sum()) <= optimizer.traffic.pairs


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e30])
def test_a_norm_that_is_not_finite_is_an_error_and_nothing_is_updated(
    bad, device, make_parameters, give_gradients
):
    ours = make_parameters()
    optimizer, _ = pair("AdamW", ours, make_parameters(), device, max_grad_norm=1.0)
    give_gradients(ours)
    optimizer.step()
    before = [p.detach().clone() for p in ours]
    good = ours[2].grad.clone()
    ours[2].grad[3, 1, 2] = bad
    with pytest.raises(GradientError, match="of a finite norm"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    assert optimizer.state[ours[0]]["step"] == 1
    ours[2].grad = good
    optimizer.step()
    assert optimizer.state[ours[0]]["step"] == 2


def test_a_step_without_gradients_has_a_norm_of_zero(device, make_parameters):
    optimizer, _ = pair("AdamW", make_parameters(), make_parameters(), device, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.traffic.scans == 0
    empty = torch.zeros(0, requires_grad=True)
    empty.grad = torch.zeros(0)
    second = nearstep.optim.AdamW([empty], device=device, max_grad_norm=1.0)
    second.step()
    assert second.state[empty]["step"] == 1


@pytest.mark.parametrize("bound", [-1.0, float("nan"), float("inf"), "1", True])
def test_a_bound_that_is_none(bound, device, make_parameters):
    with pytest.raises(HyperparameterError, match="max_grad_norm must be"):
        nearstep.optim.AdamW(make_parameters(), device=device, max_grad_norm=bound)


@pytest.mark.parametrize("options", ["", "&scan=yes", "&gradient_scale=yes"])
def test_a_device_that_cannot_clip_is_refused_and_the_options_named(options, make_parameters):
    with pytest.raises(UnsupportedOptionError, match="scan=yes and gradient_scale=yes"):
        nearstep.optim.AdamW(
            make_parameters(),
            device=f"golden:axdimm?memory_bytes=1MiB{options}",
            max_grad_norm=1.0,
        )


@like_torch
def test_a_scan_that_fails_has_updated_nothing_and_the_step_may_be_repeated(
    device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer, reference = pair("AdamW", ours, theirs, device)
    scaler = nearstep.optim.GradScaler(init_scale=1.0)
    scaler.scale(torch.ones(()))
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    at = optimizer.table.parameters[ours[1]].extent.views("g")[0].address
    device.backend.inject(Injection(kind="slverr", write=False, base=at, limit=at + 4))
    give_gradients(ours, theirs)
    with pytest.raises(BusResponseError):
        scaler.step(optimizer)
    device.backend.heal()
    scaler.step(optimizer)
    scaler.update()
    reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_a_bound_of_any_real_number_is_taken(device, make_parameters, give_gradients):
    ours, same = make_parameters(), make_parameters()
    give_gradients(ours, same)
    nearstep.optim.AdamW(ours, device=device, max_grad_norm=np.float32(1)).step()
    nearstep.optim.AdamW(same, device=device, max_grad_norm=1.0).step()
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))
    for bad in (10**400, np.bool_(True), "1"):
        with pytest.raises(HyperparameterError, match=r"^max_grad_norm must be finite"):
            nearstep.optim.AdamW(make_parameters(), device=device, max_grad_norm=bad)
