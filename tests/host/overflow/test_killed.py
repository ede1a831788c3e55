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
PROGRAM = """
import hashlib, os, sys
import torch
import nearstep

folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
layers = torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 77)
model = torch.nn.Sequential(*layers)
drives = [f"{folder}/{name}.nearstep" for name in "ab"]
optimizer = nearstep.optim.AdamW(
    model.parameters(), lr=1e-2, drives=drives, memory="1MiB", resume=os.path.exists(drives[0])
)
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


@pytest.mark.deep
def test_killed_again_and_again(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    choose, kills = random.Random(SEED), 0

    def start(name: str) -> subprocess.Popen[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / name), str(STEPS)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    expected = start("alone").communicate()[0].split()
    assert expected[:-1] == [str(step) for step in range(STEPS)]
    last = -1
    for _ in range(5):
        child = start("killed")
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(choose.randrange(1, 6))]
        os.kill(child.pid, signal.SIGKILL)
        said += map(int, child.communicate()[0].split())
        assert child.returncode == -signal.SIGKILL
        assert said[0] in (last + 1, last + 2), "the step after the last that was committed"
        last, kills = said[-1], kills + 1
    assert start("killed").communicate()[0].split()[-1] == expected[-1]
    assert kills == 5
