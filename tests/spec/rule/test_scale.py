"""Rules with a factor on their gradients."""

import numpy as np
import pytest

from nearstep_sim.golden import fp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import RuleSet
from nearstep_spec.rule.scale import scaled

NAMES = ("adam", "sgd", "sgd_momentum", "adagrad")


@pytest.mark.parametrize("factor", [1.0, 0.3, 2.0**-20, 0.0])
@pytest.mark.parametrize("index", range(len(NAMES)))
def test_it_is_the_rule_with_its_gradients_multiplied_before(index, factor):
    print("seed 8")
    rng = np.random.default_rng(8)
    plain, with_factor = RuleSet(NAMES, "default"), RuleSet(NAMES, "default", scaled=True)
    arrays = {name: rng.standard_normal(1000).astype(np.float32) for name in "pgmv"}
    arrays["v"] = np.square(arrays["v"])
    arrays["g"][:4] = np.nan, np.inf, -0.0, 1e-42
    scalars = {
        **{name: float(rng.random()) + 0.1 for name in plain.whole.scalars},
        **{name: bool(rng.integers(2)) for name in plain.switches},
        **{name: name == f"is_{NAMES[index]}" for name in plain.selectors},
    }
    before = arrays | {"g": fp.mul32(arrays["g"], np.full(1000, factor, np.float32))}
    expected = evaluate(plain.whole, before, scalars)
    got = evaluate(with_factor.whole, arrays, scalars | {"gradient_scale": factor})
    own = with_factor.rules[index]
    alone = {name: value for name, value in scalars.items() if name in own.registers()}
    single = evaluate(
        own, {name: arrays[name] for name in own.arrays_in}, alone | {"gradient_scale": factor}
    )
    assert set(single) == set(own.arrays_out)
    for name, value in single.items():
        assert value.tobytes() == got[name].tobytes() == expected[name].tobytes()


def test_all_rules_share_one_multiplier_more():
    plain, with_factor = RuleSet(NAMES, "default"), RuleSet(NAMES, "default", scaled=True)
    assert with_factor.whole.units() == {
        **plain.whole.units(),
        "mul": plain.whole.units()["mul"] + 1,
    }
    assert with_factor.switches == plain.switches
    assert with_factor.selectors == plain.selectors
    assert [rule.name for rule in with_factor.rules] == [rule.name for rule in plain.rules]


def _with_the_name(p, g, *, gradient_scale):
    return {"p": p - g * gradient_scale}


def _without_gradients(p):
    return {"p": p + p}


@pytest.mark.parametrize("define", [_with_the_name, _without_gradients])
def test_a_rule_that_cannot_be_scaled_is_refused(define):
    named = define is _with_the_name
    rule = Rule(
        "mine",
        define,
        states=("p",),
        inputs=("g",) if named else (),
        scalars=("gradient_scale",) if named else (),
    )
    with pytest.raises(RuleError, match="must have an array 'g' and no 'gradient_scale'"):
        scaled(rule)
