"""The exact planner against all plans there are."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearstep.errors import ArgumentError
from nearstep.memferry import exact, tail
from nearstep.memferry.bound import Limits
from nearstep.memferry.cost import Costs, Decision
from nearstep.memferry.exact import NO_LIMITS, optimum
from nearstep.memferry.plan import from_json
from nearstep.memferry.planner import make
from nearstep.memferry.profile import from_json as profile_from_json

from .profiles import at_random, bytes_between, choices, fewest_bytes, slowed, tied_at_random

checked = {"profiles": 0, "few": 0, "open": 0, "tied": 0}


def all_states(costs: Costs) -> np.ndarray:
    """After every possible sequence of decisions."""
    states = tail.start(costs)
    for i in range(len(costs)):
        states = np.concatenate(
            [tail.extend(costs, states, i, each.index) for each in choices(costs, i)]
        )
    return states


def exhaustive(costs: Costs, limits: Limits) -> int:
    states = all_states(costs)
    within = (states[:, [tail.BYTES, tail.KEPT]] <= limits).all(1)
    return int(tail.totals(states[within]).min())


def narrowed(rng: random.Random, costs: Costs, most: int) -> None:
    """Take decisions away at random until there are no more than so many plans."""
    while np.prod(costs.allowed.sum(1).astype(float)) > most:
        place = rng.randrange(len(costs))
        if len(choices(costs, place)) > 1:
            costs.allowed[place, rng.choice(choices(costs, place)).index] = False


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32),
    st.integers(1, 10),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1),
)
def test_it_finds_what_exhaustive_search_finds(
    seed: int, count: int, budget: float | None, reserve: float | None
) -> None:
    rng = random.Random(seed)
    costs = Costs(at_random(rng, count))
    narrowed(rng, costs, 60_000)
    known = fewest_bytes(costs)
    limits = NO_LIMITS
    if budget is not None:
        limits = limits._replace(budget=bytes_between(costs, budget))
    if reserve is not None:
        least = int(tail.state_of(costs, known)[0, tail.KEPT])
        limits = limits._replace(kept=max(least, int(reserve * costs.profile.gradient_bytes)))
    found = optimum(costs, limits, known)
    assert found.proven
    assert found.total == exhaustive(costs, limits)
    assert costs.times(found.decisions).total == found.total
    state = tail.state_of(costs, found.decisions)
    assert (state[0, [tail.BYTES, tail.KEPT]] <= limits).all()
    checked["profiles"] += 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(4, 10), st.floats(0, 1), st.integers(1, 6))
def test_no_plan_is_below_what_a_search_with_few_states_says(
    seed: int, count: int, budget: float, most: int
) -> None:
    rng = random.Random(seed)
    costs = Costs(at_random(rng, count))
    narrowed(rng, costs, 60_000)
    limits = NO_LIMITS._replace(budget=bytes_between(costs, budget))
    found = optimum(costs, limits, fewest_bytes(costs), rounds=2, most_states=most)
    assert found.least <= exhaustive(costs, limits) <= found.total
    assert found.total == costs.times(found.decisions).total
    checked["few"] += 1
    checked["open"] += not found.proven


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(3, 7), st.none() | st.floats(0, 1), st.data())
def test_any_number_of_layers_may_be_tied_to_one_parameter(
    seed: int, count: int, budget: float | None, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    tied = data.draw(st.integers(3, count))
    profile = tied_at_random(rng, count, tied)
    costs = Costs(profile)
    limit = None if budget is None else bytes_between(costs, budget)
    limits = NO_LIMITS if limit is None else NO_LIMITS._replace(budget=limit)
    best = exhaustive(costs, limits)
    planned = make(profile, budget=limit, planner="exact")
    assert planned.total == planned.least == best
    assert from_json(planned.plan.to_json(costs), costs) == planned.plan
    assert all(total is None or total >= best for total in planned.readings.values())
    assert profile_from_json(profile.to_json()) == profile
    checked["tied"] += 1


def test_the_longest_times_that_are_allowed_are_compared_without_overflow() -> None:
    rng, checks = random.Random(17), 0
    for _ in range(8):
        profile = at_random(rng, 6)
        costs = Costs(slowed(profile, 7.9e15 / Costs(profile).horizon))
        found = optimum(costs, NO_LIMITS, fewest_bytes(costs))
        assert found.total == found.least == exhaustive(costs, NO_LIMITS)
        checks += costs.horizon > 7.8e15
    assert checks == 8
    with pytest.raises(ArgumentError, match="8000 s"):
        Costs(slowed(profile, 8.1e15 / Costs(profile).horizon))


def test_enough_profiles_were_searched() -> None:
    assert checked["profiles"] >= 80
    assert checked["few"] >= 40
    assert checked["tied"] >= 40
    assert checked["open"] >= 5


def test_rows_that_no_row_before_is_below_are_found_in_order() -> None:
    rng, checks = random.Random(6), 0
    for _ in range(60):
        count, columns = rng.randint(0, 900), rng.randint(1, 4)
        keys = np.array([[rng.randint(0, 30) for _ in range(columns)] for _ in range(count)])
        keys = keys.reshape(count, columns)
        most = rng.choice([1, 7, 300, 1000])
        expected: list[int] = []
        seen = count
        for i, row in enumerate(keys):
            if not any((keys[j] <= row).all() for j in expected):
                expected.append(i)
            if len(expected) == most:
                seen = i + 1
                break
        found = exact._undominated(keys, most)
        assert found[0].tolist() == expected
        assert found[1] == seen or len(expected) < most
        checks += seen < count
    assert checks > 5


def test_the_reference_goes_through_every_plan() -> None:
    """What stands for exhaustive search above is it, by the recurrence."""
    costs = Costs(at_random(random.Random(5), 4))
    plans = [*itertools.product(*(choices(costs, i) for i in range(4)))]
    by_recurrence = sorted(costs.times(plan).total for plan in plans)
    assert sorted(tail.totals(all_states(costs)).tolist()) == by_recurrence
    assert len(plans) > 100


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(6))
def test_ten_layers_with_every_decision(seed: int) -> None:
    costs = Costs(at_random(random.Random(seed), 10))
    narrowed(random.Random(seed), costs, 4_000_000)
    found = optimum(costs, NO_LIMITS, fewest_bytes(costs))
    assert found.proven
    assert found.total == exhaustive(costs, NO_LIMITS)


def test_a_search_that_may_not_keep_enough_proves_less_and_says_so() -> None:
    costs = Costs(at_random(random.Random(3), 24))
    limits = NO_LIMITS._replace(budget=bytes_between(costs, 0.5))
    found = optimum(costs, limits, fewest_bytes(costs), rounds=4, most_states=1)
    best = optimum(costs, limits, fewest_bytes(costs))
    assert found.least <= best.least <= best.total <= found.total
    assert costs.bytes_of(found.decisions) <= limits.budget
    assert isinstance(found.decisions[0], Decision)
