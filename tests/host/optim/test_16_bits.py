"""fp16 and bf16 parameters: an fp32 master and fp32 moments on the device."""

from __future__ import annotations

import copy
import tracemalloc

import pytest
import torch

import nearstep

from ..driver.conftest import chosen
from .conftest import IN_DEPTH, like_torch

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


@like_torch
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


@like_torch
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


@like_torch
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


@like_torch
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


@like_torch
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


@like_torch
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


NARROW = "gradient_formats=fp32,fp16,bf16&copy_out_formats=fp16,bf16&memory_bytes=64MiB"
NARROW_URLS = {
    "kernel": f"golden:axdimm?{NARROW}",
    "dimm": f"golden:axdimm?channels=2&block_bytes=512&{NARROW}",
    "one lane": f"golden:axdimm?lanes=1&block_bytes=32&{NARROW}",
}


@pytest.fixture(params=chosen(NARROW_URLS, IN_DEPTH))
def narrow_device(request):
    """Devices that read gradients and write copies of 16 bits."""
    with nearstep.open(NARROW_URLS[request.param]) as opened:
        yield opened


@like_torch
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_go_down_and_parameters_come_up_in_16_bits(
    dtype, narrow_device, make_parameters, give_gradients
):
    shapes = [(32, 48), (64,), (16, 3, 5), (16,), (80,)]
    ours = make_parameters(shapes, dtype)
    masters = [p.detach().float().requires_grad_() for p in ours]
    free = narrow_device.free_bytes
    optimizer = nearstep.optim.AdamW(ours, lr=1e-3, device=narrow_device)
    taken = free - narrow_device.free_bytes
    reference = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    steps(3, ours, masters, optimizer, reference, give_gradients)
    assert_rounded(ours, masters, optimizer, reference)
    traffic, elements = optimizer.traffic, sum(p.numel() for p in ours)
    assert free - narrow_device.free_bytes == taken
    assert 16 * elements <= taken < 20 * elements  # p, m, v; g and the copy are halves
    assert traffic.gradients_down == traffic.parameters_up == 3 * 2 * elements
    assert traffic.launches == 3 * len(narrow_device.channels)
    for parameters in (ours, masters):  # split runs, so that they start anywhere
        parameters[1].grad = parameters[3].grad = None
        (optimizer if parameters is ours else reference).step()
    assert_rounded(ours, masters, optimizer, reference)
    saved = optimizer.state_dict()
    assert torch.equal(saved["state"][0]["master_param"], masters[0])


@like_torch
def test_gradients_of_a_format_that_the_kernel_has_not_are_widened(make_parameters, give_gradients):
    ours = make_parameters(dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in ours]
    url = "golden:axdimm?gradient_formats=fp32,fp16&copy_out_formats=bf16&memory_bytes=1MiB"
    optimizer = nearstep.optim.AdamW(ours, lr=1e-3, device=url)
    reference = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    steps(3, ours, masters, optimizer, reference, give_gradients)
    assert_rounded(ours, masters, optimizer, reference)
    elements = sum(p.numel() for p in ours)
    assert optimizer.traffic.gradients_down == 3 * 4 * elements
    assert optimizer.traffic.parameters_up == 3 * 2 * elements


@like_torch
def test_parameters_and_gradients_of_several_formats(narrow_device, give_gradients):
    torch.manual_seed(6)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float16, torch.float32]
    ours = [torch.randn(48).to(dtype).requires_grad_() for dtype in dtypes]
    masters = [p.detach().float().requires_grad_() for p in ours]
    optimizer = nearstep.optim.AdamW(ours, lr=1e-3, device=narrow_device)
    reference = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    for turn in range(4):
        if turn == 2:  # another format than before
            for p in ours:
                p.grad_dtype = None
        give_gradients(ours)
        for p, master in zip(ours, masters, strict=True):
            if turn >= 2:
                p.grad = p.grad.float() * 1.001
            master.grad = p.grad.float()
        optimizer.step()
        reference.step()
    for p, master in zip(ours, masters, strict=True):
        assert torch.equal(p, master.to(p.dtype))
        assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[master]["exp_avg"])


def test_parameters_of_16_bits_that_are_not_contiguous(narrow_device, give_gradients):
    torch.manual_seed(6)
    p = torch.randn(16, 8).half().t().requires_grad_()
    master = p.detach().float().contiguous().requires_grad_()
    optimizer = nearstep.optim.AdamW([p], lr=1e-2, device=narrow_device)
    reference = torch.optim.AdamW([master], lr=1e-2, fused=True)
    steps(3, [p], [master], optimizer, reference, give_gradients)
    assert torch.equal(p, master.half())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _loss_through_a_step(p, optimizer).backward()


def _loss_through_a_step(p, optimizer):
    loss = p.float().square().sum() + p.square().sum()
    optimizer.step()
    return loss


@pytest.mark.parametrize("copied", ["", "&gradient_formats=fp32,bf16&copy_out_formats=bf16"])
@pytest.mark.parametrize("channels", ["", "&channels=2"])
def test_a_step_has_one_result_at_a_time_besides_the_parameters(channels, copied):
    count, elements = 8, 1 << 18
    parameters = [torch.ones(elements, dtype=torch.bfloat16) for _ in range(count)]
    url = f"golden:axdimm?memory_bytes=64MiB{channels}{copied}"
    optimizer = nearstep.optim.AdamW(parameters, lr=0.1, device=url)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    tracemalloc.start()
    try:
        optimizer.step()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    one = elements * (2 if copied else 4)
    assert 0.5 * one < peak < 2.5 * one  # and what is scattered of one channel
    assert all(torch.equal(p, parameters[0]) and p[0] < 0.85 for p in parameters)
