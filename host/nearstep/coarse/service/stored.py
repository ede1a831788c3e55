"""Parameters that the memory devices keep and update for the clients of a job: a client's side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.service.client import Client
from nearstep.coarse.service.messages import Update
from nearstep.errors import ArgumentError

STEPS = "steps"
"""Name, behind that of the parameters, of the number of steps that a snapshot was taken after."""


class StoredClient:
    """Parameters in the memory devices: gradients go up, parameters come down.

    All clients of a job make it, step it, save it and load it in the same order. The devices hold
    the states of the optimizer; a client holds its hyper-parameters, and counts steps.

    Parameters
    ----------
    key : name of the parameters.
    values : float32, one dimension; those of client 0 are everybody's.
    optimizer : `adamw`, `sgd` or another whose rule the devices have.
    hyper : hyper-parameters, those of `torch.optim` under their names.
    wire : format on the links of the devices.

    Attributes
    ----------
    steps : that have been made.

    Ref: COARSE paper, section III-D.
    """

    def __init__(
        self,
        client: Client,
        key: str,
        values: NDArray[np.float32],
        optimizer: str,
        hyper: Mapping[str, Any],
        *,
        wire: str = "fp32",
    ) -> None:
        self.client = client
        self.key = key
        self.steps = 0
        if client.rank == 0:
            client.keep(f"{key}/p", np.ascontiguousarray(values).view(np.uint8))
        client.barrier()
        self._checked = ""  # the devices take those that they are made with
        update = Update(key, optimizer, _text(hyper))
        self._exchange = client.exchange(values.size, "average", wire, update=update)

    def check(self, hyper: Mapping[str, Any]) -> None:
        """Whether the next step can have these hyper-parameters; where they are as in the last
        step the devices are not asked.
        """
        text = _text(hyper)
        if text != self._checked:
            self.client.check_step(self._exchange, self.steps + 1, text)
            self._checked = text

    def step(
        self,
        fill: Callable[[NDArray[np.float32], int, int], object],
        take: Callable[[NDArray[np.float32], int, int], object],
        hyper: Mapping[str, Any],
    ) -> None:
        """Push gradients, have all devices update with the average, and pull the parameters.

        Shard by shard: some are updated while others are on their way.

        Parameters
        ----------
        fill : puts gradients [start, stop) into an array.
        take : takes parameters [start, stop) from one.
        hyper : of this step; what is not there is as it was given in the beginning.
        """
        self.check(hyper)
        exchange = self._exchange
        exchange.run(
            fill,
            take,
            step=self.steps + 1,
            hyper=_text(hyper),
        )
        self.steps += 1

    def saved(self) -> list[str]:
        """Names of what a snapshot needs."""
        return [*self._exchange.kept, f"{self.key}/{STEPS}"]

    def keep_steps(self) -> None:
        """Keep the number of steps beside the states, for a snapshot; one client does."""
        count = np.array([self.steps], np.int64).view(np.uint8)
        self.client.keep(f"{self.key}/{STEPS}", count)

    def loaded(self, out: NDArray[np.float32]) -> None:
        """Go on from what a snapshot had: it was loaded, by one client; all get the parameters."""
        count = np.zeros(1, np.int64)
        self.client.get(f"{self.key}/{STEPS}", count.view(np.uint8))
        self.client.get(f"{self.key}/p", out.view(np.uint8))
        self.steps = int(count[0])

    def close(self) -> None:
        """Give back the gradients' memory. What is kept stays until the job ends."""
        self._exchange.close()


def _text(hyper: Mapping[str, Any]) -> str:
    """As a JSON object. Raises `ArgumentError` if it cannot be one."""
    try:
        return json.dumps(dict(hyper), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"hyper-parameters must be of JSON's types: {error}") from error
