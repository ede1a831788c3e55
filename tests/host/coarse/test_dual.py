"""The split of dual synchronization, compared with all that there are."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearstep.coarse.dual import DualInputs, best_buckets, best_split
from nearstep.errors import ArgumentError

same_each_time = settings(max_examples=80, deadline=None, derandomize=True, database=None)
SEED = 18


def by_the_paper(given: DualInputs, m: int) -> Fraction:
    """T_train, written down once more from section III-F."""
    p, n = Fraction(given.workers), given.nbytes
    proxies = (2 * (p - 1) / p * m) / Fraction(given.proxy_bytes_per_s)
    workers = (2 * (p - 1) / p * (n - m)) / Fraction(given.worker_bytes_per_s)
    t_fp, t_bp = Fraction(given.forward_s), Fraction(given.backward_s)
    return max(t_fp + t_bp + workers, t_fp + proxies)


@st.composite
def inputs(draw: st.DrawFn) -> DualInputs:
    rates = st.one_of(st.integers(1, 6), st.fractions(Fraction(1, 4), 8, max_denominator=9))
    times = st.one_of(st.integers(0, 12), st.floats(0, 12))
    return DualInputs(
        workers=draw(st.integers(1, 5)),
        nbytes=draw(st.integers(0, 40)),
        forward_s=draw(times),
        backward_s=draw(times),
        proxy_bytes_per_s=draw(rates),
        worker_bytes_per_s=draw(rates),
    )


def test_the_closed_form_is_the_best_of_all() -> None:
    kinds: Counter[str] = Counter()

    @same_each_time
    @given(given=inputs())
    def each(given: DualInputs) -> None:
        times = [given.train_s(m) for m in range(given.nbytes + 1)]
        assert times == [by_the_paper(given, m) for m in range(given.nbytes + 1)]
        found = best_split(given)
        assert found == times.index(min(times))
        kinds["at 0" if not found else "at n" if found == given.nbytes else "between"] += 1
        kinds["one worker"] += given.workers == 1

    each()
    for kind in ("at 0", "at n", "between", "one worker"):
        assert kinds[kind] >= 10, kinds


def test_of_large_models_no_other_split_is_better() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    checks = 0
    for _ in range(60):
        given = DualInputs(
            workers=rng.randint(2, 1024),
            nbytes=rng.randint(1 << 20, 1 << 40),
            forward_s=rng.random(),
            backward_s=rng.random() * rng.choice((0.0, 1.0, 100.0)),
            proxy_bytes_per_s=rng.uniform(1e9, 1e11),
            worker_bytes_per_s=rng.uniform(1e9, 1e11),
        )
        found = best_split(given)
        best = by_the_paper(given, found)
        others = {0, given.nbytes, *(rng.randint(0, given.nbytes) for _ in range(20))}
        others |= {found + step for step in (-1000, -2, -1, 1, 2, 1000)}
        for m in others - {found}:
            if 0 <= m <= given.nbytes:
                assert by_the_paper(given, m) >= best
                assert m > found or by_the_paper(given, m) > best
                checks += 1
    assert checks > 60 * 20, checks


def sized(**changes: object) -> DualInputs:
    values = {
        "workers": 4,
        "nbytes": 1000,
        "forward_s": 1.0,
        "backward_s": 2.0,
        "proxy_bytes_per_s": 500.0,
        "worker_bytes_per_s": 250.0,
    }
    return DualInputs(**{**values, **changes})  # type: ignore[arg-type]


def test_the_edges() -> None:
    assert best_split(sized(workers=1)) == 0
    assert sized(workers=1).train_s(0) == sized(workers=1).train_s(1000) == 3
    assert best_split(sized(nbytes=0)) == 0
    assert best_split(sized(backward_s=100.0)) == 1000
    assert best_split(sized(backward_s=0, worker_bytes_per_s=1e30)) == 0
    assert best_split(sized(backward_s=0, worker_bytes_per_s=500.0)) == 500
    assert best_split(sized(proxy_bytes_per_s=1e-30)) == 0
    assert sized().train_s(500) == 1 + 2 + 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("workers", 1.5),
        ("nbytes", -1),
        ("nbytes", True),
        ("forward_s", -1.0),
        ("backward_s", math.inf),
        ("backward_s", math.nan),
        ("proxy_bytes_per_s", 0),
        ("proxy_bytes_per_s", math.inf),
        ("worker_bytes_per_s", 0.0),
        ("worker_bytes_per_s", -1),
        ("worker_bytes_per_s", math.nan),
    ],
)
def test_bad_inputs_are_refused(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be .*, not"):
        sized(**{name: value})


@pytest.mark.parametrize("m", [-1, 1001, 0.5, True])
def test_a_split_that_is_none_is_refused(m: object) -> None:
    with pytest.raises(ArgumentError, match="m must be an integer from 0 to 1000, not"):
        sized().train_s(m)  # type: ignore[arg-type]


@same_each_time
@given(given=inputs(), data=st.data())
def test_the_best_buckets_are_better_than_any_others(given, data) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, given.nbytes), max_size=6)))
    edges = [0, *cuts, given.nbytes]
    sizes = [high - low for low, high in pairwise(edges)]
    found = best_buckets(sizes, given)
    assert [*found.devices, *found.workers] == [*range(len(sizes))]
    times = [given.train_s(sum(sizes[:count])) for count in range(len(sizes) + 1)]
    assert len(found.devices) == times.index(min(times))


def test_buckets_of_another_model_are_refused() -> None:
    with pytest.raises(ArgumentError, match="buckets must have n = 1000 bytes, not 999"):
        best_buckets([500, 499], sized())
    with pytest.raises(ArgumentError, match="sizes must be an integer from 0, not -1"):
        best_buckets([-1, 1001], sized())
