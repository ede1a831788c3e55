"""An optimizer goes back to a generation that its drives keep, in place."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

import nearstep
from nearstep.storage.store import Store
from nearstep.torch.checkpoint import GenerationReader, GenerationWriter, load_generation
from nearstep.torch.errors import HyperparameterError, StateError
from nearstep.torch.export import export_safetensors
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.homes.opening import has_step
from nearstep.torch.homes.ranks import Ranks
from nearstep.torch.settings import Overflow
from nearstep_sim.models.drive import MemoryBlocks, after_cut, every_cut

from .jobs import HOMES, Drives, Job, drives, everything, images

JOB = Job([(40, 16), (16,), (30, 20)], skips=4)
SEED = 5


def trained(on: Drives, url: str, more: dict[str, Any]) -> list[dict[str, bytes]]:
    """Two steps, kept as `best`, and three more; the state after each of both."""
    parameters, optimizer = JOB.trained(url, 2, drives=on.store, **more)
    optimizer.keep("best")
    states = [everything(parameters, optimizer)]
    JOB.go_on(parameters, optimizer, range(2, 5))
    return [*states, everything(parameters, optimizer)]


def opened(on: Drives) -> Drives:
    """The same drives in another process."""
    on.store.close()
    return Drives([bytes(each.image) for each in on.places])


@pytest.mark.parametrize("home", HOMES)
def test_a_kept_generation_is_restored_in_place_and_goes_on_with_the_same_bits(home: str) -> None:
    url, plain, more = HOMES[home]
    on = Drives(images(2))
    kept, last = trained(on, url, more)
    twin, reference = JOB.trained(plain, 2)
    assert everything(twin, reference) == kept
    for at in range(2):
        on = opened(on)
        before = on.store.generation
        again, optimizer = JOB.resumed(url, "best", drives=on.store, **more)
        assert everything(again, optimizer) == kept != last
        assert optimizer.traffic.to_drives == 0
        assert (on.store.generation, list(on.store.kept)) == (before + 1, ["best"])
        if at:
            JOB.step(reference, twin, 77)
            JOB.step(optimizer, again, 77)
        else:  # it is the last generation at once, and the one before is still there
            other, resumed = JOB.resumed(
                url,
                before,
                drives=Store.open(
                    [MemoryBlocks(bytes(e.image), n) for n, e in enumerate(on.places)],
                    owner=None,
                    generation=before,
                ),
                **more,
            )
            assert everything(other, resumed) == last
    expected = everything(twin, reference)
    assert everything(again, optimizer) == expected
    on = opened(on)
    assert everything(*JOB.resumed(url, drives=on.store, **more)) == expected
    on.store.close()


def test_a_power_cut_leaves_the_last_generation_or_the_restored_one() -> None:
    url, _, more = HOMES["processor"]
    on = Drives(images(2))
    kept, last = trained(on, url, more)
    on = opened(on)
    begin = [bytes(each.image) for each in on.places]
    JOB.resumed(url, "best", drives=on.store, **more)
    on.store.close()
    print(f"seed {SEED}")
    rng, seen, cuts = random.Random(SEED), list[int](), 0
    for at in range(len(on.journal.events) + 1):
        events = on.journal.events[:at]
        for some in every_cut(events, 3, rng):
            image = after_cut(begin, events, some)
            places = [MemoryBlocks(each, drive) for drive, each in enumerate(image)]
            with Store.open(places, owner=None) as store:
                state = everything(*JOB.resumed(url, drives=store, **more))
                assert list(store.kept) == ["best"]
            seen.append([last, kept].index(state))
            cuts += 1
    assert set(seen) == {0, 1}
    assert cuts > 10


def test_what_is_not_kept_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    url, _, more = HOMES["processor"]
    with drives() as on:
        _, last = trained(on, url, more)
        number = on.store.generation
        with pytest.raises(ResumeError, match="a generation named 'worst', not 'best'"):
            JOB.resumed(url, "worst", drives=on.store, **more)
        with pytest.raises(ResumeError, match="it was changed"):  # when it is restored already
            JOB.resumed(url, "best", drives=on.store, state_dtype=torch.uint8, memory="1MiB")
        assert on.store.generation == number
        assert everything(*JOB.resumed(url, drives=on.store, **more)) == last
    (tmp_path / "drive").touch()
    for given, kept in ((str(tmp_path / "drive"), ""), ("./best", ""), ("best", "best")):
        found = Overflow.given(None, None, "belady", resume=given)
        assert found is not None
        assert (found.kept, bool(found.others)) == (kept, not kept)
    with pytest.raises(HyperparameterError, match="with drives alone"):
        JOB.resumed("golden:axdimm?memory_bytes=1MiB", "best")


def test_a_load_that_cannot_be_planned_leaves_the_drives_to_others(tmp_path) -> None:
    model = nn.Linear(16, 16)
    optimizer = nearstep.optim.AdamW(model.named_parameters(), drives=[tmp_path], memory="1MiB")
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    del optimizer
    gc.collect()
    other = nn.Linear(16, 8)
    plain = torch.optim.AdamW(other.named_parameters())
    reader = GenerationReader([[tmp_path]])
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load_generation(other, plain, reader)
    kept = {"drives": [tmp_path], "memory": "1MiB", "resume": True}
    again = nearstep.optim.AdamW(model.named_parameters(), **kept)  # else DriveLockedError
    assert again.state[model.weight]["step"] == 1


def test_a_checkpoint_has_no_frozen_parameters_and_loads_the_others(tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        return model

    path, model = tmp_path / "a.drive", made()
    with Store.create([path], drive_bytes=16 << 20, owner="m") as store:
        optimizer = nearstep.optim.AdamW(
            model.named_parameters(), device="golden:axdimm", drives=store, memory="100%"
        )
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        writer = GenerationWriter(optimizer, "best")
        state = model.state_dict()
        with pytest.raises((StateError, CheckpointException), match=r"model\.0\.weight"):
            dcp.save({"model": state}, storage_writer=writer)
        assert not store.kept
        trained = {f"1.{name}": value for name, value in model[1].state_dict().items()}
        dcp.save({"model": trained}, storage_writer=writer)
        assert list(store.kept) == ["best"]
    other = made()
    found = {f"1.{name}": value for name, value in other[1].state_dict().items()}
    dcp.load({"model": found}, storage_reader=GenerationReader([path], name="best"))
    assert len(found) == 2
    assert all(torch.equal(found[name], value) for name, value in trained.items())
    model_file, _ = export_safetensors([path], tmp_path / "out")
    assert b"1.weight" in model_file.read_bytes()
    assert b"0.weight" not in model_file.read_bytes()


def test_drives_that_cannot_be_read_count_as_a_step_until_they_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.drive"
    with Store.create([path], drive_bytes=16 << 20, owner="m"):
        assert has_step([path], Ranks())  # locked: other ranks are told that there is one
    assert path.exists()
