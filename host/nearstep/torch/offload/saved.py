"""Saved tensors of autograd: references to parameters in place of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from nearstep.torch.checks import is_on_host_or_accelerator
from nearstep.torch.eager import eager
from nearstep.torch.errors import EarlyUpdateError, ParameterError
from nearstep.torch.offload.cache import ParameterCache
from nearstep.torch.offload.compute_copy import ComputeCopy, tensor_on

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

PASSED_BY = (
    "torch.utils.checkpoint.",
    "torch.autograd.graph.save_on_cpu.",
    f"{__name__}.",
)
"""Beginnings of the names of hooks that change no value, and are skipped for parameters."""


class SavedView(NamedTuple):
    """A view of a parameter; backward fetches the parameter on unpack.

    Attributes
    ----------
    offset : elements from the first one of the parameter.
    """

    copy: ComputeCopy
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int
    binding: list[Tensor]
    given_up: int


class SavedTensor(NamedTuple):
    """A saved tensor that is no view of a parameter."""

    tensor: Tensor
    version: int


class SavedByOthers(NamedTuple):
    """The result of the user's own pack hook, with the matching unpack hook."""

    packed: Any
    unpack: Unpack


class SavedHooks:
    """Hooks for what autograd saves in an operation that uses parameters.

    Hooks of the user (`torch.autograd.graph.saved_tensors_hooks`, checkpointing) are called as
    usual, except those of `PASSED_BY`, which are skipped for parameters.
    """

    def __init__(self, space: ParameterCache) -> None:
        self._space = space

    def around(self) -> torch.autograd.graph.saved_tensors_hooks | None:
        """Return a context for the operation; None where torch has disabled hooks."""
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return None
        others: tuple[Pack | None, Unpack | None] | None
        others = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = (None, None) if others is None else others

        @eager
        def packed(tensor: Tensor) -> Any:
            return self._pack(tensor, pack, unpack)

        return torch.autograd.graph.saved_tensors_hooks(packed, self._unpack)

    def _pack(self, tensor: Tensor, pack: Pack | None, unpack: Unpack | None) -> Any:
        if pack is None or _full_name(pack).startswith(PASSED_BY):
            copy = self._space.owner_of(tensor) if is_dense(tensor) else None
            if copy is not None and copy.covers(tensor):
                return SavedView(
                    copy,
                    tensor.size(),
                    tensor.stride(),
                    int(tensor.storage_offset() - copy.parameter.storage_offset()),
                    tensor._version,
                    copy.binding,
                    copy.given_up,
                )
        if pack is None or unpack is None:
            return SavedTensor(tensor, tensor._version)
        return SavedByOthers(pack(tensor), unpack)

    @eager
    def _unpack(self, packed: SavedView | SavedTensor | SavedByOthers) -> Tensor:
        if isinstance(packed, SavedByOthers):
            return packed.unpack(packed.packed)
        if isinstance(packed, SavedTensor):
            _check_version(packed.tensor, packed.version)
            return packed.tensor
        copy = packed.copy
        if packed.binding is not copy.binding and not packed.binding:
            expected = "in the memory that forward used until backward is done"
            raise ParameterError(copy.name, expected, "given other memory (p.data = ...)")
        wanted = "backward wants what it was before"
        self._space.check_old(copy, wanted)
        if packed.given_up != copy.given_up:
            raise EarlyUpdateError(copy.name, wanted)
        _check_version(copy.parameter, packed.version)
        where = packed.size, packed.stride, packed.offset
        with self._space.using([copy]), self._space.aside():
            if packed.binding:
                return tensor_on(packed.binding[0], *where)
            return tensor_on(copy.parameter, *where, copy.storage)


def _full_name(pack: Pack) -> str:
    return f"{getattr(pack, '__module__', '')}.{getattr(pack, '__qualname__', '')}"


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage: tensors that dispatch in Python, and tensors of
    transforms, may have none."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout is torch.strided
        and is_on_host_or_accelerator(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _check_version(tensor: Tensor, version: int) -> None:
    """Raise autograd's `RuntimeError` for a changed version: with hooks, autograd does not
    check."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(tensor.shape)} is at version {tensor._version}; "
            f"expected version {version} instead"
        )
