"""Profiles of modules of torch: computation measured here, or modelled on a machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from nearstep.errors import ArgumentError
from nearstep.memferry.access import Access, Reads
from nearstep.memferry.errors import ProfileError
from nearstep.memferry.profile import LayerProfile, Profile
from nearstep.torch.checks import is_on_host_or_accelerator
from nearstep.torch.computation import Computation
from nearstep.torch.errors import ParameterError
from nearstep.torch.memferry.attribution import Attribution, Timed
from nearstep.torch.memferry.layers import ModuleLayer, layers_of, model_fingerprint
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Platform

Source = Literal["modelled", "measured"]


def profile(
    model: nn.Module,
    run: Callable[[], object],
    *,
    platform: str | Platform,
    source: Source = "modelled",
    gpu: str = "gpu",
    host: str = "cpu",
    reads: Reads = "wave",
    runs: int = 5,
    host_params_per_s: float = 1e9,
) -> Profile:
    """Profile a model for the planner by running it.

    A layer is a module with parameters of its own; layers are in the order of first use. A module
    that is called twice or shared is one layer, with the times of all calls; an unused module is no
    layer. A tied parameter is loaded by each layer that has it, and its gradient belongs to the
    first. Computation before the first and after the last layer is added to that layer, and does
    not depend on where parameters are. Gradients, buffers and random state are restored.

    Parameters
    ----------
    model : a module whose parameters are on the CPU or on one accelerator.
    run : one forward and backward pass of the model; no step of an optimizer.
    platform : name of a shipped machine, or a file, as for `nearstep_spec.platform.load`; models
        transfers, direct host access, and computation.
    source : `modelled`: the time of each operation is that of `computation.Computation`;
        `measured`: the time on the parameters' device, of each operation alone, by events of the
        accelerator; the median of several runs after a warm-up run.
    gpu, host : names of processors of the machine; `host` may be a channel of a DIMM.
    reads : how often direct host access reads a matrix (`nearstep.memferry.access`).
    runs : number of measured runs.
    host_params_per_s : parameters a second that the optimizer on the host updates.

    Raises
    ------
    ArgumentError, PlatformError : an argument is invalid, or the machine lacks a figure.
    ParameterError : a parameter is offloaded, or on another device than the first one.
    ProfileError : `run` makes no gradients, changes parameters, or uses other layers each time.
    """
    layers = [*layers_of(model).values()]
    found = load(platform) if isinstance(platform, str) else platform
    device = _check(model, source, runs)
    check_rate(host_params_per_s)
    access = Access.of(found, host, gpu, reads)
    timed = modelled_on(found, gpu) if source == "modelled" else _measured_on(device)
    with _as_before(model), torch.autograd.set_multithreading_enabled(False):
        saved = _Saved(layers, access)
        gradients = saved.run(model, run)
        passes = [_one(model, run, layers, timed, access) for _ in range(_count(source, runs))]
    for each in passes:
        if each.order != saved.first.order:
            names = [[layers[i].name for i in order] for order in (saved.first.order, each.order)]
            raise ProfileError("", "run", f"of the same layers each time, {names[0]}", names[1])
    computed = (
        f"computation measured on {_told(device)}, median of {runs} runs"
        if source == "measured"
        else f"computation modelled on its {gpu}"
    )
    return Profile(
        source=source,
        description=(
            f"{type(model).__name__}, links of {found.name}, {computed}, matrices read by {reads}"
        ),
        fingerprint=model_fingerprint(model),
        layers=tuple(
            layer_profiles(
                layers,
                passes,
                gradients,
                access,
                host_params_per_s,
                apart=device.type != "cpu",
            )
        ),
        activation_bytes=saved.nbytes,
    )


def _check(model: nn.Module, source: str, runs: int) -> torch.device:
    """Return the device of the parameters."""
    if source not in get_args(Source):
        raise ArgumentError(f"source must be one of {get_args(Source)}, not {source!r}")
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise ArgumentError(f"runs must be a whole number from 1, not {runs!r}")
    device = next(model.parameters()).device
    for name, parameter in model.named_parameters():
        if type(parameter) is not Parameter:
            raise ParameterError(name, "of class Parameter", type(parameter).__name__)
        if not is_on_host_or_accelerator(parameter):
            raise ParameterError(name, "on the CPU or an accelerator", f"on {parameter.device}")
        if parameter.device != device:
            raise ParameterError(name, f"on {device}, as the first one", f"on {parameter.device}")
    return device


def _told(device: torch.device) -> str:
    return "this CPU" if device.type == "cpu" else str(device)


def check_rate(params_per_s: float) -> None:
    """Raise `ArgumentError` unless the rate is above 0."""
    if not params_per_s > 0:
        raise ArgumentError(f"host_params_per_s must be above 0, not {params_per_s!r}")


def _count(source: str, runs: int) -> int:
    return runs if source == "measured" else 1


def _measured_on(device: torch.device) -> Timed:
    """Return a function that runs operations and measures their time on a device."""

    def on_cpu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        start = time.perf_counter_ns()
        result = func(*args, **kwargs)
        return result, (time.perf_counter_ns() - start) / 1e9

    def by_events(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        result = func(*args, **kwargs)
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end) / 1e3

    return on_cpu if device.type == "cpu" else by_events


def modelled_on(platform: Platform, gpu: str) -> Timed:
    """Return a function that runs operations and models their time on a processor.

    Raises
    ------
    ArgumentError : the machine has no `flops.fp32` of the processor.
    """
    processor = platform.processors[gpu]
    if "fp32" not in processor.flops:
        raise ArgumentError(f"{platform.name}: {gpu} must have flops.fp32")
    computation = Computation(processor)

    def timed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        result = func(*args, **kwargs)
        return result, computation.seconds_of(func, args, kwargs, result)

    return timed


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Restore gradients and buffers at the end of a `with` statement, even after an error."""
    gradients = [(each, each.grad) for each in model.parameters()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, name, buffer, contents in buffers:
            if buffer is not None and contents is not None:
                with torch.no_grad():
                    buffer.copy_(contents)
            module._buffers[name] = buffer


def _one(
    model: nn.Module,
    run: Callable[[], object],
    layers: Sequence[ModuleLayer],
    timed: Timed,
    access: Access,
) -> Attribution:
    """Run one pass with cleared gradients and the same random state as every other pass."""
    for each in model.parameters():
        each.grad = None
    found = Attribution(layers, timed, access)
    device = layers[0].parameters[0].device
    numbers = [] if device.type == "cpu" else [device.index]
    with torch.random.fork_rng(numbers, device_type=device.type), found.following():
        run()
    return found


class _Saved:
    """The first pass: warms up, and records what autograd saves.

    Attributes
    ----------
    nbytes : bytes of activations saved by autograd, without parameters.
    """

    def __init__(self, layers: Sequence[ModuleLayer], access: Access) -> None:
        self._layers = layers
        self._access = access
        self._memories: dict[int, torch.UntypedStorage] = {}
        self._own = {
            parameter.untyped_storage()._cdata for layer in layers for parameter in layer.parameters
        }

    def run(self, model: nn.Module, run: Callable[[], object]) -> Mapping[Tensor, int]:
        """Run the pass, and return the bytes of each gradient.

        Raises
        ------
        ProfileError : no gradient was made, or a parameter was changed.
        """
        versions = {name: each._version for name, each in model.named_parameters()}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept):
            self.first = _one(model, run, self._layers, _untimed, self._access)
        for name, parameter in model.named_parameters():
            if parameter._version != versions.get(name):
                raise ProfileError("", "run", "without changes of parameters", f"{name} changed")
        self.nbytes = sum(each.nbytes() for each in self._memories.values())
        self._memories.clear()
        found: dict[Tensor, int] = {
            each: each.grad.numel() * each.grad.element_size()
            for each in model.parameters()
            if each.grad is not None
        }
        if not found:
            raise ProfileError("", "run", "a forward and a backward pass", "no gradient was made")
        return found

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                self._memories[storage._cdata] = storage
        return tensor.detach()


