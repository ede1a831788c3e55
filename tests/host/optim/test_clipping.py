"""Clipping on the device: the norm of the scan, and one factor with the scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import BusResponseError
from nearstep.torch.clipping import clip_coefficient, gradient_norm
from nearstep.torch.errors import GradientError, HyperparameterError, UnsupportedOptionError
from nearstep_sim.golden.scan import scan

from .beside import Beside, clone, step_alone, tensors
from .conftest import like_torch
from .scaling import KINDS, SCALERS, URLS, scaled, scalers
from .test_scaling import device

__all__ = ["device"]


def test_the_factor_is_that_of_clip_grad_norm():
    compared = 0
    for norm in (0.0, 1e-7, 0.5, 1.0, 3.0, 1e30):
        for bound in (0.0, 1e-3, 1.0, 2.0):
            p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
            p.grad = torch.tensor([norm], dtype=torch.float64)
            torch.nn.utils.clip_grad_norm_([p], bound)
            assert clip_coefficient(norm, bound) * norm == pytest.approx(p.grad.item(), rel=1e-12)
            assert clip_coefficient(norm, bound, 8.0) == clip_coefficient(norm, bound) / 8.0
            compared += 1
    assert compared == 24
    assert clip_coefficient(math.nan, None) == 1.0
    assert clip_coefficient(math.nan, None, 4.0) == 0.25
    assert gradient_norm(64.0, 4.0) == 2.0


def squares_of(parameters, device):
    """The golden scan of all gradients: with one channel and one run the device has it."""
    every = torch.cat([p.grad.reshape(-1) for p in parameters]).numpy()
    _, squares = scan(every, lanes=device.config.lanes)
    assert math.sqrt(squares) == pytest.approx(np.linalg.norm(every), rel=1e-5)
    return squares


@like_torch
@pytest.mark.parametrize("kind", KINDS)
def test_a_clipped_step_is_torchs_on_gradients_times_the_factor(kind):
    bound, clipped = 50.0, 0
    with nearstep.open(URLS["kernel"]) as device:
        beside = Beside(kind, device, own={"max_grad_norm": bound})
        for turn in range(5):
            beside.give()
            if turn == 2:
                for side in beside:
                    scaled(side.parameters, 1e-3)
            squares = squares_of(beside.torchs.parameters, device)
            factor = np.float32(clip_coefficient(math.sqrt(squares), bound))
            clipped += factor < 1.0
            scaled(beside.torchs.parameters, float(factor))
            step_alone(beside)
            beside.check(gradients=False)
        assert 0 < clipped < 5
        assert beside.mine.optimizer.traffic.scans == 5


def test_clipping_is_that_of_torch_to_rounding(device):
    beside = Beside(
        "SGD",
        device,
        grouped=lambda ps: [{"params": ps[:1]}, {"params": ps[1:], "lr": 0.5}],
        own={"max_grad_norm": 1.0},
    )
    for _ in range(3):
        beside.give()
        assert torch.nn.utils.clip_grad_norm_(beside.torchs.parameters, 1.0) > 1.0
        step_alone(beside)
    for a, b in zip(*(side.parameters for side in beside), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
def test_scale_and_bound_make_one_factor(scaler):
    scale = 2.0**9
    with nearstep.open(URLS["kernel"]) as device:
        beside = Beside("AdamW", device, own={"max_grad_norm": 3.0})
        each, _ = scalers(scaler, init_scale=scale)
        for _ in range(3):
            beside.give()
            for side in beside:
                scaled(side.parameters, scale)
            squares = squares_of(beside.torchs.parameters, device)
            factor = clip_coefficient(gradient_norm(squares, scale), 3.0, scale)
            scaled(beside.torchs.parameters, float(np.float32(factor)))
            each.step(beside.mine.optimizer)
            each.update(scale)
            beside.torchs.optimizer.step()
            beside.check(gradients=False)


def test_with_compression_the_norm_is_that_of_what_is_sent(device):
    own = {"max_grad_norm": 0.5, "compression": 0.01, "error_feedback": False}
    beside = Beside("SGD", device, own=own, lr=1.0, weight_decay=0.0)
    before = clone(beside.mine.parameters)
    beside.step()
    pairs = zip(beside.mine.parameters, before, strict=True)
    moved = torch.cat([(p - b).detach().reshape(-1) for p, b in pairs])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)
    assert int((moved != 0).sum()) <= beside.mine.optimizer.traffic.pairs


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e30])
def test_a_norm_that_is_not_finite_is_an_error_and_nothing_is_updated(bad, device):
    beside = Beside("AdamW", device, own={"max_grad_norm": 1.0})
    ours, optimizer = beside.mine.parameters, beside.mine.optimizer
    beside.step()
    before, good = clone(ours), ours[2].grad.clone()
    ours[2].grad[3, 1, 2] = bad
    with pytest.raises(GradientError, match="of a finite norm"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    assert optimizer.state[ours[0]]["step"] == 1
    ours[2].grad = good
    optimizer.step()
    assert optimizer.state[ours[0]]["step"] == 2


def test_a_step_without_gradients_has_a_norm_of_zero(device):
    optimizer = Beside("AdamW", device, own={"max_grad_norm": 1.0}).mine.optimizer
    optimizer.step()
    assert optimizer.traffic.scans == 0
    empty = Beside("AdamW", device, tensors([(0,)]), own={"max_grad_norm": 1.0})
    empty.step()
    assert empty.mine.state[empty.mine.parameters[0]]["step"] == 1


BOUNDS = [-1.0, float("nan"), float("inf"), "1", True, 10**400, np.bool_(True)]


@pytest.mark.parametrize("bound", BOUNDS, ids=[str(each)[:5] for each in BOUNDS])
def test_a_bound_that_is_none(bound, device):
    with pytest.raises(HyperparameterError, match=r"^max_grad_norm must be finite"):
        Beside("AdamW", device, own={"max_grad_norm": bound})


@pytest.mark.parametrize("options", ["", "&scan=yes", "&gradient_scale=yes"])
def test_a_device_that_cannot_clip_is_refused_and_the_options_named(options):
    url = f"golden:axdimm?memory_bytes=1MiB{options}"
    with pytest.raises(UnsupportedOptionError, match="scan=yes and gradient_scale=yes"):
        Beside("AdamW", url, own={"max_grad_norm": 1.0})


@like_torch
def test_a_scan_that_fails_has_updated_nothing_and_the_step_may_be_repeated(device):
    beside = Beside("AdamW", device)
    optimizer = beside.mine.optimizer
    scaler = nearstep.optim.GradScaler(init_scale=1.0)
    scaler.scale(torch.ones(()))
    beside.step()
    at = optimizer.table.parameters[beside.mine.parameters[1]].extent.views("g")[0].address
    device.backend.inject(Injection(kind="slverr", write=False, base=at, limit=at + 4))
    beside.give()
    with pytest.raises(BusResponseError):
        scaler.step(optimizer)
    device.backend.heal()
    scaler.step(optimizer)
    scaler.update()
    beside.torchs.optimizer.step()
    beside.check()


def test_a_bound_of_any_real_number_is_taken(device):
    pair = [Beside("AdamW", device, own={"max_grad_norm": each}) for each in (np.float32(1), 1.0)]
    for beside in pair:
        beside.step()
    ours = (beside.mine.parameters for beside in pair)
    assert all(torch.equal(a, b) for a, b in zip(*ours, strict=True))
