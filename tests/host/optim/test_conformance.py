"""Every optimizer as a class of torch, on every kind of device: parameters and state are those of
its rule in numpy, bit for bit, in every group, format of parameters and form of the rule.

What torch itself gives is asked elsewhere (`test_beside_torch.py` and others); here optimizers
come from their data, and one more of them is one more row.
"""

from __future__ import annotations

import copy
import runpy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import nearstep
from nearstep.torch import convert, in_backward
from nearstep_sim.golden import fp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16
from nearstep_spec.rule.optimizer import Form, Optimizer, Part
from nearstep_spec.rule.rules import optimizer_named

from ..driver.conftest import chosen
from ..optimizers import FORMATS, GROUPS, hyper_of
from ..overflow.jobs import drives

RULES = {name: rules for rules, names in GROUPS.values() for name in names}
"""Rules of the device on which an optimizer is tried."""

DEVICES = {
    "golden-cpp": f"golden:axdimm?memory_bytes=4MiB&{FORMATS}",
    "golden-dimm": f"golden:axdimm?channels=2&memory_bytes=4MiB&engine=numpy&{FORMATS}",
    "golden-card": f"golden:smartssd?memory_bytes=4MiB&{FORMATS}",
    "host": "host:",
    "host-backward": "host:",
    "golden-backward": f"golden:axdimm?memory_bytes=4MiB&{FORMATS}",
    "host-drives": "host:",
    "shm": None,
    "sim-stalled": (
        "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&memory=halfduplex&fu=native"
        f"&stall=0.3&seed=7&{FORMATS}"
    ),
}
NAMES = [pytest.param(name, id=name.rpartition(":")[2] or name) for name in RULES]
SHM = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "shm_home.py"))
SIZES = (1, 5, 16, 257, 1000)
MATRICES = ((1, 1), (5, 1), (4, 4), (1, 257), (40, 25))
"""Shapes of as many elements."""

STEPS = 3
SEED = 17


class Expected:
    """A parameter and its state in numpy."""

    def __init__(
        self, given: torch.Tensor, optimizer: Optimizer, form: Form, hyper: dict, in_place: bool
    ) -> None:
        self.form, self.hyper, self.dtype, self.made = form, hyper, given.dtype, 0
        self.optimizer, self.shape = optimizer, tuple(given.shape)
        self.formats, narrow = form.rule.formats, given.dtype == torch.bfloat16
        if in_place:  # state is of the parameter's format, unless the rule says more
            own = self.formats or (dict.fromkeys(form.rule.states, "bf16") if narrow else {})
            self.formats = {**own, **({"p": "bf16"} if narrow else {})}
        whole = len({self.formats.get(name, "fp32") for name in form.rule.states}) == 1
        self.remainder = form.remainder if in_place and whole else None
        self.vector = given.numel() // (16 if narrow else 8) * (16 if narrow else 8)
        self.arrays = {name: np.zeros(given.numel(), np.float32) for name in form.rule.states}
        for name, source in optimizer.initial.items():
            self.arrays[name][:] = hyper[source]
        self.arrays["p"] = convert.to_float32(given.detach()).copy()
        for name in self.arrays:
            if self.formats.get(name) == "bf16":
                self.arrays[name] = fp.widen32(fp.narrow32(self.arrays[name], BF16), BF16)

    def step(self, gradient: torch.Tensor, maximize: bool) -> None:
        g = convert.to_float32(gradient)
        g = fp.mul32(g, np.full(g.size, -1.0 if maximize else 1.0, np.float32))
        self.run(g, Part())
        if self.optimizer.between is not None:
            part = Part(1, self.shape, self.formats.get("p", "fp32"))
            arrays = {"g": g, **{name: self.arrays[name] for name in self.form.rule.states}}
            narrow = gradient.dtype == torch.bfloat16 and self.formats.get("m") == "bf16"
            tensors = {
                name: torch.from_numpy(array)
                .view(self.shape)
                .to(torch.bfloat16 if narrow else torch.float32)
                for name, array in arrays.items()
            }
            second = self.optimizer.second_gradient(tensors, self.hyper, part)
            self.run(convert.to_float32(second), part)
        self.made += 1

    def run(self, g: NDArray, part: Part) -> None:
        registers = self.form.registers(self.hyper, self.made + 1, self.made == 0, part)
        given = {name: self.arrays[name] for name in self.form.rule.states}
        given["g"] = g
        made = evaluate(self.form.rule, given, registers)
        if self.remainder is not None:
            for name, values in evaluate(self.remainder, given, registers).items():
                made[name][self.vector :] = values[self.vector :]
        for name, values in made.items():
            kept = values
            if self.formats.get(name) == "bf16":
                kept = fp.widen32(fp.narrow32(values, BF16), BF16)
            self.arrays[name] = kept

    def parameter(self) -> NDArray:
        """Patterns of the parameter as the host has it."""
        if self.dtype == torch.float32:
            return self.arrays["p"].view(np.uint32)
        return fp.narrow32(self.arrays["p"], BF16)


