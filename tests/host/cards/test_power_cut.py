"""Power is cut at every write of a step whose state lies on the drives of cards."""

from __future__ import annotations

import pytest

from ..overflow.jobs import Job, card_url
from ..overflow.test_power_cut import check_cuts

JOB = Job([(20, 16), (5,)])
"""Its first parameter takes several subgroups of a card."""


def test_a_step_of_subgroups_at_some_writes() -> None:
    assert check_cuts(JOB, 2, 2, 6, 41, card_url(2, 128)) > 20


@pytest.mark.deep
@pytest.mark.parametrize("cards", [1, 2])
def test_a_step_of_subgroups_at_every_write(cards: int) -> None:
    assert check_cuts(JOB, cards, 16, 1, 42, card_url(cards, 128)) > 200


def test_what_error_feedback_holds_back_at_some_writes() -> None:
    """It is of the same step as the state."""
    assert check_cuts(JOB, 2, 2, 7, 44, card_url(2, 128), compression=0.25) > 20


@pytest.mark.deep
@pytest.mark.parametrize("error_feedback", [False, True])
def test_compressed_gradients_at_every_write(error_feedback: bool) -> None:
    job = Job([(20, 16), (5,)], "momentum")
    more = {"compression": 0.25, "error_feedback": error_feedback}
    assert check_cuts(job, 2, 4, 2, 43, card_url(2, 128), **more) > 100
