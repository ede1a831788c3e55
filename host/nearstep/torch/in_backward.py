"""Updates while backward goes on: of each parameter, once its gradient is complete."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from nearstep.torch.checks import check_memory
from nearstep.torch.dtensor import is_dtensor
from nearstep.torch.errors import EarlyUpdateError, UnsupportedOptionError
from nearstep.torch.settings import Settings
from nearstep.torch.table import Owner, labels_of
from nearstep.torch.unclaimed import unclaimed

WHOLE_STEPS = "drives of cards are consistent only after a whole step, use updates='at-step'"
"""Why cards do not update in backward."""

TOGETHER = 1 << 20
"""Elements that are updated at once: gradients wait until they have as many."""


class UpdatingOwner(Owner, Protocol):
    """An optimizer whose parameters are updated in backward."""

    @property
    def settings(self) -> Settings:
        """Arguments besides torch's options."""

    @property
    def keeps_updates(self) -> bool:
        """Whether early updates are in force; False: with drives, they were rolled back."""

    def update_early(self, parameters: Container[Tensor]) -> None:
        """Update some parameters before the next step."""

    def interrupt(self, cause: str) -> None:
        """Roll back early updates; without drives refuse further use until a checkpoint is
        loaded."""


class UsedGradient(Tensor):
    """Stands for the gradient that updated a parameter, whose memory is freed: until it is reset,
    every use of its elements raises `EarlyUpdateError`.

    Attributes
    ----------
    label : name of the parameter in errors.
    """

    label: str

    @staticmethod
    def __new__(cls, name: str, parameter: Tensor) -> UsedGradient:
        made: UsedGradient = Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        made.label = name
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no types
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        reason = f"{func.__name__} is called with its gradient, which is freed then"
        raise EarlyUpdateError(found.label, reason)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UsedGradient({self.label!r})"


