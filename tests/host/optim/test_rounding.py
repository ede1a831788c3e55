"""Optimizers whose state in bfloat16 is rounded stochastically: one course, wherever it runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nearstep
from nearstep.torch.errors import HyperparameterError, UnsupportedOptionError
from nearstep.torch.homes.errors import ResumeError
from nearstep_sim.golden import fp
from nearstep_sim.golden.rounding import Draw, round_stochastically
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16
from nearstep_spec.rule.adam import ADAM, adam_scalars

from ..overflow.jobs import drives

FILE = Path(__file__).resolve().parents[3] / "examples" / "adam_bf16.py"
STATE = "state_format=bf16&stochastic_rounding=yes&gradient_formats=fp32,bf16"
URLS = {
    "host": "host:",
    "one": f"golden:axdimm?memory_bytes=8MiB&{STATE}",
    "numpy": f"golden:axdimm?engine=numpy&channels=4&block_bytes=1024&memory_bytes=8MiB&{STATE}",
    "two": f"golden:axdimm?channels=2&block_bytes=512&memory_bytes=8MiB&{STATE}",
    "copies": f"golden:axdimm?in_place=no&memory_bytes=8MiB&{STATE}",
    "cards": f"golden:smartssd?cards=3&chunk_bytes=512&memory_bytes=8MiB&{STATE}",
    "sim": (
        "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&memory=halfduplex&stall=0.1"
        f"&fu=native&{STATE}"
    ),
    "sim-dimm": f"sim:axdimm?memory=ddr4-1600&channels=2&functional_units=4&fu=native&{STATE}",
    "sim-cards": (
        "sim:smartssd?cards=2&lanes=4&chunk_bytes=512&memory_bytes=4MiB&fu=native&stall=0.2"
        f"&{STATE}"
    ),
}
SHAPES = ((33, 17), (5,), (), (40, 90), (129,), (0,), (64, 16))
HYPER = {"lr": 1e-2, "weight_decay": 0.1}
STOCHASTIC = {"state_dtype": torch.bfloat16, "rounding": "stochastic", "rounding_seed": 77}
SEED = 4711
STEPS = 4

deep = pytest.mark.deep


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step with gradients of its own; some parameters have none in some steps."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(SEED + number)
    for index, each in enumerate(given):
        gradient = torch.randn(each.shape, generator=generator).to(each.dtype)
        each.grad = None if number == 1 and index == 3 else gradient
    optimizer.step()


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.int32).numpy().tobytes()


def everything(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Parameters and state, bit for bit."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    keys = ("exp_avg", "exp_avg_sq")
    return [bits(t) for p in given for t in (p, *(optimizer.state[p][key] for key in keys))]


def make(url: str, dtype: torch.dtype = torch.float32, **more: Any) -> torch.optim.Optimizer:
    given: Mapping[str, Any] = {**HYPER, **STOCHASTIC, **more}
    return nearstep.optim.AdamW(parameters(dtype), device=url, **given)


def train(optimizer: torch.optim.Optimizer, first: int = 0, stop: int = STEPS) -> list[bytes]:
    for number in range(first, stop):
        step(optimizer, number)
    return everything(optimizer)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=deep if n.startswith("sim") else []) for n in URLS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_blocks_lanes_cards_and_engines_change_no_bit(name, dtype):
    """Of fp32 parameters, and of bf16 parameters without a master."""
    more = "" if dtype is torch.float32 else "&parameter_format=bf16"
    expected = train(make(URLS["one"] + more, dtype))
    found = train(make(URLS[name] + (more if name != "host" else ""), dtype))
    assert found == expected
    assert len(found) == 3 * len(SHAPES)


def test_a_step_is_that_of_the_golden_model_with_the_documented_indices():
    """Parameters lie behind one another, each from a multiple of 32 on."""
    optimizer = make(URLS["two"])
    given = optimizer.param_groups[0]["params"]
    sizes = [each.numel() for each in given]
    starts = [0, *accumulate(-(-size // 32) * 32 for size in sizes)]
    states = [
        {"p": p.detach().reshape(-1).numpy().copy(), "m": zeros, "v": zeros}
        for p in given
        for zeros in [np.zeros(p.numel(), np.float32)]
    ]
    compared = 0
    for number in (0, 2):  # in which all have a gradient
        step(optimizer, number)
        t = 1 + number // 2
        scalars = adam_scalars(1e-2, (0.9, 0.999), 1e-8, 0.1, t, True)
        for index, p in enumerate(given):
            if not p.numel():
                continue
            g = {"g": p.grad.reshape(-1).numpy()}
            made = evaluate(ADAM, states[index] | g, scalars)
            words = {
                name: round_stochastically(
                    made[name], Draw(seed=77, step=t, stream=stream, index=starts[index])
                )
                for name, stream in (("m", 2), ("v", 3))
            }
            states[index] = {"p": made["p"]} | {n: fp.widen32(w, BF16) for n, w in words.items()}
            assert bits(p) == made["p"].tobytes()
            assert bits(optimizer.state[p]["exp_avg"]) == words["m"].tobytes()
            assert bits(optimizer.state[p]["exp_avg_sq"]) == words["v"].tobytes()
            compared += 3 * p.numel()
    assert compared == 2 * 3 * sum(sizes)


def test_a_seed_that_repeats_gives_the_same_course_and_another_one_another():
    first, again, other, nearest = (
        train(make(URLS["one"], **more))
        for more in ({}, {}, {"rounding_seed": 78}, {"rounding": "nearest"})
    )
    assert first == again
    assert first != other
    assert first != nearest
    assert other != nearest


def test_a_checkpoint_goes_on_with_the_same_bits_and_torch_loads_it():
    expected = train(make(URLS["one"]))
    before = make(URLS["one"])
    train(before, 0, 2)
    saved = copy.deepcopy(before.state_dict())
    assert saved["state"][0]["exp_avg"].dtype == torch.bfloat16
    after = make(URLS["two"])
    with torch.no_grad():
        for mine, its in zip(
            after.param_groups[0]["params"], before.param_groups[0]["params"], strict=True
        ):
            mine.copy_(its)
    after.load_state_dict(saved)
    assert train(after, 2) == expected
    twin = copy.deepcopy(before)
    assert train(twin, 2) == expected
    torchs = torch.optim.AdamW(parameters(torch.bfloat16), **HYPER)
    torchs.load_state_dict(saved)
    found = torchs.state[torchs.param_groups[0]["params"][0]]["exp_avg"]
    assert bits(found) == bits(saved["state"][0]["exp_avg"])


def test_drives_change_no_bit_and_know_the_formats():
    expected = train(make(URLS["one"]))
    more = {"memory": "256KiB"}
    with drives(2) as on:
        optimizer = make(URLS["one"], drives=on.store, **more)
        train(optimizer, 0, 2)
        del optimizer
        fp32 = "golden:axdimm?memory_bytes=8MiB"
        for other in (fp32, f"{fp32}&state_format=fp16"):
            with pytest.raises(ResumeError, match="m:bf16 v:bf16: it was changed"):
                nearstep.optim.AdamW(
                    parameters(), device=other, drives=on.store, resume=True, **HYPER, **more
                )
        resumed = make(URLS["two"], drives=on.store, resume=True, **more)
        assert train(resumed, 2) == expected


def test_what_the_kernel_was_built_without_is_refused():
    plain = "golden:axdimm?memory_bytes=1MiB"
    checked = 0
    for device, more, message in (
        (plain, {"state_dtype": torch.bfloat16}, "keeps m in fp32: .*state_format=bf16"),
        (plain, {"rounding": "stochastic"}, "stochastic_rounding=yes and a state in bf16"),
        (f"{plain}&state_format=bf16", {"state_dtype": torch.float32}, "keeps m in bf16"),
        (f"{plain}&state_format=bf16", {"state_dtype": torch.float16}, "keeps m in bf16"),
        (f"{plain}&state_format=bf16", {"rounding": "stochastic"}, "stochastic_rounding=yes"),
    ):
        with pytest.raises(UnsupportedOptionError, match=message):
            nearstep.optim.AdamW(parameters(), device=device, **more)
        checked += 1
    for more, message in (
        ({"state_dtype": torch.int8}, "state_dtype must be one of torch.float32"),
        ({"state_dtype": "bf16"}, "state_dtype must be one of torch.float32"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"rounding_seed": -1}, "rounding_seed must be an integer"),
        ({"rounding_seed": 1 << 32}, "rounding_seed must be an integer"),
        ({"rounding_seed": 0.5}, "rounding_seed must be an integer"),
    ):
        with pytest.raises(HyperparameterError, match=message):
            nearstep.optim.AdamW(parameters(), device=plain, **more)
        checked += 1
    momentum = f"{plain}&rules=sgd_momentum&state_format=bf16&stochastic_rounding=yes"
    with pytest.raises(UnsupportedOptionError, match="sgd counts no steps"):
        nearstep.optim.SGD(parameters(), 0.1, 0.9, device=momentum, rounding="stochastic")
    nearest = nearstep.optim.SGD(parameters(), 0.1, 0.9, device=momentum)
    step(nearest, 0)
    first = nearest.param_groups[0]["params"][0]
    assert nearest.state[first]["momentum_buffer"].dtype == torch.bfloat16
    assert checked == 11


def test_an_optimizer_of_a_file_can_be_rounded_too():
    rule = f"{FILE}:ADAM_BF16"
    device = f"golden:axdimm?memory_bytes=1MiB&rules={rule}&stochastic_rounding=yes"
    own = nearstep.optim.from_rule(rule, parameters(), device=device, **HYPER, **STOCHASTIC)
    assert train(own) == train(make(URLS["one"]))


@pytest.mark.parametrize("kind", ["offload", "init"])
def test_offloaded_models_take_the_same_course(kind):
    def course(url: str, how: str) -> list[bytes]:
        torch.manual_seed(SEED)
        with nearstep.open(url) as device:
            entered = nearstep.offload.init(device=device) if how == "init" else nullcontext()
            with entered:
                model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
            optimizer = nearstep.optim.AdamW(
                model.parameters(), device=device, **HYPER, **STOCHASTIC
            )
            engine = None if how == "plain" else nearstep.offload(model, optimizer, budget="50%")
            generator = torch.Generator().manual_seed(SEED)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 32, generator=generator)).square().mean().backward()
                optimizer.step()
            if engine is not None:
                engine.close()
            return everything(optimizer)

    found = course(URLS["two"], kind)
    assert found == course(URLS["one"], "plain")
    assert len(found) == 3 * 8
