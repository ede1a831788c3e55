"""Adam and AdamW as ``torch.optim`` has them, with every step on a device.

::

    import nearstep
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=3e-4, device="sim:axdimm")

Parameters (as fp32 masters), gradients and moments live in device memory. A step sends the
gradients down, runs the kernel once for each stretch of neighbouring parameters of equal group and
step count, and fetches the parameters.

Parameters and moments equal those of ``torch.optim.AdamW(fused=True)`` on a CPU bit for bit, if

- the parameters are fp32: of 16-bit parameters torch keeps 16-bit moments, nearstep keeps fp32
  moments and an fp32 master;
- the size of each is divisible by 16: torch computes what remains with scalar code that rounds
  otherwise;
- torch's kernels are those for AVX2 or AVX512 (``torch.backends.cpu.get_cpu_capability()``).

Ref: AXDIMM, sections 3.3 and 4.2.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from nearstep.axdimm.device import AxdimmDevice
from nearstep.device import Device
from nearstep.placement import ARRAYS, Extent, Launch, Placement
from nearstep.run import Run
from nearstep.torch import options
from nearstep.torch.checks import check_gradient, check_parameter, label
from nearstep.torch.errors import InterruptedStepError, ParameterError
from nearstep.torch.lease import Lease
from nearstep.torch.resident import Resident
from nearstep.torch.saved import SavedState, Verbatim, count, export
from nearstep.torch.state import ParameterState
from nearstep.torch.traffic import Traffic

__all__ = ["Adam", "AdamW", "Traffic"]


class Adam(Optimizer):
    """``torch.optim.Adam`` on a device.

    Options that torch has and the device has not are refused by name: ``amsgrad``, ``maximize``,
    ``foreach``, ``capturable`` and ``differentiable``. ``fused`` is accepted and changes nothing;
    in ``state_dict()`` it is True, because torch's fused step is the one that has the same bits.

    Behaviour that differs from torch's, or that torch leaves open:

    - ``optimizer.state[p]`` fetches moments when they are read; what was read is a copy that is
      good until the next step. A change made to it before that step is sent to the device.
    - Moments are fp32 whatever the parameter's format. Of 16-bit parameters, ``state_dict()`` has
      ``master_param``, the fp32 master, besides torch's keys; torch ignores it.
    - A parameter that was changed on the host between steps, by whatever means, becomes the master.
    - With :class:`torch.amp.GradScaler` the scaler unscales the gradients and skips steps with an
      inf, as for every optimizer that is not fused: ``_step_supports_amp_scaling`` is not set.
    - ``copy.deepcopy`` shares the device, with memory of its own; unpickling opens a device of
      the same name.

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
    OutOfDeviceMemoryError
        The parameters that require a gradient do not fit.
    """

    _interrupted: BaseException | None

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
        options.reject_unsupported(defaults)
        options.check_hyperparameters(defaults)
        self._attach(device, max_cycles)
        super().__init__(params, defaults)

    @property
    def device(self) -> AxdimmDevice:
        """The device that the steps run on."""
        return self._lease.device

    @property
    def traffic(self) -> Traffic:
        """Counters of what this optimizer has moved and launched. Live: copy it to keep it."""
        return self._traffic

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, on the device.

        Everything that can be checked is checked before anything is sent. If the device fails
        later, what is in its memory is part old and part new, and the optimizer refuses further use
        until a checkpoint is loaded. Parameters on the host change only after the last run.

        Parameters
        ----------
        closure: Callable[[], float] | None
            Reevaluates the model with gradients enabled, and returns the loss.

        Returns
        -------
        float | None
            What the closure returned.

        Raises
        ------
        GradientError, ParameterError, StateError, UnsupportedOptionError, OutOfDeviceMemoryError
            Nothing has been updated.
        DeviceError
            The device failed during the update.
        InterruptedStepError
            It failed in an earlier step.
        ClosedDeviceError
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does, and place its parameters that require a gradient.

        Raises
        ------
        UnsupportedOptionError, HyperparameterError, ParameterError, OutOfDeviceMemoryError
            The group has not been added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            options.reject_unsupported(group)
            options.check_hyperparameters(group)
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                check_parameter(label(group, len(self.param_groups) - 1, index), parameter)
            repeated = len(parameters) - len(set(map(id, parameters)))
            if repeated:
                name = f"group {len(self.param_groups) - 1}"
                raise ParameterError(name, "without duplicates", f"with {repeated}")
            self._place(p for p in parameters if p.requires_grad)
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The state as torch has it, with the moments of now, in fp32: a snapshot, not a view.

        Its groups have ``fused=True``, so that an optimizer of torch that loads it goes on with the
        step that has the same bits, under the conditions that this module states.

        Raises
        ------
        InterruptedStepError
            The last step failed half way.
        """
        self._check_whole("make a checkpoint")
        packed = super().state_dict()
        packed["state"] = {
            key: export(value) if isinstance(value, ParameterState) else value
            for key, value in packed["state"].items()
        }
        packed["param_groups"] = [{**group, "fused": True} for group in packed["param_groups"]]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of this class or of torch's Adam or AdamW returned.

        The moments are sent to the device as fp32 and every parameter goes down with its next step.
        What the checkpoint says about torch's way to compute (foreach, capturable) is not taken
        over; amsgrad and maximize change the result and are refused.

        Raises
        ------
        UnsupportedOptionError, StateError, ValueError
            Nothing has been loaded.
        """
        # Registered now, it runs after the hooks of the user.
        handle = self.register_load_state_dict_pre_hook(_prepare_to_load)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole("copy or pickle the optimizer")
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, value in self.state.items():
            state[parameter] = export(value) if isinstance(value, ParameterState) else value
        return {
            **super().__getstate__(),
            "state": state,
            "device": self.device.url,
            "max_cycles": self._max_cycles,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over state from pickle, from a copy, or from :meth:`load_state_dict`."""
        state = dict(state)
        if "device" in state:
            self._attach(state.pop("device"), state.pop("max_cycles"))
        labels = _labels(state["param_groups"])
        saved = {
            parameter: SavedState.of(labels[parameter], parameter, value)
            for parameter, value in state["state"].items()
            if isinstance(parameter, Tensor) and len(value)
        }
        for group in state["param_groups"]:
            self._complete(group)
            options.reject_unsupported(group)
            options.check_hyperparameters(group)
        super().__setstate__(state)
        if self._interrupted is not None:
            self.device.reset()
        for group in self.param_groups:
            self._place(p for p in group["params"] if p.requires_grad or p in saved)
        for resident in self._residents.values():
            resident.load_master(None)
        for parameter, value in saved.items():
            self.state[parameter] = self._restore(self._residents[parameter], value)
        self._interrupted = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        state = self.__getstate__()
        del state["device"]
        state = copy.deepcopy(state, memo)
        twin.__setstate__({**state, "device": self._lease})
        return twin

    def _attach(self, device: str | Device | Lease, max_cycles: int | None) -> None:
        self._lease = device if isinstance(device, Lease) else Lease.of(device)
        self._max_cycles = max_cycles
        self._placement = Placement(self._lease.device)
        self._residents: dict[Tensor, Resident] = {}
        self._traffic = Traffic()
        self._interrupted = None
        weakref.finalize(self, self._placement.free)

    def _complete(self, group: dict[str, Any]) -> None:
        """Make a loaded group one of this optimizer's."""
        options.normalise(group)

    def _check_whole(self, action: str) -> None:
        if self._interrupted is not None:
            raise InterruptedStepError(action, self._interrupted)

    def _place(self, parameters: Iterable[Tensor]) -> None:
        """Give memory to those that have none yet, next to each other in this order."""
        new = [p for p in parameters if p not in self._residents]
        if new:
            labels = _labels(self.param_groups)
            for p, extent in zip(new, self._placement.place([p.numel() for p in new]), strict=True):
                self._residents[p] = Resident(p, labels[p], extent, self._traffic)

    def _restore(self, resident: Resident, saved: SavedState) -> ParameterState:
        """Send saved state to the device."""
        for key, value in saved.moments.items():
            resident.send(key, value)
        resident.load_master(saved.master)
        state = ParameterState(saved.step, resident)
        state.update(saved.others)
        return state

    def _ready_state(self, resident: Resident) -> ParameterState:
        """State of a parameter that is about to be updated: made, taken over or flushed."""
        state = self.state[resident.parameter]
        if isinstance(state, ParameterState) and state.store is resident and state:
            state.flush()
            return state
        if len(state):
            state = self._restore(
                resident, SavedState.of(resident.label, resident.parameter, state)
            )
        else:
            resident.clear_moments()
            state = ParameterState(torch.zeros((), dtype=torch.float32), resident)
        self.state[resident.parameter] = state
        return state

    def _gradients(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Group, parameter and gradient of each parameter that has one; all are checked."""
        for index, group in enumerate(self.param_groups):
            options.reject_unsupported(group)
            options.check_hyperparameters(group)
            for position, parameter in enumerate(group["params"]):
                gradient = parameter.grad
                if gradient is not None:
                    name = label(group, index, position)
                    check_parameter(name, parameter)
                    check_gradient(name, parameter, gradient)
                    yield index, parameter, gradient

    def _update(self) -> None:
        self._check_whole("step")
        self.device.check_open("step")
        gradients = list(self._gradients())
        self._place(parameter for _, parameter, _ in gradients)
        updates: list[tuple[Resident, ParameterState]] = []
        keyed: list[tuple[Extent, tuple[int, int]]] = []
        for index, parameter, gradient in gradients:
            resident = self._residents[parameter]
            state = self._ready_state(resident)
            step = count(resident.label, state["step"]) + 1
            resident.send_master_if_changed()
            resident.send_gradient(gradient)
            updates.append((resident, state))
            keyed.append((resident.extent, (index, step)))
        started: list[Run] = []
        try:
            with self.device.acceleration():
                for launch in self._placement.launches(keyed):
                    self._run(launch, started)
            for resident, state in updates:
                resident.fetch_parameter()
                state.advance()
        except BaseException as error:
            if started:
                self._interrupted = error
                for resident, _ in updates:
                    resident.interrupted = error
            raise
        self._traffic.steps += 1
        self._traffic.elements += sum(resident.extent.count for resident, _ in updates)

    def _run(self, launch: Launch, started: list[Run]) -> None:
        """Run a launch on all of its channels at once; adds each run as it is started."""
        index, step = cast(tuple[int, int], launch.key)
        hyperparameters = options.hyperparameters(self.param_groups[index])
        runs: list[Run] = []
        begun = time.perf_counter()
        try:
            for arrays in launch.parts:
                p, g, m, v = (arrays[name] for name in ARRAYS)
                runs.append(self.device.adam(p, g, m, v, step=step, **hyperparameters))
                started.append(runs[-1])
            for run in runs:
                run.wait(self._max_cycles)
        except BaseException:
            for run in runs:
                run.abort()  # so that the device is idle: it may have other users
            raise
        self._traffic.run_seconds += time.perf_counter() - begun
        self._traffic.launches += len(runs)
        cycles = [run.cycles for run in runs if run.cycles is not None]
        if cycles:
            self._traffic.cycles = (self._traffic.cycles or 0) + max(cycles)


def _labels(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, str]:
    return {
        parameter: label(group, index, position)
        for index, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
    }


def _prepare_to_load(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keep torch from casting moments to the format of 16-bit parameters."""
    known = {key for group in state_dict["param_groups"] for key in group["params"]}
    state = {
        key: {name: Verbatim(item) for name, item in value.items()} if key in known else value
        for key, value in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


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

    def _complete(self, group: dict[str, Any]) -> None:
        super()._complete(group)
        group["decoupled_weight_decay"] = True
