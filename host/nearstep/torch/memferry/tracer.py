"""Profiles traced from a program while it trains."""

from __future__ import annotations

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
    _push_mode,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError

from nearstep.memferry.access import Access, Reads
from nearstep.memferry.profile import Profile
from nearstep.torch.computation import is_in_backward, tensors
from nearstep.torch.eager import eager
from nearstep.torch.memferry.attribution import Attribution, Key, sequence_number
from nearstep.torch.memferry.layers import layers_of, model_fingerprint
from nearstep.torch.memferry.profiler import check_rate, layer_profiles, modelled_on
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Platform


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """How an engine profiles its model in the first step: computation is modelled.

    Attributes
    ----------
    platform, gpu, host, reads, host_params_per_s : as for `nearstep.torch.memferry.profile`.
    """

    platform: str | Platform = "memferry-a100"
    gpu: str = "gpu0"
    host: str = "cpu"
    reads: Reads = "wave"
    host_params_per_s: float = 1e9


class ModelTracer(TorchDispatchMode):
    """Profiles a model from the first forward with autograd until `take`.

    Traced are the model's modules in such forwards, functions of torch that get a parameter outside
    of modules, and the backward of both. Times of passes add up. An error in a pass discards the
    trace so far.

    The mode is on the thread's stack only while a traced module, function or node runs: torch pops
    what a node has pushed when the node ends or raises.

    Parameters
    ----------
    key : returns the number of the parameter whose memory a tensor uses.

    Raises
    ------
    ArgumentError, PlatformError : the machine lacks a part or a figure.
    """

    def __init__(self, model: nn.Module, profiling: Profiling, key: Key) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        platform = profiling.platform
        self._machine = load(platform) if isinstance(platform, str) else platform
        self._access = Access.of(self._machine, profiling.host, profiling.gpu, profiling.reads)
        check_rate(profiling.host_params_per_s)
        self._timed = modelled_on(self._machine, profiling.gpu)
        self._model = model
        self._profiling = profiling
        self._key = key
        self._layers = [*layers_of(model).values()]
        self._is_closed = False
        self._calls: list[Call] = []
        self._found = self._attribution()
        numbers = {layer.module: number for number, layer in enumerate(self._layers)}
        for module in {model: None, **numbers}:
            self._calls.append(Call(module, weakref.ref(self), numbers.get(module)))

    def _attribution(self) -> Attribution:
        return Attribution(self._layers, self._timed, self._access, self._key)

    def restart(self) -> None:
        """Discard the trace so far."""
        running, self._found = self._found.running, self._attribution()
        self._found.running = running

    @property
    def _is_entered(self) -> bool:
        return any(each is self for each in _get_current_dispatch_mode_stack())

    @contextmanager
    def seeing(self) -> Iterator[bool]:
        """Trace this thread's computation in a `with` statement, in training only.

        Yields
        ------
        bool : whether the tracer was entered here, and so is the outermost.
        """
        if self._is_entered or not (torch.is_grad_enabled() or is_in_backward()):
            yield False
            return
        with self:
            yield True

    def see_node(self, *_: Any) -> None:
        """Trace the node of autograd that is about to run; a prehook of nodes."""
        if not (self._is_entered or self._is_closed):
            _push_mode(self)

    def follow(self, results: Any, first: int) -> None:
        """Register prehooks that trace the backward of results.

        Parameters
        ----------
        first : sequence number of the first node to trace; earlier nodes are not the results' own.
        """
        see = weakref.WeakMethod(self.see_node)
        todo = [each.grad_fn for each in tensors(tree_leaves(results))]
        known = set()
        while todo:
            node = todo.pop()
            if node is None or node in known or node._sequence_nr() < first:
                continue
            known.add(node)
            variable: Any = getattr(node, "variable", None)
            if not isinstance(variable, Tensor) or self._found.owns(variable):
                node.register_prehook(partial(_see, see))
            todo += [each for each, _ in node.next_functions]

    def run(self, number: int | None, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module and trace it; `number` is that of its layer, or None for a model
        without."""
        first = sequence_number()
        running = self._found.running
        depth = len(running)
        try:
            with self.seeing() as is_outermost:
                if number is not None:
                    running.append(number)
                result = function(*args, **kwargs)
            if is_outermost:
                self.follow(result, first)
            return result
        except _StopRecomputationError:  # control flow of checkpointing
            raise
        except BaseException:
            self.restart()
            raise
        finally:
            del running[depth:]

    def take(self, gradients: Mapping[Tensor, int]) -> Profile | None:
        """Return the profile of the trace; None if no training was traced.

        Parameters
        ----------
        gradients : bytes of each parameter's gradient.
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
        """Stop tracing."""
        for call in self._calls:
            call.remove()
        self._is_closed = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._found.__torch_dispatch__(func, types, args, kwargs)


class Call:
    """Calls a module in place of its class, and reports to a tracer.

    The hook is `_compiled_call_impl`, the attribute of `Module.compile`: torch leaves it out of
    copies and pickles.

    Parameters
    ----------
    watch : returns the tracer; None once it is collected.
    number : number of the layer; None: the model is no layer.
    """

    def __init__(
        self, module: nn.Module, watch: Callable[[], ModelTracer | None], number: int | None
    ) -> None:
        self._module: Callable[[], Any] = weakref.ref(module)
        self._watch = watch
        self._number = number
        self._before: Callable[..., Any] | None = module._compiled_call_impl
        self._is_removed = False
        module._compiled_call_impl = self

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._before or self._module()._call_impl
        watch = self._watch()
        if watch is None or self._is_removed:
            return function(*args, **kwargs)
        return watch.run(self._number, function, args, kwargs)

    def remove(self) -> None:
        """Restore the module's former call."""
        self._is_removed = True
        module = self._module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._before


@eager
def _see(watch: Callable[[], Callable[[], None] | None], _: Any) -> None:
    see = watch()
    if see is not None:
        see()
