"""Lines that lose, damage and repeat bytes: what is computed over them has torch's bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

import nearstep
from nearstep.updater.device import KernelDevice
from nearstep_sim.serial.line import Noise

from ..driver.conftest import CARD_SHAPE, SIM_CARD_SHAPE
from ..optim.beside import Beside, equal_bits
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


def train(device: KernelDevice, kind: str) -> None:
    """Some steps beside torch's, compared bit for bit."""
    beside = Beside(kind, device)
    beside.step(STEPS)
    beside.check()


@like_torch
@pytest.mark.parametrize("kind", ["AdamW", "momentum"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("url", [GOLDEN, pytest.param(SIM, marks=pytest.mark.deep)])
def test_steps_over_a_bad_line_have_the_bits_of_torch(url: str, noise: str, kind: str) -> None:
    print("seed 5")
    with over_link(url, noise=NOISES[noise], seed=5, baud=3_000_000, tries=40) as device:
        train(device, kind)
        traffic = device.backend.link.traffic
        line = device.backend.link._transport
        hit = sum(getattr(each, kind) for each in (line.down, line.up) for kind in HITS)
        print(f"{hit} bytes hit, {traffic.frames_resent} frames sent again")
        assert hit > 10
        assert traffic.frames_resent >= traffic.frames_dropped
        assert traffic.frames_resent > 5


HITS = ("lost", "corrupted", "repeated")


@like_torch
def test_a_terminal_with_a_bad_line_has_the_bits_of_torch() -> None:
    """This machine decides how long waits are, so there are many; the bits are the same."""
    with (
        served(GOLDEN, noise=NOISES["all"], seed=5) as server,
        open_port(server.path, wait=0.01, tries=1000) as device,
    ):
        train(device, "AdamW")
        assert device.backend.link.traffic.frames_resent > 5


@like_torch
@pytest.mark.parametrize("url", [GOLDEN, pytest.param(SIM, marks=pytest.mark.deep)])
def test_what_is_compressed_and_clipped_goes_over_the_link_too(url: str) -> None:
    """As on the device without a link."""
    results: list[Sequence[Tensor]] = []
    for opened in (lambda: over_link(url), lambda: nearstep.open(url)):
        with opened() as device:
            beside = Beside("AdamW", device, own={"compression": 0.1, "max_grad_norm": 1.0})
            beside.step(STEPS)
            results.append([each.detach().clone() for each in beside.mine.parameters])
    equal_bits(*results)
