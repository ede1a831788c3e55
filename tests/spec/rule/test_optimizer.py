"""An optimizer is data: what is declared fits together, and a kernel is told apart by it."""

from pathlib import Path

import pytest

from nearstep_spec.codec import digest, from_text, to_text
from nearstep_spec.rule.errors import MissingScalarError, RuleError, UnknownNameError
from nearstep_spec.rule.expr import fma
from nearstep_spec.rule.optimizer import Flag, Form, Number, Numbers, Optimizer
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import BY_RULE, OPTIMIZERS, UnknownRuleError, optimizer_named
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig
from nearstep_spec.updater.operands import operands
from nearstep_spec.updater.registers import adam_kernel_map

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def _down(p, g, *, rate):
    return {"p": fma(rate, g, p)}


def _mean(p, g, m, *, rate):
    return {"p": fma(rate, m, p), "m": m + g}


DOWN = Rule("down", _down, states=("p",), inputs=("g",), scalars=("rate",))
MEAN = Rule("mean", _mean, states=("p", "m"), inputs=("g",), scalars=("rate",))


def _rate(lr):
    return {"rate": -lr}


HYPER = {"lr": Number(0.1), "average": Flag()}


def test_every_optimizer_is_found_and_has_the_registers_of_its_rules() -> None:
    assert {"adam", "adamw", "sgd", "adagrad"} <= set(OPTIMIZERS)
    checked = 0
    for name, optimizer in OPTIMIZERS.items():
        assert optimizer_named(name) is optimizer
        for form in optimizer.all_forms:
            values = form.registers(optimizer.defaults, 3, False)
            assert list(values) == list(form.rule.registers())
            checked += len(values)
            config = UpdateKernelConfig(rules=(next(iter(optimizer.by_rule)),))
            assert {"p_address", "g_address"} <= {each.name for each in adam_kernel_map(config)}
    assert checked > 60
    assert set(BY_RULE) >= {"adam", "adam_amsgrad", "sgd", "sgd_momentum", "adagrad"}
    assert BY_RULE["adam"].name == "adam"  # not adamw, which has the rule too


def test_a_form_is_chosen_by_hyper_parameters() -> None:
    sgd, adam = OPTIMIZERS["sgd"], OPTIMIZERS["adam"]
    assert sgd.form(sgd.defaults).rule.name == "sgd"
    assert sgd.form(sgd.defaults | {"momentum": 0.9}).starts
    amsgrad = adam.form(adam.defaults | {"amsgrad": True})
    assert adam.keys(amsgrad) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert adam.optional == {"max_exp_avg_sq"}
    assert sgd.optional == {"momentum_buffer"}
    assert adam.form(adam.defaults).ordered("paper").rule.name == "adam_paper"
    assert sgd.form(sgd.defaults).ordered("paper").rule.name == "sgd"


