# amaranth: UnusedElaboratable=no
"""The register slice: everything passes once, in order, at full rate."""

import numpy as np
import pytest
from amaranth import unsigned

from nearstep_hw.stream.slice import StreamSlice
from nearstep_sim.bench.stream_bench import STALLS, StreamBench

COUNT = 5000


@pytest.fixture(scope="module")
def bench():
    unit = StreamBench(StreamSlice(unsigned(32)), name="stream_slice", key="32")
    yield unit
    unit.close()


@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize("seed", range(3))
def test_payloads_pass_once_and_in_order(bench, mode, seed) -> None:
    payloads = np.random.default_rng(seed).integers(0, 1 << 32, (COUNT, 1), dtype=np.uint32)
    result = bench.run({"i": payloads}, {}, space=COUNT, stalls=STALLS[mode], seed=seed)
    assert result.streams["o"].shape == (COUNT, 1)
    assert (result.streams["o"] == payloads).all()


def test_a_payload_passes_in_every_cycle(bench) -> None:
    payloads = np.arange(COUNT, dtype=np.uint32)[:, None]
    result = bench.run({"i": payloads}, {}, space=COUNT, stalls=STALLS["free"], seed=1, quiet=1)
    assert result.streams["o"].size == COUNT
    assert result.cycles <= COUNT + 4
