"""Groups begin, end and begin again, whatever others have left in the store."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from nearstep.coarse.service.errors import JobError
from nearstep.coarse.service.spawn import Spawned
from nearstep.torch.distributed.rendezvous import ADDRESS, TOKEN_FILE, agree, default_device

from . import lives
from .processes import on_processes

SHORT_S = 0.2
"""Of processes that wait for one that died."""


def test_processes_agree_on_a_new_name_whatever_the_store_has() -> None:
    """Processes of earlier lives died before, in or after the handshake."""
    seed = 20_261_126
    print(f"seed {seed}")
    draw = random.Random(seed)
    store, seen, whole = HashStore(), set[str](), 0
    for life in range(12):
        size, dead = 4, draw.sample(range(4), draw.choice([0, 1, 2])) if life % 2 == 0 else []
        names: dict[int, str] = {}

        def join(rank: int, names: dict[int, str], seconds: float) -> None:
            try:
                names[rank] = agree(store, rank, 4, seconds)
            except JobError:
                return

        threads = [
            threading.Thread(target=join, args=(rank, names, SHORT_S if dead else 30.0))
            for rank in draw.sample(range(size), size)
            if rank not in dead
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if not dead:
            assert len(names) == size
            assert len(set(names.values())) == 1
            whole += 1
        assert not seen & set(names.values())
        seen |= set(names.values())
    assert whole >= 6


@pytest.mark.parametrize(("rank", "missing"), [(0, 2), (1, 0)])
def test_who_begins_late_is_named_in_time(rank: int, missing: int) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    with ThreadPoolExecutor() as threads:
        if rank == 0:
            threads.submit(agree, store, 1, 3, 30.0)
        began = time.monotonic()
        with pytest.raises(JobError, match=f"for rank {missing} to") as caught:
            agree(store, rank, 3, 1.0)
        assert time.monotonic() - began < 5
    assert list(caught.value.ranks) == [missing]


def test_groups_leave_nothing_overlap_and_begin_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with Spawned(default_device(3)) as service:
        token.touch(mode=0o600)
        token.write_text(service.token)
        given = service.address, str(token), str(tmp_path / "checkpoint")
        assert on_processes(3, lives.all_of_them, *given, backend="gloo") == [6] * 3


@pytest.mark.deep
@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("standing", [False, True])
def test_torchrun_starts_processes_again(how: str, standing: bool, tmp_path: Path) -> None:
    program = Path(lives.__file__).with_name("restarted.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with Spawned(default_device(2)) if standing else nullcontext() as service:
        if service is not None:
            token = tmp_path / "token"
            token.touch(mode=0o600)
            token.write_text(service.token)
            environment |= {ADDRESS: service.address, TOKEN_FILE: str(token)}
        ended = subprocess.run(
            [*command, str(program), how],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ended.returncode == 0, ended.stderr[-4000:]
    # Lines of two processes on one pipe may run together.
    said = sorted(re.findall(r"rank \d+ ends well in life \d+", ended.stdout))
    assert said == [f"rank {rank} ends well in life 2" for rank in range(2)]
