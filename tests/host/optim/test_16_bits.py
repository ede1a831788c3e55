"""fp16 and bf16 parameters: an fp32 master and fp32 moments on the device."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

import nearstep

from ..driver.conftest import chosen
from .beside import Beside, Side, step_alone, tensors
from .conftest import IN_DEPTH, like_torch

DTYPES = [torch.float16, torch.bfloat16]


def test_updates_below_the_precision_of_the_parameter_add_up(device):
    p = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    optimizer = nearstep.optim.AdamW([p], lr=1e-4, weight_decay=0.0, device=device)
    for _ in range(60):  # each moves by 1e-4, a fortieth of the distance to the next bf16
        p.grad = torch.ones(16, dtype=torch.bfloat16)
        optimizer.step()
    torch.testing.assert_close(p.float(), torch.full((16,), 1 - 60e-4), atol=2e-3, rtol=0)
    assert p.detach().max() < 1.0


@like_torch
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clipping_changes_only_the_masters_of_elements_that_it_changed(dtype, device):
    beside = Beside("AdamW", device, dtype=dtype)
    beside.step(5)
    limit = 0.5  # has 16 bits
    with torch.no_grad():
        for p, master in zip(*(side.parameters for side in beside), strict=True):
            beyond = p.abs() > limit
            p.clamp_(-limit, limit)
            master[beyond] = p[beyond].float()
            assert 0 < int(beyond.sum()) < p.numel()
    beside.step(2)
    beside.check()


@like_torch
def test_a_model_that_is_narrowed_after_the_optimizer_was_made(device):
    torch.manual_seed(5)
    model = torch.nn.Linear(16, 16)
    beside = Beside("AdamW", device, [p.detach() for p in model.parameters()])
    beside.mine = Side(
        list(model.parameters()), nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=device)
    )
    beside.step(2)
    model.bfloat16()  # the masters keep the bits that the parameters lose
    model.zero_grad()
    beside.step(2)
    beside.check()


@like_torch
def test_gradients_of_another_precision_than_the_parameters(device):
    beside = Beside("AdamW", device, tensors([(16,)]))
    (p,), (q,) = (side.parameters for side in beside)
    p.grad_dtype = torch.bfloat16
    p.grad = torch.linspace(-1, 1, 16).bfloat16()
    q.grad = p.grad.float()
    step_alone(beside)
    beside.check()


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
def test_gradients_go_down_and_parameters_come_up_in_16_bits(dtype, narrow_device):
    free = narrow_device.free_bytes
    beside = Beside(
        "AdamW", narrow_device, tensors([(32, 48), (64,), (16, 3, 5), (16,), (80,)]), dtype=dtype
    )
    taken = free - narrow_device.free_bytes
    beside.step(3)
    beside.check()
    optimizer = beside.mine.optimizer
    traffic, elements = optimizer.traffic, sum(p.numel() for p in beside.mine.parameters)
    assert free - narrow_device.free_bytes == taken
    assert 16 * elements <= taken < 20 * elements  # p, m, v; g and the copy are halves
    assert traffic.gradients_down == traffic.parameters_up == 3 * 2 * elements
    assert traffic.launches == 3 * len(narrow_device.channels)
    beside.step(1, (1, 3))  # split runs, so that they start anywhere
    beside.check()
    master = optimizer.state_dict()["state"][0]["master_param"]
    assert torch.equal(master, beside.torchs.parameters[0])


@like_torch
def test_gradients_of_a_format_that_the_kernel_has_not_are_widened():
    url = "golden:axdimm?gradient_formats=fp32,fp16&copy_out_formats=bf16&memory_bytes=1MiB"
    beside = Beside("AdamW", url, dtype=torch.bfloat16)
    beside.step(3)
    beside.check()
    traffic = beside.mine.optimizer.traffic
    elements = sum(p.numel() for p in beside.mine.parameters)
    assert traffic.gradients_down == 3 * 4 * elements
    assert traffic.parameters_up == 3 * 2 * elements


@like_torch
def test_parameters_and_gradients_of_several_formats(narrow_device):
    beside = Beside("AdamW", narrow_device, tensors([(48,)] * 5))
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float16, torch.float32]
    ours, masters = (side.parameters for side in beside)
    for index, dtype in enumerate(dtypes):
        ours[index] = ours[index].detach().to(dtype).requires_grad_()
        masters[index].data = ours[index].detach().float().clone()
    beside.mine.optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=narrow_device)
    for turn in range(4):
        beside.give()
        for p, master in zip(ours, masters, strict=True):
            if turn >= 2:  # another format than before
                p.grad_dtype = None
                p.grad = p.grad.float() * 1.001
                master.grad = p.grad.clone()
        step_alone(beside)
    beside.check()


@like_torch
def test_parameters_of_16_bits_that_are_not_contiguous(narrow_device):
    beside = Beside("AdamW", narrow_device, [tensors([(16, 8)])[0].half().t()], dtype=torch.half)
    (p,) = beside.mine.parameters
    assert not p.is_contiguous()
    beside.step(3)
    beside.check()
    loss = p.float().square().sum() + p.square().sum()
    beside.mine.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
