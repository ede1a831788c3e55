"""Adam, AdamW, SGD and Adagrad as `torch.optim` has them, with every step on a device.

::

    import nearstep
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=3e-4, device="sim:axdimm")

Parameters (as fp32 masters), gradients and state live in device memory. A step sends the
gradients down, runs the kernel once for each stretch of neighbouring parameters of equal group and
step count, and fetches the parameters.

Parameters and state equal those of torch's optimizer with `fused=True` on a CPU bit for bit, if

- the parameters are fp32: of 16-bit parameters torch keeps 16-bit state, nearstep keeps fp32 state
  and an fp32 master, unless the rule keeps bf16 as torch does (`examples/adam_bf16.py`);
- the size of each is divisible by 16: torch computes what remains with scalar code that rounds
  otherwise in Adam, AdamW and SGD with momentum; no difference was seen in Adagrad and in SGD
  without momentum (torch 2.13);
- torch's kernels are those for AVX2 or AVX512 (`torch.backends.cpu.get_cpu_capability()`).

A kernel has the rule of Adam and AdamW alone, unless the device is told otherwise:
`golden:axdimm?rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad`; `amsgrad` needs
`adam_amsgrad`. Only the arrays that a group needs are allocated, e.g. none for the momentum of
SGD without momentum. With `maximize` a kernel that scales (`gradient_scale=yes`) negates the
gradients; for others the host does, as they are sent.

Options that torch has and the device has not are refused by name: `foreach`, `capturable` and
`differentiable`. `fused` is accepted and changes nothing; in
`state_dict()` it is True, because torch's fused step is the one that has the same bits.

Behaviour that differs from torch's, or that torch leaves open:

- `optimizer.state[p]` fetches moments (momentum buffers, sums) when they are read; what was read
  is a copy that is good until the next step. A change made to it before that step is sent to the
  device.
- Moments are fp32 whatever the parameter's format, unless the rule or the device names another
  one. In 8 bits (`state_format=dynamic8`) a moment is codes, a tensor of uint8, and scales beside
  it, under `exp_avg_scale` and the like. Of 16-bit parameters, `state_dict()` has `master_param`,
  the fp32 master, besides torch's keys; torch ignores it.
- A parameter that was changed on the host between steps, by whatever means, becomes the master.
- `golden:axdimm` updates large fp32 parameters where the host has them, because the memory of a
  DIMM is the host's: they are not copied, and change with their run. `in_place=no` in the
  device's name has them copied, and the host's change only after the last run of a step.
- With a kernel that scans and scales (`scan=yes&gradient_scale=yes`), and gradients that are not
  compressed, `torch.amp.GradScaler` leaves the division by its scale to the step, as with torch's
  fused optimizers. It looks for infinities on the host first, and `p.grad` is divided after the
  step, in place, as torch's fused steps do; not if the step was skipped. `GradScaler` here
  leaves the search to the device, too, and `p.grad` as it is. Otherwise the scaler unscales the
  gradients on the host, as for every optimizer that is not fused.
- Options of a group are looked at when it is added or loaded, where torch looks at those of the
  constructor alone, and in steps in which a parameter of it has a gradient.
- Under `torch.compile` a step is a graph break; with `fullgraph=True` it is refused.
- Of a DTensor (`fully_shard`, tensor parallelism) the device has the local tensor. Its state is
  spread over the processes as it is, and gradients are brought into that form first, by
  communication if need be, as in torch. See `docs/training.md`.
- `compression` sends the largest elements of each gradient alone, `max_grad_norm` clips on the
  device: see `docs/training.md`. Both hold for all groups, and are no part of `state_dict()`;
  what compression has not sent so far is: `residual`, besides torch's keys.
- `from_deepspeed` makes an optimizer, with clipping, loss scaling and accumulation, of a
  configuration in DeepSpeed's spelling.
- `copy.deepcopy` shares the device, with memory of its own; unpickling opens a device of the same
  name.

Ref: AXDIMM, sections 3.3 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from nearstep.deepspeed.config import load
from nearstep.device import Device
from nearstep.torch import configured, options
from nearstep.torch.configured import Training
from nearstep.torch.optimizer import DeviceOptimizer, NamedOptimizer
from nearstep.torch.scaler import GradScaler
from nearstep.torch.settings import Drives, OnDevice, Resume
from nearstep.torch.traffic import Traffic

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "GradScaler",
    "Traffic",
    "Training",
    "from_deepspeed",
    "from_rule",
]


class Adam(DeviceOptimizer, optimizer="adam"):
    """`torch.optim.Adam` on a device; `nearstep.optim` says where it differs.

    The kernel needs the rule `adam`, for groups with `amsgrad` `adam_amsgrad`. As in torch, a
    parameter has `max_exp_avg_sq` from its first step on if that is with `amsgrad`, keeps it
    untouched in steps without, and can make none with `amsgrad` if it has none: torch raises
    KeyError, this class StateError. `optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)`
    switches it on later.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay : as in torch.
        Parameters are dense fp32, fp16 or bf16 tensors on the CPU.
    device : name of a device (see `nearstep.open`), which the optimizer opens, and closes when the
        last optimizer that uses it is gone; or a device that the caller opened, and closes. None,
        or `host:`: this machine's processor updates the tensors in place; what follows is for
        devices alone, but for `state_dtype` and `rounding`. A function: a home of one's own, of the
        layout of a parameter's state (`examples/shm_home.py`).
    max_cycles : bound on each run of the kernel, in device cycles, or None.
    compression : share of the elements of each gradient that is sent, those of largest magnitude
        (see `nearstep.torch.topk`): above 0, at most 1. None sends all.
    error_feedback : with compression: what was not sent is added to the next gradient.
    compression_form, compression_format : `fused` or `scatter`: how the kernel takes pairs; or
        `FILE.py:NAME`, a decompressor that the device has. `fp32`, `fp16` or `bf16`: what the
        elements are rounded to.
    max_grad_norm : unless None, gradients are multiplied by min(1, max_grad_norm / (norm + 1e-6)),
        where the norm is that of all gradients together, as they were sent.
    drives : files that state lies on as far as `memory` does not hold it, which are made, or opened
        for `resume`, and belong to this optimizer until it is gone; or a
        `nearstep.storage.store.Store`, which the caller opened, and closes. See `docs/storage.md`.
    memory : with drives: what parameters, gradients and state may take of the device's memory:
        bytes, text such as `64MiB`, or a share of all that, such as `25%`.
    eviction : what gives way in memory: `updated_first`, what the step has updated already, or
        `belady`, what is used again last.
    resume : go on from the last step that the drives have: parameters, state and options of groups
        are what they were after it. `"common"`: from the last one that the drives of all ranks
        have; a number: from this generation. Paths of other drives, of any number and of any
        device, or their folder: copy that step from these first, which stay as they are.
    transfer_handler : on cards with drives: `overlapped`, a subgroup comes and another one goes
        while one is updated; or `naive`, one thing after the other (Smart-Infinity, figure 5).
    save_residual : with compression, error feedback and drives: each step writes what was not sent,
        4 bytes a parameter, with the state, so that a resumed run has the bits of one that was not
        interrupted. False leaves that out, and such a step can be resumed with False alone, or
        without error feedback: nothing is left over then.
    state_dtype : what the device keeps moments in: `torch.float32`, `torch.float16`,
        `torch.bfloat16`, or `torch.uint8` for codes with scales, which the kernel must have
        (`state_format=bf16`, `dynamic8`). None: what it has; without a device the format of the
        parameter.
    rounding : of states in bfloat16: `nearest`, to even; or `stochastic`, up with the probability
        of the fraction that is dropped, where the kernel can do that (`stochastic_rounding=yes`).
    rounding_seed : of the random bits, from 0, below 2**32. They follow from it, the step count,
        and the place of an element among those of all parameters: runs of equal seeds are equal,
        on every device.

    Raises
    ------
    UnsupportedOptionError : an option of torch, or one of the above that needs another kernel.
    HyperparameterError, ParameterError
    UrlError, OptionError : the device cannot be opened.
    ArgumentError : its kernel does not have the rule.
    OutOfDeviceMemoryError : the parameters that require a gradient do not fit.
    MemoryTooSmallError : `memory` is less than the largest parameter needs.
    RanksDifferError : the last steps on the drives of a job's ranks differ.
    ResumeError, StorageError : the drives cannot be had, or are not as they have to be.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **on: Unpack[OnDevice],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": options.given_betas(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, **on)


