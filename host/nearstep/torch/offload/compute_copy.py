"""The compute device's copy of a parameter, allocated on fetch and freed on release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from nearstep.torch.device_gradient import SparseGradient
from nearstep.torch.offload.mapped import mapped
from nearstep.torch.offload.streams import Arrival
from nearstep.torch.parameter import DeviceParameter

if TYPE_CHECKING:
    from nearstep.torch.offload.streams import Streams

GRAD: Any = Tensor.grad
"""Torch's own property, which `OffloadedParameter` overrides."""

OWN_STORAGE_REFERENCES = 2
"""References to the memory of a present parameter: the tensor's, and that of
`ComputeCopy.storage`."""


Memory = Callable[[Tensor], Tensor]
"""Allocates a tensor like a meta tensor, no inference tensor, so that autograd can save it."""


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """Which accesses of the compute device to a parameter use host memory in place (direct access).

    Data in place is not fetched and not charged to the budget; in a recording its transfer overlaps
    the computation that reads it. On an accelerator torch makes a gradient in device memory: the
    gradient is charged until a kernel that writes it to the host has been launched.

    Attributes
    ----------
    forward, backward : the parameter is read in place in this part of an iteration; backward
        implies forward.
    gradient : backward writes the gradient to the host.
    is_apart : the compute device has memory of its own, where the gradient is made.
    """

    forward: bool = False
    backward: bool = False
    gradient: bool = False
    is_apart: bool = False

    @property
    def spares_gradient(self) -> bool:
        """Whether the gradient never uses memory of the compute device."""
        return self.gradient and not self.is_apart


NOTHING = InPlace()


class Owner(Protocol):
    """Allocates parameters on a device."""

    def resident(self, parameter: Tensor) -> DeviceParameter:
        """Return the device's side of a parameter; allocate it if needed."""

    def place_of(self, parameter: Tensor) -> DeviceParameter | None:
        """Return the device's side that a parameter should have; None if any will do."""

    def write_failed(self, error: Exception) -> None:
        """Handle a parameter or gradient that could not be sent."""