@pytest.mark.parametrize("kind", chosen(DEVICES, {"sim-stalled"}))
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_rule(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {SEED}")
    monkeypatch.setattr(in_backward, "TOGETHER", 100)  # smaller parameters are updated together
    definition, compared, tried = optimizer_named(name), 0, 0
    dtypes = [torch.float32, torch.bfloat16]
    if kind == "shm":
        dtypes = [torch.float32]
    if "p" in definition.rule.formats:
        dtypes = [torch.bfloat16]
    elif kind == "host-drives" and any(f.rule.formats for f in definition.all_forms):
        dtypes = [torch.float32]  # no master of another format is kept
    if kind == "shm":
        made = nullcontext(partial(SHM["ShmHome"], folder=tmp_path))
    elif kind.startswith("host"):
        made = nullcontext(DEVICES[kind])
    else:
        made = nearstep.open(f"{DEVICES[kind]}&rules={RULES[name]}")
    with made as device:
        for form in definition.by_rule.values():
            for dtype in dtypes:
                in_place = kind in ("host", "host-backward", "host-drives", "shm")
                with drives(1, 200) if kind == "host-drives" else nullcontext() as on:
                    more = {} if on is None else {"drives": on.store, "memory": 1 << 17}
                    if kind.endswith("-backward"):
                        more["updates"] = "in-backward"
                    compared += train(name, definition, form, dtype, device, in_place, more)
                tried += 1
    print(f"{compared} elements compared")
    assert tried == len(definition.by_rule) * len(dtypes)
    assert compared >= tried * 2 * STEPS * sum(SIZES)


def test_a_copy_of_an_optimizer_has_files_of_its_own(tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8)
    optimizer = nearstep.optim.AdamW([p], device=partial(SHM["ShmHome"], folder=tmp_path))
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    before = optimizer.state[p]["exp_avg"].clone()
    (other,) = twin.param_groups[0]["params"]
    assert torch.equal(twin.state[other]["exp_avg"], before)
    twin.state[other]["exp_avg"].zero_()
    assert torch.equal(optimizer.state[p]["exp_avg"], before)


def train(
    name: str,
    definition: Optimizer,
    form: Form,
    dtype: torch.dtype,
    device: Any,
    in_place: bool,
    more: dict[str, Any],
) -> int:
    """Steps of two groups; the number of elements compared."""
    rng = np.random.default_rng(SEED)
    generator = torch.Generator().manual_seed(SEED)
    groups, models = [], []
    first = hyper_of(definition, form, rng)
    for maximize in (False, True):
        shapes = SIZES if definition.dimensions is None else MATRICES
        given = [torch.randn(n, generator=generator).to(dtype).requires_grad_() for n in shapes]
        hyper = hyper_of(definition, form, rng)
        for key in definition.initial.values():  # the one that all groups have
            hyper[key] = first[key]
        groups.append({"params": given, "maximize": maximize, **hyper})
        models.append([Expected(each, definition, form, hyper, in_place) for each in given])
    optimizer = nearstep.optim.from_rule(name, groups, device=device, **first, **more)
    compared = 0
    for _ in range(STEPS):
        for group, expected in zip(groups, models, strict=True):
            for p, model in zip(group["params"], expected, strict=True):
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
                model.step(p.grad, group["maximize"])
        if "updates" in more:
            backward([p for group in groups for p in group["params"]])
        optimizer.step()
        for group, expected in zip(groups, models, strict=True):
            for p, model in zip(group["params"], expected, strict=True):
                compared += compare(optimizer.state[p], p, model, definition)
    return compared


def backward(parameters: list[torch.Tensor]) -> None:
    """Have backward make the gradients that there are."""
    losses = [(p * p.grad).sum() for p in parameters]
    for p in parameters:
        p.grad = None
    torch.autograd.backward(losses)
    used = sum(isinstance(p.grad, in_backward.UsedGradient) for p in parameters)
    assert used >= len(parameters) - 3  # of which the last few wait for the step


def compare(state: Any, p: torch.Tensor, model: Expected, definition: Optimizer) -> int:
    words = convert.to_words(p.detach())
    got = words.view(np.uint32) if words.dtype == np.float32 else words
    assert np.array_equal(got, model.parameter()), f"{definition.name} p of {p.numel()}"
    compared = p.numel()
    assert set(definition.keys(model.form)) | ({"step"} if definition.counts else set()) == set(
        state
    )
    for key in definition.keys(model.form):
        narrow = model.formats.get(definition.state[key]) == "bf16"
        assert state[key].dtype == (torch.bfloat16 if narrow else torch.float32)
        found = convert.to_float32(state[key]).view(np.uint32)
        wanted = model.arrays[definition.state[key]].view(np.uint32)
        assert np.array_equal(found, wanted), f"{definition.name} {key} of {p.numel()}"
        compared += p.numel()
    if definition.counts:
        assert state["step"] == model.made
    return compared
