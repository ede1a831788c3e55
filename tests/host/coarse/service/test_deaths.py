"""A client that dies at any moment of a small session."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import ClientLostError, JobError

from .dying import Deaths, Left, Moment, beside, check_left, expected, recorded
from .test_stored import stepped, stored_by, url

JOINED = 2
"""Frames each way after which a client is one of its job, or soon will be: nobody is told of one
who never came."""


def attack(
    deaths: Deaths,
    clients: int,
    moments: list[Moment],
    dying: int | None = None,
    right: np.ndarray | None = None,
) -> int:
    """Every client but the dead one succeeds or is told who is gone; how many were told."""
    if right is None:
        right = expected(deaths.service, clients)
    told = 0
    for number, moment in enumerate(moments):
        dead = number % clients if dying is None else dying
        for rank, each in enumerate(deaths.run(clients, dead, moment)):
            if isinstance(each, np.ndarray):
                np.testing.assert_array_equal(each.view(np.uint32), right.view(np.uint32))
            elif rank == dead:
                assert isinstance(each, JobError), (moment, each)
            else:
                assert isinstance(each, ClientLostError), (moment, each)
                assert each.ranks == (dead,), (moment, each)
                told += 1
    return told


def updates(client: Client) -> np.ndarray:
    """Two steps of an optimizer in the devices, and what a snapshot needs."""
    first = np.linspace(-1, 1, 2100, dtype=np.float32)
    stored = stored_by(client, first, "adamw", {"lr": 0.1})
    for _ in range(2):
        stepped(stored, first * (client.rank + 1))
    client.barrier()
    if client.rank == 0:
        stored.store.keep(stored.steps)
    client.barrier()
    stored.restore()
    found = stored.read()
    stored.free()
    return found


def lengths(deaths: Deaths, clients: int) -> dict[str, int]:
    """Frames and bytes of a whole session, and bytes until it has joined."""
    deaths.run(clients, 0, Moment("none", 0))
    return deaths.died[0].counts | {"hello": deaths.died[0].hello}


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("clients", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_after_each_frame_the_others_are_told_who_died(serve, monkeypatch, clients, tcp) -> None:
    service = serve(2, tcp=tcp)
    deaths = Deaths(service, monkeypatch)
    counts = lengths(deaths, clients)
    assert counts["sent"] >= 12
    before = Left.of(service)
    with recorded():
        told = 0
        for kind in ("sent", "received"):
            moments = [Moment(kind, count) for count in range(JOINED, counts[kind] + 1)]
            for dying in range(clients):
                told += attack(deaths, clients, moments, dying)
        assert told > 10 * clients * (clients - 1)
        check_left(service, before)


@pytest.mark.parametrize(
    ("devices", "tcp"),
    [
        pytest.param(2, False, id="coarse-unix"),
        pytest.param(1, True, id="dense-tcp"),
        pytest.param(2, True, id="coarse-tcp", marks=pytest.mark.deep),
        pytest.param(1, False, id="dense-unix", marks=pytest.mark.deep),
    ],
)
def test_in_an_update_the_others_are_told_who_died_and_nothing_stays(
    serve, monkeypatch, devices, tcp
) -> None:
    service = serve(url=url(devices), tcp=tcp)
    deaths = Deaths(service, monkeypatch, updates)
    right = deaths.run(2, 0, Moment("none", 0))[1]
    counts = deaths.died[0].counts
    assert counts["sent"] >= 10
    before = Left.of(service)
    with recorded():
        told = 0
        for kind in ("sent", "received"):
            moments = [Moment(kind, count) for count in range(JOINED, counts[kind] + 1)]
            for dying in range(2):
                told += attack(deaths, 2, moments, dying, right)
        assert told > 20
        check_left(service, before)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_job_beside_those_that_die_goes_on(serve, monkeypatch, tcp) -> None:
    service = serve(2, tcp=tcp)
    deaths = Deaths(service, monkeypatch)
    service.wait_idle = lambda: None  # the other job is there all the time
    counts = lengths(deaths, 2)
    rng = np.random.default_rng(3)
    print("seed 3")
    offsets = rng.integers(counts["hello"], counts["bytes"], 12)
    moments = [Moment("bytes", int(each)) for each in offsets]
    with recorded(), beside(service) as sums:
        first = sums()
        told = 0
        for number, moment in enumerate(moments):
            found = deaths.run(2, number % 2, moment)
            told += isinstance(found[1 - number % 2], ClientLostError)
        assert told > 6
        assert sums() > first


@pytest.mark.deep
@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_after_each_byte_the_others_are_told_who_died(serve, monkeypatch, tcp) -> None:
    service = serve(2, tcp=tcp)
    deaths = Deaths(service, monkeypatch)
    counts = lengths(deaths, 2)
    first, total = counts["hello"], counts["bytes"]
    rng = np.random.default_rng(4)
    print("seed 4")
    offsets = range(first, total + 1) if total < 2000 else rng.integers(first, total, 1500)
    before = Left.of(service)
    with recorded():
        told = attack(deaths, 2, [Moment("bytes", int(each)) for each in offsets])
        assert told > len(offsets) // 2
        check_left(service, before)
