"""Loss scaling on the device: one factor, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nearstep
from nearstep.torch.errors import HyperparameterError

from ..driver.conftest import chosen
from .beside import Beside, Side, clone, made
from .conftest import IN_DEPTH, bits, late_adagrad, like_torch
from .scaling import KINDS, SCALERS, URLS, scaled, scaled_step, scalers


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request: pytest.FixtureRequest) -> Iterator[nearstep.Device]:
    """A kernel by itself, a DIMM with small stripes and a card, which scan and scale."""
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


def steps_of(optimizer: Any) -> tuple[int, int, int]:
    traffic = optimizer.traffic
    return traffic.steps, traffic.skipped, traffic.scans


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=late_adagrad) if kind == "Adagrad" else kind for kind in KINDS],
)
def test_training_with_a_scaler_is_torchs_with_its_fused_step(kind, scaler, device):
    beside = Beside(kind, device, maximize=kind == "momentum")
    both = scalers(scaler, init_scale=2.0**10, growth_interval=2)
    history = []
    for bad in (None, torch.inf, None, None, torch.nan, -torch.inf, None, None):
        given = scaled_step(beside, both, bad)
        for p, q, before in zip(*(side.parameters for side in beside), given, strict=True):
            assert torch.equal(bits(p.grad), bits(q.grad if scaler == "torch" else before))
        history.append(both[0].get_scale())
        beside.check(gradients=False)
    assert len(set(history)) > 2
    assert steps_of(beside.mine.optimizer)[:2] == (5, 3)
    assert not hasattr(beside.mine.optimizer, "grad_scale")
    assert not hasattr(beside.mine.optimizer, "found_inf")


@like_torch
@late_adagrad
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_on_the_processor_with_a_scaler_as_in_torch(kind):
    beside = Beside(kind, "host:")
    models = []
    for side in beside:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)
        )
        where = "host:" if side is beside.mine else None
        side.parameters = list(model.parameters())
        side.optimizer = made(kind, side.parameters, where)
        models.append(model)
    both = scalers("torch", init_scale=1000.0, growth_interval=2, growth_factor=3)
    for step in range(6):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        if step == 3:
            inputs[0, 0] = torch.inf
        for side, model, scaler in zip(beside, models, both, strict=True):
            side.optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(side.optimizer)
            scaler.update()
    assert [scaler.get_scale() for scaler in both] == [1000.0 * 3 * 0.5 * 3] * 2
    beside.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_scaler_leaves_gradients_divided_whatever_they_are(dtype, device):
    """As torch's fused step does: by any scale, in place; not those whose step was skipped."""
    beside = Beside("AdamW", device, dtype=dtype)
    ours, theirs = (side.parameters for side in beside)
    theirs[:] = clone(ours)
    beside.torchs.optimizer = made("AdamW", theirs)
    for scale, bad in ((3.0, None), (1.0, None), (1e3, torch.inf), (0.1, None)):
        kept = []
        for side in beside:
            generator = torch.Generator().manual_seed(8)
            for p in side.parameters:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            if bad is not None:
                side.parameters[1].grad[0] = bad
            kept.append(side.parameters[0].grad)
            each = torch.amp.GradScaler("cpu", init_scale=scale)
            each.scale(torch.ones(()))
            each.step(side.optimizer)
        assert kept[0] is ours[0].grad
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours, theirs, strict=True))
    ours[0].grad = torch.ones(1, 1, dtype=dtype).expand(ours[0].shape)
    for p in ours[1:]:
        p.grad = None
    optimizer = beside.mine.optimizer
    optimizer.grad_scale = torch.tensor(2.0)  # torch's scaler itself refuses such a gradient
    optimizer.step()
    assert torch.equal(ours[0].grad, torch.full_like(ours[0], 0.5))


