"""A step that is on the drives of some cards is resumed on others, and elsewhere, bit for bit."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import nearstep
from nearstep.storage.drive_errors import DriveLockedError, OwnerError, StorageError
from nearstep.storage.store import Store
from nearstep.torch.homes import generation, resume
from nearstep.torch.homes.errors import NothingToResumeError, ResumeError

from ..overflow.jobs import PLAIN, Job, card_url, drives, everything
from ..overflow.jobs import URL as DIMM

JOB = Job(((40, 16), (16,), (30, 20), (7,)), skips=3)
MEMORY = 1 << 16
SHARE = {"compression": 0.1}
dense_and_compressed = pytest.mark.parametrize("more", [{}, SHARE], ids=["dense", "compressed"])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without much room to spare, copied here, and residuals written in several parts."""
    monkeypatch.setattr("nearstep.torch.homes.opening.SPARE_BYTES", 1 << 17)
    monkeypatch.setattr(generation, "WRITTEN_ELEMENTS", 256)


def url(folder: Path, cards: int, subgroup: int = 128, chunk: int = 512) -> str:
    return (
        f"golden:smartssd?rules=adam,adagrad&memory_bytes=1MiB&cards={cards}"
        f"&subgroup_elements={subgroup}&chunk_bytes={chunk}&drive={folder}"
    )


def closed(device: str, steps: int, job: Job = JOB, **more: Any) -> dict[str, bytes]:
    """Drives of an optimizer that has made some steps and is closed; its bits."""
    parameters, optimizer = job.trained(device, steps, **more)
    found = everything(parameters, optimizer)
    optimizer.store.close()
    return found


trained, resumed = JOB.trained, JOB.resumed


def expected(steps: int, job: Job = JOB, **more: Any) -> dict[str, bytes]:
    """Without drives."""
    return job.after(PLAIN, steps, **more)


def held_back(optimizer: Any) -> int:
    """States with something that error feedback holds back."""
    return sum("residual" in state for state in optimizer.state.values())


def check(found: tuple[list[Any], Any], steps: int, job: Job = JOB, **more: Any) -> None:
    """It has the bits after so many steps, and after two more; its drives are closed."""
    parameters, optimizer = found
    assert everything(parameters, optimizer) == expected(steps, job, **more)
    for step in (steps, steps + 1):
        job.step(optimizer, parameters, step)
    assert everything(parameters, optimizer) == expected(steps + 2, job, **more)
    optimizer.store.close()
    assert held_back(optimizer) == ("compression" in more) * len(job.shapes)


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def names(cards: int) -> list[str]:
    return [f"card{i}of{cards}.nearstep" for i in range(cards)]


@dense_and_compressed
def test_another_number_of_cards_block_and_subgroup(more: dict[str, Any], tmp_path: Path) -> None:
    closed(url(tmp_path, 2), 2, **more)
    steps = 2
    for cards, subgroup, chunk in [
        *((2, 128, 512), (2, 512, 512)),
        *((3, 256, 1024), (3, 256, 512), (1, 128, 512)),
    ]:
        check(resumed(url(tmp_path, cards, subgroup, chunk), **more), steps, **more)
        steps += 2
        assert files(tmp_path) == names(cards)


def others(*names: Any) -> list[Any]:
    """The first one, and more for deep tests."""
    return [names[0], *(pytest.param(each, marks=pytest.mark.deep) for each in names[1:])]


