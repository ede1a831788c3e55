"""Optimizers whose rule keeps state in bfloat16: torch's fused AdamW on such parameters."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import nearstep
from nearstep.torch.errors import ParameterError
from nearstep_sim.golden import fp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16
from nearstep_spec.rule.adam import ADAM, adam_scalars

from ..driver.conftest import chosen
from .conftest import like_torch

FILE = Path(__file__).resolve().parents[3] / "examples" / "adam_bf16.py"
MOMENTS, ALL = f"{FILE}:ADAM_BF16", f"{FILE}:ADAM_ALL_BF16"
URLS = {
    "golden": "golden:axdimm?engine=numpy",
    "golden-channels": "golden:axdimm?engine=numpy&channels=2",
    "golden-card": "golden:smartssd?",
    "sim": "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&memory=halfduplex&stall=0.1",
    "sim-dimm": "sim:axdimm?memory=ddr4-1600&channels=2&functional_units=4&fu=native",
}
SHAPES = ((33, 17), (5,), (), (200,), (129,), (0,))
HYPER = {"lr": 1e-2, "weight_decay": 0.1}
SEED = 811


@pytest.fixture(params=chosen(URLS, {"golden-card", "sim", "sim-dimm"}))
def url(request: pytest.FixtureRequest) -> str:
    return URLS[request.param]


def device_of(url: str, rule: str, *options: str) -> str:
    start = url if url.endswith("?") else f"{url}&"
    return start + "&".join((f"rules={rule}", *options))


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def same(one: Tensor, other: Tensor) -> int:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.detach().view(torch.int16).equal(other.detach().view(torch.int16))
    return one.numel()


@like_torch
@pytest.mark.parametrize("gradients", ["fp32", "fp32,bf16"])
def test_bf16_parameters_train_as_with_torchs_fused_adamw(url, gradients):
    """Through a change of a parameter, a change of a moment, and checkpoints in both directions."""
    mine = parameters(torch.bfloat16)
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in mine]
    torchs = torch.optim.AdamW(theirs, fused=True, **HYPER)
    device = device_of(url, ALL, f"gradient_formats={gradients}")
    ours = nearstep.optim.from_rule(ALL, mine, device=device, **HYPER)
    compared = 0
    for step in range(8):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn(one.shape).bfloat16()
            other.grad = one.grad.clone()
        ours.step()
        torchs.step()
        for one, other in zip(mine, theirs, strict=True):
            compared += same(one, other)
        if step == 2:
            with torch.no_grad():
                for each in (mine[0], theirs[0]):
                    each[0] = 7.0
            for optimizer, given in ((ours, mine), (torchs, theirs)):
                optimizer.state[given[1]]["exp_avg"].mul_(-0.5)
        if step == 4:
            ours.load_state_dict(torchs.state_dict())
        if step == 5:
            torchs.load_state_dict(ours.state_dict())
        if step == 6:
            ours = copy.deepcopy(ours)
            mine = ours.param_groups[0]["params"]
    for one, other in zip(mine, theirs, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            compared += same(ours.state[one][key], torchs.state[other][key])
    size = sum(each.numel() for each in mine)
    assert compared == 10 * size
    assert "master_param" not in ours.state_dict()["state"][0]


@like_torch
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_formats_of_the_device_make_bf16_parameters_equal_torchs(kind, amsgrad):
    """By options of the kernel and rules of the package; with special values among gradients."""
    sizes = (32, 4096, 64 * 33)
    torch.manual_seed(SEED)
    mine = [torch.nn.Parameter(torch.randn(size).bfloat16()) for size in sizes]
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in mine]
    device = "golden:axdimm?rules=adam,adam_amsgrad&gradient_formats=fp32,bf16&memory_bytes=8MiB"
    device += "&state_format=bf16&parameter_format=bf16"
    options = {**HYPER, "amsgrad": amsgrad}
    ours = getattr(nearstep.optim, kind)(mine, device=device, **options)
    torchs = getattr(torch.optim, kind)(theirs, fused=True, **options)
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-39, 3e38, torch.inf, -torch.inf, torch.nan])
    compared = 0
    for step in range(5):
        for one, other in zip(mine, theirs, strict=True):
            scale = 10.0 ** torch.randint(-6, 3, one.shape)
            one.grad = (torch.randn(one.shape) * scale).bfloat16()
            if step == 2:
                one.grad[: special.numel()] = special.bfloat16()
            other.grad = one.grad.clone()
        ours.step()
        torchs.step()
    for one, other in zip(mine, theirs, strict=True):
        keys = [key for key in torchs.state[other] if key != "step"]
        for found, wanted in (
            (one.detach(), other.detach()),
            *((ours.state[one][key], torchs.state[other][key]) for key in keys),
        ):
            nan = wanted.isnan()
            assert found.isnan().equal(nan)
            compared += same(found[~nan].contiguous(), wanted[~nan].contiguous())
    assert compared > (4 if amsgrad else 3) * (sum(sizes) - 3 * special.numel())


@like_torch
def test_torch_rounds_once_at_the_end():
    """Parameters follow from moments in fp32: from rounded ones many would be others."""
    size = 1 << 14
    rng = np.random.default_rng(SEED)
    given = {
        name: fp.narrow32((rng.standard_normal(size) * 0.1).astype(np.float32), BF16)
        for name in "pgmv"
    }
    given["v"] &= 0x7FFF

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(given[name].view(np.int16).copy()).view(torch.bfloat16)

    parameter = torch.nn.Parameter(tensor("p"))
    parameter.grad = tensor("g")
    torchs = torch.optim.AdamW([parameter], fused=True, **HYPER)
    torchs.state[parameter] = {
        "step": torch.tensor(4.0), "exp_avg": tensor("m"), "exp_avg_sq": tensor("v"),
    }  # fmt: skip
    torchs.step()
    found = parameter.detach().view(torch.int16).numpy().view(np.uint16)
    wide = {name: fp.widen32(words, BF16) for name, words in given.items()}
    scalars = adam_scalars(1e-2, (0.9, 0.999), 1e-8, 0.1, 5, True)
    made = evaluate(ADAM, wide, scalars)
    assert found.tobytes() == fp.narrow32(made["p"], BF16).tobytes()
    # The rule again with moments that are rounded and stay as they are.
    rounded = {name: fp.widen32(fp.narrow32(made[name], BF16), BF16) for name in "mv"}
    kept = scalars | {"m_weight": 0.0, "m_from_g": 0, "v_weight": 0.0, "v_decay": 1.0}
    early = evaluate(ADAM, wide | rounded, kept)
    assert np.count_nonzero(found != fp.narrow32(early["p"], BF16)) > size // 1000


def test_a_parameter_that_the_rule_cannot_keep_is_refused(url):
    device = device_of(url, ALL)
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(ParameterError, match="of bf16, as the rule keeps them"):
            nearstep.optim.from_rule(ALL, parameters(dtype), device=device, **HYPER)
    given = parameters(torch.bfloat16)
    optimizer = nearstep.optim.from_rule(ALL, given, device=device, **HYPER)
    before = given[0].detach().clone()
    given[3].data = given[3].data.float()
    for each in given:
        each.grad = torch.ones_like(each)
    with pytest.raises(ParameterError, match="of bf16, as the rule keeps them"):
        optimizer.step()
    assert same(given[0], before)
    given[3].data = given[3].data.bfloat16()
    given[3].grad = torch.ones_like(given[3])
    optimizer.step()
    assert not given[0].equal(before)
