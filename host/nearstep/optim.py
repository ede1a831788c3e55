"""Adam, AdamW, SGD, Adagrad and Muon as `torch.optim` has them, with every step on a device.

::

    import nearstep
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=3e-4, device="sim:axdimm")

Parameters (as fp32 masters), gradients and state are kept in device memory. A step sends the
gradients, runs the kernel once for each range of neighbouring parameters with equal group and step
count, and fetches the parameters. Without a device the processor updates the model's tensors in
place, in their own format, of any size (`docs/training.md`).

Parameters and state are bit-identical to those of torch's optimizer with `fused=True` on a CPU, if

- the parameters are fp32: for 16-bit parameters torch keeps 16-bit state, nearstep fp32 state and
  an fp32 master, unless the rule keeps bf16 as torch does (`examples/adam_bf16.py`);
- the size of each is divisible by 16: torch computes the remainder with scalar code that rounds
  differently in Adam, AdamW and SGD with momentum; no difference was seen in Adagrad and in SGD
  without momentum (torch 2.13);
- torch's kernels are those for AVX2 or AVX512 (`torch.backends.cpu.get_cpu_capability()`).

By default a kernel has only the rule of Adam and AdamW. Other rules are named with the device:
`golden:axdimm?rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad`; `amsgrad` needs
`adam_amsgrad`. Only the arrays that a group needs are allocated, e.g. no momentum array for SGD
without momentum. With `maximize` a kernel that scales (`gradient_scale=yes`) negates the
gradients; for others the host does, as they are sent.

`capturable` and `differentiable` are refused by name. `foreach` and `fused` select an
implementation in torch: both are accepted (not both as True, as in torch) and change nothing here.
In `state_dict()` `fused` is True, because torch's fused step has the same bits.

Behaviour that differs from torch's, or that torch leaves open:

- `optimizer.state[p]` fetches moments (momentum buffers, sums) when they are read, as copies that
  are valid until the next step. Changes to a copy before that step are sent to the device.
- Moments are fp32 whatever the parameter's format, unless the rule or the device names another
  one. In 8 bits (`state_format=dynamic8`) a moment is codes, a tensor of uint8, and scales, under
  `exp_avg_scale` and the like. For 16-bit parameters `state_dict()` has, besides torch's keys,
  `master_param`, the fp32 master, which torch ignores.
- A parameter that was changed on the host between steps, by any means, becomes the master.
- `golden:axdimm` updates large fp32 parameters in host memory without a copy, because the memory of
  a DIMM is the host's: a parameter changes with its run. With `in_place=no` in the device's name
  parameters are copied, and the host's change only after the last run of a step.
- With a kernel that scans and scales (`scan=yes&gradient_scale=yes`), and without compression,
  `torch.amp.GradScaler` leaves the division by its scale to the step, as with torch's fused
  optimizers. torch's scaler searches for infinities on the host first, and `p.grad` is divided in
  place after the step, as in torch's fused steps, unless the step was skipped.
  `nearstep.optim.GradScaler` leaves the search to the device, too, and does not change `p.grad`.
  With other kernels the scaler unscales the gradients on the host, as for every optimizer that is
  not fused.
- Options of a group are checked when the group is added or loaded, and in steps in which one of its
  parameters has a gradient; torch checks only those of the constructor.
- Under `torch.compile` a step is a graph break; with `fullgraph=True` it is refused.
- For a DTensor (`fully_shard`, tensor parallelism) the device has the local tensor. State has the
  parameter's placements, and gradients are redistributed to these first, as in torch. See
  `docs/training.md`.
- `compression` sends only the largest elements of each gradient; `max_grad_norm` clips on the
  device: see `docs/training.md`. Both hold for all groups, and are not in `state_dict()`; the
  residual of compression is: `residual`, besides torch's keys.
- `updates="in-backward"` updates a parameter, and frees its gradient, as soon as backward has
  computed the gradient. Uses that would give other bits raise `EarlyUpdateError`: see
  `docs/training.md`.
- `from_deepspeed` makes an optimizer, with clipping, loss scaling and accumulation, from a
  configuration in DeepSpeed's spelling.
- `copy.deepcopy` shares the device and allocates its own memory; unpickling opens a device of the
  same name.

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
    "Muon",
    "Traffic",
    "Training",
    "from_deepspeed",
    "from_rule",
]


class Adam(DeviceOptimizer, optimizer="adam"):
    """`torch.optim.Adam` on a device; `nearstep.optim` lists the differences.

    The kernel needs the rule `adam`, or `adam_amsgrad` for groups with `amsgrad`. As in torch, a
    parameter has `max_exp_avg_sq` if its first step is with `amsgrad`; steps without `amsgrad` do
    not change `max_exp_avg_sq`. A step with `amsgrad` of a parameter that lacks it raises KeyError
    in torch, StateError here; to enable `amsgrad` later, assign
    `optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)`.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay : as in torch.
        Parameters are dense fp32, fp16 or bf16 tensors on the CPU or an accelerator.
    device : name of a device (see `nearstep.open`), which is opened here, and closed with the last
        optimizer that uses it; or a device that the caller opened, and closes. None, or `host:`:
        this machine's processor updates the tensors in place; `max_cycles`, `compression`,
        `max_grad_norm` and `transfer_handler="naive"` are for devices only. A function: makes a
        custom home from the layout of a parameter's state (`examples/shm_home.py`).
    max_cycles : bound on each run of the kernel, in device cycles, or None.
    compression : fraction of the elements of each gradient to send, those of largest magnitude
        (see `nearstep.torch.topk`): above 0, at most 1. None sends all.
    error_feedback : with compression: add the elements that were not sent to the next gradient.
    compression_form, compression_format : form in which the kernel accepts pairs, `fused` or
        `scatter`, or `FILE.py:NAME`, a decompressor of the device; and format to which the elements
        are rounded, `fp32`, `fp16` or `bf16`.
    max_grad_norm : unless None, gradients are multiplied by min(1, max_grad_norm / (norm + 1e-6)),
        where `norm` is the norm of all gradients together, as sent.
    drives : paths of files for state that does not fit in `memory`, or of folders, for a file
        `optimizer.nearstep` in each. The files are created, or opened for `resume`, and locked
        until the optimizer is freed. Or a `nearstep.storage.store.Store`,
        which the caller opened, and closes. See `docs/storage.md`.
    memory : with drives: device memory for parameters, gradients and state: bytes, text such as
        `64MiB`, or a share of their size, such as `25%`.
    eviction : evict first parameters that the step has updated already (`updated_first`), or those
        used again last (`belady`).
    resume : resume parameters, state and options of groups from the last step on the drives.
        `"if-any"`: if there is one. `"common"`: from the last step that the drives of all ranks
        have, as always with sharded parameters; a number: from this
        generation; a text that is no path: back to the generation that is kept under this name, in
        place. Paths of other drives, of any number and of any device, or their folder: copy
        the step from these first, without changing them.
    transfer_handler : on cards with drives: `overlapped`: one subgroup is read and another written
        while a third is updated; or `naive`: sequential (Smart-Infinity, figure 5).
    save_residual : with compression, error feedback and drives: each step writes the residual,
        4 bytes a parameter, with the state, so that a resumed run has the bits of an uninterrupted
        one. Steps made with False can only be resumed with False, or without error feedback.
    state_dtype : dtype of moments on the device: `torch.float32`, `torch.float16`,
        `torch.bfloat16`, or `torch.uint8` for codes with scales; the kernel must have the format
        (`state_format=bf16`, `dynamic8`). None: the kernel's; without a device the dtype of the
        parameter.
    rounding : of states in bfloat16: `nearest`, to even; or `stochastic`, up with the probability
        of the dropped fraction, if the kernel supports it (`stochastic_rounding=yes`).
    updates : `at-step`, or `in-backward`: a parameter is updated, and its gradient freed, as soon
        as backward has computed the gradient; see `docs/training.md`.
    rounding_seed : seed of the random bits, from 0, below 2**32. They depend only on the seed, the
        step count, and the index of an element among all parameters, so runs with equal seeds are
        equal on every device.

    Raises
    ------
    UnsupportedOptionError : an option of torch is not supported, or an argument needs another
        kernel.
    ConflictingOptionsError : `fused` and `foreach` are both True.
    HyperparameterError, ParameterError
    UrlError, OptionError : the device cannot be opened.
    ArgumentError : the kernel does not have the rule.
    OutOfDeviceMemoryError : the parameters that require a gradient do not fit.
    MemoryTooSmallError : `memory` is less than the largest parameter needs.
    RanksDifferError : the last steps on the drives of a job's ranks differ.
    RanksDisagreeError, SharedDriveError, RanksFailedError : ranks with sharded parameters make
        different optimizers, share a drive, or cannot begin together.
    ResumeError, StorageError : the drives cannot be opened, or have no suitable step.
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
    """`torch.optim.SGD` on a device; `nearstep.optim` lists the differences.

    The kernel needs the rule `sgd` for groups without momentum, and `sgd_momentum` for groups
    with momentum. Momentum may be enabled and disabled between steps; the buffers are allocated
    when a group first needs them.

    As in torch, there is no state without momentum, and the first step with momentum copies the
    gradient to the buffer. If only some parameters of a group have a buffer, torch's fused step
    raises TypeError; here each starts with its own first gradient, as in torch's steps that are not
    fused. A negative dampening, which torch accepts, is refused.

    Arguments besides torch's are those of `Adam`.
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
    """`torch.optim.Adagrad` on a device; `nearstep.optim` lists the differences.

    The kernel needs the rule `adagrad`. As in torch, parameters have state from the constructor on:
    a `sum` of `initial_accumulator_value`, which is the same for all groups. Unlike in torch,
    parameters that require no gradient, or are lazy, have no state before their first step.

    Arguments besides torch's are those of `Adam`.
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


