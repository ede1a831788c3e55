"""What training leaves, as a table: optimizer x format x device x home x script.

Inputs are whole numbers scaled by powers of two, and gradients reach parameters without a sum, so
that no library's arithmetic is in them. A row is independent of how a step is carried out: it uses
the public interface, and one place where a drive or a memory fails.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import NearstepError
from nearstep_sim.models.drive import FailAt

from ..host.overflow.jobs import bits, drives

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHAPES = ((40, 16), (16,), (30, 20), (7,), (1,), (160, 128))
"""Of neighbours that are copied together, and one that a device may update in place."""

SMALL = SHAPES[:-1]
LAYERS = ((40, 16), (640,)) * 4
"""Of an offloaded model."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 3

_RULES = "rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad"
_WIDE = "gradient_formats=fp32,fp16,bf16&gradient_scale=yes&copy_out_formats=fp16,bf16&scan=yes"
_PAIRS = "compression=fused,scatter"
_ALL = f"{_RULES}&{_WIDE}&{_PAIRS}&memory_bytes=4MiB"
_CARDS = f"golden:smartssd?{_RULES}&chunk_bytes=1024&memory_bytes=4MiB"
DEVICES: Mapping[str, str] = {
    "kernel": f"golden:axdimm?{_ALL}",
    "copied": f"golden:axdimm?{_ALL}&in_place=no",
    "dimm": f"golden:axdimm?{_ALL}&channels=2&block_bytes=1024",
    "card": _CARDS,
    "cards": f"{_CARDS}&cards=3",
    "plain": f"golden:axdimm?{_RULES}&memory_bytes=4MiB",
    "host": "host:",
    "rtl": f"sim:axdimm?{_ALL}&lanes=4&block_bytes=512&fu=native",
    "rtl dimm": f"sim:axdimm?{_RULES}&{_WIDE}&memory=ddr4-1600&channels=2&fu=native",
    "rtl card": f"sim:smartssd?{_RULES}&chunk_bytes=512&memory_bytes=4MiB&fu=native",
    "rtl cards": f"sim:smartssd?{_RULES}&chunk_bytes=512&memory_bytes=4MiB&fu=native&cards=2",
}
_LION = f"{EXAMPLES}/lion.py:LION"
_OPTIM = nearstep.optim
OPTIMIZERS: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "adam": (_OPTIM.Adam, {"lr": 0.0078125, "weight_decay": 0.125}),
    "adamw": (_OPTIM.AdamW, {"lr": 0.0078125}),
    "amsgrad": (_OPTIM.Adam, {"lr": 0.0078125, "amsgrad": True}),
    "sgd": (_OPTIM.SGD, {"lr": 0.0078125}),
    "momentum": (_OPTIM.SGD, {"lr": 0.0078125, "momentum": 0.875}),
    "nesterov": (_OPTIM.SGD, {"lr": 0.0078125, "momentum": 0.875, "nesterov": True}),
    "adagrad": (_OPTIM.Adagrad, {"lr": 0.0078125, "initial_accumulator_value": 0.125}),
    "maximize": (_OPTIM.AdamW, {"lr": 0.0078125, "maximize": True}),
    "lion": (partial(_OPTIM.from_rule, _LION), {"lr": 0.0078125}),
}


