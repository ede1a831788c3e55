# amaranth: UnusedElaboratable=no
"""The Top-K decompressor with on-chip chunks against its golden model."""

import numpy as np
import pytest

from nearstep_hw.updater.pairs.decompress import SCATTER, SCATTERED, Decompressor
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden.topk import decompress
from nearstep_spec.updater.compression import PairCause, ValueFormat

ONE, BOTH = ("scatter",), ("fused", "scatter")
SHAPES = [
    pytest.param((16, 8, 4096, ONE), marks=pytest.mark.deep),
    pytest.param((16, 8, 64, ONE), marks=pytest.mark.deep),
    pytest.param((4, 2, 8, ONE), marks=pytest.mark.deep),
    pytest.param((16, 16, 4096, ONE), marks=pytest.mark.deep),
    pytest.param((4, 10, 8, ONE), marks=pytest.mark.deep),  # in parts of 8 and of 2
    (4, 2, 8, BOTH),
]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def bench(request):
    lanes, pairs, chunk, forms = request.param
    unit = StreamBench(
        Decompressor(forms=forms, lanes=lanes, pairs=pairs, chunk=chunk),
        name="decompressor",
        key=f"{lanes} {pairs} {chunk} {forms} {False}",
        start="i_start",
    )
    yield unit
    unit.close()


def kind(component: Decompressor, form: int = 0, *, dry: int = 0) -> dict[str, int]:
    """Inputs that choose this form, a number format, and a dry run or not."""
    return {"i_format": int(form), "i_dry": dry} | ({"i_scatter": 1} if component.choice else {})


