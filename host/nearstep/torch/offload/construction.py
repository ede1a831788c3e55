"""Construction of models larger than memory: each parameter is offloaded when it is registered."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSet, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from nearstep.device import Device
from nearstep.errors import OutOfDeviceMemoryError
from nearstep.placement import Extent, Segment, padded
from nearstep.torch import convert
from nearstep.torch.budget import budget_bytes
from nearstep.torch.checks import check_parameter
from nearstep.torch.errors import ParameterError
from nearstep.torch.formats import Formats
from nearstep.torch.layout import Layout
from nearstep.torch.offload.cache import ParameterCache
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.offload.errors import BudgetError, NestedInitError
from nearstep.torch.offload.gradients import Gradients
from nearstep.torch.offload.ledger import Ledger
from nearstep.torch.offload.order import UseOrder
from nearstep.torch.offload.parameter import SET_DATA, AccessHooks, OffloadedParameter
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.traffic import Traffic
from nearstep.torch.unclaimed import SharedDevice, UnclaimedParameter, unclaimed

NO_STATE = Layout(counts=False, moments=MappingProxyType({}))


@dataclass(frozen=True, kw_only=True)
class InitReport:
    """Counters of `nearstep.offload.init`, in bytes unless said otherwise.

    Attributes
    ----------
    budget : None is unbounded.
    parameters : size of all parameters sent, those dropped since included.
    peak : maximum of present parameters inside the context; a parameter is charged from its
        registration on.
    parameters_down, parameters_up : sent to the device; fetched from the device. Transfers after an
        optimizer has adopted a parameter count in its `traffic` instead.
    fetches, releases : number of fetches, and of releases.
    """

    budget: int | None
    parameters: int
    peak: int
    parameters_down: int
    parameters_up: int
    fetches: int
    releases: int


class WaitingCopy(ComputeCopy):
    """The copy of an unclaimed parameter, which has no engine yet.

    No gradient accumulator is kept alive, so that an unreferenced parameter is collected.
    """

    def watch_gradient(self) -> None:
        """Nothing is done with gradients."""


class WaitingSpace(ParameterCache):
    """Cache of unclaimed parameters: present for one operation, or while referenced."""

    def __init__(self, budget: int | None) -> None:
        ledger = Ledger(budget=sys.maxsize if budget is None else budget)
        super().__init__((), ledger, UseOrder((), 1), prefetches=False)
        self._present: MutableSet[ComputeCopy] = weakref.WeakSet()
        self._by_storage: MutableMapping[int, ComputeCopy] = weakref.WeakValueDictionary()

    def add(self, copy: ComputeCopy) -> None:
        """Add and charge a new parameter.

        Raises
        ------
        BudgetError : present parameters and this one exceed the budget.
        """
        self._count()
        if self.ledger.free < copy.nbytes:
            stay = sorted(each.name for each in self._present)
            hint = f"; besides: {', '.join(stay)}" if stay else ""
            expected = self.ledger.used + copy.nbytes
            raise BudgetError(copy.name, expected, self.ledger.budget, hint)
        self._know(copy)
        self._present.add(copy)
        copy.holds = copy.nbytes
        self.ledger.add_parameter(copy.holds)

    def flush(self) -> None:
        """Evict all parameters that can be freed."""
        for copy in [each for each in self._present if each.can_go] if self._present else ():
            self.release(copy)

    def forget(self, copy: ComputeCopy) -> None:
        """Remove a parameter that is managed elsewhere from now on."""
        if copy in self._present:
            self._forget(copy)
            self._present.discard(copy)
            self.ledger.add_parameter(-copy.holds)
            copy.storage = None

    def release(self, copy: ComputeCopy) -> None:
        """Free a parameter on the compute device."""
        with torch._C.DisableTorchFunction():
            super().release(copy)

    def _fetch(self, copy: ComputeCopy) -> None:
        with torch._C.DisableTorchFunction():
            self._count()
            super()._fetch(copy)

    def mend(self) -> None:
        """Recount the present parameters; each use counts them anew."""
        self._count()
        self.torn = False

    def _count(self) -> None:
        """Recount the present parameters, without those collected since."""
        self.ledger.parameters = sum(each.holds for each in self._present)


class UnclaimedAccessHooks(AccessHooks):
    """Hooks on accesses to unclaimed parameters.

    Parameters
    ----------
    twin : copies a parameter.
    """

    def __init__(
        self, space: WaitingSpace, twin: Callable[[OffloadedParameter], Parameter]
    ) -> None:
        super().__init__(space, Gradients(space, lambda _: None))
        self._flush = space.flush
        self._twin = twin

    @contextmanager
    def of(self, func: Callable[..., Any], copies: Sequence[ComputeCopy]) -> Iterator[None]:
        """Fetch parameters for a call, and evict them afterwards.

        Raises
        ------
        BudgetError
        """
        with self.space.using(copies):
            yield
        with torch._C.DisableTorchFunction():
            for copy in copies:
                assert copy.storage is not None, "it was used"
                if copy.parameter.untyped_storage()._cdata != copy.storage._cdata:
                    self.space.rebind(copy)
            if func != SET_DATA:
                self._flush()

    def watch(self, result: Any, uses: Sequence[tuple[ComputeCopy, object]]) -> None:
        """Nothing is watched: references to a parameter's memory prevent its eviction."""

    def requires_grad_changed(self, copies: Iterable[ComputeCopy]) -> None:
        """Nothing is done with gradients."""

    def rebind(self, copies: Iterable[ComputeCopy]) -> None:
        """Track parameters whose memory was replaced."""
        with torch._C.DisableTorchFunction():
            super().rebind(copies)
            self._flush()

    def twin(self, parameter: OffloadedParameter) -> Parameter:
        """Copy a parameter; inside the context, the copy is offloaded as well."""
        return self._twin(parameter)


