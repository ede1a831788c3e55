"""A device, and parameters in pairs: one for nearstep, one for torch, with equal contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import nearstep

from ..driver.conftest import chosen

SEED = 20231
CAPABILITY = torch.backends.cpu.get_cpu_capability()
like_torch = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"ATen's capability is {CAPABILITY}; its fused steps have other bits than for AVX2 and "
    "AVX512",
)
"""For tests that compare with the bits of torch's fused steps."""


def _adagrad_starts_late() -> bool:
    p = torch.nn.Parameter(torch.zeros(16))
    p.grad = torch.zeros(16)
    optimizer = torch.optim.Adagrad([p])
    optimizer.state.clear()
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


late_adagrad = pytest.mark.skipif(
    not _adagrad_starts_late(),
    reason=f"Adagrad of torch {torch.__version__} has no state in groups that are added, after it "
    "was removed, or divided gradients after a scaled step: there is nothing to compare with",
)
"""For tests that compare with what torch's Adagrad does since 2.12."""

URLS = {
    "kernel": "golden:axdimm?memory_bytes=64MiB",
    "dimm": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=64MiB",
}

RULES = "rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad"


IN_DEPTH = {"dimm"}
"""Of the devices that a test runs on: left to deep tests, unless the test says `on_all`."""


def on_all(fixture: str) -> pytest.MarkDecorator:
    """For a test that shall run on a DIMM among the fast ones, too."""
    return pytest.mark.parametrize(fixture, list(URLS), indirect=True)


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request: pytest.FixtureRequest) -> Iterator[nearstep.Device]:
    """An open `golden:axdimm`: a kernel by itself, and a DIMM with small stripes."""
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def many_rules(request: pytest.FixtureRequest) -> Iterator[nearstep.Device]:
    """The same devices with every update rule."""
    with nearstep.open(f"{URLS[request.param]}&{RULES}") as opened:
        yield opened


def bits(tensor: Tensor) -> Tensor:
    """Bit patterns, for comparison with `==`."""
    flat = tensor.detach().resolve_neg().reshape(-1)
    return flat.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


HOMES = {name: f"{url}&{RULES}" for name, url in URLS.items()} | {"host": "host:"}


@pytest.fixture(params=chosen(HOMES, IN_DEPTH))
def home(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The same devices with every update rule, and the name of the processor."""
    url = HOMES[request.param]
    with nullcontext(url) if request.param == "host" else nearstep.open(url) as opened:
        yield opened


on_devices = pytest.mark.parametrize("home", chosen(URLS, IN_DEPTH), indirect=True)
"""For a test of homes that are devices."""
