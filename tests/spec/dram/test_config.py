"""The configuration of a channel, from text and back."""

import pytest

from nearstep_spec.codec import CodecError, from_text, to_text
from nearstep_spec.dram.config import DramConfig


def test_two_ranks_come_from_text_and_go_back() -> None:
    given = {"ranks": "2", "interleave": "64KiB", "density": "32Gb", "width": "x16"}
    config = from_text(DramConfig, given)
    assert config == DramConfig(ranks=2, interleave=65536, density="32Gb", width="x16")
    assert from_text(DramConfig, to_text(config)) == config
    mapping = config.address_mapping
    assert (mapping.geometry.ranks, mapping.rank) == (2, (16, 1))
    assert config.timing.density == "32Gb"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": "3"}, r"ranks must be one of \(1, 2\), not 3"),
        ({"ranks": "0"}, r"ranks must be one of \(1, 2\), not 0"),
        ({"ranks": "two"}, "must be a whole number"),
        ({"ranks": "2", "interleave": "2048"}, "power of two from 4096 to .* not 2048"),
        ({"ranks": "2", "interleave": "16GiB"}, "power of two from 4096 to 8589934592"),
        ({"density": "64Gb"}, "valid: 4Gb, 8Gb, 16Gb, 32Gb"),
    ],
)
def test_what_a_channel_cannot_be_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        from_text(DramConfig, given)