def numbers(rng: np.random.Generator, shape: Sequence[int]) -> Tensor:
    """fp32 values of magnitudes from 2**-20 to 2**4, by exact arithmetic."""
    whole = rng.integers(-(1 << 20), 1 << 20, shape).astype(np.float32)
    return torch.from_numpy(np.ldexp(whole, rng.integers(-40, -16, shape)).astype(np.float32))


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes
    ----------
    optimizer, format, device : names of `OPTIMIZERS`, `DTYPES`, `DEVICES`.
    home : where state is kept: `memory`, `drives`, `card drives`, or `offload`.
    script : name of `SCRIPTS`.
    kernel : further options of the device.
    on : further options of the optimizer.
    shapes
    """

    optimizer: str
    format: str
    device: str
    home: str = "memory"
    script: str = "steps"
    kernel: str = ""
    on: tuple[tuple[str, Any], ...] = ()
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    @property
    def name(self) -> str:
        """Of the row, the same on every machine."""
        options = [f"{key}={value}" for key, value in self.on]
        parts = (self.optimizer, self.format, self.device, self.home, self.script, self.kernel)
        return " | ".join([*parts, " ".join(options)])

    @property
    def drives(self) -> int:
        """That state is kept on: one a card."""
        return {"cards": 3, "card": 1}.get(self.device, 2)

    @property
    def url(self) -> str:
        url = DEVICES[self.device]
        if self.optimizer == "lion":
            url = url.replace(_RULES, f"{_RULES},{_LION}")
        return f"{url}&{self.kernel}" if self.kernel else url


@dataclass
class Bench:
    """A training under way.

    Attributes
    ----------
    row
    open : what is closed with it.
    """

    row: Row
    open: ExitStack
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20231))
    notes: list[str] = field(default_factory=list)
    engine: Any = None
    places: Sequence[Any] = ()

    def __post_init__(self) -> None:
        row, dtype = self.row, DTYPES[self.row.format]
        self.parameters = [nn.Parameter(numbers(self.rng, s).to(dtype)) for s in row.shapes]
        url, self.more = row.url, dict(row.on)
        if row.home in ("drives", "card drives"):
            on = self.open.enter_context(drives(row.drives, 1200))
            self.places, self.more["drives"] = on.places, on.store
        if row.home == "card drives":
            url = f"{url}&subgroup_elements=2048&drive=unused"
        self.device: Any = url
        if row.device != "host":
            self.device = self.open.enter_context(nearstep.open(url))
        self.optimizer = self.made(self.parameters)
        if row.home == "offload":
            self.model = Layers(self.parameters)
            self.engine = self.open.enter_context(
                nearstep.offload(self.model, self.optimizer, budget="60%")
            )

    def made(self, parameters: Sequence[Tensor], **more: Any) -> Any:
        """An optimizer with two groups."""
        kind, options = OPTIMIZERS[self.row.optimizer]
        groups = [{"params": parameters[::3], "lr": 0.015625}]
        if rest := [p for i, p in enumerate(parameters) if i % 3]:
            groups.append({"params": rest})
        return kind(groups, device=self.device, **options, **{**self.more, **more})

    def gradients(self, *, missing: int = -1) -> None:
        """New gradients, but for one parameter."""
        given = [numbers(self.rng, shape).to(DTYPES[self.row.format]) for shape in self.row.shapes]
        self.optimizer.zero_grad()
        if self.engine is not None:
            self.model(given).backward()
            return
        for at, (p, gradient) in enumerate(zip(self.parameters, given, strict=True)):
            p.grad = None if at == missing else gradient

    def step(self, **more: Any) -> None:
        self.gradients(**more)
        self.optimizer.step()

    def note(self, what: str, attempt: Callable[[], object]) -> bool:
        """Note whether what is tried is refused by an error of the package."""
        try:
            attempt()
        except NearstepError:
            self.notes.append(f"{what}: refused")
            return False
        self.notes.append(f"{what}: done")
        return True

    def result(self) -> dict[str, Any]:
        """SHA-256 of parameters, state and options; what was moved; cycles."""
        found = hashlib.sha256()
        values = self.parameters
        if self.engine is not None:
            values = list(self.model.state_dict().values())
        for p in values:
            found.update(bits(p))
        saved = self.optimizer.state_dict()
        for index, state in sorted(saved["state"].items()):
            for key, value in sorted(state.items()):
                found.update(f"{index}.{key}".encode() + bits(torch.as_tensor(value)))
        found.update(repr(saved["param_groups"]).encode())
        traffic = self.optimizer.traffic.as_dict()
        del traffic["run_seconds"]
        moved = {key: value for key, value in traffic.items() if value}
        if self.row.script.startswith("drive"):
            moved = {}  # how far other transfers are when one fails is a matter of time
        return {"sha256": found.hexdigest(), "traffic": moved, "notes": self.notes}


class Layers(nn.Module):
    """A product of each parameter with what is given: its gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(each) for each in parameters)

    def forward(self, given: Sequence[Tensor]) -> Tensor:
        found = [layer(each) for layer, each in zip(self.layers, given, strict=True)]
        return torch.stack(found).sum()


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, given: Tensor) -> Tensor:
        return (self.weight * given).float().sum()


def steps(bench: Bench) -> None:
    for _ in range(STEPS):
        bench.step()


def skips(bench: Bench) -> None:
    for number in range(STEPS + 1):
        bench.step(missing=number % 3)


