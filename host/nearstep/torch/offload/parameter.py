"""Parameters that come when they are used."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from nearstep.torch.eager import eager
from nearstep.torch.errors import ParameterError
from nearstep.torch.offload.cache import ParameterCache
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.offload.errors import LostEngineError
from nearstep.torch.offload.gradients import Gradients
from nearstep.torch.offload.saved import SavedHooks, is_dense
from nearstep.torch.unclaimed import UnclaimedParameter

_TENSOR: Any = Tensor

_GETTERS = """
    shape dtype device layout requires_grad is_leaf ndim grad_fn _version output_nr names itemsize
    nbytes retains_grad is_sparse is_sparse_csr is_quantized is_meta is_mkldnn is_nested is_cpu
    is_cuda is_mps is_xpu is_xla is_ipu is_maia is_mtia is_vulkan name _grad _base _backward_hooks
    _post_accumulate_grad_hooks
"""

_METHODS = """
    size dim ndimension numel nelement is_floating_point is_complex is_signed element_size
    storage_offset get_device register_hook is_neg is_conj is_inference retain_grad
    register_post_accumulate_grad_hook __len__ _use_count _is_view
"""


def _metadata() -> frozenset[Any]:
    found: set[Any] = {torch.numel, torch.is_floating_point, torch.is_complex}
    for name in filter(partial(hasattr, Tensor), _GETTERS.split()):
        found.add(getattr(Tensor, name).__get__)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        found.add(getattr(Tensor, name).__set__)
    return frozenset(found | {getattr(Tensor, name) for name in _METHODS.split()})


METADATA = _metadata()
"""Functions that need no element of a tensor."""

LAYOUT = frozenset({Tensor.stride, Tensor.is_contiguous})
"""Functions whose answer is that of `ComputeCopy.like`."""

REQUIRES_GRAD = frozenset({_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__})

SET_DATA = _TENSOR.data.__set__

LENDS = frozenset({_TENSOR.detach, _TENSOR.data.__get__})
"""Functions that give away a tensor on the same memory which autograd does not look after."""


EXPOSES = LENDS | frozenset(
    {
        _TENSOR.data_ptr,
        _TENSOR.untyped_storage,
        _TENSOR.storage,
        _TENSOR.numpy,
        _TENSOR.__array__,
        _TENSOR.__dlpack__,
        _TENSOR.__cuda_array_interface__.__get__,
    }
)
"""Functions that give away memory which may be changed without torch counting it."""


ADDRESSES = frozenset({_TENSOR.data_ptr, _TENSOR.untyped_storage, _TENSOR.storage})
"""Functions whose answer says where memory is, and does not keep it there."""


class AccessHooks(Protocol):
    """What happens when a function of torch is called with parameters.

    Attributes
    ----------
    saved : hooks for what is saved for backward.
    saving : parameters of which the next `detach` makes a tensor with memory of its own.
    """

    space: ParameterCache
    gradients: Gradients
    saved: SavedHooks
    saving: set[ComputeCopy]

    def of(
        self, func: Callable[..., Any], copies: Sequence[ComputeCopy]
    ) -> AbstractContextManager[None]:
        """Have parameters here during a call."""

    def watch(self, result: Any, uses: Sequence[tuple[ComputeCopy, object]]) -> None:
        """Look after what a function returned."""

    def requires_grad_changed(self, copies: Iterable[ComputeCopy]) -> None:
        """Parameters may require a gradient that did not."""

    def check_data(self, copy: ComputeCopy, value: Tensor) -> None:
        """Raise `ParameterError` unless a parameter may have this as its data."""

    def make_room(self, copy: ComputeCopy, value: Tensor) -> None:
        """Have room for the memory of what is to be a parameter's data."""

    def rebind(self, copies: Iterable[ComputeCopy]) -> None:
        """Parameters have been given other memory."""

    def twin(self, parameter: OffloadedParameter) -> Parameter:
        """A copy of a parameter."""


@dataclass(frozen=True, eq=False)
class Place:
    """What an offloaded parameter needs to know.

    The parameter does not keep it alive. Through it, autograd refers to the parameter, and that is
    no reference that a garbage collector sees.
    """

    uses: AccessHooks
    copy: ComputeCopy


