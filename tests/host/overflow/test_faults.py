"""Drives that fail, are full, or are not those of the model."""

from __future__ import annotations

import copy
import errno
import gc
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parameter import UninitializedParameter

import nearstep
from nearstep.errors import ArgumentError
from nearstep.storage.drive_errors import (
    DriveFullError,
    DriveIOError,
    DriveVanishedError,
    NotADriveError,
    OwnerError,
    StorageError,
    UncertainCommitError,
)
from nearstep.storage.store import Store
from nearstep.torch.errors import (
    BudgetFormatError,
    HyperparameterError,
    InterruptedStepError,
    ParameterError,
    StateError,
    UnsupportedOptionError,
)
from nearstep.torch.homes.errors import MemoryTooSmallError, ResumeError
from nearstep.torch.homes.segments import HeldStore
from nearstep_sim.models.drive import FailAt

from .jobs import HOMES, URL, Drives, Job, bits, drives, everything

JOB = Job(((40, 16), (16,), (30, 20)))
LARGE = Job(((160, 128), (16,), (128, 130)))
MEMORY = 11_000
"""Not enough for two of the large parameters."""


def touch(optimizer: Any, parameters: Any, only: int | None = None) -> None:
    """Change a moment and a parameter on the host, or one parameter alone, which the next step
    takes over."""
    if only is None:
        optimizer.state[parameters[1]]["exp_avg"].add_(0.5)
    with torch.no_grad():
        parameters[only or 0][3:7].mul_(1.5)


@cache
def expected_after(
    steps: int, *, touched: bool = False, job: Job = JOB, only: int | None = None
) -> dict[str, bytes]:
    """Without drives; with changes after the first step."""
    parameters, optimizer = job.trained(URL)
    for step in range(steps):
        job.step(optimizer, parameters, step)
        if touched and step == 0:
            touch(optimizer, parameters, only)
    return everything(parameters, optimizer)


@contextmanager
def prepared(
    device: str = URL,
    *,
    touched: bool = True,
    job: Job = JOB,
    only: int | None = None,
    **more: Any,
) -> Iterator[tuple[Drives, list[Any], Any]]:
    """Drives, parameters and an optimizer that has made a step."""
    with drives() as on:
        parameters, optimizer = job.trained(device, 1, drives=on.store, **more)
        if touched:
            touch(optimizer, parameters, only)
        yield on, parameters, optimizer


def actions_of_a_step(action: str, device: str = URL, *, job: Job = JOB, **more: Any) -> list[int]:
    """How many of an action the second step has, on each drive."""
    found = [0, 0]

    def count(drive: int) -> Callable[[str, int], None]:
        def seen(what: str, block: int) -> None:
            found[drive] += what == action

        return seen

    with prepared(device, job=job, **more) as (on, parameters, optimizer):
        for index, place in enumerate(on.places):
            place.fault = count(index)
        job.step(optimizer, parameters, 1)
    found[0] -= action == "write"  # the second copy of the superblock may fail
    return found


def check_fault(
    fault: FailAt,
    drive: int,
    device: str = URL,
    *,
    job: Job = JOB,
    only: int | None = None,
    **more: Any,
) -> Any:
    """One fails in the second step; the class of the error, if the step had one."""
    expected = partial(expected_after, touched=True, job=job, only=only)
    with prepared(device, job=job, only=only, **more) as (on, parameters, optimizer):
        before = [bits(p) for p in parameters]
        on.places[drive].fault = fault
        error: type[StorageError] | None = None
        try:
            job.step(optimizer, parameters, 1)
        except StorageError as caught:
            error = type(caught)
            if fault.lasts:
                with pytest.raises(StorageError):
                    optimizer.state_dict()
        assert fault.fired >= 1
        on.places[drive].fault = lambda action, block: None
        found = everything(parameters, optimizer)
        made = found == expected(2)
        assert made or found == expected(1)
        assert made == (error is None) or error is UncertainCommitError
        if error is not None and error is not UncertainCommitError:
            assert [bits(p) for p in parameters] == before
            assert optimizer.traffic.steps == 1
        for step in range(2 if made else 1, 3):
            job.step(optimizer, parameters, step)
        assert everything(parameters, optimizer) == expected(3)
        return error


each_home = pytest.mark.parametrize("home", HOMES)


