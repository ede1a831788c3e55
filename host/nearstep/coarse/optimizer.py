"""An optimizer that runs where the parameters are stored: in the memory devices of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.stored import ADDING_RULE, StoredParameters
from nearstep.coarse.tensor import PoolTensor, as_array
from nearstep.errors import ArgumentError, DtypeError, ShapeError
from nearstep.scalars import is_whole
from nearstep_spec.rule.optimizer import Optimizer

IDENTITY = np.float32(-0.0)
"""What a device without a client adds: it changes no sum."""


class StorageOptimizer:
    """Parameters and optimizer state in the devices; gradients go up, parameters come down::

        with CoarsePool.open("golden:coarse?devices=2&rules=adam") as pool:
            stored = StorageOptimizer(pool, weights, "adamw", clients=2, lr=1e-3)
            stored.step([gradients_of_client_0, gradients_of_client_1])
            weights = stored.read()

    Client r has device r; the rings sum the gradients of all, and the update kernel of every device
    takes their average, the sum times float32(1 / clients), and updates its own copy: all are alike
    (see `StoredParameters`). A pool of one device is the DENSE baseline: any number of clients, and
    no ring; its kernel, which has the rule `sgd` then, adds the gradients in the order of clients.

    Parameters
    ----------
    pool : with update kernels (`rules=`). It stays open.
    parameters : float32, of any shape: what numpy takes without a copy.
    optimizer : `adamw`, `adam`, `sgd`, `adagrad` or another whose rule the devices have, as of
        `nearstep.coarse.CoarseDevice.update`; or one of a file.
    clients : that push gradients; at most as many as devices, unless there is one device. None: as
        many as devices.
    **hyper : hyper-parameters, those of `torch.optim` under their names.

    Attributes
    ----------
    steps : that have been made.

    Raises
    ------
    ArgumentError : one of them is wrong, or the devices do not have the rule.
    OutOfDeviceMemoryError : nothing is held.

    Ref: COARSE paper, sections II-B (DENSE) and III-D.
    """

    def __init__(
        self,
        pool: CoarsePool,
        parameters: Any,
        optimizer: str | Optimizer = "adamw",
        *,
        clients: int | None = None,
        **hyper: Any,
    ) -> None:
        clients = pool.devices if clients is None else clients
        most = pool.devices if pool.devices > 1 else None
        if not is_whole(clients) or clients < 1 or (most is not None and clients > most):
            limit = "" if most is None else f" to {most}, one for each device"
            raise ArgumentError(f"clients must be from 1{limit}, not {clients!r}")
        values = _checked("parameters", as_array(parameters))
        self.pool = pool
        self.clients = clients
        self.shape = values.shape
        self.steps = 0
        if clients > 1 and pool.devices == 1:
            pool.device.check_rule(ADDING_RULE)
        self._stored = StoredParameters.make(pool, optimizer, values.reshape(-1), **hyper)
        self._summed: list[PoolTensor] = []
        try:
            count = clients if pool.devices == 1 else 1
            for _ in range(count):
                self._summed.append(pool.tensor((values.size,), reduced=pool.devices > 1))
            self._count = pool.tensor((2,), reduced=False)
        except BaseException:
            if not pool.device.closed:
                self.free()
            raise

    def step(self, gradients: Sequence[Any], **hyper: Any) -> None:
        """Average the gradients of all clients, and update the parameters on every device.

        Parameters
        ----------
        gradients : an array for each client, float32, of the parameters' shape.
        **hyper : hyper-parameters from now on.

        Raises
        ------
        ArgumentError : an array or a hyper-parameter is wrong; no device was touched.
        KernelError, WaitTimeoutError : an update failed; replicas may differ.
        """
        if len(gradients) != self.clients:
            raise ArgumentError(f"there must be {self.clients} gradients, not {len(gradients)}")
        arrays = [_checked("gradients", as_array(each), self.shape) for each in gradients]
        self._stored.check(self.steps + 1, hyper)
        updating = self._stored.start(
            self._sum(arrays),
            step=self.steps + 1,
            scale=float(np.float32(1 / self.clients)),
            hyper=hyper,
        )
        updating.wait()
        self._stored.hyper |= hyper
        self.steps += 1

    def _sum(self, arrays: Sequence[NDArray[np.float32]]) -> list[list[Buffer]]:
        """What the kernel of each device has to add up: the sum, where rings made one."""
        flat = [np.ascontiguousarray(each).reshape(-1) for each in arrays]
        if self.pool.devices == 1:
            for tensor, each in zip(self._summed, flat, strict=True):
                tensor.write(0, each)
            return [[tensor.front(0) for tensor in self._summed]]
        (tensor,) = self._summed
        nothing = np.full(tensor.shape, IDENTITY)
        for device in range(self.pool.devices):
            tensor.write(device, flat[device] if device < self.clients else nothing)
        self.pool.all_reduce(tensor)
        return [[tensor.front(device)] for device in range(self.pool.devices)]

    def read(self, device: int = 0) -> NDArray[np.float32]:
        """The parameters, from the memory of a device.

        Raises
        ------
        ArgumentError : there is no such device.
        """
        return self._stored.tensors["p"].read(device).reshape(self.shape)

    def state(self, name: str, device: int = 0) -> NDArray[np.float32]:
        """A state of the rule, such as `m`, from the memory of a device; raises as `read`."""
        if name not in self._stored.tensors:
            known = ", ".join(self._stored.tensors)
            raise ArgumentError(f"state must be of {known}, not {name!r}")
        return self._stored.tensors[name].read(device).reshape(self.shape)

    def snapshot(self, path: str | Path) -> Path:
        """Save parameters, states and the number of steps, as `CoarsePool.snapshot` does."""
        count = np.array([self.steps], np.uint64).view(np.float32)
        for device in range(self.pool.devices):
            self._count.write(device, count)
        return self.pool.snapshot(path, self._saved)

    def restore(self, path: str | Path) -> None:
        """Go on as when a snapshot was taken: the bits of all steps from there are the same."""
        self.pool.restore(path, self._saved)
        self.steps = int(self._count.read(0).view(np.uint64)[0])

    @property
    def _saved(self) -> list[PoolTensor]:
        return [*self._stored.tensors.values(), self._count]

    def free(self) -> None:
        """Give the memory back."""
        self._stored.free()
        for tensor in self._summed:
            tensor.free()
        if "_count" in vars(self):
            self._count.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.pool.device.closed:
            self.free()


def _checked(
    what: str, array: NDArray[Any], shape: tuple[int, ...] | None = None
) -> NDArray[np.float32]:
    """An array of float32 and of a shape, if one is given."""
    if array.dtype != np.float32:
        raise DtypeError(what, "float32", array.dtype)
    if shape is not None and array.shape != shape:
        raise ShapeError(what, shape, array.shape)
    return array
