"""A program for torchrun; one of its two processes dies in each life but the last."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import nearstep.torch.distributed  # noqa: F401

LIVES = 3
HOW = sys.argv[1]

rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("coarse", timeout=timedelta(seconds=60))
group = dist.new_group([0, 1])
for each in (None, group):
    dist.all_reduce(found := torch.full((5,), rank + 1.0), group=each)
    assert (found == 3).all()
work = None
if life < LIVES - 1 and rank == life % 2:
    work = dist.all_reduce(torch.ones(5), async_op=True)  # the other process never takes part
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"rank {rank} fails in life {life}")
dist.barrier(group=group)
print(f"rank {rank} ends well in life {life}", flush=True)
dist.destroy_process_group()