@like_torch
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_nothing(kind, first, device):
    """torch's SGD takes memory that nobody wrote for the momentum of a first step that is one."""
    beside = Beside(kind, device)
    optimizer, ours = beside.mine.optimizer, beside.mine.parameters
    scaler = nearstep.optim.GradScaler(init_scale=2.0**4)
    scaler.scale(torch.ones(()))
    beside.step(0 if first else 1)
    before, saved = clone(ours), optimizer.state_dict()["state"]
    beside.give()
    scaled(ours, 2.0**4, torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**3
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    after = optimizer.state_dict()["state"]
    assert first or after.keys() == saved.keys()
    for index, state in saved.items():
        assert after[index].keys() == state.keys()
        assert all(torch.equal(after[index][key], value) for key, value in state.items())
    for _ in range(3):
        beside.give()
        scaled(ours, 2.0**3)
        scaler.step(optimizer)
        scaler.update(2.0**3)
        beside.torchs.optimizer.step()
    beside.check(gradients=False)


def test_nearsteps_scaler_makes_no_pass_over_the_gradients(device, monkeypatch):
    beside = Beside("AdamW", device)
    optimizer, ours = beside.mine.optimizer, beside.mine.parameters
    beside.give()
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


def test_torchs_scaler_looks_itself_and_the_device_does_not_look_again(device):
    beside = Beside("AdamW", device)
    optimizer = beside.mine.optimizer
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    beside.give()
    scaler.step(optimizer)
    scaler.update()
    assert steps_of(optimizer) == (1, 0, 0)
    beside.mine.parameters[0].grad[0, 0] = torch.inf
    down = optimizer.traffic.gradients_down
    scaler.step(optimizer)
    assert optimizer.traffic.gradients_down == down
    assert optimizer.traffic.skipped == 1


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
def test_gradients_that_the_user_unscaled_are_not_unscaled_again(scaler, device):
    def clip(side: Side, each: torch.amp.GradScaler) -> None:
        each.unscale_(side.optimizer)
        torch.nn.utils.clip_grad_norm_(side.parameters, 1.0)

    beside, both = Beside("AdamW", device), scalers(scaler, init_scale=2.0**8)
    for bad in (None, torch.inf, None):
        scaled_step(beside, both, bad, clip)
        beside.check(gradients=bad is None)
    assert steps_of(beside.mine.optimizer) == (2, 1, 0)


@like_torch
def test_the_whole_loop_with_a_model(device):
    beside, models = Beside("AdamW", device), []
    for side in beside:
        torch.manual_seed(4)
        models.append(
            torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        )
        side.parameters = list(models[-1].parameters())
        side.optimizer = made("AdamW", side.parameters, device if side is beside.mine else None)
    both = scalers("nearstep", init_scale=2.0**120, growth_interval=3)
    for step in range(12):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        for model, side, each in zip(models, beside, both, strict=True):
            side.optimizer.zero_grad()
            each.scale(model(x).square().mean() * 4096).backward()
            each.step(side.optimizer)
            each.update()
    assert both[0].state_dict() == both[1].state_dict()
    assert 0 < beside.mine.optimizer.traffic.skipped < 12
    beside.check(gradients=False)


@like_torch
def test_fp16_gradients_stay_scaled_until_they_are_wide(device):
    """Unscaled in fp16 they would be zero; torch's scaler refuses to."""
    contents = [torch.linspace(-1, 1, size) for size in (64, 32)]
    beside = Beside("AdamW", device, contents, dtype=torch.float16)
    scaler = nearstep.optim.GradScaler(init_scale=2.0**14)
    scaler.scale(torch.ones(()))
    for turn in range(3):
        torch.manual_seed(turn)
        for p, master in zip(*(side.parameters for side in beside), strict=True):
            p.grad = (torch.randn(p.shape) * 1e-3).half()
            master.grad = p.grad.float() / 2.0**14
            assert not master.grad.half().float().equal(master.grad)
        scaler.step(beside.mine.optimizer)
        scaler.update()
        beside.torchs.optimizer.step()
    beside.check(gradients=False)
    assert beside.mine.optimizer.traffic.gradients_down == 3 * 2 * 96


def test_a_step_that_fails_forgets_the_scale(device):
    beside = Beside("AdamW", device)
    optimizer = beside.mine.optimizer
    scaler = nearstep.optim.GradScaler()
    scaler.scale(torch.ones(()))
    beside.give()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(HyperparameterError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    optimizer.param_groups[0]["lr"] = 1e-3
    beside.mine.parameters[0].grad[0, 0] = torch.inf
    optimizer.step()  # nobody asked it to look
    assert optimizer.traffic.steps == 1


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("options", ["", "&gradient_scale=yes"], ids=["neither", "scales"])
def test_a_device_that_does_not_scan_leaves_scaling_to_the_host(options, scaler):
    beside = Beside("AdamW", f"golden:axdimm?memory_bytes=1MiB{options}")
    assert not beside.mine.optimizer._step_supports_amp_scaling
    both = scalers(scaler, init_scale=2.0**8)
    for bad in (None, torch.inf, None):
        scaled_step(beside, both, bad)
    beside.check()
    assert beside.mine.optimizer.traffic.steps == 2


@pytest.mark.parametrize("scaler", SCALERS)
def test_compressed_gradients_are_unscaled_on_the_host_and_a_skipped_step_keeps_the_residual(
    scaler, device
):
    pair = [Beside("AdamW", device, own={"compression": 0.05}) for _ in range(2)]
    one, other = (beside.mine for beside in pair)
    each, _ = scalers(scaler, init_scale=2.0**6)
    for bad in (None, torch.inf, None):
        for beside in pair:
            beside.give()
        if bad is None:
            other.optimizer.step()
        else:
            residuals = [one.state[p]["residual"].clone() for p in one.parameters]
        scaled(one.parameters, each.get_scale(), bad)
        each.step(one.optimizer)
        each.update(2.0**6)
        if bad is not None:
            for p, residual in zip(one.parameters, residuals, strict=True):
                assert torch.equal(one.state[p]["residual"], residual)
    for a, b in zip(one.parameters, other.parameters, strict=True):
        assert torch.equal(a, b)
        assert all(torch.equal(one.state[a][key], value) for key, value in other.state[b].items())


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scale_of_zero_is_refused(scaler, device):
    beside = Beside("AdamW", device)
    optimizer = beside.mine.optimizer
    zero = SCALERS[scaler]("cpu", init_scale=0.0)
    zero.scale(torch.ones(()))
    beside.give()
    with pytest.raises(HyperparameterError, match=r"^grad_scale must be finite and above 0, not 0"):
        zero.step(optimizer)
    assert optimizer.traffic.gradients_down == 0
    optimizer.step()
    assert optimizer.traffic.steps == 1
