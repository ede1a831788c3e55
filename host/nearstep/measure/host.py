"""A measured description of this machine."""

from __future__ import annotations

import os
import platform as host
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nearstep.measure.arithmetic import (
    adam_params_per_s,
    copy_bytes_per_s,
    dtypes_of,
    matmul_flops,
)
from nearstep.measure.drives import BLOCK_BYTES, DEPTHS, DriveRates, drive_rates
from nearstep_spec.cache import write_whole
from nearstep_spec.platform.dump import dump
from nearstep_spec.platform.load import THIS, measured_path
from nearstep_spec.platform.machine import Drive, Figure, Link, Platform, Processor

CPU = torch.device("cpu")
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurements.

    Attributes
    ----------
    file_bytes : of the file on the drive.
    copy_bytes : of a copy.
    matrix : most rows of a matrix on the CPU; four times as many on a GPU.
    parameters : elements of AdamW's tensor on the CPU; four times as many on a GPU.
    """

    file_bytes: int = 1 << 30
    copy_bytes: int = 1 << 28
    matrix: int = 2048
    parameters: int = 1 << 24


def gpus() -> list[torch.device]:
    """GPUs that torch can use."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def steps() -> int:
    """Number of steps that `measure` reports."""
    each = [len(dtypes_of(device)) + 2 for device in (CPU, *gpus())]
    return sum(each) + 2 * len(gpus()) + 2 * len(DEPTHS) + 1


def measure(
    directory: Path, sizes: Sizes | None = None, report: Report = lambda step: None
) -> Platform:
    """Measure the CPU, its memory, GPUs with their links, and the drive of a folder.

    Parameters
    ----------
    directory : on the drive; a temporary file is created there.
    sizes : None: too large for caches.
    report : called with a line before each of `steps`.

    Raises
    ------
    MeasureError : the drive of the folder cannot be measured.
    """
    sizes = Sizes() if sizes is None else sizes
    rates = drive_rates(directory, sizes.file_bytes, report)  # the only one that can be refused
    processors = {"cpu": _processor(CPU, sizes, report)}
    links: dict[str, Link] = {}
    for index, gpu in enumerate(gpus()):
        processors[f"gpu{index}"] = _processor(gpu, sizes, report)
        links[f"pcie{index}"] = _link(gpu, index, sizes, report)
    links["bus"] = Link(
        ends=("cpu", "drive"),
        bytes_per_s=_measured(
            max(*rates.read_bytes_per_s.values(), *rates.write_bytes_per_s.values()),
            "the best rate of the drive: the bus is not slower",
        ),
    )
    return Platform(
        name=THIS,
        title=f"{host.machine()}, {os.cpu_count()} cores, {len(gpus())} GPUs",
        processors=processors,
        drives={"drive": _drive(directory, rates)},
        links=links,
    )


def keep(platform: Platform) -> Path:
    """Write the description atomically to the file that `load("this")` reads.

    Raises
    ------
    CacheError : the environment names no folder, or it cannot be written.
    """
    path = measured_path()
    write_whole(path, dump(platform))
    return path


def _measured(value: float, how: str) -> Figure:
    return Figure(value=value, origin="measured", source=how)


def _processor(device: torch.device, sizes: Sizes, report: Report) -> Processor:
    times = 1 if device.type == "cpu" else 4
    size, count = times * sizes.matrix, times * sizes.parameters
    torch_is = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    flops = {}
    for dtype in dtypes_of(device):
        report(f"{device}: products in {dtype}")
        rate, rows = matmul_flops(device, dtype, size)
        flops[dtype] = _measured(rate, f"products of {rows} x {rows}, {torch_is}")
    report(f"{device}: AdamW")
    adam = adam_params_per_s(device, count)
    report(f"{device}: copies in its memory")
    copies = 2 * copy_bytes_per_s(device, device, sizes.copy_bytes)
    return Processor(
        title=_name(device),
        flops=flops,
        memory_bytes=_measured(_memory_bytes(device), "the system's word"),
        memory_bytes_per_s=_measured(
            copies, f"copies of {sizes.copy_bytes} bytes, each read and written, {torch_is}"
        ),
        adam_params_per_s=_measured(adam, f"fused AdamW on {count} of fp32, {torch_is}"),
    )


def _link(gpu: torch.device, index: int, sizes: Sizes, report: Report) -> Link:
    how = f"copies of {sizes.copy_bytes} bytes, pinned on the host"
    report(f"{gpu}: copies to it")
    there = copy_bytes_per_s(gpu, CPU, sizes.copy_bytes)
    report(f"{gpu}: copies from it")
    back = copy_bytes_per_s(CPU, gpu, sizes.copy_bytes)
    return Link(
        ends=("cpu", f"gpu{index}"),
        bytes_per_s=_measured(there, how),
        back_bytes_per_s=_measured(back, how),
    )


def _drive(directory: Path, rates: DriveRates) -> Drive:
    def best(name: str, found: dict[int, float]) -> Figure:
        each = ", ".join(f"{depth}: {rate / 1e9:.3f}" for depth, rate in found.items())
        how = f"O_DIRECT, blocks of {BLOCK_BYTES} bytes; GB/s by queue depth {each}"
        return _measured(max(found.values()), f"{name}, {how}")

    return Drive(
        title=f"the drive of {directory.resolve()}",
        capacity_bytes=_measured(shutil.disk_usage(directory).total, "the system's word"),
        read_bytes_per_s=best("reads", dict(rates.read_bytes_per_s)),
        write_bytes_per_s=best("writes", dict(rates.write_bytes_per_s)),
        read_latency_s=_measured(rates.read_latency_s, "4 KiB with O_DIRECT, the median"),
        write_latency_s=_measured(rates.write_latency_s, "4 KiB with O_DIRECT, the median"),
        queue_depth=_measured(
            rates.depth, "the least with 95 % of both best rates, or nearest to it"
        ),
    )


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return host.processor() or host.machine() or "CPU"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
