"""`maximize`: who negates the gradients, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nearstep
from nearstep.torch import convert
from nearstep.torch.compression import Compression
from nearstep.torch.errors import UnsupportedOptionError

from ..driver.conftest import chosen
from .conftest import IN_DEPTH, like_torch

FORMATS = "gradient_formats=fp32,fp16,bf16&memory_bytes=64MiB"
SCALES = "golden:axdimm?gradient_scale=yes&scan=yes&compression=fused,scatter&" + FORMATS
URLS = {
    "host": f"golden:axdimm?{FORMATS}",
    "kernel": SCALES,
    "dimm": f"{SCALES}&channels=2&block_bytes=512",
    "card": "golden:smartssd?memory_bytes=64MiB",
}
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request):
    """Devices without and with kernels that scale."""
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


def negate(parameters):
    for p in parameters:
        p.grad = -p.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_bit_but_the_sign_of_a_number_is_kept(dtype):
    generator = torch.Generator().manual_seed(3)
    words = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(words)
    patterns = torch.randint(limits.min, limits.max, (10_000,), generator=generator, dtype=words)
    patterns[:3] = torch.tensor([0, limits.min, -1], dtype=words)
    array = convert.to_words(patterns.view(dtype))
    before = array.copy()
    flipped = convert.negated(array)
    assert flipped.dtype == array.dtype
    unsigned = f"u{array.itemsize}"
    changed = flipped.view(unsigned) ^ before.view(unsigned)
    assert (changed == np.array(limits.min, f"i{array.itemsize}").view(unsigned)).all()
    assert (array.view(unsigned) == before.view(unsigned)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_a_step_with_negated_gradients_and_leaves_them_as_they_are(
    dtype, device, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    optimizer = nearstep.optim.Adam(ours, lr=1e-2, weight_decay=0.1, device=device, maximize=True)
    reference = nearstep.optim.Adam(theirs, lr=1e-2, weight_decay=0.1, device=device)
    for _ in range(3):
        give_gradients(ours, theirs)
        negate(theirs)
        optimizer.step()
        reference.step()
        assert all(torch.equal(a.grad, -b.grad) for a, b in zip(ours, theirs, strict=True))
    assert_equal_bits(ours, theirs, optimizer, reference)
    assert optimizer.traffic.gradients_down == reference.traffic.gradients_down


@like_torch
@pytest.mark.parametrize("device", ["kernel", "dimm", "card"], indirect=True)
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_what_is_not_sent_is_negated_too(
    form, feedback, device, make_parameters, give_gradients, assert_equal_bits
):
    """torch makes -0 of the zeros between what is kept, and momentum shows it."""
    if "sgd_momentum" not in device.config.rules:
        kind, options = "AdamW", {"lr": 1e-2}
    else:
        kind, options = "SGD", MOMENTUM
    ours, theirs = make_parameters(), make_parameters()
    compressed = {"error_feedback": feedback, "compression_format": form}
    optimizer = getattr(nearstep.optim, kind)(
        ours, device=device, maximize=True, compression=0.05, **compressed, **options
    )
    reference = getattr(torch.optim, kind)(theirs, fused=True, maximize=True, **options)
    compression = Compression(share=0.05, error_feedback=feedback, format=form)
    residuals = [None] * len(theirs)
    for turn in range(4):
        for each in (optimizer, reference):
            each.param_groups[0]["maximize"] = turn != 2
        give_gradients(ours, theirs)
        for i, p in enumerate(theirs):
            done = compression.compress(convert.to_float32(p.grad), residuals[i])
            dense = np.zeros(p.numel(), np.float32)
            dense[done.index] = convert.widen(done.value)
            p.grad, residuals[i] = torch.from_numpy(dense).view(p.shape), done.residual
        optimizer.step()
        reference.step()
    for p, residual in zip(ours, residuals, strict=True):
        kept = optimizer.state[p].pop("residual", None)
        assert (kept is None) == (residual is None)
        assert kept is None or kept.numpy().tobytes() == residual.tobytes()
    assert_equal_bits(ours, theirs, optimizer, reference)


@pytest.mark.parametrize("device", ["kernel", "card"], indirect=True)
def test_the_norm_is_clipped_alike(device, make_parameters, give_gradients, assert_equal_bits):
    ours, theirs = make_parameters(), make_parameters()
    options = {"lr": 1e-2, "max_grad_norm": 0.5, "device": device}
    optimizer = nearstep.optim.AdamW(ours, maximize=True, **options)
    reference = nearstep.optim.AdamW(theirs, **options)
    for _ in range(3):
        give_gradients(ours, theirs)
        negate(theirs)
        optimizer.step()
        reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_compression_without_a_kernel_that_scales_is_refused_by_name(make_parameters):
    ours = make_parameters()
    with nearstep.open(f"golden:axdimm?compression=fused&{FORMATS}") as device:
        with pytest.raises(UnsupportedOptionError, match=r"maximize=True.*gradient_scale=yes"):
            nearstep.optim.AdamW(ours, maximize=True, compression=0.1, device=device)
        optimizer = nearstep.optim.AdamW(ours, compression=0.1, device=device)
        optimizer.param_groups[0]["maximize"] = True
        for p in ours:
            p.grad = torch.ones_like(p)
        with pytest.raises(UnsupportedOptionError, match="gradient_scale=yes"):
            optimizer.step()
