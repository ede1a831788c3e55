"""The GPT in several processes: other devices, lossy links, a killed worker, fewer workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.deep


def trained(folder: Path, *options: str, workers: int = 4, fails: bool = False) -> str:
    """The last line that the example prints: the digest of the parameters."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "coarse_ddp.py"), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else ""


def test_a_killed_worker_is_resumed_from_the_last_epoch_with_the_same_bits(tmp_path: Path) -> None:
    whole = trained(tmp_path)
    assert whole.startswith("parameters ")
    for kill in ("2:7", "0:12"):
        for each in tmp_path.glob("state.*"):
            each.unlink()
        trained(tmp_path, "--snapshots", "state", "--kill", kill, fails=True)
        assert len(list(tmp_path.glob("state.*"))) == (1 if kill == "2:7" else 2)
        assert trained(tmp_path, "--snapshots", "state", "--resume") == whole
    assert trained(tmp_path, "--hook") == whole


def test_fewer_workers_go_on_from_the_same_state(tmp_path: Path) -> None:
    trained(tmp_path, "--snapshots", "state", "--steps", "4")
    found = {trained(tmp_path, "--snapshots", f"state{n}", workers=2) for n in range(2)}
    assert len(found) == 1
    (first,) = tmp_path.glob("state.*")
    ends = set()
    for number in range(2):
        (tmp_path / f"own{number}.000001").write_bytes(first.read_bytes())
        own = ["--snapshots", f"own{number}", "--resume"]
        ends.add(trained(tmp_path, *own, workers=2))
    assert len(ends) == 1
    assert ends != found


@pytest.mark.parametrize(
    "device",
    [
        "sim:coarse?devices=4&window=direct",
        "sim:coarse?devices=4&window=direct&drop=0.02&corrupt=0.01&seed=3",
    ],
)
def test_rtl_trains_to_the_bits_of_golden(tmp_path: Path, device: str) -> None:
    golden = trained(tmp_path, "--device", "golden:coarse?devices=4&groups=2", "--steps", "3")
    assert trained(tmp_path, "--device", device, "--steps", "3") == golden
