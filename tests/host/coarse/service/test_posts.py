"""What is posted to an end that reads late or never: the sender waits for neither."""

from __future__ import annotations

import select
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from nearstep.coarse.service.errors import JobError
from nearstep.coarse.service.messages import Done, FromService, Put, Summed
from nearstep.coarse.service.wire import HEADER, MAGIC, Connection

from .dying import Left, beside, check_left, recorded

FRAMES, NBYTES = 40, 1 << 20


def flush(connection: Connection, backlog: list[bool]) -> None:
    """As the loop of the service does."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLOUT)
    while backlog[-1]:
        poll.poll()
        connection.flush()


def test_posts_return_at_once_and_arrive_in_order() -> None:
    ours, theirs = (Connection(each, FromService, 60.0) for each in socket.socketpair())
    backlog: list[bool] = []
    ours.on_backlog = backlog.append
    payloads = [np.full(NBYTES, number, np.uint8) for number in range(FRAMES)]
    began = time.monotonic()
    for number, payload in enumerate(payloads):
        ours.post(Summed(0, 1, number, NBYTES), payload)
        ours.post(Done(number))
    ours.finish()
    assert time.monotonic() - began < 30  # seconds; a send would wait for ever
    assert not ours.closed
    assert backlog == [True]
    thread = threading.Thread(target=flush, args=(ours, backlog))
    thread.start()
    place = np.zeros(NBYTES, np.uint8)
    found = []
    for number in range(FRAMES):
        summed = theirs.receive(lambda message: place if isinstance(message, Summed) else None)
        found.append((summed.shard, bool((place == number).all())))
        assert theirs.receive(lambda _: None) == Done(number)
    assert found == [(number, True) for number in range(FRAMES)]
    with pytest.raises(EOFError):  # and then the connection ends
        theirs.receive(lambda _: None)
    thread.join()
    assert ours.closed
    ours.close()
    theirs.close()


def test_an_end_that_never_reads_is_given_up() -> None:
    ours, theirs = (Connection(each, FromService, 0.5) for each in socket.socketpair())
    ours.post(Summed(0, 1, 0, 8 * NBYTES), np.zeros(8 * NBYTES, np.uint8))
    end = time.monotonic() + 60
    while not ours.closed:
        assert time.monotonic() < end
        time.sleep(0.01)
        ours.check_moving()
    ours.post(Done(1))  # nobody gets that, and nothing waits
    ours.close()
    theirs.close()


def test_long_payloads_arrive_and_one_that_stops_ends_its_job_alone(serve) -> None:
    """They are moved in threads, beside the loop."""
    service = serve(2, tcp=True, silence_s=1.5, beat_s=0.2)
    before = Left.of(service)
    sent = np.arange(NBYTES, dtype=np.uint32).view(np.uint8)[:NBYTES]

    def good(client) -> int:
        client.keep("a" if client.rank else "b", sent)
        found = np.zeros_like(sent)
        client.get("b" if client.rank else "a", found)
        return int((found == sent).sum())

    def stops(client) -> tuple[int, ...]:
        client.barrier()
        if client.rank == 0:
            connection = client._replies.connection
            place = client._arena.take(NBYTES)
            body = msgspec.msgpack.encode(Put(1, "a", place.segment, NBYTES, place.offset))
            frame = HEADER.pack(MAGIC, len(body), NBYTES) + body + b"x" * (NBYTES // 2)
            with connection._lock:  # so that no sign of life is sent within the frame
                connection.sock.setblocking(True)
                connection.sock.sendall(frame)
                time.sleep(3)
        with pytest.raises(JobError) as caught:
            client.barrier()
        return tuple(caught.value.ranks)

    with recorded(), beside(service):
        assert service.run(2, good) == [NBYTES, NBYTES]
        assert service.run(2, stops)[1] == (0,)
    assert service.run(2, good) == [NBYTES, NBYTES]
    check_left(service, before)


def test_a_timeout_names_who_has_not_come(serve) -> None:
    service = serve(2)

    def action(client) -> list[tuple[int, ...]]:
        named = []
        if client.rank != 1:
            client.timeout_s = 0.3
            with pytest.raises(JobError, match=r"clients \[1\] are missing") as caught:
                client.barrier()
            named.append(tuple(caught.value.ranks))
            client.timeout_s = 60.0
            client.keep(f"{client.rank}", np.zeros(1, np.uint8))
        else:
            for rank in (0, 2):
                client.get(f"{rank}", np.zeros(1, np.uint8))
        exchange = client.exchange(512)
        exchange.begin()
        if client.rank == 0:
            client.timeout_s = 0.3
            exchange.push(0)
            with pytest.raises(JobError, match=r"clients \[1, 2\] are missing") as caught:
                exchange.wait(0)
            named.append(tuple(caught.value.ranks))
            client.timeout_s = 60.0
            client.keep("go on", np.zeros(1, np.uint8))
        else:
            client.get("go on", np.zeros(1, np.uint8))
            exchange.push(0)
        exchange.wait(0)
        return named

    assert service.run(3, action) == [[(1,), (1, 2)], [], [(1,)]]
    service.wait_idle()