def _untimed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
    return func(*args, **kwargs), 0.0


@dataclass(frozen=True)
class _Times:
    """Medians over passes."""

    passes: Sequence[Attribution]

    def forward(self, label: int) -> float:
        return median(each.forward[label] for each in self.passes)

    def backward(self, label: int) -> float:
        return median(each.backward[label] for each in self.passes)


def layer_profiles(
    layers: Sequence[ModuleLayer],
    passes: Sequence[Attribution],
    gradients: Mapping[Tensor, int],
    access: Access,
    host_params_per_s: float,
    *,
    apart: bool = False,
) -> Iterator[LayerProfile]:
    """Yield the profiles of used layers, in the order of first use.

    Parameters
    ----------
    passes : passes with the same order of layers.
    gradients : bytes of each gradient.
    apart : True: gradients are written to the host after a layer's backward, as the engine does on
        an accelerator; False: during it.
    """
    times, first = _Times(passes), passes[0]
    counted: set[Tensor] = set()
    last = len(first.order) - 1
    for place, number in enumerate(first.order):
        layer = layers[number]
        nbytes = sum(each.numel() * each.element_size() for each in layer.parameters)
        trained = [each for each in layer.parameters if each in gradients and each not in counted]
        counted.update(trained)
        gradient = sum(gradients[each] for each in trained)
        around = [0.0, 0.0]  # computation before the first layer, and after the last
        for label in ([-1] if not place else []) + ([-2 - place] if place == last else []):
            around[0] += times.forward(label)
            around[1] += times.backward(label)
        forward, backward = times.forward(number), times.backward(number)
        ahead = max(forward, first.reads_forward[number] / access.down)
        back = max(backward, first.reads_backward[number] / access.down)
        written = gradient / access.up
        yield LayerProfile(
            name=layer.name,
            parameter_bytes=nbytes,
            gradient_bytes=gradient,
            load_s=nbytes / access.down,
            send_s=written,
            forward_s=around[0] + forward,
            backward_s=around[1] + backward,
            forward_dha_s=around[0] + ahead,
            backward_dha_s=around[1] + back,
            backward_write_s=around[1] + _both(backward, written, apart) if gradient else None,
            backward_dha_write_s=around[1] + _both(back, written, apart) if gradient else None,
            between_forward_s=0.0 if place == last else times.forward(-2 - place),
            between_backward_s=0.0 if place == last else times.backward(-2 - place),
            update_s=sum(each.numel() for each in trained) / host_params_per_s,
        )


def _both(one: float, other: float, apart: bool) -> float:
    """Return the time, in seconds, of two activities, one after the other or overlapped."""
    return one + other if apart else max(one, other)
