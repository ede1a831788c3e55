"""An optimizer of torch whose parameters and state are in COARSE's memory devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.optimizer import ParamsT

from nearstep.coarse.service.client import TIMEOUT_S
from nearstep.coarse.service.stored import StoredClient
from nearstep.errors import ArgumentError, DtypeError
from nearstep.torch.distributed.hook import group_beside
from nearstep.torch.distributed.snapshots import first_does


class StorageOptimizer(torch.optim.Optimizer):
    """Sends gradients to the devices, which average and update, and fetches parameters::

        optimizer = StorageOptimizer(model.parameters(), "adamw", lr=1e-3)
        ...
        optimizer.step()

    Every process makes one, of a model without DDP: its step is the synchronization. The parameters
    of rank 0 become everybody's. No process holds state of the optimizer: `state` is empty, and
    `state_dict()` has hyper-parameters alone; `save` and `load` are for the rest. A parameter
    without a gradient counts as if it were 0.

    Parameters
    ----------
    params : float32, on the CPU; groups of parameters may have hyper-parameters of their own.
    optimizer : `adamw`, `adam`, `sgd`, `adagrad` or another whose rule the devices have.
    group : of processes; None is the default one. If it is no group of the memory devices, one with
        the same processes is made beside it.
    wire : format on the links of the devices.
    timeout_s : of each wait, if a group is made.
    key : name of the parameters at the service; another one for another optimizer.
    **hyper : hyper-parameters, those of `torch.optim` under their names; they may change in
        `param_groups` from step to step, such as by a scheduler.

    Raises
    ------
    RefusedError : the devices do not have the rule, or a hyper-parameter is wrong.
    UnlikeError : the processes do not say the same.
    DtypeError : a parameter is not float32.
    ArgumentError : a parameter is not contiguous, or not on the CPU.

    Ref: COARSE paper, section III-D.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer: str = "adamw",
        *,
        group: dist.ProcessGroup | None = None,
        wire: str = "fp32",
        timeout_s: float = TIMEOUT_S,
        key: str = "parameters",
        **hyper: Any,
    ) -> None:
        super().__init__(params, dict(hyper))
        self._names = tuple(hyper)
        self._groups = [_Flat(each["params"]) for each in self.param_groups]
        self._processes = group_beside(group, wire, timeout_s)
        self._stored: list[StoredClient] = []

        def make() -> None:
            for number, flat in enumerate(self._groups):
                self._stored.append(
                    StoredClient(
                        self._processes.client,
                        f"{key}/{number}",
                        flat.read(),
                        optimizer,
                        self._hyper(number),
                        wire=wire,
                    )
                )
                self._stored[-1].client.get(f"{key}/{number}/p", flat.room.view(np.uint8))
                flat.write(flat.room, 0, flat.size)

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
        RefusedError : a hyper-parameter cannot be. Nothing was stepped, and training can go on.
        JobError : processes say other hyper-parameters, or one is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        def action() -> None:
            for number, stored in enumerate(self._stored):
                stored.check(self._hyper(number))  # of all groups, before the first one's step
            for number, (stored, flat) in enumerate(zip(self._stored, self._groups, strict=True)):
                stored.step(flat.gradients, flat.write, self._hyper(number))

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
            for each in self._stored:
                each.keep_steps()
            found[0] = client.save(path, [key for each in self._stored for key in each.saved()])

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
            for stored, flat in zip(self._stored, self._groups, strict=True):
                stored.loaded(flat.room)
                flat.write(flat.room, 0, flat.size)
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
            if each.dtype != torch.float32:
                raise DtypeError("a parameter", "float32", each.dtype)
            if each.device.type != "cpu" or not each.is_contiguous():
                raise ArgumentError(
                    f"a parameter must be contiguous and on the CPU, not {each.stride()} on "
                    f"{each.device}"
                )
        self.ends = np.cumsum([0, *(each.numel() for each in parameters)]).tolist()
        self.size: int = self.ends[-1]
        self.room = np.empty(self.size, np.float32)

    def read(self) -> NDArray[np.float32]:
        """A copy of the parameters."""
        for each, start, place in self._parts(0, self.size):
            place_in = self.room[place]
            place_in[:] = each.detach().view(-1).numpy()[start : start + place_in.size]
        return self.room.copy()

    def gradients(self, out: NDArray[np.float32], start: int, stop: int) -> None:
        """Copy gradients [start, stop) to `out`."""
        for each, first, place in self._parts(start, stop):
            into = out[place.start - start : place.stop - start]
            if each.grad is None:
                into[:] = 0.0
            else:
                gradient = each.grad.detach().contiguous().view(-1).numpy()
                into[:] = gradient[first : first + into.size]

    def write(self, values: NDArray[np.float32], start: int, stop: int) -> None:
        """Copy values to parameters [start, stop)."""
        with torch.no_grad():
            for each, first, place in self._parts(start, stop):
                given = values[place.start - start : place.stop - start]
                each.detach().view(-1).numpy()[first : first + given.size] = given

    def _parts(self, start: int, stop: int) -> list[tuple[Tensor, int, slice]]:
        """Parameters that have elements of [start, stop): each, the first one's place in it, and
        where they are in all."""
        found = []
        for each, begin, end in zip(self.parameters, self.ends, self.ends[1:], strict=False):
            low, high = max(begin, start), min(end, stop)
            if low < high:
                found.append((each, low - begin, slice(low, high)))
        return found


def _plain(value: Any) -> Any:
    """Convert a tensor of one element to a Python number, for JSON."""
    return value.item() if isinstance(value, Tensor) else value
