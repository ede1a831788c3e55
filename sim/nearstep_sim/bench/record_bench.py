# amaranth: UnusedElaboratable=no
"""A user's decompressor, Verilated, against its numpy function."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.updater.pairs.decompress import Decompressor
from nearstep_sim.bench.operands import SPECIALS
from nearstep_sim.bench.stream_bench import STALLS, StreamBench, StreamProtocolError, StreamRun
from nearstep_sim.golden import fp
from nearstep_sim.golden.topk import widen
from nearstep_spec.fp import BF16, FP16
from nearstep_spec.updater.compression import PairCause, ValueFormat
from nearstep_spec.updater.decompressor import Decompressor as UserDecompressor

__all__ = ["KINDS", "RecordBench", "RecordCase", "cases", "gradient", "made", "meaning_again"]

Words = NDArray[np.uint32]

QUIET = 500
"""Cycles without a transfer after which a unit is considered hung."""


@dataclass(frozen=True, eq=False)
class RecordCase:
    """Records of one run.

    Attributes
    ----------
    kind : kind of the records.
    words : shape (records,).
    values : patterns of `form`, of the same shape.
    count : elements.
    """

    kind: str
    words: Words
    values: Words
    count: int
    form: ValueFormat

    @property
    def widened(self) -> Words:
        """Patterns of binary32."""
        return widen(self.values, self.form)


def gradient(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """`count` elements of many magnitudes: a tenth zeros of both signs, infinities, NaN and
    subnormals."""
    found = (rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)).astype(np.float32)
    special = rng.random(count) < 0.1
    found[special] = rng.choice(SPECIALS, np.count_nonzero(special)).view(np.float32)
    return found


def made(
    user: UserDecompressor,
    rng: np.random.Generator,
    count: int,
    form: ValueFormat,
    share: float,
    kind: str = "made",
    of: NDArray[np.float32] | None = None,
) -> RecordCase:
    """Compress a gradient, random by default, to records.

    Raises
    ------
    DecompressorError
    """
    words, values = user.records(gradient(rng, count) if of is None else of, share)
    return RecordCase(kind, words, _narrowed(values, form), count, form)


def meaning_again(user: UserDecompressor, dense: Words, form: ValueFormat, share: float) -> Words:
    """Compress patterns of a gradient, and decompress the records again.

    Raises
    ------
    DecompressorError
    """
    words, values = user.records(dense.view(np.float32), share)
    return user.dense(words, widen(_narrowed(values, form), form), dense.size)


def _narrowed(values: NDArray[np.float32], form: ValueFormat) -> Words:
    """Patterns of values that are rounded to a format."""
    if form == ValueFormat.FP32:
        return values.view(np.uint32)
    target = FP16 if form == ValueFormat.FP16 else BF16
    return np.asarray(fp.narrow32(values, target)).astype(np.uint32)


def _any_values(rng: np.random.Generator, size: int, form: ValueFormat) -> Words:
    width = 32 if form == ValueFormat.FP32 else 16
    found = rng.integers(0, 1 << width, size, dtype=np.uint32)
    special = rng.random(size) < 0.2
    found[special] = rng.choice(SPECIALS, np.count_nonzero(special)) >> np.uint32(32 - width)
    return found


KINDS = ("made", "full", "empty", "short", "doubled", "beyond", "broken", "arbitrary", "allowed")
"""Kinds of `cases`: output of `compress`; with share 1; none; half of them; each twice; more after
them; one word wrong; random bits; and the valid ones of these.
"""


def cases(
    user: UserDecompressor, seed: int, runs: int, *, lanes: int, block: int
) -> Iterator[RecordCase]:
    """`runs` cases, of every kind and format in turn, with counts at the ends of beats and blocks.

    Raises
    ------
    DecompressorError
    """
    rng = np.random.default_rng(seed)
    ends = [1, 2, lanes - 1, lanes, lanes + 1, block - 1, block, block + 1]
    for run in range(runs):
        kind, form = KINDS[run % len(KINDS)], list(ValueFormat)[run // len(KINDS) % 3]
        count = int(rng.choice([*ends, *rng.integers(1, 3 * block, len(ends))]))
        share = float(rng.choice([0.01, 0.25, 1.0]))
        case = made(user, rng, count, form, 1.0 if kind == "full" else share, kind)
        yield _spoilt(case, rng, user)


def _spoilt(case: RecordCase, rng: np.random.Generator, user: UserDecompressor) -> RecordCase:
    """Change the records of a case as its kind tells."""
    words, values, most = case.words, case.values, user.most(case.count)
    if case.kind == "empty":
        words, values = words[:0], values[:0]
    elif case.kind == "short":
        words, values = words[: words.size // 2], values[: words.size // 2]
    elif case.kind == "doubled":
        words, values = np.repeat(words, 2), np.repeat(values, 2)
    elif case.kind == "beyond":
        more = int(rng.integers(1, 40))
        behind = rng.choice([0, 1, 0xFFFF_FFFF, case.count], more).astype(np.uint32)
        words = np.concatenate([words, behind])
        values = np.concatenate([values, _any_values(rng, more, case.form)])
    elif case.kind == "broken" and words.size:
        words = words.copy()
        words[rng.integers(words.size)] = rng.choice([rng.integers(1 << 32), 0xFFFF_FFFF, 1 << 31])
    elif case.kind in ("arbitrary", "allowed"):
        words = rng.integers(0, 1 << 32, most, dtype=np.uint32)
        words &= rng.choice([0xFFFF_FFFF, 0x5555_5555, 0xFF, case.count], most).astype(np.uint32)
        values = _any_values(rng, most, case.form)
        while case.kind == "allowed":
            at = user.first_wrong(words, case.count)
            if at is None:
                break
            words, values = np.delete(words, at), np.delete(values, at)
    return RecordCase(case.kind, words, values, case.count, case.form)


class RecordBench:
    """The decompressor of a kernel with a user's unit, Verilated.

    Parameters
    ----------
    user : decompressor from `nearstep_spec.updater.decompressor.load`.
    lanes : elements of a dense beat, and records of a beat.
    cut : long paths are cut, as of `nearstep_hw.updater.pairs.decompress.Decompressor`.

    Attributes
    ----------
    compared : elements compared with `==`.
    runs : by outcome: `done`, `wrong` and `dry`.

    Raises
    ------
    ValueError : the decompressor has no file, whose digest names the build.
    TypeError : the decompressor's unit has other ports.
    """

    def __init__(self, user: UserDecompressor, *, lanes: int = 16, cut: bool = False) -> None:
        if not user.digest:
            raise ValueError("A decompressor must be one of a file, FILE.py:NAME")
        self.user = user
        self.lanes = lanes
        self.compared = 0
        self.runs = {"done": 0, "wrong": 0, "dry": 0}
        self._bench = StreamBench(
            Decompressor(lanes=lanes, pairs=lanes, user=user, cut=cut),
            name="user_decompressor",
            key=f"{lanes} {cut} {user.digest}",
            start="i_start",
        )

    def close(self) -> None:
        """Free the model."""
        self._bench.close()

    def difference(self, case: RecordCase, *, stalls: str = "free", seed: int = 0) -> str:
        """Run a case, first dry; return the first difference from numpy, if any."""
        user, count = self.user, case.count
        wrong = user.first_wrong(case.words, count)
        expected = user.dense(case.words, case.widened, count) if wrong is None else None
        cause = PairCause.NONE if wrong is None else PairCause.RANGE
        where = f"{case.kind}, {case.words.size} records of {count} elements, {case.form.name}"
        where += f", stalls {stalls}, seed {seed}"
        try:
            dry = self.run(case, stalls=stalls, seed=seed, dry=True)
            wet = self.run(case, stalls=stalls, seed=seed)
        except StreamProtocolError as error:
            return f"{where}: {error}"
        self.runs["dry"] += 1
        for name, run in (("dry", dry), ("run", wet)):
            out = run.outputs
            given = (out["o_done"], out["o_cause"], out["o_position"] if out["o_cause"] else 0)
            wanted = (int(wrong is None), int(cause), wrong or 0)
            if given != wanted:
                beats = f"{run.transfers['o']} of {-(-count // self.lanes)} beats given"
                return (
                    f"{where}: {name}: (done, cause, position) is {given}, expected {wanted}; "
                    f"{beats}"
                )
        if dry.transfers["o"]:
            return f"{where}: dry: {dry.transfers['o']} beats given, expected none"
        if expected is None:
            self.runs["wrong"] += 1
            return ""
        self.runs["done"] += 1
        got = wet.streams["o"].reshape(-1)[:count]
        if got.size != count:
            return f"{where}: {got.size} elements given, expected {count}"
        self.compared += count
        differing = np.flatnonzero(got != expected)
        if differing.size:
            at = int(differing[0])
            return f"{where}: element {at} is {got[at]:#010x}, expected {expected[at]:#010x}"
        return ""

    def give_up(self, case: RecordCase, *, seed: int) -> str:
        """Begin a run and abandon it with half of its records sent; return its violation, if any.

        Its output is not compared.
        """
        try:
            self.run(case, stalls="both", seed=seed, part=0.5)
        except StreamProtocolError as error:
            return f"{case.kind}, given up half way, seed {seed}: {error}"
        return ""

    def run(
        self,
        case: RecordCase,
        *,
        stalls: str = "free",
        seed: int = 0,
        dry: bool = False,
        part: float = 1.0,
    ) -> StreamRun:
        """Send the records of a case, or a part of them, followed by noise.

        Raises
        ------
        StreamProtocolError
        """
        rng = np.random.default_rng(seed)
        values = _packed(case)
        streams = {"i_index": self._beats(case.words, rng), "i_value": self._beats(values, rng)}
        streams = {name: rows[: int(part * len(rows))] for name, rows in streams.items()}
        if dry:
            streams["i_value"] = streams["i_value"][:0]
        inputs = {
            "i_pairs": case.words.size,
            "i_count": case.count,
            "i_format": int(case.form),
            "i_dry": int(dry),
        }
        space = -(-case.count // self.lanes)
        return self._bench.run(
            streams, inputs, space=space, stalls=STALLS[stalls], seed=seed, quiet=QUIET
        )

    def _beats(self, words: Words, rng: np.random.Generator) -> Words:
        beats = -(-words.size // self.lanes)
        rows = rng.integers(0, 1 << 32, (beats, self.lanes + 1), dtype=np.uint32)
        flat = rows[:, :-1].reshape(-1)
        flat[: words.size] = words
        rows[:, :-1] = flat.reshape(beats, self.lanes)
        rows[:, -1] = 0  # the number of records determines the end
        return rows


def _packed(case: RecordCase) -> Words:
    """Values as 32-bit words, two of 16 bits to a word."""
    if case.form == ValueFormat.FP32:
        return case.values
    even = np.append(case.values, np.zeros(case.values.size % 2, np.uint32))
    return even[0::2] | (even[1::2] << np.uint32(16))