def host_changes(bench: Bench) -> None:
    """Parameters, state and options that the host changes between steps."""
    first, *_, last = bench.parameters
    key = next(iter(bench.optimizer.layout.moments), None)
    for number in range(STEPS):
        bench.step()
        with torch.no_grad():
            first[number].mul_(0.5)
            last.data = last.data.clone()
            last.view(-1)[-1] = 1.0
        if key is not None and key in bench.optimizer.state[first]:
            bench.optimizer.state[first][key].add_(0.25)
            bench.optimizer.state[last][key] = torch.ones(last.shape)
        bench.optimizer.param_groups[0]["lr"] *= 0.5
    bench.step()


def checkpoint(bench: Bench) -> None:
    """State goes to another optimizer of the same device, and back."""
    bench.step()
    saved = copy.deepcopy(bench.optimizer.state_dict())
    bench.step()
    bench.optimizer.load_state_dict(saved)
    bench.step()
    other = [nn.Parameter(p.detach().clone()) for p in bench.parameters]
    second = bench.made(other)
    second.load_state_dict(bench.optimizer.state_dict())
    bench.gradients()
    for p, mine in zip(other, bench.parameters, strict=True):
        p.grad = mine.grad.clone()
    second.step()
    bench.optimizer.step()
    bench.notes.append(f"equal: {[bits(p) for p in other] == [bits(p) for p in bench.parameters]}")


def scaled(bench: Bench, scaler: Callable[..., Any] = torch.amp.GradScaler) -> None:
    """A scaler, which finds an infinity in one step."""
    scale = scaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(STEPS + 1):
        bench.gradients()
        scale.scale(torch.ones((), requires_grad=True))  # torch's makes its state of the first loss
        for p in bench.parameters:
            p.grad = (p.grad.float() * 64.0).to(p.dtype)
        if number == 1:
            bench.parameters[0].grad[0] = torch.inf
        scale.step(bench.optimizer)
        scale.update()
        bench.notes.append(f"scale {scale.get_scale()}")


def groups(bench: Bench) -> None:
    """A group is added, a parameter is frozen, another one is used again."""
    bench.step()
    extra = nn.Parameter(numbers(bench.rng, (33, 3)).to(DTYPES[bench.row.format]))
    bench.optimizer.add_param_group({"params": [extra], "lr": 0.25})
    bench.parameters[1].requires_grad_(False)
    for _ in range(2):
        bench.gradients(missing=1)
        extra.grad = numbers(bench.rng, extra.shape).to(extra.dtype)
        bench.optimizer.step()
    bench.parameters[1].requires_grad_(True)
    bench.step()
    bench.parameters.append(extra)


def copies(bench: Bench) -> None:
    """A deep copy shares the device and nothing else."""
    bench.step()
    twin = copy.deepcopy(bench.optimizer)
    bench.step()
    del twin
    bench.step()


def closure(bench: Bench) -> None:
    def evaluate() -> Tensor:
        bench.gradients()
        return torch.ones(())

    for _ in range(STEPS):
        bench.notes.append(f"loss {float(bench.optimizer.step(evaluate))}")


def memory_fails(write: bool, bench: Bench) -> None:
    """The memory answers a run with an error; a checkpoint puts all right."""
    bench.step()
    saved = copy.deepcopy(bench.optimizer.state_dict())
    kept = [p.detach().clone() for p in bench.parameters]
    bench.gradients()
    bench.device.backend.inject(Injection(kind="slverr", write=write, nth=3))
    if not bench.note("step", bench.optimizer.step):
        bench.note("state", bench.optimizer.state_dict)
    bench.device.backend.heal()
    bench.note("reset", bench.device.reset)
    with torch.no_grad():
        for p, then in zip(bench.parameters, kept, strict=True):
            p.copy_(then)
    bench.optimizer.load_state_dict(saved)
    bench.step()


def drive_fails(action: str, number: int, bench: Bench) -> None:
    """A drive fails once in the second step, which is made again where that can be."""
    bench.step()
    with torch.no_grad():
        bench.parameters[0][1].mul_(0.5)
    bench.places[-1].fault = fault = FailAt(action, number)
    bench.gradients()
    done = bench.note("step", bench.optimizer.step)
    bench.notes.append(f"fired {fault.fired}")
    if not done and bench.note("state", bench.optimizer.state_dict):
        bench.optimizer.step()
        bench.step()


SCRIPTS: Mapping[str, Callable[[Bench], None]] = {
    "steps": steps,
    "skips": skips,
    "host changes": host_changes,
    "checkpoint": checkpoint,
    "scaler": scaled,
    "nearstep scaler": partial(scaled, scaler=nearstep.optim.GradScaler),
    "groups": groups,
    "deep copy": copies,
    "closure": closure,
    "read fails": partial(memory_fails, False),
    "write fails": partial(memory_fails, True),
    **{
        f"drive {action} {number}": partial(drive_fails, action, number)
        for action, number in (("read", 0), ("read", 5), ("write", 0), ("write", 4), ("flush", 0))
    },
}