class AdamW(Adam, optimizer="adamw"):
    """`torch.optim.AdamW` on a device: `Adam` with decoupled weight decay."""

    _fixed = MappingProxyType({"decoupled_weight_decay": True})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **on: Unpack[OnDevice],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            **on,
        )


class SGD(DeviceOptimizer, optimizer="sgd"):
    """`torch.optim.SGD` on a device; `nearstep.optim` says where all of them differ.

    The kernel needs the rule `sgd` for groups without momentum, and `sgd_momentum` for groups
    with it. Momentum may be switched on and off between steps; memory for the buffers is allocated
    when a group first needs it.

    As in torch, there is no state without momentum, and the first step with momentum makes the
    gradient the buffer. Of a group in which some parameters have a buffer and others have a first
    gradient, torch's fused step raises TypeError; here each starts with its own first gradient, as
    in torch's steps that are not fused. A negative dampening, which torch takes, is refused.

    Parameters
    ----------
    params, lr, momentum, dampening, weight_decay, nesterov, maximize : as in torch. Parameters are
        dense fp32, fp16 or bf16 tensors on the CPU.
    device, max_cycles, compression, error_feedback, compression_form, compression_format,
        max_grad_norm, drives, memory, eviction, resume,
        transfer_handler, save_residual, state_dtype, rounding, rounding_seed : as in `Adam`.

    Raises
    ------
    UnsupportedOptionError, HyperparameterError, ParameterError
    UrlError, OptionError, ArgumentError, OutOfDeviceMemoryError : as in `Adam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **on: Unpack[OnDevice],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, **on)


class Adagrad(DeviceOptimizer, optimizer="adagrad"):
    """`torch.optim.Adagrad` on a device; `nearstep.optim` says where all of them differ.

    The kernel needs the rule `adagrad`. As in torch, parameters have state from the beginning: a
    `sum` that starts at `initial_accumulator_value`, the one that was given for all groups.
    Unlike in torch, those that require no gradient, or are lazy, have none before their first step.

    Parameters
    ----------
    params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize : as in torch.
        Parameters are dense fp32, fp16 or bf16 tensors on the CPU.
    device, max_cycles, compression, error_feedback, compression_form, compression_format,
        max_grad_norm, drives, memory, eviction, resume,
        transfer_handler, save_residual, state_dtype, rounding, rounding_seed : as in `Adam`.

    Raises
    ------
    UnsupportedOptionError, HyperparameterError, ParameterError
    UrlError, OptionError, ArgumentError, OutOfDeviceMemoryError : as in `Adam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **on: Unpack[OnDevice],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, **on)


def from_rule(
    name: str,
    params: ParamsT,
    *,
    maximize: bool = False,
    device: str | Device | Callable[..., Any] | None = None,
    max_cycles: int | None = None,
    compression: float | None = None,
    error_feedback: bool = True,
    compression_form: str = "fused",
    compression_format: str = "fp32",
    max_grad_norm: float | None = None,
    drives: Drives | None = None,
    memory: int | str | None = None,
    eviction: str = "updated_first",
    resume: Resume = False,
    transfer_handler: str = "overlapped",
    save_residual: bool = True,
    state_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
    rounding_seed: int = 0,
    **hyper: Any,
) -> NamedOptimizer:
    """An optimizer of torch from the data of one, such as that of a file of yours::

        nearstep.optim.from_rule("examples/lion.py:LION", params, lr=1e-4, device=device)

    Its kernel needs the rules: `rules=examples/lion.py:LION` in the name of the device. State,
    checkpoints, formats, compression and clipping are as in `nearstep.optim`. Pickle and
    `copy.deepcopy` read the file again.

    Parameters
    ----------
    name : `FILE.py:NAME`, an `nearstep_spec.rule.optimizer.Optimizer` or a rule there; or the name
        of an optimizer of nearstep.
    params, maximize : as in torch.
    device, max_cycles, compression, error_feedback, compression_form, compression_format,
        max_grad_norm, drives, memory, eviction, resume,
        transfer_handler, save_residual, state_dtype, rounding, rounding_seed : as in `Adam`.
    **hyper : hyper-parameters; those not given have the optimizer's defaults. Groups may have their
        own.

    Raises
    ------
    UnknownRuleError, RuleFileError : there is no such optimizer; the message names the file and the
        line.
    UnsupportedOptionError, HyperparameterError, ParameterError
    UrlError, OptionError, ArgumentError, OutOfDeviceMemoryError : as in `Adam`.
    """
    return NamedOptimizer(
        name,
        params,
        hyper,
        maximize=maximize,
        device=device,
        max_cycles=max_cycles,
        compression=compression,
        error_feedback=error_feedback,
        compression_form=compression_form,
        compression_format=compression_format,
        max_grad_norm=max_grad_norm,
        drives=drives,
        memory=memory,
        eviction=eviction,
        resume=resume,
        transfer_handler=transfer_handler,
        save_residual=save_residual,
        state_dtype=state_dtype,
        rounding=rounding,
        rounding_seed=rounding_seed,
    )


def from_deepspeed(
    config: str | Path | Mapping[str, Any],
    params: ParamsT,
    *,
    auto: Mapping[str, Any] | None = None,
    ignore: Collection[str] = (),
    world_size: int | None = None,
    clipping: configured.Clipping = "host",
    **on: Unpack[OnDevice],
) -> Training:
    """An optimizer, clipping and loss scaling from a configuration in DeepSpeed's spelling::

        training = nearstep.optim.from_deepspeed("ds_config.json", params, device=device)

    `docs/training.md` has the keys. Each is used, ignored for a reason, or refused, before anything
    is opened or made; `training.config.rows` says which.

    Parameters
    ----------
    config : a JSON file, or the table.
    params : as in torch, of the format that the configuration has: fp32, fp16 or bf16.
    auto : values of keys that are `"auto"` there, by path: `{"optimizer.params.lr": 1e-4}`.
    ignore : paths of keys that are left out whatever they say, such as `scheduler`.
    world_size : processes that train; those of `torch.distributed` if not given.
    clipping : `host` clips as `torch.nn.utils.clip_grad_norm_` does, on every device; `device` is
        `max_grad_norm` of the optimizer.
    **on : arguments of the optimizer besides torch's, as in `Adam`. `memory` and `drives` take the
        place of what `sub_group_size` and `nvme_path` say; `resume` goes on from the drives.

    Raises
    ------
    ConfigError : the first key that cannot be followed; its path, what was expected, and what is
        there.
    UnsupportedOptionError, HyperparameterError, ParameterError
    UrlError, OptionError, ArgumentError, OutOfDeviceMemoryError, ResumeError, StorageError : as in
        `Adam`.
    """
    processes = configured.rank()[1] if world_size is None else world_size
    asked = load(config, auto=auto, ignore=ignore, world_size=processes)
    kinds = {"Adam": Adam, "AdamW": AdamW, "SGD": SGD, "Adagrad": Adagrad}
    return configured.make(kinds[asked.optimizer], asked, params, clipping=clipping, on=on)
