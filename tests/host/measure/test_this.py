"""The description of this machine: whole, its own origin, kept and found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nearstep.measure.arithmetic import copy_bytes_per_s, dtypes_of, matmul_flops
from nearstep.measure.drives import BLOCK_BYTES
from nearstep.measure.errors import MeasureError
from nearstep.measure.this import Sizes, gpus, keep, measure, steps
from nearstep_spec.platform.load import load, measured_path
from nearstep_spec.platform.machine import Figure

from .test_drives import direct_or_skip

SMALL = Sizes(file_bytes=BLOCK_BYTES, copy_bytes=1 << 16, matrix=64, parameters=1 << 10)


def test_this_machine_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct_or_skip(tmp_path)
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    seen: list[str] = []
    platform = measure(tmp_path, SMALL, seen.append)
    assert len(seen) == steps()
    assert keep(platform) == measured_path()
    assert load("this") == platform
    assert keep(platform) == measured_path()  # over the one before
    assert [each.name for each in measured_path().parent.iterdir()] == ["this.toml"]
    cpu, drive = platform.processors["cpu"], platform.drives["drive"]
    assert set(cpu.flops) == {"fp32", "bf16", "fp16"}
    found = [*cpu.flops.values(), cpu.memory_bytes, cpu.adam_params_per_s]
    found += [drive.read_bytes_per_s, drive.write_bytes_per_s, drive.queue_depth]
    for figure in found:
        assert isinstance(figure, Figure)
        assert figure.origin == "measured"
        assert float(figure) > 0
    assert platform.route("drive", "cpu")[0].lane == "drive read"


def test_nothing_is_measured_where_the_folder_is_none(tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(MeasureError, match="is no folder"):
        measure(tmp_path / "nothing", SMALL, seen.append)
    assert seen == []


def test_a_product_is_no_larger_than_it_may_be() -> None:
    rate, rows = matmul_flops(torch.device("cpu"), "fp32", 48)
    assert rows == 48
    assert rate > 0


def test_tf32_is_of_gpus_alone() -> None:
    assert dtypes_of(torch.device("cpu")) == ("fp32", "bf16", "fp16")
    assert "tf32" in dtypes_of(torch.device("cuda"))


def test_a_gpu_is_measured_with_its_link(tmp_path: Path) -> None:
    if not gpus():
        pytest.skip("torch sees no GPU here")
    direct_or_skip(tmp_path)
    platform = measure(tmp_path, SMALL)
    assert platform.links["pcie0"].back_bytes_per_s is not None
    assert "tf32" in platform.processors["gpu0"].flops
    assert copy_bytes_per_s(gpus()[0], torch.device("cpu"), 1 << 16) > 0
