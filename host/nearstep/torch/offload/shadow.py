"""The shadow model: one logical model whose parameters are in three partitions of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nearstep.memferry.cost import Mode
from nearstep.torch.offload.compute_copy import ComputeCopy, Memory
from nearstep.torch.offload.mapped import apart

ALIGNMENT = 64
"""Bytes that addresses of parameters are multiples of: a cache line of the host."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a parameter of a shadow model can be.

    Attributes
    ----------
    partition : `GFGB`: in the vector; `DHA`: in the host's memory; `DFGB`: there in forward, in the
        vector in backward.
    vector, host : addresses; None where the partition has none, or there is no vector.
    """

    partition: Mode
    vector: int | None
    host: int | None
    nbytes: int


class Shadow:
    """The parameters that a plan names, each with its own places for as long as the plan is in
    force.

    The compute device has one long vector: buffers of all parameters of `GFGB` and of `DFGB` in the
    order of use, at fixed offsets. The host's memory has a place for each of `DHA` and of `DFGB`.
    A parameter goes from one place to the other, or away, by a change of its pointer alone; what is
    copied are loads into the vector, and, since the optimizer's device has memory of its own here,
    what it has updated into the host's places. The host's places of an accelerator are pinned, and
    what it loads goes through pinned memory of torch's allocator, which keeps that.

    A place is given to its parameter again when nobody refers to its memory any more. What comes
    while somebody does gets other memory once, and so does a parameter that the plan does not name;
    so do all fetched ones where there is no vector.

    Parameters
    ----------
    copies : parameters that the plan names, in the order of use.
    gradients : bytes of gradients that are made at once.
    device : that layers compute on.

    Attributes
    ----------
    vector : uint8, of shape (nbytes,).
    nbytes : of the vector, all of which count against the budget; 0 if there is none.
    needs : bytes of the least budget with which there is one.
    host_nbytes : of the places in the host's memory.
    loads : bytes that have been loaded into the vector.
    allocations, allocated : how many times memory was taken that is no such place, and its bytes.

    Ref: MemFerry paper, section IV-C.
    """

    def __init__(self, copies: Sequence[ComputeCopy], gradients: int, device: torch.device) -> None:
        self._device = device
        self.loads = self.allocations = self.allocated = 0
        self._named = [copy for copy in copies if copy.nbytes]
        self._sizes = {
            copy: -(-_nbytes(copy.like) // ALIGNMENT) * ALIGNMENT
            for copy in self._named
            if not copy.in_place.backward
        }
        self.needs = sum(self._sizes.values()) + gradients
        self._gradients = gradients
        self._vector: dict[ComputeCopy, _Slot] = {}
        self.vector = _memory(0, device)
        pinned = device.type != "cpu"
        self._host = {
            copy: _Slot(_memory(_nbytes(copy.like), pinned=pinned))
            for copy in self._named
            if copy.in_place.forward
        }
        self.host_nbytes = sum(slot.nbytes for slot in self._host.values())

    @property
    def nbytes(self) -> int:
        return self.vector.nbytes

    @property
    def locations(self) -> Mapping[str, Location]:
        """Where each parameter can be, by its name."""
        return {
            copy.name: Location(
                partition=_partition(copy),
                vector=_address(self._vector.get(copy)),
                host=_address(self._host.get(copy)),
                nbytes=_nbytes(copy.like),
            )
            for copy in self._named
        }

    def allocate(self, free: int) -> None:
        """Allocate the vector, if it fits `free` bytes beside the gradients."""
        if self.needs > free:
            return
        self.vector, start = _memory(self.needs - self._gradients, self._device), 0
        for copy, size in self._sizes.items():
            self._vector[copy] = _Slot(self.vector[start : start + _nbytes(copy.like)])
            start += size

    def free(self) -> bool:
        """Free the vector, for good, unless something refers to memory in it; whether it is free.

        What is loaded gets memory of its own from then on.
        """
        if any(slot.is_lent for slot in self._vector.values()):
            return False
        self._vector.clear()
        self.vector = _memory(0, self._device)
        return True

    def has_only(self, copy: ComputeCopy) -> bool:
        """Whether the vector has this parameter and nothing else."""
        return [each for each, slot in self._vector.items() if slot.is_lent] == [copy]

    def has_room(self, copy: ComputeCopy) -> bool:
        """Whether the parameter can be loaded into its place in the vector."""
        slot = self._vector.get(copy)
        return slot is not None and not slot.is_lent and _nbytes(copy.like) <= slot.nbytes

    def in_vector(self, copy: ComputeCopy) -> Memory:
        """Memory on the compute device that a parameter is loaded into."""
        return partial(self._load, self._vector.get(copy))

    def _load(self, slot: _Slot | None, like: Tensor) -> Tensor:
        found = self._place(slot, self._device, like)
        if slot is not None and found.data_ptr() == slot.address:
            self.loads += slot.nbytes
        return found

    def on_host(self, copy: ComputeCopy) -> Memory:
        """Memory of the host that a parameter is read from in place."""
        return partial(self._place, self._host.get(copy), torch.device("cpu"))

    def _place(self, slot: _Slot | None, device: torch.device, like: Tensor) -> Tensor:
        found = None if slot is None else slot.lend(like)
        if found is None:
            self.allocations += 1
            self.allocated += _nbytes(like)
            pinned = device.type != self._device.type
            with torch.inference_mode(False):
                return torch.empty_strided(
                    like.size(), like.stride(), dtype=like.dtype, device=device, pin_memory=pinned
                )
        return found


class _Slot:
    """A fixed place for one parameter.

    Parameters
    ----------
    memory : uint8, of shape (nbytes,).
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._lent: StorageWeakRef | None = None
        self.address = memory.data_ptr()
        self.nbytes = memory.nbytes

    @property
    def is_lent(self) -> bool:
        """Whether something refers to the memory."""
        return self._lent is not None and not self._lent.expired()  # type: ignore[no-untyped-call]

    def lend(self, like: Tensor) -> Tensor | None:
        """A tensor on the memory; None if something refers to the last one's, or it is too small.

        Each has a storage of its own, which is there for as long as any tensor or array has the
        memory.
        """
        if self.is_lent or _nbytes(like) > self.nbytes:
            return None
        with torch.inference_mode(False), torch.no_grad():
            storage = apart(self._memory).untyped_storage()
            self._lent = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            empty = torch.empty(0, dtype=like.dtype, device=self._memory.device)
            return empty.set_(storage, 0, like.size(), like.stride())


def _partition(copy: ComputeCopy) -> Mode:
    if not copy.in_place.forward:
        return Mode.GFGB
    return Mode.DHA if copy.in_place.backward else Mode.DFGB


def _address(slot: _Slot | None) -> int | None:
    return None if slot is None else slot.address


def _nbytes(like: Tensor) -> int:
    return like.untyped_storage().nbytes()


def _memory(nbytes: int, device: torch.device | None = None, *, pinned: bool = False) -> Tensor:
    """Memory of shape (nbytes,), uint8; torch's allocators align it to `ALIGNMENT` at least."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device or "cpu", pin_memory=pinned)
