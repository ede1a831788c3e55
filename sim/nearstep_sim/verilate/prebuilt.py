"""Libraries in a wheel of the package, for several kinds of processors.

They are built from the sources that are compiled where the package has no library of them.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nearstep_spec.compiler import NOT_FOUND
from nearstep_spec.errors import NearstepError

__all__ = ["INDEX", "TARGETS", "DamagedLibraryError", "OtherProcessorError", "Target", "find"]

FOLDER = Path(__file__).resolve().parents[1] / "prebuilt"
"""Folder of the package, in a wheel; a checkout has none."""

INDEX = "index.json"
"""File in the folder: by key of the sources (`build.Library.key`) and name of a target, a library's
file and its SHA-256."""


class Target(NamedTuple):
    """A kind of processors.

    Attributes
    ----------
    name : as GCC's `-march` has it, and in the index.
    needs : the machine, as `platform.machine()` has it, and flags in `/proc/cpuinfo`.
    """

    name: str
    needs: frozenset[str]

    @property
    def machine(self) -> str:
        """As `platform.machine()` has it."""
        return self.name if self.name in self.needs else "x86_64"

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of `ziglang` that choose the processor."""
        return () if self.name in self.needs else (f"-march={self.name.replace('-', '_')}",)


_V3 = frozenset(
    {"x86_64", "cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
    | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
)
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

TARGETS = (
    Target("x86-64-v4", _V4),
    Target("x86-64-v3", _V3),
    Target("aarch64", frozenset({"aarch64"})),
)
"""Targets of wheels, the best first. Ref: x86-64 psABI, table 3.1."""


class OtherProcessorError(NearstepError, RuntimeError):
    """The package has a library for other processors only, and there is no compiler.

    Attributes
    ----------
    missing : what this processor lacks, by name of a target.
    """

    def __init__(self, missing: Mapping[str, frozenset[str]]) -> None:
        self.missing = missing
        lacks = "; ".join(
            f"{name}: this processor lacks {', '.join(sorted(what))}"
            for name, what in missing.items()
        )
        super().__init__(f"the package's library is for other processors ({lacks}); {NOT_FOUND}")


class DamagedLibraryError(NearstepError, RuntimeError):
    """A library of the package is not the one that was built."""

    def __init__(self, path: Path, expected: str, actual: str) -> None:
        self.path = path
        super().__init__(
            f"{path} has the SHA-256 {actual}, expected {expected}: install the package again"
        )


@cache
def features() -> frozenset[str]:
    """The machine, and the flags of its processor that are known to the system."""
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.exists() else []
    flags = next((row for row in rows if row.startswith(("flags", "Features"))), "")
    return frozenset({platform.machine(), *flags.partition(":")[2].split()})


@cache
def _index(folder: Path) -> dict[str, dict[str, tuple[str, str]]]:
    path = folder / INDEX
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def find(key: str) -> Path | None:
    """The package's library of some sources, for the best target that this processor is of; None if
    the package has none of them.

    Raises
    ------
    OtherProcessorError, DamagedLibraryError
    """
    made = _index(FOLDER).get(key, {})
    for target in TARGETS:
        if target.name in made and target.needs <= features():
            name, expected = made[target.name]
            actual = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
            if actual != expected:
                raise DamagedLibraryError(FOLDER / name, expected, actual)
            return FOLDER / name
    if made:
        needs = {target.name: target.needs for target in TARGETS}
        raise OtherProcessorError(
            {name: needs.get(name, frozenset({name})) - features() for name in made}
        )
    return None
