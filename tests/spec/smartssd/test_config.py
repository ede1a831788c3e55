"""Configurations of a card: what they derive, and which are refused."""

import pytest

from nearstep_spec.smartssd.config import UPDATER, SmartssdConfig
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig

SMALL = UpdateKernelConfig(lanes=4, block_bytes=512, address_width=20)


def test_default_has_the_beat_of_512_bits_and_every_rule() -> None:
    config = SmartssdConfig()
    assert config.kernel.data_width == 512
    assert config.kernel.rules == ("adam", "sgd", "sgd_momentum", "adagrad")
    assert config.chunk_elements == 4096
    assert config.subgroup_bytes == 16 << 20
    assert config.register_bytes == 4096


def test_registers_are_those_of_the_kernel() -> None:
    ((name, (base, registers)),) = SmartssdConfig(kernel=UPDATER).maps().items()
    assert (name, base) == ("updater0", 0)
    assert {"start", "status", "rule", "gradient_scale"} <= {each.name for each in registers}


@pytest.mark.parametrize(
    ("memory_bytes", "elements", "most"),
    [(1 << 20, 31744, 32768), (1 << 16, 1024, 2048), (1 << 12, 128, 128)],
)
def test_a_subgroup_of_which_nothing_is_said_fits_twice(
    memory_bytes: int, elements: int, most: int
) -> None:
    """Each array on a page of its own, unless there is no room for that."""
    assert SmartssdConfig(kernel=SMALL, memory_bytes=memory_bytes).subgroup_elements == elements
    SmartssdConfig(kernel=SMALL, memory_bytes=memory_bytes, subgroup_elements=most)
    with pytest.raises(ConfigError, match="hold 2 subgroups"):
        SmartssdConfig(kernel=SMALL, memory_bytes=memory_bytes, subgroup_elements=most + 128)


def test_it_is_at_most_a_million_elements() -> None:
    assert SmartssdConfig(kernel=UPDATER, memory_bytes=1 << 32).subgroup_elements == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_bytes": 3 << 20}, "power of two from 4096"),
        ({"memory_bytes": 2048}, "power of two from 4096"),
        ({"memory_bytes": 1 << 21}, "power of two from 4096 to 1048576"),
        ({"subgroup_elements": 0}, "multiple of a chunk, 128, not 0"),
        ({"subgroup_elements": 200}, "multiple of a chunk, 128, not 200"),
        ({"subgroup_elements": 1 << 20}, "hold 2 subgroups"),
    ],
)
def test_impossible_configuration_says_what_is_allowed(
    arguments: dict[str, int], message: str
) -> None:
    small = {"kernel": SMALL, "memory_bytes": 1 << 20, "subgroup_elements": 128}
    with pytest.raises(ConfigError, match=message):
        SmartssdConfig(**{**small, **arguments})
