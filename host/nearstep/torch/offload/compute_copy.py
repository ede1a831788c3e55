"""The compute device's copy of a parameter, whose memory comes and goes."""

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
"""The property of torch."""

OWN_STORAGE_REFERENCES = 2
"""To the memory of a parameter that is here: the tensor's, and that of `ComputeCopy.storage`."""


Memory = Callable[[Tensor], Tensor]
"""Makes a tensor like one without elements, of memory that autograd takes: it outlives
`torch.inference_mode`."""


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """What of a parameter the compute device gets at where it is, in the memory of the host (direct
    access).

    What is in place is not fetched, takes nothing of the budget, and in a recording goes over the
    link while it is computed with. Torch makes gradients in memory of the accelerator, if layers
    compute on one: there, one counts until a kernel has been launched that writes it.

    Attributes
    ----------
    forward, backward : the parameter is read in place in this part of an iteration; not in
        backward alone.
    gradient : backward writes the gradient to the host.
    is_apart : the compute device has memory of its own, where the gradient is made.
    """

    forward: bool = False
    backward: bool = False
    gradient: bool = False
    is_apart: bool = False

    @property
    def spares_gradient(self) -> bool:
        """Whether the compute device has no memory for the gradient, not even while it is made."""
        return self.gradient and not self.is_apart


NOTHING = InPlace()


class Owner(Protocol):
    """What has places for parameters on a device."""

    def resident(self, parameter: Tensor) -> DeviceParameter:
        """The place of a parameter, made if there is none."""

    def place_of(self, parameter: Tensor) -> DeviceParameter | None:
        """The place where a parameter should be; None if it may be anywhere."""

    def write_failed(self, error: Exception) -> None:
        """Go on after a parameter or a gradient could not be sent."""