@dense_and_compressed
@pytest.mark.parametrize("dtype", others(torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("optimizer", others("sgd", "adagrad", "amsgrad", "momentum"))
def test_other_rules_and_masters_of_16_bits(
    optimizer: str, dtype: torch.dtype, more: dict[str, Any], tmp_path: Path
) -> None:
    device = url(tmp_path, 2).replace("adam,adagrad", "adam_amsgrad,sgd,sgd_momentum,adagrad")
    job = Job(JOB.shapes, optimizer, dtype=dtype, skips=3)
    closed(device, 2, job, **more)
    check(job.resumed(device.replace("cards=2", "cards=3"), **more), 2, job, **more)


def test_8_bit_state_moves_between_cards_in_whole_blocks(tmp_path: Path) -> None:
    job = Job(((40, 16), (700,), (30, 20), (7,)), skips=3)
    eight = "chunk_bytes=1024&state_format=dynamic8"
    plain = PLAIN.replace("chunk_bytes=512", eight)
    closed(f"{url(tmp_path, 2, 256, 1024)}&state_format=dynamic8", 1, job)
    for steps, (cards, subgroup) in enumerate(((3, 512), (1, 1024), (2, 256)), 1):
        device = f"{url(tmp_path, cards, subgroup, 1024)}&state_format=dynamic8"
        parameters, optimizer = job.resumed(device)
        assert everything(parameters, optimizer) == job.after(plain, steps)
        job.step(optimizer, parameters, steps)
        assert everything(parameters, optimizer) == job.after(plain, steps + 1)
        optimizer.store.close()
        assert files(tmp_path) == names(cards)
    other = url(tmp_path, 2, 512, 2048)
    with pytest.raises(ResumeError, match=r"BlockLayout\(elements=512.*BlockLayout\(elements=256"):
        job.resumed(f"{other}&state_format=dynamic8")


def test_from_drives_of_the_host_and_back(tmp_path: Path) -> None:
    cards, host, back = tmp_path / "cards", tmp_path / "host", tmp_path / "back"
    for each in (cards, host, back):
        each.mkdir()
    on_host = [str(host / "a"), str(host / "b")]
    closed(DIMM, 2, drives=on_host, memory=MEMORY)
    kept = {name: (host / name).read_bytes() for name in ("a", "b")}
    check(resumed(url(cards, 3), on_host), 2)
    assert {name: (host / name).read_bytes() for name in kept} == kept
    check(resumed(url(cards, 3)), 4)
    more = {"drives": [str(back / "c")], "memory": MEMORY}
    check(resumed(DIMM, cards, **more), 6)
    check(resumed(DIMM, True, **more), 8)
    assert files(cards) == names(3)


def test_through_state_dicts_of_torch(tmp_path: Path) -> None:
    parameters, optimizer = trained(url(tmp_path, 2), 2)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    torchs = torch.optim.AdamW([{"params": theirs[::3]}, {"params": theirs[1:3]}], fused=True)
    torchs.load_state_dict(optimizer.state_dict())
    ours = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    other = tmp_path / "other"
    other.mkdir()
    second = JOB.make(ours, url(other, 3))
    second.load_state_dict(torchs.state_dict())
    check((ours, second), 2)


def cut_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The process ends at one of the things that a move does to the file system."""
    left = number

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return real(*arguments, **more)

        return call

    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(Store, "submit_write", counted(Store.submit_write))
    monkeypatch.setattr(Store, "commit", counted(Store.commit))
    monkeypatch.setattr(Store, "create", counted(Store.create))
    monkeypatch.setattr(resume.os, "fsync", counted(os.fsync))
    # what is left over by a process that has been killed is not tidied up by it
    monkeypatch.setattr("nearstep.torch.homes.opening.OpenStore.give_up", leave)
    return lambda: left


def leave(opened: Any) -> None:
    for store in (opened.source, getattr(opened, "store", None)):
        if store is not None:
            store.close()


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.deep)])
def test_a_move_that_is_cut_off_anywhere(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job([(40, 16), (7,)])
    first = tmp_path / "first"
    first.mkdir()
    closed(url(first, 2), 2, job)
    after, cuts = expected(2, job), 0
    while True:
        folder = tmp_path / f"cut{cuts}"
        shutil.copytree(first, folder)
        with monkeypatch.context() as patch:
            left = cut_at(cuts, patch)
            try:
                _, optimizer = job.resumed(url(folder, 3))
            except KeyboardInterrupt:
                pass
            else:
                assert 0 <= left() < every
                assert cuts > 8
                optimizer.store.close()
                break
        for cards in (3, 2) if cuts // every % 2 else (2, 3):
            parameters, optimizer = job.resumed(url(folder, cards))
            assert everything(parameters, optimizer) == after
            optimizer.store.close()
            assert set(names(cards)) <= set(files(folder))
        assert files(folder) == names(cards)
        shutil.rmtree(folder)
        cuts += every


@pytest.mark.parametrize("on_host", [False, True])
def test_an_optimizer_that_is_cut_off_anywhere_before_its_first_generation(
    on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has made its drives: `tests/host/storage/test_unfinished.py` has the rest."""
    job, cuts, refused = Job([(40, 16), (7,)]), 0, 0
    device, more, there = url(tmp_path, 2), {}, names(2)
    if on_host:
        there = ["a.drive", "b.drive"]
        device, more = DIMM, {"drives": [tmp_path / each for each in there], "memory": MEMORY}
    while True:
        with monkeypatch.context() as patch:
            left = cut_at(cuts, patch)
            try:
                _, optimizer = job.trained(device, **more)
            except KeyboardInterrupt:
                pass
            else:
                assert left() == 0
                break
        cuts += 1
        if not files(tmp_path):  # files that were being made are removed after an exception
            continue
        refused += 1
        with pytest.raises(NothingToResumeError, match="no generation was completed") as caught:
            job.resumed(device, **more)
        error = caught.value
        assert error.actual.startswith("none: ")
        assert error.expected.startswith("a step of AdamW of 2 parameters")
        assert [each.name for each in error.places] == there == files(tmp_path)
        for place in error.places[::-1]:
            place.unlink()
    assert refused >= 3
    optimizer.store.close()
    check(job.resumed(device, **more), 0, job)


def test_a_store_without_a_generation_is_taken_as_it_is() -> None:
    with drives(2, 1200) as on:
        parameters = JOB.parameters()
        with pytest.raises(NothingToResumeError, match="begin anew, without resume") as caught:
            JOB.make(parameters, card_url(2, 128), drives=on.store, resume=True)
        assert caught.value.places == ()
        JOB.make(parameters, card_url(2, 128), drives=on.store)
        assert on.store.generation == 1


def test_what_is_no_unfinished_move_is_never_removed(tmp_path: Path) -> None:
    closed(url(tmp_path, 2), 1)
    mine = tmp_path / "card0of3.nearstep"
    mine.write_bytes(b"a letter" * 1024)
    with pytest.raises(StorageError):
        resumed(url(tmp_path, 3))
    assert mine.read_bytes() == b"a letter" * 1024
    assert set(names(2)) < set(files(tmp_path))
    mine.unlink()
    closed(url(tmp_path, 3), 2)
    check(resumed(url(tmp_path, 2)), 1)  # its own
    assert files(tmp_path) == sorted(names(2) + names(3))
    with pytest.raises(ResumeError, match="those of 2 and of 3 cards"):
        resumed(url(tmp_path, 4))
    (tmp_path / "card1of3.nearstep").unlink()  # its first has steps: lost, not unfinished
    with pytest.raises(StorageError):
        resumed(url(tmp_path, 3))
    assert (tmp_path / "card0of3.nearstep").exists()
    (tmp_path / "card0of3.nearstep").unlink()  # nor is this what a move leaves
    with pytest.raises(StorageError, match="card0of3"):
        resumed(url(tmp_path, 3))
    assert files(tmp_path) == sorted([*names(2), "card2of3.nearstep"])


def test_drives_that_cannot_be_copied_from(tmp_path: Path) -> None:
    cards, target = tmp_path / "cards", tmp_path / "target"
    cards.mkdir()
    target.mkdir()
    other = Job([(40, 16), (9,)])
    _, optimizer = trained(url(cards, 2), 1)
    with pytest.raises(DriveLockedError, match="in use by"):
        resumed(url(target, 3), cards)
    with pytest.raises(DriveLockedError, match="in use by"):
        resumed(url(cards, 3))
    optimizer.store.close()
    with pytest.raises(OwnerError, match="AdamW of 4 parameters"):
        other.resumed(url(target, 3), cards)
    with pytest.raises(StorageError):
        other.resumed(url(cards, 3))
    with pytest.raises(StorageError, match="no drive in"):
        resumed(url(cards, 3), target)
    with pytest.raises(nearstep.errors.ArgumentError, match="resume must be"):
        resumed(url(cards, 3), [3])
    assert files(target) == []
    assert files(cards) == names(2)
    check(resumed(url(cards, 2)), 1)


def on_rule(path: Path, folder: Path, parameters: Sequence[Any], **more: Any) -> Any:
    device = url(folder, 2).replace("adam,adagrad", f"{path}:PLAIN")
    return nearstep.optim.from_rule(f"{path}:PLAIN", parameters, lr=-0.25, device=device, **more)


SCALED = """
from nearstep_spec.rule.expr import fma
from nearstep_spec.rule.optimizer import Number, Optimizer
from nearstep_spec.rule.rule import Rule


def _step(p, g, *, lr):
    return {"p": fma(lr, g, p)}


def scaled(lr):
    return FACTOR * lr


FACTOR = -0.25
PLAIN = Optimizer(
    rule=Rule("plain", _step, states=("p",), inputs=("g",), scalars=("lr",)),
    scalars=lambda lr: {"lr": scaled(lr)},
    hyper={"lr": Number(1.0, low=-1.0)},
)
"""


F = "FACTOR = -0.25"


@pytest.mark.parametrize(
    ("text", "changed"),
    [("fma(lr, g, p)", "fma(-lr, g, p)"), (F, "FACTOR = -0.5"), (F, f"{F}\nscaled = abs")],
)
def test_a_rule_file_that_changed_is_named(text: str, changed: str, tmp_path: Path) -> None:
    """The program of the rule; or it is the same, and what its registers get is not."""
    path, folder = tmp_path / "rule.py", tmp_path / "drives"
    path.write_text(SCALED)
    parameters = JOB.parameters()
    optimizer = on_rule(path, folder, parameters)
    JOB.step(optimizer, parameters, 1)
    kept = [p.detach().clone() for p in parameters]
    written = optimizer.store.meta["rule"]
    optimizer.store.close()
    path.write_text(SCALED.replace(text, changed))
    again = JOB.parameters()
    with pytest.raises(ResumeError, match=r"rule\.py:PLAIN that computes .* changed") as told:
        on_rule(path, folder, again, resume=True)
    assert told.value.actual == f"{written}: it was changed"
    assert re.fullmatch(
        r"a step of .*rule\.py:PLAIN that computes [0-9a-f]{16}", told.value.expected
    )
    assert written not in told.value.expected
    path.write_text(SCALED)
    found = on_rule(path, folder, again, resume=True)
    assert all(torch.equal(p, q) for p, q in zip(again, kept, strict=True))
    found.store.close()
