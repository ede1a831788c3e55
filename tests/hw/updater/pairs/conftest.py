"""Compressed gradients for the decompressors, and how they lie in the beats of a stream."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep_sim.bench.operands import SPECIALS
from nearstep_sim.golden.topk import decompress, widen
from nearstep_spec.updater.compression import PairCause, ValueFormat

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Pairs:
    """Indices, and values as patterns of `form`."""

    index: Words
    value: Words
    form: ValueFormat

    @property
    def widened(self) -> Words:
        return widen(self.value, self.form)


def make_pairs(
    rng: np.random.Generator,
    count: int,
    pairs: int,
    *,
    group: int = 1,
    form: ValueFormat = ValueFormat.FP32,
    repeats: float = 0.0,
) -> Pairs:
    """`pairs` pairs below `count`, ordered by `group`, of which a share repeats an index."""
    index = rng.choice(count, pairs, replace=pairs > count)
    if pairs:
        again = rng.random(pairs) < repeats
        index[again] = rng.choice(index, np.count_nonzero(again))
        index = index[np.argsort(index // group, kind="stable")]
    width = 32 if form == ValueFormat.FP32 else 16
    value = rng.integers(0, 1 << width, pairs, dtype=np.uint32)
    special = rng.random(pairs) < 0.2
    value[special] = rng.choice(SPECIALS >> np.uint32(32 - width), np.count_nonzero(special))
    return Pairs(index.astype(np.uint32), value, form)


def to_beats(words: Words, per_beat: int, rng: np.random.Generator, *, last: int = -1) -> Words:
    """Rows of `per_beat` words, noise behind the end, and the mark of the last beat.

    `last` is the beat that carries the mark, from the end; 0 for none.
    """
    beats = -(-len(words) // per_beat)
    rows = rng.integers(0, 1 << 32, (beats, per_beat + 1), dtype=np.uint32)
    flat = rows[:, :per_beat].reshape(-1)
    flat[: len(words)] = words
    rows[:, :per_beat] = flat.reshape(beats, per_beat)
    rows[:, per_beat] = 0
    if beats and last:
        rows[last, per_beat] = 1
    return rows


def packed(pairs: Pairs) -> Words:
    """Values as 32-bit words, two 16-bit values to a word."""
    if pairs.form == ValueFormat.FP32:
        return pairs.value
    even = np.append(pairs.value, np.zeros(len(pairs.value) % 2, np.uint32))
    return even[0::2] | even[1::2] << np.uint32(16)


@pytest.fixture
def pairs_of() -> Callable[..., Pairs]:
    return make_pairs


@pytest.fixture
def streams_of() -> Callable[..., dict[str, Words]]:
    """The two input streams of a decompressor, from pairs."""

    def make(pairs: Pairs, per_beat: int, rng: np.random.Generator, last: int = -1):
        return {
            "i_index": to_beats(pairs.index, per_beat, rng, last=last),
            "i_value": to_beats(packed(pairs), per_beat, rng, last=last),
        }

    return make


@pytest.fixture
def check_dry(bench, check, streams_of, pairs_of):
    """Run pairs dry, good and bad ones, each followed by a run that is not."""

    def run(inputs: dict[str, int], group: int, stalls: tuple[float, float]) -> None:
        rng = np.random.default_rng(29)
        component = bench.component
        causes = set()
        for _ in range(12):
            count = int(rng.integers(1, 8 * component.chunk))
            pairs = pairs_of(rng, count, int(rng.integers(0, count)), group=group)
            total = pairs.index.size
            if total and rng.integers(2):
                at = int(rng.integers(total))
                pairs.index[at] = rng.choice([count, pairs.index[at] // 2, 2**32 - 1])
            expected = decompress(
                pairs.index, pairs.widened, pairs=total, count=count, group=group, granule=1
            )
            streams = streams_of(pairs, component.pairs, rng)
            result = bench.run(
                streams | {"i_value": streams["i_value"][:0]},
                {"i_pairs": total, "i_count": count, **inputs},
                space=1,
                stalls=stalls,
                seed=30,
            )
            assert not result.streams["o"].size
            assert result.outputs["o_done"] == (expected.cause == PairCause.NONE)
            assert result.outputs["o_cause"] == expected.cause
            if expected.cause != PairCause.NONE:
                assert result.outputs["o_position"] == expected.position
            causes.add(expected.cause)
            check(pairs_of(rng, count, count // 2, group=group), count, rng=rng)
        assert len(causes) > 1

    return run
