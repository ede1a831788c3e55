"""Whole `optimizer.step()` on devices without a clock, and in place, beside torch's fused AdamW.

Each case runs in a process of its own: steps of both in turn, and at the end equal bits. Beside
steps in place runs a stream, too, that reads and writes the same tensors. The memory is the peak of
a process that makes steps on the device, over that of one that makes them with torch, per
parameter.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from harness import ROOT, Results, console, option, report, script
from measuring import timed
from torch import Tensor

import nearstep

BLOCK = 16  # elements
TENSORS = 53
SMALL_TENSORS, SMALL_ELEMENTS = 3000, 64
OPTIONS = {"lr": 1e-3, "weight_decay": 0.01}
BF16 = f"{ROOT}/examples/adam_bf16.py:ADAM_ALL_BF16"
FAMILIES = {"axdimm": "golden:axdimm", "smartssd": "golden:smartssd?memory_bytes=16GiB"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured.

    Attributes
    ----------
    device : name of the device.
    share : of the gradients that are sent; None sends them whole.
    sizes : elements of each tensor.
    rule : of `nearstep.optim.from_rule`, on bf16 parameters; AdamW on fp32 parameters if empty.
    bf16 : parameters are, without a rule.
    state : dtype of moments, if it is not that of torch.
    rounding : of states in bf16.
    """

    name: str
    device: str
    share: float | None
    sizes: Sequence[int]
    rule: str = ""
    bf16: bool = False
    state: str = ""
    rounding: str = "nearest"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.rule or self.bf16 else torch.float32

    @property
    def same(self) -> bool:
        """Whether bits are torch's."""
        return self.share is None and not self.state and self.rounding == "nearest"


