"""How training code uses an optimizer: closures, schedulers, hooks, scalers, frozen parameters."""

from __future__ import annotations

import gc

import pytest
import torch

import nearstep
from nearstep.errors import ClosedDeviceError

from .conftest import like_torch


@like_torch
def test_a_closure_runs_once_with_gradients_and_its_loss_is_returned(
    device, make_parameters, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    calls = []

    def closure(parameters, chosen):
        def evaluate():
            assert torch.is_grad_enabled()
            calls.append(chosen)
            chosen.zero_grad()
            loss = sum(p.square().sum() for p in parameters)
            loss.backward()
            return loss

        return evaluate

    for _ in range(3):
        with torch.no_grad():
            assert optimizer.step(closure(ours, optimizer)) == reference.step(
                closure(theirs, reference)
            )
    assert calls.count(optimizer) == 3
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_step_without_a_closure_returns_none(device, make_parameters, give_gradients):
    ours = make_parameters()
    give_gradients(ours)
    assert nearstep.optim.AdamW(ours, device=device).step() is None


@like_torch
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad(set_to_none, device, make_parameters, give_gradients, assert_equal_bits):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    reference = torch.optim.AdamW(theirs, fused=True)
    for _ in range(2):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
        for chosen in (optimizer, reference):
            chosen.zero_grad(set_to_none=set_to_none)
            chosen.step()  # without gradients, or with gradients of zero: like torch
    expected = 2 if set_to_none else 4
    assert optimizer.state[ours[0]]["step"] == expected
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_a_step_without_any_gradient_does_nothing(device, make_parameters):
    ours = make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    optimizer.step()
    assert optimizer.traffic.launches == 0
    assert not optimizer.state


@like_torch
def test_parameters_without_gradient_are_skipped_and_their_step_count_stays(
    device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for skipped in (None, 1, 0, None, 2):
        give_gradients(ours, theirs)
        if skipped is not None:
            ours[skipped].grad = theirs[skipped].grad = None
        optimizer.step()
        reference.step()
    assert [int(optimizer.state[p]["step"]) for p in ours] == [4, 4, 4]
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_one_run_of_the_kernel_for_neighbours_of_equal_group_and_step(
    device, make_parameters, give_gradients
):
    ours = make_parameters([(20,), (3,), (16,), (5, 5)])
    optimizer = nearstep.optim.AdamW(
        [{"params": ours[:3]}, {"params": ours[3:], "lr": 0.1}], device=device
    )
    give_gradients(ours)
    optimizer.step()
    assert optimizer.traffic.launches == 2
    ours[1].grad = None
    optimizer.step()
    assert optimizer.traffic.launches == 2 + 3
    give_gradients(ours)
    optimizer.step()  # steps 3, 2, 3 and 3
    assert optimizer.traffic.launches == 5 + 4


@like_torch
def test_frozen_parameters_take_no_memory_until_they_are_thawed(
    device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    for parameters in (ours, theirs):
        parameters[0].requires_grad_(False)
    free = device.free_bytes
    optimizer = nearstep.optim.AdamW(ours, device=device)
    reference = torch.optim.AdamW(theirs, fused=True)
    trained = sum(p.numel() for p in ours[1:])
    assert 16 * trained <= free - device.free_bytes < 16 * (trained + ours[0].numel())
    give_gradients(ours[1:], theirs[1:])
    optimizer.step()
    reference.step()
    assert ours[0] not in optimizer.state
    for parameters in (ours, theirs):
        parameters[0].requires_grad_(True)
    for _ in range(2):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_a_group_added_after_steps(device, make_parameters, give_gradients, assert_equal_bits):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours[:1], lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs[:1], lr=1e-2, fused=True)
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    optimizer.add_param_group({"params": ours[1:], "lr": 1e-3, "weight_decay": 0.5})
    reference.add_param_group({"params": theirs[1:], "lr": 1e-3, "weight_decay": 0.5})
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
@pytest.mark.parametrize(
    "schedule",
    [
        lambda chosen: torch.optim.lr_scheduler.CosineAnnealingLR(chosen, T_max=5),
        lambda chosen: torch.optim.lr_scheduler.LinearLR(chosen, total_iters=4),
        lambda chosen: torch.optim.lr_scheduler.OneCycleLR(chosen, max_lr=0.1, total_steps=8),
    ],
    ids=["cosine", "linear", "one_cycle"],  # the last one changes beta1, too
)
def test_learning_rate_schedulers(
    schedule, device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    schedulers = schedule(optimizer), schedule(reference)
    for _ in range(6):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_grad_scaler_unscales_and_skips_steps_with_an_inf(
    device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.ones(()))  # makes the scale
    for round_number in range(4):
        give_gradients(ours, theirs)
        for parameters in (ours, theirs):
            for p in parameters:
                p.grad *= 2.0**10
            if round_number == 2:
                parameters[1].grad[0] = torch.inf
        for scaler, chosen in zip(scalers, (optimizer, reference), strict=True):
            scaler.step(chosen)
            scaler.update()
        if round_number == 2:
            for scaler in scalers:
                assert scaler.get_scale() == 2.0**9
                scaler.update(2.0**10)
    assert optimizer.traffic.steps == 3
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_clip_grad_norm(device, make_parameters, give_gradients, assert_equal_bits):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(3):
        give_gradients(ours, theirs)
        for parameters, chosen in ((ours, optimizer), (theirs, reference)):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            chosen.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_step_hooks_and_the_profiler_see_the_step(device, make_parameters, give_gradients):
    ours = make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    give_gradients(ours)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert seen == ["pre", "post"]
    names = {event.name for event in profile.events()}
    assert "Optimizer.step#AdamW.step" in names
    handle.remove()
    optimizer.step()
    assert seen == ["pre", "post", "pre"]


def test_a_plain_step_moves_gradients_down_and_parameters_up_and_nothing_else(
    device, make_parameters, give_gradients
):
    ours = make_parameters()
    elements = sum(p.numel() for p in ours)
    optimizer = nearstep.optim.AdamW(ours, device=device)
    give_gradients(ours)
    optimizer.step()
    first = optimizer.traffic.as_dict()
    assert first["masters_down"] == 4 * elements
    assert first["moments_down"] == first["moments_up"] == 0
    written, read = _count_bytes(device)
    for _ in range(3):
        give_gradients(ours)
        optimizer.step()
    change = {k: v - first[k] for k, v in optimizer.traffic.as_dict().items() if k.endswith("s")
              and isinstance(v, int)}  # fmt: skip
    assert change["steps"] == 3
    assert change["elements"] == 3 * elements
    after = optimizer.traffic
    assert after.gradients_down - first["gradients_down"] == 3 * 4 * elements
    assert after.parameters_up - first["parameters_up"] == 3 * 4 * elements
    assert after.masters_down == first["masters_down"]
    assert after.masters_up == after.moments_down == after.moments_up == 0
    assert sum(written) == sum(read) == 3 * 4 * elements


def _count_bytes(device):
    """Lists that get the size of every copy to and from device memory, from now on."""
    written, read = [], []
    write_memory, read_memory = device.backend.write_memory, device.backend.read_memory

    def write(address, data):
        written.append(data.nbytes)
        write_memory(address, data)

    def fetch(address, out):
        read.append(out.nbytes)
        read_memory(address, out)

    device.backend.write_memory, device.backend.read_memory = write, fetch
    return written, read


@like_torch
def test_two_optimizers_on_one_device(device, make_parameters, give_gradients, assert_equal_bits):
    ours, theirs = [make_parameters() for _ in range(2)], [make_parameters() for _ in range(2)]
    optimizers = [
        nearstep.optim.AdamW(ours[0], lr=1e-2, device=device),
        nearstep.optim.Adam(ours[1], lr=1e-3, device=device),
    ]
    references = [
        torch.optim.AdamW(theirs[0], lr=1e-2, fused=True),
        torch.optim.Adam(theirs[1], lr=1e-3, fused=True),
    ]
    for _ in range(3):
        for index in range(2):
            give_gradients(ours[index], theirs[index])
            optimizers[index].step()
            references[index].step()
    for index in range(2):
        assert_equal_bits(ours[index], theirs[index], optimizers[index], references[index])


def test_an_optimizer_that_is_gone_gives_its_memory_back(device, make_parameters, give_gradients):
    free = device.free_bytes
    ours = make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=device)
    give_gradients(ours)
    optimizer.step()
    assert device.free_bytes < free
    del optimizer
    gc.collect()
    assert device.free_bytes == free
    assert not device.closed


def test_a_device_opened_by_name_is_closed_with_its_last_optimizer(make_parameters):
    optimizer = nearstep.optim.AdamW(make_parameters(), device="golden:axdimm?memory_bytes=1MiB")
    opened = optimizer.device
    del optimizer
    gc.collect()
    assert opened.closed


def test_a_step_on_a_closed_device(make_parameters, give_gradients):
    ours = make_parameters()
    with nearstep.open("golden:axdimm?memory_bytes=1MiB") as device:
        optimizer = nearstep.optim.AdamW(ours, device=device)
    give_gradients(ours)
    with pytest.raises(ClosedDeviceError):
        optimizer.step()


def test_the_paper_order_trains_too(make_parameters, give_gradients):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(
        ours, lr=1e-2, device="golden:axdimm?memory_bytes=1MiB&order=paper"
    )
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(4):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
