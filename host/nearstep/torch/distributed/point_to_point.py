"""Collectives that move bytes: through the memory of the devices, under names that all know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from nearstep.coarse.service.client import Client
from nearstep.coarse.service.errors import RefusedError
from nearstep.torch.distributed.tensors import bytes_of, flat


class PointToPoint:
    """Those of one process. What is refused, such as for lack of memory, all that take part raise.

    Parameters
    ----------
    client : gives the client.
    """

    def __init__(self, client: Callable[[], Client]) -> None:
        self._connected = client

    @property
    def _client(self) -> Client:
        return self._connected()

    def put(self, key: str, tensor: Tensor, readers: int) -> None:
        """Leave a tensor's bytes under a name."""
        self._client.put(key, bytes_of(tensor.contiguous()), readers=readers)

    def get(self, key: str, tensor: Tensor) -> None:
        """Take a tensor's bytes from under a name."""
        if tensor.is_contiguous():
            self._client.get(key, bytes_of(tensor))
            return
        dense = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._client.get(key, bytes_of(dense))
        tensor.copy_(dense)

    def broadcast(self, key: str, tensor: Tensor, root: int) -> None:
        """The root's tensor becomes everybody's."""
        if self._client.rank != root:
            self.get(key, tensor)
        elif self._client.clients > 1:
            self.put(key, tensor, self._client.clients - 1)

    def gather(self, key: str, places: Sequence[Tensor], given: Tensor, root: int) -> None:
        """Everybody's tensor goes to a place at the root."""
        rank = self._client.rank
        if rank != root:
            self.put(f"{key}/{rank}", given, 1)
            return
        with _all_of_them() as attempt:
            for peer, place in enumerate(places):
                if peer == rank:
                    place.copy_(given)
                else:
                    attempt(partial(self.get, f"{key}/{peer}", place))

    def scatter(self, key: str, place: Tensor, parts: Sequence[Tensor], root: int) -> None:
        """A tensor of the root goes to each process."""
        rank = self._client.rank
        if rank != root:
            self.get(f"{key}/{rank}", place)
            return
        with _all_of_them() as attempt:
            for peer, part in enumerate(parts):
                if peer == rank:
                    place.copy_(part)
                else:
                    attempt(partial(self.put, f"{key}/{peer}", part, 1))

    def gather_single(self, key: str, output: Tensor, given: Tensor) -> None:
        """Everybody's tensor goes to everybody, one behind the other."""
        dense = flat(output)
        self.gather_all(key, list(dense.view(self._client.clients, -1)), given.reshape(-1))
        if not output.is_contiguous():
            output.copy_(dense.view(output.shape))

    def gather_all(self, key: str, places: Sequence[Tensor], given: Tensor) -> None:
        """Everybody's tensor goes to a place at everybody."""
        rank, others = self._client.rank, self._client.clients - 1
        with _all_of_them() as attempt:
            if others:
                attempt(partial(self.put, f"{key}/{rank}", given, others))
            for peer, place in enumerate(places):
                if peer == rank:
                    place.copy_(given.view(place.shape))
                else:
                    attempt(partial(self.get, f"{key}/{peer}", place))

    def exchange_all(self, key: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """A tensor of everybody goes to everybody else."""
        rank = self._client.rank
        with _all_of_them() as attempt:
            for peer, part in enumerate(inputs):
                if peer != rank:
                    attempt(partial(self.put, f"{key}/{rank}/{peer}", part, 1))
            for peer, place in enumerate(outputs):
                if peer == rank:
                    place.copy_(inputs[rank])
                else:
                    attempt(partial(self.get, f"{key}/{peer}/{rank}", place))


@contextlib.contextmanager
def _all_of_them() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Carry out all parts of a collective, and raise the first refusal at the end.

    What a part leaves in the devices others read, and what they leave is read, so that nothing
    stays there.
    """
    refused: list[RefusedError] = []

    def attempt(part: Callable[[], None]) -> None:
        try:
            part()
        except RefusedError as error:
            refused.append(error)

    yield attempt
    if refused:
        raise refused[0]
