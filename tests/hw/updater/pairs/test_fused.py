# amaranth: UnusedElaboratable=no
"""The fused Top-K decompressor against its golden model."""

import numpy as np
import pytest

from nearstep_hw.updater.pairs.decompress import Decompressor
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden.topk import decompress
from nearstep_spec.updater.compression import PairCause, ValueFormat

ONE, BOTH = ("fused",), ("fused", "scatter")
SHAPES = [
    pytest.param((16, 16, ONE), marks=pytest.mark.deep),
    pytest.param((16, 8, ONE), marks=pytest.mark.deep),
    pytest.param((4, 2, ONE), marks=pytest.mark.deep),
    pytest.param((2, 2, ONE, True), marks=pytest.mark.deep),
    (4, 2, BOTH),
]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def bench(request):
    lanes, pairs, forms, *cut = request.param
    unit = StreamBench(
        Decompressor(forms=forms, lanes=lanes, pairs=pairs, chunk=8, cut=any(cut)),
        name="decompressor",  # what has both forms is one build with that of `test_scatter`
        key=f"{lanes} {pairs} 8 {forms} {any(cut)}",
        start="i_start",
    )
    yield unit
    unit.close()


def kind(component: Decompressor, form: int = 0, *, dry: int = 0) -> dict[str, int]:
    """Inputs that choose this form, a number format, and a dry run or not."""
    return {"i_format": int(form), "i_dry": dry} | ({"i_scatter": 0} if component.choice else {})


