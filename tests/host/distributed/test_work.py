"""Works of a group: who carries them out, in which order, and what an interrupt leaves."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, FileStore
from torch._C._dynamo import eval_frame
from torch._dynamo.types import ConvertFrameReturn

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.service import Client, Server
from nearstep.coarse.service.errors import JobError
from nearstep.errors import ArgumentError
from nearstep.torch.distributed import ddp_hook, dual_hook
from nearstep.torch.distributed.fsdp import fsdp_reduce_scatter
from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep.torch.distributed.work import CoarseWork, Lane

TIMEOUT_S = 60.0
ENDS = """
import threading, time
from concurrent.futures import Future
from torch._C._distributed_c10d import HashStore
from nearstep.torch.distributed import rendezvous

class AtTheEnd:
    def __del__(self, say=print, sleep=time.sleep, answer='{"place": ["a", "b"]}'):
        self.store.set("place", answer)
        say("answered", flush=True)
        sleep(0.5)

last = AtTheEnd()
last.store = HashStore()
given = last.store, Future(), False, 1, 2, 60.0
threading.Thread(target=rendezvous._find, args=given, daemon=True).start()
time.sleep(0.1)
"""


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("a test")
    yield made
    made.close()


def test_works_are_carried_out_in_order_whoever_waits(lane: Lane) -> None:
    seen: list[int] = []
    works = []
    for number in range(200):
        work = CoarseWork(f"{number}", [], lane)
        lane.submit(work, lambda number=number: seen.append(number), awaited=number % 3 == 0)
        works.append(work)
        if number % 7 == 0:
            work.wait()
    for work in reversed(works):
        assert work.wait()
    assert seen == [*range(200)]


def test_who_waits_at_once_carries_out_and_who_looks_finds_it_done(lane: Lane) -> None:
    threads: list[threading.Thread] = []
    work = CoarseWork("here", [], lane)
    lane.submit(work, lambda: threads.append(threading.current_thread()), awaited=True)
    assert not threads  # the other thread was not woken
    work.wait()
    assert threads == [threading.current_thread()]
    for ask in (CoarseWork.is_completed, CoarseWork.get_future):
        done = threading.Event()
        work = CoarseWork("there", [], lane)
        lane.submit(work, done.set, awaited=True)
        ask(work)
        assert done.wait(TIMEOUT_S)


def test_the_compiler_sees_no_frame_of_a_work(lane: Lane) -> None:
    """A compiled model waits for works from C++, and this thread may carry them out."""
    seen: list[str] = []

    def see(frame: Any, *_: object) -> Any:
        seen.append(frame.f_code.co_name)
        return ConvertFrameReturn()

    def compiled() -> None:
        work = CoarseWork("here", [], lane)
        lane.submit(work, done.set, awaited=True)
        work.wait()
        work.is_completed()

    done = threading.Event()
    before = eval_frame.set_eval_frame(see)
    try:
        compiled()
    finally:
        eval_frame.set_eval_frame(before)
    assert done.is_set()
    assert seen == ["compiled"]


def test_what_fails_is_raised_and_the_next_work_goes_on(lane: Lane) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    failed, other = CoarseWork("fails", [], lane), CoarseWork("other", [], lane)
    lane.submit(failed, fail, awaited=False)
    lane.submit(other, lambda: None, awaited=False)
    future = failed.get_future()
    with pytest.raises(ValueError, match="on purpose"):
        failed.wait()
    with pytest.raises(RuntimeError, match="ValueError: on purpose"):
        future.wait()
    assert other.wait()


@contextlib.contextmanager
def alone(folder: Path, release: Callable[[], None] = lambda: None) -> Iterator[CoarseProcessGroup]:
    """A group of one process."""
    pool = CoarsePool.open("golden:coarse?devices=2&groups=2&memory_bytes=4MiB")
    with Server(pool, f"unix:{folder}/socket", "a") as server:
        yield CoarseProcessGroup(
            lambda: Client(server.bound, "a", job="j", rank=0, clients=1, timeout_s=TIMEOUT_S),
            "j",
            0,
            1,
            FileStore(str(folder / "store"), 1),
            timedelta(seconds=TIMEOUT_S),
            release=release,
        )


def test_a_collective_that_was_interrupted_is_the_last_one(tmp_path: Path) -> None:
    with alone(tmp_path) as group:
        options = AllreduceOptions()
        options.asyncOp = False
        group.allreduce([found := torch.ones(3)], options).wait()
        assert (found == 1).all()

        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            group.carry_out("wait", interrupt)
        with pytest.raises(JobError, match="interrupted"):
            group.allreduce([found], options).wait()
        group.shutdown()


def test_gloo_connects_before_a_group_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread that makes the group: one in C++ code would abort a process that ends."""
    threads: list[threading.Thread] = []
    made = dist.ProcessGroupGloo

    def connect(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return made(*given)

    monkeypatch.setattr(dist, "ProcessGroupGloo", connect)
    with alone(tmp_path) as group:
        assert threads == [threading.current_thread()]
        group.shutdown()


def test_a_process_ends_well_while_it_waits_for_a_service() -> None:
    """The answer comes when Python's threads must not come back from C++ code any more."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=5 * TIMEOUT_S
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout == "answered\n"


def test_tensors_of_works_that_were_polled_are_freed(tmp_path: Path) -> None:
    with alone(tmp_path) as group:
        polled = []
        for ask in (CoarseWork.is_completed, CoarseWork.is_success):
            work = group.allreduce([given := torch.ones(3)])
            assert work._ended.wait(TIMEOUT_S)
            assert ask(work)
            polled.append(weakref.ref(given))
            del work, given
        group.barrier().wait()
        gc.collect()
        assert [each() for each in polled] == [None, None]
        group.shutdown()


def test_a_given_group_has_its_own_wire_and_timeout(tmp_path: Path) -> None:
    with alone(tmp_path) as group:
        given: dict[str, Any] = {"wire": "fp32", "timeout_s": TIMEOUT_S}
        assert ddp_hook(group)[0] is ddp_hook(group, **given)[0] is group
        for make in (ddp_hook, partial(dual_hook, m=4), fsdp_reduce_scatter):
            for name, value in {"wire": "bf16", "timeout_s": 2 * TIMEOUT_S}.items():
                with pytest.raises(ArgumentError, match=f"{name} must be {given[name]}, of the"):
                    make(group, **{name: value})
        group.shutdown()


def test_a_group_that_nobody_has_leaves_and_ends_its_threads(tmp_path: Path) -> None:
    """A process that ends waits for them."""
    released = threading.Event()
    with alone(tmp_path, released.set) as group:
        group.barrier().wait()
        threads = [group._lane._thread, group.client._replies._thread]
        del group
        gc.collect()
        assert released.wait(TIMEOUT_S)
        for each in threads:
            each.join(TIMEOUT_S)
            assert not each.is_alive()
