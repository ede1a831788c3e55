"""Algorithm 1 and its readings, DFGB layers, and gradients."""

import itertools
import random

import numpy as np
import pytest

from nearstep.memferry.bound import Limits
from nearstep.memferry.cost import DHA, GFGB, Costs, Decision, Mode
from nearstep.memferry.exact import NO_LIMITS
from nearstep.memferry.forward import READINGS, Reading, hosted
from nearstep.memferry.gradients import write_back
from nearstep.memferry.greedy import greedy, load_late
from nearstep.memferry.planner import make

from .profiles import at_random, bytes_between, fewest_bytes, layer, made_of

PRINTED = Reading()


def test_a_layer_that_is_faster_by_dha_than_with_its_load_is_computed_so() -> None:
    costs = Costs(made_of(layer("a"), layer("b", forward_dha_s=6e-3)))
    assert hosted(costs, PRINTED) == [True, False]


def test_backtracking_turns_an_earlier_layer_when_a_load_is_not_hidden() -> None:
    costs = Costs(
        made_of(
            layer("hides", forward_s=9e-3, forward_dha_s=9e-3),
            layer("turned", load_s=1e-3, forward_dha_s=3e-3),
            layer("large", load_s=20e-3, forward_dha_s=60e-3),
        )
    )
    assert hosted(costs, PRINTED) == [True, True, False]
    small = Costs(made_of(*costs.profile.layers[:2], layer("z", load_s=1e-3, forward_dha_s=3e-3)))
    assert hosted(small, PRINTED) == [True, False, False]


def test_readings_differ_where_they_say() -> None:
    """A load that is hidden anyway is no reason for DHA if only the exposed part counts."""
    costs = Costs(made_of(layer("first", forward_s=9e-3, forward_dha_s=9e-3), layer("hidden")))
    assert hosted(costs, PRINTED) == [True, True]
    assert hosted(costs, Reading(criterion="exposed-load")) == [True, False]
    rng, different = random.Random(21), {str(each): 0 for each in READINGS[1:]}
    for _ in range(60):
        costs = Costs(at_random(rng, 20))
        base = hosted(costs, Reading(criterion="exposed-load"))
        for each in READINGS[1:]:
            different[str(each)] += hosted(costs, each) != base
    assert different["exposed-load, transfer-only, as-printed"] > 0
    assert different["exposed-load, line-21, accumulated"] > 0
    assert len(READINGS) == len(set(READINGS)) == 8


def test_dfgb_layers_fit_between_the_last_load_and_the_first_gradient() -> None:
    rng, chosen = random.Random(22), 0
    for _ in range(60):
        costs = Costs(at_random(rng, 12))
        modes = [Mode.DHA if each else Mode.GFGB for each in hosted(costs, PRINTED)]
        before = costs.times([Decision(each) for each in modes])
        after = load_late(costs, modes)
        times = costs.times([Decision(each) for each in after])
        trained = np.flatnonzero(costs.trained)
        first = before.backward[trained[-1]] if len(trained) else before.total
        for i, mode in enumerate(after):
            if mode is Mode.DFGB:
                assert max(before.load) <= times.load[i] - costs.load[i]
                assert times.load[i] <= first
                chosen += 1
    assert chosen > 20


def test_gradients_that_are_kept_save_the_most_time() -> None:
    rng, checks = random.Random(23), 0
    for _ in range(60):
        costs = Costs(at_random(rng, 8))
        modes = [each.mode for each in fewest_bytes(costs)]
        limit = rng.randint(0, costs.profile.gradient_bytes)
        found = write_back(costs, [Decision(mode) for mode in modes], limit)
        options = [
            [Decision(m, w) for w in (False, True) if costs.allowed[i, Decision(m, w).index]]
            for i, m in enumerate(modes)
        ]
        rows = range(len(costs))

        def gradients(plan: object) -> int:
            return int(costs.gradient_bytes[rows, [d.index for d in plan]].sum())  # type: ignore[attr-defined]  # noqa: B023

        def backward(plan: object) -> int:
            return int(costs.backward[rows, [d.index for d in plan]].sum())  # type: ignore[attr-defined]  # noqa: B023

        within = [p for p in itertools.product(*options) if gradients(p) <= limit]
        if within:
            assert gradients(found) <= limit
            assert backward(found) == min(map(backward, within))
            checks += 1
    assert checks > 40


def test_greedy_plans_keep_to_their_limits() -> None:
    rng, plans = random.Random(24), 0
    for _ in range(60):
        costs = Costs(at_random(rng, 10))
        limits = Limits(bytes_between(costs, rng.random()), NO_LIMITS.kept)
        found = greedy(costs, limits, PRINTED)
        if found is not None:
            assert costs.bytes_of(found) <= limits.budget
            plans += 1
    assert plans > 50


@pytest.mark.parametrize("count", [1, 7, 30])
def test_the_default_is_no_slower_than_any_greedy_plan(count: int) -> None:
    planned = make(at_random(random.Random(count), count))
    totals = [each for each in planned.readings.values() if each is not None]
    assert len(totals) == len(READINGS)
    assert planned.least is not None
    assert planned.least <= planned.total <= min(totals)


def test_layers_without_dha_are_loaded() -> None:
    none = {"forward_dha_s": None, "backward_dha_s": None, "backward_dha_write_s": None}
    costs = Costs(made_of(layer("a", **none), layer("b", load_s=50e-3, **none)))
    for reading in READINGS:
        assert hosted(costs, reading) == [False, False]
        assert greedy(costs, NO_LIMITS, reading) == [GFGB, GFGB]
    assert DHA not in make(costs.profile).decisions