class Muon(DeviceOptimizer, optimizer="muon"):
    """`torch.optim.Muon` on a device: parameters are matrices; the kernel needs the rule `muon`.

    A step has two runs. The first one updates momentum and decays parameters on the device; the
    host fetches momentum and makes the update orthogonal with torch; the second run adds the
    update. Bits are those of torch's Muon with as many threads, in fp32 and fp16 for parameters of
    every size; `docs/training.md` has the conditions in bf16. A parameter may be in its group once.

    `compression` and `max_grad_norm` are refused, since the host computes with whole gradients:
    call `torch.nn.utils.clip_grad_norm_`. Momentum in 8 bits is refused, too.
    `torch.amp.GradScaler` unscales gradients on the host. Arguments besides torch's are those of
    `Adam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **on: Unpack[OnDevice],
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
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
    updates: str = "at-step",
    **hyper: Any,
) -> NamedOptimizer:
    """Make an optimizer of torch from a rule, such as one in a file of yours::

        nearstep.optim.from_rule("examples/lion.py:LION", params, lr=1e-4, device=device)

    The kernel needs the rule: `rules=examples/lion.py:LION` in the name of the device. State,
    checkpoints, formats, compression and clipping are as in `nearstep.optim`. Pickle and
    `copy.deepcopy` read the file again.

    Parameters
    ----------
    name : `FILE.py:NAME`, an `nearstep_spec.rule.optimizer.Optimizer` or a rule there; or the name
        of an optimizer of nearstep.
    params, maximize : as in torch.
    device, max_cycles, compression, error_feedback, compression_form, compression_format,
        max_grad_norm, drives, memory, eviction, resume, transfer_handler, save_residual,
        state_dtype, rounding, rounding_seed, updates : as in `Adam`.
    **hyper : hyper-parameters; others have the rule's defaults. Groups may have their own values.

    Raises
    ------
    UnknownRuleError, RuleFileError : there is no such optimizer; the message names the file and the
        line.
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
        updates=updates,
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
    """Make an optimizer, clipping and loss scaling from a configuration in DeepSpeed's spelling::

        training = nearstep.optim.from_deepspeed("ds_config.json", params, device=device)

    `docs/training.md` lists the keys. Each is used, ignored with a reason, or refused before
    anything is opened or made; `training.config.rows` has the outcome for each key.

    Parameters
    ----------
    config : path of a JSON file, or its contents.
    params : as in torch, in the format of the configuration: fp32, fp16 or bf16.
    auto : values of keys that are `"auto"` in the configuration, by path:
        `{"optimizer.params.lr": 1e-4}`.
    ignore : paths of keys to ignore, such as `scheduler`.
    world_size : number of processes; None: that of `torch.distributed`.
    clipping : `host` clips as `torch.nn.utils.clip_grad_norm_` does, on every device; `device` is
        `max_grad_norm` of the optimizer.
    **on : arguments of the optimizer besides torch's, as in `Adam`; `device` is required, None is
        this machine's processor. `memory` and `drives` override
        `sub_group_size` and `nvme_path`; `resume` resumes from the drives.

    Raises
    ------
    ConfigError : names the first key that is not supported, with the expected and actual value.
    """
    processes = configured.rank()[1] if world_size is None else world_size
    asked = load(config, auto=auto, ignore=ignore, world_size=processes)
    kinds = {"Adam": Adam, "AdamW": AdamW, "SGD": SGD, "Adagrad": Adagrad}
    return configured.make(kinds[asked.optimizer], asked, params, clipping=clipping, on=on)
