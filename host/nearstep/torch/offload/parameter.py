"""Parameters that are fetched when they are used."""

from __future__ import annotations

import copy as copying
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from nearstep.torch.eager import eager
from nearstep.torch.errors import EarlyUpdateError, ParameterError
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
"""Functions answered by `ComputeCopy.like`."""

REQUIRES_GRAD = frozenset({_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__})

SET_DATA = _TENSOR.data.__set__

LENDS = frozenset({_TENSOR.detach, _TENSOR.data.__get__})
"""Functions that return a tensor on the same memory, unknown to autograd."""


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
"""Functions that expose memory to changes that do not increase torch's version."""


ADDRESSES = frozenset({_TENSOR.data_ptr, _TENSOR.untyped_storage, _TENSOR.storage})
"""Functions that return an address without keeping the memory alive."""


OWN_ATTRIBUTES = frozenset({"_copy", "_kept", "_waiting"})
"""Attributes of `OffloadedParameter` that are no user's."""


class OffloadedParameter(Parameter):
    """The class of the parameters of an offloaded model.

    Every function of torch called with such a parameter is dispatched to `__torch_function__`.
    """

    _copy: Callable[[], ComputeCopy | None]
    _kept: ComputeCopy
    _waiting: UnclaimedParameter

    @classmethod
    def make(cls, copy: ComputeCopy, hooks: AccessHooks) -> Self:
        """Make a copy's parameter an `OffloadedParameter` that refers to the copy weakly: the
        garbage collector does not see autograd's reference to the parameter."""
        copy.hooks = hooks
        parameter = copy.parameter
        parameter.__class__ = cls
        assert isinstance(parameter, cls)
        parameter._copy = weakref.ref(copy)
        return parameter

    def end(self) -> None:
        """Make the parameter a plain `Parameter`."""
        self.__class__ = Parameter  # type: ignore[assignment]
        vars(self).pop("_copy", None)

    @property
    def copy(self) -> ComputeCopy:
        """The parameter on the compute device.

        Raises
        ------
        LostEngineError : engine and model were garbage-collected.
        """
        found = self._copy()
        if found is None:
            raise LostEngineError
        return found

    @property
    def hooks(self) -> AccessHooks:
        """Hooks on functions of torch called with the parameter."""
        found: AccessHooks = self.copy.hooks
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
            return func(args[0].copy.like, *args[1:], **kwargs)
        if func in ADDRESSES and TracingContext.try_get() is None:  # dynamo has it as an identity
            args[0].hooks.space.check_runs()
            expected = "located by p.detach(), whose memory stays, or saved by model.state_dict()"
            actual = f"by {func.__name__} of a parameter that comes and goes"
            raise ParameterError(args[0].copy.name, expected, actual)
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        found = list(dict.fromkeys(_instances((args, kwargs), OffloadedParameter)))
        engines: dict[AccessHooks, list[ComputeCopy]] = {}
        for each in found:
            engines.setdefault(each.hooks, []).append(each.copy)
        uses, copies = next(iter(engines.items()))
        if func in REQUIRES_GRAD:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            uses.requires_grad_changed(copies)
            return result
        if func == SET_DATA and args[0] is found[0]:
            uses.check_data(copies[0], args[1])
        stack = ExitStack()
        try:
            with stack:
                for engine, own in engines.items():
                    stack.enter_context(engine.of(func, own))
                if func == SET_DATA and args[0] is found[0]:
                    uses.make_room(copies[0], args[1])
                result = plainly(func, args, kwargs, found, engines)
            if func == SET_DATA:
                uses.rebind(copies)
        except BaseException:
            stack.close()  # unless it is closed
            uses.space.torn = True
            raise
        if func is Tensor.detach and copies[0] in uses.saving:
            uses.saving.discard(copies[0])
            made = _state_dict()
            if made is not None:
                return uses.saved_in(made, copies[0], result)
        if func not in LENDS:
            for engine, own in engines.items():
                engine.watch(result, [(copy, object()) for copy in own])
        expose(func, result, engines)
        return result

    @property
    @eager
    def grad(self) -> Tensor | None:
        """As in torch.

        A gradient held by the owner is fetched on read, and present until it is set to None or, if
        unreferenced, evicted.
        """
        return self.hooks.gradients.read(self.copy)

    @grad.setter
    @eager
    def grad(self, gradient: Tensor | None) -> None:
        self.hooks.gradients.assign(self.copy, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.hooks.gradients.assign(self.copy, None)

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: torch does not report the change of memory.

        Raises
        ------
        ParameterError
        """
        expected = "given other memory by p.data = ... while offloaded"
        raise ParameterError(self.copy.name, expected, "by set_")

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        found = memo[id(self)] = self.hooks.twin(self)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain, own = self.plain(), vars(self).items()
        vars(plain).update({name: value for name, value in own if name not in OWN_ATTRIBUTES})
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def plain(self) -> Parameter:
        """Return a plain parameter with memory of its own."""
        return Parameter(self.detach().clone(), self.requires_grad)


class ParameterView(Tensor):
    """A tensor on a parameter's memory, which is not freed while such a tensor exists.

    Operations save its place in the parameter for backward, not its values.
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
        """Make a tensor on a parameter's memory a `ParameterView`."""
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
    """Return the copy of a parameter that `init` has offloaded and no engine has claimed; else
    None."""
    found: ComputeCopy | None = getattr(parameter, "_kept", None)
    return found


def plainly(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    found: Iterable[Tensor],
    engines: Iterable[AccessHooks],
) -> Any:
    """Call a function with present parameters as plain tensors, so that other subclasses and modes
    of torch are dispatched as usual."""
    classes = {id(each): (each, type(each)) for each in found}
    hooks: list[torch.autograd.graph.saved_tensors_hooks] = []
    try:
        try:
            for each, own in classes.values():
                each.__class__ = Parameter if own is OffloadedParameter else Tensor
            for engine in engines if torch.is_grad_enabled() else ():
                around = engine.saved.around()
                if around is not None:
                    hooks.append(around)
                    around.__enter__()
            return func(*args, **kwargs)
        finally:
            _end_plainly(classes.values(), hooks)
    except BaseException:
        _end_plainly(classes.values(), hooks)  # again, if Ctrl-C came before
        raise


def _end_plainly(
    classes: Iterable[tuple[Any, type]],
    hooks: Sequence[torch.autograd.graph.saved_tensors_hooks],
) -> None:
    """Restore classes, and remove hooks that are not removed yet."""
    for each, own in classes:
        each.__class__ = own
    for each in reversed(hooks):
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and top[0] is each.pack_hook:
            each.__exit__()


def expose(
    func: Callable[..., Any], result: Any, engines: Mapping[AccessHooks, Iterable[ComputeCopy]]
) -> None:
    """Mark parameters that may change, or have changed, without a change of their version."""
    unknown = isinstance(func, OpOverload | OpOverloadPacket) and not str(func).startswith("aten.")
    for uses, copies in engines.items():
        if unknown or func in EXPOSES:
            for copy in copies:
                copy.exposed = True
        elif not torch.is_grad_enabled():  # views that nobody watches
            for _, copy in views(result, uses):
                copy.exposed = True


def tensors(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result."""
    return _instances(result, Tensor)


def views(result: Any, uses: AccessHooks) -> Iterator[tuple[Tensor, ComputeCopy]]:
    """Yield the tensors of a result that use a parameter's memory, with the parameter's copy."""
    for each in tensors(result):
        if type(each) is Tensor and is_dense(each):
            copy = uses.space.owner_of(each)
            if copy is not None:
                yield each, copy


def _state_dict() -> Mapping[str, Any] | None:
    """Return the dict that torch's `state_dict` is making in this thread, if any."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    running = (each for each in frames if each.f_code is nn.Module.state_dict.__code__)
    return next((each.f_locals["destination"] for each in running), None)


def _as_edges(value: Any) -> Any:
    """Replace parameters in arguments of `torch.autograd.grad` by graph edges, which need no
    fetch."""
    if isinstance(value, OffloadedParameter):
        with torch._C.DisableTorchFunctionSubclass():
            return get_gradient_edge(value)
    if isinstance(value, list | tuple):
        return [_as_edges(each) for each in value]
    return value


def _grad(
    outputs: Any, inputs: Sequence[Any], *, materialize_grads: bool = False, **options: Any
) -> Sequence[Tensor | None]:
    """Call `torch.autograd.grad`, as it dispatches itself, and fetch no parameter."""
    options = {name: _as_edges(each) for name, each in options.items()}
    found: Sequence[Tensor | None]
    found = torch.autograd.grad(_as_edges(outputs), _as_edges(inputs), **options)
    if not materialize_grads:
        return found

    def zeros(own: Tensor) -> Tensor:
        like = own.copy.like if isinstance(own, OffloadedParameter) else own
        keeps_graph = options.get("create_graph", False)
        return torch.zeros_like(like, device=own.device, requires_grad=keeps_graph)

    pairs = zip(found, inputs, strict=True)
    return tuple(zeros(own) if each is None else each for each, own in pairs)


def _instances(value: Any, kind: type[Any]) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _instances(each, kind)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _instances(each, kind)


class AccessHooks:
    """Hooks on functions of torch called with parameters.

    Attributes
    ----------
    saved : hooks for what is saved for backward.
    saving : parameters of which the next `detach` in torch's `state_dict` makes a copy.
    """

    def __init__(self, space: ParameterCache, gradients: Gradients) -> None:
        self.space = space
        self.gradients = gradients
        self.saved = SavedHooks(space)
        self.saving: set[ComputeCopy] = set()
        self._saved: MutableMapping[ComputeCopy, Tensor] = weakref.WeakValueDictionary()
        self._hooked: dict[ComputeCopy, Any] = {}

    def saved_in(self, made: Mapping[str, Any], copy: ComputeCopy, detached: Tensor) -> Tensor:
        """Return the copy of a parameter for a state dict: for all names of a tied weight the same
        one."""
        known = self._saved.get(copy)
        if known is None or not any(each is known for each in made.values()):
            known = self._saved[copy] = detached.clone()
        return known

    @contextmanager
    def of(self, func: Callable[..., Any], copies: Sequence[ComputeCopy]) -> Iterator[None]:
        """Fetch and pin parameters during a call.

        Raises
        ------
        BudgetError, EarlyUpdateError
        """
        updated = self.gradients.take_given_up()
        if updated is not None and func is not Tensor.copy_:  # as a checkpoint is loaded
            reason = "backward failed before optimizer.step()"
            raise EarlyUpdateError(updated.name, reason)
        watch = self.space.watch
        with self.space.using(copies), nullcontext() if watch is None else watch.seeing():
            yield

    def watch(self, result: Any, uses: Sequence[tuple[ComputeCopy, object]]) -> None:
        """Hook the backward of a function's results to reserve room for gradients, and make results
        on parameters' memory `ParameterView`s."""
        if not torch.is_grad_enabled():
            return
        by_copy = dict(uses)
        for view, copy in views(result, self):
            if copy in by_copy:
                ParameterView.of(view, self, copy, by_copy[copy])
        growing = [(copy, use) for copy, use in uses if copy.parameter.requires_grad]
        if growing:
            nodes = {each.grad_fn for each in tensors(result) if not isinstance(each, Parameter)}
            for node in nodes:
                if node is not None:
                    node.register_prehook(partial(_expect, self.gradients, growing))

    def requires_grad_changed(self, copies: Iterable[ComputeCopy]) -> None:
        """Hook parameters whose `requires_grad` may have changed."""
        for copy in copies:
            copy.watch_gradient()
            self.hook(copy)
            self.space.follow(copy)

    def hook(self, copy: ComputeCopy) -> None:
        """Hook a parameter that requires a gradient, to send each complete gradient."""
        if copy.parameter.requires_grad and copy not in self._hooked:
            complete = partial(_complete, weakref.ref(self.gradients), weakref.ref(copy))
            register = copy.parameter.register_post_accumulate_grad_hook
            arriving = partial(_arriving, weakref.ref(self.gradients), weakref.ref(copy))
            self._hooked[copy] = [
                register(complete),  # type: ignore[no-untyped-call]
                copy.register_prehook(arriving),
            ]

    def unhook(self) -> None:
        """Remove all hooks."""
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked.clear()

    def check_data(self, copy: ComputeCopy, value: Tensor) -> None:
        """Raise `ParameterError` if `value` differs from the parameter in dtype, device or
        shape."""
        own = copy.parameter
        for what, expected, actual in (
            ("dtype", own.dtype, value.dtype),
            ("device", own.device, value.device),
            ("shape", own.shape, value.shape),
        ):
            if expected != actual:
                raise ParameterError(copy.name, f"of {what} {expected} while offloaded", actual)

    def make_room(self, copy: ComputeCopy, value: Tensor) -> None:
        """Make room for the memory of a parameter's new data.

        Raises
        ------
        BudgetError
        """
        with torch._C.DisableTorchFunctionSubclass():
            nbytes = value.untyped_storage().nbytes()
        self.space.make_room_for_other(copy, nbytes)

    def twin(self, parameter: OffloadedParameter) -> Parameter:
        """Return a plain copy of a parameter."""
        return parameter.plain()

    def rebind(self, copies: Iterable[ComputeCopy]) -> None:
        """Track parameters whose memory was replaced."""
        for copy in copies:
            self.space.rebind(copy)


@eager
def _expect(
    gradients: Gradients, uses: Sequence[tuple[ComputeCopy, object]], _: Sequence[Tensor]
) -> None:
    gradients.expect(uses)


@eager
def _arriving(
    gradients: Callable[[], Gradients | None],
    copy: Callable[[], ComputeCopy | None],
    arriving: Sequence[Tensor | None],
) -> None:
    found, of = gradients(), copy()
    if found is not None and of is not None:
        found.arriving(of, arriving[0])


@eager
def _complete(
    gradients: Callable[[], Gradients | None], copy: Callable[[], ComputeCopy | None], _: Tensor
) -> None:
    found, of = gradients(), copy()
    if found is not None and of is not None:
        found.complete(of)
