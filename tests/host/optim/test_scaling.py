"""Loss scaling and clipping on the device: one factor, and steps that are skipped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import BusResponseError
from nearstep.torch.errors import GradientError, HyperparameterError, UnsupportedOptionError
from nearstep.torch.factor import gradient_factor, gradient_norm
from nearstep_sim.golden.scan import scan

from ..driver.conftest import chosen
from .conftest import IN_DEPTH, like_torch

RULES = "rules=adam,sgd,sgd_momentum,adagrad"
KERNEL = (
    f"{RULES}&scan=yes&gradient_scale=yes&compression=fused"
    "&gradient_formats=fp32,fp16,bf16&memory_bytes=64MiB"
)
URLS = {
    "kernel": f"golden:axdimm?{KERNEL}",
    "dimm": f"golden:axdimm?channels=2&block_bytes=512&{KERNEL}",
    "card": "golden:smartssd?memory_bytes=64MiB",
}
KINDS = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "weight_decay": 0.01},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9, "maximize": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
}
SCALERS = {"torch": torch.amp.GradScaler, "nearstep": nearstep.optim.GradScaler}


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request):
    """A kernel by itself, a DIMM with small stripes and a card, which scan and scale."""
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


def pair(kind, ours, theirs, device, **options):
    name = kind.split()[0]
    return (
        getattr(nearstep.optim, name)(ours, device=device, **KINDS[kind], **options),
        getattr(torch.optim, name)(theirs, fused=True, **KINDS[kind]),
    )


def scalers(kind, **options):
    """One for ours and one for torch's, each with a scale."""
    made = SCALERS[kind]("cpu", **options), torch.amp.GradScaler("cpu", **options)
    for scaler in made:
        scaler.scale(torch.ones(()))
    return made


def scaled(parameters, factor, bad=None):
    for p in parameters:
        if p.grad is not None:
            p.grad *= factor
    if bad is not None:
        parameters[1].grad.view(-1)[3] = bad


@like_torch
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("kind", KINDS)
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
    at = optimizer._residents[ours[1]].extent.views("g")[0].address
    device.backend.inject(Injection(kind="slverr", write=False, base=at, limit=at + 4))
    give_gradients(ours, theirs)
    with pytest.raises(BusResponseError):
        scaler.step(optimizer)
    device.backend.heal()
    scaler.step(optimizer)
    scaler.update()
    reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


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


def test_a_bound_of_any_real_number_is_taken(device, make_parameters, give_gradients):
    ours, same = make_parameters(), make_parameters()
    give_gradients(ours, same)
    nearstep.optim.AdamW(ours, device=device, max_grad_norm=np.float32(1)).step()
    nearstep.optim.AdamW(same, device=device, max_grad_norm=1.0).step()
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))
    for bad in (10**400, np.bool_(True), "1"):
        with pytest.raises(HyperparameterError, match=r"^max_grad_norm must be finite"):
            nearstep.optim.AdamW(make_parameters(), device=device, max_grad_norm=bad)
