"""Several cards as one device: what each owns, their one clock, and one that fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import MemoryFaultError, NearstepError, OutOfBoundsError
from nearstep.placement import Segment
from nearstep.smartssd.device import SmartssdDevice

from .conftest import ADAM, CARD_SHAPE, SIM_CARD_SHAPE
from .job import Job

RULES = "rules=adam,sgd,sgd_momentum,adagrad"
SIM = f"sim:smartssd?{SIM_CARD_SHAPE}&fu=native"


def trained(url: str, optimizer: str, **options: Any) -> tuple[list[bytes], SmartssdDevice]:
    """Bits of parameters and state after three steps."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 33))
    made = getattr(nearstep.optim, optimizer)(model.parameters(), lr=1e-2, device=url, **options)
    for seed in range(3):
        made.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        made.step()
    state = [value for each in made.state.values() for value in each.values()]
    found = [*model.parameters(), *(each for each in state if isinstance(each, torch.Tensor))]
    assert isinstance(made.device, SmartssdDevice)
    return [each.detach().numpy().tobytes() for each in found], made.device


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("AdamW", {}), ("AdamW", {"compression": 0.1}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})],
)
def test_any_number_of_cards_has_the_bits_of_one(optimizer: str, options: dict[str, Any]) -> None:
    shape = "lanes=4&chunk_bytes=512&memory_bytes=1MiB"
    one, _ = trained(f"golden:smartssd?{shape}&{RULES}", optimizer, **options)
    for cards in (2, 3, 10):
        url = f"golden:smartssd?cards={cards}&{shape}&{RULES}"
        several, device = trained(url, optimizer, **options)
        assert several == one
        assert device.channel_count == cards
        written = [card.traffic.write_bytes for card in device.backend.cards]  # type: ignore[attr-defined]
        assert min(written) > 0
        assert device.backend.traffic.write_bytes == sum(written)  # type: ignore[attr-defined]


@pytest.mark.parametrize("cards", [1, 2, 3, 7, 64])
def test_every_card_owns_the_same_share_to_within_a_block(cards: int) -> None:
    with nearstep.open(f"golden:smartssd?cards={cards}&{CARD_SHAPE}&{ADAM}") as device:
        block = device.stripe_bytes // 4
        for elements in (1, block, 10_007, 64 * block):
            stripes = Segment(device, elements).stripes
            owned = [stripes.span(0, elements, channel) for channel in range(cards)]
            counts = [stop - start for start, stop in owned]
            assert sum(counts) == elements
            assert max(counts) - min(counts) <= block


def test_cards_update_at_the_same_time_on_one_clock() -> None:
    cycles = {}
    with nearstep.open(f"{SIM}&cards=2") as device:
        for channels in ((0,), (1,), (0, 1)):
            jobs = [Job(device, 8192, channel, channel=channel) for channel in channels]
            before = device.cycles
            runs = [job.start("adam", step=1) for job in jobs]
            for run in runs:
                run.wait()
            assert before is not None
            assert device.cycles is not None
            cycles[channels] = device.cycles - before
            assert sum(job.check() for job in jobs) == 3 * 8192 * len(jobs)
            for number, card in enumerate(device.backend.cards):  # type: ignore[attr-defined]
                behind = device.cycles - device.backend._time(number)  # type: ignore[attr-defined]
                assert card.cycles > 0
                assert 0 <= behind < cycles[channels]
    assert cycles[0, 1] < 1.2 * max(cycles[0,], cycles[1,])


@pytest.mark.parametrize("family", ["golden", "sim"])
def test_a_card_that_fails_is_named_and_the_others_go_on(family: str) -> None:
    url = (SIM if family == "sim" else f"golden:smartssd?{CARD_SHAPE}&{ADAM}") + "&cards=3"
    with nearstep.open(url) as device:
        jobs = [Job(device, 3000, channel, channel=channel) for channel in range(3)]
        hit = jobs[1].buffers["m"].address
        device.backend.inject(Injection(kind="slverr", write=False, base=hit, limit=hit + 4))
        runs = [job.start("adam", step=1) for job in jobs]
        runs[0].wait()
        with pytest.raises(NearstepError) as caught:
            runs[1].wait()
        said = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        assert "updater1" in said or "card 1 of 3" in said, said
        device.channels[1].reset_kernel()
        runs[2].wait()
        assert jobs[0].check() == jobs[2].check() == 9000
        device.backend.heal()
        again = Job(device, 3000, 5, channel=1)
        again.start("adam", step=1).wait()
        assert again.check() == 9000


def test_guards_are_those_of_each_card() -> None:
    with nearstep.open(f"golden:smartssd?{CARD_SHAPE}&{ADAM}&cards=3") as device:
        job = Job(device, 300, 1, channel=2)
        device.backend.protect(job.buffers["v"].address, 64)
        with pytest.raises(MemoryFaultError) as caught:
            job.start("adam", step=1).wait()
        assert "card 2 of 3" in caught.value.__notes__


def test_registers_of_all_cards() -> None:
    with nearstep.open(f"golden:smartssd?{CARD_SHAPE}&{ADAM}&cards=3") as device:
        assert [block.name for block in device.regs] == ["updater0", "updater1", "updater2"]
        assert device.capacity_bytes == 3 * device.card.memory_bytes
        parts = [device.alloc(8, channel=number) for number in range(3)]
        for number, part in enumerate(parts):
            part.write(np.full(8, number, np.float32))
        assert [float(part.read()[0]) for part in parts] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("address", [-64, -4, 1 << 40])
def test_an_address_that_no_card_has_is_refused(address: int) -> None:
    with nearstep.open(f"golden:smartssd?cards=2&{CARD_SHAPE}&{ADAM}") as device:
        backend, data = device.backend, np.zeros(64, np.uint8)
        for access in (
            lambda: backend.read_register(address),
            lambda: backend.write_register(address, 0),
            lambda: backend.read_memory(address, data),
            lambda: backend.write_memory(address, data),
        ):
            with pytest.raises(OutOfBoundsError):
                access()
