"""The shadow model: one logical model whose parameters are in three partitions of memory."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep.memferry.cost import Mode
from nearstep.torch.offload.copy import DeviceCopy, Memory

ALIGNMENT = 64
"""Bytes that addresses of parameters are multiples of: a cache line of the host."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a parameter of a shadow model can be.

    Attributes
    ----------
    partition : `GFGB`: in the vector; `DHA`: in the host's memory; `DFGB`: there in forward, in the
        vector in backward.
    vector, host : addresses; None where the partition has none, or there is no vector.
    nbytes
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
    what it has updated into the host's places.

    A place is given to its parameter again when nobody refers to its memory any more. What comes
    while somebody does gets other memory once, and so does a parameter that the plan does not name;
    so do all fetched ones where the vector and the gradients of a module do not fit the budget.

    Parameters
    ----------
    copies : parameters that the plan names, in the order of use.
    budget : bytes of parameters and gradients on the compute device.
    gradients : bytes of gradients that are made at once.

    Attributes
    ----------
    locations : by the name of the parameter.
    nbytes : of the vector; 0 if there is none.
    host_nbytes : of the places in the host's memory.
    loads : bytes that have been loaded into the vector.
    allocations, allocated : how many times memory was taken that is no such place, and its bytes.

    Ref: MemFerry paper, section IV-C.
    """

    def __init__(self, copies: Sequence[DeviceCopy], budget: int, gradients: int) -> None:
        self.loads = self.allocations = self.allocated = 0
        named = [copy for copy in copies if copy.nbytes]
        fetched = [copy for copy in named if not copy.in_place.backward]
        sizes = [-(-_nbytes(copy.like) // ALIGNMENT) * ALIGNMENT for copy in fetched]
        fits = sum(sizes) + gradients <= budget
        self.nbytes = sum(sizes) if fits else 0
        self._vector: dict[DeviceCopy, _Slot] = {}
        self._host: dict[DeviceCopy, _Slot] = {}
        vector, start = _aligned(self.nbytes), 0
        for copy, size in zip(fetched, sizes, strict=True) if fits else ():
            self._vector[copy] = _Slot(vector[start : start + _nbytes(copy.like)])
            start += size
        for copy in named:
            if copy.in_place.forward:
                self._host[copy] = _Slot(_aligned(_nbytes(copy.like)))
        self.host_nbytes = sum(slot.nbytes for slot in self._host.values())
        self.locations: Mapping[str, Location] = {
            copy.name: Location(
                partition=_partition(copy),
                vector=_address(self._vector.get(copy)),
                host=_address(self._host.get(copy)),
                nbytes=_nbytes(copy.like),
            )
            for copy in named
        }

    def in_vector(self, copy: DeviceCopy) -> Memory:
        """Memory on the compute device that a parameter is loaded into."""
        return partial(self._load, self._vector.get(copy))

    def on_host(self, copy: DeviceCopy) -> Memory:
        """Memory of the host that a parameter is read from in place."""
        return partial(self._place, self._host.get(copy))

    def _load(self, slot: _Slot | None, like: Tensor) -> Tensor:
        found = self._place(slot, like)
        if slot is not None and found.data_ptr() == slot.address:
            self.loads += slot.nbytes
        return found

    def _place(self, slot: _Slot | None, like: Tensor) -> Tensor:
        found = None if slot is None else slot.lend(like)
        if found is None:
            self.allocations += 1
            self.allocated += _nbytes(like)
            with torch.inference_mode(False):
                return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        return found


class _Slot:
    """A fixed place for one parameter.

    Parameters
    ----------
    memory : of shape (nbytes,).

    Attributes
    ----------
    address
    nbytes
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._lent: weakref.ref[Bytes] | None = None
        self.address = memory.ctypes.data
        self.nbytes = memory.nbytes

    def lend(self, like: Tensor) -> Tensor | None:
        """A tensor on the memory; None if something refers to the last one's, or it is too small.

        Each has a storage of its own, which keeps the array alive that is lent: so the array is
        there for as long as any tensor, array or storage has the memory.
        """
        if (self._lent is not None and self._lent() is not None) or _nbytes(like) > self.nbytes:
            return None
        lent = self._memory[:]
        self._lent = weakref.ref(lent)
        with torch.inference_mode(False), torch.no_grad():
            storage = torch.from_numpy(lent).untyped_storage()
            empty = torch.empty(0, dtype=like.dtype)
            return empty.set_(storage, 0, like.size(), like.stride())


def _partition(copy: DeviceCopy) -> Mode:
    if not copy.in_place.forward:
        return Mode.GFGB
    return Mode.DHA if copy.in_place.backward else Mode.DFGB


def _address(slot: _Slot | None) -> int | None:
    return None if slot is None else slot.address


def _nbytes(like: Tensor) -> int:
    return like.untyped_storage().nbytes()


def _aligned(nbytes: int) -> Bytes:
    """Memory of shape (nbytes,) at an address of `ALIGNMENT`."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]
