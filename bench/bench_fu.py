# amaranth: UnusedElaboratable=no
"""The functional unit: area, latency, speed of its RTL and of its C++ kernel on this machine."""

import statistics
from typing import Annotated, Any

import numpy as np
import torch
from harness import Results, option, report, script
from measuring import arrays, differ, in_turn, timed, unit_area

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_sim.bench.functional_unit import VerilatedUnit
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import kernel
from nearstep_spec.rule.adam import ORDERS, adam_scalars

LANES = 16
RULE, _ = ORDERS["default"]
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PAPER = {"dsp": 31, "latency_cycles": 128}


def aligned(count: int) -> dict[str, np.ndarray]:
    made = {}
    for name, values in arrays(count, RULE.arrays_in).items():
        raw = np.empty(count + 16, np.float32)
        begin = -(raw.ctypes.data // 4) % 16
        made[name] = raw[begin : begin + count]
        made[name][:] = values
    return made


def simulation(runs: int, count: int, **options: Any) -> Results:
    unit = VerilatedUnit(FunctionalUnit(RULE, **options), lanes=LANES)
    given = aligned(count)
    scalars = adam_scalars(step=3, decoupled_weight_decay=True, **HYPER)
    result = unit.run(given, scalars)
    expected = evaluate(RULE, given, scalars)
    if any(differ(result.arrays[name], expected[name]) for name in "pmv"):
        raise SystemExit("the unit does not equal its model")
    times = [timed(lambda: unit.run(given, scalars)).processor for _ in range(runs)]
    unit.close()
    return {"name": ", ".join(f"{k}={v}" for k, v in options.items()) or "default",
        "options": options, "latency_cycles": unit.unit.latency, "parameters": count, "runs": runs,
        "params_per_s": count / statistics.median(times)}  # fmt: skip


def kernel_against_torch(runs: int, count: int = 1 << 22, steps: int = 5) -> Results:
    torch.set_num_threads(1)
    run, mine = kernel(RULE), aligned(count)
    theirs = torch.nn.Parameter(torch.from_numpy(aligned(count)["p"]))
    theirs.grad = torch.from_numpy(aligned(count)["g"])
    optimizer = torch.optim.Adam([theirs], fused=True, **HYPER)
    scalars = adam_scalars(step=3, decoupled_weight_decay=False, **HYPER)
    jobs = {
        "kernel": lambda: [run(mine, scalars) for _ in range(steps)],
        "torch_fused": lambda: [optimizer.step() for _ in range(steps)],
    }
    seconds = in_turn(jobs, runs + 1)
    rates = {name: steps * count / statistics.median(each[1:]) for name, each in seconds.items()}
    return {
        "parameters": count,
        "runs": runs,
        **{f"{name}_params_per_s": rate for name, rate in rates.items()},
        "kernel_over_torch": rates["kernel"] / rates["torch_fused"],
    }


@script
def main(
    runs: Annotated[int, option("Runs of each timed job; the median counts.")] = 7,
    parameters: Annotated[int, option("Parameters of a simulated run.")] = 1 << 19,
    synth: Annotated[bool, option("Synthesise, which takes two minutes.")] = True,
) -> None:
    """Measure, print, and write build/bench/fu.json."""
    shapes: list[dict[str, Any]] = [{}, {"delay": "shift"}, {"register_inputs": True}]
    report(
        "fu",
        lambda results: {"papers": [["*paper*", *map(str, results["paper"].values()), *"---"]]},
        paper=PAPER,
        area=[{"order": o, **unit_area(rule)} for o, (rule, _) in ORDERS.items() if synth],
        simulation=[simulation(runs, parameters, **options) for options in shapes],
        kernel=kernel_against_torch(runs),
    )
