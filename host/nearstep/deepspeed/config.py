"""A configuration in DeepSpeed's spelling, checked and converted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nearstep.deepspeed.errors import ConfigError
from nearstep.deepspeed.examine import Examined, KeyFate, read
from nearstep.scalars import is_whole

Format = Literal["fp32", "fp16", "bf16"]

OFFLOAD = "zero_optimization.offload_optimizer"
SUB_GROUP = "zero_optimization.sub_group_size"
NVME_PATH = f"{OFFLOAD}.nvme_path"

ELEMENTS = 10**9
"""Default elements of a subgroup; DeepSpeed's, as all defaults that follow."""

BUFFERS = 4
"""Buffers of a subgroup: parameters, gradients and two moments."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Scaling of the loss of an fp16 model.

    Attributes
    ----------
    scale : initial scale.
    dynamic : whether the scale changes.
    window : steps without overflow until the scale is doubled.
    hysteresis : overflows until the scale is halved.
    consecutive : whether these overflows must be in consecutive steps; else all since the last
        change count.
    least : smallest scale.
    """

    scale: float
    dynamic: bool
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    least: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Nvme:
    """State on drives.

    Attributes
    ----------
    path : folder of the drives' files.
    buffers : in memory, of `elements` fp32 numbers each.
    elements : of a subgroup.
    stated : whether the configuration gives `elements`.
    """

    path: Path
    buffers: int
    elements: int
    stated: bool


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a configuration.

    Attributes
    ----------
    optimizer : name of a class of `nearstep.optim`.
    hyper : its hyper-parameters; others have the defaults of that class.
    format : of the parameters.
    gradient_clipping : bound on the norm of all gradients together, or None.
    loss_scaling : of fp16, or None.
    nvme : None keeps state in the memory of the device.
    train_batch_size, train_micro_batch_size_per_gpu : samples of a step of all processes, and of
        one backward pass; None if not given.
    gradient_accumulation_steps : backward passes of a step.
    world_size : processes.
    rows : the fate of each key.
    """

    optimizer: str
    hyper: Mapping[str, Any]
    format: Format
    gradient_clipping: float | None
    loss_scaling: LossScaling | None
    nvme: Nvme | None
    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int
    world_size: int
    rows: tuple[KeyFate, ...]


def load(
    source: str | Path | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    ignore: Collection[str] = (),
    world_size: int = 1,
) -> Config:
    """Read a configuration in DeepSpeed's spelling.

    Parameters
    ----------
    source : a JSON file, or the table.
    auto : values of keys that are `"auto"` there, by path, such as `optimizer.params.lr`.
    ignore : paths of keys that are left out, such as `scheduler`, whatever their values.
    world_size : processes that train.

    Raises
    ------
    ConfigError : the first problem, by its path: RepeatedKeyError, UnknownKeyError,
        UnsupportedKeyError and AutoValueError are some.
    """
    found = check(source, auto=auto, ignore=ignore, world_size=world_size)
    if found.problems:
        raise found.problems[0]
    return _config(found, world_size)


def check(
    source: str | Path | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    ignore: Collection[str] = (),
    world_size: int = 1,
) -> Examined:
    """Find all problems of a configuration, and the fate of each key; arguments are those of
    `load`.

    Raises
    ------
    ConfigError : `source` is no table in JSON.
    """
    if isinstance(ignore, str):
        raise ConfigError("ignore", "several paths", ignore)
    if not is_whole(world_size) or world_size < 1:
        raise ConfigError("world_size", "a whole number of at least 1", world_size)
    found = Examined(auto or {}, ignore)
    found.examine(read(source))
    for error in _conflicts(found, world_size):
        found.refuse(error, error.actual)
    return found


def _conflicts(found: Examined, world_size: int) -> Iterator[ConfigError]:
    """Yield conflicts between keys, without those that were refused already."""
    values = found.values
    refused = {error.key for error in found.problems}
    if "optimizer.type" not in values and refused.isdisjoint(("optimizer", "optimizer.type")):
        yield ConfigError("optimizer.type", "given", None)
    if values.get("fp16.enabled") and values.get("bf16.enabled"):
        yield ConfigError("bf16.enabled", "false where fp16.enabled is true", True)
    kept = _format(values)
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        if values.get(key) not in (None, kept):
            yield ConfigError(key, f"{kept}, the format of the parameters", values[key])
    yield from _batches(values, world_size)
    device, stage = values.get(f"{OFFLOAD}.device", "none"), "zero_optimization.stage"
    least = {"none": 0, "cpu": 1, "nvme": 3}[device]
    if values.get(stage, 0) < least and stage not in refused:
        needed = "3" if least == 3 else "1, 2 or 3"
        yield ConfigError(stage, f"{needed} with {OFFLOAD}.device {device}", values.get(stage))
    if device == "nvme":
        if values.get(NVME_PATH) is None and NVME_PATH not in refused:
            yield ConfigError(NVME_PATH, f"given with {OFFLOAD}.device nvme", None)
        if values.get(SUB_GROUP) == 0:
            yield ConfigError(SUB_GROUP, "at least 1 with nvme", 0)
    if values.get("fp16.enabled") and values.get("fp16.loss_scale", 0.0) == 0.0:
        power = "fp16.initial_scale_power"
        first, bound = values.get(power, 16), values.get("fp16.min_loss_scale", 1.0)
        if first > 127:
            yield ConfigError(power, "at most 127: the scale is binary32", first)
        elif not 0.0 < bound <= math.ldexp(1.0, first):
            yield ConfigError("fp16.min_loss_scale", f"above 0 and at most 2 to {first}", bound)


def _batches(values: Mapping[str, Any], world_size: int) -> Iterator[ConfigError]:
    whole = values.get("train_batch_size")
    micro = values.get("train_micro_batch_size_per_gpu")
    steps = values.get("gradient_accumulation_steps")
    if whole is None:
        return
    parts = (micro or 1) * (steps or 1) * world_size
    if whole % parts or (micro and steps and whole != parts):
        product = " x ".join(
            text
            for text, given in (
                (f"train_micro_batch_size_per_gpu {micro}", micro),
                (f"gradient_accumulation_steps {steps}", steps),
                (f"{world_size} processes", True),
            )
            if given
        )
        equal = "" if micro and steps else "a multiple of "
        yield ConfigError("train_batch_size", f"{equal}{product}", whole)


def _format(values: Mapping[str, Any]) -> Format:
    if values.get("fp16.enabled"):
        return "fp16"
    return "bf16" if values.get("bf16.enabled") else "fp32"


def _config(found: Examined, world_size: int) -> Config:
    values = found.values
    whole = values.get("train_batch_size")
    micro = values.get("train_micro_batch_size_per_gpu")
    steps = values.get("gradient_accumulation_steps")
    if steps is None:
        steps = 1 if whole is None or micro is None else whole // (micro * world_size)
    if whole is not None:
        micro = whole // (steps * world_size)
    elif micro is not None:
        whole = micro * steps * world_size
    optimizer, hyper = _optimizer(values)
    return Config(
        optimizer=optimizer,
        hyper=hyper,
        format=_format(values),
        gradient_clipping=values.get("gradient_clipping") or None,
        loss_scaling=_loss_scaling(values),
        nvme=_nvme(values),
        train_batch_size=whole,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
        world_size=world_size,
        rows=tuple(found.rows),
    )


def _optimizer(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    prefix = "optimizer.params."
    hyper = {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}
    kind = values["optimizer.type"]
    for name in ("bias_correction", "fp32_optimizer_states"):
        hyper.pop(name, None)
    decouples, torchs = hyper.pop("adam_w_mode", True), hyper.pop("torch_adam", False)
    if kind == "Adam" and decouples:
        kind = "AdamW"
    if kind == "AdamW" and not torchs:
        hyper.setdefault("weight_decay", 0.0)
    return kind, hyper


def _loss_scaling(values: Mapping[str, Any]) -> LossScaling | None:
    if not values.get("fp16.enabled"):
        return None
    scale = values.get("fp16.loss_scale", 0.0)
    if scale:
        return LossScaling(scale=scale, dynamic=False)
    return LossScaling(
        scale=math.ldexp(1.0, values.get("fp16.initial_scale_power", 16)),
        dynamic=True,
        window=values.get("fp16.loss_scale_window", 1000),
        hysteresis=values.get("fp16.hysteresis", 2),
        consecutive=values.get("fp16.consecutive_hysteresis", False),
        least=values.get("fp16.min_loss_scale", 1.0),
    )


def _nvme(values: Mapping[str, Any]) -> Nvme | None:
    if values.get(f"{OFFLOAD}.device") != "nvme":
        return None
    return Nvme(
        path=Path(values[NVME_PATH]),
        buffers=values.get(f"{OFFLOAD}.buffer_count", BUFFERS),
        elements=values.get(SUB_GROUP, ELEMENTS),
        stated=SUB_GROUP in values,
    )