@pytest.fixture
def check(bench, streams_of):
    """Run pairs and compare all that can be seen; return the run."""
    component = bench.component

    def run(pairs, count, *, announced=None, stalls=(0.0, 0.0), seed=0, rng=None):
        rng = rng or np.random.default_rng(seed)
        announced = len(pairs.index) if announced is None else announced
        expected = decompress(
            pairs.index, pairs.widened, pairs=announced, count=count, group=component.chunk,
            granule=component.chunk,
        )  # fmt: skip
        result = bench.run(
            streams_of(pairs, component.pairs, rng),
            {
                "i_pairs": announced,
                "i_count": count,
                **kind(component, pairs.form),
            },
            space=-(-count // component.lanes) + 1,
            stalls=stalls,
            seed=seed,
            quiet=2 * component.chunk + 200,
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


def _count(rng, chunk: int) -> int:
    return int(rng.choice([1, 3, 17, chunk, chunk + 1, 2 * chunk - 1, rng.integers(1, 12 * chunk)]))


@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize("form", ValueFormat)
def test_any_number_of_pairs_and_elements(check, bench, pairs_of, mode, form) -> None:
    rng = np.random.default_rng(21)
    chunk = bench.component.chunk
    checked = duplicates = 0
    for k in range(60):
        count = _count(rng, chunk)
        kept = int(rng.choice([0, 1, count, count // 2, int(rng.integers(0, count + 1))]))
        repeats = float(rng.choice([0, 0.3, 1]))
        pairs = pairs_of(rng, count, kept, group=chunk, form=form, repeats=repeats)
        _, expected = check(pairs, count, stalls=STALLS[mode], seed=k, rng=rng)
        checked += expected.dense.size
        duplicates += expected.duplicates
    print(f"seed 21: {checked} elements, {duplicates} duplicates")
    assert checked > 60 * chunk
    assert duplicates > 10


def test_pairs_of_different_banks_are_written_together(check, bench, pairs_of) -> None:
    rng = np.random.default_rng(22)
    component = bench.component
    lanes, chunk, per_beat = component.lanes, component.chunk, component.pairs
    count = 8 * chunk
    turns = -(-per_beat // SCATTERED)
    pairs = pairs_of(rng, count, count, group=chunk)
    pairs.index[:] = np.arange(count)
    result, _ = check(pairs, count, rng=rng)
    taken = result.last["i_index"] - result.first["i_index"] + 1
    print(f"{count} pairs in {taken} cycles of {count // per_beat} beats")
    # all but one chunk is written while another is read, at `lanes` elements a cycle
    assert taken <= max(turns * count // per_beat, count // lanes) + 8 + chunk // lanes


def test_random_pairs_inside_a_chunk_come_at_six_a_cycle(check, bench, pairs_of) -> None:
    rng = np.random.default_rng(23)
    component = bench.component
    if (component.pairs % SCATTERED, component.lanes) != (0, 16):
        pytest.skip(f"the figure is for beats of 8 or 16 pairs and 16 banks: {component.pairs}")
    count = 2 * component.chunk  # both buffers, nothing to wait for
    pairs = pairs_of(rng, count, count, group=component.chunk)
    for start in (0, component.chunk):
        rng.shuffle(pairs.index[start : start + component.chunk])
    cycles = []
    for _ in range(8):
        result, _ = check(pairs, count, rng=rng)
        cycles.append(result.last["i_index"] - result.first["i_index"] + 1)
        rng.shuffle(pairs.index[: component.chunk])
    rate = count / float(np.mean(cycles))
    print(f"{rate:.2f} pairs a cycle, {rate * 8 * 0.2:.1f} GB/s of pairs at 200 MHz")
    assert rate >= (6.0 if component.chunk >= 4096 else 5.0)


@pytest.mark.parametrize("mode", STALLS)
def test_wrong_pairs_end_the_run_with_cause_and_position(check, bench, pairs_of, mode) -> None:
    rng = np.random.default_rng(24)
    chunk = bench.component.chunk
    seen = dict.fromkeys(PairCause, 0)
    for k in range(60):
        count = int(rng.integers(2, 4 * chunk))
        pairs = pairs_of(rng, count, int(rng.integers(2, count + 1)), group=chunk)
        at = int(rng.integers(len(pairs.index)))
        pairs.index[at] = rng.choice([count, 0, 0, 0, 0xFFFF_FFFF])
        _, expected = check(pairs, count, stalls=STALLS[mode], seed=k, rng=rng)
        seen[expected.cause] += 1
        # after it the next run is as if nothing had been
        check(pairs_of(rng, chunk, 3, group=chunk), chunk, stalls=STALLS[mode], seed=k, rng=rng)
    print(f"seed 24: {seen}")
    assert min(seen[PairCause.RANGE], seen[PairCause.ORDER]) > 5


@pytest.mark.parametrize("form", ValueFormat)
def test_a_truncated_stream_ends_with_an_error(check, bench, pairs_of, form) -> None:
    rng = np.random.default_rng(25)
    component = bench.component
    for beats in (1, 2, 5):
        there = beats * component.pairs
        pairs = pairs_of(rng, 6 * component.chunk, there, group=component.chunk, form=form)
        _, expected = check(pairs, 6 * component.chunk, announced=there + 1, rng=rng)
        assert (expected.cause, expected.position) == (PairCause.TRUNCATED, there)


def test_a_run_given_up_leaves_nothing_behind(check, bench, pairs_of, streams_of) -> None:
    rng = np.random.default_rng(26)
    chunk, per_beat = bench.component.chunk, bench.component.pairs
    for _ in range(4):
        pairs = pairs_of(rng, 2 * chunk, chunk // 2, group=chunk)
        inputs = {
            "i_pairs": 2 * chunk,
            "i_count": 2 * chunk,
            **kind(bench.component),
        }
        streams = {
            name: rows[: len(rows) // 2] for name, rows in streams_of(pairs, per_beat, rng).items()
        }
        hung = bench.run(streams, inputs, space=2 * chunk, quiet=2 * chunk)
        assert (hung.outputs["o_done"], hung.outputs["o_cause"]) == (0, 0)
        check(pairs_of(rng, chunk, 0, group=chunk), 2 * chunk, rng=rng)


def test_an_empty_subgroup_gives_nothing(check, pairs_of) -> None:
    rng = np.random.default_rng(27)
    check(pairs_of(rng, 10, 0), 0)
    _, expected = check(pairs_of(rng, 10, 5), 0)
    assert (expected.cause, expected.position) == (PairCause.RANGE, 0)


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 elements, not 16"):
        Decompressor(forms=(SCATTER,), chunk=16)
    with pytest.raises(ValueError, match="100"):
        Decompressor(forms=(SCATTER,), chunk=100)


@pytest.mark.parametrize("stalls", STALLS.values(), ids=STALLS)
def test_a_dry_run_takes_no_values_gives_nothing_and_finds_the_same(
    bench, check_dry, stalls
) -> None:
    check_dry(kind(bench.component, dry=1), bench.component.chunk, stalls)
