"""An optimizer of torch whose parameters and state are in COARSE's memory devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.optimizer import ParamsT

from nearstep.coarse import optimizer as stored
from nearstep.coarse.service.stored import ServiceStore
from nearstep.errors import ArgumentError, DtypeError
from nearstep.torch.distributed.hook import group_beside
from nearstep.torch.distributed.snapshots import first_does
from nearstep.torch.dtensor import is_dtensor, sharding


class StorageOptimizer(torch.optim.Optimizer):
    """Sends gradients to the devices, which average and update, and fetches parameters::

        optimizer = StorageOptimizer(model.parameters(), "adamw", lr=1e-3)
        ...
        optimizer.step()

    Each process makes one, of a model without DDP: its step is the synchronization. All processes
    get the parameters of rank 0. The state of the optimizer is in the devices: `state` is empty,
    and `state_dict()` has hyper-parameters alone; `save` and `load` are for the rest. A parameter
    without a gradient has the gradient 0.

    Parameters
    ----------
    params : float32, on the CPU, whole on each process; groups of parameters may have
        hyper-parameters of their own.
    optimizer : `adamw`, `adam`, `sgd`, `adagrad` or another whose rule the devices have.
    group : of processes; None is the default one. Beside a group of another backend, one of the
        memory devices is made with the same processes.
    wire : format on the links of the devices.
    timeout_s : of each wait, in seconds; None: the given group's, or 1800.
    key : name of the parameters at the service; another one for another optimizer.
    **hyper : hyper-parameters, those of `torch.optim` under their names; they may change in
        `param_groups` from step to step, such as by a scheduler.

    Raises
    ------
    ArgumentError : a parameter is a DTensor, or none of the above; or a given group of the memory
        devices has another `timeout_s`.
    RefusedError : the devices do not have the rule, or a hyper-parameter is wrong.
    UnlikeError : the processes call with different arguments.

    Ref: COARSE paper, section III-D.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer: str = "adamw",
        *,
        group: dist.ProcessGroup | None = None,
        wire: str = "fp32",
        timeout_s: float | None = None,
        key: str = "parameters",
        **hyper: Any,
    ) -> None:
        super().__init__(params, dict(hyper))
        self._names = tuple(hyper)
        self._groups = [_Flat(each["params"]) for each in self.param_groups]
        self._processes = group_beside(group, None, timeout_s)
        self._stored: list[stored.StorageOptimizer] = []
        self._stores = [
            ServiceStore(self._processes.client, f"{key}/{number}", wire=wire)
            for number in range(len(self._groups))
        ]

        def make() -> None:
            for number, (store, flat) in enumerate(zip(self._stores, self._groups, strict=True)):
                hyper = self._hyper(number)
                made = stored.StorageOptimizer(store, flat.read(), optimizer, **hyper)
                self._stored.append(made)
                flat.write(made.read(), 0, flat.size)

        self._carry_out("begin a stored optimizer", make)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction; later calls are refused.

        Raises
        ------
        ArgumentError : the optimizer is already constructed.
        """
        if "_stored" in vars(self):
            raise ArgumentError("groups must be given to the constructor, not added")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all processes.

        Raises
        ------
        RefusedError : a hyper-parameter cannot be. No parameter was updated; training can continue.
        JobError : processes say other hyper-parameters, or one is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        def action() -> None:
            hyper = [self._hyper(number) for number in range(len(self._stored))]
            for each, given in zip(self._stored, hyper, strict=True):
                each.check(**given)  # of all groups, before the step of the first one
            for each, flat, given in zip(self._stored, self._groups, hyper, strict=True):
                each.update([flat.gradients], flat.write, **given)

        self._carry_out("step a stored optimizer", action)
        return loss

    def save(self, path: str) -> str:
        """Write parameters, states and counts of steps to the next generation of `path`.

        All processes call it, between steps.

        Returns
        -------
        str : path of the file, on the service's machine, at rank 0.

        Raises
        ------
        RefusedError : `kind` says why, at all ranks; training can go on.
        """
        found = [""]
        client = self._processes.client

        def save() -> None:
            pairs = zip(self._stores, self._stored, strict=True)
            keys = [key for store, each in pairs for key in store.keep(each.steps)]
            found[0] = client.save(path, keys)

        self._carry_out("save a stored optimizer", partial(first_does, self._processes, save))
        return found[0]

    def load(self, path: str) -> None:
        """Go on from a snapshot: a file, or the newest generation of `path`; all processes call it.

        There may be fewer processes or devices than there were; hyper-parameters are as given here.

        Raises
        ------
        RefusedError : it is torn, or not there, at all ranks; training can go on.
        UnlikeError : it is of other parameters.
        """

        client = self._processes.client

        def load() -> None:
            client.load(path)

        def action() -> None:
            first_does(self._processes, load)
            for each, flat in zip(self._stored, self._groups, strict=True):
                each.restore()
                flat.write(each.read(), 0, flat.size)
            client.barrier()

        self._carry_out("load a stored optimizer", action)

    def _hyper(self, group: int) -> dict[str, Any]:
        given = self.param_groups[group]
        return {name: _plain(given[name]) for name in self._names}

    def _carry_out(self, what: str, action: Callable[[], None]) -> None:
        """Run an action in the order of the group's collectives."""
        self._processes.carry_out(what, action)


class _Flat:
    """The parameters of a group as one vector."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        for each in parameters:
            if is_dtensor(each):
                raise ArgumentError(
                    f"a parameter must be whole on each process, not {sharding(each)}: the devices "
                    "would average different shards; an optimizer of nearstep.optim with drives= "
                    "keeps the state of shards"
                )
            if each.dtype != torch.float32:
                raise DtypeError("a parameter", "float32", each.dtype)
            if each.device.type != "cpu" or not each.is_contiguous():
                raise ArgumentError(
                    f"a parameter must be contiguous and on the CPU, not {each.stride()} on "
                    f"{each.device}"
                )
        self.starts = np.cumsum([0, *(each.numel() for each in parameters)]).tolist()
        self.size: int = self.starts[-1]

    def read(self) -> NDArray[np.float32]:
        """Return a copy of the parameters."""
        values: NDArray[np.float32] = torch.cat(
            [each.detach().view(-1) for each in self.parameters]
        ).numpy()
        return values

    def gradients(self, out: NDArray[np.float32], start: int, stop: int) -> None:
        """Copy gradients [start, stop) to `out`."""
        for each, own, place in self._parts(start, stop):
            if each.grad is None:
                out[place] = 0.0
            else:
                out[place] = each.grad.detach().contiguous().view(-1).numpy()[own]

    def write(self, values: NDArray[np.float32], start: int, stop: int) -> None:
        """Copy values to parameters [start, stop)."""
        for each, own, place in self._parts(start, stop):
            each.detach().view(-1).numpy()[own] = values[place]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield parameters with elements of [start, stop), and where these are in the parameter and
        in [start, stop)."""
        for each, begin in zip(self.parameters, self.starts, strict=False):
            low, high = max(begin, start), min(begin + each.numel(), stop)
            if low < high:
                yield each, slice(low - begin, high - begin), slice(low - start, high - start)


def _plain(value: Any) -> Any:
    """Convert a tensor of one element to a Python number, for JSON."""
    return value.item() if isinstance(value, Tensor) else value
