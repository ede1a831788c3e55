"""The cost model: a recurrence, its form in one pass, a graph of work, and bounds on all."""

import random

import numpy as np
import pytest

from nearstep.memferry import bound, tail
from nearstep.memferry.cost import DFGB, DHA, GFGB, Costs, Decision, Mode
from nearstep.memferry.exact import NO_LIMITS
from nearstep.memferry.work import GPU, Bucket, Iterations, Shared, native, once, steady
from nearstep.work.executor import execute

from .profiles import at_random, decisions_at_random, layer, made_of

MS = 10**9


def test_the_timeline_of_the_same_operations_ends_when_the_recurrence_says() -> None:
    rng, checks = random.Random(11), 0
    for _ in range(60):
        costs = Costs(at_random(rng, rng.randint(1, 16)))
        decisions = decisions_at_random(rng, costs)
        times = costs.times(decisions)
        timeline = once(costs, decisions)
        assert timeline.makespan == times.total
        ends = {entry.operation.name: entry.end for entry in timeline.entries}
        for i, each in enumerate(costs.profile.layers):
            for kind in ("load", "forward", "backward", "send", "update"):
                assert ends.get(f"{kind} {each.name}", -1) == getattr(times, kind)[i]
                checks += 1
    assert checks > 2000


def test_one_pass_over_the_layers_comes_to_the_same_time() -> None:
    rng = random.Random(12)
    for _ in range(200):
        costs = Costs(at_random(rng, rng.randint(1, 20)))
        decisions = decisions_at_random(rng, costs)
        state = tail.state_of(costs, decisions)
        assert tail.totals(state)[0] == costs.times(decisions).total
        assert state[0, tail.BYTES] == costs.bytes_of(decisions)


def test_a_bound_is_above_no_iteration_that_goes_on_from_a_state() -> None:
    rng, checks = random.Random(13), 0
    for number in range(25):
        costs = Costs(at_random(rng, rng.randint(1, 12)))
        first = decisions_at_random(rng, costs)
        budget = costs.bytes_of(first) if number % 2 else 1 << 62
        limits, plan = bound.Limits(budget, 1 << 62), np.array([[each.index for each in first]])
        (found,), _ = bound.bounds(costs, limits, plan, 16, decided=number % len(costs))
        for _ in range(10):
            decisions = decisions_at_random(rng, costs)
            if costs.bytes_of(decisions) > budget:
                decisions = first
            total, state = costs.times(decisions).total, tail.start(costs)
            for i, decision in enumerate(decisions):
                assert found.of(state, i)[0] <= total * found.paths
                state = tail.extend(costs, state, i, decision.index)
                checks += 1
    assert checks > 1000


def test_the_longest_path_is_the_iteration_unless_a_layer_waits_for_its_own_forward() -> None:
    rng, exact, lanes = random.Random(15), 0, set()
    for _ in range(60):
        costs = Costs(at_random(rng, rng.randint(1, 12)))
        plans = [decisions_at_random(rng, costs) for _ in range(40)]
        columns = np.array([[each.index for each in plan] for plan in plans])
        paths, lengths = bound.longest(costs, columns)
        table = bound.coefficients(costs, paths)
        for i, plan in enumerate(plans):
            total = costs.times(plan).total
            length = table[i, range(len(costs)), columns[i]].sum()
            length += costs.update.sum() * (paths[i, 1] < 0)
            assert length == lengths[i] <= total
            exact += lengths[i] == total
            lanes.add((*(paths[i] >= 0).tolist(), bool(paths[i, 3] < len(costs))))
    assert exact > 1500
    assert len(lanes) > 5


def test_a_bound_of_one_path_is_the_iteration_whatever_is_decided_if_there_is_one_plan() -> None:
    rng, checks = random.Random(18), 0
    for _ in range(60):
        costs = Costs(at_random(rng, rng.randint(1, 12)))
        plan = decisions_at_random(rng, costs)
        columns = np.array([[each.index for each in plan]])
        costs.allowed[:] = np.arange(6) == columns[0][:, None]
        _, lengths = bound.longest(costs, columns)
        (found,), _ = bound.bounds(costs, NO_LIMITS, columns, 1)
        states = tail.start(costs)
        for i, decision in enumerate([*plan, None]):
            assert found.of(states, i)[0] + found.paths + len(found.rest) == lengths[0]
            checks += 1
            if decision is not None:
                states = tail.extend(costs, states, i, decision.index)
    assert checks > 300


def test_two_layers_as_in_figure_4() -> None:
    """All on the GPU it waits for the first load; by DHA the second one is hidden."""
    two = Costs(made_of(layer("one"), layer("two", load_s=3e-3)))
    on_gpu, hybrid = (two.times(each) for each in ([GFGB, GFGB], [DHA, GFGB]))
    assert on_gpu.forward == [5 * MS, 8 * MS]
    assert hybrid.forward == [3 * MS, 4 * MS]
    assert hybrid.load == [-1, 3 * MS]


