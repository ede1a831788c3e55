"""A process or the service ends, or stands still: the others get errors, in time, and live on."""

from __future__ import annotations

import re

import pytest

from . import faults, like_gloo
from .processes import Gone, on_processes

SAYS = re.compile(
    r"client 1 of job|clients \[1\] (have|are missing)|ServiceLostError"
    r"|the service (is gone|closed)|gloo|Application timeout|the process group was closed"
)

OF_TORCH = ("prior iteration", "unmarked_param_indices")
"""What DDP says in the step behind a backward that failed; the second if it was in the hook of the
last bucket, with all gradients made."""


@pytest.mark.parametrize(
    "fault",
    [faults.FAULTS[0], *(pytest.param(x, marks=pytest.mark.deep) for x in faults.FAULTS[1:])],
)
def test_survivors_get_errors(fault: str) -> None:
    *survivors, last = on_processes(2, faults.survive, fault)
    assert isinstance(last, Gone) == (fault in ("kill", "raise", "stop"))
    for each in survivors if isinstance(last, Gone) else [*survivors, last]:
        assert not isinstance(each, Gone)
        assert len(each) == 2 * len(faults.KINDS)
        for what, said in each:
            is_torchs = what.startswith("step") and any(each in said for each in OF_TORCH)
            assert SAYS.search(said) or is_torchs, (fault, what, said)


def test_collectives_are_as_gloos() -> None:
    assert on_processes(2, like_gloo.compare) == [165, 165]


@pytest.mark.deep
@pytest.mark.parametrize("count", [3, 4])
def test_collectives_are_as_gloos_with_more_processes(count: int) -> None:
    assert on_processes(count, like_gloo.compare) == [165] * count
