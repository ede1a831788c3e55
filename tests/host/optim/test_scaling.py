"""Loss scaling on the device: one factor, and steps that are skipped."""

from __future__ import annotations

import pytest
import torch

import nearstep
from nearstep.torch.errors import HyperparameterError

from .conftest import late_adagrad, like_torch
from .scaling import KINDS, SCALERS, pair, scaled, scalers


@pytest.fixture
def device(scaling_device):
    return scaling_device


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=late_adagrad) if kind == "Adagrad" else kind for kind in KINDS],
)
def test_training_with_a_scaler_is_torchs_with_its_fused_step(
    kind, scaler, device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer, reference = pair(kind, ours, theirs, device)
    both = scalers(scaler, init_scale=2.0**10, growth_interval=2)
    history, skipped = [], 0
    for bad in (None, torch.inf, None, None, torch.nan, -torch.inf, None, None):
        give_gradients(ours, theirs)
        for parameters, stepper, each in zip(
            (ours, theirs), (optimizer, reference), both, strict=True
        ):
            scaled(parameters, each.get_scale(), bad)
            before = [p.grad.clone() for p in parameters]
            each.step(stepper)
            each.update()
        for p, q, given in zip(ours, theirs, before, strict=True):
            expected = q.grad if scaler == "torch" else given
            assert torch.equal(p.grad.view(torch.int32), expected.view(torch.int32))
        assert both[0].get_scale() == both[1].get_scale()
        assert both[0].state_dict() == both[1].state_dict()
        history.append(both[0].get_scale())
        skipped += bad is not None
        assert_equal_bits(ours, theirs, optimizer, reference)
    assert len(set(history)) > 2
    assert optimizer.traffic.steps == 8 - skipped
    assert optimizer.traffic.skipped == skipped
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_scaler_leaves_gradients_divided_whatever_they_are(dtype, device, make_parameters):
    """As torch's fused step does: by any scale, in place; not those whose step was skipped."""
    ours, theirs = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    optimizer, reference = pair("AdamW", ours, theirs, device)
    for scale, bad in ((3.0, None), (1.0, None), (1e3, torch.inf), (0.1, None)):
        kept = []
        for parameters, stepper in ((ours, optimizer), (theirs, reference)):
            generator = torch.Generator().manual_seed(8)
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            if bad is not None:
                parameters[1].grad[0] = bad
            kept.append(parameters[0].grad)
            each = torch.amp.GradScaler("cpu", init_scale=scale)
            each.scale(torch.ones(()))
            each.step(stepper)
        assert kept[0] is ours[0].grad
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p.grad, q.grad)
    ours[0].grad = torch.ones(1, 1, dtype=dtype).expand(ours[0].shape)
    for p in ours[1:]:
        p.grad = None
    optimizer.grad_scale = torch.tensor(2.0)  # torch's scaler itself refuses such a gradient
    optimizer.step()
    assert torch.equal(ours[0].grad, torch.full_like(ours[0], 0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_nothing(kind, device, make_parameters, give_gradients):
    ours = make_parameters()
    optimizer, _ = pair(kind, ours, make_parameters(), device)
    scaler = nearstep.optim.GradScaler(init_scale=2.0**4)
    scaler.scale(torch.ones(()))
    give_gradients(ours)
    optimizer.step()
    parameters = [p.detach().clone() for p in ours]
    saved = optimizer.state_dict()["state"]
    give_gradients(ours)
    scaled(ours, 2.0**4, torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**3
    assert all(torch.equal(a, b) for a, b in zip(ours, parameters, strict=True))
    after = optimizer.state_dict()["state"]
    assert after.keys() == saved.keys()
    for index, state in saved.items():
        assert after[index].keys() == state.keys()
        assert all(torch.equal(after[index][key], value) for key, value in state.items())


@like_torch
def test_a_first_step_that_is_skipped_leaves_the_second_to_be_the_first(
    device, make_parameters, give_gradients, assert_equal_bits
):
    """torch's SGD with momentum takes memory that nobody wrote for the momentum here."""
    ours, theirs = make_parameters(), make_parameters()
    optimizer, reference = pair("SGD with momentum", ours, theirs, device)
    scaler = nearstep.optim.GradScaler(init_scale=2.0)
    scaler.scale(torch.ones(()))
    give_gradients(ours)
    scaled(ours, 2.0, torch.inf)
    scaler.step(optimizer)
    scaler.update(2.0)
    for _ in range(3):
        give_gradients(ours, theirs)
        scaled(ours, 2.0)
        scaler.step(optimizer)
        scaler.update()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_nearsteps_scaler_makes_no_pass_over_the_gradients(
    device, make_parameters, give_gradients, monkeypatch
):
    ours = make_parameters()
    optimizer, _ = pair("AdamW", ours, make_parameters(), device)
    give_gradients(ours)
    before = [p.grad.clone() for p in ours]
    monkeypatch.delattr(torch, "_amp_foreach_non_finite_check_and_unscale_")
    scaler = nearstep.optim.GradScaler()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.traffic.scans == len(device.channels)
    assert all(torch.equal(p.grad, b) for p, b in zip(ours, before, strict=True))
    other = torch.amp.GradScaler("cpu")
    other.scale(torch.ones(()))
    with pytest.raises(AttributeError, match="_amp_foreach_non_finite"):
        other.step(optimizer)


def test_torchs_scaler_looks_itself_and_the_device_does_not_look_again(
    device, make_parameters, give_gradients
):
    ours = make_parameters()
    optimizer, _ = pair("AdamW", ours, make_parameters(), device)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    give_gradients(ours)
    scaler.step(optimizer)
    assert optimizer.traffic.scans == 0
    scaler.update()
    ours[0].grad[0, 0] = torch.inf
    down = optimizer.traffic.gradients_down
    scaler.step(optimizer)
    assert optimizer.traffic.gradients_down == down
    assert optimizer.traffic.skipped == 1


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
def test_gradients_that_the_user_unscaled_are_not_unscaled_again(
    scaler, device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer, reference = pair("AdamW", ours, theirs, device)
    both = scalers(scaler, init_scale=2.0**8)
    for bad in (None, torch.inf, None):
        give_gradients(ours, theirs)
        for parameters, stepper, each in zip(
            (ours, theirs), (optimizer, reference), both, strict=True
        ):
            scaled(parameters, each.get_scale(), bad)
            each.unscale_(stepper)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            each.step(stepper)
            each.update()
        assert both[0].state_dict() == both[1].state_dict()
        assert_equal_bits(ours, theirs, optimizer, reference)
    assert optimizer.traffic.scans == 0


@like_torch
def test_the_whole_loop_with_a_model(device):
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        models.append(
            torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        )
    optimizer, reference = pair("AdamW", models[0].parameters(), models[1].parameters(), device)
    both = scalers("nearstep", init_scale=2.0**120, growth_interval=3)
    for step in range(12):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        for model, stepper, each in zip(models, (optimizer, reference), both, strict=True):
            stepper.zero_grad()
            each.scale(model(x).square().mean() * 4096).backward()
            each.step(stepper)
            each.update()
    assert both[0].state_dict() == both[1].state_dict()
    assert 0 < optimizer.traffic.skipped < 12
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@like_torch
def test_fp16_gradients_stay_scaled_until_they_are_wide(device, make_parameters):
    """Unscaled in fp16 they would be zero; torch's scaler refuses to."""
    ours = make_parameters(((64,), (32,)), torch.float16)
    masters = [p.detach().float().requires_grad_() for p in ours]
    optimizer, reference = pair("AdamW", ours, masters, device)
    scaler = nearstep.optim.GradScaler(init_scale=2.0**14)
    scaler.scale(torch.ones(()))
    for turn in range(3):
        torch.manual_seed(turn)
        for p, master in zip(ours, masters, strict=True):
            p.grad = (torch.randn(p.shape) * 1e-3).half()
            master.grad = p.grad.float() / 2.0**14
            assert not master.grad.half().float().equal(master.grad)
        scaler.step(optimizer)
        scaler.update()
        reference.step()
    for p, master in zip(ours, masters, strict=True):
        assert torch.equal(p, master.half())
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], reference.state[master]["exp_avg_sq"])
    assert optimizer.traffic.gradients_down == 3 * 2 * 96


def test_a_step_that_fails_forgets_the_scale(device, make_parameters, give_gradients):
    ours = make_parameters()
    optimizer, _ = pair("AdamW", ours, make_parameters(), device)
    scaler = nearstep.optim.GradScaler()
    scaler.scale(torch.ones(()))
    give_gradients(ours)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(HyperparameterError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    optimizer.param_groups[0]["lr"] = 1e-3
    ours[0].grad[0, 0] = torch.inf
    optimizer.step()  # nobody asked it to look
    assert optimizer.traffic.steps == 1


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
def test_a_device_that_does_not_scan_leaves_scaling_to_the_host(
    scaler, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    url = "golden:axdimm?memory_bytes=1MiB&gradient_scale=yes"
    optimizer, reference = pair("AdamW", ours, theirs, url)
    assert not optimizer._step_supports_amp_scaling
    both = scalers(scaler, init_scale=2.0**8)
    for bad in (None, torch.inf, None):
        give_gradients(ours, theirs)
        for parameters, stepper, each in zip(
            (ours, theirs), (optimizer, reference), both, strict=True
        ):
            scaled(parameters, each.get_scale(), bad)
            each.step(stepper)
            each.update()
        assert both[0].state_dict() == both[1].state_dict()
    assert_equal_bits(ours, theirs, optimizer, reference)
    assert optimizer.traffic.steps == 2


@pytest.mark.parametrize("scaler", SCALERS)
def test_compressed_gradients_are_unscaled_on_the_host_and_a_skipped_step_keeps_the_residual(
    scaler, device, make_parameters, give_gradients
):
    ours, theirs = make_parameters(), make_parameters()
    optimizers = [
        nearstep.optim.AdamW(ps, lr=1e-2, device=device, compression=0.05) for ps in (ours, theirs)
    ]
    each, _ = scalers(scaler, init_scale=2.0**6)
    for bad in (None, torch.inf, None):
        give_gradients(ours, theirs)
        if bad is None:
            optimizers[1].step()
        else:
            residuals = [optimizers[0].state[p]["residual"].clone() for p in ours]
        scaled(ours, each.get_scale(), bad)
        each.step(optimizers[0])
        each.update(2.0**6)
        if bad is not None:
            for p, residual in zip(ours, residuals, strict=True):
                assert torch.equal(optimizers[0].state[p]["residual"], residual)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for key, value in optimizers[1].state[b].items():
            assert torch.equal(optimizers[0].state[a][key], value)


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scale_of_zero_is_refused(scaler, device, make_parameters, give_gradients):
    ours = make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    zero = SCALERS[scaler]("cpu", init_scale=0.0)
    zero.scale(torch.ones(()))
    give_gradients(ours)
    with pytest.raises(HyperparameterError, match=r"^grad_scale must be finite and above 0, not 0"):
        zero.step(optimizer)
    assert optimizer.traffic.gradients_down == 0
    optimizer.step()
    assert optimizer.traffic.steps == 1
