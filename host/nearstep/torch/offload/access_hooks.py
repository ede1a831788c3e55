"""Uses of parameters by functions of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nearstep.torch.eager import eager
from nearstep.torch.errors import ParameterError
from nearstep.torch.offload.cache import ParameterCache
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.offload.errors import EarlyUpdateError
from nearstep.torch.offload.gradients import Gradients
from nearstep.torch.offload.parameter import OffloadedParameter, ParameterView, tensors, views
from nearstep.torch.offload.saved import SavedHooks


class AccessHooks:
    """What happens when a function of torch is called with parameters.

    Attributes
    ----------
    saved : hooks for what is saved for backward.
    saving : parameters of which the next `detach` makes a tensor with memory of its own.
    """

    def __init__(self, space: ParameterCache, gradients: Gradients) -> None:
        self.space = space
        self.gradients = gradients
        self.saved = SavedHooks(space)
        self.saving: set[ComputeCopy] = set()
        self._hooked: dict[ComputeCopy, Any] = {}

    @contextmanager
    def of(self, func: Callable[..., Any], copies: Sequence[ComputeCopy]) -> Iterator[None]:
        """Have parameters here during a call.

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
        """Have backward say so before it comes to what a function returned, and know results on the
        memory of parameters again."""
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
        """Parameters may require a gradient that did not."""
        for copy in copies:
            copy.watch_gradient()
            self.hook(copy)
            self.space.follow(copy)

    def hook(self, copy: ComputeCopy) -> None:
        """Have a parameter's gradient go when it is complete, if it requires one."""
        if copy.parameter.requires_grad and copy not in self._hooked:
            complete = partial(_complete, weakref.ref(self.gradients), weakref.ref(copy))
            register = copy.parameter.register_post_accumulate_grad_hook
            arriving = partial(_arriving, weakref.ref(self.gradients), weakref.ref(copy))
            self._hooked[copy] = [
                register(complete),  # type: ignore[no-untyped-call]
                copy.register_prehook(arriving),
            ]

    def unhook(self) -> None:
        """Take all hooks away."""
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked.clear()

    def check_data(self, copy: ComputeCopy, value: Tensor) -> None:
        """Raise `ParameterError` unless a parameter may have this as its data."""
        own = copy.parameter
        for what, expected, actual in (
            ("dtype", own.dtype, value.dtype),
            ("device", own.device, value.device),
            ("shape", own.shape, value.shape),
        ):
            if expected != actual:
                raise ParameterError(copy.name, f"of {what} {expected} while offloaded", actual)

    def make_room(self, copy: ComputeCopy, value: Tensor) -> None:
        """Have room for the memory of what is to be a parameter's data.

        Raises
        ------
        BudgetError
        """
        with torch._C.DisableTorchFunctionSubclass():
            more = value.untyped_storage().nbytes() - copy.nbytes
        if more > 0 and not self.space.closed:
            with self.space.aside():
                self.space.make_room(more, f"other memory of {copy.name}")

    def twin(self, parameter: OffloadedParameter) -> Parameter:
        """A copy of a parameter: a plain one."""
        return parameter.plain()

    def rebind(self, copies: Iterable[ComputeCopy]) -> None:
        """Parameters have been given other memory."""
        for copy in copies:
            self.space.rebind(copy)


@eager
def _expect(
    gradients: Gradients, uses: Sequence[tuple[ComputeCopy, object]], _: Sequence[Tensor]
) -> None:
    gradients.expect(uses)


@eager
def _arriving(
    gradients: Callable[[], Gradients | None], copy: Callable[[], ComputeCopy | None], _: Any
) -> None:
    found, of = gradients(), copy()
    if found is not None and of is not None:
        found.arriving(of)


@eager
def _complete(
    gradients: Callable[[], Gradients | None], copy: Callable[[], ComputeCopy | None], _: Tensor
) -> None:
    found, of = gradients(), copy()
    if found is not None and of is not None:
        found.complete(of)
