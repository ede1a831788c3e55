"""Clients that make the same sums one after the other, and one of them does not."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest

from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import DeviceMemoryError, JobError, OrderError, UnlikeError
from nearstep.coarse.service.exchange import Exchange


def reduce(exchange: Exchange, turn: int) -> float:
    """The first element of a sum."""
    out = np.empty(exchange.elements, np.float32)

    def fill(part: np.ndarray, start: int, stop: int) -> None:
        part[:] = 1.0

    def take(part: np.ndarray, start: int, stop: int) -> None:
        out[start:stop] = part

    exchange.run(fill, take, turn=turn)
    return float(out[0])


def test_sums_in_the_same_order_are_made_again_and_again(serve) -> None:
    service = serve(2)

    def action(client: Client) -> list[float]:
        one, two = client.exchange(5, turn=1), client.exchange(5000)
        found = [reduce(one, 1), reduce(two, 2), reduce(one, 3), reduce(one, 4)]
        with pytest.raises(DeviceMemoryError):
            client.exchange(4 << 20, turn=5)
        three = client.exchange(7, turn=5)  # in the place of the one that was refused
        return [*found, reduce(three, 5), reduce(two, 6)]

    assert service.run(3, action) == [[3.0] * 6] * 3
    service.wait_idle()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("kind", ["another", "new"])
def test_who_sums_something_else_ends_the_job_at_once_and_both_are_named(serve, kind, late) -> None:
    """No client waits for what never comes, whichever of them is first."""
    service = serve(2)

    def action(client: Client) -> JobError:
        one, two = client.exchange(5, turn=1), client.exchange(6)
        assert reduce(one, 1) == reduce(two, 2) == 2.0
        if client.rank == late:
            time.sleep(0.05)  # the other one is probably first
        if client.rank:
            attempt = partial(reduce, one, 3)
        elif kind == "another":
            attempt = partial(reduce, two, 3)
        else:
            attempt = partial(client.exchange, 7, "max", turn=3, kind="bfloat16")
        with pytest.raises(OrderError) as found:
            attempt()
        return found.value

    for error in service.run(2, action):
        assert error.ranks == (0, 1)
        assert "exchange 0 (sum of 5 elements)" in str(error)
        other = "exchange 2 (max of 7 elements of bfloat16)" if kind == "new" else "exchange 1"
        assert other in str(error)
    service.wait_idle()
    assert service.run(2, lambda client: reduce(client.exchange(5, turn=1), 1)) == [2.0] * 2


def test_tensors_of_other_kinds_are_unlike(serve) -> None:
    service = serve(2)

    def action(client: Client) -> float:
        with pytest.raises(
            UnlikeError, match=r"clients \[0\].*, float32; clients \[1\].*, float16"
        ):
            client.exchange(5, kind=["float32", "float16"][client.rank])
        return reduce(client.exchange(5, kind="float32"), 0)

    assert service.run(2, action) == [2.0] * 2


def test_what_a_client_does_with_results_may_fail_and_the_others_get_theirs(serve) -> None:
    service = serve(2)

    def action(client: Client) -> float:
        exchange = client.exchange(3 * 1024)
        assert len(exchange.shards) == 3
        if client.rank == 0:

            def take(part: np.ndarray, start: int, stop: int) -> None:
                raise ZeroDivisionError(f"of {start}")

            with pytest.raises(ZeroDivisionError, match="of 0"):
                exchange.run(lambda part, start, stop: None, take)
        else:
            reduce(exchange, 0)
        return reduce(exchange, 0)

    assert service.run(2, action) == [2.0] * 2
    service.wait_idle()