@pytest.mark.parametrize(
    ("home", "code"),
    [
        ("host", errno.EIO),
        ("host", errno.ENODEV),
        ("cards", errno.EIO),
        ("processor", errno.EIO),
        pytest.param("cards", errno.ENODEV, marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_after_an_error_of_a_drive_everything_is_as_before_the_step(
    action: str, code: int, home: str
) -> None:
    device, _, more = HOMES[home]
    counts = actions_of_a_step(action, device, **more)
    assert min(counts) > 0
    errors = [
        check_fault(FailAt(action, number, code), drive, device, **more)
        for drive, count in enumerate(counts)
        for number in {count // 2, count - 1}
    ]
    assert (None in errors) == (action == "flush")  # the superblock was written
    assert len(errors) - errors.count(None) >= 2
    assert UncertainCommitError not in errors


@pytest.mark.parametrize(
    ("action", "only"),
    [("read", None), ("write", None), ("flush", None), ("read", 1), ("read", 2), ("write", 2)],
)
def test_large_parameters_of_the_processor_are_read_back_after_an_error(
    action: str, only: int | None
) -> None:
    """They are updated where the host has them, and no copy of them is kept; one that was changed
    and had not been updated keeps the change."""
    options: dict[str, Any] = {"job": LARGE, "memory": 170_000, "only": only}
    counts = actions_of_a_step(action, "host:", **options)
    numbers = [(drive, n) for drive, count in enumerate(counts) for n in range(count)]
    some = numbers[:: max(1, len(numbers) // 5)]
    assert len(some) >= 2
    for drive, number in some:
        check_fault(FailAt(action, number), drive, "host:", **options)


@pytest.mark.parametrize("only", [0, 1, 2])
def test_a_changed_parameter_of_the_processor_is_found_while_others_are_updated(only: int) -> None:
    """A large one is a generation of its own, and the step is repeated; then changes are looked for
    before each step until there is none.

    A generation that was dropped before stays so.
    """
    own = 2 if only != 1 else 1
    with drives() as on:
        parameters, optimizer = LARGE.trained("host:", 1, drives=on.store, memory=170_000)
        optimizer.keep("best")
        optimizer.store.drop("best")
        for step in range(1, 5):
            if step != 3:
                touch(optimizer, parameters, only)
            before = on.store.generation
            LARGE.step(optimizer, parameters, step)
            assert on.store.generation == before + (1 if step == 3 else own)
            assert not on.store.kept
        found = everything(parameters, optimizer)
    plain, without = LARGE.trained("host:", 1)
    for step in range(1, 5):
        if step != 3:
            touch(without, plain, only)
        LARGE.step(without, plain, step)
    assert found == everything(plain, without)
    assert len(found) > 10


@pytest.mark.deep
@each_home
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_every_read_write_and_flush_of_a_step(action: str, code: int, home: str) -> None:
    device, _, more = HOMES[home]
    counts = actions_of_a_step(action, device, **more)
    errors = [
        check_fault(FailAt(action, number, code), drive, device, **more)
        for drive, count in enumerate(counts)
        for number in range(count)
    ]
    assert len(errors) == sum(counts) > 2
    commits = 2  # what was changed on the host, and the step
    counted = {"read": 0, "write": commits - 1, "flush": commits}  # less the last second copy
    assert errors.count(None) == counted[action]


@each_home
@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_a_drive_that_fails_from_then_on_is_asked_when_the_optimizer_is_used(
    home: str, action: str
) -> None:
    device, _, more = HOMES[home]
    count = actions_of_a_step(action, device, **more)[0]
    errors = [
        check_fault(FailAt(action, number, lasts=True), 0, device, **more)
        for number in (count // 2, count - 1)
    ]
    assert (UncertainCommitError in errors) == (action != "read")


def test_a_drive_that_is_gone_for_good() -> None:
    with drives() as on:
        parameters, optimizer = JOB.trained(URL, 1, drives=on.store, memory=MEMORY)
        before = everything(parameters, optimizer)

        def gone(action: str, block: int) -> None:
            raise DriveVanishedError("memory1", "it is gone")

        on.places[1].fault = gone
        for _ in range(2):
            with pytest.raises(StorageError):
                JOB.step(optimizer, parameters, 1)
        with pytest.raises(StorageError):
            optimizer.state_dict()
        on.places[1].fault = lambda action, block: None
        assert everything(parameters, optimizer) == before
        JOB.step(optimizer, parameters, 1)
        assert everything(parameters, optimizer) == expected_after(2)


def test_drives_that_are_full() -> None:
    large = Job([(64, 64)])
    with drives(1, 8) as on, pytest.raises(DriveFullError) as caught:
        large.make(large.parameters(), URL, drives=on.store, memory="100%")
    assert caught.value.expected > caught.value.actual >= 0


@pytest.mark.parametrize(
    ("home", "count", "blocks"),
    [
        ("host", 1, range(8, 34, 5)),
        ("cards", 2, (16, 20, 24)),
        ("processor", 1, range(8, 34, 5)),
    ],
)
def test_drives_that_are_too_small_for_another_step(
    home: str, count: int, blocks: Sequence[int]
) -> None:
    """Room for the first generations, and not for more."""
    device, _, more = HOMES[home]
    refused = 0
    for each in blocks:
        with drives(count, each) as on:
            try:
                parameters, optimizer = JOB.trained(device, drives=on.store, **more)
            except DriveFullError:
                continue
            for step in range(3):
                before = everything(parameters, optimizer)
                try:
                    JOB.step(optimizer, parameters, step)
                except StorageError:
                    assert everything(parameters, optimizer) == before == expected_after(step)
                    refused += 1
                    break
    assert refused >= 2


def test_drives_of_another_model_or_of_none(tmp_path: Path) -> None:
    place = tmp_path / "a.drive"
    other = Job([(40, 16), (16,), (30, 21)])
    with drives() as on:
        parameters = JOB.parameters()
        with pytest.raises(ResumeError, match="not none"):
            JOB.make(parameters, URL, drives=on.store, memory=MEMORY, resume=True)
        JOB.step(JOB.make(parameters, URL, drives=on.store, memory=MEMORY), parameters, 0)
        generation = on.store.generation
        fresh = other.parameters()
        held = [bytes(p.detach().numpy().tobytes()) for p in fresh]
        with pytest.raises(OwnerError, match="AdamW of 3 parameters") as caught:
            other.make(fresh, URL, drives=on.store, memory=1 << 20, resume=True)
        assert caught.value.expected != caught.value.actual
        assert [bytes(p.detach().numpy().tobytes()) for p in fresh] == held
        with pytest.raises(OwnerError, match="Adam of 3"):
            nearstep.optim.Adam(parameters, device=URL, drives=on.store, memory=MEMORY, resume=True)
        with pytest.raises(ResumeError, match="AdamW of 3 parameters"):
            JOB.make(JOB.parameters(), URL, drives=on.store, memory=MEMORY)
        assert on.store.generation == generation
    place.write_bytes(b"no drive" * 4096)
    with pytest.raises(StorageError):
        JOB.make(JOB.parameters(), URL, drives=[place], memory=MEMORY, resume=True)
    with pytest.raises(NotADriveError):
        JOB.make(JOB.parameters(), URL, drives=[place], memory=MEMORY)
    assert place.read_bytes() == b"no drive" * 4096


def test_files_of_an_optimizer_that_was_given_more_parameters(tmp_path: Path) -> None:
    make = partial(nearstep.optim.AdamW, drives=[tmp_path / "a.drive"], memory="1MiB")
    parameters = [*JOB.parameters(), UninitializedParameter()]
    optimizer = make(parameters[:1])
    optimizer.add_param_group({"params": parameters[1:]})
    parameters[-1].materialize((3, 5))
    torch.nn.init.ones_(parameters[-1])
    JOB.step(optimizer, parameters, 0)
    state = everything(parameters, optimizer)
    del optimizer
    gc.collect()
    with pytest.raises(OwnerError, match=r"must be 'AdamW of 1 .*not 'AdamW of 4 "):
        make(parameters[:1], resume=True)
    again = [torch.nn.Parameter(torch.zeros_like(p)) for p in parameters]
    groups = [{"params": again[:1]}, {"params": again[1:]}]
    assert everything(again, make(groups, resume=True)) == state


def test_files_are_made_and_given_back(tmp_path: Path) -> None:
    places = [tmp_path / "a.drive", tmp_path / "b.drive"]
    with pytest.raises(HyperparameterError, match="at least"):
        _on_files(JOB.parameters(), places, memory="10B")
    assert not any(each.exists() for each in places)
    parameters = JOB.parameters()
    optimizer = _on_files(parameters, places, memory="60%")
    JOB.step(optimizer, parameters, 0)
    state = everything(parameters, optimizer)
    del optimizer
    gc.collect()
    again = JOB.resumed(URL, drives=places[::-1], memory="100%")
    assert everything(*again) == state == expected_after(1)


def _on_files(parameters: Any, places: list[Path], **more: Any) -> Any:
    try:
        return JOB.make(parameters, URL, drives=places, **more)
    except StorageError as error:
        if "direct=False" in str(error):
            pytest.skip(f"there is no O_DIRECT in {places[0].parent}: {error}")
        raise


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"drives": ["x"]}, HyperparameterError, "memory must be given with drives"),
        ({"memory": 1}, HyperparameterError, "memory must be given with drives alone"),
        ({"resume": True}, HyperparameterError, "resume must be given with drives alone"),
        ({"drives": ["x"], "memory": 1, "eviction": "lru"}, HyperparameterError, "eviction must"),
        ({"drives": ["x"], "memory": 1, "resume": 1.5}, HyperparameterError, "resume must be True"),
        ({"drives": "x", "memory": 1}, ArgumentError, "a list of at least one path"),
        ({"drives": [], "memory": 1}, ArgumentError, "a list of at least one path"),
        ({"drives": [3], "memory": 1}, ArgumentError, "by its path"),
        ({"drives": ["x"], "memory": 1, "max_grad_norm": 1.0}, UnsupportedOptionError, "clip_grad"),
        ({"drives": ["x"], "memory": 1, "compression": 0.5}, UnsupportedOptionError, "whole"),
    ],
)
@pytest.mark.parametrize("device", [URL, "host:"])
def test_settings_that_are_refused(
    device: str, given: dict[str, Any], error: type, says: str
) -> None:
    if device == "host:" and error is UnsupportedOptionError:
        says = "for a device"
    with pytest.raises(error, match=says):
        JOB.make(JOB.parameters(), device, **given)


def test_what_the_processor_has_not_with_drives(tmp_path: Path) -> None:
    own = {"drives": [tmp_path / "a"], "memory": "1MiB"}
    kinds = (torch.float32, torch.bfloat16)
    mixed = [torch.nn.Parameter(torch.zeros(8, dtype=each)) for each in kinds]
    with pytest.raises(UnsupportedOptionError, match=r"torch\.bfloat16 and torch\.float32"):
        nearstep.optim.AdamW(mixed, **own)
    with pytest.raises(MemoryTooSmallError, match="at least 16384 bytes, not 16383"):
        nearstep.optim.AdamW([torch.nn.Parameter(torch.zeros(1024))], **{**own, "memory": 16383})
    assert list(tmp_path.iterdir()) == []
    with drives() as on:
        model = torch.nn.Linear(8, 8)
        optimizer = nearstep.optim.AdamW(model.parameters(), drives=on.store, memory="1MiB")
        with pytest.raises(ParameterError, match="as the rule keeps them"):
            optimizer.add_param_group({"params": mixed[1:]})
        assert len(optimizer.param_groups) == 1


def test_state_that_a_step_adds_has_the_memory_that_there_is() -> None:
    job = Job([(200, 200)], "sgd")
    results = []
    for overflows in (False, True):
        with drives() as on:
            more = {"drives": on.store, "memory": 4 * 200 * 200 + 4096} if overflows else {}
            parameters, optimizer = job.trained("host:", 1, **more)
            optimizer.param_groups[0]["momentum"] = 0.9
            job.step(optimizer, parameters, 1)
            results.append(everything(parameters, optimizer))
    assert results[0] == results[1]


def test_options_that_are_scalars_of_numpy_or_infinite() -> None:
    with drives() as on:
        parameters, optimizer = JOB.trained(URL, drives=on.store, memory=MEMORY)
        optimizer.param_groups[0]["lr"] = rate = 1e-3 * np.float32(0.5)
        JOB.step(optimizer, parameters, 0)
        _, again = JOB.resumed(URL, drives=on.store, memory=MEMORY)
        assert again.param_groups[0]["lr"] == float(rate)
        optimizer.param_groups[1]["best"] = math.inf
        with pytest.raises(StateError, match=r"group 1 must have an option 'best'.*inf"):
            JOB.step(optimizer, parameters, 1)


def test_copies_are_refused() -> None:
    with drives() as on:
        optimizer = JOB.make(JOB.parameters(), URL, drives=on.store, memory=MEMORY)
        for action in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedOptionError, match="use state_dict"):
                action(optimizer)


def test_updates_in_backward_are_refused_on_drives_of_cards() -> None:
    model, early = torch.nn.Linear(8, 8), {"updates": "in-backward"}
    make = partial(nearstep.optim.AdamW, [*model.parameters()], device=HOMES["cards"][0])
    with drives() as on:
        with pytest.raises(UnsupportedOptionError, match=r"drives of cards .*at-step"):
            make(drives=on.store, **early)
        optimizer = make(drives=on.store)
        with pytest.raises(UnsupportedOptionError, match=r"drives of cards .*at-step"):
            nearstep.offload(model, optimizer, budget="1MiB", **early)  # type: ignore[arg-type]


def test_an_error_while_a_checkpoint_is_loaded() -> None:
    with drives() as on:
        parameters, optimizer = JOB.trained(URL, 1, drives=on.store, memory=MEMORY)
        saved, kept = optimizer.state_dict(), [p.detach().clone() for p in parameters]
        JOB.step(optimizer, parameters, 1)
        on.places[0].fault = FailAt("write", 1)
        with pytest.raises(DriveIOError):
            optimizer.load_state_dict(saved)
        with pytest.raises(InterruptedStepError, match="load_state_dict"):
            optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(saved)
        assert everything(parameters, optimizer) == expected_after(1)
        JOB.step(optimizer, parameters, 1)
        assert everything(parameters, optimizer) == expected_after(2)


def test_a_checkpoint_that_is_loaded_while_the_drives_do_not_answer() -> None:
    """Nothing is used until it is loaded: the state is partly that of the checkpoint."""
    with drives() as on:
        parameters, optimizer = JOB.trained("host:", 1, drives=on.store, memory=MEMORY)
        saved, kept = optimizer.state_dict(), [p.detach().clone() for p in parameters]
        JOB.step(optimizer, parameters, 1)
        on.places[0].fault = FailAt("flush", 1, lasts=True)
        with pytest.raises(UncertainCommitError):
            JOB.step(optimizer, parameters, 2)
        with pytest.raises(DriveIOError):
            optimizer.load_state_dict(saved)
        on.places[0].fault = lambda action, block: None
        with pytest.raises(InterruptedStepError, match="load_state_dict"):
            JOB.step(optimizer, parameters, 2)
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(saved)
        assert everything(parameters, optimizer) == expected_after(1)


def test_of_two_optimizers_on_a_store_the_one_that_made_no_step_is_refused() -> None:
    with drives() as on:
        parameters, optimizer = JOB.trained(URL, 1, drives=on.store, memory=MEMORY)
        again, other = JOB.resumed(URL, drives=on.store, memory=MEMORY)
        assert everything(parameters, optimizer) == everything(again, other)
        JOB.step(other, again, 1)
        for action in (optimizer.step, optimizer.state_dict, partial(optimizer.keep, "best")):
            with pytest.raises(ResumeError, match=r"generation 2 of this .*, not another's 3"):
                action()
        for meta in (on.store.meta, {}):  # the program's own commits
            on.store.commit(meta)
            assert everything(again, other) == expected_after(2)
        JOB.step(other, again, 2)
        assert everything(again, other) == expected_after(3)


def test_memory_that_cannot_be_read_is_called_by_its_name(tmp_path: Path) -> None:
    with drives() as on:
        for store in (on.store, [tmp_path / "a"]):
            with pytest.raises(BudgetFormatError, match=r"^memory must be.*much"):
                JOB.trained(URL, drives=store, memory="much")
    assert list(tmp_path.iterdir()) == []


def test_drives_that_are_read_again_are_at_the_generation_that_was_resumed() -> None:
    """Not at a newer one that the user left: a commit that failed would count as made."""
    with drives(1) as on:
        for step in (1, 2):
            on.store.commit({"step": step})
        older = Store(on.store.drives, generation=1)
        held = HeldStore(older, owns=False)
        held.doubt()
        assert held.store.generation == 1
        assert held.store.commit({"step": 3}) == 3
        held.doubt()
        assert held.store.generation == 3
