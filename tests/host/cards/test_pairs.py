"""Pairs that arrays of cards with drives get: doubled, out of range, none, and all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep.errors import PairRangeError, ResetNeededError
from nearstep.torch.compression import FORMS, Compression

from ...sim.smartssd.test_card import URLS
from ..overflow.jobs import PLAIN, Job, card_url, drives, everything

JOB = Job(((40, 16), (16,), (30, 20), (7,)))
STEPS = 2
SHARE = 0.25

Index = NDArray[np.uint32]
Records = tuple[Index, NDArray[Any]]
Change = Callable[[Index, NDArray[Any], int], Records]


def losers(index: Index) -> NDArray[np.bool_]:
    """Pairs that get the index of the next one: every third, so that no two are neighbours."""
    return (np.arange(index.size) % 3 == 0) & (np.arange(index.size) + 1 < index.size)


def doubled(index: Index, value: NDArray[Any], count: int) -> Records:
    lost, index = np.flatnonzero(losers(index)), index.copy()
    index[lost] = index[lost + 1]
    return index, value


def without_the_losers(index: Index, value: NDArray[Any], count: int) -> Records:
    return index, np.where(losers(index), value.dtype.type(0), value)


def none_at_all(index: Index, value: NDArray[Any], count: int) -> Records:
    return index[:0], value[:0]


def zeros(index: Index, value: NDArray[Any], count: int) -> Records:
    return index, np.zeros_like(value)


def out_of_range(number: int, beyond: int) -> Change:
    """In one of the lists the last index is that of no element."""
    left = number

    def change(index: Index, value: NDArray[Any], count: int) -> Records:
        nonlocal left
        left -= 1
        if left:
            return index, value
        return np.append(index[:-1], np.uint32(count + beyond)), value

    return change


@contextmanager
def sent(change: Change | None) -> Iterator[None]:
    """What is sent to each subgroup of each card is changed."""
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            records = Compression.records

            def changed(self: Any, index: Index, value: NDArray[Any], count: int) -> Records:
                return change(*records(self, index, value, count), count)  # type: ignore[arg-type]

            patch.setattr(Compression, "records", changed)
        yield


def trained(
    url: str, cards: int, change: Change | None, job: Job = JOB, **more: Any
) -> tuple[dict[str, bytes], int, int]:
    """Bits after some steps, pairs that lost, and pairs."""
    options = {"compression": SHARE, "error_feedback": False, **more}
    runs = []
    with sent(change), drives(cards, 1200) as on:
        parameters, optimizer = job.trained(url, drives=on.store, **options)
        update = optimizer.device.run_rule

        def spy(*arguments: Any, **named: Any) -> Any:
            runs.append(update(*arguments, **named))
            return runs[-1]

        optimizer.device.run_rule = spy
        for step in range(STEPS):
            job.step(optimizer, parameters, step)
        found = everything(parameters, optimizer)
        assert len(runs) >= STEPS * cards
        return found, sum(run.duplicates for run in runs), optimizer.traffic.pairs


@pytest.mark.parametrize(("cards", "form"), [(2, "fused"), (3, "scatter")])
def test_of_pairs_with_equal_indices_the_last_counts_on_every_card(cards: int, form: str) -> None:
    url = card_url(cards, 128)
    found, lost, pairs = trained(url, cards, doubled, compression_form=form)
    assert pairs / 4 < lost < pairs / 2
    expected, none, as_many = trained(url, cards, without_the_losers, compression_form=form)
    assert (none, as_many) == (0, pairs)
    assert found == expected
    assert found != trained(url, cards, None, compression_form=form)[0]


@pytest.mark.parametrize(("cards", "form"), [(2, "fused"), (3, "scatter")])
def test_no_pairs_are_a_gradient_of_zeros(cards: int, form: str) -> None:
    url = card_url(cards, 128)
    found, _, pairs = trained(url, cards, none_at_all, compression_form=form)
    expected, _, as_usual = trained(url, cards, zeros, compression_form=form)
    assert (found, pairs) == (expected, 0)
    assert as_usual > 0


@pytest.mark.parametrize("cards", [2, 3])
def test_all_pairs_are_the_whole_gradient_and_one_pair_leaves_most_subgroups_none(
    cards: int,
) -> None:
    url = card_url(cards, 128)
    job = Job(((40, 16), (0,), (16,), (30, 20), (7,)))
    elements = sum(p.numel() for p in job.parameters())
    found, _, pairs = trained(url, cards, None, job, compression=1.0)
    whole, _, none = trained(url, cards, None, job, compression=None)
    assert (found, pairs, none) == (whole, STEPS * elements, 0)
    for (share, kept), feedback in product(((1e-9, 4), (1.0, elements)), (False, True)):
        options = {"compression": share, "error_feedback": feedback}
        found, _, pairs = trained(url, cards, None, job, **options)
        assert pairs == STEPS * kept
        assert found == job.after(PLAIN, STEPS, **options)


@pytest.mark.parametrize(("cards", "beyond", "form"), [(2, 0, "scatter"), (3, 1 << 31, "fused")])
def test_an_index_out_of_range_leaves_everything_as_before_the_step(
    cards: int, beyond: int, form: str
) -> None:
    """The error has the pair, and names the card; the others' share is undone as well."""
    more = {"compression": SHARE, "compression_form": form}
    steps = [JOB.after(PLAIN, count, **more) for count in (1, 3)]
    refused = 0
    for wrong in (1, 4, 7):
        with drives(cards, 1200) as on:
            parameters, optimizer = JOB.trained(card_url(cards, 128), 1, drives=on.store, **more)
            with sent(out_of_range(wrong, beyond)), pytest.raises(PairRangeError) as caught:
                JOB.step(optimizer, parameters, 1)
            said = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
            assert "updater" in said or "card" in said, said
            assert everything(parameters, optimizer) == steps[0]
            try:
                JOB.step(optimizer, parameters, 1)
            except ResetNeededError:
                assert everything(parameters, optimizer) == steps[0]
                optimizer.device.reset()
                JOB.step(optimizer, parameters, 1)
            JOB.step(optimizer, parameters, 2)
            assert everything(parameters, optimizer) == steps[1]
            refused += 1
    assert refused == 3


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_the_rtl_of_two_cards_takes_doubled_none_and_all(form: str) -> None:
    job = Job(((40, 16), (7,)))
    shape = "&cards=2&subgroup_elements=128&drive=unused"
    compared = 0
    for change, share in ((doubled, SHARE), (none_at_all, SHARE), (None, 1.0), (None, 1e-9)):
        more = {"compression": share, "compression_form": form}
        sim = trained(f"{URLS['sim']}{shape}", 2, change, job, **more)
        golden = trained(f"{URLS['golden']}{shape}", 2, change, job, **more)
        assert sim == golden
        assert (golden[1] > 0) == (change is doubled)
        compared += len(golden[0])
    assert compared > 20
