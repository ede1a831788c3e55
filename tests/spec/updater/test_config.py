"""Configurations of the Adam kernel: what they derive, and which are refused."""

from pathlib import Path

import pytest

from nearstep_spec.csr.model import LINE_BYTES
from nearstep_spec.rule.adam import ORDERS
from nearstep_spec.updater.config import LANES, ConfigError, UpdateKernelConfig
from nearstep_spec.updater.registers import Order, Stream, adam_kernel_map, update_rule

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_default_is_the_shape_of_the_paper() -> None:
    config = UpdateKernelConfig()
    assert (config.lanes, config.units, config.data_width) == (16, 16, 512)
    assert (config.block_beats, config.burst_beats, config.fifo_beats) == (256, 64, 512)


@pytest.mark.parametrize("lanes", LANES)
def test_bursts_fit_axi_and_the_page(lanes: int) -> None:
    config = UpdateKernelConfig(lanes=lanes)
    assert config.burst_beats <= 256
    assert config.burst_bytes <= 4096
    assert config.block_bytes % config.burst_bytes == 0
    assert config.burst_beats * config.beat_bytes == config.burst_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lanes": 3}, "lanes must be one of"),
        ({"lanes": 8, "functional_units": 3}, "must divide lanes=8"),
        ({"functional_units": 32}, "must divide lanes=16"),
        ({"functional_units": 0}, "must divide lanes=16"),
        ({"block_bytes": 3000}, "power of two"),
        ({"block_bytes": 256}, "power of two from 512"),
        ({"address_width": 65}, "16 to 64 bits"),
        ({"order": "fast"}, "order must be one of"),
        (
            {"order": "paper", "rules": ("adam", "adam_amsgrad")},
            "order must be 'default' for the rule 'adam_amsgrad', not 'paper'",
        ),
        ({"technology": "ice40"}, "technology must be one of .*'ecp5'.*, not 'ice40'"),
        ({"windows": 0}, "1 to 8"),
        ({"bursts_ahead": 4}, "8 to 255"),
        ({"gradient_formats": ("fp16",)}, "fp32 among them"),
        ({"gradient_formats": ("fp32", "fp32")}, "different names"),
        ({"gradient_formats": ("fp32", "fp8")}, "some of .*bf16.* not 'fp8'"),
    ],
)
def test_impossible_configuration_says_what_is_allowed(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        UpdateKernelConfig(**arguments)


def test_a_fifth_array_is_of_the_map_only_where_a_rule_has_it() -> None:
    four = adam_kernel_map(UpdateKernelConfig())
    five = adam_kernel_map(UpdateKernelConfig(rules=("adam", "adam_amsgrad"), windows=5))
    added = {"v_max_address", "rule", *(register.name for register in five if "4" in register.name)}
    assert {register.name for register in five} - {register.name for register in four} == added
    streams = [set(kernel["error"].field("stream").values.__members__) for kernel in (four, five)]
    assert streams[1] - streams[0] == {"V_MAX_READ", "V_MAX_WRITE"}
    assert streams[1] == set(Stream.__members__)


@pytest.mark.parametrize("order", ORDERS)
def test_scalars_and_switches_are_those_of_the_rule(order: str) -> None:
    config = UpdateKernelConfig(order=order)
    rule, kernel = update_rule(config), adam_kernel_map(config)
    assert {register.name for register in kernel} >= set(rule.scalars)
    assert tuple(field.name for field in kernel["mode"].fields) == rule.switches
    assert all("rule" not in kernel[name].doc for name in rule.scalars), "a scalar has no text"
    assert kernel["capabilities"].field("order").reset == Order[order.upper()]


def test_formats_and_scale_of_gradients_can_be_read_from_the_registers() -> None:
    plain = adam_kernel_map(UpdateKernelConfig())
    mixed = adam_kernel_map(
        UpdateKernelConfig(gradient_formats=("bf16", "fp32"), gradient_scale=True)
    )
    read = [
        (
            kernel["capabilities"].field("gradient_formats").reset,
            kernel["configuration"].field("gradient_scale").reset,
            kernel["gradient_scale"].field("value").reset,
        )
        for kernel in (plain, mixed)
    ]
    assert read == [(0b001, 0, 0), (0b101, 1, 0x3F80_0000)]
    assert [register.name for register in plain] == [register.name for register in mixed]


def test_formats_of_states_are_of_the_kernel_and_leave_what_rules_compute() -> None:
    plain = UpdateKernelConfig(rules=("adam", "adam_amsgrad"))
    narrow = UpdateKernelConfig(
        rules=("adam", "adam_amsgrad"), state_format="bf16", stochastic_rounding=True
    )
    assert narrow.programs == plain.programs
    assert dict(narrow.rule_set.whole.formats) == {"m": "bf16", "v": "bf16", "v_max": "bf16"}
    assert narrow.stochastic == ("m", "v", "v_max")
    both = UpdateKernelConfig(parameter_format="bf16", state_format="fp16")
    assert dict(both.rule_set.whole.formats) == {"p": "bf16", "m": "fp16", "v": "fp16"}
    assert both.stochastic == ("p",)
    assert {register.name for register in adam_kernel_map(narrow)} - {
        register.name for register in adam_kernel_map(plain)
    } == {
        "state_formats", "rounding", "rounding_seed", "rounding_step", "element_index",
        "element_within", "element_skip",
    }  # fmt: skip
    kernel = adam_kernel_map(narrow)
    assert kernel["state_formats"].field("stochastic").reset == 1
    assert [field.lsb for field in kernel["rounding"].fields] == [
        4 * narrow.states.index(name) for name in narrow.stochastic
    ]
    without = adam_kernel_map(UpdateKernelConfig(state_format="bf16"))
    assert without["state_formats"].field("stochastic").reset == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_format": "int8"}, "state_format must be one of"),
        ({"parameter_format": None}, "parameter_format must be one of"),
        ({"stochastic_rounding": True}, "stochastic_rounding needs a state in bf16"),
        (
            {"stochastic_rounding": True, "rules": ("sgd",), "state_format": "bf16"},
            "stochastic_rounding needs a state in bf16",
        ),
        (
            {"rules": (f"{EXAMPLES}/adam_bf16.py:ADAM_BF16",), "state_format": "bf16"},
            "has formats of its own",
        ),
    ],
)
def test_formats_that_there_are_not_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpdateKernelConfig(**options)


@pytest.mark.parametrize("windows", [1, 4, 8])
def test_start_is_alone_and_lines_are_not_shared_between_writers(windows: int) -> None:
    kernel = adam_kernel_map(UpdateKernelConfig(windows=windows))
    assert [r.name for r in kernel if r.offset // LINE_BYTES == 1] == ["start"]
    lines: dict[int, set[tuple[bool, bool]]] = {}
    for register in kernel:
        lines.setdefault(register.offset // LINE_BYTES, set()).add(
            (register.writable, register.locked)
        )
    assert len(lines) == 7 + windows
    assert all(len(kinds) == 1 for kinds in lines.values())