def test_registers_are_rounded_once_to_binary32() -> None:
    form = Form(rule=DOWN, scalars=_rate)
    assert form.registers({"lr": 0.1}, 1, False) == {"rate": -0.10000000149011612}
    assert form.registers({"lr": 1e300}, 1, False) == {"rate": float("-inf")}


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "expected"),
    [
        (Number(0.0), 1e30, -1e-9, "finite and at least 0"),
        (Number(0.0), 0.0, float("nan"), "finite and at least 0"),
        (Number(0.0, low=-1.0), -1.0, float("inf"), "finite and at least -1"),
        (Numbers((0.9, 0.9)), 0.0, 1.0, "in [0, 1)"),
        (Number(0.0, below=2.0, allowed="small"), 1.9, 2.0, "small"),
    ],
)
def test_bounds_are_data(kind: Number, right: float, wrong: float, expected: str) -> None:
    assert kind.holds(right)
    assert not kind.holds(wrong)
    assert kind.expected == expected


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scalars": lambda rate: {"rate": rate}}, UnknownNameError, "hyper-parameter 'rate'"),
        ({"scalars": lambda lr: {"ratio": lr}}, MissingScalarError, "rate"),
        ({"scalars": lambda lr, step: {"rate": lr}}, UnknownNameError, "hyper-parameter 'step'"),
        ({"state": {"exp_avg": "m"}}, UnknownNameError, "state 'm'; declared: p"),
        ({"initial": {"m": "lr"}}, UnknownNameError, "state 'm'"),
        ({"initial": {"p": "start"}}, UnknownNameError, "hyper-parameter 'start'"),
        ({"hyper": {"lr": Number(0.1), "step": Number(0)}}, RuleError, "'step' is no hyper"),
        (
            {"forms": (Form(rule=MEAN, scalars=_rate, when="mean"),)},
            UnknownNameError,
            "hyper-parameter 'mean'",
        ),
        ({"forms": (Form(rule=MEAN, scalars=_rate),)}, UnknownNameError, "hyper-parameter ''"),
        ({"forms": (Form(rule=DOWN, scalars=_rate, when="lr"),)}, RuleError, "different rules"),
    ],
)
def test_what_does_not_fit_together_is_told_with_the_line(
    options: dict[str, object], error: type[RuleError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        Optimizer(**{"rule": DOWN, "scalars": _rate, "hyper": HYPER} | options)
    assert caught.value.location.file == __file__


def test_a_kernel_of_a_file_is_told_apart_by_what_the_rule_computes(tmp_path: Path) -> None:
    path, text = tmp_path / "mine.py", (EXAMPLES / "lion.py").read_text()
    path.write_text(text)
    first = UpdateKernelConfig(rules=(f"{path}:LION", "sgd"))
    assert from_text(UpdateKernelConfig, to_text(first)) == first
    path.write_text(f"{text}\n# a remark\n")
    assert digest(UpdateKernelConfig(rules=(f"{path}:LION", "sgd"))) == digest(first)
    path.write_text(text.replace("g - m, m))", "m - g, m))"))  # of the same size, in this second
    changed = UpdateKernelConfig(rules=(f"{path}:LION", "sgd"))
    assert changed != first
    assert digest(changed) != digest(first)
    assert changed.programs[1] == first.programs[1]
    assert first.rule_set.whole.program.digest() != changed.rule_set.whole.program.digest()
    assert first.rule_set.names == changed.rule_set.names == ("lion", "sgd")
    names = {each.name for each in adam_kernel_map(first)}
    assert {"update_weight", "rule", "mode"} <= names
    alone = {each.name for each in adam_kernel_map(UpdateKernelConfig(rules=(f"{path}:LION",)))}
    assert "mode" not in alone  # a register without fields


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('Rule("a", lambda p, m: {"p": p + m, "m": m}, states=("p", "m"))', "the input 'g' alone"),
        ('Rule("a", lambda p, g: {"p": p + g}, states=("p",), inputs=("g",)), 3', "is a tuple"),
        (
            'Rule("a", lambda p, g, *, count: {"p": p + g * count}, states=("p",), inputs=("g",),'
            ' scalars=("count",))',
            "register count is declared twice",
        ),
    ],
)
def test_a_rule_that_no_kernel_can_have_is_told(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"from nearstep_spec.rule.rule import Rule\nMINE = {source}\n")
    with pytest.raises(ConfigError, match=message):
        adam_kernel_map(UpdateKernelConfig(rules=(f"{path}:MINE",)))


@pytest.mark.parametrize(
    ("formats", "error", "message"),
    [
        ({"g": "bf16"}, UnknownNameError, "state 'g'"),
        ({"m": "fp8"}, RuleError, "Format of 'm' must be fp16 or bf16 or dynamic8 or dynamic8u, n"),
        ({"m": "fp32"}, RuleError, "or dynamic8 or dynamic8u, not 'fp32'"),
        ({"p": "dynamic8"}, RuleError, "Format of 'p' cannot be 'dynamic8', which is for moments"),
    ],
)
def test_formats_that_a_rule_cannot_have(
    formats: dict[str, str], error: type[RuleError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        Rule("mean", _mean, states=("p", "m"), inputs=("g",), scalars=("rate",), formats=formats)
    assert caught.value.location.file == __file__


def test_formats_are_part_of_what_a_rule_computes_and_of_the_registers() -> None:
    file = EXAMPLES / "adam_bf16.py"
    names = (f"{file}:ADAM_BF16", f"{file}:ADAM_ALL_BF16")
    configs = [UpdateKernelConfig(rules=(name,), gradient_scale=True) for name in names]
    assert len({*(c.programs for c in configs), UpdateKernelConfig().programs}) == 3
    assert dict(configs[0].rule_set.whole.formats) == {"m": "bf16", "v": "bf16"}
    registers = [adam_kernel_map(config)["state_formats"] for config in configs]
    resets = [[f.reset for f in each.fields if f.name != "stochastic"] for each in registers]
    assert resets == [[0, 2, 2], [2, 2, 2]]
    assert len({adam_kernel_map(config).hash() for config in configs}) == 2
    table = operands(configs[1])
    assert {name: each.formats for name, each in table.items()} == {
        "p": ("bf16",), "g": ("fp32",), "m": ("bf16",), "v": ("bf16",)
    }  # fmt: skip


def test_an_unknown_optimizer_lists_those_there_are() -> None:
    with pytest.raises(UnknownRuleError, match=f"of {', '.join(sorted(OPTIMIZERS))}.*, not 'lamb'"):
        optimizer_named("lamb")
