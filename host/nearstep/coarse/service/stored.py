"""Parameters that the devices of a service store and update: a client's side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.optimizer import STEPS, Fill, Floats, Hyper, Take
from nearstep.coarse.service.client import Client
from nearstep.coarse.service.messages import Update
from nearstep.errors import ArgumentError
from nearstep_spec.rule.optimizer import Optimizer


class ServiceStore:
    """The devices of a service, for a `nearstep.coarse.StorageOptimizer` of each client of a job.

    Shards are updated while others are in transfer.

    Parameters
    ----------
    key : name of the parameters at the service; the parameters of client 0 are stored.
    wire : format on the links of the devices.

    Ref: COARSE paper, section III-D.
    """

    clients = 1
    """Each client of the job gives its own gradients."""

    def __init__(self, client: Client, key: str = "parameters", *, wire: str = "fp32") -> None:
        self.client = client
        self.key = key
        self.wire = wire

    @property
    def names(self) -> Sequence[str]:
        return [each.removeprefix(f"{self.key}/") for each in self._exchange.kept]

    def begin(self, values: Floats, optimizer: str | Optimizer, hyper: Hyper) -> None:
        if not isinstance(optimizer, str):
            raise ArgumentError("optimizer must be a name, which the service knows")
        self._size = values.size
        self._checked = _text(hyper)
        if self.client.rank == 0:
            self.client.keep(f"{self.key}/p", values.view(np.uint8))
        self.client.barrier()
        update = Update(self.key, optimizer, self._checked)
        self._exchange = self.client.exchange(values.size, "average", self.wire, update=update)

    def check(self, step: int, hyper: Hyper) -> None:
        """Ask the service, unless the hyper-parameters are those of the last question."""
        text = _text(hyper)
        if text != self._checked:
            self.client.check_step(self._exchange, step, text)
            self._checked = text

    def update(self, fills: Sequence[Fill], take: Take | None, step: int, hyper: Hyper) -> None:
        (fill,) = fills
        self._exchange.run(fill, take or (lambda *_: None), step=step, hyper=_text(hyper))

    def read(self, name: str, device: int | None) -> Floats:
        if device is not None:
            raise ArgumentError(f"device must be None, the client's own, not {device!r}")
        out = np.empty(self._size, np.float32)
        self.client.get(f"{self.key}/{name}", out.view(np.uint8))
        return out

    def keep(self, steps: int) -> list[str]:
        """Store the number of steps, and return the names of all values that a snapshot needs."""
        count = np.array([steps], np.int64).view(np.uint8)
        self.client.keep(f"{self.key}/{STEPS}", count)
        return [*self._exchange.kept, f"{self.key}/{STEPS}"]

    def save(self, path: str | Path, steps: int) -> Path:
        return Path(self.client.save(str(path), self.keep(steps)))

    def load(self, path: str | Path | None) -> int:
        if path is not None:
            self.client.load(str(path))
        count: NDArray[np.int64] = np.zeros(1, np.int64)
        self.client.get(f"{self.key}/{STEPS}", count.view(np.uint8))
        return int(count[0])

    def free(self) -> None:
        """Free the gradients' memory. Parameters and states are kept until the job ends."""
        self._exchange.close()


def _text(hyper: Hyper) -> str:
    """Return hyper-parameters as a JSON object."""
    try:
        return json.dumps(dict(hyper), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"hyper-parameters must be of JSON's types: {error}") from error
