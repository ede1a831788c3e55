"""Adam and AdamW as ``torch.optim`` has them, with every step on a device.

::

    import nearstep
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=3e-4, device="sim:axdimm")

Parameters (as fp32 masters), gradients and state live in device memory. A step sends the
gradients down, runs the kernel once for each stretch of neighbouring parameters of equal group and
step count, and fetches the parameters.

Parameters and state equal those of torch's optimizer with ``fused=True`` on a CPU bit for bit, if

- the parameters are fp32: of 16-bit parameters torch keeps 16-bit state, nearstep keeps fp32 state
  and an fp32 master;
- the size of each is divisible by 16: torch computes what remains with scalar code that rounds
  otherwise;
- torch's kernels are those for AVX2 or AVX512 (``torch.backends.cpu.get_cpu_capability()``).

Options that torch has and the device has not are refused by name: ``amsgrad``, ``maximize``,
``foreach``, ``capturable`` and ``differentiable``. ``fused`` is accepted and changes nothing; in
``state_dict()`` it is True, because torch's fused step is the one that has the same bits.

Behaviour that differs from torch's, or that torch leaves open:

- ``optimizer.state[p]`` fetches moments (momentum buffers, sums) when they are read; what was read
  is a copy that is good until the next step. A change made to it before that step is sent to the
  device.
- Moments are fp32 whatever the parameter's format. Of 16-bit parameters, ``state_dict()`` has
  ``master_param``, the fp32 master, besides torch's keys; torch ignores it.
- A parameter that was changed on the host between steps, by whatever means, becomes the master.
- With :class:`torch.amp.GradScaler` the scaler unscales the gradients and skips steps with an inf,
  as for every optimizer that is not fused: ``_step_supports_amp_scaling`` is not set.
- ``copy.deepcopy`` shares the device, with memory of its own; unpickling opens a device of the same
  name.

Ref: AXDIMM, sections 3.3 and 4.2.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, cast

from torch import Tensor
from torch.optim.optimizer import ParamsT

from nearstep.device import Device
from nearstep.placement import ARRAYS, Arenas
from nearstep.run import Run
from nearstep.torch import options
from nearstep.torch.layout import Layout
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.torch.traffic import Traffic

__all__ = ["Adam", "AdamW", "Traffic"]


class Adam(DeviceOptimizer):
    """``torch.optim.Adam`` on a device; :mod:`nearstep.optim` says where it differs.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, decoupled_weight_decay
        As in torch. Parameters are dense fp32, fp16 or bf16 tensors on the CPU.
    device: str | Device
        Name of a device (see :func:`nearstep.open`), which the optimizer opens, and closes when the
        last optimizer that uses it is gone; or a device that the caller opened, and closes.
    max_cycles: int | None
        Bound on each run of the kernel, in device cycles.

    Raises
    ------
    UnsupportedOptionError, HyperparameterError, ParameterError
    UrlError, OptionError
        The device cannot be opened.
    ArgumentError
        Its kernel does not have the rule.
    OutOfDeviceMemoryError
        The parameters that require a gradient do not fit.
    """

    layout = Layout(
        counts=True,
        moments={"exp_avg": "m", "exp_avg_sq": "v"},
        foreign={"max_exp_avg_sq": "amsgrad"},
    )

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
        device: str | Device,
        max_cycles: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": options.beta_pair(betas),
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
        super().__init__(params, defaults, device, max_cycles)

    def _check_options(self, group: Mapping[str, Any]) -> None:
        options.check_not_negative(group, "lr", "eps", "weight_decay")
        options.check_betas(group)

    def _rule(self, group: Mapping[str, Any]) -> str:
        return "adam"

    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        return ARRAYS

    def _start(self, arrays: Arenas, group: Mapping[str, Any], phase: Hashable) -> Run:
        return self.device.adam(
            arrays["p"],
            arrays["g"],
            arrays["m"],
            arrays["v"],
            step=cast(int, phase),
            betas=options.beta_pair(group["betas"]),
            decoupled=bool(group["decoupled_weight_decay"]),
            **options.scalars(group, "lr", "eps", "weight_decay"),
        )


class AdamW(Adam):
    """``torch.optim.AdamW`` on a device: :class:`Adam` with decoupled weight decay."""

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
        device: str | Device,
        max_cycles: int | None = None,
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
            device=device,
            max_cycles=max_cycles,
        )

    def _complete(self, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        super()._complete(group, defaults)
        group["decoupled_weight_decay"] = True
