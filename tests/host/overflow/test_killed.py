"""Training with state of `host:` on drives is killed again and again, and ends with equal bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SEED = 3
STEPS = 60
KILLS = 5
PROGRAM = """
import hashlib, os, signal, sys
import torch
import nearstep
from nearstep.torch import in_backward

in_backward.TOGETHER = 1
folder, steps, updates, dies = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.manual_seed(0)
layers = torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 77)
model = torch.nn.Sequential(*layers)
drives = [f"{folder}/{name}.nearstep" for name in "ab"]
optimizer = nearstep.optim.AdamW(
    model.parameters(), lr=1e-2, drives=drives, memory="1MiB", resume=os.path.exists(drives[0]),
    updates=updates,
)

def made(_):  # after the optimizer's own hook of this gradient
    global dies
    dies -= 1
    if dies == 0:
        print("in backward", optimizer.keeps_updates, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

for p in model.parameters():
    p.register_post_accumulate_grad_hook(made)
done = max([0, *(int(state["step"]) for state in optimizer.state.values())])
for step in range(done, steps):
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    print(step, flush=True)
tensors = [*model.parameters()]
keys = "exp_avg", "exp_avg_sq"
tensors += [optimizer.state[p][key] for p in model.parameters() for key in keys]
print(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest())
"""


GRADIENTS = 4
"""Of a step."""


@pytest.mark.deep
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_killed_again_and_again(updates: str, tmp_path: Path) -> None:
    """At any point; with updates in backward between two of them."""
    print(f"seed {SEED}")
    choose, kills, early = random.Random(SEED), 0, updates == "in-backward"

    def start(name: str, dies: int = 0) -> subprocess.Popen[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        arguments = [str(tmp_path / name), str(STEPS), updates, str(dies)]
        command = [sys.executable, "-c", PROGRAM, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    expected = start("alone").communicate()[0].split()
    assert expected[:-1] == [str(step) for step in range(STEPS)]
    last = -1
    for _ in range(KILLS):
        steps = choose.randrange(1, 6)
        dies = steps * GRADIENTS + choose.randrange(1, GRADIENTS) if early else 0
        child = start("killed", dies)
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(steps)]
        if early:
            assert child.stdout.readline() == "in backward True\n", "it had updates to roll back"
        else:
            os.kill(child.pid, signal.SIGKILL)
        said += map(int, child.communicate()[0].split())
        assert child.returncode == -signal.SIGKILL
        assert said[0] in (last + 1, last + 2 - early), "the step after the last that was committed"
        last, kills = said[-1], kills + 1
    assert start("killed").communicate()[0].split()[-1] == expected[-1]
    assert kills == KILLS > 0
