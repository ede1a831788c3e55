"""What error feedback holds back of compressed gradients is on the drives of cards, too.

That it moves to other cards is a column of `test_moving.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nearstep
from nearstep.storage.drive_errors import TornExtentError
from nearstep.torch import convert
from nearstep.torch.errors import HyperparameterError
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.homes.segments import HELD_BACK

from ..overflow.jobs import PLAIN, Job, bits, card_url, drives, everything, iteration, stack
from ..overflow.jobs import URL as DIMM
from .test_drives import flip
from .test_moving import (
    JOB,
    SHARE,
    check,
    closed,
    expected,
    files,
    held_back,
    names,
    resumed,
    small,
    trained,
    url,
)

LEFT_OUT = {**SHARE, "save_residual": False}

__all__ = ["small"]


def test_its_bytes_have_a_counter_of_their_own() -> None:
    elements = sum(convert.size(p) for p in JOB.parameters())
    job, padding = Job(JOB.shapes), 15 * len(JOB.shapes)
    with drives(2, 1200) as on:
        parameters, optimizer = job.trained(card_url(2, 128), drives=on.store, **SHARE)
        before = optimizer.traffic.as_dict()
        for step in range(3):
            job.step(optimizer, parameters, step)
            after = optimizer.traffic.as_dict()
            assert after["to_drives"] == before["to_drives"]
            assert after["from_drives"] == before["from_drives"] == 0
            written = after["residuals_to_drives"] - before["residuals_to_drives"]
            assert 4 * elements <= written <= 4 * (elements + padding)
            before = after
        assert before["residuals_from_drives"] == 0
        _, found = job.trained(card_url(2, 128), drives=on.store, resume=True, **SHARE)
        assert found.traffic.residuals_from_drives == 4 * elements
        found.state_dict()
        assert found.traffic.residuals_to_drives == 0


def test_without_error_feedback_or_compression_nothing_of_it_is_there() -> None:
    for more in ({}, {"compression": 0.1, "error_feedback": False}, LEFT_OUT):
        with drives(2, 1200) as on:
            _, optimizer = JOB.trained(card_url(2, 128), 2, drives=on.store, **more)
            assert optimizer.traffic.residuals_to_drives == 0
            assert not [name for name in on.store.tensors if HELD_BACK in name]


def test_a_step_that_left_it_out_is_resumed_on_request_alone(tmp_path: Path) -> None:
    last = closed(url(tmp_path, 2), 2, **LEFT_OUT)
    for cards in (2, 3):
        with pytest.raises(ResumeError, match="resume with save_residual=False") as caught:
            resumed(url(tmp_path, cards), **SHARE)
        assert caught.value.expected == "what error feedback held back"
        assert files(tmp_path) == names(2)
    without = {key: value for key, value in last.items() if not key.endswith(".residual")}
    assert len(without) < len(last)
    for more in (LEFT_OUT, {**SHARE, "error_feedback": False}, {}):
        found = resumed(url(tmp_path, 2), **more)
        assert everything(*found) == without
        found[1].store.close()
    with pytest.raises(HyperparameterError, match="save_residual must be True or False"):
        nearstep.optim.SGD([nn.Parameter(torch.ones(3))], device=DIMM, save_residual=1)


def test_it_is_left_out_from_a_step_on(tmp_path: Path) -> None:
    closed(url(tmp_path, 2), 2, **SHARE)
    parameters, optimizer = resumed(url(tmp_path, 2), **LEFT_OUT)
    assert everything(parameters, optimizer) == expected(2, **SHARE)
    JOB.step(optimizer, parameters, 2)
    assert everything(parameters, optimizer) == expected(3, **SHARE)
    assert not [name for name in optimizer.store.tensors if HELD_BACK in name]
    optimizer.store.close()
    with pytest.raises(ResumeError, match="a step that left it out"):
        resumed(url(tmp_path, 2), **SHARE)


def test_through_drives_of_the_host_and_back(tmp_path: Path) -> None:
    """Those have no compression: what is held back waits."""
    cards, host = tmp_path / "cards", [str(tmp_path / "a"), str(tmp_path / "b")]
    closed(url(cards, 2), 2, **SHARE)
    on_host: dict[str, Any] = {"drives": host, "memory": 1 << 16}
    for resume in (cards, True):
        found = resumed(DIMM, resume, **on_host)
        assert everything(*found) == expected(2, **SHARE)
        found[1].store.close()
    for name in names(2):
        (cards / name).unlink()
    check(resumed(url(cards, 3), host, **SHARE), 2, **SHARE)


def test_through_a_state_dict(tmp_path: Path) -> None:
    parameters, optimizer = trained(url(tmp_path, 2), 2, **SHARE)
    saved = optimizer.state_dict()
    other = tmp_path / "other"
    ours = [nn.Parameter(p.detach().clone()) for p in parameters]
    second = JOB.make(ours, url(other, 3), **SHARE)
    second.load_state_dict(saved)
    second.store.close()  # what was loaded is a generation
    check(resumed(url(other, 3), **SHARE), 2, **SHARE)
    for state in saved["state"].values():
        del state["residual"]
    optimizer.load_state_dict(saved)
    optimizer.store.close()
    _, third = resumed(url(tmp_path, 2), **SHARE)
    assert held_back(third) == 0
    assert not [name for name in third.store.tensors if HELD_BACK in name]
    third.store.close()


def test_what_the_user_changed_of_it_counts_from_the_next_generation_on(tmp_path: Path) -> None:
    """Also of a parameter that has no gradient then, and again of a tensor that the user keeps."""
    parameters, optimizer = trained(url(tmp_path, 2), 2, **SHARE)
    changed = optimizer.state[parameters[0]]["residual"]
    seen = []
    for step in (3, 6):  # parameter 0 has no gradient
        changed.numpy()[3, 4] += 1.5
        JOB.step(optimizer, parameters, step)
        assert parameters[0].grad is None
        seen.append(bits(changed))
    optimizer.store.close()
    again, found = resumed(url(tmp_path, 2), **SHARE)
    assert bits(found.state[again[0]]["residual"]) == seen[-1] != seen[0]
    found.store.close()


def test_a_damaged_block_of_it_is_named(tmp_path: Path) -> None:
    closed(url(tmp_path, 2), 2, **SHARE)
    damaged = flip(tmp_path, f"0.{HELD_BACK}@1")
    with pytest.raises(TornExtentError, match=HELD_BACK) as caught:
        resumed(url(tmp_path, 2), **SHARE)
    assert (caught.value.path, caught.value.whole) == (str(damaged), (2,))


LAYERS = 3


def offloaded(device: str, steps: range, **more: Any) -> tuple[dict[str, bytes], Any]:
    """An offloaded model, whose backward leaves pairs alone of each gradient."""
    model, optimizer = stack(device, **SHARE, **more)
    with nearstep.offload(model, optimizer, budget=8000):
        for step in steps:
            iteration(model, optimizer, step)
        optimizer.zero_grad()
    return everything(list(model.parameters()), optimizer), optimizer


def test_an_offloaded_model(tmp_path: Path) -> None:
    alone, _ = offloaded(PLAIN, range(4))
    _, optimizer = offloaded(url(tmp_path, 2), range(2))
    optimizer.store.close()
    found, optimizer = offloaded(url(tmp_path, 3), range(2, 4), resume=True)
    assert found == alone
    assert held_back(optimizer) == 2 * LAYERS
    optimizer.store.close()
