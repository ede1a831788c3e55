"""Optimizers from a configuration in DeepSpeed's spelling, with clipping and loss scaling."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from nearstep.deepspeed.config import NVME_PATH, SUB_GROUP, Config, Nvme
from nearstep.deepspeed.errors import ConfigError
from nearstep.device import Device, open_device
from nearstep.smartssd.device import SmartssdDevice
from nearstep.torch import convert
from nearstep.torch.clipping import clip_coefficient
from nearstep.torch.dtensor import is_dtensor, is_sharded
from nearstep.torch.errors import GradientError, HyperparameterError, UnsupportedOptionError
from nearstep.torch.homes.errors import MemoryTooSmallError
from nearstep.torch.homes.opening import given_groups, tensors_of
from nearstep.torch.host_table import HOST
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.torch.scaler import LossScaler
from nearstep.torch.settings import OnDevice, scans
from nearstep.updater.device import KernelDevice

Clipping = Literal["host", "device"]

SHARE_OF_DEVICE = 2
"""Without a stated size, subgroups use 1/SHARE_OF_DEVICE of the device's memory."""


class Training:
    """An optimizer from a configuration, made by `nearstep.optim.from_deepspeed`.

    ::

        for batch in batches:
            training.backward(model(batch))
            training.step()

    Call both once for each micro-batch. `optimizer` and `scaler` have the interface of torch's, and
    their own checkpoints; `optimizer.step()` alone neither clips on the host nor unscales.

    Attributes
    ----------
    scaler : loss scaler of fp16 models, or None.
    config : the configuration; `config.rows` lists the use of each key.
    """

    def __init__(
        self, optimizer: DeviceOptimizer, scaler: LossScaler | None, config: Config
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.config = config
        self._passes = 0
        self._clipped = False

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a micro-batch.

        Parameters
        ----------
        loss : one element: the mean over the micro-batch. The step uses the mean over
            `gradient_accumulation_steps` micro-batches.
        """
        self._clipped = False
        if self.config.gradient_accumulation_steps > 1:
            loss = loss / self.config.gradient_accumulation_steps
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def step(self) -> bool:
        """Count a backward pass; after each `gradient_accumulation_steps` of them clip, update and
        reset the gradients.

        Returns
        -------
        bool : whether parameters were updated: not before the last pass, nor if a gradient of an
            fp16 model is infinite or NaN.

        Raises
        ------
        GradientError : the norm to clip is not finite, and the loss is not scaled.
        LossScaleError : gradients were reset.
        ArgumentError, DeviceError, StorageError : as of `optimizer.step()`. The call can be
            repeated if the optimizer's step can; `zero_grad` abandons the step.
        """
        if self._passes + 1 < self.config.gradient_accumulation_steps:
            self._passes += 1
            return False
        if not self._clipped:
            self._clip()
            self._clipped = True
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        self.zero_grad()
        if self.scaler is None:
            return True
        self.scaler.update()
        return not self.scaler.overflowed

    def zero_grad(self) -> None:
        """Reset the gradients and the count of backward passes."""
        self.optimizer.zero_grad()
        self._passes, self._clipped = 0, False

    def _clip(self) -> None:
        bound = self.config.gradient_clipping
        if bound is None or self.optimizer.settings.max_grad_norm is not None:
            return
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.scaler is None:
            norm = torch.nn.utils.get_total_norm(gradients)
            value = (norm.full_tensor() if is_dtensor(norm) else norm).item()
            if not math.isfinite(value):
                raise GradientError("all parameters together", "of a finite norm", value)
            torch.nn.utils.clip_grads_with_norm_(parameters, bound, norm)
            return
        # The norm of scaled gradients exceeds the range of fp16.
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
        whole = torch.nn.utils.get_total_norm(norms).item() / self.scaler.get_scale()
        if not math.isfinite(whole):
            return  # the step finds the infinity or NaN, and is skipped
        factor = clip_coefficient(whole, bound)
        for each in gradients:
            each.mul_(factor)


def make(
    kind: Callable[..., DeviceOptimizer],
    config: Config,
    params: ParamsT,
    *,
    clipping: str,
    on: Mapping[str, Any],
) -> Training:
    """Make the optimizer of a configuration, and its loss scaler.

    Parameters
    ----------
    clipping : `host` or `device`.

    Raises
    ------
    ConfigError : parameters or the device contradict the configuration.
    HyperparameterError, UnsupportedOptionError : an argument contradicts the configuration.
    """
    for name in on:
        if name not in OnDevice.__annotations__:
            raise TypeError(f"from_deepspeed() got an unexpected keyword argument {name!r}")
    if "device" not in on:
        raise TypeError("from_deepspeed() missing 1 required keyword-only argument: 'device'")
    if clipping not in get_args(Clipping):
        raise HyperparameterError("clipping", f"one of {get_args(Clipping)}", clipping)
    if on.get("max_grad_norm") is not None:
        expected = "left to gradient_clipping of the configuration"
        raise HyperparameterError("max_grad_norm", expected, on["max_grad_norm"])
    groups = given_groups(params)
    parameters = tensors_of(groups)
    _check(config, parameters)
    given = dict(on)
    if config.gradient_clipping is not None and clipping == "device":
        given["max_grad_norm"] = config.gradient_clipping
    elif config.gradient_clipping is not None and config.loss_scaling is not None:
        if any(map(is_sharded, parameters)):
            reason = "no process knows the norm of fp16 parameters that are sharded; use bf16"
            raise UnsupportedOptionError("gradient_clipping", config.gradient_clipping, reason)
    given = {**placed(config, parameters, given), **given}
    try:
        optimizer = kind(groups, **config.hyper, **given)
    except MemoryTooSmallError as error:
        if config.nvme is None or "memory" in on:
            raise
        least = -(-error.expected // (4 * config.nvme.buffers))
        expected = f"at least {least}: a parameter is updated at once"
        raise ConfigError(SUB_GROUP, expected, config.nvme.elements) from None
    scaler = None
    if config.loss_scaling is not None:
        scaler = LossScaler(config.loss_scaling, parameters[0].device.type)
    return Training(optimizer, scaler, config)


def placed(config: Config, parameters: list[Tensor], on: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's arguments for memory and drives.

    Raises
    ------
    ConfigError : the folder or the device contradicts the configuration.
    UnsupportedOptionError : the device does not support loss scaling.
    """
    if config.nvme is None and config.loss_scaling is None:
        return {}
    device = on["device"]
    if device is None or callable(device) or (isinstance(device, str) and device.startswith(HOST)):
        if config.nvme is None:
            return {}
        own = {} if "drives" in on else {"drives": [_drive(config.nvme)]}
        return {"memory": 4 * config.nvme.buffers * config.nvme.elements, **own}
    with open_device(device) if isinstance(device, str) else nullcontext(device) as opened:
        if config.loss_scaling is not None and isinstance(opened, KernelDevice):
            if not scans(opened.config):
                reason = "open the device with scan=yes and gradient_scale=yes"
                raise UnsupportedOptionError("fp16.enabled", True, reason)
        if config.nvme is None:
            return {}
        if isinstance(opened, SmartssdDevice) and opened.drive_places:
            _check_cards(config.nvme, opened)
            return {}
        memory = _memory(config.nvme, parameters, opened)
    found: dict[str, Any] = {"memory": memory}
    if "drives" not in on:
        found["drives"] = [_drive(config.nvme)]
    return found


def _check_cards(nvme: Nvme, device: SmartssdDevice) -> None:
    """Raise `ConfigError` unless the cards have the drives of the configuration."""
    folder = Path(device.drive_places[0]).parent
    if os.path.realpath(nvme.path) != os.path.realpath(folder):
        raise ConfigError(NVME_PATH, f"{folder}, as the device's drive= says", str(nvme.path))
    if nvme.stated and nvme.elements != device.card.subgroup:
        expected = f"left out, or {device.card.subgroup}, the device's subgroup_elements="
        raise ConfigError(SUB_GROUP, expected, nvme.elements)


def _memory(nvme: Nvme, parameters: list[Tensor], device: Device) -> int:
    """Return the bytes of device memory for the buffers of a subgroup."""
    element, capacity = 4 * nvme.buffers, device.capacity_bytes
    if not nvme.stated:
        return min(element * nvme.elements, capacity // SHARE_OF_DEVICE)
    every = sum(convert.size(p) for p in parameters if not is_lazy(p))
    if element * min(nvme.elements, every) > capacity:
        expected = f"at most {capacity // element}: the device has {capacity} bytes"
        raise ConfigError(SUB_GROUP, expected, nvme.elements)
    return min(element * nvme.elements, capacity)


def _drive(nvme: Nvme) -> str:
    """Return the path of this process's drive."""
    folder = nvme.path
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(NVME_PATH, "a folder that can be written", str(folder))
    return str(folder / f"nearstep-rank{rank()[0]}.drive")


def rank() -> tuple[int, int]:
    """Return the rank of this process, and the world size."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _check(config: Config, parameters: list[Tensor]) -> None:
    expected = convert.DTYPES[config.format]
    for index, each in enumerate(parameters):
        if each.dtype is not expected:
            key = {"fp16": "fp16.enabled", "bf16": "bf16.enabled"}.get(
                config.format, "fp16.enabled or bf16.enabled"
            )
            wanted = "false" if config.format != "fp32" else "true"
            raise ConfigError(
                key, f"{wanted}, or parameter {index} {expected}", f"parameter of {each.dtype}"
            )
