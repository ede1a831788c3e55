"""Lion and RMSprop, each a few lines, against independent implementations."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.rule import Rule

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CAPABILITY = torch.backends.cpu.get_cpu_capability()

ORACLE = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"torch rounds otherwise without fused multiply-add: {CAPABILITY}",
)


def _example(name: str) -> dict[str, object]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_lion_follows_its_paper(rules: dict[str, Rule]) -> None:
    # Ref: Chen et al., Symbolic Discovery of Optimization Algorithms, Algorithm 2.
    rng, count, lr, beta1, beta2, decay = np.random.default_rng(4), 10_000, 1e-2, 0.9, 0.99, 0.1
    p, m = rng.standard_normal(count), np.zeros(count)
    state = {"p": p.astype(np.float32), "m": m.astype(np.float32)}
    p = state["p"].astype(np.float64)
    scalars = _example("lion")["lion_scalars"](lr, (beta1, beta2), decay)
    for _ in range(5):
        g = rng.standard_normal(count, np.float32)
        state = evaluate(rules["lion"], state | {"g": g}, scalars)
        p = p * (1 - lr * decay) - lr * np.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
    np.testing.assert_allclose(state["p"], p, rtol=2e-6, atol=1e-8)
    np.testing.assert_allclose(state["m"], m, rtol=2e-5, atol=1e-8)


@ORACLE
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_rmsprop_has_the_bits_of_torch_with_the_nearest_root(
    rules: dict[str, Rule], weight_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Outside its fused kernels torch takes roots from a library whose rounding differs from one
    # processor to another; numpy's are the nearest on all (IEEE 754 has no other).
    roots = 0

    def nearest_root(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal roots
        roots += tensor.numel()
        return torch.from_numpy(np.sqrt(tensor.numpy()))

    monkeypatch.setattr(torch.Tensor, "sqrt", nearest_root)
    rng, count, lr, alpha, eps = np.random.default_rng(5), 1 << 16, 1e-2, 0.99, 1e-8
    state = {"p": rng.normal(1, 0.1, count).astype(np.float32), "v": np.zeros(count, np.float32)}
    p, v = state["p"].astype(np.float64), np.zeros(count)
    parameter = torch.nn.Parameter(torch.from_numpy(state["p"].copy()))
    oracle = torch.optim.RMSprop(
        [parameter], lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, foreach=False
    )
    scalars = _example("rmsprop")["rmsprop_scalars"](lr, alpha, eps, weight_decay)
    for _ in range(10):
        gradient = rng.normal(1, 0.3, count).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient)
        oracle.step()
        state = evaluate(rules["rmsprop"], state | {"g": gradient}, scalars)
        g = gradient + weight_decay * p
        v = alpha * v + (1 - alpha) * g * g
        p = p - lr * g / (np.sqrt(v) + eps)
    moments = oracle.state[parameter]["square_avg"]
    compared = 0
    for mine, theirs in ((state["p"], parameter.detach()), (state["v"], moments)):
        assert np.array_equal(mine.view(np.uint32), theirs.numpy().view(np.uint32))
        compared += count
    print(f"{compared} words equal after {roots} roots; ATen capability {CAPABILITY}")
    assert roots == 10 * count
    # By itself torch's order is as near to the truth: half an ulp a step, at p of 1.
    assert 0 < np.abs(state["p"] - p).mean() < 10 * 0.5 * np.finfo(np.float32).eps


@pytest.mark.parametrize("name", ["lion", "rmsprop"])
def test_examples_are_at_most_fifteen_lines_of_rule(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    body = text[text.index("\ndef ") :]
    assert 0 < sum(bool(line.strip()) for line in body.splitlines()) <= 15


def test_rules_are_counted_in_units(rules: dict[str, Rule]) -> None:
    assert rules["lion"].units() == {"sub": 1, "mul": 1, "fma": 3}
    assert rules["adam_amsgrad"].units() == rules["adam"].units() == {
        "add": 2, "sub": 1, "mul": 3, "div": 2, "fma": 3, "sqrt": 1,
    }  # fmt: skip