class OffloadedParameter(Parameter):
    """What a parameter of an offloaded model is an instance of.

    Every function of torch that takes one comes through `__torch_function__`.
    """

    _place: Callable[[], Place | None]
    _kept: Place
    _waiting: UnclaimedParameter

    @property
    def place(self) -> Place:
        """What looks after the parameter.

        Raises
        ------
        LostEngineError : the engine is gone, and with it the model.
        """
        found = self._place()
        if found is None:
            raise LostEngineError
        return found

    @classmethod
    @eager
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in LAYOUT and isinstance(args[0], OffloadedParameter):
            return func(args[0].place.copy.like, *args[1:], **kwargs)
        if func in ADDRESSES and TracingContext.try_get() is None:  # dynamo has it as an identity
            args[0].place.uses.space.check_runs()
            expected = "located by p.detach(), whose memory stays, or saved by model.state_dict()"
            actual = f"by {func.__name__} of a parameter that comes and goes"
            raise ParameterError(args[0].place.copy.name, expected, actual)
        if func is torch.autograd.grad:
            return func(*map(_as_edges, args), **{k: _as_edges(v) for k, v in kwargs.items()})
        found = list(dict.fromkeys(_instances((args, kwargs), OffloadedParameter)))
        engines: dict[AccessHooks, list[ComputeCopy]] = {}
        for each in found:
            engines.setdefault(each.place.uses, []).append(each.place.copy)
        uses, copies = next(iter(engines.items()))
        if func in REQUIRES_GRAD:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            uses.requires_grad_changed(copies)
            return result
        if func == SET_DATA and args[0] is found[0]:
            uses.check_data(copies[0], args[1])
        with ExitStack() as stack:
            for engine, own in engines.items():
                stack.enter_context(engine.of(func, own))
            if func == SET_DATA and args[0] is found[0]:
                uses.make_room(copies[0], args[1])
            result = plainly(func, args, kwargs, found, engines)
        if func == SET_DATA:
            uses.rebind(copies)
        if func is Tensor.detach and copies[0] in uses.saving:
            uses.saving.discard(copies[0])
            return result.clone()
        if func not in LENDS:
            for engine, own in engines.items():
                engine.watch(result, [(copy, object()) for copy in own])
        expose(func, result, engines)
        return result

    @property
    @eager
    def grad(self) -> Tensor | None:
        """As in torch.

        A gradient that its owner has comes when it is read, and stays until it is set to None, or
        its memory is needed and nobody refers to it.
        """
        return self.place.uses.gradients.read(self.place.copy)

    @grad.setter
    @eager
    def grad(self, gradient: Tensor | None) -> None:
        self.place.uses.gradients.assign(self.place.copy, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.place.uses.gradients.assign(self.place.copy, None)

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: torch does not tell of it.

        Raises
        ------
        ParameterError
        """
        expected = "given other memory by p.data = ... while offloaded"
        raise ParameterError(self.place.copy.name, expected, "by set_")

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        found = memo[id(self)] = self.place.uses.twin(self)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def plain(self) -> Parameter:
        """A parameter with memory of its own."""
        return Parameter(self.detach().clone(), self.requires_grad)


class ParameterView(Tensor):
    """A tensor on a parameter's memory, which stays as long as there is one.

    What operations save of it for backward is only where it is.
    """

    _uses: AccessHooks
    _of: ComputeCopy
    _use: object

    @classmethod
    @eager
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = list(
            {id(each): each for each in _instances((args, kwargs), ParameterView)}.values()
        )
        engines: dict[AccessHooks, list[tuple[ComputeCopy, object]]] = {}
        for each in found:
            engines.setdefault(each._uses, []).append((each._of, each._use))
        result = plainly(func, args, kwargs, found, engines)
        if func not in LENDS:
            for engine, own in engines.items():
                engine.watch(result, own)
        expose(func, result, {uses: [copy for copy, _ in own] for uses, own in engines.items()})
        return result

    @classmethod
    def of(cls, tensor: Tensor, uses: AccessHooks, copy: ComputeCopy, use: object) -> Self:
        """Make a tensor one."""
        tensor.__class__ = cls
        assert isinstance(tensor, cls)
        tensor._uses, tensor._of, tensor._use = uses, copy, use
        return tensor

    def as_plain(self) -> Tensor:
        """The same tensor with torch's own class."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copying.deepcopy(self.as_plain(), memo)  # raises unless it is a leaf

    def __reduce_ex__(self, protocol: Any) -> Any:
        twin = self.detach().clone().requires_grad_(self.requires_grad)
        return twin.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def waiting_copy(parameter: Tensor) -> ComputeCopy | None:
    """That of a parameter which `init` has sent, and which no engine looks after yet."""
    place: Place | None = getattr(parameter, "_kept", None)
    return None if place is None else place.copy


def plainly(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    found: Iterable[Tensor],
    engines: Iterable[AccessHooks],
) -> Any:
    """Call a function with parameters that are here as what torch takes them for: so that other
    subclasses, and modes, have their turn as ever."""
    classes = {id(each): (each, type(each)) for each in found}
    for each, own in classes.values():
        each.__class__ = Parameter if own is OffloadedParameter else Tensor
    try:
        with ExitStack() as stack:
            for engine in engines if torch.is_grad_enabled() else ():
                stack.enter_context(engine.saved.around() or nullcontext())
            return func(*args, **kwargs)
    finally:
        for each, own in classes.values():
            each.__class__ = own


def expose(
    func: Callable[..., Any], result: Any, engines: Mapping[AccessHooks, Iterable[ComputeCopy]]
) -> None:
    """Note that parameters may be changed from now on, or have been, without their version."""
    unknown = isinstance(func, OpOverload | OpOverloadPacket) and not str(func).startswith("aten.")
    for uses, copies in engines.items():
        if unknown or func in EXPOSES:
            for copy in copies:
                copy.exposed = True
        elif not torch.is_grad_enabled():  # views that nobody watches
            for _, copy in views(result, uses):
                copy.exposed = True


def tensors(result: Any) -> Iterator[Tensor]:
    """Tensors of a result."""
    return _instances(result, Tensor)


def views(result: Any, uses: AccessHooks) -> Iterator[tuple[Tensor, ComputeCopy]]:
    """Tensors of a result on the memory of parameters, with these."""
    for each in tensors(result):
        if type(each) is Tensor and is_dense(each):
            copy = uses.space.owner_of(each)
            if copy is not None:
                yield each, copy


def _as_edges(value: Any) -> Any:
    """Arguments of `torch.autograd.grad` with edges of the graph for parameters, which need not
    come."""
    if isinstance(value, OffloadedParameter):
        with torch._C.DisableTorchFunctionSubclass():
            return get_gradient_edge(value)
    if isinstance(value, list | tuple):
        return [_as_edges(each) for each in value]
    return value


def _instances(value: Any, kind: type[Any]) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _instances(each, kind)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _instances(each, kind)