class ComputeCopy:
    """A parameter whose memory on the compute device goes while its owner, the optimizer's device,
    has it alone.

    While anything else refers to its memory, as a view does that autograd or the user has, the
    memory stays. A parameter that is away is NaN in every element, in the memory of one: what gets
    at it in a way that torch does not tell about does not go unseen.

    Parameters
    ----------
    index : number of the parameter.
    optimizer : on the device that owns it.
    like : as the attribute, of a parameter that is away; None if it is here.
    in_place : where the compute device gets at it, and at its gradient, in the host's memory.

    Attributes
    ----------
    nbytes : of its memory.
    present : whether it is here.
    storage : its memory, if it is here.
    like : a tensor of its shape and strides, without elements.
    resident : the owner's end.
    pins : uses that are going on.
    reserved : bytes that are counted for gradients that are being made.
    uses : of the parameter in backward passes that are going on, each with the pass.
    counted : bytes that are counted for its gradient here.
    holds : bytes that are counted for the parameter; 0 in place, and in the vector of a plan.
    binding : how many times it has been given other memory (`p.data = ...`).
    updated : whether backward has updated it, and `step()` has not yet been called.
    given_up : how many times that was to no end, as `step()` was not called, or backward failed.
    arrival : of a parameter that is here, on an accelerator: what each stream meets that uses it.
    hooks : what happens when a function of torch is called with the parameter.
    exposed : something that torch does not tell about may have changed it here.
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
        self.present = True
        self.storage: torch.UntypedStorage | None
        self.pins = 0
        self.reserved = 0
        self.uses: dict[object, int] = {}
        self.counted = self.holds = 0
        self.updated = False
        self.given_up = 0
        self.binding = 0
        self.arrival: Arrival | None = None
        self.exposed = True
        self.hooks: Any = None  # of the module above
        self._version = -1  # of the parameter, when it came
        self._node: Node | None = None
        self._readers: list[torch.Event] = []  # in place, what has left
        away = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        self._away = away.expand(parameter.shape)
        if like is None:
            self.rebind()
        else:
            self.present, self.storage, self.like = False, None, like
            self.nbytes = like.untyped_storage().nbytes()
            self.watch_gradient()

    def rebind(self) -> None:
        """The parameter, which is here, has got other memory, or requires a gradient."""
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
        """Have autograd keep one node for the parameter, if it requires a gradient."""
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            if self.parameter.requires_grad and self._node is None:
                self._node = get_gradient_edge(self.parameter).node

    def register_prehook(self, hook: Callable[[Any], None]) -> Any:
        """Have a function called in backward before a gradient is added to the parameter's."""
        assert self._node is not None, "it requires a gradient"
        return self._node.register_prehook(hook)

    @property
    def accumulates(self) -> bool:
        """In backward: whether it adds to the parameter's gradient, and does not give it to a
        caller of `torch.autograd.grad`."""
        try:
            return self._node is not None and torch._C._will_engine_execute_node(self._node)
        except RuntimeError:  # torch's answer where a caller gets it
            return False

    @property
    def is_aliased(self) -> bool:
        """Whether anything else refers to the parameter's memory: views, arrays, or what autograd
        has saved by itself."""
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
        """That a gradient takes on the compute device."""
        return 0 if self.in_place.spares_gradient else self.nbytes

    @property
    def can_go(self) -> bool:
        """Whether the parameter is here, and may go."""
        return bool(self.present and not self.pins and self.nbytes and not self.is_aliased)

    def settle(self) -> None:
        """Have the owner know the parameter as it is here.

        Raises
        ------
        ParameterError : it has been given another number of elements.
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

    @property
    def _is_unchanged(self) -> bool:
        """Whether an accelerator has what came: as torch says, where it is dear to look."""
        parameter = self.parameter
        return not (parameter.is_cpu or self.exposed) and parameter._version == self._version

    def release(self) -> None:
        """Let the memory go; the owner gets the parameter if it was changed."""
        if self.arrival is None or self.arrival.staged is None:
            self.settle()
        else:
            self.arrival.drop()
        if self.arrival is not None:
            self._readers += self.arrival.leave()
        self.arrival = None
        self._set_data(self._away)
        self.storage = None
        self.present = False

    def fetch(
        self,
        streams: Streams | None = None,
        *,
        direct: bool = False,
        memory: Memory | None = None,
    ) -> None:
        """Get the parameter from its owner, into memory that autograd takes: it outlives
        `torch.inference_mode`.

        Parameters
        ----------
        streams : if given, the fetch is begun there, and `land` ends it.
        direct : into memory of the host that the accelerator, which has streams, gets at.
        memory : that it comes into; None of memory of its own.
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
                    staged = streams.staging(like)
                    self.resident.copy_into(staged)
                    self.arrival = streams.upload(staged, empty)
        except BaseException:
            self._set_data(self._away)
            raise
        self._arrive()

    def _fetch_direct(self, memory: Memory) -> None:
        while self._readers:  # the memory may be what these have read
            self._readers.pop().synchronize()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            staged = memory(self.like)
            here = mapped(staged, self._away.device)
            self.resident.copy_into(staged)
            self._set_data(here)
            self.resident.arrived(staged)
        self.arrival = Arrival(self._away.device, mapped=staged)
        self._arrive()

    def _arrive(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.storage = self.parameter.untyped_storage()
            self._version = self.parameter._version
        self.exposed = False
        self.present = True

    def land(self) -> None:
        """End a fetch that was begun, if one was, for the stream that is the current one."""
        if self.arrival is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.arrival.land(self.resident)
                self.arrival.meet(self.parameter)

    def refresh(self) -> None:
        """Get what the owner has into the memory that is here."""
        if self.arrival is not None:
            self.arrival.gather()
        with torch._C.DisableTorchFunctionSubclass():
            self.resident.pull()

    def _set_data(self, data: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.parameter.data = data

    @property
    def has_moved(self) -> bool:
        """Whether the optimizer has made another place for the parameter."""
        return self.optimizer.place_of(self.parameter) not in (None, self.resident)

    def move(self) -> None:
        """Go over to that place, with a parameter that is here."""
        before, self.resident = self.resident, self.optimizer.resident(self.parameter)
        self.exposed = True  # the new place has not got it
        if isinstance(before.held, SparseGradient):  # positions in the parameter alone
            self.resident.held, before.held = before.held, None
        elif before.held is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.resident.hold_gradient(before.held.fetch(self.parameter))
            before.release_gradient()

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A tensor of elements that are here."""
        assert self.storage is not None, "it is here"
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.like.dtype, device=self._away.device)
            return empty.set_(self.storage, offset, size, stride)

    def raw_gradient(self) -> Tensor | None:
        """The gradient as torch has it, on the compute device."""
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor | None = GRAD.__get__(self.parameter)
            return found

    def set_raw_gradient(self, gradient: Tensor | None) -> None:
        """Have torch have it."""
        with torch._C.DisableTorchFunctionSubclass():
            GRAD.__set__(self.parameter, gradient)
