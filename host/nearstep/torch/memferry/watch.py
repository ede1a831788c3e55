"""Profiles of what a program does by itself, while it trains."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _StopRecomputationError

from nearstep.memferry.access import Access, Reads
from nearstep.memferry.profile import Profile
from nearstep.torch.computation import is_in_backward, tensors
from nearstep.torch.memferry.attribution import Attribution, Key
from nearstep.torch.memferry.layers import layers_of, model_fingerprint
from nearstep.torch.memferry.profiler import check_rate, layer_profiles, modelled_on
from nearstep.torch.module_hook import Hook
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Platform


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """How an engine profiles its model in the first step: computation is modelled.

    Attributes
    ----------
    platform, gpu, host, reads, host_params_per_s : as of `nearstep.torch.memferry.profile`.
    """

    platform: str | Platform = "memferry-a100"
    gpu: str = "gpu0"
    host: str = "cpu"
    reads: Reads = "wave"
    host_params_per_s: float = 1e9


class Watch:
    """Profiles a model from the first forward that autograd records until it is asked.

    What counts is what modules of the model compute in such a forward, operations outside of them
    on what requires a gradient, as a loss does, and all of backward. Passes add up. A pass that
    fails is none, and neither are those before it.

    Parameters
    ----------
    model
    profiling
    key : of parameters, and of what is in their memory.

    Raises
    ------
    ArgumentError, PlatformError : the machine lacks a part or a figure.
    """

    def __init__(self, model: nn.Module, profiling: Profiling, key: Key) -> None:
        platform = profiling.platform
        self._machine = load(platform) if isinstance(platform, str) else platform
        self._access = Access.of(self._machine, profiling.host, profiling.gpu, profiling.reads)
        check_rate(profiling.host_params_per_s)
        self._timed = modelled_on(self._machine, profiling.gpu)
        self._model = model
        self._profiling = profiling
        self._key = key
        self._layers = [*layers_of(model).values()]
        self._running: list[int] = []  # modules that run: layers by number, -1 is the model
        self._errors: list[BaseException | None] = []
        self._counts = False
        self._paused = 0
        self._mode = _Mode(self)
        weakref.finalize(self, _take_away, self._mode)
        self.restart()
        self._handles: list[Any] = []
        modules = {layer.module: number for number, layer in enumerate(self._layers)}
        for module, number in {model: -1, **modules}.items():
            any_module: Any = module
            enter, leave = Hook(partial(self._enter, number)), Hook(self._leave)
            self._handles += [
                any_module.register_forward_pre_hook(enter),
                any_module.register_forward_hook(leave, always_call=True),
            ]

    def restart(self) -> None:
        """Forget what has been seen."""
        self._found = Attribution(self._layers, self._timed, self._access, self._key)
        self._found.running += [number for number in self._running if number >= 0]

    def begin(self) -> None:
        """The model is used: see what this thread computes from here on, unless it is to be
        evaluated."""
        if torch.is_grad_enabled() and not is_in_backward():
            _put_below(self._mode)

    def take(self, gradients: Mapping[Tensor, int]) -> Profile | None:
        """The profile of what has been seen; None if that was no training.

        Parameters
        ----------
        gradients : bytes of those that were made.
        """
        if not self._found.order or not gradients:
            return None
        profiling = self._profiling
        layers = layer_profiles(
            self._layers,
            [self._found],
            gradients,
            self._access,
            profiling.host_params_per_s,
            apart=any(each.device.type != "cpu" for each in gradients),
        )
        return Profile(
            source="modelled",
            description=(
                f"{type(self._model).__name__} in training, links of {self._machine.name}, "
                f"computation modelled on its {profiling.gpu}, matrices read by "
                f"{profiling.reads}, activations not counted"
            ),
            fingerprint=model_fingerprint(self._model),
            layers=tuple(layers),
        )

    def close(self) -> None:
        """See no more."""
        for handle in self._handles:
            handle.remove()
        self._paused += 1
        _take_away(self._mode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in this `with` statement is none of the program's."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def operation(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a function of torch, and count it if it is of a training pass."""
        if self._paused or not self._is_training([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        return self._found.__torch_dispatch__(func, types, args, kwargs)

    def _is_training(self, operands: Sequence[Any]) -> bool:
        if is_in_backward():
            return True
        if self._running:
            return self._counts
        return torch.is_grad_enabled() and any(each.requires_grad for each in tensors(operands))

    def _enter(self, number: int, module: nn.Module) -> None:
        if module is self._model and self._running and not is_in_backward():  # interrupted before
            self._running.clear()
            self._errors.clear()
            self.restart()
        if not self._running:
            self._counts = torch.is_grad_enabled()
        self.begin()
        self._running.append(number)
        self._errors.append(sys.exception())
        if number >= 0:
            self._found.running.append(number)

    def _leave(self, _: nn.Module) -> None:
        number = self._running.pop()
        if number >= 0:
            self._found.running.pop()
        error = sys.exception()
        if error is self._errors.pop() or isinstance(error, _StopRecomputationError):
            return  # checkpointing stops a forward in backward when it has what it needs
        self.restart()


class _Mode(TorchDispatchMode):
    """What a thread has among its modes of torch, and what does not keep a watch alive."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch: Callable[[], Watch | None] = weakref.ref(watch)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        watch = self._watch()
        if watch is None:
            return func(*args, **(kwargs or {}))
        return watch.operation(func, types, args, kwargs or {})


def _put_below(mode: TorchDispatchMode) -> None:
    """Enter a mode below those of this thread, unless it is there: they are left in their turn,
    and this one whenever it may be."""
    modes = _own_modes()
    if not any(each is mode for each in modes):
        _set_modes([mode, *modes])


def _take_away(mode: TorchDispatchMode) -> None:
    """Leave a mode, wherever it is among those of this thread."""
    modes = _own_modes()
    if any(each is mode for each in modes):
        _set_modes([each for each in modes if each is not mode])


def _own_modes() -> list[TorchDispatchMode]:
    """Of this thread, but for torch's own, which are above."""
    modes: list[TorchDispatchMode] = _get_current_dispatch_mode_stack()
    return [each for each in modes if getattr(each, "_mode_key", None) is None]


def _set_modes(modes: Sequence[TorchDispatchMode]) -> None:
    for _ in _own_modes():
        _pop_mode()
    for each in modes:
        _push_mode(each)
