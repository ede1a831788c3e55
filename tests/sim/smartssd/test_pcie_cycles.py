"""The card as it is shipped beside the one whose BARs are emulated: bits, registers and traffic are
the same, and the difference of cycles is that of the endpoint, to the cycle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import nearstep
from nearstep.errors import ArgumentError, OptionError
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.smartssd.options import PcieCardOptions
from nearstep_sim.smartssd.pcie_card import PcieCardBackend

from ...host.driver.job import Job
from ...on_a_drive import on_a_drive
from .test_card import OPTIONS, split

pytestmark = pytest.mark.deep

BASE = 2 << 20
MEMORY_PAYLOAD = 256  # of packets and completions
BEAT_DWORDS = 4  # of the streams
DESCRIPTOR_BEATS = 1


@contextmanager
def both(extra: str = "") -> Iterator[tuple[SmartssdDevice, SmartssdDevice]]:
    """The card behind emulated BARs, and the one behind its endpoint."""
    url = f"sim:smartssd?{OPTIONS}{extra}"
    with nearstep.open(url) as bar, nearstep.open(f"{url}&bus=pcie") as pcie:
        assert isinstance(bar, SmartssdDevice)
        assert isinstance(pcie, SmartssdDevice)
        yield bar, pcie


def taken(card: SmartssdDevice, access: object) -> int:
    before = card.cycles
    access(card)  # type: ignore[operator]
    return card.cycles - before


RUNS = {
    "adam": {},
    "sgd": {"optimizer": "sgd"},
    "half": {"gradient": "fp16"},
}


@pytest.mark.parametrize("extra", ["", "&memory=ideal", "&latency=120"])
def test_a_run_takes_the_same_cycles(extra: str) -> None:
    """Between START and the end nobody but the kernel is at the memory: not one cycle differs."""
    compared = 0
    with both(extra) as cards:
        for name, options in RUNS.items():
            for count in (1, 5, 128, 1000, 5003):
                runs = []
                for card in cards:
                    job = Job(card, count, 3, gradient=options.get("gradient"))
                    run = job.run(options.get("optimizer", "adam"), step=2)
                    compared += job.check()
                    runs.append((run.cycles, run.counters, run.committed))
                    job.free()
                assert runs[0] == runs[1], (name, count)
    assert compared > 2 * len(RUNS) * 6000


def test_registers_traffic_and_memory_are_the_same() -> None:
    rng = np.random.default_rng(5)
    with both() as cards:
        for card in cards:
            job = Job(card, 3001, 7)
            job.run()
            assert job.check() == 3 * 3001
            card.backend.write_bar0(card.regs.updater0.count.address, 77)
        shown = []
        for card in cards:
            words = []
            for offset in range(0, 0x400, 4):
                try:
                    words.append(card.backend.read_bar0(offset))
                except nearstep.errors.BusError as error:
                    words.append(str(error.response))
            shown.append(words)
        different = [4 * at for at, pair in enumerate(zip(*shown, strict=True)) if len({*pair}) > 1]
        assert not different, list(map(hex, different))
        for _ in range(50):
            nbytes = int(rng.integers(1, 3000))
            address = BASE + int(rng.integers(1 << 16))
            data = rng.integers(0, 256, nbytes, dtype=np.uint8)
            for card in cards:
                card.backend.write_memory(address, data)
                out = np.empty(nbytes, np.uint8)
                card.backend.read_memory(address, out)
                assert out.tobytes() == data.tobytes()
        bar, pcie = (vars(card.backend.traffic) for card in cards)
        for name in ("write_tlps", "write_bytes"):
            assert bar[name] == pcie[name], name


READ_CYCLES, WRITE_CYCLES = 18, 19
"""Of a register, through the endpoint; behind emulated BARs it is two. A write has the read without
a byte behind it."""


def test_an_access_of_a_register_takes_its_time() -> None:
    rng = np.random.default_rng(8)
    with both() as (bar, pcie):
        count = bar.regs.updater0.count.address
        seen = set()
        for _ in range(40):
            value = int(rng.integers(1 << 32))
            cycles = []
            for card in (bar, pcie):
                cycles.append(taken(card, lambda each: each.backend.write_register(count, value)))  # noqa: B023
                cycles.append(taken(card, lambda each: each.backend.read_register(count)))
                assert card.backend.read_register(count) == value
                card.backend.advance(int(rng.integers(1, 50)))
            seen.add(tuple(cycles))
        assert seen == {(2, 2, WRITE_CYCLES, READ_CYCLES)}


def write_beats(address: int, nbytes: int) -> int:
    """Of the stream: a descriptor and the payload of each packet."""
    beats = 0
    for part in split(address, nbytes, MEMORY_PAYLOAD):
        dwords = len({byte // 4 for byte in part})
        beats += DESCRIPTOR_BEATS + -(-dwords // BEAT_DWORDS)
    return beats


def completion_beats(address: int, nbytes: int) -> int:
    """Of the stream: three dwords and the payload of each completion."""
    beats = 0
    for part in split(address, nbytes, MEMORY_PAYLOAD):
        dwords = len({byte // 4 for byte in part})
        beats += -(-(3 + dwords) // BEAT_DWORDS)
    return beats


def test_a_write_takes_the_beats_of_its_packets() -> None:
    rng = np.random.default_rng(6)
    with both() as (_, card):
        extra = set()
        for _ in range(60):
            nbytes = int(rng.choice((1, 4, 63, 256, 257, 1000, 4096)))
            address = BASE + int(rng.integers(8192))
            card.backend.flush()
            data = np.zeros(nbytes, np.uint8)
            cycles = taken(card, lambda each: each.backend.write_memory(address, data))  # noqa: B023
            extra.add(cycles - write_beats(address, nbytes))
        print(f"cycles beside the beats: {sorted(extra)}")
        assert extra == {2}


def test_a_read_takes_the_beats_of_memory_and_of_its_completion() -> None:
    """One completion, which begins when all of its payload is there."""
    rng = np.random.default_rng(9)
    with both() as (_, card):
        beat = card.config.beat_bytes
        card.backend.write_memory(BASE, np.zeros(8192, np.uint8))
        card.backend.read_memory(BASE, np.zeros(4, np.uint8))  # the memory turns round
        extra = set()
        for _ in range(60):
            address = BASE + int(rng.integers(8192 - MEMORY_PAYLOAD))
            nbytes = int(rng.integers(1, MEMORY_PAYLOAD - address % MEMORY_PAYLOAD + 1))
            out = np.zeros(nbytes, np.uint8)
            cycles = taken(card, lambda each: each.backend.read_memory(address, out))  # noqa: B023
            memory = (address + nbytes - 1) // beat - address // beat + 1
            extra.add(cycles - memory - completion_beats(address, nbytes))
        print(f"cycles beside the beats: {sorted(extra)}")
        assert extra == {54}  # 40 of them are the memory's


@pytest.mark.parametrize("drive", [False, True], ids=["memory", "drives"])
def test_several_cards_and_their_drives_go_with_it(drive: bool, tmp_path: Path) -> None:
    """Two steps of AdamW on two cards have the bits of the golden ones."""
    with on_a_drive(tmp_path) as folder:
        urls = ("sim:smartssd?bus=pcie&", "golden:smartssd?")
        places = (f"&drive={folder / str(number)}" if drive else "" for number in range(len(urls)))
        small = f"{OPTIONS}&cards=2&subgroup_elements=1024"  # several fit into the memory
        found = [trained(f"{url}{small}{at}") for url, at in zip(urls, places, strict=True)]
    assert found[0] == found[1]


def trained(device: str) -> list[bytes]:
    """Bits of parameters after two steps."""
    torch.manual_seed(3)
    model = nn.Linear(60, 50)
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=device)
    for seed in range(2):
        optimizer.zero_grad()
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
    cards = optimizer.device.backend.cards
    assert len(cards) == 2
    for card in cards:
        assert isinstance(card, PcieCardBackend) == ("pcie" in device)
        assert "pcie" not in device or card.pcie_counters["messages"] > 0
    return [each.detach().numpy().tobytes() for each in model.parameters()]


def test_options_that_no_link_has_are_refused() -> None:
    with pytest.raises(OptionError, match="there is no such choice; valid: bar, pcie"):
        nearstep.open(f"sim:smartssd?{OPTIONS}&bus=agp")
    with pytest.raises(OptionError, match="valid: rtl"):
        nearstep.open(f"sim:smartssd?{OPTIONS}&bus=pcie&fu=native")
    with pytest.raises(OptionError, match="bus=pcie"):
        nearstep.open(f"sim:smartssd?{OPTIONS}&reorder=yes")
    for options, match in (
        ({"max_payload": 300}, "max_payload must be 128, 256, 512 or 1024, not 300"),
        ({"max_read_request": 64}, "power of two from 128 to 4096, not 64"),
        ({"bar_bytes": 4096}, "at least"),
    ):
        with pytest.raises(ArgumentError, match=match):
            PcieCardBackend(PcieCardOptions(), **options)