class ComputeCopy:
    """A parameter whose memory on the compute device is freed while only the owner, the optimizer's
    device, holds it.

    Memory that is referenced elsewhere, as by a view of autograd or the user, is not freed. An
    absent parameter is an expanded scalar NaN, so that a read that torch does not report shows.

    Parameters
    ----------
    index : number of the parameter.
    optimizer : owner of the parameter.
    like : as the attribute, if the parameter is absent; None if present.
    in_place : which accesses to parameter and gradient use host memory.

    Attributes
    ----------
    nbytes : bytes of the parameter's memory: of all of it if present, `own_nbytes` if absent.
    present : whether the parameter is on the compute device, or in place.
    storage : memory of the parameter, if present.
    like : meta tensor of the parameter's shape, strides and dtype.
    resident : the owner's side of the parameter.
    pins : running uses.
    reserved : bytes charged for gradients that backward is about to make.
    uses : uses of the parameter in running backward passes, each with torch's number of the pass.
    counted : bytes charged for the gradient on the compute device.
    holds : bytes charged for the parameter; 0 in place, and in the vector of a plan.
    binding : identity of the memory that was assigned last (`p.data = ...`). Once the engine is
        closed, it has one tensor on the memory, for graphs.
    updated : whether backward has updated the parameter since the last `step()`.
    given_up : number of such updates that were invalid: backward failed, no `step()` followed, or
        options or scaling changed.
    arrival : synchronisation of streams with the upload, if present on an accelerator.
    hooks : `AccessHooks` for functions of torch called with the parameter.
    exposed : whether the parameter may have been changed without a change of torch's version.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameter: Tensor,
        optimizer: Owner,
        like: Tensor | None = None,
        in_place: InPlace = NOTHING,
    ) -> None:
        self.index = index
        self.in_place = in_place
        self.name = name
        self.parameter = parameter
        self.optimizer = optimizer
        self.resident: DeviceParameter = optimizer.resident(parameter)
        self.resident.drop_views()
        self.present = True
        self.storage: torch.UntypedStorage | None
        self.pins: set[object] = set()
        self.reserved = 0
        self.uses: dict[object, int] = {}
        self.counted = self.holds = 0
        self.updated = False
        self.given_up = 0
        self.binding: list[Tensor] = []
        self.arrival: Arrival | None = None
        self.exposed = True
        self.hooks: Any = None  # `AccessHooks`, of a module that imports this one
        self._version = -1  # of the parameter, when it was fetched
        self._node: Node | None = None
        self._readers: list[torch.Event] = []  # after the last reads of freed memory in place
        away = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        self._away = away.expand(parameter.shape)
        if like is None:
            self.rebind()
        else:
            self.present, self.storage, self.like = False, None, like
            self.nbytes = self.own_nbytes
            self.watch_gradient()

    def rebind(self) -> None:
        """Read the memory of a present parameter again, after it was changed or requires a
        gradient."""
        self.exposed = True
        self.arrival = None
        with torch._C.DisableTorchFunctionSubclass():
            found = self.parameter
            self.storage = found.untyped_storage()
            self.nbytes = self.storage.nbytes()
            self.like = torch.empty_strided(
                found.size(), found.stride(), dtype=found.dtype, device="meta"
            )
        self.watch_gradient()

    def watch_gradient(self) -> None:
        """Keep the parameter's gradient accumulator of autograd alive, if it requires a
        gradient."""
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            if self.parameter.requires_grad and self._node is None:
                self._node = get_gradient_edge(self.parameter).node

    def register_prehook(self, hook: Callable[[Any], None]) -> Any:
        """Call a function in backward before a gradient is added to the parameter's."""
        assert self._node is not None, "it requires a gradient"
        return self._node.register_prehook(hook)

    @property
    def accumulates(self) -> bool:
        """In backward: whether the pass accumulates into the parameter's gradient, and does not
        return it from `torch.autograd.grad`."""
        try:
            return self._node is not None and torch._C._will_engine_execute_node(self._node)
        except RuntimeError:  # raised by torch for `torch.autograd.grad`
            return False

    @property
    def is_aliased(self) -> bool:
        """Whether the parameter's memory is referenced elsewhere: by views, arrays, or tensors that
        autograd saved without hooks."""
        own = 1 if self._node is None else 2
        assert self.storage is not None, "it is here"
        with torch._C.DisableTorchFunctionSubclass():
            tensors: int = self.parameter._use_count()  # type: ignore[attr-defined]
        return (
            tensors > own
            or torch._C._storage_Use_Count(self.storage._cdata) > OWN_STORAGE_REFERENCES
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient on the compute device."""
        own = self.like.numel() * self.like.element_size()
        return 0 if self.in_place.spares_gradient else own

    @property
    def own_nbytes(self) -> int:
        """Bytes of the memory that a fetch allocates."""
        return self.like.untyped_storage().nbytes()

    @property
    def can_go(self) -> bool:
        """Whether the parameter is present and its memory can be freed."""
        return bool(self.present and not self.pins and self.nbytes and not self.is_aliased)

    def settle(self) -> None:
        """Send the parameter to the owner, unless it is unchanged.

        Raises
        ------
        ParameterError : the number of elements has changed.
        """
        if self.present and self.is_aliased:
            self.exposed = True
        with torch._C.DisableTorchFunctionSubclass():
            self.resident.check_size()
            try:
                self.resident.push(unchanged=self._is_unchanged)
            except Exception as error:
                self.optimizer.write_failed(error)
                raise

    def push_changes(self) -> None:
        """Send a present parameter to the owner if the program has changed it; it stays present."""
        if self.present and not (self.resident.offloaded or self._is_unchanged):
            self.settle()
            with torch._C.DisableTorchFunctionSubclass():
                self.resident.arrived(self.parameter)

    @property
    def _is_unchanged(self) -> bool:
        """Whether a parameter on an accelerator is as fetched, by torch's version: a comparison of
        values would be expensive."""
        parameter = self.parameter
        return not (parameter.is_cpu or self.exposed) and parameter._version == self._version

    def release(self) -> None:
        """Free the memory; send the parameter to the owner first if it was changed."""
        if self.arrival is None or self.arrival.staged is None:
            self.settle()
        else:
            self.arrival.drop()
        if self.arrival is not None:
            self._readers += self.arrival.leave()
        self.arrival = None
        self._set_data(self._away)
        self.storage, self.nbytes = None, self.own_nbytes
        self.present = False

    def fetch(
        self,
        streams: Streams | None = None,
        *,
        direct: bool = False,
        memory: Memory | None = None,
    ) -> None:
        """Fetch the parameter from its owner, into a tensor that autograd can save (no inference
        tensor).

        Parameters
        ----------
        streams : if given, the copy runs there, and `land` completes the fetch.
        direct : with `streams`, fetch into host memory mapped to the accelerator.
        memory : allocator of the target; None allocates new memory.
        """
        like = self.like
        with torch.inference_mode(False):
            if direct and streams is not None:
                self._fetch_direct(memory or streams.staging)
                return
            device = self._away.device
            empty = (
                torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
                if memory is None
                else memory(like)
            )
        self._set_data(empty)
        try:
            if streams is None:
                self.refresh()
            else:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    source = self._source(streams)
                    staged = streams.staging(like) if source is None else source
                    if source is None:
                        self.resident.copy_into(staged)
                    self.arrival = streams.upload(staged, empty)
                    if source is not None:
                        self.arrival.is_compared = False
                        self.resident.copied(self.arrival.event)
        except BaseException:
            self._set_data(self._away)
            self.resident.push(unchanged=True)
            raise
        self._arrive()

    def _source(self, streams: Streams) -> Tensor | None:
        """Return the parameter in the owner's memory, pinned, if that is memory of this process."""
        found = self.resident.source() if self.like.is_contiguous() else None
        if found is None or not streams.pins(found[0]):
            return None
        return found[1].view(self.like.size())

    def _write_mapped(self, staged: Tensor) -> None:
        """Write the owner's values to host memory that the parameter is mapped to, or will be."""
        found = self.resident.source() if self.like.is_contiguous() else None
        if found is None:
            self.resident.copy_into(staged)
        else:
            staged.copy_(found[1].view(self.like.size()))  # by all threads
            self.resident.copied()
        self.resident.arrived(staged if found is None else None)

    def _fetch_direct(self, memory: Memory) -> None:
        while self._readers:  # the memory may be reused while these still read it
            self._readers[-1].synchronize()
            self._readers.pop()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            staged = memory(self.like)
            here = mapped(staged, self._away.device)
            self._write_mapped(staged)
            self._set_data(here)
        self.arrival = Arrival(self._away.device, mapped=staged)
        self._arrive()

    def _arrive(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.storage = self.parameter.untyped_storage()
            self._version = self.parameter._version
        self.exposed = False
        self.present = True

    def mend(self) -> None:
        """After an exception at any bytecode: derive `present` and `storage` from the parameter's
        memory; free the memory, or refresh it, if the owner alone has the values."""
        with torch._C.DisableTorchFunctionSubclass():
            own = self.parameter.untyped_storage()._cdata
        is_here = own != self._away.untyped_storage()._cdata
        arrival = self.arrival
        lacks = self.resident.offloaded and (arrival is None or arrival.staged is None)
        if not is_here or (lacks and not self.present):
            if arrival is not None:
                arrival.drop()
            self._set_data(self._away)
            self.resident.push(unchanged=True)
            self.present, self.storage, self.arrival = False, None, None
            self.nbytes = self.own_nbytes
            return
        if self.storage is None or not self.present:
            self._arrive()
        elif self.storage._cdata != own:
            self.binding = []
            self.rebind()
        self.exposed = True
        if lacks and self.can_go:
            self.release()
        elif lacks:
            self.refresh()

    def land(self) -> None:
        """Complete a fetch that was begun, for the current stream."""
        if self.arrival is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.arrival.land(self.resident)
                self.arrival.meet(self.parameter)

    def refresh(self) -> None:
        """Copy the owner's values into the present memory."""
        arrival = self.arrival
        if arrival is not None and arrival.mapped is not None:
            for each in arrival.leave():
                each.synchronize()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._write_mapped(arrival.mapped)
                self._version = self.parameter._version
            return
        if arrival is not None:
            arrival.gather()
        with torch._C.DisableTorchFunctionSubclass():
            self.resident.pull()

    def _set_data(self, data: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.parameter.data = data

    @property
    def has_moved(self) -> bool:
        """Whether the optimizer has allocated the parameter elsewhere on its device."""
        return self.optimizer.place_of(self.parameter) not in (None, self.resident)

    def move(self) -> None:
        """Switch a present parameter, and its held gradient, to the new `resident`."""
        before, after = self.resident, self.optimizer.resident(self.parameter)
        self.exposed = True  # the new extent has no values yet
        after.release_gradient()  # of a move that was interrupted
        if isinstance(before.held, SparseGradient):  # positions in the parameter alone
            after.held = before.held
        elif before.held is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                after.hold_gradient(before.held.fetch(self.parameter))
        self.resident = after
        before.release_gradient()

    def covers(self, tensor: Tensor) -> bool:
        """Return whether a tensor on the storage of the present parameter is a view of the
        parameter: of its elements, and changed with it, unlike `p.data`."""
        own, steps = self.parameter, zip(tensor.size(), tensor.stride(), strict=True)
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.dtype != own.dtype or tensor.is_neg() or tensor._version != own._version:
                return False
            start = tensor.storage_offset() - own.storage_offset()
            end = start + sum((size - 1) * step for size, step in steps) + 1
            return start >= 0 and end <= self.like.untyped_storage().nbytes() // own.element_size()

    def leave_to_graphs(self) -> None:
        """Leave the memory of a parameter that becomes plain to the graphs that refer to it."""
        with torch._C.DisableTorchFunctionSubclass():
            self.binding.append(tensor_on(self.parameter, self.like.size(), self.like.stride(), 0))
        self.binding, self.storage = [], None

    def raw_gradient(self) -> Tensor | None:
        """Return torch's own `grad`, on the compute device."""
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor | None = GRAD.__get__(self.parameter)
            return found

    def charge(self, gradient: Tensor | None) -> int:
        """Return the bytes of the compute device that a gradient of the parameter uses."""
        is_strided = gradient is not None and gradient.layout is torch.strided
        if gradient is None or not is_strided or self.in_place.spares_gradient:
            return 0
        return gradient.numel() * gradient.element_size()

    def set_raw_gradient(self, gradient: Tensor | None) -> None:
        """Set torch's own `grad`."""
        with torch._C.DisableTorchFunctionSubclass():
            GRAD.__set__(self.parameter, gradient)


def tensor_on(
    found: Tensor,
    size: torch.Size,
    stride: tuple[int, ...],
    offset: int,
    storage: torch.UntypedStorage | None = None,
) -> Tensor:
    """Return a new tensor on the memory of a plain or present one.

    Parameters
    ----------
    offset : in elements, from the first one of `found`.
    storage : if given, stands for that of `found`, which another tensor may have been swapped for.
    """
    with torch.no_grad():
        storage = storage or found.untyped_storage()
        start = found.storage_offset() + offset
        return torch.empty(0, dtype=found.dtype, device=found.device).set_(
            storage, start, size, stride
        )
