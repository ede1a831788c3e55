"""MemFerry's planner: how long it takes, and how far greedy plans are from the best."""

import random
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import Annotated, Any

from harness import Results, option, report, script, track
from measuring import timed

from nearstep.memferry.cost import Costs
from nearstep.memferry.forward import READINGS
from nearstep.memferry.planner import make
from nearstep.memferry.profile import LayerProfile, Profile
from nearstep.paper.memferry import MODELS_OF_FIGURE_9, Evaluation

SEED = 16
PROFILES = 1000
LAYERS = (4, 24)
LARGE = 10_000
EXACT = 100
EXACT_PROFILES = 50


def derived(results: Results) -> Results:
    speed, found, models = results["speed"], results["random"], results["models"]
    return {
        **{
            end: {name: of(speed[f"greedy_{name}"].values()) for name in ("s", "processor_s")}
            for end, of in (("least", min), ("most", max))
        },
        "longer": {
            key: {**each, "models": {n: m["greedy_percent"][key] for n, m in models.items()}}
            for key, each in found["greedy_percent"].items()
        },
        "model_columns": " | ".join(
            f"{name}{'' if each['proven'] else ', not proven'} ~ {{models[{name}]:.2f %}}"
            for name, each in models.items()
        ),
    }  # fmt: skip


def at_random(rng: random.Random, count: int) -> Profile:
    return Profile(source="file", description="random", fingerprint="0" * 16,
        layers=tuple(_layer(rng, f"layer{i}") for i in range(count)))  # fmt: skip


def _layer(rng: random.Random, name: str) -> LayerProfile:
    kind = rng.choice(["embedding", "norm", "matrix", "matrix", "matrix"])
    low, high = {"embedding": (2, 20), "norm": (0.01, 0.2), "matrix": (0.5, 5)}[kind]
    load, forward = rng.uniform(low, high) * 1e-3, rng.uniform(0.1, 4) * 1e-3
    by_dha = forward + load * {"embedding": 0.1, "norm": 1, "matrix": rng.uniform(0.8, 4)}[kind]
    backward = 2 * forward
    extra = 0.0 if kind == "embedding" else load * rng.uniform(0.1, 2)
    written = backward + load * rng.uniform(0.2, 1.5)
    size = max(int(load * 12.5e9) // 4, 1) * 4
    return LayerProfile(name=name, parameter_bytes=size, gradient_bytes=size, load_s=load,
        send_s=load, forward_s=forward, backward_s=backward, forward_dha_s=by_dha,
        backward_dha_s=backward + extra, backward_write_s=written,
        backward_dha_write_s=written + extra, update_s=load * 0.6)  # fmt: skip


def gaps(count: int) -> Results:
    rng = random.Random(SEED)
    found: dict[str, list[float]] = {str(each): [] for each in READINGS}
    proven, best = 0, []
    for _ in track(range(count), "random profiles"):
        plan = make(at_random(rng, rng.randint(*LAYERS)))
        proven += plan.gap == 0
        more = percent(plan)
        for reading, each in more.items():
            found[reading].append(each)
        best.append(min(more.values()))
    return {
        "profiles": count, "layers": LAYERS, "proven": proven,
        "greedy_percent": {
            reading: {"mean": fmean(each), "most": max(each), "plans": len(each)}
            for reading, each in found.items()
        },
        "best_reading_percent": {"mean": fmean(best), "most": max(best)}}  # fmt: skip


def percent(plan: Any) -> dict[str, float]:
    return {
        str(reading): 100 * (total / plan.total - 1)
        for reading, total in plan.readings.items()
        if total is not None
    }


def models() -> Results:
    ours = Evaluation().ours
    plans = {name: ours.named(name).memferry for name in MODELS_OF_FIGURE_9}
    return {
        name: {"proven": plan.gap == 0, "greedy_percent": percent(plan)}
        for name, plan in plans.items()
    }


def exactly(share: float | None, count: int) -> Results:
    plans = []
    for seed in track(range(count), "exact plans"):
        profile = at_random(random.Random(seed), EXACT)
        budget = None if share is None else int(share * 2 * profile.parameter_bytes)
        plans.append(timed(partial(make, profile, budget=budget, planner="exact")))
    gap = [100 * (each.result.gap or 0.0) for each in plans]
    wall, processor = ([each[n] for each in plans] for n in (0, 1))
    return {
        "profiles": count,
        "proven": gap.count(0.0),
        "seconds": {"median": median(wall), "most": max(wall)},
        "processor_seconds": {"median": median(processor), "most": max(processor)},
        "gap_percent": {"mean": fmean(gap), "most": max(gap)},
    }


def speed(exact_profiles: int) -> Results:
    large = at_random(random.Random(SEED), LARGE)
    greedy = {
        str(reading): timed(partial(make, large, planner="greedy", readings=[reading]))
        for reading in READINGS
    }
    budgets = {"no budget": None, "a budget of 60 %": 0.6}
    return {
        "greedy_layers": LARGE, "greedy_s": {name: each.wall for name, each in greedy.items()},
        "greedy_processor_s": {name: each.processor for name, each in greedy.items()},
        "costs_s": timed(lambda: Costs(large)).wall, "exact_layers": EXACT,
        "exact": {name: exactly(share, exact_profiles) for name, share in budgets.items()},
    }  # fmt: skip


@script
def main(
    profiles: Annotated[int, option("random profiles", min=1)] = PROFILES,
    exact_profiles: Annotated[int, option("planned exactly", min=1)] = EXACT_PROFILES,
) -> None:
    """Measure, and write build/bench/memferry.json."""
    begun = perf_counter()
    results = {"seed": SEED, "speed": speed(exact_profiles), "random": gaps(profiles),
        "models": models()}  # fmt: skip
    report("memferry", derived, **results, seconds=perf_counter() - begun)
