"""An optimizer whose parameters and state are stored in memory devices, which update them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.stored import ADDING_RULE, PARAMETERS, StoredParameters
from nearstep.coarse.tensor import PoolTensor, as_floats
from nearstep.errors import ArgumentError, NearstepError
from nearstep.scalars import is_whole
from nearstep_spec.rule.optimizer import Optimizer

IDENTITY = np.float32(-0.0)
"""The gradients of a device without a client; they change no sum."""

STEPS = "steps"
"""Name of the number of steps in a snapshot."""

Floats = NDArray[np.float32]
Hyper = Mapping[str, Any]
Fill = Callable[[Floats, int, int], object]
"""Copy gradients [start, stop) to an array."""

Take = Callable[[Floats, int, int], object]
"""Take parameters [start, stop) from an array."""


class Store(Protocol):
    """Storage of parameters and states: the devices of a pool or of a service.

    `begin` stores one-dimensional parameters and the first states; `update` takes the gradients of
    `clients` clients; `load` returns the number of steps of a snapshot.
    """

    @property
    def clients(self) -> int: ...
    @property
    def names(self) -> Sequence[str]: ...
    def begin(self, values: Floats, optimizer: str | Optimizer, hyper: Hyper) -> None: ...
    def check(self, step: int, hyper: Hyper) -> None: ...
    def update(self, fills: Sequence[Fill], take: Take | None, step: int, hyper: Hyper) -> None: ...
    def read(self, name: str, device: int | None) -> Floats: ...
    def save(self, path: str | Path, steps: int) -> Path: ...
    def load(self, path: str | Path | None) -> int: ...
    def free(self) -> None: ...


class StorageOptimizer:
    """Parameters and optimizer state in the devices; clients push gradients and pull parameters::

        with CoarsePool.open("golden:coarse?devices=2&rules=adam") as pool:
            stored = StorageOptimizer(pool, weights, "adamw", clients=2, lr=1e-3)
            stored.step([gradients_of_client_0, gradients_of_client_1])
            weights = stored.read()

    The devices take the average of the gradients, the sum times float32(1 / clients). Each device
    updates a copy of its own; all copies are alike (see `StoredParameters`).

    Parameters
    ----------
    store : a pool with update kernels (`rules=`), or a
        `nearstep.coarse.service.stored.ServiceStore`: then each client of the job makes an
        optimizer, and all call the same methods in the same order. The store is not closed.
    parameters : float32, of any shape: of numpy, or an array that numpy reads without a copy.
    optimizer : `adamw`, `adam`, `sgd`, `adagrad` or another whose rule the devices have.
    clients : of a pool: see `PoolStore`.
    **hyper : hyper-parameters, those of `torch.optim` under their names.

    Attributes
    ----------
    steps : number of steps made.
    hyper : hyper-parameters of the next step.

    Ref: COARSE paper, sections II-B (DENSE) and III-D.
    """

    def __init__(
        self,
        store: CoarsePool | Store,
        parameters: Any,
        optimizer: str | Optimizer = "adamw",
        *,
        clients: int | None = None,
        **hyper: Any,
    ) -> None:
        if isinstance(store, CoarsePool):
            store = PoolStore(store, clients)
        elif clients is not None:
            raise ArgumentError(f"clients must be those of the store, not {clients!r}")
        values = as_floats("parameters", parameters)
        self.store = store
        self.shape = values.shape
        self.steps = 0
        self.hyper = dict(hyper)
        store.begin(np.ascontiguousarray(values).reshape(-1), optimizer, self.hyper)

    def check(self, **hyper: Any) -> None:
        """Raise unless the next step can have these hyper-parameters; nothing is changed."""
        self.store.check(self.steps + 1, self.hyper | hyper)

    def step(self, gradients: Sequence[Any], **hyper: Any) -> None:
        """Average the gradients of all clients, and update the parameters on every device.

        Parameters
        ----------
        gradients : an array for each client of the store, float32, of the parameters' shape.
        **hyper : hyper-parameters from now on.

        Raises
        ------
        ArgumentError : an array or a hyper-parameter is wrong; no device was touched.
        KernelError, WaitTimeoutError : an update failed; the devices' copies may differ.
        """
        if len(gradients) != self.store.clients:
            raise ArgumentError(
                f"there must be {self.store.clients} gradients, not {len(gradients)}"
            )
        arrays = [as_floats("gradients", each, self.shape) for each in gradients]
        fills = [partial(_copy, np.ascontiguousarray(each).reshape(-1)) for each in arrays]
        self.update(fills, None, **hyper)

    def update(self, fills: Sequence[Fill], take: Take | None, **hyper: Any) -> None:
        """Step with gradients and parameters in parts.

        Parameters
        ----------
        fills : of each client of the store: copies gradients [start, stop) to an array.
        take : gets parameters [start, stop), if given.
        **hyper : hyper-parameters from now on.
        """
        self.check(**hyper)
        self.store.update(fills, take, self.steps + 1, self.hyper | hyper)
        self.hyper |= hyper
        self.steps += 1

    def read(self, device: int | None = None) -> Floats:
        """Return the parameters from the memory of a device: device 0, or a client's own."""
        return self.state(PARAMETERS, device)

    def state(self, name: str, device: int | None = None) -> Floats:
        """Return a state of the rule, such as `m`, from the memory of a device."""
        if name not in self.store.names:
            known = ", ".join(self.store.names)
            raise ArgumentError(f"state must be of {known}, not {name!r}")
        return self.store.read(name, device).reshape(self.shape)

    def snapshot(self, path: str | Path) -> Path:
        """Save parameters, states and the number of steps to the next generation of `path`.

        One client of a service calls it, while no other steps.
        """
        return self.store.save(path, self.steps)

    def restore(self, path: str | Path | None = None) -> None:
        """Load a snapshot: the next steps have the bits of those that followed it.

        Parameters
        ----------
        path : a file, or the newest generation; None: another client has loaded the snapshot.
        """
        self.steps = self.store.load(path)

    def free(self) -> None:
        """Free the memory of the devices."""
        self.store.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.free()
        except NearstepError:
            if error is None:
                raise


