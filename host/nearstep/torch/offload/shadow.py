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
"""Alignment of parameters in bytes: a cache line of the host."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """The addresses of a parameter of a shadow model.

    Attributes
    ----------
    partition : `GFGB`: in the vector; `DHA`: in the host's memory; `DFGB`: in the host's memory in
        forward, in the vector in backward.
    vector, host : byte addresses; None where the partition has none, or there is no vector.
    """

    partition: Mode
    vector: int | None
    host: int | None
    nbytes: int


class Shadow:
    """Fixed memory for each parameter that a plan names, as long as the plan is in force.

    The compute device has one vector: a slot for each parameter of `GFGB` and `DFGB` in the order
    of use, at fixed offsets. The host has a slot for each parameter of `DHA` and `DFGB`. A
    parameter changes slots by a change of its pointer alone. Data is copied only to load the vector
    and, since the optimizer's device has memory of its own, to refresh the host's slots after an
    update. With an accelerator, the host's slots are pinned, and loads are staged in pinned memory
    that torch's allocator caches.

    A slot is reused once no tensor refers to its memory. Until then a fetch allocates other memory,
    as for a parameter that the plan does not name, and for every fetch where there is no vector.

    Parameters
    ----------
    copies : of the parameters that the plan names, in the order of use.
    gradients : maximum bytes of gradients that backward makes at once.
    device : that layers compute on.

    Attributes
    ----------
    vector : uint8, of shape (nbytes,).
    nbytes : bytes of the vector, all charged to the budget; 0 without a vector.
    needs : bytes of the smallest budget with which the vector is allocated.
    host_nbytes : bytes of the slots in the host's memory.
    loads : bytes loaded into the vector so far.
    allocations, allocated : number and bytes of allocations outside the slots.

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
        """Addresses of each parameter, by name."""
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
        """Allocate the vector if vector and gradients fit in `free` bytes."""
        if self.needs > free:
            return
        self.vector, start = _memory(self.needs - self._gradients, self._device), 0
        for copy, size in self._sizes.items():
            self._vector[copy] = _Slot(self.vector[start : start + _nbytes(copy.like)])
            start += size

    def free(self) -> bool:
        """Free the vector for good, unless a tensor refers to its memory; return whether it was
        freed.

        Later loads allocate memory of their own.
        """
        if any(slot.is_lent for slot in self._vector.values()):
            return False
        self._vector.clear()
        self.vector = _memory(0, self._device)
        return True

    def has(self, copy: ComputeCopy) -> bool:
        """Return whether the parameter is in its slot of the vector."""
        slot = self._vector.get(copy)
        if slot is None or copy.storage is None:
            return False
        return copy.storage.data_ptr() == slot.address

    def has_only(self, copy: ComputeCopy) -> bool:
        """Return whether this parameter is the only one in the vector."""
        return [each for each, slot in self._vector.items() if slot.is_lent] == [copy]

    def has_room(self, copy: ComputeCopy) -> bool:
        """Return whether the parameter can be loaded into its slot of the vector."""
        slot = self._vector.get(copy)
        return slot is not None and not slot.is_lent and _nbytes(copy.like) <= slot.nbytes

    def in_vector(self, copy: ComputeCopy) -> Memory:
        """Return the allocator of memory on the compute device to load a parameter into."""
        return partial(self._load, self._vector.get(copy))

    def _load(self, slot: _Slot | None, like: Tensor) -> Tensor:
        found = self._place(slot, self._device, like)
        if slot is not None and found.data_ptr() == slot.address:
            self.loads += slot.nbytes
        return found

    def on_host(self, copy: ComputeCopy) -> Memory:
        """Return the allocator of host memory from which a parameter is read in place."""
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
    """Fixed memory of one parameter.

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
        """Whether a tensor or an array refers to the memory."""
        return self._lent is not None and not self._lent.expired()  # type: ignore[no-untyped-call]

    def lend(self, like: Tensor) -> Tensor | None:
        """Return a tensor on the memory; None if the memory is in use or too small.

        Each tensor has a new storage, which lives as long as any tensor or array uses the memory.
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
    """Allocate uint8 memory of shape (nbytes,); torch's allocators align to at least
    `ALIGNMENT`."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device or "cpu", pin_memory=pinned)
