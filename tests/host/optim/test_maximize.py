"""`maximize`: who negates the gradients, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nearstep
from nearstep.torch import convert
from nearstep.torch.errors import UnsupportedOptionError

from ..driver.conftest import chosen
from .beside import Beside, clone, made, step_alone, tensors
from .conftest import IN_DEPTH, like_torch
from .test_compression import Compressed

FORMATS = "gradient_formats=fp32,fp16,bf16&memory_bytes=64MiB"
SCALES = "golden:axdimm?gradient_scale=yes&scan=yes&compression=fused,scatter&" + FORMATS
URLS = {
    "host": f"golden:axdimm?{FORMATS}",
    "kernel": SCALES,
    "dimm": f"{SCALES}&channels=2&block_bytes=512",
    "card": "golden:smartssd?memory_bytes=64MiB",
}


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request):
    """Devices without and with kernels that scale."""
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


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


def negate(beside):
    for p in beside.torchs.parameters:
        p.grad = -p.grad


def against_negated(device, dtype=torch.float32, **options):
    """Steps that maximize beside steps of nearstep with negated gradients."""
    beside = Beside("Adam", device, dtype=dtype, maximize=True, own=options)
    ours, theirs = (side.parameters for side in beside)
    theirs[:] = clone(ours)
    beside.torchs.optimizer = made("Adam", theirs, device, **options)
    for _ in range(3):
        beside.give()
        negate(beside)
        step_alone(beside)
        assert all(torch.equal(a.grad, -b.grad) for a, b in zip(ours, theirs, strict=True))
    beside.check(gradients=False)
    one, other = (side.optimizer.traffic.gradients_down for side in beside)
    assert one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_a_step_with_negated_gradients_and_leaves_them_as_they_are(dtype, device):
    against_negated(device, dtype)


@pytest.mark.parametrize("device", ["kernel", "card"], indirect=True)
def test_the_norm_is_clipped_alike(device):
    against_negated(device, max_grad_norm=0.5)


@like_torch
@pytest.mark.parametrize("device", ["kernel", "dimm", "card"], indirect=True)
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_what_is_not_sent_is_negated_too(form, feedback, device):
    """torch makes -0 of the zeros between what is kept, and momentum shows it."""
    kind = "momentum" if "sgd_momentum" in device.config.rules else "AdamW"
    chosen = {"error_feedback": feedback, "compression_format": form}
    beside = Compressed(kind, device, tensors(), compression=0.05, maximize=True, **chosen)
    for turn in range(4):
        for side in beside:
            side.group["maximize"] = turn != 2
        beside.step()
    beside.check()


def test_compression_without_a_kernel_that_scales_is_refused_by_name():
    ours = clone(tensors())
    with nearstep.open(f"golden:axdimm?compression=fused&{FORMATS}") as device:
        with pytest.raises(UnsupportedOptionError, match=r"maximize=True.*gradient_scale=yes"):
            nearstep.optim.AdamW(ours, maximize=True, compression=0.1, device=device)
        optimizer = nearstep.optim.AdamW(ours, compression=0.1, device=device)
        optimizer.param_groups[0]["maximize"] = True
        for p in ours:
            p.grad = torch.ones_like(p)
        with pytest.raises(UnsupportedOptionError, match="gradient_scale=yes"):
            optimizer.step()
