"""Exact sums in the configuration, manifest and registers of a memory device."""

import pytest

from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import sync_core_map
from nearstep_spec.codec import CodecError, from_json, from_text, to_json
from nearstep_spec.updater.config import ConfigError


def test_a_device_without_them_is_described_as_before() -> None:
    """Manifests are in bitstreams, and hashes of register maps in hosts."""
    plain, exact = CoarseConfig(), CoarseConfig(exact=("bf16",))
    assert "exact" not in to_json(plain)
    assert to_json(exact) == to_json(plain) | {"exact": ["bf16"]}
    for each in (plain, exact):
        assert from_json(CoarseConfig, to_json(each)) == each
    names = [{each.name for each in sync_core_map(config)} for config in (plain, exact)]
    assert names[1] - names[0] == {"stride", "addends"}
    assert names[0] < names[1]


def test_formats_are_those_of_the_links() -> None:
    assert from_text(CoarseConfig, {"exact": "fp16,fp32"}).exact == ("fp16", "fp32")
    with pytest.raises(ConfigError, match="exact must be of"):
        CoarseConfig(exact=("fp16",), wire_formats=("fp32", "bf16"))


def test_no_board_has_them() -> None:
    with pytest.raises(CodecError, match="exact"):
        from_text(CoarseBoardConfig, {"exact": "bf16"})
