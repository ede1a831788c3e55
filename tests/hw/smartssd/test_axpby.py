# amaranth: UnusedElaboratable=no
"""The AXPBY unit against its golden model."""

import numpy as np
import pytest

from nearstep_hw.smartssd.axpby import AxpbyUnit
from nearstep_sim.bench.operands import SPECIALS, operands
from nearstep_sim.bench.stream_bench import STALLS, StreamBench, StreamProtocolError
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.axpby import AXPBY

LANES = 4
SEED = 31


@pytest.fixture(scope="module")
def bench():
    unit = StreamBench(AxpbyUnit(lanes=LANES), name="axpby", key=f"lanes={LANES}")
    yield unit
    unit.close()


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


def _run(bench, count, a, b, *, stalls=(0.0, 0.0), seed=0):
    given = operands(("x", "y"), count * LANES, seed)
    rows = np.concatenate(
        [given[name].view(np.uint32).reshape(count, LANES) for name in ("x", "y")], axis=1
    )
    run = bench.run({"i": rows}, {"a": a, "b": b}, space=count, stalls=stalls, seed=seed)
    with np.errstate(all="ignore"):
        scalars = {k: float(np.uint32(v).view(np.float32)) for k, v in (("a", a), ("b", b))}
    expected = evaluate(AXPBY, given, scalars)["z"].view(np.uint32)
    got = run.streams["o"].reshape(-1)
    assert got.size == expected.size == count * LANES
    return run, int(np.count_nonzero(got != expected))


@pytest.mark.deep
def test_two_million_results_equal_the_model_at_a_beat_a_cycle(bench) -> None:
    print(f"seed {SEED}")
    checked = 0
    for k, (a, b) in enumerate([(0.9, 0.1), (-1.0, 1.0), (3e38, 7e37), (1e-38, -1e-42)]):
        run, wrong = _run(bench, 131_072, _bits(a), _bits(b), seed=SEED + k)
        assert wrong == 0
        assert run.first["o"] - run.first["i"] == bench.component.latency
        assert run.last["i"] - run.first["i"] == 131_071
        assert run.last["o"] - run.first["o"] == 131_071
        checked += 131_072 * LANES
    assert checked == 2_097_152


def test_special_coefficients_meet_special_operands(bench) -> None:
    checked = 0
    for a in SPECIALS:
        for b in SPECIALS[::3]:
            _, wrong = _run(bench, 64, int(a), int(b), seed=int(a) % 97)
            assert wrong == 0, (hex(a), hex(b))
            checked += 64 * LANES
    assert checked == 22 * 8 * 64 * LANES


@pytest.mark.parametrize("mode", STALLS)
def test_nothing_is_lost_in_any_stall_mode(bench, mode: str) -> None:
    print(f"seed {SEED}")
    run, wrong = _run(bench, 4000, _bits(0.9), _bits(0.1), stalls=STALLS[mode], seed=SEED)
    assert wrong == 0
    assert run.transfers == {"i": 4000, "o": 4000}
    assert (run.cycles > 4100) == (mode != "free")


def test_bench_sees_a_payload_that_does_not_hold() -> None:
    from amaranth import Module, Signal
    from amaranth.lib import stream, wiring
    from amaranth.lib.wiring import In, Out

    class Slips(wiring.Component):
        """Counts on while the sink waits."""

        i: In(stream.Signature(8))
        o: Out(stream.Signature(8))

        def elaborate(self, platform):
            m = Module()
            count = Signal(8)
            m.d.sync += count.eq(count + 1)
            m.d.comb += [
                self.i.ready.eq(self.o.ready),
                self.o.valid.eq(self.i.valid),
                self.o.payload.eq(count),
            ]
            return m

    slips = StreamBench(Slips(), name="slips", key="")
    rows = np.zeros((20, 1), np.uint32)
    assert slips.run({"i": rows}, space=20).transfers == {"i": 20, "o": 20}
    with pytest.raises(StreamProtocolError, match=r"slips: [1-9]"):
        slips.run({"i": rows}, space=20, stalls=(0.0, 0.5))
    with pytest.raises(StreamProtocolError, match="slips: 5 violations"):
        slips.run({"i": rows}, space=15)
    slips.close()


def test_lanes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="Lanes must be a positive integer, not 0"):
        AxpbyUnit(lanes=0)
