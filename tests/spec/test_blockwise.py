"""State in 8 bits: the map and its thresholds beside the golden model, which shares no code with
them, and where an array lies."""

import numpy as np
import pytest

from nearstep_sim.golden import blockwise as golden
from nearstep_spec.blockwise import (
    CODES,
    GROUP,
    SMALLEST_SCALE,
    BlockLayout,
    dynamic_map,
    thresholds,
)
from nearstep_spec.rule.rules import RuleSet
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig
from nearstep_spec.updater.operands import array_bytes, operands

SIGNS = [True, False]


@pytest.mark.parametrize("signed", SIGNS)
def test_the_map_and_the_least_scale_are_the_golden_models(signed):
    assert list(dynamic_map(signed=signed)) == golden.dynamic_map(signed).view(np.uint32).tolist()
    assert golden.SMALLEST_SCALE.view(np.uint32) == SMALLEST_SCALE


@pytest.mark.parametrize("signed", SIGNS)
def test_the_thresholds_passed_by_a_quotient_are_its_code(signed):
    """At each threshold, next to it, at the entries of the map, and at random."""
    print("seed 11")
    rng = np.random.default_rng(11)
    edges = np.array(thresholds(signed=signed), np.uint32).view(np.float32)
    assert edges.size == CODES - 1
    random = (10.0 ** rng.uniform(-9, 0, 100_000)).astype(np.float32)
    quotients = np.concatenate(
        [
            edges,
            np.nextafter(edges, np.float32(-2)),
            np.nextafter(edges, np.float32(2)),
            golden.dynamic_map(signed),
            random,
            -random,
            np.float32([0.0, -0.0, 1.0, -1.0]),
        ]
    )
    quotients = quotients[np.abs(quotients) <= 1]
    groups = np.zeros((-(-quotients.size // (GROUP - 1)), GROUP), np.float32)
    groups[:, 0] = 1
    rest = np.zeros(groups[:, 1:].shape, np.float32)
    rest.reshape(-1)[: quotients.size] = quotients
    groups[:, 1:] = rest
    codes = golden.quantize(groups.reshape(-1), signed=signed).codes.reshape(groups.shape)
    expected = np.searchsorted(edges, quotients, side="right")
    np.testing.assert_array_equal(codes[:, 1:].reshape(-1)[: quotients.size], expected)


def test_the_length_of_an_array_tells_its_elements():
    layout = BlockLayout(512, 64)
    lengths = [layout.nbytes(count) for count in range(3000)]
    assert lengths[:2] == [0, 65]
    assert lengths[512:514] == [576, 641]
    assert [layout.count(nbytes) for nbytes in lengths] == list(range(3000))
    none = sorted(set(range(lengths[-1])) - set(lengths))
    assert len(none) == 6 * 64
    for nbytes in none:
        with pytest.raises(ValueError, match="its last block has no code"):
            layout.count(nbytes)
    assert layout.offset(1024) == 2 * 576
    with pytest.raises(ValueError, match="Element 1000 begins no block of 512"):
        layout.offset(1000)


def test_states_that_are_never_negative_have_the_unsigned_map():
    config = UpdateKernelConfig(rules=("adam_amsgrad",), state_format="dynamic8")
    formats = {name: each.format for name, each in operands(config).items()}
    assert formats == {
        "p": "fp32", "g": "fp32", "m": "dynamic8", "v": "dynamic8u", "v_max": "dynamic8u",
    }  # fmt: skip
    assert config.blockwise == ("m", "v", "v_max")
    assert array_bytes(config, "dynamic8", 4097) == 4097 + 2 * 64
    for rule in ("adagrad", "adadelta", "rmsprop"):
        whole = RuleSet((rule,), "default", state_format="dynamic8").whole
        assert set(whole.formats.values()) == {"dynamic8u"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": 8}, "block_bytes must be 1024 to 8192 with lanes=8 and states in dynamic8"),
        ({"block_bytes": 512}, "block_bytes must be 1024 to 16384 with lanes=16 and states in"),
        ({"block_bytes": 32768}, "block_bytes must be 1024 to 16384 with lanes=16 and states in"),
        ({"parameter_format": "dynamic8"}, "parameter_format must be one of .*, not 'dynamic8'"),
        ({"state_format": "dynamic8u"}, "state_format must be one of .*, not 'dynamic8u'"),
        ({"stochastic_rounding": True}, "stochastic_rounding needs a state in bf16"),
    ],
)
def test_kernels_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        UpdateKernelConfig(**{"state_format": "dynamic8", **options})
