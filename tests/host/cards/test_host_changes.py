"""A step begins before it is known whether the host has changed a large parameter."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import nearstep
import nearstep.torch.convert as convert
from nearstep.storage.drive_errors import StorageError, UncertainCommitError
from nearstep.torch.errors import InterruptedStepError
from nearstep_sim.models.drive import FailAt

from ..overflow.jobs import PLAIN, Drives, Job, bits, card_url, drives, everything

WAIT_S = 60.0
BLOCKS = 1200


class Late:
    """Checks that end only after the drives have written something; how many have waited so."""

    def __init__(self, on: Drives, patch: pytest.MonkeyPatch, parameters: Any) -> None:
        self.waited = 0
        self.unchanged = 0
        self._written = threading.Event()
        self._before: list[bytes] = []
        make_all = convert.PartSums.make_all

        def late(sums: convert.PartSums) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self._written.wait(WAIT_S), "nothing was written before the look had ended"
                self.unchanged += [bits(p) for p in parameters] == self._before
                self.waited += 1
            make_all(sums)

        def seen(action: str, _: int) -> None:
            if action == "write":
                self._written.set()

        patch.setattr(convert.PartSums, "make_all", late)
        for place in on.places:
            place.fault = seen
        self._parameters = parameters

    def begin(self) -> None:
        """A step comes."""
        self._written.clear()
        self._before = [bits(p) for p in self._parameters]


def change(parameters: Any, step: int) -> None:
    """Behind autograd's back, at another place in each step."""
    for number, parameter in enumerate(parameters):
        flat = parameter.data.view(-1)
        flat[(step * 7919 + number) % flat.numel()] = 3.0 + step


@pytest.mark.parametrize(
    ("dtype", "cards"), [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 2)]
)
def test_a_change_that_is_found_late(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cards: int
) -> None:
    """Two groups, so two units; a small parameter beside large ones."""
    job = Job([(130, 128), (17000,), (16,), (16400,)], dtype=dtype)
    plain, own = job.parameters(), job.parameters()
    expected = job.make(plain, PLAIN.replace("1MiB", "4MiB"))
    compared = 0
    with drives(cards, BLOCKS) as on:
        found = job.make(own, card_url(cards, 2048), drives=on.store)
        late = Late(on, monkeypatch, own)
        generations = []
        for step in range(6):
            if step in (2, 3, 5):
                change(own[:2] if step == 5 else own[:1], step)
                change(plain[:2] if step == 5 else plain[:1], step)
            late.begin()
            before = on.store.generation
            job.step(expected, plain, step)
            job.step(found, own, step)
            generations.append(on.store.generation - before)
            assert everything(own, found) == everything(plain, expected), step
            compared += 1
    assert compared == 6
    # After one that had to begin anew a step looks first; what it finds keeps the next one so.
    assert generations == [1, 1, 2, 2, 1, 2]
    assert late.waited == late.unchanged > 0


@contextmanager
def begun(*, changed: bool) -> Iterator[tuple[Drives, Any, Any, Job]]:
    """After a step; the host may have changed a large parameter since."""
    job = Job([(130, 128), (16,)])
    with drives(2, BLOCKS) as on:
        parameters, optimizer = job.trained(card_url(2, 2048), 1, drives=on.store)
        if changed:
            change(parameters[:1], 0)
        yield on, parameters, optimizer, job


def expected_after_two(*, changed: bool) -> dict[str, bytes]:
    job = Job([(130, 128), (16,)])
    parameters, optimizer = job.trained(PLAIN, 1)
    if changed:
        change(parameters[:1], 0)
    job.step(optimizer, parameters, 1)
    return everything(parameters, optimizer)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize(
    "number", [0, 5, *(pytest.param(each, marks=pytest.mark.deep) for each in range(1, 60, 3))]
)
def test_what_the_host_has_changed_outlasts_a_step_that_fails(
    action: str, changed: bool, number: int
) -> None:
    with begun(changed=changed) as (on, parameters, optimizer, job):
        before, sound = [bits(p) for p in parameters], on.places[0].fault
        on.places[0].fault = fault = FailAt(action, number, errno.EIO)
        try:
            job.step(optimizer, parameters, 1)
        except UncertainCommitError:
            assert fault.fired == 1
            with pytest.raises(InterruptedStepError, match="UncertainCommitError"):
                job.step(optimizer, parameters, 1)
            return
        except StorageError:
            assert fault.fired == 1
            assert [bits(p) for p in parameters] == before
            assert optimizer.traffic.steps == 1
            on.places[0].fault = sound
            job.step(optimizer, parameters, 1)
        else:
            on.places[0].fault = sound
            # What was read ahead is read again, a step that begins anew drops the first attempt,
            # and a step of fewer transfers meets no fault.
            assert not fault.fired or action == "read" or changed
        assert everything(parameters, optimizer) == expected_after_two(changed=changed)


def test_a_change_outlasts_a_failure_to_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step begins anew, and the drive takes nothing."""
    with begun(changed=True) as (on, parameters, optimizer, job):
        before = [bits(p) for p in parameters]
        abort = on.store.abort
        fault, sound = FailAt("write", 0, errno.EIO), [each.fault for each in on.places]

        def aborted() -> None:
            abort()
            on.places[0].fault = on.places[1].fault = fault

        monkeypatch.setattr(on.store, "abort", aborted)
        with pytest.raises(StorageError):
            job.step(optimizer, parameters, 1)
        monkeypatch.undo()
        for place, none in zip(on.places, sound, strict=True):
            place.fault = none
        assert fault.fired == 1
        assert [bits(p) for p in parameters] == before
        job.step(optimizer, parameters, 1)
        assert everything(parameters, optimizer) == expected_after_two(changed=True)


SUBGROUP = 4096
COUNT = 5 * SUBGROUP
ROOMS = 3 * SUBGROUP


def test_a_parameter_that_was_changed_is_read_again(tmp_path: Path) -> None:
    """What is read ahead of a step counts only if nothing was written since."""
    url = f"golden:smartssd?subgroup_elements={SUBGROUP}&drive={tmp_path}"
    torch.manual_seed(7)
    own = torch.nn.Parameter(torch.randn(COUNT))
    twin = torch.nn.Parameter(own.detach().clone())
    optimizer = nearstep.optim.AdamW([own], lr=1e-2, device=url)
    expected = torch.optim.AdamW([twin], lr=1e-2, fused=True)
    read, compared = [], 0
    for step in range(6):
        own.grad = torch.randn(COUNT)
        twin.grad = own.grad.clone()
        if step in (2, 4):  # behind autograd's back, in the first and in the last subgroup
            for each in (own, twin):
                each.data[0 if step == 2 else -1] = 3.0
        before = optimizer.traffic.drives_to_cards
        optimizer.step()
        expected.step()
        read.append(optimizer.traffic.drives_to_cards - before)
        assert torch.equal(own.view(torch.int32), twin.view(torch.int32))
        compared += 1
    assert compared == 6
    once, again = 12 * COUNT, 12 * (COUNT + ROOMS)  # the rooms were filled in vain
    assert read[1:] == [once, again, once, again, once]
