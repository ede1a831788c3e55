"""Policy memferry: the same bits under any plan, within the budget, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import nearstep
from nearstep.errors import ArgumentError
from nearstep.memferry.cost import DECISIONS, Costs, Decision, Mode
from nearstep.memferry.errors import FingerprintError, PlanBudgetError, PlanError
from nearstep.memferry.plan import from_json
from nearstep.memferry.profile import Profile
from nearstep.torch.memferry import Profiling, model_fingerprint, profile
from nearstep.torch.offload import Engine
from nearstep.torch.offload.errors import BudgetError
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.load import load

from . import training
from .models import KINDS, WIDTH, Unlucky
from .plans import drawn, everywhere, places
from .test_equality import random_plans
from .training import (
    COMPUTE,
    CPU,
    HOST,
    Plan,
    alike,
    assert_all_equal,
    assert_equal,
    bits,
    budget_of,
    made,
    train,
    train_in_least,
)

RULES = "rules=adam,sgd,sgd_momentum,adagrad"
ONE = f"golden:axdimm?memory_bytes=2MiB&{RULES}"
TWO = f"golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB&{RULES}"
RTL = "sim:axdimm?memory=ideal"
SEED = 60413
ON_GPU, DIRECT, LATER = (Decision(mode) for mode in Mode)

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


# Bits


def check_random_plans(count: int, seed: int) -> None:
    print(f"seed {seed}")
    choose = random.Random(seed)
    checked = 0
    for number, (plan, share, _) in enumerate(random_plans(count, seed)):
        plan = replace(plan, device=(ONE, TWO, HOST if COMPUTE.type == "cpu" else ONE)[number % 3])
        plain = train(plan)
        options: dict[str, Any] = {"policy": "memferry", "plan": drawn(made(plan)[0], choose)}
        least = train_in_least(plan, **options)
        timed = train_in_least(plan, platform="axdimm", **options)
        more = max(int(max(budget_of(least), budget_of(timed)) * share), 1)
        found = [least, timed, train(plan, budget=more, **options)]
        if plan.passes == 1 and not plan.keeps:
            options["updates"] = "in-backward"
            found.append(train(plan, budget=more, **options))
            found.append(train(plan, budget=more, platform="axdimm", **options))
        checked += assert_all_equal(found, plain, plan)
    assert checked >= 3 * count


def test_random_trainings_under_random_plans() -> None:
    check_random_plans(3, SEED)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10))
def test_many_random_trainings_under_random_plans(seed: int) -> None:
    check_random_plans(25, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_with_everything_in_place_nothing_is_on_the_compute_device(kind: str) -> None:
    if COMPUTE.type != "cpu":
        pytest.skip("an accelerator makes gradients in its own memory")
    plan = Plan(kind=kind, device=ONE)
    found = train(
        plan, budget=1, policy="memferry", plan=everywhere(plan, Decision(Mode.DHA, write=True))
    )
    assert_equal(found, train(plan))
    assert found.report is not None
    assert found.report.peak == found.report.fetches == found.report.prefetches == 0


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["stack", "tied", "reentrant"])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_in_the_time_of_the_rtl(kind: str, updates: str) -> None:
    choose = random.Random(SEED)
    plan = Plan(kind=kind, device=RTL)
    found = drawn(made(plan)[0], choose)
    options: dict[str, Any] = {"policy": "memferry", "plan": found, "updates": updates}
    assert_equal(train_in_least(plan, platform="axdimm", **options), train(plan))


# What is where

COUNT = 6
LAYER = 4 * WIDTH * WIDTH


stack = partial(training.stack, COUNT, bias=False, device=ONE, on=CPU)
step = partial(training.step, seed=3, rows=64)


def opened(
    decision: Decision, room: int, *, updates: Any = "at-step", device: str = ONE
) -> tuple[nn.Sequential, Any, Engine]:
    model, optimizer = stack(device=device)
    plan = places(model, {str(i): decision for i in range(COUNT)})
    engine = nearstep.offload(
        model, optimizer, budget=room * LAYER, policy="memferry", plan=plan, updates=updates
    )
    return model, optimizer, engine


@pytest.mark.parametrize(
    ("decision", "fetched", "peak"),
    [
        (ON_GPU, COUNT, COUNT + 1),
        (LATER, COUNT - 1, COUNT + 1),  # backward has no use for the first layer, which has a place
        (DIRECT, 0, 1),
        (Decision(Mode.GFGB, write=True), COUNT, COUNT),
        (Decision(Mode.DFGB, write=True), COUNT - 1, COUNT),
        (Decision(Mode.DHA, write=True), 0, 0),
    ],
)
def test_a_mode_fetches_and_takes_what_it_says(decision: Decision, fetched: int, peak: int) -> None:
    model, optimizer, engine = opened(decision, 2 * COUNT)
    step(model, optimizer)
    before = engine.report()
    step(model, optimizer)
    after = engine.report()
    assert after.fetches + after.prefetches - before.fetches - before.prefetches == fetched
    assert after.peak == peak * LAYER
    assert after.peak_gradients == (0 if decision.write else LAYER)
    engine.close()
    assert all(type(each) is nn.Parameter for each in model.parameters())


def test_a_dfgb_layer_is_not_fetched_without_backward() -> None:
    model, _, engine = opened(LATER, 2)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert engine.report().fetches + engine.report().prefetches == 0
    model(torch.ones(2, WIDTH)).sum().backward()
    assert engine.report().fetches >= 1
    assert engine.report().peak <= 2 * LAYER
    engine.close()


@pytest.mark.parametrize("decision", [DIRECT, LATER])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_forward_finds_what_it_reads_in_place_there_after_a_step(
    decision: Decision, updates: str
) -> None:
    model, optimizer, engine = opened(decision, 2, updates=updates)
    step(model, optimizer)
    before = engine.report().parameters_up
    with torch.no_grad():
        model[:-1](torch.ones(2, WIDTH))  # with the last one others come for backward
    assert engine.report().parameters_up == before > 0
    engine.close()


def test_what_is_in_place_stays_at_its_address() -> None:
    model, optimizer, engine = opened(DIRECT, 2)
    seen = set()
    for _ in range(4):
        step(model, optimizer)
        seen.add(tuple(copy.storage.data_ptr() for copy in engine._space.copies))
    engine.close()
    assert len(seen) == 1
    assert {each.data_ptr() for each in model.parameters()} == set(next(iter(seen)))


def test_an_exception_in_forward_changes_nothing() -> None:
    def use(model, optimizer, _):
        step(model, optimizer)
        unlucky = Unlucky()
        unlucky.where = "forward"
        with pytest.raises(OSError, match="user's program"):
            nn.Sequential(*model[:4], unlucky, *model[4:])(torch.ones(2, WIDTH))
        return step(model, optimizer)

    plan = places(stack()[0], {str(i): DECISIONS[i] for i in range(COUNT)})
    alike(use, stack, budget=3 * LAYER, policy="memferry", plan=plan)


def profile_of(model: nn.Module) -> Profile:
    x = torch.randn(512, WIDTH)
    return profile(
        model, lambda: model(x).square().mean().backward(), platform="memferry-a100", gpu="gpu0"
    )


def test_a_plan_is_made_for_a_profile_and_anew_for_another_budget() -> None:
    plain, plain_optimizer = stack()
    model, optimizer = stack()
    found = profile_of(model)
    plans = []
    for room in (2, 30):
        engine = nearstep.offload(
            model, optimizer, budget=room * LAYER, policy="memferry", profile=found
        )
        assert engine.plan is not None
        assert engine.plan.budget_bytes == room * LAYER
        plans.append(engine.plan)
        text = engine.plan.to_json(Costs(found))
        assert from_json(text, Costs(found)) == engine.plan
        for _ in range(2):
            step(model, optimizer)
            step(plain, plain_optimizer)
        assert bits(model.state_dict()) == bits(plain.state_dict())
        assert engine.report().peak <= room * LAYER
        engine.close()
    assert plans[0].layers != plans[1].layers
    fresh, fresh_optimizer = stack()
    with nearstep.offload(
        fresh, fresh_optimizer, budget=2 * LAYER, policy="memferry", plan=plans[0], profile=found
    ):
        fresh.load_state_dict(model.state_dict())
        assert bits(fresh.state_dict()) == bits(plain.state_dict())
    assert bits(fresh.state_dict()) == bits(plain.state_dict())


def test_a_model_that_was_made_on_the_device_is_trained_by_a_plan() -> None:
    plain, plain_optimizer = stack()
    plan = places(plain, {str(i): DECISIONS[i] for i in range(COUNT)})
    torch.manual_seed(training.SEED)
    with nearstep.offload.init(ONE) as init:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=init.device)
    with nearstep.offload(
        model, optimizer, budget=3 * LAYER, policy="memferry", plan=plan
    ) as engine:
        for _ in range(2):
            step(model, optimizer)
            step(plain, plain_optimizer)
        assert bits(model.state_dict()) == bits(plain.state_dict())
        assert 0 < engine.report().peak <= 3 * LAYER


# Time


def recorded(decision: Decision, room: int, rows: int, device: str = ONE) -> Timeline:
    model, optimizer, engine = opened(decision, room, device=device)
    step(model, optimizer, rows=rows)
    with engine.record("axdimm") as recording:
        step(model, optimizer, rows=rows)
    engine.close()
    return recording.timeline


@pytest.mark.parametrize("rows", [8, 20000])
def test_direct_access_computes_at_the_rate_of_the_link_if_that_is_slower(rows: int) -> None:
    machine = load("axdimm")
    timeline = recorded(Decision(Mode.DHA, write=True), 1, rows)
    entries = {}
    for entry in timeline.entries:
        entries.setdefault(entry.operation.name, []).append(entry)
    route = machine.route(f"{next(iter(machine.dimms))}.0", "gpu")
    slowest = min(hop.bytes_per_s for hop in route)
    latency = sum(hop.latency_s for hop in route)
    link = round((LAYER / slowest + latency) * 1e12)
    forward = [entries[f"forward {i}"][0] for i in range(COUNT)]
    reads = [entries[f"fetch {i}.weight in place"][0] for i in range(COUNT)]
    checked = 0
    for i in range(COUNT):
        assert reads[i].start == forward[i].start
        assert abs(reads[i].duration - link) <= 2
        assert {"bus", "channel 0"} <= set(reads[i].operation.holds)
        checked += 1
    for i in range(COUNT - 1):
        longest = max(forward[i].duration, reads[i].duration)
        assert forward[i + 1].start - forward[i].start == longest
        checked += 1
    slower = forward[0].duration < link
    assert slower == (rows == 8)
    for i in range(2, COUNT):  # backward has no use for the first one
        assert len(entries[f"fetch {i}.weight in place"]) == 2
        send = entries[f"send {i}.weight"][0]
        own, following = entries[f"backward {i}"], entries[f"backward {i - 1}"]
        assert min(e.start for e in own) <= send.start
        assert min(e.start for e in following) >= send.end
        assert slower or send.start < max(e.end for e in own)
        checked += 1
    assert checked == 3 * COUNT - 3


def test_in_a_recording_dfgb_parameters_come_for_backward_alone() -> None:
    timeline = recorded(LATER, 3, 2000)
    last_forward = max(e.end for e in timeline.entries if e.operation.name.startswith("forward"))
    fetches = [
        e
        for e in timeline.entries
        if e.operation.name.startswith("fetch") and "in place" not in e.operation.name
    ]
    direct = [e for e in timeline.entries if "in place" in e.operation.name]
    assert len(fetches) >= COUNT - 1
    ends = {e.operation.name: e.end for e in timeline.entries if "forward" in e.operation.name}
    for fetch in fetches:
        assert fetch.start >= ends[f"forward {fetch.operation.name.split()[1].split('.')[0]}"]
    assert len(direct) == COUNT
    assert all(e.end <= last_forward for e in direct[:-1])
    for one, other in pairwise(sorted(timeline.lanes["bus"], key=lambda e: e.start)):
        assert one.end <= other.start


# What is refused


def refused(kind: type[Exception], text: str, **options: Any) -> None:
    model, optimizer = stack()
    before = bits(model.state_dict())
    with pytest.raises(kind, match=text):
        nearstep.offload(model, optimizer, **{"budget": 2 * LAYER, "policy": "memferry", **options})
    assert all(type(each) is nn.Parameter for each in model.parameters())
    assert bits(model.state_dict()) == before
    with nearstep.offload(model, optimizer, budget=2 * LAYER):
        step(model, optimizer)


def test_plans_and_profiles_of_another_model_are_refused() -> None:
    model, _ = stack()
    good = {str(i): DIRECT for i in range(COUNT)}
    other = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT + 1)))
    found, plan, first = profile_of(model), places(model, good), places(model, {"0": DIRECT})
    large = replace(places(model, dict.fromkeys(good, ON_GPU)), budget_bytes=3 * LAYER)
    both = "profile must be a Profile, not Profiling"
    checked = 0
    for kind, text, options in (
        (ArgumentError, "no processor 'tpu'", {"profile": Profiling(gpu="tpu")}),
        (ArgumentError, both, {"plan": plan, "profile": Profiling()}),
        (ArgumentError, "plan must be a Plan, not str", {"plan": "DHA"}),
        (ArgumentError, "profile must be a Profile, not dict", {"profile": {}}),
        (ArgumentError, "for policy memferry", {"plan": plan, "policy": "prefetch"}),
        (ArgumentError, "for policy memferry", {"reserve": 0.5, "policy": "prefetch"}),
        (ArgumentError, "without a plan", {"reserve": 0.5, "plan": plan}),
        (ArgumentError, "from 0 to 1, not 1.5", {"reserve": 1.5}),
        (ArgumentError, "from 0 to 1, not nan", {"reserve": float("nan")}),
        (ArgumentError, "from 0 to 1, not True", {"reserve": True}),
        (ArgumentError, "from 0 to 1, not '25%'", {"reserve": "25%"}),
        (FingerprintError, model_fingerprint(model), {"plan": places(other, good)}),
        (FingerprintError, model_fingerprint(other), {"profile": profile_of(other)}),
        (PlanError, "layer 6: layer must be", {"plan": places(model, {**good, "6": DIRECT})}),
        (PlanError, "mode must be a Decision", {"plan": places(model, {**good, "2": "DHA"})}),
        (PlanError, "layers must be those of the profile", {"plan": first, "profile": found}),
        (PlanError, "layer 1: mode must be", {"plan": large, "profile": found}),
        (BudgetError, f"at least {2 * LAYER} bytes", {"plan": first, "budget": LAYER}),
    ):
        refused(kind, text, **options)
        checked += 1
    assert checked == 18


@pytest.mark.parametrize("profiled", [True, False])
def test_a_reserve_is_the_share_of_gradients_that_the_compute_device_keeps(profiled: bool) -> None:
    """Also in the plan that the first step makes."""
    plain, plain_optimizer = stack()
    for _ in range(3):
        step(plain, plain_optimizer)
    written = []
    for reserve in (0.0, 0.5, 1.0, None):
        model, optimizer = stack()
        options: dict[str, Any] = {} if reserve is None else {"reserve": reserve}
        if profiled:
            options["profile"] = profile_of(model)
        budget = 30 * LAYER
        with nearstep.offload(
            model, optimizer, budget=budget, policy="memferry", **options
        ) as engine:
            for _ in range(3):
                step(model, optimizer)
            assert engine.plan is not None
            assert engine.plan.reserve == (1.0 if reserve is None else reserve)
            written.append(sum(each.write for each in engine.plan.layers.values()))
            assert bits(model.state_dict()) == bits(plain.state_dict())
    assert written[0] == COUNT
    assert COUNT > written[1] >= COUNT / 2
    assert written[2] == written[3] < COUNT / 2


def test_a_layer_that_no_plan_can_keep_out_of_the_budget_is_named() -> None:
    model, _ = stack()
    found = profile_of(model)
    times = ("forward_dha_s", "backward_dha_s", "backward_write_s", "backward_dha_write_s")
    hard = replace(found.layers[3], **dict.fromkeys(times))
    layers = (*found.layers[:3], hard, *found.layers[4:])
    text = f"layer 3 does not fit.*smallest budget that works is {2 * LAYER}"
    refused(PlanBudgetError, text, profile=replace(found, layers=layers), budget=2 * LAYER - 1)
