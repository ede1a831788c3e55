"""Random programs of a training whose state lies on drives, beside one whose state does not.

An episode makes an optimizer on drives and one in memory, does the same to both, and compares every
bit of parameters, state and options after each operation. An operation may meet an error of a
drive: then the state is the one before or the one after. Nothing but the public interface is used,
and one place where errors are made: `BlockFile`, the bottom of the storage.
"""

from __future__ import annotations

import copy
import errno
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import nearstep
from nearstep.storage.blocks import BlockFile
from nearstep.storage.drive_errors import DriveIOError, StorageError, UncertainCommitError

from .jobs import bits
from .jobs import everything as bits_of_all

SMALL = ((16, 16), (16,), (16, 12))
LARGE = ((128, 130), (16,), (130, 128))
"""Sizes are multiples of 16: torch's fused step has the same bits then. Those from 16384 elements
on are large to an optimizer: it looks whether they were changed while a step begins."""

MOMENTS = ("exp_avg", "exp_avg_sq")
FOREVER = 1 << 30


class Fault(NamedTuple):
    """Errors of drives in one operation.

    Attributes
    ----------
    action : `read`, `write` or `flush`.
    number : the first call of it that fails, counted from 0.
    times : calls that fail, one after the other.
    done : what fails has been done all the same.
    """

    action: str
    number: int
    times: int
    done: bool


class FaultPoint:
    """Counts the calls of all drives, and makes errors; `fired` of them since `arm`."""

    def __init__(self) -> None:
        self.fired = 0
        self._fault: Fault | None = None
        self._count = 0
        self._lock = threading.Lock()

    @contextmanager
    def arm(self, fault: Fault | None) -> Iterator[None]:
        """Errors of this operation."""
        self._fault, self._count, self.fired = fault, 0, 0
        try:
            yield
        finally:
            self._fault = None

    def meet(self, action: str) -> bool | None:
        """A call begins: None if it goes well; whether it is to be done before it fails."""
        fault = self._fault
        if fault is None or action != fault.action:
            return None
        with self._lock:
            at, self._count = self._count, self._count + 1
            if not fault.number <= at < fault.number + fault.times:
                return None
            self.fired += 1
        return fault.done

    @contextmanager
    def installed(self) -> Iterator[None]:
        """All files of drives fail here. Nothing is flushed, and space for indices is small."""

        def around(action: str, real: Callable[..., None]) -> Callable[..., None]:
            def call(blocks: BlockFile, *where: Any) -> None:
                met = self.meet(action)
                if met is None or met:
                    real(blocks, *where)
                if met is not None:
                    error = OSError(errno.EIO, os.strerror(errno.EIO))
                    raise DriveIOError(blocks.name, action, where[0] if where else 0, error)

            return call

        with (
            mock.patch.object(BlockFile, "read", around("read", BlockFile.read)),
            mock.patch.object(BlockFile, "write", around("write", BlockFile.write)),
            mock.patch.object(BlockFile, "flush", around("flush", lambda blocks: None)),
            mock.patch.object(os, "fsync"),
            mock.patch("nearstep.torch.homes.opening.SPARE_BYTES", 1 << 17),
        ):
            yield


@dataclass(frozen=True)
class Home:
    """Where state lies.

    Attributes
    ----------
    cards : number of cards with drives; 0: drives of the host.
    chunk : bytes of a card's block; of drives of the host whether memory is small.
    """

    cards: int
    chunk: int


