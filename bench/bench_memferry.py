"""MemFerry's planner: how long it takes, how far greedy plans are from the best, and section V."""

from __future__ import annotations

import random
from dataclasses import asdict
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

import report
import typer
from rich.console import Console
from rich.progress import track

from nearstep.memferry.cost import Costs
from nearstep.memferry.forward import READINGS
from nearstep.memferry.planner import make
from nearstep.memferry.profile import LayerProfile, Profile
from nearstep.paper.memferry import MODELS_OF_FIGURE_9, NOT_MODELLED, Evaluation, evaluations

console = Console()
SEED = 16
PROFILES = 1000
LAYERS = (4, 24)
LARGE = 10_000
EXACT = 100
EXACT_PROFILES = 50


def at_random(rng: random.Random, count: int) -> Profile:
    """Layers of three kinds, as figure 3 has them: all of different sizes."""
    return Profile(
        source="file",
        description="random",
        fingerprint="0" * 16,
        layers=tuple(_layer(rng, f"layer{i}") for i in range(count)),
    )


def _layer(rng: random.Random, name: str) -> LayerProfile:
    kind = rng.choice(["embedding", "norm", "matrix", "matrix", "matrix"])
    low, high = {"embedding": (2, 20), "norm": (0.01, 0.2), "matrix": (0.5, 5)}[kind]
    load, forward = rng.uniform(low, high) * 1e-3, rng.uniform(0.1, 4) * 1e-3
    by_dha = forward + load * {"embedding": 0.1, "norm": 1, "matrix": rng.uniform(0.8, 4)}[kind]
    backward = 2 * forward
    extra = 0.0 if kind == "embedding" else load * rng.uniform(0.1, 2)
    written = backward + load * rng.uniform(0.2, 1.5)
    size = max(int(load * 12.5e9) // 4, 1) * 4
    return LayerProfile(
        name=name,
        parameter_bytes=size,
        gradient_bytes=size,
        load_s=load,
        send_s=load,
        forward_s=forward,
        backward_s=backward,
        forward_dha_s=by_dha,
        backward_dha_s=backward + extra,
        backward_write_s=written,
        backward_dha_write_s=written + extra,
        update_s=load * 0.6,
    )


def gaps(count: int) -> dict[str, Any]:
    """Greedy plans by reading beside exact ones, over random profiles."""
    rng = random.Random(SEED)
    longer: dict[str, list[float]] = {str(each): [] for each in READINGS}
    proven, best = 0, []
    for _ in track(range(count), "random profiles", transient=True):
        planned = make(at_random(rng, rng.randint(*LAYERS)))
        proven += planned.gap == 0
        found = {str(r): total for r, total in planned.readings.items() if total is not None}
        for reading, total in found.items():
            longer[reading].append(100 * (total / planned.total - 1))
        best.append(min(100 * (total / planned.total - 1) for total in found.values()))
    return {
        "profiles": count,
        "layers": LAYERS,
        "proven": proven,
        "greedy_percent": {
            reading: {"mean": fmean(each), "most": max(each), "plans": len(each)}
            for reading, each in longer.items()
        },
        "best_reading_percent": {"mean": fmean(best), "most": max(best)},
    }


def models() -> dict[str, Any]:
    """The same of the paper's models."""
    evaluation, found = Evaluation(), {}
    for name in MODELS_OF_FIGURE_9:
        planned = evaluation.named(name).memferry
        found[name] = {
            "proven": planned.gap == 0,
            "greedy_percent": {
                str(reading): 100 * (total / planned.total - 1)
                for reading, total in planned.readings.items()
                if total is not None
            },
        }
    return found


def exactly(share: float | None, count: int) -> dict[str, Any]:
    """Times and gaps of exact plans of random profiles, with a share of their bytes as budget."""
    seconds, processor, gap = [], [], []
    for seed in track(range(count), "exact plans", transient=True):
        profile = at_random(random.Random(seed), EXACT)
        budget = None if share is None else int(share * 2 * profile.parameter_bytes)
        begun, used = perf_counter(), process_time()
        planned = make(profile, budget=budget, planner="exact")
        seconds.append(perf_counter() - begun)
        processor.append(process_time() - used)
        gap.append(100 * (planned.gap or 0.0))
    return {
        "profiles": count,
        "proven": gap.count(0.0),
        "seconds": {"median": median(seconds), "most": max(seconds)},
        "processor_seconds": {"median": median(processor), "most": max(processor)},
        "gap_percent": {"mean": fmean(gap), "most": max(gap)},
    }


def paper() -> dict[str, Any]:
    """Section V: each figure in print beside what is modelled."""
    found = [{**asdict(row), "error": row.error} for row in Evaluation().rows()]
    memory = {
        variant: [row.modelled for row in evaluation.memory()]
        for variant, evaluation in evaluations().items()
    }
    return {"rows": found, "memory": memory, "not_modelled": NOT_MODELLED}


def speed(exact_profiles: int) -> dict[str, Any]:
    """Seconds of planners on this machine."""
    large = at_random(random.Random(SEED), LARGE)
    greedy, processor = {}, {}
    for reading in READINGS:
        begun, used = perf_counter(), process_time()
        make(large, planner="greedy", readings=[reading])
        greedy[str(reading)] = perf_counter() - begun
        processor[str(reading)] = process_time() - used
    exact = {}
    for name, share in (("no budget", None), ("a budget of 60 %", 0.6)):
        exact[name] = exactly(share, exact_profiles)
        console.print(name, exact[name])
    begun = perf_counter()
    Costs(large)
    return {
        "greedy_layers": LARGE,
        "greedy_s": greedy,
        "greedy_processor_s": processor,
        "costs_s": perf_counter() - begun,
        "exact_layers": EXACT,
        "exact": exact,
    }


def main(profiles: int = PROFILES, exact_profiles: int = EXACT_PROFILES) -> None:
    """Measure, and write build/bench/memferry.json."""
    begun = perf_counter()
    results = {
        "seed": SEED,
        "speed": speed(exact_profiles),
        "random": gaps(profiles),
        "models": models(),
        "paper": paper(),
    }
    results["seconds"] = perf_counter() - begun
    console.print(results)
    console.print(report.write("memferry", results))


if __name__ == "__main__":
    typer.run(main)
