"""The description of this machine: whole, its own origin, kept and found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nearstep.measure import host
from nearstep.measure.arithmetic import copy_bytes_per_s, dtypes_of, matmul_flops
from nearstep.measure.drives import BLOCK_BYTES, MeasureError
from nearstep.measure.host import Sizes, gpus, keep, measure, steps
from nearstep_spec.cache import clear
from nearstep_spec.platform.dump import dump
from nearstep_spec.platform.load import load, measured_path, parse
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
    clear()
    assert load("this") == platform
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


def test_a_gpu_has_a_part_and_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on the GPU is replaced: how a description is made of it needs none."""
    direct_or_skip(tmp_path)
    gpu = torch.device("cuda", 0)
    rates = {(gpu, host.CPU): 12e9, (host.CPU, gpu): 13e9, (gpu, gpu): 450e9, (host.CPU,) * 2: 9e9}
    for name, fake in {
        "gpus": lambda: [gpu],
        "matmul_flops": lambda device, dtype, most: (1e12, most),
        "adam_params_per_s": lambda device, count: 1e9,
        "copy_bytes_per_s": lambda to, start, nbytes: rates[to, start],
        "_name": str,
        "_memory_bytes": lambda device: 1 << 30,
    }.items():
        monkeypatch.setattr(host, name, fake)
    seen: list[str] = []
    platform = measure(tmp_path, SMALL, seen.append)
    assert len(seen) == steps()
    there, back = platform.route("cpu", "gpu0"), platform.route("gpu0", "cpu")
    assert [hop.bytes_per_s for hop in there] == [18e9, 12e9, 900e9]
    assert [hop.bytes_per_s for hop in back] == [900e9, 13e9, 18e9]
    assert set(platform.processors["gpu0"].flops) == {"fp32", "tf32", "bf16", "fp16"}
    assert parse(dump(platform), "dumped") == platform


def test_a_gpu_is_measured_with_its_link(tmp_path: Path) -> None:
    if not gpus():
        pytest.skip("torch sees no GPU here")
    direct_or_skip(tmp_path)
    platform = measure(tmp_path, SMALL)
    assert platform.links["pcie0"].back_bytes_per_s is not None
    assert "tf32" in platform.processors["gpu0"].flops
    assert copy_bytes_per_s(gpus()[0], torch.device("cpu"), 1 << 16) > 0