def test_three_layers_as_in_figure_6() -> None:
    """DHA, DFGB, GFGB: the second one is loaded after the third, and after its own forward."""
    three = Costs(made_of(layer("one"), layer("two"), layer("three")))
    times = three.times([DHA, DFGB, GFGB])
    assert times.forward == [3 * MS, 6 * MS, 7 * MS]
    assert times.load == [-1, 10 * MS, 4 * MS]
    assert times.backward == [15 * MS, 12 * MS, 9 * MS]
    assert times.send == [21 * MS, 17 * MS, 13 * MS]
    assert times.total == 22 * MS


def test_what_a_layer_cannot_do_is_not_allowed() -> None:
    costs = Costs(
        made_of(
            layer("no dha", forward_dha_s=None, backward_dha_s=None, backward_dha_write_s=None),
            layer("frozen", gradient_bytes=0, send_s=0.0, update_s=0.0, backward_write_s=None,
                  backward_dha_write_s=None),
            layer("empty", parameter_bytes=0),
        )
    )  # fmt: skip
    can = [[DECISION for DECISION in range(6) if row[DECISION]] for row in costs.allowed]
    assert can == [[0, 1], [0, 2, 4], [2, 3]]
    assert native(costs) == (GFGB, GFGB, DHA)


def test_several_iterations_overlap_updates_with_loads() -> None:
    costs = Costs(made_of(layer("one"), layer("two")))
    alone = once(costs, native(costs), "all-gradients").makespan / 1e12
    among = steady(Iterations(costs, native(costs), updates="all-gradients"))
    assert among.seconds == pytest.approx(alone - 1e-3)  # the update of the second layer
    assert 0 < among.busy < 1


def test_a_bucket_is_sent_when_it_is_full_and_after_backward() -> None:
    """Three layers of 100 bytes and 4 ms, whose backward takes 2 ms each."""
    costs = Costs(made_of(layer("one"), layer("two"), layer("three")))

    def ends(nbytes: int, *, beside: bool = False) -> list[int]:
        bucket = Bucket(nbytes=nbytes, beside=beside)
        found = once(costs, [DHA] * 3, "all-gradients", bucket)
        names = [
            f"{kind} {name}" for kind in ("backward", "send") for name in ("three", "two", "one")
        ]
        at = {each.operation.name: each.end // MS for each in found.entries}
        return [at[name] for name in names]

    begun = 9  # forward
    assert ends(300) == [begun + each for each in (3, 6, 9, 13, 17, 21)]
    assert ends(200) == [begun + each for each in (3, 6, 9, 13, 17, 21)]
    assert ends(100) == [begun + each for each in (3, 6, 13, 10, 17, 21)]
    assert ends(99) == ends(100)
    assert ends(100, beside=True) == [begun + each for each in (3, 6, 9, 10, 14, 18)]
    rng = random.Random(16)
    for _ in range(30):
        costs = Costs(at_random(rng, rng.randint(1, 12)))
        plan = native(costs)
        full, none = (
            once(costs, plan, "all-gradients", bucket).makespan
            for bucket in (Bucket(nbytes=1 << 50), None)
        )
        times = costs.times(plan)
        sent = [int(costs.send[i]) for i in range(len(costs)) if costs.trained[i]]
        updates = int(costs.update[costs.trained].sum())
        last = times.backward[0] + int(costs.before_backward[0])
        assert full == last + sum(sent) + updates >= none


def test_a_shared_link_makes_nothing_faster() -> None:
    rng = random.Random(14)
    longer = 0
    for _ in range(10):
        layers = [
            layer(f"{i}", load_s=n / 1e5, send_s=n / 1e5, parameter_bytes=n, gradient_bytes=n,
                  forward_dha_s=1e-3 + n / 1e5)
            for i, n in enumerate(rng.sample(range(100, 400), 5))
        ]  # fmt: skip
        costs = Costs(made_of(*layers))
        decisions = [GFGB, DHA, DFGB, DHA, GFGB]
        link = Shared(down_bytes_per_s=1e5, up_bytes_per_s=1e5)
        iterations = Iterations(costs, decisions, shared=link)
        iterations.add()
        shared = execute(iterations.graph)
        assert shared.makespan >= costs.times(decisions).total - 100
        longer += shared.makespan > costs.times(decisions).total + 100
        assert shared.busy(GPU) > 0
    assert longer == 10


def test_decisions_have_places_of_their_own() -> None:
    places = {Decision(mode, write).index for mode in Mode for write in (False, True)}
    assert places == set(np.arange(6).tolist())
