"""Gradients that are compressed on an accelerator, `$NEARSTEP_TEST_COMPUTE`: run by
`test_accelerator.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nearstep
from nearstep.torch import convert
from nearstep.torch.compression import Compression
from nearstep.torch.offload.gradients import _after
from nearstep.torch.offload.streams import Streams
from nearstep.torch.select import Chosen, flat, select_largest
from nearstep.torch.topk import BLOCK, kept_of

from . import accelerator
from .models import WIDTH
from .training import COMPUTE, SEED, stack, state_of

CARD = "golden:smartssd?memory_bytes=8MiB"
FORMATS = ("fp32", "fp16", "bf16")
is_fake = COMPUTE.type == "accel"


def gradients(model: nn.Module, generator: torch.Generator) -> None:
    """Give every parameter a gradient with ties, zeros and what is not finite; most are small."""
    for p in model.parameters():
        values = torch.randn(p.shape, generator=generator).mul_(4).round_().div_(4)
        p.grad = values.to(p.dtype).to(p.device)


def steps(model: nn.Module, optimizer: Any, generator: torch.Generator, count: int = 3) -> Any:
    for _ in range(count):
        gradients(model, generator)
        optimizer.step()
    return state_of(model, optimizer)


@pytest.mark.parametrize("dtype", convert.FORMATS, ids=str)
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_steps_have_the_bits_of_the_host(form: str, feedback: bool, dtype: torch.dtype) -> None:
    options = {"compression": 0.1, "compression_format": form, "error_feedback": feedback}
    found, traffic = [], []
    for device in (torch.device("cpu"), COMPUTE):
        model = stack(dtype=dtype)[0].to(device)
        optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=CARD, **options)
        generator = torch.Generator().manual_seed(SEED)
        found.append(steps(model, optimizer, generator))
        again = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=CARD, **options)
        again.load_state_dict(optimizer.state_dict())
        found.append(steps(model, again, generator))
        residuals = [optimizer.state[p].get("residual") for p in model.parameters()]
        expected = device.type if feedback else None
        assert {r if r is None else r.device.type for r in residuals} == {expected}
        traffic.append(optimizer.traffic)
    assert found[:2] == found[2:]
    on_host, there = traffic
    assert on_host.gradients_to_host == 0
    assert there.gradients_to_host == there.gradients_down == on_host.gradients_down > 0
    kept = sum(kept_of(p.numel(), 0.1) for p in model.parameters())
    assert there.pairs == on_host.pairs == 3 * kept


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_chosen_has_the_bits_of_the_host(form: str) -> None:
    rng = np.random.default_rng(SEED)
    compared = 0
    for size in (1, BLOCK - 1, BLOCK, 2 * BLOCK + 777):
        for share in (1e-9, 0.02, 1.0):
            compression = Compression(share=share, format=form)
            residual, before = None, None
            for scale in (1.0, 1e-42, 1e37):
                gradient = np.round(rng.standard_normal(size)).astype(np.float32)
                gradient *= np.float32(scale)
                gradient[rng.random(size) < 0.01] = np.inf  # of one sign: no sum is NaN
                gradient[rng.random(size) < 0.2] = -0.0
                done = compression.compress(gradient, before)
                there = flat(torch.from_numpy(gradient), COMPUTE)
                made = select_largest(compression, there, residual)
                assert made.index.device.type == made.value.device.type == COMPUTE.type
                found, residual, before = made.compressed(), made.residual, done.residual
                np.testing.assert_array_equal(found.index, done.index)
                assert found.value.tobytes() == done.value.tobytes()
                assert residual is not None
                assert residual.device.type == COMPUTE.type
                assert residual.cpu().numpy().tobytes() == before.tobytes()
                compared += size
    assert compared == 3 * 3 * (4 * BLOCK + 777)


def test_pairs_are_read_when_both_copies_have_ended() -> None:
    torch.manual_seed(SEED)
    gradient, compression = torch.randn(1000), Compression(share=0.1, error_feedback=False)
    done = compression.compress(gradient.numpy(), None)
    chosen, streams = select_largest(compression, gradient.to(COMPUTE), None), Streams(COMPUTE)
    downloads = [streams.download(chosen.index), streams.download(chosen.value)]
    pairs = Chosen(downloads[0].staged, downloads[1].staged, None)
    if is_fake:  # nothing has had the copies run so far
        assert pairs.index.tolist() == [-1] * 100
    found = _after(downloads, pairs)(None)
    assert found.index.tolist() == done.index.tolist()
    assert found.value.tobytes() == done.value.tobytes()


@pytest.mark.parametrize("feedback", [True, False])
def test_an_offloaded_model_sends_pairs_where_nothing_stays(feedback: bool) -> None:
    options = {"compression": 0.1, "error_feedback": feedback}
    model, optimizer = stack(device=CARD, **options)
    before = accelerator.counts().late if is_fake else 0
    with nearstep.offload(model, optimizer, budget="100%") as engine:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH, device=COMPUTE)).square().sum().backward()
            optimizer.step()
        assert engine._space.sent == engine._space.ledger.gradients == 0
        found, traffic = engine.report(), optimizer.traffic
        late = found.fetches + found.prefetches + (1 if feedback else 2) * found.gradients
        if is_fake:
            assert accelerator.counts().late - before == late
    whole = 3 * sum(4 * p.numel() for p in model.parameters())
    assert traffic.gradients_down == 8 * traffic.pairs < whole / 4
    assert traffic.gradients_to_host == (whole if feedback else traffic.gradients_down)
    residuals = [optimizer.state[p].get("residual") for p in model.parameters()]
    expected = "cpu" if feedback else None
    assert {r if r is None else r.device.type for r in residuals} == {expected}


def test_a_whole_gradient_is_counted_as_such() -> None:
    model, optimizer = stack(device=CARD)
    steps(model, optimizer, torch.Generator().manual_seed(SEED), 1)
    nbytes = sum(4 * p.numel() for p in model.parameters())
    assert optimizer.traffic.gradients_to_host == nbytes
