"""Tensors that clients push: first come, first served can stand still, queues per client cannot."""

from __future__ import annotations

from collections import defaultdict
from unittest.mock import patch

import pytest
from hypothesis import given, settings

from nearstep.coarse import CoarsePool, Proxies
from nearstep.coarse.errors import (
    DeadlockError,
    PushedTwiceError,
    PushOrderError,
    ResetNeededError,
    RingTimeoutError,
)
from nearstep.errors import ArgumentError, BusyError, FreedBufferError
from nearstep_sim.coarse.pool_values import compare, reduced

from .conftest import URLS, random_arrays
from .programs import FIGURE_10, Program, programs

BOUND = 1 << 16
"""Of the time without progress, in device cycles."""


def pushed(pool: CoarsePool, scheduler: str, pushes, tensors, clients: int) -> Proxies:
    proxies = Proxies(pool, tensors, clients, scheduler=scheduler)
    for each in pushes:
        proxies.push(*each)
    return proxies


PAIRS = {
    f"groups={groups}-{name}": url.replace("devices=4", "devices=2").replace(
        "groups=2", f"groups={groups}"
    )
    for groups in (2, 1)
    for name, url in URLS.items()
}
LIBRARY_OF_ITS_OWN = "groups=1-sim"
"""Its Verilated library takes a minute to build, for these tests alone."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.deep] if name == LIBRARY_OF_ITS_OWN else [])
        for name in PAIRS
    ]
)
def pair(request):
    """Two devices, whose tensors have a ring each, or the same."""
    with CoarsePool.open(PAIRS[request.param]) as opened:
        yield opened


def test_first_come_first_served_stands_still_as_in_figure_10(pair) -> None:
    arrays = [random_arrays(pair, 1000, seed=seed) for seed in (1, 2)]
    tensors = [pair.tensor(each) for each in arrays]
    proxies = pushed(pair, "fcfs", FIGURE_10, tensors, 2)
    with pytest.raises(DeadlockError) as found:
        proxies.run(BOUND)
    error = found.value
    assert error.circle == (0, 1)
    assert {wait.device: dict(wait.peers) for wait in error.waits} == {
        0: {1: "with tensor 1"},
        1: {0: "with tensor 0"},
    }
    assert "device 0 has tensor 0 in work and waits for device 1 (with tensor 1)" in str(error)
    assert error.max_cycles == BOUND
    # The devices really have these jobs: neither has ended one, and each is in work.
    groups = range(pair.groups)
    assert all(n[f"sync{g}"].completed.value == 0 for n in pair.device.nodes for g in groups)
    with pytest.raises((BusyError, ResetNeededError)):
        pair.all_reduce(tensors[0])
    pair.reset()
    assert compare(tensors[0], arrays[0]) + compare(tensors[1], arrays[1]) == 4000
    assert sorted(pushed(pair, "queues", FIGURE_10, tensors, 2).run(BOUND)) == [0, 1]
    compared = 0
    for number, (tensor, each) in enumerate(zip(tensors, arrays, strict=True)):
        compared += compare(tensor, reduced(pair, each, group=number % pair.groups))
    assert compared == 4000


def test_first_come_first_served_goes_well_in_one_order(pool) -> None:
    arrays = [random_arrays(pool, 500, seed=seed) for seed in range(5)]
    tensors = [pool.tensor(each) for each in arrays]
    pushes = [(proxy, proxy, tensor) for tensor in range(5) for proxy in range(4)]
    assert pushed(pool, "fcfs", pushes, tensors, 4).run() == (0, 1, 2, 3, 4)
    compared = 0
    for number, (tensor, each) in enumerate(zip(tensors, arrays, strict=True)):
        compared += compare(tensor, reduced(pool, each, group=number % 2))
    assert compared == 5 * 2000


@pytest.mark.parametrize("scheduler", ["queues", "fcfs"])
def test_what_is_not_everywhere_is_waited_for_in_a_later_call(pool, scheduler) -> None:
    tensors = [pool.tensor(64) for _ in range(2)]
    proxies = pushed(pool, scheduler, [(0, proxy, 0) for proxy in range(3)], tensors, 2)
    assert proxies.run(BOUND) == ()
    proxies.push(1, 3, 0)
    for proxy in range(4):
        proxies.push(1, proxy, 1)
    assert sorted(proxies.run(BOUND)) == [0, 1]
    assert proxies.run(BOUND) == ()


def test_a_client_with_another_order_is_refused_at_the_push(pool) -> None:
    proxies = Proxies(pool, [pool.tensor(8) for _ in range(3)], clients=2)
    proxies.push(0, 0, 1)
    proxies.push(0, 1, 1)
    with pytest.raises(PushOrderError, match="not tensor 0 after tensor 1") as found:
        proxies.push(0, 0, 0)
    assert (found.value.client, found.value.tensor, found.value.after) == (0, 0, 1)
    with pytest.raises(PushedTwiceError):
        proxies.push(1, 0, 1)
    for proxy in range(4):
        proxies.push(1, proxy, 0)
    proxies.push(1, 2, 1)
    proxies.push(1, 3, 1)
    assert sorted(proxies.run(BOUND)) == [0, 1]


@pytest.mark.parametrize("push", [(2, 0, 0), (0, 4, 0), (0, 0, 3), (-1, 0, 0)])
def test_clients_proxies_and_tensors_that_do_not_exist(pool, push) -> None:
    proxies = Proxies(pool, [pool.tensor(8) for _ in range(3)], clients=2)
    with pytest.raises(ArgumentError, match="must be from 0"):
        proxies.push(*push)


def test_options_that_do_not_exist(pool) -> None:
    tensor = pool.tensor(8)
    for options in ({"scheduler": "lifo"}, {"op": "min"}, {"wire": "fp8"}):
        with pytest.raises(ArgumentError):
            Proxies(pool, [tensor], 1, **options)
    with pytest.raises(ArgumentError):
        Proxies(pool, [tensor], 0)
    with pytest.raises(ArgumentError):
        Proxies(pool, [tensor, tensor], 1)


def play(pool: CoarsePool, program: Program, scheduler: str) -> list[int]:
    """Tensors in the order in which they were summed, all of them right."""
    arrays = [random_arrays(pool, 20 * number, seed=number) for number in range(program.tensors)]
    tensors = [pool.tensor(each) for each in arrays]
    proxies = Proxies(pool, tensors, program.clients, scheduler=scheduler)
    ended: list[int] = []
    try:
        for number, push in enumerate(program.pushes):
            if number in program.stops:
                ended += proxies.run(BOUND)
            proxies.push(*push)
        ended += proxies.run(BOUND)
    except DeadlockError:
        pool.reset()
        raise
    else:
        for number, (tensor, each) in enumerate(zip(tensors, arrays, strict=True)):
            compare(tensor, reduced(pool, each, group=number % pool.groups))
    finally:
        for tensor in tensors:
            tensor.free()
    return ended


@pytest.fixture(scope="module")
def one_pool():
    with CoarsePool.open(URLS["golden"]) as opened:
        yield opened


@settings(max_examples=60, deadline=None)
@given(program=programs(devices=4))
def test_queues_never_stand_still_whatever_the_order_of_arrival(one_pool, program) -> None:
    rings = one_pool.rings
    with patch.object(rings, "push", wraps=rings.push) as push:
        assert sorted(play(one_pool, program, "queues")) == list(range(program.tensors))
    given_to: dict[int, list[int]] = defaultdict(list)
    for call in push.call_args_list:
        job, device = call.args
        given_to[device].append(job.tag)
    assert given_to.keys() == set(range(4))
    assert all(tags == given_to[0] for tags in given_to.values()), "one order on every device"
    assert len(set(given_to[0])) == len(given_to[0]) == program.tensors


def test_first_come_first_served_ends_or_is_detected_in_any_order(one_pool) -> None:
    """The same programs; both must be seen, or the property above says nothing."""
    outcomes = {"ended": 0, "deadlock": 0}

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(program=programs(devices=4))
    def each(program) -> None:
        try:
            ended = play(one_pool, program, "fcfs")
        except DeadlockError:
            outcomes["deadlock"] += 1
        else:
            assert sorted(ended) == list(range(program.tensors))
            outcomes["ended"] += 1

    each()
    assert outcomes["ended"] >= 3, outcomes
    assert outcomes["deadlock"] >= 3, outcomes


@pytest.mark.parametrize("scheduler", ["queues", pytest.param("fcfs", marks=pytest.mark.deep)])
def test_tensors_in_flight_at_a_timeout_are_returned_by_the_next_call(pool, scheduler) -> None:
    arrays = random_arrays(pool, 20000, seed=5)
    tensors = [pool.tensor(arrays) for _ in range(2)]
    pushes = [(0, proxy, tensor) for tensor in range(2) for proxy in range(4)]
    proxies = pushed(pool, scheduler, pushes, tensors, 1)
    with pytest.raises(RingTimeoutError):
        proxies.run(0)
    assert proxies.run() == (0, 1)
    assert proxies.run() == ()
    assert proxies.summed == [0, 1]
    compared = 0
    for number, tensor in enumerate(tensors):
        compared += compare(tensor, reduced(pool, arrays, group=number % pool.groups))
    assert compared == 2 * 80000


@pytest.mark.parametrize("scheduler", ["queues", "fcfs"])
def test_what_was_summed_before_an_error_is_known(golden_pool, scheduler) -> None:
    tensors = [golden_pool.tensor(64) for _ in range(3)]
    pushes = [(0, proxy, tensor) for tensor in range(3) for proxy in range(4)]
    proxies = pushed(golden_pool, scheduler, pushes, tensors, 1)
    tensors[2].free()
    for _ in range(2):
        with pytest.raises(FreedBufferError):
            proxies.run()
    assert sorted(proxies.summed) == [0, 1]
