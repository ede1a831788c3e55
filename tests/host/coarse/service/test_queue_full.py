"""A client's queue that is full: what does not fit is refused, and can be pushed again."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import FullError
from nearstep.errors import ArgumentError

from .conftest import put_in, taken_from


@pytest.mark.parametrize("forced", [False, True], ids=["client", "service"])
@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_shard_that_was_refused_can_be_pushed_again(serve, tcp, forced) -> None:
    service = serve(2, tcp=tcp, queue_shards=1)

    def action(client: Client) -> bool:
        exchange = client.exchange(2048)
        put_in(exchange, 1 + client.rank)
        exchange.begin()
        if client.rank == 0:
            exchange.push(0)
            with pytest.raises(FullError, match="all 1 places"):
                exchange.push(1)
            if forced:  # and if a client sends it all the same, the service refuses it
                exchange._push(1)
                with pytest.raises(FullError, match="all 1 places"):
                    exchange.wait(1)
            client.barrier()
        else:
            client.barrier()
            exchange.push(0)
        exchange.wait(0)
        exchange.push(1)
        exchange.wait(1)
        found = bool((taken_from(exchange) == 3).all())
        exchange.close()
        return found

    assert service.run(2, action) == [True, True]
    service.wait_idle()


def test_a_tensor_of_more_shards_than_places_is_summed(serve) -> None:
    service = serve(2, queue_shards=2)

    def action(client: Client) -> bool:
        array = np.full(9 * 1024, 1 + client.rank, np.float32)
        out = np.empty_like(array)
        exchange = client.exchange(array.size)
        assert len(exchange.shards) == 9
        exchange.reduce(array, out)
        exchange.close()
        return bool((out == 3).all())

    assert service.run(2, action) == [True, True]
    service.wait_idle()


def test_a_version_that_is_not_whole_is_not_left_behind(serve) -> None:
    """After a full queue, or Ctrl-C, a client cannot break the protocol with what it does next."""
    service = serve(2, queue_shards=1)

    def action(client: Client) -> list[str]:
        array, out, said = np.ones(2048, np.float32), np.empty(2048, np.float32), []
        exchange = client.exchange(array.size)
        exchange.begin()
        put_in(exchange, array)
        if client.rank == 0:
            exchange.push(0)  # summed only once rank 1 pushes it too, behind the barrier
            with pytest.raises(FullError):
                exchange.push(1)
            for attempt in (
                lambda: exchange.reduce(array, out),
                exchange.begin,
                lambda: exchange.push(0),
                lambda: exchange.push(2),
            ):
                with pytest.raises(ArgumentError) as found:
                    attempt()
                said.append(str(found.value))
        client.barrier()
        if client.rank == 1:
            exchange.push(0)
        exchange.wait(0)
        exchange.push(1)
        exchange.wait(1)
        exchange.reduce(array, out)
        assert (out == 2).all()
        exchange.close()
        return said

    said, nothing = service.run(2, action)
    assert nothing == []
    assert ["shards [0, 1] of version 1" in each for each in said] == [True, True, False, False]
    assert "pushed once" in said[2]
    assert "from 0 to 1" in said[3]
    service.wait_idle()


def test_a_client_interrupted_within_a_sum_can_finish_it(serve) -> None:
    service = serve(2)

    def action(client: Client) -> bool:
        exchange = client.exchange(3 * 1024)
        array, out = np.ones(3 * 1024, np.float32), np.empty(3 * 1024, np.float32)

        def fill(part: np.ndarray, start: int, stop: int) -> None:
            if client.rank == 0 and start:
                raise KeyboardInterrupt
            part[:] = array[start:stop]

        with pytest.raises(KeyboardInterrupt) if client.rank == 0 else nullcontext():
            exchange.run(fill, lambda *_: None)
        if client.rank == 0:
            with pytest.raises(ArgumentError, match=r"shards \[0, 1, 2\]|shards \[1, 2\]"):
                exchange.reduce(array, out)
            for shard in (1, 2):
                start, stop = exchange.shards[shard]
                exchange.pushed(shard)[:] = array[start:stop]
                exchange.push(shard)
            for shard in range(3):
                exchange.wait(shard)
        exchange.reduce(array, out)
        return bool((out == 2).all())

    assert service.run(2, action) == [True, True]
    service.wait_idle()
