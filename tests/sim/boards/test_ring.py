"""Boards with COARSE devices, Verilated, each with a clock of its own: sums over serial lines and
pins bit for bit, with damage on the pins, and a cable that is pulled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import nearstep
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import PoolAbortedError, SilentLinkError
from nearstep.errors import ArgumentError, ClosedDeviceError, MismatchError
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.boards.ring import RingBackend, SimulatedRing
from nearstep_sim.coarse.pool_values import Floats, compare, draw, reduced
from nearstep_spec.boards.coarse_board import CLOCK_BAUD
from nearstep_spec.coarse.lanes import TRANSFERS

URL = "sim:board?design=coarse&baud=6250000"
PPM = 200
SMALL = 70


@contextmanager
def pair(options: str = "") -> Iterator[tuple[CoarsePool, SimulatedRing]]:
    with CoarsePool.open(f"{URL}{options}") as pool:
        assert isinstance(pool.device.backend, RingBackend)
        yield pool, pool.device.backend.ring


def values(pool: CoarsePool, elements: int, seed: int) -> list[Floats]:
    print(f"seed {seed}")
    return draw(pool, elements, np.random.default_rng(seed))


def check_sum(pool: CoarsePool, elements: int, seed: int) -> int:
    """Sum over all boards, and compare; how many elements were compared."""
    arrays = values(pool, elements, seed)
    tensor = pool.tensor(arrays)
    pool.all_reduce(tensor)
    compared = compare(tensor, reduced(pool, arrays))
    tensor.free()
    return compared


def replays(pool: CoarsePool) -> int:
    return sum(link.replays for each in pool.counters().devices for link in each.links)


@pytest.mark.deep  # a build of its own, 28 s
def test_two_boards_sum_to_the_bits_of_golden_also_when_their_pins_are_damaged() -> None:
    with pair() as (pool, ring):
        assert check_sum(pool, SMALL, seed=1) == 2 * SMALL
        assert replays(pool) == 0
        counts = [ring.counts(0, direction) for direction in (0, 1)]
        assert min(each.transfers for each in counts) > 3 * TRANSFERS
        assert [each.hit for each in counts] == [0, 0]
        # A slower clock has had fewer edges.
        slower = 1 - ring.cycle(1) / ring.cycle(0)
        assert slower == pytest.approx(PPM / 1e6, rel=0.05)

        # For as long as two full frames take, at once: entries have to be sent again.
        ring.corrupt(0, 0, after=5 * TRANSFERS, times=40 * TRANSFERS)
        assert check_sum(pool, SMALL, seed=2) == 2 * SMALL
        assert ring.counts(0, 0).hit > TRANSFERS
        assert pool.counters().devices[1].links[0].bad_frames > 0
        for link, direction in ((1, 0), (0, 2)):
            with pytest.raises(ArgumentError, match=str(max(link, direction))):
                ring.counts(link, direction)
    with pytest.raises(ClosedDeviceError):
        ring.cycle(0)


@pytest.mark.deep
def test_boards_as_they_ship_sum_and_are_reset() -> None:
    """With the rate of their own line, which others here have not."""
    with CoarsePool.open("sim:board?design=coarse") as pool:
        assert isinstance(pool.device.backend, RingBackend)
        assert pool.device.backend.ring.config.link_baud == CLOCK_BAUD
        assert check_sum(pool, SMALL, seed=11) == 2 * SMALL
        arrays = values(pool, SMALL, seed=12)
        tensor = pool.tensor(arrays)
        event = pool.submit(tensor)
        pool.device.reset()
        pool.reset()
        assert not event.done
        with pytest.raises(PoolAbortedError):
            event.wait()
        assert check_sum(pool, SMALL, seed=13) == 2 * SMALL
        assert replays(pool) == 0


@pytest.mark.deep
def test_a_large_sum_comes_through_pins_that_are_damaged_all_the_time() -> None:
    with pair("&corrupt=0.001&seed=3") as (pool, ring):
        assert check_sum(pool, 3000, seed=3) == 6000
        assert replays(pool) > 3
        hit = [ring.counts(0, direction).hit for direction in (0, 1)]
        print(f"{hit} transfers hit, {replays(pool)} times sent again")
        assert min(hit) > 10


@pytest.mark.deep
@pytest.mark.parametrize("ppm", [0, 500, 10_000])
def test_any_difference_of_the_oscillators_gives_the_same(ppm: int) -> None:
    with pair(f"&ppm={ppm}") as (pool, _):
        assert check_sum(pool, 777, seed=4) == 2 * 777
        assert replays(pool) == 0


@pytest.mark.deep
def test_three_boards_are_a_ring() -> None:
    with pair("&devices=3&corrupt=0.003") as (pool, ring):
        assert ring.links == 3
        assert check_sum(pool, 500, seed=5) == 1500
        assert min(ring.counts(link, 0).transfers for link in range(3)) > 10 * TRANSFERS


@pytest.mark.deep
def test_a_cable_that_is_pulled_is_an_error_in_time_and_the_boards_are_usable_again() -> None:
    with pair() as (pool, ring):
        arrays = values(pool, 500, seed=6)
        tensor = pool.tensor(arrays)
        errors = 0
        for under_way in (False, True):
            begun = ring.cycle(0)
            if under_way:
                event = pool.submit(tensor)
                ring.pull(0)
            else:
                ring.pull(0)
                event = pool.submit(tensor)
            with pytest.raises(SilentLinkError, match="device 0 heard nothing from device 1"):
                event.wait()
            assert ring.cycle(0) - begun < 1 << 19
            assert compare(tensor, arrays) == 1000
            ring.plug(0)
            if under_way:
                pool.device.reset()
            pool.reset()
            errors += 1
            assert check_sum(pool, 500, seed=7 + errors) == 1000
        assert errors == 2


@pytest.mark.deep
def test_two_rings_of_each_board_and_two_jobs_at_once() -> None:
    """Both groups of a device share the pins."""
    with pair("&groups=2") as (pool, _):
        tensors, arrays = [], []
        for seed in (9, 10):
            arrays.append(values(pool, 200, seed))
            tensors.append(pool.tensor(arrays[-1]))
        events = [pool.submit(each, group=group) for group, each in enumerate(tensors)]
        checks = 0
        for group, (event, tensor, local) in enumerate(zip(events, tensors, arrays, strict=True)):
            event.wait()
            checks += compare(tensor, reduced(pool, local, group=group))
        assert checks == 800


@pytest.mark.deep  # the ring is built first
def test_another_driver_is_refused() -> None:
    with pytest.raises(MismatchError, match="SmartssdDevice"):
        nearstep.open(URL, SmartssdDevice)
