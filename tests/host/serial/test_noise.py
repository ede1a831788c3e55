"""Lines that lose, damage and repeat bytes: what is computed over them has torch's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import nearstep.optim
from nearstep.updater.device import KernelDevice
from nearstep_sim.serial.line import Noise

from ..driver.conftest import CARD_SHAPE, SIM_CARD_SHAPE
from ..optim.conftest import like_torch
from .conftest import open_port, over_link, served

GOLDEN = f"golden:smartssd?{CARD_SHAPE}"
SIM = f"sim:smartssd?{SIM_CARD_SHAPE}"
NOISES = {
    "loss": Noise(loss=2e-4),
    "corruption": Noise(corruption=2e-4),
    "repetition": Noise(repetition=2e-4),
    "all": Noise(loss=1e-4, corruption=1e-4, repetition=1e-4),
}
STEPS = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}

Make = Callable[..., list[Tensor]]
Give = Callable[..., None]
Compare = Callable[..., None]


def train(
    device: KernelDevice, name: str, make: Make, give: Give, compare: Compare
) -> torch.optim.Optimizer:
    """Some steps beside torch's, compared bit for bit."""
    ours, theirs = make(), make()
    hyper = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer = getattr(nearstep.optim, name)(ours, device=device, **hyper)
    reference = getattr(torch.optim, name)(theirs, fused=True, **hyper)
    for _ in range(STEPS):
        give(ours, theirs)
        optimizer.step()
        reference.step()
    compare(ours, theirs, optimizer, reference)
    return optimizer


@like_torch
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("url", [GOLDEN, pytest.param(SIM, marks=pytest.mark.deep)])
def test_steps_over_a_bad_line_have_the_bits_of_torch(
    url: str,
    noise: str,
    name: str,
    make_parameters: Make,
    give_gradients: Give,
    assert_equal_bits: Compare,
) -> None:
    print("seed 5")
    with over_link(url, noise=NOISES[noise], seed=5, baud=3_000_000, tries=40) as device:
        train(device, name, make_parameters, give_gradients, assert_equal_bits)
        traffic = device.backend.link.traffic
        line = device.backend.link._transport
        hit = sum(getattr(each, kind) for each in (line.down, line.up) for kind in HITS)
        print(f"{hit} bytes hit, {traffic.frames_resent} frames sent again")
        assert hit > 10
        assert traffic.frames_resent >= traffic.frames_dropped
        assert traffic.frames_resent > 5


HITS = ("lost", "corrupted", "repeated")


@like_torch
def test_a_terminal_with_a_bad_line_has_the_bits_of_torch(
    make_parameters: Make,
    give_gradients: Give,
    assert_equal_bits: Compare,
) -> None:
    """This machine decides how long waits are, so there are many; the bits are the same."""
    with (
        served(GOLDEN, noise=NOISES["all"], seed=5) as server,
        open_port(server.path, wait=0.01, tries=1000) as device,
    ):
        train(device, "AdamW", make_parameters, give_gradients, assert_equal_bits)
        assert device.backend.link.traffic.frames_resent > 5


@like_torch
@pytest.mark.parametrize("url", [GOLDEN, pytest.param(SIM, marks=pytest.mark.deep)])
def test_what_is_compressed_and_clipped_goes_over_the_link_too(
    url: str,
    make_parameters: Make,
    give_gradients: Give,
    assert_equal_bits: Compare,
) -> None:
    """As on the device without a link."""
    results: list[Sequence[Tensor]] = []
    for opened in (lambda: over_link(url), lambda: nearstep.open(url)):
        with opened() as device:
            parameters = make_parameters()
            optimizer = nearstep.optim.AdamW(
                parameters, device=device, compression=0.1, max_grad_norm=1.0
            )
            generator = torch.Generator().manual_seed(3)
            for _ in range(STEPS):
                for each in parameters:
                    each.grad = torch.randn(each.shape, generator=generator)
                optimizer.step()
            results.append([each.detach().clone() for each in parameters])
    assert_equal_bits(*results)
