"""A client's queue that is full: what does not fit is refused, and can be pushed again."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import FullError


@pytest.mark.parametrize("forced", [False, True], ids=["client", "service"])
@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_shard_that_was_refused_can_be_pushed_again(serve, tcp, forced) -> None:
    service = serve(2, tcp=tcp, queue_shards=1)

    def action(client: Client) -> bool:
        exchange = client.exchange(2048)
        exchange.pushed[:] = 1 + client.rank
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
        found = bool((exchange.pulled == 3).all())
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
