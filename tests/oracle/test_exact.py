"""Every rule against exact arithmetic, and the papers' and torch's formulas in it.

The formulas are `formulas`, the arithmetic is `Exact`; neither shares anything with rules as they
are programmed. numpy's model of a rule and its C++ are both compared, and so is `Plain`, which
other tests use where exact numbers would take too long.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep_sim.golden import formats_cpp, fp, rule_cpp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16, FP16, FP32
from nearstep_spec.rule.adam import ADAM_PAPER
from nearstep_spec.rule.axpby import AXPBY
from nearstep_spec.rule.optimizer import Part
from nearstep_spec.rule.rules import BY_RULE, OPTIMIZERS
from nearstep_spec.rule.scale import scaled

from ..sim.golden import exact
from . import arithmetic
from .arithmetic import Exact, Plain
from .draws import SPECIALS, crossed, hyper, patterns
from .formulas import FORMULAS, axpby

Bits = NDArray[np.uint32]
FORMATS = {"fp16": FP16, "bf16": BF16}
FEW = SPECIALS[[0, 1, 4, 9, 15, 16, 17]]
"""Specials, few enough for four arrays of them."""


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", ["add", "mul", "fma", "div", "sqrt"])
def test_whole_numbers_round_as_fractions(name: str, count: int) -> None:
    """Specials crossed with specials, any patterns, and sums and quotients near ties."""
    operation, reference = getattr(arithmetic, name), getattr(exact, name)
    arity = {"fma": 3, "sqrt": 1}.get(name, 2)
    rng = np.random.default_rng(23)
    values = SPECIALS if arity < 3 else FEW
    vectors = [crossed(arity, values), [patterns(rng, count) for _ in range(arity)]]
    few_digits = rng.integers(0, 1 << 8, (arity, count), dtype=np.uint32) << 23
    few_digits |= rng.choice(np.array([0, 1, 2, 3, 0x7F_FFFF], np.uint32), (arity, count))
    vectors.append([*np.where(np.isnan(few_digits.view(np.float32)), 0x3F80_0000, few_digits)])
    compared = 0
    for vector in vectors:
        for words in zip(*(each.tolist() for each in vector), strict=True):
            found, expected = operation(*words), reference(FP32, *words)[0]
            assert found == expected, (name, [f"{word:#010x}" for word in words])
            compared += 1
    print(f"{compared} results of {name} compared")
    assert compared == 2 * count + (2 * values.size - 1) ** arity


def test_there_is_a_formula_for_every_rule() -> None:
    assert set(FORMULAS) == {*BY_RULE, ADAM_PAPER.name}


def in_exact_numbers(
    name: str, arrays: Mapping[str, Bits], h: Mapping[str, Any]
) -> dict[str, Bits]:
    """Results of a rule, element by element."""
    formula = FORMULAS[name][1]
    factor = Exact.number(h.get("gradient_scale", 1.0))
    rows = []
    for bits in zip(*(array.tolist() for array in arrays.values()), strict=True):
        x = dict(zip(arrays, map(Exact, bits), strict=True))
        if "gradient_scale" in h:
            x["g"] = x["g"] * factor
        rows.append({key: value.bits for key, value in formula(Exact, x, h).items()})
    return {key: np.array([row[key] for row in rows], np.uint32) for key in rows[0]}


def in_numpy(name: str, arrays: Mapping[str, Bits], h: Mapping[str, Any]) -> dict[str, Bits]:
    """The same in float32."""
    x = {key: Plain(bits.view(np.float32)) for key, bits in arrays.items()}
    if "gradient_scale" in h:
        x["g"] = x["g"] * Plain.number(h["gradient_scale"])
    made = FORMULAS[name][1](Plain, x, h)
    return {key: value.values.view(np.uint32) for key, value in made.items()}


def as_programmed(name: str, arrays: Mapping[str, Bits], h: Mapping[str, Any], engine: str) -> Any:
    """The same, of the rule."""
    optimizer = OPTIMIZERS[FORMULAS[name][0]]
    form = optimizer.by_rule["adam" if name == "adam_paper" else name]
    form = form.ordered("paper" if name == "adam_paper" else "default")
    given = {**optimizer.defaults, **h}
    registers: dict[str, float] = dict(
        form.registers(given, h.get("step", 1), h.get("first", False), h.get("part", Part()))
    )
    rule = form.rule
    if "gradient_scale" in h:
        rule = scaled(rule)
        registers["gradient_scale"] = float(np.float32(h["gradient_scale"]))
    floats = {key: bits.view(np.float32).copy() for key, bits in arrays.items()}
    if engine == "cpp":
        rule_cpp.kernel(rule)(floats, registers)
        made = {key: floats[key] for key in rule.states}
    else:
        made = evaluate(rule, floats, registers)
    return {key: value.view(np.uint32) for key, value in made.items()}


def compare(name: str, arrays: Mapping[str, Bits], h: Mapping[str, Any]) -> int:
    """How many results were compared, each with three others."""
    expected = in_exact_numbers(name, arrays, h)
    others = {
        "numpy": in_numpy(name, arrays, h),
        "model": as_programmed(name, arrays, h, "numpy"),
        "C++": as_programmed(name, arrays, h, "cpp"),
    }
    for other, found in others.items():
        assert set(found) == set(expected), other
        for key, bits in expected.items():
            wrong = np.flatnonzero(bits != found[key])
            at = {n: f"{a[wrong[0]]:#010x}" for n, a in arrays.items()} if wrong.size else {}
            assert wrong.size == 0, (
                f"{name}, {other}, {key} of {at}: expected {bits[wrong[0]]:#010x}, "
                f"found {found[key][wrong[0]]:#010x}; {dict(h)}"
            )
    return sum(bits.size for bits in expected.values())


def drawn(name: str, count: int, seed: int) -> dict[str, Bits]:
    rng = np.random.default_rng(seed)
    return {key: patterns(rng, count) for key in FORMULAS[name][2]}


DRAWS = [(40, 12), pytest.param(1000, 20, marks=pytest.mark.deep)]


@pytest.mark.parametrize(("count", "times"), DRAWS)
@pytest.mark.parametrize("name", FORMULAS)
def test_every_rule_is_that_of_exact_numbers(name: str, count: int, times: int) -> None:
    seed = 19
    rng = random.Random(f"{name} {seed}")
    compared = 0
    for number in range(times):
        h = hyper(name, rng)
        if number % 2:
            h["gradient_scale"] = rng.choice([1.0, -1.0, 2.0**-11, rng.uniform(-3, 3), 0.0])
        compared += compare(name, drawn(name, count, seed + number), h)
    print(f"seed {seed}: {compared} results of {name} in {times} steps compared, each with three")
    assert compared >= times * count


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deep] if len(arrays) > 3 else [])
        for name, (_, _, arrays) in FORMULAS.items()
    ],
)
def test_specials_crossed_with_specials(name: str) -> None:
    names = FORMULAS[name][2]
    values = SPECIALS if len(names) < 3 else FEW
    arrays = dict(zip(names, crossed(len(names), values), strict=True))
    rng = random.Random(f"{name} specials")
    compared = sum(compare(name, arrays, hyper(name, rng)) for _ in range(2))
    print(f"{compared} results of {name} compared, each with three")
    assert compared >= 2 * (2 * values.size - 1) ** len(names)


@pytest.mark.parametrize("count", [100, pytest.param(30_000, marks=pytest.mark.deep)])
def test_axpby_is_that_of_exact_numbers(count: int) -> None:
    """Random vectors, and specials crossed with specials; coefficients are specials, too."""
    seed, compared = 7, 0
    rng = np.random.default_rng(seed)
    drawn_ones = patterns(rng, 64).view(np.float32).astype(np.float64)
    coefficients = drawn_ones[np.isfinite(drawn_ones)][:12].reshape(6, 2).tolist()
    values = SPECIALS if count > 100 else FEW
    vectors = [[patterns(rng, count), patterns(rng, count)], crossed(2, values)]
    for a, b in [*coefficients, [1.0, 1.0], [-0.0, 0.0]]:
        h = {"a": a, "b": b}
        for given in vectors:
            x = dict(zip("xy", given, strict=True))
            floats = {key: bits.view(np.float32) for key, bits in x.items()}
            model = evaluate(AXPBY, floats, h)["z"].view(np.uint32)
            plain = axpby(Plain, {k: Plain(v) for k, v in floats.items()}, h)["z"].values
            words = zip(*(bits.tolist() for bits in given), strict=True)
            exactly = np.array([axpby(Exact, _numbers(each), h)["z"].bits for each in words])
            for found in (model, plain.view(np.uint32)):
                wrong = np.flatnonzero(found != exactly)
                assert wrong.size == 0, (h, [f"{bits[wrong[0]]:#010x}" for bits in given])
            compared += exactly.size
    print(f"seed {seed}: {compared} results compared, each with two")
    assert compared == 8 * (count + (2 * values.size - 1) ** 2)


def _numbers(words: tuple[int, ...]) -> dict[str, Exact]:
    return dict(zip("xy", map(Exact, words), strict=True))


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.deep)])
def test_formats_in_and_out_are_those_of_exact_numbers(every: int) -> None:
    """Patterns of 16 bits in; out, what lies around them and around ties between them."""
    compared = 0
    for name, fmt in FORMATS.items():
        all_of_it = np.arange(0, 1 << 16, every, dtype=np.uint16)
        exactly = np.array([exact.convert(fmt, FP32, int(x))[0] for x in all_of_it], np.uint32)
        for wide in (fp.widen32(all_of_it, fmt), formats_cpp.widen32(all_of_it, fmt)):
            assert (wide.view(np.uint32) == exactly).all(), name
        half = 1 << (FP32.mantissa - fmt.mantissa - 1)
        near = exactly[::4, None] + np.array([-1, 0, 1, half - 1, half, half + 1], np.int64)
        words = (near & 0xFFFF_FFFF).astype(np.uint32).reshape(-1)
        words = np.concatenate([words, SPECIALS, patterns(np.random.default_rng(3), 600)])
        out = np.array([exact.convert(FP32, fmt, int(x))[0] for x in words], np.uint16)
        floats = words.view(np.float32)
        for narrow in (fp.narrow32(floats, fmt), formats_cpp.narrow32(floats, fmt)):
            assert (narrow == out).all(), name
        compared += exactly.size + out.size
    print(f"{compared} conversions compared, each with two")
    assert compared > 5 * (1 << 16) // every


def test_another_order_of_operations_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    h = hyper("adam", random.Random(1)) | {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    h |= {"lr": 1e-2, "step": 3}
    arrays = drawn("adam", 200, 5)
    assert compare("adam", arrays, h) == 600
    expected = in_exact_numbers("adam", arrays, h)
    paper = as_programmed("adam_paper", arrays, h, "numpy")
    assert all((expected[key] != paper[key]).any() for key in "pmv")
    with monkeypatch.context() as changed:
        changed.setitem(FORMULAS, "adam", FORMULAS["adam_paper"])
        with pytest.raises(AssertionError, match=r"adam, model, . of .*: expected 0x"):
            compare("adam", arrays, h)