@dataclass(frozen=True)
class Case:
    """What is trained: three parameters."""

    dtype: torch.dtype = torch.float32
    compression: float | None = None
    shapes: Sequence[tuple[int, ...]] = SMALL

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(math.prod(shape) for shape in self.shapes)

    def options(self) -> dict[str, Any]:
        return {} if self.compression is None else {"compression": self.compression}

    def parameters(self) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(5)
        return [
            nn.Parameter(torch.randn(s, generator=generator).to(self.dtype)) for s in self.shapes
        ]

    def groups(self, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
        return [{"params": parameters[:1], "lr": 2e-2}, {"params": parameters[1:], "lr": 1e-2}]

    def reference(self) -> tuple[list[nn.Parameter], Any]:
        """torch's optimizer where it has the same state; else a device that keeps it in memory."""
        parameters = self.parameters()
        groups = self.groups(parameters)
        if self.dtype == torch.float32 and self.compression is None:
            return parameters, torch.optim.AdamW(groups, fused=True)
        return parameters, nearstep.optim.AdamW(groups, device=GOLDEN, **self.options())


KERNEL = "gradient_formats=fp32,bf16&copy_out_formats=bf16"
GOLDEN = f"golden:smartssd?chunk_bytes=512&memory_bytes=64MiB&{KERNEL}"

Everything = dict[str, bytes]


def everything(parameters: Sequence[Tensor], optimizer: Any) -> Everything:
    """Bits of parameters and state, and learning rates in the place of all options."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return bits_of_all(parameters, optimizer) | {"groups": repr(rates).encode()}


def difference(found: Everything, expected: Everything) -> str:
    """Where two states differ: elements of each array."""
    said = []
    for key in sorted(found.keys() | expected.keys()):
        here, there = found.get(key), expected.get(key)
        if here != there:
            if here is None or there is None or len(here) != len(there):
                said.append(f"{key} is {'missing' if here is None else 'there'}")
            else:
                count = sum(here[i : i + 4] != there[i : i + 4] for i in range(0, len(here), 4))
                said.append(f"{key} in {count} of {len(here) // 4} words")
    return ", ".join(said)


class Program:
    """One episode.

    Parameters
    ----------
    home : to begin at.
    folder : empty.

    Attributes
    ----------
    compared : states that were compared.
    failed : operations that failed with an error of a drive.
    """

    def __init__(self, case: Case, home: Home, folder: Path, point: FaultPoint) -> None:
        self.compared = self.failed = 0
        self._case = case
        self._home = home
        self._folder = folder
        self._point = point
        self._errors: list[BaseException] = []  # whoever has an error has all that it refers to
        self._saved: list[tuple[list[Tensor], dict[str, Any]]] = []
        self._expected = case.reference()
        self._parameters = case.parameters()
        self._optimizer = self._make(self._parameters, home, resume=False)
        self._unsaved: dict[int, Tensor] = {}  # before changes that no generation has for certain
        self._generations = [copy.deepcopy(self._expected)]  # what a resumed one may find
        self._compare("the constructor", [self._expected])

    def close(self) -> None:
        self._optimizer.store.close()

    # -- operations

    def step(self, mask: int, seed: int, fault: Fault | None) -> None:
        """Of the parameters in a mask."""
        if fault is not None and fault.done and fault.action == "read":
            fault = fault._replace(done=False)
        generator = torch.Generator().manual_seed(seed)
        gradients = [
            torch.randn(p.shape, generator=generator).to(p.dtype) for p in self._parameters
        ]
        before, after = self._expected, self._snapshot(self._expected, self._unsaved)
        for p, other in zip(after[0], before[0], strict=True):  # masters are more than parameters
            p.data.copy_(other)
        for parameters in (self._parameters, after[0]):
            for index, p in enumerate(parameters):
                p.grad = gradients[index].clone() if mask >> index & 1 else None
        after[1].step()
        changed = {i: p for i, p in self._unsaved.items() if not mask >> i & 1}
        error = self._try("step", fault, self._optimizer.step)
        if error is None:
            self._expected, self._unsaved = after, changed
            self._generations = [self._snapshot(after, changed)]
            self._compare("step", [after])
            return
        uncertain = isinstance(error, UncertainCommitError)
        found = self._compare("a step that failed", [before, after] if uncertain else [before])
        self._expected = found
        if found is after:
            self._unsaved, self._generations = changed, [self._snapshot(after, changed)]
        else:
            self._generations.append(self._snapshot(before, changed))

    def change(self, index: int, start: int, count: int, seed: int) -> None:
        """Elements of a parameter, on the host."""
        own, theirs = self._parameters[index], self._expected[0][index]
        self._unsaved.setdefault(index, own.detach().clone())
        generator = torch.Generator().manual_seed(seed)
        stop = min(start + count, own.numel())
        values = torch.randn(stop - start, generator=generator).to(own.dtype)
        for p in (own, theirs):
            p.data.view(-1)[start:stop] = values

    def moment(self, index: int, key: int, start: int, fault: Fault | None) -> None:
        """Change an element of state in place."""
        name = MOMENTS[key]
        state = self._expected[1].state[self._expected[0][index]]
        if name not in state:
            return
        error = self._try("read", fault, lambda: self._optimizer.state[self._own(index)][name])
        for p, optimizer in ((self._own(index), self._optimizer), self._pair(index)):
            value = optimizer.state[p][name].view(-1)
            value[start % value.numel()] = 0.5
        del error

    def assign(self, index: int, key: int, seed: int) -> None:
        """Assign state."""
        name = MOMENTS[key]
        if name not in self._expected[1].state[self._expected[0][index]]:
            return
        generator = torch.Generator().manual_seed(seed)
        value = torch.rand(self._case.shapes[index], generator=generator)
        for p, optimizer in ((self._own(index), self._optimizer), self._pair(index)):
            optimizer.state[p][name] = value.clone()

    def rate(self, group: int) -> None:
        """Another learning rate."""
        for optimizer in (self._optimizer, self._expected[1]):
            optimizer.param_groups[group]["lr"] *= 0.5

    def save(self) -> None:
        """Take a checkpoint."""
        saved = self._optimizer.state_dict()
        self._saved.append(([p.detach().clone() for p in self._parameters], saved))

    def load(self, at: int, fault: Fault | None) -> None:
        """Load a checkpoint, of parameters as well."""
        if not self._saved:
            return
        values, saved = self._saved[at % len(self._saved)]
        before = [p.detach().clone() for p in self._parameters]
        with torch.no_grad():
            for parameters in (self._parameters, self._expected[0]):
                for p, value in zip(parameters, values, strict=True):
                    p.copy_(value)
        self._expected[1].load_state_dict(copy.deepcopy(saved))

        def load() -> None:
            self._optimizer.load_state_dict(copy.deepcopy(saved))

        if self._try("load_state_dict", fault, load) is not None:
            load()
        del before
        self._compare("load_state_dict", [self._expected])
        self._unsaved.clear()
        self._generations = [copy.deepcopy(self._expected)]

    def read(self, fault: Fault | None) -> None:
        """Read all state."""
        error = self._try("state_dict", fault, self._optimizer.state_dict)
        del error
        self._compare("state_dict", [self._expected])

    def resume(self, home: Home | None, fault: Fault | None) -> None:
        """Make the optimizer anew, on the same drives or elsewhere."""
        home = self._home if home is None else home
        moves = bool(self._home.cards) != bool(home.cards)
        left = self._files(self._home)
        self._optimizer.store.close()
        resume: Any = left if moves else True
        made: list[Any] = []

        def make() -> None:
            fresh = [nn.Parameter(torch.zeros_like(p)) for p in self._parameters]
            made[:] = fresh, self._make(fresh, home, resume=resume)

        if self._try("resume", fault, make) is not None:
            make()
        self._parameters, self._optimizer = made
        if moves:
            for path in left:
                os.unlink(path)
        self._home = home
        self._settle_generation()

    # -- what they have in common

    def _own(self, index: int) -> Tensor:
        return self._parameters[index]

    def _pair(self, index: int) -> tuple[Tensor, Any]:
        return self._expected[0][index], self._expected[1]

    def _files(self, home: Home) -> list[str]:
        names = [f"card{i}of{home.cards}.nearstep" for i in range(home.cards)] or ["a", "b"]
        return [str(self._folder / name) for name in names]

    def _make(self, parameters: Sequence[Tensor], home: Home, *, resume: Any) -> Any:
        groups, more = self._case.groups(parameters), self._case.options()
        if home.cards:
            device = (
                f"golden:smartssd?cards={home.cards}&chunk_bytes={home.chunk}&{KERNEL}"
                f"&memory_bytes=1MiB"
                f"&subgroup_elements={max(256, self._case.largest // 4096 * 1024)}"
                f"&drive={self._folder}"
            )
            return nearstep.optim.AdamW(groups, device=device, resume=resume, **more)
        memory = 16 * self._case.largest + 2000 if home.chunk == 512 else "100%"
        return nearstep.optim.AdamW(
            groups,
            device=f"golden:axdimm?memory_bytes=2MiB&{KERNEL}",
            drives=self._files(home),
            memory=memory,
            resume=resume,
        )

    def _try(self, what: str, fault: Fault | None, call: Callable[[], object]) -> Exception | None:
        """The error that it ended with, which stays referred to."""
        with self._point.arm(fault):
            try:
                call()
            except StorageError as error:
                if not self._point.fired:
                    raise AssertionError(f"{what} failed without an error of a drive") from error
                self.failed += 1
                self._errors.append(error)
                return error
        return None

    def _compare(self, what: str, allowed: Sequence[tuple[list[Any], Any]]) -> Any:
        """The one of the states that are allowed which the optimizer on drives has."""
        found = everything(self._parameters, self._optimizer)
        expected = [everything(*each) for each in allowed]
        self.compared += 1
        for state, each in zip(expected, allowed, strict=True):
            if found == state:
                return each
        differences = "; or ".join(difference(found, each) for each in expected)
        raise AssertionError(f"after {what}: {differences}")

    def _snapshot(self, pair: tuple[list[Any], Any], older: Mapping[int, Tensor]) -> Any:
        """A copy, in which parameters are what they were before changes that no step has seen."""
        now = {index: pair[0][index].detach().clone() for index in older}
        with torch.no_grad():
            for index, value in older.items():
                pair[0][index].copy_(value)
            copied = copy.deepcopy(pair)
            for index, value in now.items():
                pair[0][index].copy_(value)
        return copied

    def _settle_generation(self) -> None:
        """A resumed optimizer has what a generation had; of a parameter that was changed, but had
        no gradient since, it may have either value."""
        for generation in self._generations:
            for index, older in self._unsaved.items():
                found, held = self._parameters[index], generation[0][index]
                for value in (older, self._expected[0][index].detach()):
                    if bits(value) == bits(found) != bits(held):
                        with torch.no_grad():
                            held.copy_(value)
        self._expected = self._compare("resume", self._generations)
        self._generations = [copy.deepcopy(self._expected)]
        self._unsaved.clear()


Action = tuple[str, tuple[Any, ...]]

faults = st.none() | st.builds(
    Fault,
    st.sampled_from(["read", "write", "flush"]),
    st.integers(0, 4) | st.integers(0, 40),
    st.sampled_from([1, 1, 2, FOREVER]),
    st.booleans(),
)
indices = st.integers(0, len(SMALL) - 1)
seeds = st.integers(0, 99)


def homes(kind: str) -> st.SearchStrategy[Home]:
    """`cards`, `host`, or either."""
    cards = {"cards": st.integers(1, 3), "host": st.just(0), "any": st.integers(0, 3)}[kind]
    return st.builds(Home, cards, st.sampled_from([512, 1024]))


def operations(kind: str) -> st.SearchStrategy[Action]:
    return st.one_of(
        st.tuples(st.just("step"), st.tuples(st.integers(1, 7), seeds, faults)),
        st.tuples(st.just("step"), st.tuples(st.just(7), seeds, st.none())),
        st.tuples(
            st.just("change"),
            st.tuples(indices, st.integers(0, 15), st.sampled_from([1, 1, 300]), seeds),
        ),
        st.tuples(
            st.just("moment"), st.tuples(indices, st.integers(0, 1), st.integers(0, 255), faults)
        ),
        st.tuples(st.just("assign"), st.tuples(indices, st.integers(0, 1), seeds)),
        st.tuples(st.just("rate"), st.tuples(st.integers(0, 1))),
        st.tuples(st.just("save"), st.just(())),
        st.tuples(st.just("load"), st.tuples(st.integers(0, 3), faults)),
        st.tuples(st.just("read"), st.tuples(faults)),
        st.tuples(st.just("resume"), st.tuples(st.none() | homes(kind), faults)),
    )


def run(
    case: Case, home: Home, program: Sequence[Action], folder: Path, point: FaultPoint
) -> Program:
    """Run an episode in a folder, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    episode = Program(case, home, folder, point)
    try:
        for name, arguments in program:
            getattr(episode, name)(*arguments)
    finally:
        episode.close()
    return episode
