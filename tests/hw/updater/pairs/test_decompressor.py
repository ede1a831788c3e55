# amaranth: UnusedElaboratable=no
"""Top-K decompressors, of sorted pairs and with on-chip chunks, against their golden model."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep_hw.updater.pairs.decompress import SCATTER, SCATTERED, Decompressor
from nearstep_sim.bench.operands import SPECIALS
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden.topk import decompress, widen
from nearstep_spec.updater.compression import PairCause, ValueFormat

Words = NDArray[np.uint32]
FUSED, BOTH = "fused", ("fused", "scatter")
SHAPES = [
    # form that is tried, lanes, pairs, chunk, forms, cut
    *(
        pytest.param(shape, marks=pytest.mark.deep)
        for shape in (
            (FUSED, 16, 16, 8, (FUSED,), False),
            (FUSED, 16, 8, 8, (FUSED,), False),
            (FUSED, 4, 2, 8, (FUSED,), False),
            (FUSED, 2, 2, 8, (FUSED,), True),
            (SCATTER, 16, 8, 4096, (SCATTER,), False),
            (SCATTER, 16, 8, 64, (SCATTER,), False),
            (SCATTER, 4, 2, 8, (SCATTER,), False),
            (SCATTER, 16, 16, 4096, (SCATTER,), False),
            (SCATTER, 4, 10, 8, (SCATTER,), False),  # in parts of 8 and of 2
        )
    ),
    (FUSED, 4, 2, 8, BOTH, False),  # these two are one build
    (SCATTER, 4, 2, 8, BOTH, False),
]


@dataclass(frozen=True)
class Pairs:
    """Indices, and values as patterns of `form`."""

    index: Words
    value: Words
    form: ValueFormat

    @property
    def words(self) -> Words:
        """Values as 32-bit words, two 16-bit values to a word."""
        if self.form == ValueFormat.FP32:
            return self.value
        even = np.append(self.value, np.zeros(len(self.value) % 2, np.uint32))
        return even[0::2] | even[1::2] << np.uint32(16)


class PairBench:
    """A decompressor beside its golden model.

    Attributes
    ----------
    group : elements whose pairs may come in any order.
    """

    def __init__(self, form: str, unit: StreamBench) -> None:
        self.form, self.unit, self.component = form, unit, unit.component
        self.fused = form == FUSED
        self.group = 1 if self.fused else unit.component.chunk
        self.quiet = {} if self.fused else {"quiet": 2 * unit.component.chunk + 200}

    def pairs(
        self,
        rng: np.random.Generator,
        count: int,
        pairs: int,
        *,
        form: ValueFormat = ValueFormat.FP32,
        repeats: float = 0.0,
    ) -> Pairs:
        """`pairs` pairs below `count`, in the order of groups; a share repeats an index."""
        index = rng.choice(count, pairs, replace=pairs > count)
        if pairs:
            again = rng.random(pairs) < repeats
            index[again] = rng.choice(index, np.count_nonzero(again))
            index = index[np.argsort(index // self.group, kind="stable")]
        width = 32 if form == ValueFormat.FP32 else 16
        value = rng.integers(0, 1 << width, pairs, dtype=np.uint32)
        special = rng.random(pairs) < 0.2
        value[special] = rng.choice(SPECIALS >> np.uint32(32 - width), np.count_nonzero(special))
        return Pairs(index.astype(np.uint32), value, form)

    def beats(self, words: Words, rng: np.random.Generator, last: int = -1) -> Words:
        """Rows of the pairs of a beat, noise behind the end, and the mark of the last beat.

        `last` is the beat that carries the mark, from the end; 0 for none.
        """
        per_beat = self.component.pairs
        beats = -(-len(words) // per_beat)
        rows = rng.integers(0, 1 << 32, (beats, per_beat + 1), dtype=np.uint32)
        flat = rows[:, :per_beat].reshape(-1)
        flat[: len(words)] = words
        rows[:, :per_beat] = flat.reshape(beats, per_beat)
        rows[:, per_beat] = 0
        if beats and last:
            rows[last, per_beat] = 1
        return rows

    def run(self, pairs: Pairs, rng, announced: int, count: int, *, last=-1, half=1, **options):
        """A run of pairs, or of the first of `half` parts of their beats."""
        dry = options.pop("dry", False)
        streams = {
            "i_index": self.beats(pairs.index, rng, last),
            "i_value": self.beats(pairs.words, rng, last),
        }
        streams = {name: rows[: len(rows) // half] for name, rows in streams.items()}
        if dry:
            streams["i_value"] = streams["i_value"][:0]
        inputs = {"i_pairs": announced, "i_count": count, "i_format": int(pairs.form)}
        inputs["i_dry"] = int(dry)
        if self.component.choice:
            inputs["i_scatter"] = int(not self.fused)
        return self.unit.run(streams, inputs, **{**self.quiet, **options})

    def check(self, pairs, count, *, announced=None, mode="free", seed=0, rng=None, dry=False):
        """Run pairs and compare all that can be seen; the run, and what it must give."""
        rng, lanes = rng or np.random.default_rng(seed), self.component.lanes
        announced = len(pairs.index) if announced is None else announced
        granule = 1 if dry else lanes if self.fused else self.group
        expected = decompress(
            pairs.index, widen(pairs.value, pairs.form), pairs=announced, count=count,
            group=self.group, granule=granule,
        )  # fmt: skip
        space = 1 if dry else -(-count // lanes) + 1
        result = self.run(
            pairs, rng, announced, count, space=space, stalls=STALLS[mode], seed=seed, dry=dry
        )
        got = result.streams["o"].reshape(-1)
        if dry:
            assert not got.size
        else:
            assert got.size == -(-expected.dense.size // lanes) * lanes
            assert (got[: expected.dense.size] == expected.dense).all()
            assert not got[expected.dense.size :].any()
        assert result.outputs["o_cause"] == expected.cause
        assert result.outputs["o_done"] == (expected.cause == PairCause.NONE)
        if expected.cause != PairCause.NONE or not dry:
            assert result.outputs["o_position"] == expected.position
        if expected.cause == PairCause.NONE and not dry:
            assert result.outputs["o_duplicates"] == expected.duplicates
        return result, expected


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def bench(request):
    form, lanes, pairs, chunk, forms, cut = request.param
    unit = StreamBench(
        Decompressor(forms=forms, lanes=lanes, pairs=pairs, chunk=chunk, cut=cut),
        name="decompressor",
        key=f"{lanes} {pairs} {chunk} {forms} {cut}",
        start="i_start",
    )
    yield PairBench(form, unit)
    unit.close()


def _count(bench: PairBench, rng: np.random.Generator) -> int:
    if bench.fused:
        return int(rng.choice([1, 3, 16, 17, 64, 1000, int(rng.integers(1, 2000))]))
    chunk = bench.group
    return int(rng.choice([1, 3, 17, chunk, chunk + 1, 2 * chunk - 1, rng.integers(1, 12 * chunk)]))


@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize("form", ValueFormat)
def test_any_number_of_pairs_and_elements(bench, mode, form) -> None:
    rng = np.random.default_rng(11)
    checked = duplicates = 0
    for k in range(60):
        count = _count(bench, rng)
        kept = int(rng.choice([0, 1, count, count // 2, int(rng.integers(0, count + 1))]))
        pairs = bench.pairs(rng, count, kept, form=form, repeats=float(rng.choice([0, 0.3, 1])))
        _, expected = bench.check(pairs, count, mode=mode, seed=k, rng=rng)
        checked += expected.dense.size
        duplicates += expected.duplicates
    print(f"seed 11: {checked} elements, {duplicates} duplicates")
    assert checked > (10_000 if bench.fused else 60 * bench.group)
    assert duplicates > 10


def test_a_dense_beat_takes_a_cycle_for_each_beat_of_pairs_in_it(bench) -> None:
    """Where pairs are sorted; those that have chunks write pairs of different banks together."""
    rng, component = np.random.default_rng(12), bench.component
    lanes, per_beat = component.lanes, component.pairs
    if bench.fused:
        for share in (0.0, 0.01, 0.3, 1.0):
            count = 4000 * lanes
            pairs = bench.pairs(rng, count, int(share * count))
            result, _ = bench.check(pairs, count, rng=rng)
            dense = pairs.index // lanes
            visits = np.unique(np.stack([dense, np.arange(len(dense)) // per_beat]), axis=1)
            expected = 4000 + visits.shape[1] - len(np.unique(dense))
            span = result.last["o"] - result.first["o"] + 1
            print(f"{share:.0%}: {span} cycles for 4000 beats")
            steps = 1 + component.cut  # cycles of each
            assert span <= steps * (expected + 2)
            assert share > 0.01 or span <= steps * 1.005 * 4000
    else:
        chunk = component.chunk
        count, turns = 8 * chunk, -(-per_beat // SCATTERED)
        pairs = bench.pairs(rng, count, count)
        pairs.index[:] = np.arange(count)
        result, _ = bench.check(pairs, count, rng=rng)
        taken = result.last["i_index"] - result.first["i_index"] + 1
        print(f"{count} pairs in {taken} cycles of {count // per_beat} beats")
        # All but one chunk is written while another is read, at `lanes` elements a cycle.
        assert taken <= max(turns * count // per_beat, count // lanes) + 8 + chunk // lanes


@pytest.mark.deep
@pytest.mark.parametrize("bench", [SHAPES[4], SHAPES[5], SHAPES[7]], indirect=True, ids=str)
def test_random_pairs_inside_a_chunk_come_at_six_a_cycle(bench) -> None:
    rng, component = np.random.default_rng(23), bench.component
    assert (component.pairs % SCATTERED, component.lanes) == (0, 16)
    count = 2 * component.chunk  # both buffers, nothing to wait for
    pairs = bench.pairs(rng, count, count)
    for start in (0, component.chunk):
        rng.shuffle(pairs.index[start : start + component.chunk])
    cycles = []
    for _ in range(8):
        result, _ = bench.check(pairs, count, rng=rng)
        cycles.append(result.last["i_index"] - result.first["i_index"] + 1)
        rng.shuffle(pairs.index[: component.chunk])
    rate = count / float(np.mean(cycles))
    print(f"{rate:.2f} pairs a cycle, {rate * 8 * 0.2:.1f} GB/s of pairs at 200 MHz")
    assert rate >= (6.0 if component.chunk >= 4096 else 5.0)


def test_a_thousand_equal_indices_leave_the_last(bench) -> None:
    pairs = bench.pairs(np.random.default_rng(13), 1, 1000)
    _, expected = bench.check(pairs, 100)
    assert expected.duplicates == 999
    assert expected.dense[0] == pairs.value[-1]


def test_an_empty_subgroup_gives_nothing(bench) -> None:
    rng = np.random.default_rng(14)
    bench.check(bench.pairs(rng, 10, 0), 0)
    _, expected = bench.check(bench.pairs(rng, 10, 5), 0)
    assert (expected.cause, expected.position) == (PairCause.RANGE, 0)


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("mode", STALLS)
def test_wrong_pairs_end_the_run_with_cause_and_position(bench, mode, dry) -> None:
    """A dry run takes no values and gives nothing; each run is followed by one that is not dry."""
    rng, group = np.random.default_rng(15), bench.group
    seen = dict.fromkeys(PairCause, 0)
    for k in range(60):
        count = int(rng.integers(2, 600 if bench.fused else 4 * group))
        pairs = bench.pairs(rng, count, int(rng.integers(2, count + 1)))
        if not dry or k % 2:
            at = int(rng.integers(len(pairs.index)))
            pairs.index[at] = rng.choice([count, 0, 0, 0, 0xFFFF_FFFF, pairs.index[at] // 2])
        _, expected = bench.check(pairs, count, mode=mode, seed=k, rng=rng, dry=dry)
        seen[expected.cause] += 1
        after = 50 if bench.fused else group
        bench.check(bench.pairs(rng, after, 3), after, mode=mode, seed=k, rng=rng)
    print(f"seed 15: {seen}")
    assert min(seen[PairCause.RANGE], seen[PairCause.ORDER]) > 2


@pytest.mark.parametrize("form", ValueFormat)
@pytest.mark.parametrize("missing", [1, 40])
def test_a_truncated_stream_ends_with_an_error(bench, form, missing) -> None:
    rng, count = np.random.default_rng(16), 1000 if bench.fused else 6 * bench.group
    for beats in (1, 2, 5):
        there = beats * bench.component.pairs
        pairs = bench.pairs(rng, count, there, form=form)
        _, expected = bench.check(pairs, count, announced=there + missing, rng=rng)
        assert (expected.cause, expected.position) == (PairCause.TRUNCATED, there)


def test_a_source_that_never_ends_nor_gives_keeps_the_run_open(bench) -> None:
    """And a run that is given up leaves nothing behind."""
    rng = np.random.default_rng(17)
    count = 1000 if bench.fused else 2 * bench.group
    for half in (1, 2):
        given = 4 * bench.component.pairs  # whole beats: of a part the rest would be pairs as well
        pairs = bench.pairs(rng, count, given)
        result = bench.run(pairs, rng, given + 1, count, last=0, half=half, space=count)
        assert (result.outputs["o_done"], result.outputs["o_cause"]) == (0, 0)
        bench.check(bench.pairs(rng, count, 0), count, rng=rng)


def test_pairs_behind_the_announced_number_are_left_to_the_next_run(bench) -> None:
    rng, per_beat = np.random.default_rng(18), bench.component.pairs
    pairs = bench.pairs(rng, 1000, 10 * per_beat)
    result = bench.run(pairs, rng, per_beat + 1, 1000, last=0, space=1000)
    assert result.outputs["o_done"] == 1
    assert result.transfers["i_index"] == result.transfers["i_value"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pairs": 3}, "even positive integer, not 3"),
        ({"lanes": 12}, "12"),
        ({"forms": (SCATTER,), "chunk": 16}, "at least 32 elements, not 16"),
        ({"forms": (SCATTER,), "chunk": 100}, "100"),
    ],
)
def test_shapes_that_cannot_be_are_refused(options, said) -> None:
    with pytest.raises(ValueError, match=said):
        Decompressor(**options)
