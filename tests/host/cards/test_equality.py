"""Training with state on the drives of cards has the bits that it has in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import nearstep
from nearstep.torch import convert

from ..overflow.jobs import OPTIMIZERS, Job, drives, everything, random_job

RULES = "rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad"
PLAIN = f"golden:smartssd?{RULES}&chunk_bytes=512&memory_bytes=1MiB"
STEPS = 3


def card_url(cards: int, subgroup: int) -> str:
    """Cards whose drives are given with `drives=`."""
    return f"{PLAIN}&cards={cards}&subgroup_elements={subgroup}&drive=unused"


def compare(job: Job, cards: int, subgroup: int, **more: object) -> int:
    """Train with drives and without; values that were compared."""
    plain, own = job.parameters(), job.parameters()
    expected = job.make(plain, PLAIN, **more)
    compared = 0
    with drives(cards, 1200) as on:
        found = job.make(own, card_url(cards, subgroup), drives=on.store, **more)
        for step in range(STEPS):
            job.step(expected, plain, step)
            job.step(found, own, step)
            here, there = everything(own, found), everything(plain, expected)
            assert here == there, (job, cards, subgroup, step)
            compared += len(here)
        assert on.store.generation == STEPS + 1
        for name, tensor in on.store.tensors.items():
            drives_of = {each.drive for each in tensor.table.extents() if not each.is_hole}
            assert drives_of <= {int(name.partition("@")[2])}
            compared += 1
    return compared


@pytest.mark.parametrize("options", ["", "&copy_out_formats=bf16&gradient_formats=fp32,bf16"])
def test_a_subgroup_of_which_nothing_is_said_has_room(tmp_path: Path, options: str) -> None:
    """Steps of more than two subgroups, in a memory that holds two, with what is beside them."""
    url = f"golden:smartssd?chunk_bytes=512&memory_bytes=64KiB{options}&drive={tmp_path}/drive"
    weight = torch.nn.Parameter(torch.ones(6000, dtype=torch.bfloat16 if options else None))
    with nearstep.open(url) as device:
        optimizer = nearstep.optim.AdamW([weight], lr=0.5, device=device)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert bool((weight < 0.1).all())


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer(optimizer: str) -> None:
    job = Job([(40, 16), (16,), (30, 20), (7,), (1,)], optimizer, skips=4)
    assert compare(job, 2, 128) >= STEPS * 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_16_bit_parameters(dtype: torch.dtype) -> None:
    job = Job([(40, 16), (16,), (30, 20), (7,), (9,)], dtype=dtype, skips=3)
    assert compare(job, 3, 256) > 20


@pytest.mark.parametrize("cards", [1, 2])
def test_large_parameters(cards: int) -> None:
    assert compare(Job([(160, 128), (128, 130), (64, 300)]), cards, 8192) > 20


@pytest.mark.parametrize("cards", [1, 3])
def test_compressed_gradients_with_error_feedback(cards: int) -> None:
    job = Job([(40, 16), (16,), (30, 20), (7,), (1,)])
    assert compare(job, cards, 256, compression=0.1) > 20


def rounds(first: int, count: int) -> int:
    compared = 0
    for seed in range(first, first + count):
        print(f"seed {seed}")
        choose = np.random.default_rng(seed)
        job = random_job(choose, str(choose.choice(list(OPTIMIZERS))), seed=seed)
        more = {"compression": 0.05} if choose.random() < 0.3 else {}
        subgroup = 128 * int(choose.integers(1, 9))
        compared += compare(job, int(choose.integers(1, 5)), subgroup, **more)
    return compared


def test_random_models_and_cards() -> None:
    assert rounds(500, 6) > 100


@pytest.mark.deep
def test_many_random_models_and_cards() -> None:
    assert rounds(2000, 150) > 3000


def test_files_of_a_directory_and_what_moves(tmp_path: Path) -> None:
    """A training on files is resumed by another optimizer; the host's link sees gradients and
    parameters alone (Table I)."""
    url = f"golden:smartssd?cards=2&chunk_bytes=4096&subgroup_elements=2048&drive={tmp_path}"
    job = Job([(64, 64), (64,), (100, 30)])
    parameters = job.parameters()
    optimizer = job.make(parameters, url)
    elements = sum(convert.size(p) for p in parameters)
    padded = sum(-(-convert.size(p) // 16) * 16 for p in parameters)
    job.step(optimizer, parameters, 0)
    traffic = optimizer.traffic
    before, bars = traffic.as_dict(), optimizer.device.backend.traffic
    peer = optimizer.device.backend.peer_traffic
    job.step(optimizer, parameters, 1)
    after = traffic.as_dict()
    moved = {key: (after[key] or 0) - (before[key] or 0) for key in after}
    assert moved["gradients_down"] == moved["parameters_up"] == 4 * elements
    assert moved["masters_down"] == moved["to_drives"] == moved["from_drives"] == 0
    assert 12 * elements <= moved["drives_to_cards"] == moved["cards_to_drives"] <= 12 * padded
    now, peers = optimizer.device.backend.traffic, optimizer.device.backend.peer_traffic
    assert peers.write_bytes - peer.write_bytes == moved["drives_to_cards"]
    assert peers.completion_bytes - peer.completion_bytes == moved["cards_to_drives"]
    registers = 4 * 400  # at most so many accesses in a step
    assert 4 * elements <= now.write_bytes - bars.write_bytes <= 4 * padded + registers
    assert 4 * elements <= now.completion_bytes - bars.completion_bytes <= 4 * padded + registers
    last = everything(parameters, optimizer)
    optimizer.store.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "card0of2.nearstep",
        "card1of2.nearstep",
    ]
    again = [torch.nn.Parameter(torch.zeros_like(p)) for p in parameters]
    resumed = job.make(again, url, resume=True)
    assert everything(again, resumed) == last
    with pytest.raises(nearstep.errors.NearstepError, match="in use by process"):
        job.make(job.parameters(), url, resume=True)


def test_a_folder_is_made_and_goes_with_an_optimizer_that_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "drives"
    url = f"golden:smartssd?cards=2&chunk_bytes=512&subgroup_elements=1024&drive={folder}"
    with pytest.raises(nearstep.errors.NearstepError):
        nearstep.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=-1.0, device=url)
    assert not folder.exists()
    optimizer = nearstep.optim.AdamW([torch.nn.Parameter(torch.ones(3))], device=url)
    assert len(list(folder.iterdir())) == 2
    assert optimizer.store is not None
    optimizer.store.close()
    with pytest.raises(nearstep.errors.NearstepError, match="no/such/card0of2"):
        nearstep.optim.AdamW(
            [torch.nn.Parameter(torch.ones(3))], device=url.replace(str(folder), "/no/such")
        )
