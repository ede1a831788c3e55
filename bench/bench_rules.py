# amaranth: UnusedElaboratable=no
"""Update rules beside one another in one kernel: cycles against the beats they need, and area."""

from contextlib import nullcontext
from typing import Annotated, Any

from harness import Results, option, report, script, track
from measuring import CLOCK_HZ, arrays, load, unit_area, update_bytes

import nearstep
from nearstep_spec.rule.rules import RuleSet

STEPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adam": ("adam", "pgmv", {"step": 2, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "sgd": ("sgd", "pg", {"lr": 0.1, "weight_decay": 0.01}),
    "sgd_momentum": ("sgd", "pgm", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": ("adagrad", "pgv", {"step": 2}),
}
"""Method, arrays and hyper-parameters of a step of each rule."""

ALL = ",".join(STEPS)
MEMORIES = {
    "halfduplex": f"sim:axdimm?memory=halfduplex&fu=native&rules={ALL}",
    "ddr4-1600": f"sim:axdimm?memory=ddr4-1600&channels=1&fu=native&rules={ALL}",
}
PAPER_BYTES_PER_S = 7e9
"""Updater, at least. Ref: Smart-Infinity, sections VII-A and VII-H, Fig. 14."""

AREA = ("dsp", "lut", "lut_memory", "ff")


def derived(results: Results) -> Results:
    *apart, _ = cells = [{**row, "count": sum(row["units"].values())} for row in results["area"]]
    sums = {key: sum(row[key] for row in apart) for key in ("count", *AREA)}
    return {"units": [*cells, {"name": "all four, apart", "latency_cycles": None, **sums}]}


def measure(device: Any, memory: str, rule: str, count: int) -> Results:
    method, names, hyper = STEPS[rule]
    buffers = load(device, arrays(count, names), align=1024)
    with device.acceleration() if device.dimm is not None else nullcontext():
        run = device.update(method, buffers, **hyper).wait()
    for buffer in buffers.values():
        buffer.free()
    needed = update_bytes(device.config, rule, count)
    return {"memory": memory, "rule": rule, "parameters": count, "cycles": run.cycles,
        "beats": run.counters["read_beats"] + run.counters["write_beats"],
        "of_bound": needed / device.config.beat_bytes / run.cycles,
        "params_per_s_at_200_mhz": count / run.cycles * CLOCK_HZ,
        "bytes_per_s_at_200_mhz": needed / run.cycles * CLOCK_HZ}  # fmt: skip


@script
def main(count: Annotated[int, option("Parameters of a step.", min=1)] = 1_000_000) -> None:
    """Measure every rule, and write build/bench/rules.json."""
    runs = []
    for memory, url in MEMORIES.items():
        with nearstep.open(url) as device:
            runs += [measure(device, memory, rule, count) for rule in track(STEPS, memory)]
    whole = RuleSet(tuple(STEPS), "default")
    shapes = [*zip(STEPS, whole.rules, strict=True), ("all four, shared", whole.whole)]
    area = [{"name": name, **unit_area(rule)} for name, rule in track(shapes, "area")]
    report("rules", derived, paper_bytes_per_s=PAPER_BYTES_PER_S, runs=runs, area=area)