class BackwardUpdates:
    """Updates parameters of an optimizer in hooks of their gradients.

    A parameter that is updated has a `UsedGradient`. What torch would do with a gradient between
    backward and `step()`, or after `step()` until it is reset, raises `EarlyUpdateError` then.

    Parameters
    ----------
    optimizer : without clipping, and without drives of cards.

    Raises
    ------
    UnsupportedOptionError
    """

    def __init__(self, optimizer: UpdatingOwner) -> None:
        bound = optimizer.settings.max_grad_norm
        if bound is not None:
            reason = "the norm of all gradients is not known before the last one is made"
            raise UnsupportedOptionError("max_grad_norm", bound, f"{reason}: use updates='at-step'")
        if optimizer.settings.overflow is not None and optimizer.table.device.drive_places:
            raise UnsupportedOptionError("updates", "in-backward", WHOLE_STEPS)
        self._optimizer = weakref.ref(optimizer)
        self._lock = threading.RLock()  # backward has a thread for each accelerator
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._names: Mapping[Tensor, str] = {}
        self._pass = -1
        self._complete: dict[Tensor, None] = {}
        self._elements = 0  # of these
        self._updated: dict[Tensor, int] = {}
        self._options: list[dict[str, Any]] = []
        self._accumulates = False
        self._is_alone = False
        weakref.finalize(optimizer, _remove, self._hooks)

    def watch(self, optimizer: UpdatingOwner) -> None:
        """Hook the parameters that require a gradient and have no hook yet."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        self._names = labels_of(optimizer.param_groups)
        new = [p for p in every if p.requires_grad and p not in self._hooks and not is_lazy(p)]
        for each in new:
            if is_dtensor(each):
                reason = "gradients of sharded parameters are reduced after backward"
                raise UnsupportedOptionError("updates", "in-backward", reason)
            if unclaimed(each) is not None:
                reason = "give nearstep.offload updates='in-backward'"
                raise UnsupportedOptionError("updates", "in-backward", reason)
        if new:
            check_memory({p: self._names[p] for p in every if not is_lazy(p)})
        for each in new:
            hook = partial(_completed, weakref.ref(self))
            self._hooks[each] = each.register_post_accumulate_grad_hook(hook)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Update nothing in backward."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def completed(self, parameter: Tensor) -> None:
        """Backward has made a gradient: update the parameter, perhaps together with the next.

        Raises
        ------
        EarlyUpdateError
        """
        optimizer, gradient = self._optimizer(), parameter.grad
        if optimizer is None or gradient is None or self._accumulates:
            return
        if parameter not in self._names:
            return  # it was taken out of the groups
        with self._lock:
            name, task = self._names[parameter], torch._C._current_graph_task_id()
            self._forget_if_undone(optimizer)
            if parameter in self._updated:
                raise EarlyUpdateError(name, "another backward has made a gradient of it")
            if isinstance(gradient, UsedGradient):
                raise EarlyUpdateError(name, "another optimizer has its gradient, too")
            if gradient.requires_grad:
                raise EarlyUpdateError(name, "its gradient is part of a graph (create_graph)")
            if task != self._pass:  # what is left of other passes waits for step()
                self._forget(task)
            self._complete[parameter] = None
            self._elements += parameter.numel()
            if self._elements >= TOGETHER:
                self._update(optimizer)

    def _forget(self, task: int = -1) -> None:
        self._pass, self._elements = task, 0
        self._complete.clear()

    def _forget_if_undone(self, optimizer: UpdatingOwner) -> None:
        if not optimizer.keeps_updates:
            self._updated.clear()

    def _update(self, optimizer: UpdatingOwner) -> None:
        """Update the parameters whose gradients are complete."""
        if not self._is_alone and torch.distributed.is_available():
            self._refuse_wrapper()
        found = [each for each in self._complete if each.grad is not None]
        self._forget(self._pass)
        self._check_options(optimizer)
        before = [each._version for each in found]
        try:
            optimizer.update_early(set(found))
        finally:
            for each, version in zip(found, before, strict=True):
                # Ctrl-C may come when it is made.
                if each._version != version and optimizer.keeps_updates:
                    each.grad = UsedGradient(self._names[each], each)
                    self._updated[each] = each._version

    def _refuse_wrapper(self) -> None:
        """Look once for a `DistributedDataParallel`, which averages gradients after the hooks.

        Raises
        ------
        UnsupportedOptionError : there is one; nothing has been updated.
        """
        if torch.distributed.is_initialized():
            for each in gc.get_objects():
                if not issubclass(type(each), DistributedDataParallel):
                    continue
                if any(parameter in self._hooks for parameter in each.parameters()):
                    reason = "DistributedDataParallel averages gradients after they are used: give "
                    reason += "nearstep.offload the wrapper and updates='in-backward'"
                    raise UnsupportedOptionError("updates", "in-backward", reason)
        self._is_alone = True

    def _check_options(self, optimizer: UpdatingOwner) -> None:
        groups = optimizer.param_groups
        if not self._updated:
            self._options = options_of(groups)
        elif any(map(have_changed, groups, self._options)):
            name = self._names[next(iter(self._updated))]
            raise EarlyUpdateError(name, "options of the optimizer were changed before step()")

    def left(self, optimizer: UpdatingOwner) -> Collection[Tensor]:
        """Parameters that `step()` has to update.

        Raises
        ------
        EarlyUpdateError : the step would have other bits than with updates at the step.
        """
        self._forget_if_undone(optimizer)
        self._check_options(optimizer)
        left = set()
        for parameter, name in labels_of(optimizer.param_groups).items():
            version, gradient = self._updated.get(parameter), parameter.grad
            is_used = isinstance(gradient, UsedGradient)
            if version is None:
                if is_used:
                    reason = "step() is called without zero_grad() and another backward"
                    raise EarlyUpdateError(name, reason)
                left.add(parameter)
            elif not is_used:
                raise EarlyUpdateError(name, "its gradient was reset or set before step()")
            elif parameter._version != version:
                raise EarlyUpdateError(name, "it was changed before step()")
        return left

    def check_between(self, optimizer: UpdatingOwner, action: str) -> None:
        """Raise `EarlyUpdateError` between the first update and the end of the step."""
        self._forget_if_undone(optimizer)
        for parameter in self._updated:
            reason = f"{action} is called before step(), which ends what backward began"
            raise EarlyUpdateError(self._names[parameter], reason)

    def refuse_scaler(self, optimizer: UpdatingOwner) -> None:
        """Raise, since a scaler steps: updates in backward were with gradients times its scale.

        Raises
        ------
        EarlyUpdateError : there were updates: they are rolled back, or steps are refused until a
            checkpoint is loaded.
        UnsupportedOptionError : there was none.
        """
        for parameter in self._updated:
            optimizer.interrupt(EarlyUpdateError.__name__)
            raise EarlyUpdateError(self._names[parameter], "its gradient is scaled (GradScaler)")
        reason = "a GradScaler looks at all gradients first: use updates='at-step'"
        raise UnsupportedOptionError("updates", "in-backward", reason)

    def reset(self, optimizer: UpdatingOwner, *, set_to_none: bool) -> None:
        """Prepare `zero_grad`: gradients that were used become zeros, unless they become None."""
        self.check_between(optimizer, "zero_grad()")
        self._forget()
        for group in optimizer.param_groups if not set_to_none else ():
            for each in group["params"]:
                if isinstance(each.grad, UsedGradient):
                    each.grad = torch.zeros_like(each, requires_grad=False)

    def begin(self, optimizer: UpdatingOwner) -> None:
        """Begin a step: the last one has ended, or a checkpoint is loaded."""
        self._updated.clear()
        self._forget()
        self.watch(optimizer)


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy the options of groups."""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in groups
    ]


def have_changed(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether the options of a group are others than those that `options_of` copied."""
    return len(group) != len(options) + 1 or any(
        name not in group or group[name] != value for name, value in options.items()
    )


def _completed(updates: weakref.ref[BackwardUpdates], parameter: Tensor) -> None:
    found = updates()
    if found is not None:
        found.completed(parameter)


def _remove(hooks: dict[Tensor, RemovableHandle]) -> None:
    for each in hooks.values():
        each.remove()
    hooks.clear()