def model_sizes(parameters: int) -> list[int]:
    """Elements of a model's tensors: an embedding, and matrices each with a vector.

    All are whole blocks of 16, for torch's fused step rounds what remains of one otherwise.
    """
    pairs = (TENSORS - 1) // 2
    vector = BLOCK * max(1, min(4096, parameters // 1000) // BLOCK)
    matrix = (2 * parameters // 3 // pairs - vector) // BLOCK * BLOCK
    rest = (parameters - pairs * (matrix + vector)) // BLOCK * BLOCK
    return [rest, *[matrix, vector] * pairs]


def cases(parameters: int) -> Iterator[Case]:
    sizes, small = model_sizes(parameters), [SMALL_ELEMENTS] * SMALL_TENSORS
    for family, device in FAMILIES.items():
        yield Case(name=f"{family}, dense", device=device, share=None, sizes=sizes)
    yield Case(name="smartssd, 1 % Top-K", device=FAMILIES["smartssd"], share=0.01, sizes=sizes)
    for family, device in FAMILIES.items():
        name = f"{family}, {SMALL_TENSORS} small tensors"
        yield Case(name=name, device=device, share=None, sizes=small)
    device = f"golden:axdimm?rules={BF16}&gradient_formats=fp32,bf16"
    yield Case(
        name="axdimm, bf16 with its state", device=device, share=None, sizes=sizes, rule=BF16
    )
    host = partial(Case, device="host:?threads=1", share=None)
    yield host(name="in place, fp32", sizes=sizes)
    yield host(name="in place, bf16", sizes=sizes, bf16=True)
    yield host(name="in place, bf16 stochastic", sizes=sizes, bf16=True, rounding="stochastic")
    yield host(name="in place, fp32 with 8-bit state", sizes=sizes, state="uint8")
    yield host(name=f"in place, {SMALL_TENSORS} small tensors", sizes=small)


def tensors(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for size in sizes:
        parameter = torch.randn(size, generator=generator).to(dtype).requires_grad_()
        parameter.grad = torch.randn(size, generator=generator).to(dtype)
        made.append(parameter)
    return made


def optimizer_of(case: Case, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    if case.rule:
        return nearstep.optim.from_rule(case.rule, parameters, device=case.device, **OPTIONS)
    state = {"state_dtype": getattr(torch, case.state)} if case.state else {}
    return nearstep.optim.AdamW(
        parameters,
        device=case.device,
        compression=case.share,
        rounding=case.rounding,
        **state,
        **OPTIONS,
    )


def stream_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Read gradients, and read and write parameters and state, which have the same bits again after
    two calls."""
    with torch.no_grad():
        pairs = [(p.view(torch.uint8), p.grad.view(torch.uint8)) for p in optimizer.state]
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    states = [
        value.view(words[value.element_size()])
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    ]

    def stream() -> None:
        for p, g in pairs:
            p.bitwise_xor_(g)
        for each in states:
            each.bitwise_xor_(1)

    return stream


def measure(case: Case, steps: int) -> Results:
    theirs, ours = tensors(case.sizes, case.dtype), tensors(case.sizes, case.dtype)
    fused = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    optimizer_of(case, tensors([1], case.dtype))  # compiles what is not in the cache
    constructor_s, _, optimizer = timed(lambda: optimizer_of(case, ours))
    first = timed(fused.step), timed(optimizer.step)
    in_place = case.device.startswith("host:")
    stream = stream_of(optimizer) if in_place else None
    pairs, streams = [], []
    for _ in range(steps):
        pairs.append((timed(fused.step), timed(optimizer.step)))
        streams += [timed(stream).processor for _ in range(2)] if stream else []
    if case.same and not all(map(torch.equal, ours, theirs)):
        raise AssertionError(f"{case.name}: not torch's bits")
    torch_s, device_s, torch_cpu_s, device_cpu_s = (
        statistics.median(pair[who][clock] for pair in pairs) for clock in (0, 1) for who in (0, 1)
    )
    ratios = sorted(theirs.wall / ours.wall for theirs, ours in pairs)
    stream_cpu_s = statistics.median(streams) if streams else None
    return {"stream_cpu_s": stream_cpu_s,
        "of_stream": stream_cpu_s / device_cpu_s if stream_cpu_s else None,
        "torch_s": torch_s, "device_s": device_s, "ratio": torch_s / device_s,
        "ratio_lowest": ratios[0], "ratio_highest": ratios[-1], "torch_cpu_s": torch_cpu_s,
        "device_cpu_s": device_cpu_s, "ratio_cpu": torch_cpu_s / device_cpu_s,
        "first_step_s": {"torch": first[0].wall, "device": first[1].wall},
        "constructor_s": constructor_s}  # fmt: skip


def peak(case: Case, *, ours: bool) -> int:
    small = tensors([16], case.dtype)
    if ours:
        optimizer_of(case, small).step()
    else:
        torch.optim.AdamW(small, fused=True).step()
    before = _resident()
    parameters = tensors(case.sizes, case.dtype)
    if ours:
        optimizer: torch.optim.Optimizer = optimizer_of(case, parameters)
    else:
        optimizer = torch.optim.AdamW(parameters, fused=True, **OPTIONS)
    for _ in range(3):
        optimizer.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def child(*arguments: str) -> Any:
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def run_child(arguments: Sequence[str]) -> Any:
    torch.set_num_threads(1)
    what, text, steps = arguments
    case = Case(**json.loads(text))
    if what == "time":
        return measure(case, int(steps))
    return peak(case, ours=what == "device")


@script
def main(
    parameters: Annotated[int, option("of the models")] = 100_000_000,
    steps: Annotated[int, option("of each, in turn, after the first")] = 7,
    only: Annotated[str, option("part of the names of the cases to run")] = "",
    memory: Annotated[bool, option("measure memory, too")] = True,
    child_of: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Measure each case, and write build/bench/bench_host.json."""
    if child_of:
        print(json.dumps(run_child(json.loads(child_of))))
        return
    rows = []
    peaks: dict[int, int] = {}
    for case in cases(parameters):
        if only not in case.name:
            continue
        console.print(f"{case.name} ...")
        text, count = json.dumps(asdict(case)), sum(case.sizes)
        row = {"case": case.name, "device": case.device, "compression": case.share,
            "tensors": len(case.sizes), "parameters": count, "steps": steps,
            **child("time", text, str(steps)), "load_average": os.getloadavg()[0]}  # fmt: skip
        if memory:
            if count not in peaks:
                peaks[count] = child("torch", text, "0")
            row["torch_peak_bytes"] = peaks[count]
            row["device_peak_bytes"] = child("device", text, "0")
            extra = row["device_peak_bytes"] - row["torch_peak_bytes"]
            row["more_bytes_per_parameter"] = extra / count
        rows.append(row)
    report("bench_host", rows=rows)