class EvictBeforeOp(TorchFunctionMode):
    """Evict parameters before every function of torch, factories included, once the last views are
    collected."""

    def __init__(self, space: WaitingSpace) -> None:
        super().__init__()
        self._space = space

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._space.flush()
        return func(*args, **(kwargs or {}))


class Home:
    """Allocates unclaimed parameters on a device."""

    def __init__(self, device: str | Device) -> None:
        self.lease = SharedDevice.of(device)
        self.formats = Formats.of(self.lease.device.config)
        self.traffic = Traffic()

    def resident(self, parameter: Tensor) -> DeviceParameter:
        """Allocate a parameter in a segment of its own, which an optimizer can extend with state.

        Raises
        ------
        OutOfDeviceMemoryError
        """
        formats = self.formats
        count, line = convert.size(parameter), formats.line(narrow=True)
        size = max(padded(count, line), line)
        segment = Segment(self.lease.device, size, line, formats.dtypes, formats.quantized)
        try:
            segment.reserve({"p": 0.0})
        except OutOfDeviceMemoryError:
            gc.collect()  # frees dropped parameters
            segment.reserve({"p": 0.0})
        extent = Extent(segment, 0, count)
        label = "a parameter"
        return DeviceParameter(
            parameter, label, extent, NO_STATE, self.traffic, formats, narrow=False
        )

    def place_of(self, _: Tensor) -> None:
        """Return None: any extent will do."""

    def write_failed(self, _: Exception) -> None:
        """Nothing else is lost."""