@pytest.fixture
def check(bench, streams_of):
    """Run pairs and compare all that can be seen; return the run."""
    component = bench.component

    def run(pairs, count, *, announced=None, stalls=(0.0, 0.0), seed=0, last=-1, rng=None):
        rng = rng or np.random.default_rng(seed)
        announced = len(pairs.index) if announced is None else announced
        expected = decompress(
            pairs.index, pairs.widened, pairs=announced, count=count, group=1,
            granule=component.lanes,
        )  # fmt: skip
        result = bench.run(
            streams_of(pairs, component.pairs, rng, last),
            {
                "i_pairs": announced,
                "i_count": count,
                **kind(component, pairs.form),
            },
            space=-(-count // component.lanes) + 1,
            stalls=stalls,
            seed=seed,
        )
        got = result.streams["o"].reshape(-1)
        assert got.size == -(-expected.dense.size // component.lanes) * component.lanes
        assert (got[: expected.dense.size] == expected.dense).all()
        assert not got[expected.dense.size :].any()
        assert result.outputs["o_cause"] == expected.cause
        assert result.outputs["o_position"] == expected.position
        assert result.outputs["o_done"] == (expected.cause == PairCause.NONE)
        if expected.cause == PairCause.NONE:
            assert result.outputs["o_duplicates"] == expected.duplicates
        return result, expected

    return run


@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize("form", ValueFormat)
def test_any_number_of_pairs_and_elements(check, pairs_of, mode, form) -> None:
    rng = np.random.default_rng(11)
    checked = duplicates = 0
    for k in range(60):
        count = int(rng.choice([1, 3, 16, 17, 64, 1000, int(rng.integers(1, 2000))]))
        kept = int(rng.choice([0, 1, count, count // 2, int(rng.integers(0, count + 1))]))
        pairs = pairs_of(rng, count, kept, form=form, repeats=float(rng.choice([0, 0.3, 1])))
        _, expected = check(pairs, count, stalls=STALLS[mode], seed=k, rng=rng)
        checked += expected.dense.size
        duplicates += expected.duplicates
    print(f"seed 11: {checked} elements, {duplicates} duplicates")
    assert checked > 10_000
    assert duplicates > 100


def test_a_dense_beat_takes_a_cycle_for_each_beat_of_pairs_in_it(check, pairs_of, bench) -> None:
    rng = np.random.default_rng(12)
    lanes, per_beat = bench.component.lanes, bench.component.pairs
    for share in (0.0, 0.01, 0.3, 1.0):
        count = 4000 * lanes
        pairs = pairs_of(rng, count, int(share * count))
        result, _ = check(pairs, count, rng=rng)
        dense = pairs.index // lanes
        visits = np.unique(np.stack([dense, np.arange(len(dense)) // per_beat]), axis=1)
        expected = 4000 + visits.shape[1] - len(np.unique(dense))
        span = result.last["o"] - result.first["o"] + 1
        print(f"{share:.0%}: {span} cycles for 4000 beats")
        steps = 1 + bench.component.cut  # cycles of each
        assert span <= steps * (expected + 2)
        assert share > 0.01 or span <= steps * 1.005 * 4000


def test_a_thousand_equal_indices_leave_the_last(check, pairs_of) -> None:
    rng = np.random.default_rng(13)
    pairs = pairs_of(rng, 1, 1000)
    _, expected = check(pairs, 100)
    assert expected.duplicates == 999
    assert expected.dense[0] == pairs.value[-1]


def test_an_empty_subgroup_gives_nothing(check, pairs_of) -> None:
    rng = np.random.default_rng(14)
    check(pairs_of(rng, 10, 0), 0)
    _, expected = check(pairs_of(rng, 10, 5), 0)
    assert (expected.cause, expected.position) == (PairCause.RANGE, 0)


@pytest.mark.parametrize("mode", STALLS)
def test_wrong_pairs_end_the_run_with_cause_and_position(check, pairs_of, mode) -> None:
    rng = np.random.default_rng(15)
    seen = dict.fromkeys(PairCause, 0)
    for k in range(80):
        count = int(rng.integers(2, 600))
        pairs = pairs_of(rng, count, int(rng.integers(2, count + 1)))
        at = int(rng.integers(len(pairs.index)))
        pairs.index[at] = rng.choice([count, 0, 0xFFFF_FFFF, count + 7])
        _, expected = check(pairs, count, stalls=STALLS[mode], seed=k, rng=rng)
        seen[expected.cause] += 1
        # after it the next run is as if nothing had been
        check(pairs_of(rng, 50, 20), 50, stalls=STALLS[mode], seed=k, rng=rng)
    print(f"seed 15: {seen}")
    assert min(seen[PairCause.RANGE], seen[PairCause.ORDER]) > 5


@pytest.mark.parametrize("form", ValueFormat)
@pytest.mark.parametrize("missing", [1, 40])
def test_a_truncated_stream_ends_with_an_error(check, pairs_of, bench, form, missing) -> None:
    rng = np.random.default_rng(16)
    per_beat = bench.component.pairs
    for beats in (1, 2, 5):
        pairs = pairs_of(rng, 1000, beats * per_beat, form=form)
        _, expected = check(pairs, 1000, announced=beats * per_beat + missing, rng=rng)
        assert (expected.cause, expected.position) == (PairCause.TRUNCATED, beats * per_beat)


def test_a_source_that_never_ends_nor_gives_keeps_the_run_open(bench, pairs_of, streams_of) -> None:
    rng = np.random.default_rng(17)
    pairs = pairs_of(rng, 1000, 4 * bench.component.pairs)
    inputs = {"i_pairs": 1000, "i_count": 1000, **kind(bench.component)}
    result = bench.run(streams_of(pairs, bench.component.pairs, rng, 0), inputs, space=1000)
    assert (result.outputs["o_done"], result.outputs["o_cause"]) == (0, 0)


def test_pairs_behind_the_announced_number_are_left_to_the_next_run(
    bench, pairs_of, streams_of
) -> None:
    rng = np.random.default_rng(18)
    pairs = pairs_of(rng, 1000, 10 * bench.component.pairs)
    inputs = {
        "i_pairs": bench.component.pairs + 1,
        "i_count": 1000,
        **kind(bench.component),
    }
    result = bench.run(streams_of(pairs, bench.component.pairs, rng, 0), inputs, space=1000)
    assert result.outputs["o_done"] == 1
    assert result.transfers["i_index"] == result.transfers["i_value"] == 2


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="even positive integer, not 3"):
        Decompressor(pairs=3)
    with pytest.raises(ValueError, match="12"):
        Decompressor(lanes=12)


@pytest.mark.parametrize("stalls", STALLS.values(), ids=STALLS)
def test_a_dry_run_takes_no_values_gives_nothing_and_finds_the_same(
    bench, check_dry, stalls
) -> None:
    check_dry(kind(bench.component, dry=1), 1, stalls)