class PoolStore:
    """The devices of a pool in this process, with the gradients of all clients.

    Client r has device r, and the rings sum the gradients. A pool of one device is the DENSE
    baseline: any number of clients and no ring; the update kernel, which needs the rule `sgd`
    then, adds the gradients in the order of clients.

    Parameters
    ----------
    clients : at most one for each device, unless there is one device. None: one for each device.
    """

    def __init__(self, pool: CoarsePool, clients: int | None = None) -> None:
        clients = pool.devices if clients is None else clients
        most = pool.devices if pool.devices > 1 else None
        if not is_whole(clients) or clients < 1 or (most is not None and clients > most):
            limit = "" if most is None else f" to {most}, one for each device"
            raise ArgumentError(f"clients must be from 1{limit}, not {clients!r}")
        self.pool = pool
        self.clients = clients
        self._tensors: list[PoolTensor] = []

    @property
    def names(self) -> Sequence[str]:
        return [*self._stored.tensors]

    def begin(self, values: Floats, optimizer: str | Optimizer, hyper: Hyper) -> None:
        pool = self.pool
        if self.clients > 1 and pool.devices == 1:
            pool.device.check_rule(ADDING_RULE)
        self._stored = StoredParameters.make(pool, optimizer, values, **hyper)
        self._tensors = [*self._stored.tensors.values()]
        count = self.clients if pool.devices == 1 else 1
        try:
            sizes = [(values.size,)] * count
            self._gradients = pool.tensors(sizes, reduced=pool.devices > 1)
            self._tensors += self._gradients
            self._steps = pool.tensor((2,), reduced=False)
            self._tensors.append(self._steps)
        except BaseException:
            self.free()
            raise

    def check(self, step: int, hyper: Hyper) -> None:
        self._stored.check(step, hyper)

    def update(self, fills: Sequence[Fill], take: Take | None, step: int, hyper: Hyper) -> None:
        scale = float(np.float32(1 / self.clients))
        self._stored.start(self._sum(fills), step=step, scale=scale, hyper=hyper).wait()
        if take is not None:
            take(self.read(PARAMETERS, None), 0, self._stored.size)

    def _sum(self, fills: Sequence[Fill]) -> list[list[Buffer]]:
        """Return the arrays that each device's kernel adds: the sum, where a ring made one."""
        devices, size = self.pool.devices, self._stored.size
        values = np.empty(size, np.float32)
        for number in range(max(devices, self.clients)):
            if number < self.clients:
                fills[number](values, 0, size)
            else:
                values[:] = IDENTITY
            if devices == 1:
                self._gradients[number].write(0, values)
            else:
                self._gradients[0].write(number, values)
        if devices == 1:
            return [[tensor.front(0) for tensor in self._gradients]]
        (tensor,) = self._gradients
        self.pool.all_reduce(tensor)
        return [[tensor.front(device)] for device in range(devices)]

    def read(self, name: str, device: int | None) -> Floats:
        return self._stored.tensors[name].read(device or 0)

    def save(self, path: str | Path, steps: int) -> Path:
        count = np.array([steps], np.uint64).view(np.float32)
        for device in range(self.pool.devices):
            self._steps.write(device, count)
        return self.pool.snapshot(path, self._saved)

    def load(self, path: str | Path | None) -> int:
        if path is None:
            raise ArgumentError("path must name a snapshot of the pool, not None")
        self.pool.restore(path, self._saved)
        return int(self._steps.read(0).view(np.uint64)[0])

    @property
    def _saved(self) -> Mapping[str, PoolTensor]:
        return {**self._stored.tensors, STEPS: self._steps}

    def free(self) -> None:
        if not self.pool.device.closed:
            for tensor in self._tensors:
                tensor.free()
        self._tensors = []


def _copy(given: Floats, out: Floats, start: int, stop: int) -> None:
    out[:] = given[start:stop]
