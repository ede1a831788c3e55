"""The Adam kernel: cycles against the bound of its memory, and speed of devices on this machine."""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from harness import ROOT, Results, option, plot, report, script, track
from measuring import arrays, in_turn, load, medians

import nearstep

LANES = 16
BOUND_BEATS = {"ideal": 4, "halfduplex": 7}
COUNTS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
RTL_LIMIT = 1_000_000
"""Largest count for which the cycles of the native units are checked against those of the RTL."""

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TORCH_COUNT = 1 << 22
COCOTB_COUNT = 50_000
COCOTB_BENCH = ROOT / "tests" / "system" / "cocotb_driver.py"
GOLDEN = "golden:axdimm?engine=cpp"


def derived(results: Results) -> Results:
    golden, torch = results["golden"], "torch.optim.Adam(fused=True)"
    functional = [
        {
            "url": url,
            "parameters": golden["parameters"],
            "params_per_s": golden[f"{n}_params_per_s"],
        }
        for n, url in (("golden", golden["url"]), ("torch_fused", torch))
    ]
    dimm = next(row for row in results["simulation"] if "fraction_of_peak" in row)
    return {"speeds": [*results["simulation"], *functional], "dimm": dimm}


def cycles(url: str, counts: Sequence[int], size: int) -> list[int]:
    with nearstep.open(url) as device:
        buffers = load(device, arrays(size))
        return [
            device.update("adam", {n: b[0:count] for n, b in buffers.items()}, step=1, **HYPER)
            .wait()
            .cycles
            for count in track(counts, url)
        ]


def fit(memory: str, counts: Sequence[int]) -> Results:
    base = f"sim:axdimm?lanes={LANES}&memory={memory}"
    measured = cycles(f"{base}&fu=native", counts, max(counts))
    checked = [count for count in counts if count <= RTL_LIMIT]
    if cycles(f"{base}&fu=rtl", checked, max(counts)) != measured[: len(checked)]:
        raise SystemExit("cycles of the native units are not those of the RTL")
    slope, offset = np.polyfit(counts, measured, 1)
    bound = BOUND_BEATS[memory] / LANES
    shares = [bound * count / each for count, each in zip(counts, measured, strict=True)]
    return {"url": f"{base}&fu=native", "counts": list(counts), "cycles": measured,
        "a_cycles": float(offset), "b_cycles_per_parameter": float(slope),
        "bound_cycles_per_parameter": bound, "bound_over_b": bound / float(slope),
        "fraction_of_bound": shares,
        "at_million": dict(zip(counts, shares, strict=True)).get(1_000_000)}  # fmt: skip


def rates(url: str, count: int, runs: int, seconds: tuple[float, ...], **more: Any) -> Results:
    wall, processor = seconds
    found = {"url": url, "parameters": count, "runs": runs, **more}
    return {**found, "params_per_s": count / wall, "params_per_cpu_s": count / processor}


def adam(device: Any, buffers: Any) -> Callable[[], object]:
    """A run of Adam to its end."""
    return lambda: device.update("adam", buffers, step=1, **HYPER).wait()


def simulation_speed(fidelity: str, count: int, runs: int) -> Results:
    url = f"sim:axdimm?lanes={LANES}&memory=ideal&fu={fidelity}"
    with nearstep.open(url) as device:
        buffers = load(device, arrays(count))
        return rates(url, count, runs, medians(adam(device, buffers), runs))


def dimm_speed(option: str, count: int, runs: int) -> Results:
    url = f"sim:axdimm?memory=ddr4-1600&channels=2&{option}"
    cycles = []
    with nearstep.open(url) as device:
        share = count // len(device.channels)
        host, align = arrays(share), device.stripe_align
        parts = [load(device, host, channel=c.number, align=align) for c in device.channels]

        def step() -> None:
            with device.acceleration():
                started = [device.update("adam", part, step=1, **HYPER) for part in parts]
                cycles.append(max(run.wait().cycles for run in started))

        seconds = medians(step, runs)
    peak = BOUND_BEATS["halfduplex"] * -(-share // LANES) / max(cycles)
    return rates(url, count, runs, seconds, cycles=max(cycles), fraction_of_peak=peak)


def cocotb_speed() -> Results:
    from nearstep_hw.generate import verilog
    from nearstep_sim.bench.cocotb_runner import run_cocotb
    from nearstep_sim.verilate.build import verilog_of

    result = run_cocotb(
        top="adam_kernel",
        verilog=verilog_of("generator adam_kernel", lambda: verilog("adam_kernel")),
        test_module=COCOTB_BENCH,
        testcase="two_steps_give_the_bits_of_the_golden_rule",
        env={
            "NEARSTEP_CONFIG": json.dumps({"lanes": LANES}),  # as `nearstep rtl` has it
            "NEARSTEP_COUNT": str(COCOTB_COUNT),
        },
    )
    found = re.findall(r"params_per_s (\d+)", result.log.read_text())
    return {"url": f"cocotb, AxiRam, lanes={LANES}", "parameters": COCOTB_COUNT, "runs": len(found),
        "params_per_s": statistics.median(map(float, found))}  # fmt: skip


def golden_against_torch(runs: int) -> Results:
    import torch

    torch.set_num_threads(1)
    host = arrays(TORCH_COUNT)
    parameter = torch.nn.Parameter(torch.from_numpy(host["p"].copy()))
    parameter.grad = torch.from_numpy(host["g"].copy())
    optimizer = torch.optim.Adam([parameter], fused=True, **HYPER)
    with nearstep.open(GOLDEN) as device:
        buffers = load(device, host)
        golden = adam(device, buffers)
        seconds = in_turn({"torch": optimizer.step, "golden": golden}, runs + 2)
    found = {n: TORCH_COUNT / statistics.median(times[2:]) for n, times in seconds.items()}
    return {"url": GOLDEN, "parameters": TORCH_COUNT, "runs": runs,
        "golden_params_per_s": found["golden"], "torch_fused_params_per_s": found["torch"],
        "golden_over_torch": found["golden"] / found["torch"]}  # fmt: skip


@script
def main(
    largest: Annotated[int, option("Largest count of the fits.")] = COUNTS[-1],
    runs: Annotated[int, option("Runs of each timed job; the median counts.")] = 5,
    cocotb: Annotated[bool, option("Run the job under cocotb as well.")] = True,
) -> None:
    """Measure, print, and write build/bench/kernel.json and kernel.png."""
    counts = [count for count in COUNTS if count <= largest]
    fits = {memory: fit(memory, counts) for memory in BOUND_BEATS}
    simulation = [
        simulation_speed("rtl", 1_000_000, runs),
        simulation_speed("native", 4_000_000, runs),
        *(dimm_speed(each, 2_000_000, runs) for each in ("fu=rtl", "top=whole", "fu=native")),
        *([cocotb_speed()] if cocotb else []),
    ]
    with plot("kernel.png", figsize=(6, 4), dpi=150) as (_, axes):
        for memory, each in fits.items():
            axes.semilogx(each["counts"], each["fraction_of_bound"], marker="o", label=memory)
        axes.set(xlabel="parameters", ylabel="fraction of the memory's bound")
        axes.grid(alpha=0.3)
        axes.legend()
    report("kernel", derived, fits=fits, simulation=simulation,
        golden=golden_against_torch(max(runs, 9)))  # fmt: skip
