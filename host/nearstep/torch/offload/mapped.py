"""Memory of the host that an accelerator's kernels read and write where it is (direct access)."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearstep.torch.errors import UnsupportedOptionError

_WORDS = {1: "|u1", 2: "<i2", 4: "<i4"}
"""numpy's names of words by bytes: the interface has no bfloat16."""


class _Memory:
    """Pinned memory for CUDA kernels, at the same address (unified addressing)."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat  # keeps the memory alive
        self.__cuda_array_interface__ = {
            "shape": tuple(flat.shape),
            "typestr": _WORDS[flat.element_size()],
            "data": (flat.data_ptr(), False),
            "version": 3,
        }


def _on_cuda(flat: Tensor, device: torch.device) -> Tensor:
    words = torch.as_tensor(_Memory(flat), device=device)
    return words.view(flat.dtype)


MAPPERS: MutableMapping[str, Callable[[Tensor, torch.device], Any]] = {"cuda": _on_cuda}
"""By type of accelerator: makes an accelerator tensor with a new storage on the memory of a flat
tensor, pinned or on the accelerator, and keeps the flat tensor alive."""


def _pin_for_cuda(memory: Tensor) -> Callable[[], None]:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return partial(_check_cuda, cudart.cudaHostUnregister, memory.data_ptr())


def _check_cuda(function: Callable[[int], Any], address: int) -> None:
    torch.cuda.check_error(function(address))


PINNERS: MutableMapping[str, Callable[[Tensor], Callable[[], None]]] = {"cuda": _pin_for_cuda}
"""By type of accelerator: pins a flat tensor of the host, whose owner keeps the memory; returns
what ends that."""


def apart(memory: Tensor) -> Tensor:
    """Return a tensor with a new storage on another's bytes, which keeps the other alive.

    Parameters
    ----------
    memory : uint8, of shape (n,), on the CPU or an accelerator of `MAPPERS`.
    """
    if memory.is_cpu:
        return torch.from_numpy(memory.numpy())
    found: Tensor = MAPPERS[memory.device.type](memory, memory.device)
    return found


def mapped(pinned: Tensor, device: torch.device) -> Tensor:
    """Return an accelerator tensor on the memory of a tensor made by `Streams.staging`."""
    storage = pinned.untyped_storage()
    size = storage.nbytes() // pinned.element_size()
    found: Tensor = MAPPERS[device.type](pinned.as_strided((size,), (1,), 0), device)
    return found.as_strided(pinned.size(), pinned.stride())


def check_mapped(device: torch.device) -> None:
    """Raise `UnsupportedOptionError` if the type of accelerator is not in `MAPPERS`."""
    if device.type not in MAPPERS:
        known = ", ".join(MAPPERS)
        reason = f"mapped memory of the host is had on {known}, not on {device.type}"
        raise UnsupportedOptionError("policy", "memferry", reason)
