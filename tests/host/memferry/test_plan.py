"""Plans as text, and budgets."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nearstep.errors import ArgumentError
from nearstep.memferry.cost import Costs, Decision, Mode
from nearstep.memferry.errors import FingerprintError, PlanBudgetError, PlanError
from nearstep.memferry.plan import allowance, check, from_json
from nearstep.memferry.planner import make
from nearstep.memferry.profile import Profile

from .profiles import at_random, choices, layer, made_of

PROFILE = made_of(
    layer("embedding", forward_dha_s=1e-3),
    layer("frozen", gradient_bytes=0, send_s=0.0, update_s=0.0, backward_write_s=None,
          backward_dha_write_s=None),
    layer("matrix", forward_dha_s=None, backward_dha_s=None, backward_dha_write_s=None),
)  # fmt: skip


DHA = ("forward_dha_s", "backward_dha_s", "backward_dha_write_s")


def table_of(**options: Any) -> dict[str, Any]:
    planned = make(PROFILE, **options)
    table = json.loads(planned.plan.to_json(planned.costs))
    assert isinstance(table, dict)
    return table


def test_a_plan_comes_back_as_it_was() -> None:
    rng = random.Random(31)
    for count in (1, 5, 12, 101):
        planned = make(at_random(rng, count), planner="greedy")
        text = planned.plan.to_json(planned.costs)
        read = from_json(text, planned.costs)
        assert read == planned.plan
        assert read.to_json(planned.costs) == text
        assert list(json.loads(text)) == sorted(json.loads(text))
        keys = list(json.loads(text)["layers"])
        assert keys == sorted(keys)
        assert len(text.splitlines()) == count + 8  # a line for each layer


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(table: dict[str, Any]) -> None:
        *inner, last = path.split("/")
        for each in inner:
            table = table[each]
        if value is None and last != "budget_bytes":
            del table[last]
        else:
            table[last] = value

    return edit


@pytest.mark.parametrize(
    ("path", "value", "layer_name", "field"),
    [
        ("layers/0 embedding/mode", "GPU", "embedding", "mode"),
        ("layers/0 embedding/mode", None, "embedding", "mode"),
        ("layers/0 embedding/mode", ["GFGB"], "embedding", "mode"),
        ("layers/0 embedding/gradients", "disk", "embedding", "gradients"),
        ("layers/0 embedding/gradients", "none", "embedding", "gradients"),
        ("layers/0 embedding/other", 1, "embedding", "other"),
        ("layers/1 frozen/gradients", "gpu", "frozen", "gradients"),
        ("layers/2 matrix/mode", "DHA", "matrix", "mode"),
        ("layers/2 matrix", None, "2 matrix", "layer"),
        ("layers/3 more", {}, "3 more", "layer"),
        ("layers", [], "", "layers"),
        ("version", 2, "", "version"),
        ("budget_bytes", -1, "", "budget_bytes"),
        ("budget_bytes", True, "", "budget_bytes"),
        ("reserve", 1.5, "", "reserve"),
        ("reserve", None, "", "reserve"),
        ("comment", "mine", "", "comment"),
    ],
)
def test_the_first_fault_of_an_edited_plan_is_named(
    path: str, value: object, layer_name: str, field: str
) -> None:
    table = table_of()
    change(path, value)(table)
    with pytest.raises(PlanError) as caught:
        from_json(json.dumps(table), Costs(PROFILE))
    assert (caught.value.layer, caught.value.field) == (layer_name, field)


def test_a_plan_that_exceeds_its_own_limits_is_refused_at_the_layer() -> None:
    table = table_of()
    for each in ("0 embedding", "2 matrix"):
        table["layers"][each] = {"mode": "GFGB", "gradients": "gpu"}
    from_json(json.dumps(table), Costs(PROFILE))
    with pytest.raises(PlanError) as caught:
        from_json(json.dumps({**table, "reserve": 0.5}), Costs(PROFILE))
    assert (caught.value.layer, caught.value.field) == ("matrix", "gradients")
    with pytest.raises(PlanError) as caught:
        from_json(json.dumps({**table, "budget_bytes": 250}), Costs(PROFILE))
    assert caught.value.field == "mode"
    assert caught.value.layer in ("frozen", "matrix")


def test_a_plan_of_a_profile_with_fewer_modes_is_refused() -> None:
    plan = from_json(json.dumps(table_of()), Costs(PROFILE))
    chosen = plan.layers["embedding"]
    other = made_of(
        *(
            replace(e, **dict.fromkeys(DHA, None)) if e.name == "embedding" else e
            for e in PROFILE.layers
        )
    )
    changed = replace(plan, layers={**plan.layers, "embedding": Decision(Mode.DHA, chosen.write)})
    check(changed, Costs(PROFILE))
    with pytest.raises(PlanError) as caught:
        check(changed, Costs(other))
    assert (caught.value.layer, caught.value.field) == ("embedding", "mode")


def test_a_name_that_stands_twice_is_refused() -> None:
    text = json.dumps(table_of()).replace('"version"', '"reserve": 1, "version"')
    with pytest.raises(PlanError, match="given twice"):
        from_json(text, Costs(PROFILE))


def test_a_plan_of_another_model_is_refused() -> None:
    planned = make(PROFILE)
    values = {**vars(PROFILE), "fingerprint": "of another"}
    with pytest.raises(FingerprintError) as caught:
        from_json(planned.plan.to_json(planned.costs), Costs(Profile(**values)))
    assert (caught.value.expected, caught.value.actual) == (
        "that of the profile, of another",
        PROFILE.fingerprint,
    )


def test_the_smallest_budget_that_is_named_works_and_no_smaller_one() -> None:
    rng, refused = random.Random(32), 0
    for _ in range(60):
        profile = at_random(rng, rng.randint(1, 9))
        costs = Costs(profile)
        sizes = costs.parameter_bytes + costs.gradient_bytes
        least = sum(
            min(int(sizes[i, each.index]) for each in choices(costs, i)) for i in range(len(costs))
        )
        if not least:
            make(profile, budget=0)
            continue
        with pytest.raises(PlanBudgetError) as caught:
            make(profile, budget=rng.randrange(least))
        assert caught.value.smallest == least
        assert caught.value.layer in [each.name for each in profile.layers]
        planned = make(profile, budget=caught.value.smallest)
        assert costs.bytes_of(planned.decisions) == least
        with pytest.raises(PlanBudgetError):
            make(profile, budget=least - 1)
        refused += 1
    assert refused > 10


def test_a_layer_larger_than_the_budget_is_named() -> None:
    with pytest.raises(PlanBudgetError) as caught:
        make(PROFILE, budget=99)
    assert (caught.value.layer, caught.value.smallest) == ("matrix", 100)
    assert make(PROFILE, budget=100).plan.layers["matrix"].write


def test_a_larger_budget_is_never_slower() -> None:
    profile = at_random(random.Random(33), 12)
    most = profile.parameter_bytes + profile.gradient_bytes
    totals = [make(profile, budget=most * share // 8).total for share in range(3, 9)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


def test_a_reserve_limits_gradients() -> None:
    layers = [layer(f"{i}") for i in range(8)]
    for reserve in (0.0, 0.25, 0.5, 1.0):
        for planner in ("greedy", "best"):
            planned = make(made_of(*layers), reserve=reserve, planner=planner)  # type: ignore[arg-type]
            kept = sum(100 for each in planned.decisions if not each.write)
            assert kept <= reserve * 800
    keep = make(made_of(*layers), decisions="keep")
    assert not any(each.write for each in keep.decisions)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": -1},
        {"budget": 1.5},
        {"budget": True},
        {"reserve": -0.1},
        {"reserve": float("nan")},
        {"planner": "fast"},
        {"decisions": "some"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        make(PROFILE, **options)


def test_a_reserve_that_cannot_be_kept_to_is_refused() -> None:
    none = {"backward_write_s": None, "backward_dha_write_s": None}
    with pytest.raises(ArgumentError, match=r"reserve must be at least 0\.5"):
        make(made_of(layer("a"), layer("b", **none)), reserve=0.4)
    assert make(made_of(layer("a"), layer("b", **none)), reserve=0.5).total > 0


def test_every_reserve_that_some_plan_keeps_to_is_planned() -> None:
    rng, kept_to, refused = random.Random(17), 0, 0
    for _ in range(60):
        layers = at_random(rng, 4).layers
        profile = made_of(
            *(replace(e, backward_dha_write_s=None) if rng.random() < 0.5 else e for e in layers)
        )
        costs, reserve = Costs(profile), rng.choice([0.0, 0.1, 0.3, rng.random()])
        least = sum(
            min(int(g) for g, can in zip(row, allowed, strict=True) if can)
            for row, allowed in zip(costs.gradient_bytes, costs.allowed, strict=True)
        )
        if least <= allowance(reserve, costs):
            check(make(profile, reserve=reserve, planner="greedy").plan, Costs(profile))
            kept_to += 1
        else:
            with pytest.raises(ArgumentError, match="reserve must be at least") as error:
                make(profile, reserve=reserve)
            share = float(re.findall(r"at least ([\d.e-]+):", str(error.value))[0])
            check(make(profile, reserve=share, planner="greedy").plan, Costs(profile))
            refused += 1
    assert min(kept_to, refused) > 5