def rows() -> Iterator[Row]:
    """The table."""
    cross = itertools.product
    for optimizer, form, device in cross(OPTIMIZERS, DTYPES, ("kernel", "dimm", "card", "cards")):
        yield Row(optimizer, form, device)
    for optimizer in OPTIMIZERS:
        yield Row(optimizer, "fp32", "copied")
    for optimizer in OPTIMIZERS:
        yield Row(optimizer, "fp32", "host")
    ordinary = [name for name in SCRIPTS if not name.startswith(("steps", "drive"))]
    for script, form, device in cross(ordinary, ("fp32", "bf16"), ("kernel", "dimm", "card")):
        yield Row("adamw", form, device, script=script)
    for script in (name for name in ordinary if not name.endswith("fails")):
        yield Row("adamw", "fp32", "host", script=script)
    kept = (
        "state_format=bf16",
        "state_format=bf16&stochastic_rounding=yes",
        "state_format=dynamic8",
        "parameter_format=bf16&state_format=bf16",
    )
    for kernel, optimizer, device in cross(
        kept, ("adamw", "momentum", "adagrad"), ("plain", "dimm", "card")
    ):
        form = "bf16" if kernel.startswith("parameter") else "fp32"
        on = (("rounding", "stochastic"), ("rounding_seed", 7)) if "stochastic" in kernel else ()
        yield Row(optimizer, form, device, kernel=kernel, on=on)
    for pairs, form, feedback, device in cross(
        ("fused", "scatter"), ("fp32", "bf16"), (True, False), ("kernel", "dimm", "card", "cards")
    ):
        on = (
            ("compression", 0.125),
            ("compression_form", pairs),
            ("compression_format", form),
            ("error_feedback", feedback),
        )
        yield Row("adamw", "fp32", device, on=on, script="host changes" if feedback else "steps")
    for optimizer, device in cross(("adamw", "momentum"), ("kernel", "dimm", "card", "cards")):
        yield Row(optimizer, "fp32", device, on=(("max_grad_norm", 0.5),))
    for optimizer, form, device in cross(
        ("adamw", "amsgrad", "sgd", "momentum", "adagrad"), ("fp32", "bf16"), ("plain", "dimm")
    ):
        on = (("memory", 20 * 160 * 128 + 40_000),)
        yield Row(optimizer, form, device, "drives", "skips", on=on)
    faults = [name for name in SCRIPTS if name.startswith("drive")]
    for script in ("steps", "host changes", "groups", "closure", *faults):
        for eviction in ("updated_first", "belady"):
            on = (("memory", 11_000), ("eviction", eviction))
            yield Row("adamw", "fp32", "plain", "drives", script, on=on, shapes=SMALL)
    for optimizer, form, device in cross(
        ("adamw", "amsgrad", "momentum", "adagrad"), ("fp32", "bf16"), ("card", "cards")
    ):
        yield Row(optimizer, form, device, "card drives", "skips")
    for script, device in cross(("host changes", "closure", *faults), ("card", "cards")):
        yield Row("adamw", "fp32", device, "card drives", script, shapes=SMALL)
        on = (("compression", 0.125),)
        yield Row("adamw", "fp32", device, "card drives", script, on=on, shapes=SMALL)
    for optimizer, form, device in cross(
        ("adamw", "momentum", "adagrad", "maximize"), ("fp32", "bf16"), ("plain", "dimm", "card")
    ):
        yield Row(optimizer, form, device, "offload", shapes=LAYERS)
    for device in ("rtl", "rtl dimm", "rtl card", "rtl cards"):
        for optimizer, form in cross(("adamw", "momentum"), ("fp32", "bf16")):
            yield Row(optimizer, form, device, shapes=SMALL)
    yield Row("adamw", "fp32", "rtl card", on=(("compression", 0.125),), shapes=SMALL)
    yield Row("adamw", "fp32", "rtl cards", "card drives", shapes=SMALL)
    yield Row("adamw", "fp32", "rtl", "drives", on=(("memory", 11_000),), shapes=SMALL)


def run(row: Row) -> dict[str, Any]:
    """What a row leaves."""
    with ExitStack() as open_, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bench = Bench(row, open_)
            SCRIPTS[row.script](bench)
            return bench.result()
        except NearstepError as error:
            return {"refused": type(error).__name__}