class Init:
    """Offload each parameter of new models to a device as soon as it is registered.

    ::

        with nearstep.offload.init("golden:axdimm") as init:
            model = Model()
        optimizer = nearstep.optim.AdamW(model.parameters(), device=init.device)
        engine = nearstep.offload(model, optimizer, budget="25%")

    Every operation on a parameter, such as its initialisation, fetches it and evicts it afterwards:
    values are the same as without. An optimizer on `init.device` adopts parameters without a copy;
    `nearstep.offload` refuses parameters of another device. See `docs/offload.md`.

    Parameters
    ----------
    device : name of a device with an update kernel, opened for as long as it holds parameters; or
        an open device, which the caller closes.
    budget : maximum bytes of parameters present at once, as a number or as text such as `2GiB`;
        None is unbounded: present are the parameters of one operation, those the program refers to,
        and the one being registered.

    Raises
    ------
    BudgetFormatError, ArgumentError : of the budget or the device.
    """

    _opened: ClassVar[Init | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: str | Device, *, budget: int | str | None = None) -> None:
        self._budget = None if budget is None else budget_bytes(budget, 0)
        self._home = Home(device)
        self._space = WaitingSpace(self._budget)
        self._uses = UnclaimedAccessHooks(self._space, self._twin)
        self._copies: weakref.WeakSet[ComputeCopy] = weakref.WeakSet()
        self._bytes = self._count = 0
        self._thread: int | None = None
        self._peak: int | None = None
        self._entered = False

    @property
    def device(self) -> Device:
        """The device that parameters are offloaded to."""
        return self._home.lease.device

    def report(self) -> InitReport:
        """Return the counters so far."""
        traffic, counts = self._home.traffic, self._space.counts
        return InitReport(
            budget=self._budget,
            parameters=self._bytes,
            peak=self._space.ledger.peak if self._peak is None else self._peak,
            parameters_down=traffic.masters_down,
            parameters_up=traffic.parameters_up,
            fetches=counts.fetches,
            releases=counts.releases,
        )

    def __enter__(self) -> Self:
        """Begin to offload parameters.

        Raises
        ------
        NestedInitError
        """
        with Init._lock:
            if Init._opened is not None or self._entered:
                raise NestedInitError
            Init._opened, self._entered = self, True
        self._thread = threading.get_ident()
        self._hook = register_module_parameter_registration_hook(self._registered)
        self._mode = EvictBeforeOp(self._space)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._hook.remove()
        self._thread = None
        self._peak = self._space.ledger.peak
        with Init._lock:
            Init._opened = None
        if error is None:
            self._space.flush()
        else:
            self._abandon()

    def close(self) -> None:
        """Fetch unclaimed parameters and make them plain; free their device memory, unless an
        optimizer has adopted it.

        Further calls do nothing.

        Raises
        ------
        ClosedDeviceError : the device is closed, so the parameters are lost.
        """
        for copy in self._waiting():
            if not copy.present:
                copy.fetch()
            parameter = copy.parameter
            end_waiting(parameter)
            assert isinstance(parameter, OffloadedParameter)
            parameter.end()

    def _registered(self, module: nn.Module, name: str, parameter: Parameter) -> None:
        known = isinstance(parameter, OffloadedParameter)
        if not known and threading.get_ident() == self._thread:
            self._take(f"{type(module).__name__}.{name}", parameter)

    def _take(self, name: str, parameter: Parameter) -> None:
        """Offload a parameter until an engine claims it.

        Raises
        ------
        ParameterError, BudgetError, OutOfDeviceMemoryError : nothing was changed.
        """
        with torch._C.DisableTorchFunction():
            if type(parameter) is not Parameter:
                raise ParameterError(name, "of class Parameter", type(parameter).__name__)
            if parameter.is_inference():
                raise ParameterError(name, "made outside of inference mode", "made inside")
            check_parameter(name, parameter)
            self._home.formats.check(name, parameter)
            self._count += 1
            copy = WaitingCopy(self._count, name, parameter, self._home)
            copy.resident.label = name
            found = UnclaimedParameter(copy.resident, self._home.lease)
            try:
                self._space.add(copy)
            except BudgetError:
                copy.resident.extent.segment.free()
                raise
            self._bytes += parameter.numel() * parameter.element_size()
            made = OffloadedParameter.make(copy, self._uses)
            made._kept, made._waiting = copy, found
            self._copies.add(copy)
            self._space.flush()

    def _twin(self, parameter: OffloadedParameter) -> Parameter:
        """Copy a parameter; on the constructing thread, the copy is offloaded."""
        if threading.get_ident() != self._thread:
            return parameter.plain()
        copy = parameter.copy
        with torch._C.DisableTorchFunction():
            self._space.flush()
            memory = torch.empty_like(copy.like, device=parameter.device)
            if copy.present:
                memory.copy_(parameter.detach())
            else:
                copy.resident.copy_into(memory)
            twin = Parameter(memory, parameter.requires_grad)
            del memory
        self._take(f"copy of {copy.name}", twin)
        return twin

    def _abandon(self) -> None:
        """Drop the parameters and free their device memory, except those that an optimizer has
        adopted."""
        for copy in self._waiting():
            found = unclaimed(copy.parameter)
            if found is not None and not found.is_adopted:
                end_waiting(copy.parameter)
                found.resident.extent.segment.free()

    def _waiting(self) -> list[ComputeCopy]:
        return [each for each in list(self._copies) if unclaimed(each.parameter)]


def end_waiting(parameter: Tensor) -> None:
    """Remove a parameter from the unclaimed ones."""
    copy: ComputeCopy | None = vars(parameter).pop("_kept", None)
    if copy is not None:
        del parameter._waiting  # type: ignore[attr-defined]
        space = copy.hooks.space
        assert isinstance(space, WaitingSpace)
        space.forget(copy)
