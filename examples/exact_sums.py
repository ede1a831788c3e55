"""Sum the same addends exactly along many paths, and compare the bits.

    python examples/exact_sums.py

A line for each format and operation has the SHA-256 of the result, and how many results had it: of
permutations, of pools and of services with 1 to 8 devices in one or two rings, with 8, 4, 2 or 1
clients, shards and entries of several sizes, at several places of a tensor. The number behind
counts the results of the same addends in the order of the rings, which differ.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from nearstep.coarse import CoarsePool
from nearstep.coarse.service import Client, Server
from nearstep_sim.golden import coarse_cpp

ADDENDS = 8
BEFORE = (0, 1, 17, 4096)
"""Elements of a tensor before those that are summed."""

CLIENTS, SHARD_BYTES, ENTRY_PHITS = (8, 4, 2, 1), (2048, 6144, 1 << 20), (4, 8, 32)

F32 = NDArray[np.float32]


def permuted(addends: F32, wire: str, divisor: int, columns: int) -> Iterator[F32]:
    """Sums of which each element has the addends in another order, by the C++ golden model."""
    rng = np.random.default_rng(2)
    for start in range(0, addends.shape[1], columns):
        part = addends[:, start : start + columns]
        orders = rng.random(part.shape).argsort(axis=0)
        out = np.empty(part.shape[1], np.float32)
        rows = [*np.take_along_axis(part, orders, axis=0)]
        coarse_cpp.exact_sum(rows, [out], wire=wire, divisor=divisor)
        yield out


def embedded(addends: F32, before: int) -> F32:
    """Addends in a longer tensor, between other numbers."""
    return np.pad(addends, ((0, 0), (before, 33)), constant_values=1.5)


class Paths:
    """Results of the pool and the service of one shape, exact or not.

    Parameters
    ----------
    number : chooses clients, sizes, order and place.
    """

    def __init__(self, devices: int, groups: int, number: int) -> None:
        self.devices, self.number = devices, number
        self.rng = np.random.default_rng(number)
        entry = ENTRY_PHITS[number % len(ENTRY_PHITS)]
        self.url = f"golden:coarse?devices={devices}&groups={groups}&entry_phits={entry}"
        self.url += "&exact=fp32,fp16,bf16&memory_bytes=4MiB"

    def pool(self, addends: F32, op: str, wire: str, *, exact: bool) -> F32:
        """The pool's sum, with an addend on each device."""
        before = BEFORE[self.number % len(BEFORE)]
        rows = embedded(addends[self.rng.permutation(ADDENDS)], before)
        with CoarsePool.open(self.url) as pool:
            tensor = pool.tensor([*rows])
            pool.all_reduce(tensor, op, wire, exact=exact)
            return tensor.read(0)[before : before + addends.shape[1]]

    def service(self, addends: F32, op: str, wire: str, *, exact: bool) -> F32:
        """The service's sum, with the addends divided among its clients."""
        before = BEFORE[self.number % len(BEFORE)]
        rows = embedded(addends[self.rng.permutation(ADDENDS)], before)
        clients = CLIENTS[self.number % len(CLIENTS)] if exact else ADDENDS
        each = ADDENDS // clients
        shard_bytes = SHARD_BYTES[self.number % len(SHARD_BYTES)]
        place, token = f"unix:{tempfile.mkdtemp()}/socket", "of an example"
        with Server(CoarsePool.open(self.url), place, token):

            def work(rank: int) -> F32:
                own = rows[rank * each : (rank + 1) * each]
                out = np.empty(rows.shape[1], np.float32)
                with Client(place, token, job="exact", rank=rank, clients=clients) as client:
                    exchange = client.exchange(
                        out.size, op, wire, shard_bytes=shard_bytes, addends=each if exact else 0
                    )
                    exchange.reduce(own if each > 1 else own[0], out)
                return out

            with ThreadPoolExecutor(clients) as threads:
                results = [*threads.map(work, range(clients))]
        assert all((one.view(np.uint32) == results[0].view(np.uint32)).all() for one in results)
        return results[0][before : before + addends.shape[1]]


def results(addends: F32, op: str, wire: str, *, exact: bool) -> Iterator[F32]:
    """Results of all paths."""
    number = 0
    for devices in range(1, 9):
        for groups in (1, 2):
            number += 1
            paths = Paths(devices, groups, number)
            if exact or devices > 1:
                yield paths.service(addends, op, wire, exact=exact)
            if devices == ADDENDS:
                yield paths.pool(addends, op, wire, exact=exact)


def digest(values: F32) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def main(
    elements: Annotated[int, typer.Option(min=1, help="Elements of a tensor.")] = 5000,
    permutations: Annotated[int, typer.Option(min=1, help="Orders by the C++.")] = 1_000_000,
) -> None:
    """Compare the bits of all paths."""
    rng = np.random.default_rng(1)
    scale = np.exp2(rng.integers(-12, 13, (ADDENDS, elements)))
    drawn = (rng.standard_normal((ADDENDS, elements)) * scale).astype(np.float32)
    drawn[1] = -drawn[0]  # the two cancel; other orders of the sum lose small addends
    for wire in ("bf16", "fp16", "fp32"):
        for op in ("sum", "average"):
            divisor = ADDENDS if op == "average" else 1
            copies = -(-permutations // elements)
            many = np.tile(drawn, copies)
            ordered = [*permuted(many, wire, divisor, elements)]
            found = [digest(each) for each in (*ordered, *results(drawn, op, wire, exact=True))]
            others = {digest(each) for each in results(drawn, op, wire, exact=False)}
            same = sum(each == found[0] for each in found)
            print(f"{wire} {op:7} {found[0][:16]}  {same} of {len(found)}; others: {len(others)}")


if __name__ == "__main__":
    typer.run(main)
