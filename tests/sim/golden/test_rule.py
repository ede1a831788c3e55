"""The numpy models of rules against torch, bit for bit; `tests/oracle` has exact arithmetic."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nearstep_sim.golden.rule import ArrayMismatchError, evaluate
from nearstep_spec.rule.adam import ADAM, ADAM_AMSGRAD, adam_scalars
from nearstep_spec.rule.errors import MissingScalarError
from nearstep_spec.rule.rules import OPTIMIZERS

CAPABILITY = torch.backends.cpu.get_cpu_capability()
CONDITIONS = (
    f"torch {torch.__version__}, fused=True, ATen capability {CAPABILITY}, sizes divisible by 16"
)
ORACLE = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"torch's fused kernels round otherwise without fused multiply-add: {CONDITIONS}",
)
Hyper = dict[str, Any]

TORCH = {
    "adam": (torch.optim.Adam, {"m": "exp_avg", "v": "exp_avg_sq", "v_max": "max_exp_avg_sq"}),
    "adamw": (torch.optim.AdamW, {"m": "exp_avg", "v": "exp_avg_sq", "v_max": "max_exp_avg_sq"}),
    "sgd": (torch.optim.SGD, {"m": "momentum_buffer"}),
    "adagrad": (torch.optim.Adagrad, {"v": "sum"}),
}
"""Class of torch, and names of states in it."""

SETTINGS: dict[str, tuple[str, Hyper]] = {
    "adam": ("adam", {}),
    "adam-decay": ("adam", {"weight_decay": 0.01}),
    "adamw": ("adamw", {"weight_decay": 0.0}),
    "adamw-decay": ("adamw", {"weight_decay": 0.01}),
    # 1 - b1 is rounded before 1 is taken off: torch tells.
    "adam-second-form": ("adam", {"betas": (0.3001, 0.999)}),
    "sgd": ("sgd", {"lr": 0.0123}),
    "sgd-decay": ("sgd", {"lr": 0.0123, "weight_decay": 0.037}),
    "momentum": ("sgd", {"lr": 0.0123, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "nesterov": ("sgd", {"lr": 0.0123, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adagrad": ("adagrad", {"lr": 0.0123, "lr_decay": 0.01, "weight_decay": 0.037}),
    "adagrad-plain": ("adagrad", {"lr": 0.0123, "initial_accumulator_value": 0.1}),
}


def _differing(
    name: str, hyper: Hyper, count: int, steps: int, seed: int, change: Hyper | None = None
) -> int:
    """Values of states that differ after any of `steps` steps, with some scalars changed."""
    optimizer, names = TORCH[name]
    rng = np.random.default_rng(seed)
    begin = hyper.get("initial_accumulator_value", 0.0)
    ours = OPTIMIZERS[name]
    values = ours.defaults | {n: v for n, v in hyper.items() if n != "initial_accumulator_value"}
    form = ours.form(values)
    p = (rng.standard_normal(count) * 0.02).astype(np.float32)
    state = {each: np.full(count, begin, np.float32) for each in form.rule.states} | {"p": p}
    if name == "sgd" and "m" in state:
        state["m"][:] = np.nan  # the first step does not look at it
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    oracle = optimizer([parameter], **hyper, fused=True)
    differing = compared = 0
    for step in range(1, steps + 1):
        g = (rng.standard_normal(count) * 10.0 ** rng.uniform(-8, 2, count)).astype(np.float32)
        g[rng.random(count) < 0.05] = 0.0
        g[rng.random(count) < 0.05] = -0.0
        parameter.grad = torch.from_numpy(g.copy())
        oracle.step()
        scalars = form.registers(values, step, step == 1) | (change or {})
        state |= evaluate(form.rule, state | {"g": g}, scalars)
        for each, found in state.items():
            theirs = parameter.detach()
            if each != "p":
                theirs = oracle.state[parameter][names[each]]
            wanted = theirs.numpy().view(np.uint32)
            differing += int(np.count_nonzero(found.view(np.uint32) != wanted))
            compared += count
    print(f"{CONDITIONS}, seed {seed}: {compared} values compared, {differing} differ")
    assert compared == count * steps * len(state)
    return differing


@ORACLE
@pytest.mark.parametrize(
    ("count", "seed"), [(1 << 14, 2), pytest.param(1 << 20, 1, marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_ten_steps_equal_torch_fused(setting: str, count: int, seed: int) -> None:
    assert _differing(*SETTINGS[setting], count, 10, seed) == 0


def _some_decay(rng: random.Random) -> float:
    return rng.choice([0.0, 10 ** rng.uniform(-9, 0), 1e-50])


def _random_adam(rng: random.Random) -> Hyper:
    first = (0.0, 0.1, 0.3, 0.49999999, 0.5, 0.50000001, 0.9, 0.95, 1 - 1e-4)
    return {
        "lr": 10 ** rng.uniform(-6, 0),
        "betas": (rng.choice([rng.random(), rng.choice(first)]), 1 - 10 ** rng.uniform(-5, 0)),
        "eps": 10 ** rng.uniform(-12, -3),
        "weight_decay": rng.choice([0.0, 10 ** rng.uniform(-5, 0)]),
        "amsgrad": rng.random() < 0.5,
    }


def _random_sgd(rng: random.Random) -> Hyper:
    nesterov = rng.random() < 0.4
    momentum = rng.choice([0.9, 0.5, rng.random(), 1 - 10 ** rng.uniform(-5, 0), 1e-3])
    return {
        "lr": 10 ** rng.uniform(-6, 0),
        "momentum": momentum if nesterov or rng.random() < 0.7 else 0.0,
        "dampening": 0.0 if nesterov else rng.choice([0.0, 1.0, rng.random(), 1 - 1e-4, 1e-9]),
        "weight_decay": _some_decay(rng),
        "nesterov": nesterov,
    }


def _random_adagrad(rng: random.Random) -> Hyper:
    return {
        "lr": 10 ** rng.uniform(-6, 0),
        "lr_decay": rng.choice([0.0, 10 ** rng.uniform(-6, 0)]),
        "weight_decay": _some_decay(rng),
        "initial_accumulator_value": rng.choice([0.0, 10 ** rng.uniform(-6, 0)]),
        "eps": 10 ** rng.uniform(-12, -3),
    }


DRAWS: dict[str, Callable[[random.Random], Hyper]] = {
    "adam": _random_adam,
    "adamw": _random_adam,
    "sgd": _random_sgd,
    "adagrad": _random_adagrad,
}


@ORACLE
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2, 3))]
)
def test_random_hyper_parameters_equal_torch_fused(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for checked in range(20):
        hyper = DRAWS[name](rng)
        assert _differing(name, hyper, 2048, 6, seed) == 0, (hyper, checked)


@ORACLE
def test_comparison_sees_another_order_of_operations() -> None:
    # dampening rounded to binary32 before 1 is taken off: another m_weight, and torch tells.
    hyper = {"momentum": 0.9, "dampening": 0.9999}
    wrong = {"m_weight": float(np.float32(1) - np.float32(0.9999))}
    assert _differing("sgd", hyper, 2048, 3, 0) == 0
    assert _differing("sgd", hyper, 2048, 3, 0, wrong) > 0
    scalars = adam_scalars(1e-3, (0.3001, 0.999), 1e-8, 0.0, 1, False)
    assert scalars["m_from_g"] == 1
    assert scalars["m_weight"] != float(np.float32((1 - 0.3001) - 1))


@ORACLE
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_maximum_of_second_moments_is_that_of_torchs_vectors(eps: float) -> None:
    # Of zeros torch gives the second, and NaN if either is one. A v of -0 comes of one below 0.
    inf, nan, least = np.inf, np.nan, 1.4e-45
    given = [
        (0.0, 0.0, 0.0), (-0.0, 0.0, 0.0), (0.0, -least, 9.2e-23), (-0.0, -least, 9.2e-23),
        (0.0, -least, 0.0), (-0.0, -least, 0.0), (least, 0.0, 0.0), (-least, 0.0, 0.0),
        (1.0, nan, 0.0), (nan, 1.0, 0.0), (nan, nan, 0.0), (inf, nan, 0.0),
        (2.0, 1.0, 0.0), (0.5, 1.0, 0.0), (-1.0, -2.0, 0.0), (inf, -inf, 0.0),
    ]  # fmt: skip
    columns = np.array(given, np.float32).T.copy()
    arrays = dict(zip(("v_max", "v", "g"), columns, strict=True))
    arrays |= {"p": np.zeros(16, np.float32), "m": np.ones(16, np.float32)}
    lr, betas = 1e-3, (0.9, 0.9)
    theirs = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    lists = ([theirs[name]] for name in ("p", "g", "m", "v", "v_max"))
    torch._fused_adam_(
        *lists, [torch.tensor(1.0)], lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=0.0,
        eps=eps, amsgrad=True, maximize=False,
    )  # fmt: skip
    written = evaluate(ADAM_AMSGRAD, arrays, adam_scalars(lr, betas, eps, 0.0, 1, False))
    compared = 0
    for name, ours in written.items():
        other = theirs[name].numpy()
        print(name, [f"{word:08x}" for word in ours.view(np.uint32)])
        number = ~np.isnan(other)
        assert (np.isnan(ours) == ~number).all(), name
        assert (ours.view(np.uint32)[number] == other.view(np.uint32)[number]).all(), name
        compared += int(np.count_nonzero(number))
    assert compared > 30
    assert [f"{word:08x}" for word in written["v_max"].view(np.uint32)[:6]] == [
        "00000000", "00000000", "80000000", "80000000", "00000000", "80000000",
    ]  # fmt: skip


def test_non_finite_gradients_give_the_default_nan_and_touch_no_neighbour() -> None:
    rng = np.random.default_rng(6)
    arrays = {name: rng.random(6, np.float32) for name in "pgmv"}
    scalars = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.01, 2, True)
    clean = evaluate(ADAM, arrays, scalars)
    arrays["g"].view(np.uint32)[1:4] = 0xFFC0_0001, 0x7F80_0000, 0xFF80_0000
    dirty = evaluate(ADAM, arrays, scalars)
    assert [hex(word) for word in dirty["p"].view(np.uint32)[1:4]] == ["0x7fc00000"] * 3
    assert [hex(word) for word in dirty["m"].view(np.uint32)[1:4]] == [
        "0x7fc00000", "0x7f800000", "0xff800000",
    ]  # fmt: skip
    assert [hex(word) for word in dirty["v"].view(np.uint32)[1:4]] == [
        "0x7fc00000", "0x7f800000", "0x7f800000",
    ]  # fmt: skip
    for name in "pmv":
        assert (clean[name] == dirty[name]).tolist() == [True, False, False, False, True, True]


def test_arrays_and_scalars_that_do_not_fit_are_refused() -> None:
    scalars = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, True)
    arrays = {name: np.zeros(4, np.float32) for name in "pgmv"}
    with pytest.raises(ArrayMismatchError, match="reads p, g, m, v, not p"):
        evaluate(ADAM, {"p": arrays["p"]}, scalars)
    with pytest.raises(
        ArrayMismatchError, match=r"'g' must be float32 of shape \(4,\), not float64"
    ):
        evaluate(ADAM, arrays | {"g": np.zeros(4)}, scalars)
    with pytest.raises(ArrayMismatchError, match=r"'v' must be float32 of shape \(4,\)"):
        evaluate(ADAM, arrays | {"v": np.zeros(5, np.float32)}, scalars)
    with pytest.raises(MissingScalarError, match=r"adam.py:\d+: No value for eps"):
        evaluate(ADAM, arrays, {name: value for name, value in scalars.items() if name != "eps"})


def test_shape_is_kept_and_inputs_are_not_changed() -> None:
    rng = np.random.default_rng(8)
    arrays = {name: rng.random((3, 5, 7), np.float32) for name in "pgmv"}
    before = {name: array.copy() for name, array in arrays.items()}
    scalars = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, True)
    written = evaluate(ADAM, arrays, scalars)
    assert {array.shape for array in written.values()} == {(3, 5, 7)}
    assert all((arrays[name] == before[name]).all() for name in arrays)
