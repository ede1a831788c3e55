"""The numpy model of Adam against torch and against float64."""

import random

import numpy as np
import pytest
import torch

from nearstep_sim.golden.rule import ArrayMismatchError, evaluate
from nearstep_spec.rule.adam import ADAM, ADAM_AMSGRAD, ORDERS, adam_scalars
from nearstep_spec.rule.errors import MissingScalarError

CAPABILITY = torch.backends.cpu.get_cpu_capability()
CONDITIONS = (
    f"torch {torch.__version__}, fused=True, ATen capability {CAPABILITY}, sizes divisible by 16"
)
ORACLE = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"torch's fused Adam rounds otherwise without fused multiply-add: {CONDITIONS}",
)

Hyper = tuple[float, tuple[float, float], float, float]


NAMES = {"m": "exp_avg", "v": "exp_avg_sq", "v_max": "max_exp_avg_sq"}  # in torch's state


def _differing(
    optimizer: type[torch.optim.Optimizer],
    hyper: Hyper,
    count: int,
    steps: int,
    seed: int,
    *,
    amsgrad: bool = False,
) -> int:
    """Values of states that differ after any of `steps` steps."""
    rule = ADAM_AMSGRAD if amsgrad else ADAM
    lr, betas, eps, weight_decay = hyper
    rng = np.random.default_rng(seed)
    p = (rng.standard_normal(count) * 0.02).astype(np.float32)
    state = {name: np.zeros(count, np.float32) for name in rule.states} | {"p": p}
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    oracle = optimizer(
        [parameter],
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        fused=True,
    )
    differing = 0
    for step in range(1, steps + 1):
        scale = 10.0 ** rng.uniform(-8, 2, count)
        g = (rng.standard_normal(count) * scale).astype(np.float32)
        parameter.grad = torch.from_numpy(g)
        oracle.step()
        decoupled = optimizer is torch.optim.AdamW
        scalars = adam_scalars(lr, betas, eps, weight_decay, step, decoupled)
        state = evaluate(rule, state | {"g": g}, scalars)
        for name, ours in state.items():
            theirs = parameter.detach()
            if name != "p":
                theirs = oracle.state[parameter][NAMES[name]]
            differing += int(
                np.count_nonzero(ours.view(np.uint32) != theirs.numpy().view(np.uint32))
            )
    return differing


@ORACLE
@pytest.mark.deep
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_ten_steps_of_a_million_parameters_equal_torch_fused(optimizer, weight_decay) -> None:
    print(CONDITIONS)
    hyper = (1e-3, (0.9, 0.999), 1e-8, weight_decay)
    assert _differing(optimizer, hyper, 1 << 20, 10, seed=1) == 0


@ORACLE
def test_ten_steps_of_many_parameters_equal_torch_fused() -> None:
    print(CONDITIONS)
    hyper = (1e-3, (0.9, 0.999), 1e-8, 0.01)
    assert _differing(torch.optim.AdamW, hyper, 1 << 17, 10, seed=1) == 0


@ORACLE
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (2, 3))]
)
def test_random_hyper_parameters_equal_torch_fused(seed: int) -> None:
    print(f"{CONDITIONS}, seed {seed}")
    rng = random.Random(seed)
    first = (0.0, 0.1, 0.3, 0.49999999, 0.5, 0.50000001, 0.9, 0.95, 1 - 1e-4)
    checked = 0
    for _ in range(12):
        hyper = (
            10 ** rng.uniform(-6, 0),
            (rng.choice([rng.random(), rng.choice(first)]), 1 - 10 ** rng.uniform(-5, 0)),
            10 ** rng.uniform(-12, -3),
            rng.choice([0.0, 10 ** rng.uniform(-5, 0)]),
        )
        optimizer = rng.choice([torch.optim.Adam, torch.optim.AdamW])
        amsgrad = bool(checked % 2)
        differing = _differing(optimizer, hyper, 2048, 8, seed, amsgrad=amsgrad)
        assert differing == 0, (optimizer, hyper, amsgrad)
        checked += 1
    assert checked == 12


@ORACLE
def test_second_form_of_the_interpolation_subtracts_from_the_rounded_weight() -> None:
    # Where this differs from rounding (1 - b1) - 1, torch tells which one it is.
    beta1 = 0.3001
    scalars = adam_scalars(1e-3, (beta1, 0.999), 1e-8, 0.0, 1, False)
    assert scalars["m_from_g"] == 1
    assert scalars["m_weight"] != float(np.float32((1 - beta1) - 1))
    hyper = (1e-3, (beta1, 0.999), 1e-8, 0.0)
    assert _differing(torch.optim.Adam, hyper, 1 << 14, 3, seed=3) == 0


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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("beta1", [0.3, 0.9])
def test_both_orders_are_near_float64(order: str, decoupled: bool, beta1: float) -> None:
    rule, scalars = ORDERS[order]
    rng = np.random.default_rng(5)
    count, lr, beta2, eps, decay = 10_000, 1e-2, 0.99, 1e-8, 0.1
    state = {"p": rng.normal(1, 0.1, count).astype(np.float32)}
    state |= {name: np.zeros(count, np.float32) for name in "mv"}
    p, m, v = (state[name].astype(np.float64) for name in "pmv")
    for step in range(1, 6):
        gradient = rng.normal(1, 0.3, count).astype(np.float32)
        values = scalars(lr, (beta1, beta2), eps, decay, step, decoupled)
        state = evaluate(rule, state | {"g": gradient}, values)
        g = gradient.astype(np.float64) + (0 if decoupled else decay * p)
        p = p * (1 - lr * decay) if decoupled else p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr * (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps)
    for got, exact in zip(state.values(), (p, m, v), strict=True):
        np.testing.assert_allclose(got, exact, rtol=3e-6)


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
