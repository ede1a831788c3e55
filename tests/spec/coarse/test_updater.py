"""A memory device's configuration with an update kernel."""

import dataclasses
import pickle

import pytest

from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import UPDATER, device_maps, register_bytes
from nearstep_spec.codec import digest, from_text, to_text
from nearstep_spec.csr.model import BLOCK_BYTES
from nearstep_spec.updater.config import ConfigError


def test_without_rules_there_is_none():
    config = CoarseConfig()
    assert config.updater is None
    assert list(device_maps(config)) == ["pool", "sync0", "sync1"]


def test_the_kernel_reaches_all_of_the_memory_and_scales_gradients():
    config = from_text(CoarseConfig, {"rules": "adam,sgd_momentum", "memory_bytes": "1MiB"})
    kernel = config.updater
    assert kernel is not None
    assert kernel.rules == ("adam", "sgd_momentum")
    assert 1 << kernel.address_width == config.memory_bytes
    assert kernel.gradient_scale
    assert kernel.beat_bytes == 64


def test_its_registers_follow_those_of_the_sync_cores():
    config = CoarseConfig(groups=4, rules=("adam",))
    maps = device_maps(config)
    assert list(maps) == ["pool", "sync0", "sync1", "sync2", "sync3", UPDATER]
    assert maps[UPDATER][0] == 5 * BLOCK_BYTES
    assert register_bytes(config) == 8 * BLOCK_BYTES


def test_configurations_survive_text_pickle_and_replacement():
    config = CoarseConfig(rules=("sgd",))
    assert from_text(CoarseConfig, to_text(config)) == config
    assert pickle.loads(pickle.dumps(config)).updater == config.updater
    other = dataclasses.replace(config, rules=("adagrad",))
    assert other.updater is not None
    assert other.updater.rules == ("adagrad",)
    assert len({digest(each) for each in (config, other, CoarseConfig())}) == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rules": ("none",)}, "rules must be of .* not 'none'|'none'"),
        ({"rules": ("adam", "adam")}, "rules must be different names"),
        ({"rules": ("adam",), "memory_bytes": 1 << 15}, "memory_bytes must be at least 65536"),
    ],
)
def test_what_cannot_be(options, reason):
    with pytest.raises(ConfigError, match=reason):
        CoarseConfig(**options)
