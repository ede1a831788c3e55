"""A program for torchrun: two workers, each with a drive; in each life but the last one is killed.

Arguments: folder, steps, seed of the kills, number of kills.
"""

import hashlib
import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from tests.host.overflow import sharded
from torch.distributed.device_mesh import init_device_mesh

folder, steps, seed, kills = Path(sys.argv[1]), *map(int, sys.argv[2:])
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
choose = random.Random(1000 * seed + life)
victim, after, pause = choose.randrange(2), choose.randrange(3), choose.random() * 0.02

made = sharded.fully(mesh)
optimizer = sharded.make(made, folder, resume="if-any")
done = max([0, *(int(each["step"]) for each in optimizer.state.values())])
for step in range(done, steps):
    if life < kills and rank == victim and step == done + after:
        kill = os.kill, (os.getpid(), signal.SIGKILL)
        threading.Timer(pause, *kill).start()  # in the step, in its commit, or after it
    sharded.train(made, optimizer, [step])
if life < kills:
    os.kill(os.getpid(), signal.SIGKILL)
found = sharded.everything(made, optimizer)
digest = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
print(f"rank {rank} of life {life} began at {done}: {digest}", flush=True)
dist.destroy_process_group()
