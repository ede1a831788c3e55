"""Snapshot files.

A file is in the format of safetensors: named tensors of shape (devices, ...), then the tensor
`DIGEST`, the SHA-256 of all bytes of the file before. The file `name.000003` is generation 3 of
`name`; a file is renamed to this name after all data has been flushed.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from nearstep.errors import ArgumentError
from nearstep.storage.blocks import sync_folder
from nearstep.storage.errors import (
    SnapshotError,
    SnapshotSaveError,
    SnapshotVersionError,
    TornSnapshotError,
)

VERSION = 2
METADATA = "__metadata__"
FORMAT = "nearstep.snapshot"
"""Key of the version among the metadata, which are the first of a file."""

DIGEST = "nearstep.sha256"
DIGEST_BYTES = 32
LENGTH = struct.Struct("<Q")
START = f'{{"{METADATA}":{{"{FORMAT}":"'.encode()
OLD_MAGIC = b"NSCOARSE"
"""First bytes of a file of version 1."""

GENERATION_DIGITS = 6
CHUNK_BYTES = 1 << 20

DTYPES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
"""Bytes of an element, by the name that safetensors gives the dtype."""

Arrays = dict[str, NDArray[Any]]
"""The values of each tensor, by name; the first dimension is that of the devices."""


class _TornError(Exception):
    """Reason why a file is not a complete snapshot."""


def as_path(path: str | Path) -> Path:
    """Return a valid path of a file.

    Raises
    ------
    ArgumentError : the argument is not a path, or names no file.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path must be a str or a Path, not {type(path).__name__}")
    found = Path(path)
    if not found.name or "\0" in str(path):
        raise ArgumentError(f"path must name a file, not {str(path)!r}")
    return found


def open_file(path: Path) -> BinaryIO:
    """Open a new file for writing."""
    return path.open("xb")


def generations(path: Path) -> list[Path]:
    """Return the files of the generations of `path`, oldest first."""
    found = [
        (int(each.suffix[1:]), each)
        for each in path.parent.glob(f"{glob.escape(path.name)}.*")
        if each.suffix[1:].isdecimal() and each.stem == path.name and each.is_file()
    ]
    return [each for _, each in sorted(found)]


def save(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    devices: int,
    read: Callable[[int, int], NDArray[Any]],
    *,
    dtype: Literal["F32", "U8"] = "F32",
    opener: Callable[[Path], BinaryIO] = open_file,
) -> Path:
    """Write tensors to the next generation of `path`, and return its file.

    Parameters
    ----------
    shapes : of the tensors on each device, by name.
    read : returns the values of a tensor, by its number, on a device; they must not change.

    Raises
    ------
    ArgumentError : a name is reserved.
    SnapshotSaveError : the write failed, and no file was added.
    """
    if reserved := {METADATA, DIGEST} & shapes.keys():
        raise ArgumentError(f"names of tensors must not be {sorted(reserved)}, which are reserved")
    try:
        older = generations(path)
        number = 1 + (int(older[-1].suffix[1:]) if older else 0)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            with opener(partial) as file:
                digest = hashlib.sha256()
                for piece in _pieces(shapes, devices, read, dtype):
                    digest.update(piece)
                    file.write(piece)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            final = _named(partial, path, number)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        try:
            sync_folder(final.parent)
        except OSError:
            final.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SnapshotSaveError(path, error) from error
    return final


def load(path: Path) -> Arrays:
    """Load the tensors of a file, or of the newest generation of `path`.

    Raises
    ------
    TornSnapshotError : the file is damaged; the error names the newest older intact generation.
    SnapshotVersionError : the file has another version of the format.
    SnapshotError : the file cannot be read.
    """
    older: list[Path] = []
    try:
        if path.is_file() and (_begins(path) or not generations(path)):
            name = path.with_suffix("") if path.suffix[1:].isdecimal() else path
            older = generations(name)
            older = older[: older.index(path)] if path in older else []
        else:
            *older, path = generations(path) or [path]
        return _read(path)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error}") from error
    except _TornError as torn:
        raise TornSnapshotError(path, str(torn), _last_good(older)) from None


def _named(partial: Path, path: Path, number: int) -> Path:
    """Link a complete file to the first free generation from `number` on: another process may save
    at the same time."""
    while True:
        final = path.with_name(f"{path.name}.{number:0{GENERATION_DIGITS}}")
        try:
            os.link(partial, final)
        except FileExistsError:
            number += 1
        else:
            return final


def _begins(path: Path) -> bool:
    """Return whether a file begins as a snapshot does, or has the name of a generation."""
    if path.suffix[1:].isdecimal():
        return True
    with path.open("rb") as file:
        start = file.read(LENGTH.size + len(START))
    return start.startswith(OLD_MAGIC) or start.endswith(START)


def _pieces(
    shapes: Mapping[str, Sequence[int]],
    devices: int,
    read: Callable[[int, int], NDArray[Any]],
    dtype: str,
) -> Iterator[bytes]:
    """Yield the bytes of a file, but for its digest."""
    tensors = {name: (dtype, [devices, *shape]) for name, shape in shapes.items()}
    yield header({FORMAT: str(VERSION)}, {**tensors, DIGEST: ("U8", [DIGEST_BYTES])})
    for number in range(len(shapes)):
        for device in range(devices):
            yield read(number, device).tobytes()


def header(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Return what a file in the format of safetensors begins with.

    Parameters
    ----------
    tensors : dtype of `DTYPES` and shape of each tensor, in the order of their data.
    """
    listed: dict[str, Any] = {METADATA: metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + DTYPES[dtype] * math.prod(shape)
        listed[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH.size)  # so that the data is aligned
    return LENGTH.pack(len(text)) + text


def _read(path: Path) -> Arrays:
    """Read the tensors of a file.

    Raises
    ------
    SnapshotVersionError, _TornError
    """
    with path.open("rb") as file:
        start = file.read(LENGTH.size)
        if start == OLD_MAGIC:
            raise SnapshotVersionError(path, VERSION, "1")
        left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
        if left < LENGTH.size:
            raise _TornError(f"it must have a digest of {DIGEST_BYTES} bytes, and is shorter")
        file.seek(0)
        digest = hashlib.sha256()
        while left and (piece := file.read(min(left, CHUNK_BYTES))):
            digest.update(piece)
            left -= len(piece)
        expected = file.read()
    if digest.digest() != expected:
        raise _TornError(f"its SHA-256 must be {expected.hex()}, not {digest.hexdigest()}")
    try:
        with safe_open(path, framework="np") as tensors:
            version = (tensors.metadata() or {}).get(FORMAT)
            if version is None:
                raise _TornError(f"its metadata must have {FORMAT}")
            if version != str(VERSION):
                raise SnapshotVersionError(path, VERSION, version)
            names = [name for name in tensors.keys() if name != DIGEST]  # noqa: SIM118 - no dict
            arrays = {name: tensors.get_tensor(name) for name in names}
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:
        raise _TornError(f"it must be a file of safetensors: {str(error)[:200]}") from error
    if not arrays or len({each.shape[:1] for each in arrays.values()} | {()}) != 2:
        raise _TornError("it must have tensors of one number of devices")
    return arrays


def _last_good(older: Sequence[Path]) -> Path | None:
    for path in reversed(older):
        try:
            _read(path)
        except (_TornError, SnapshotVersionError, OSError):
            continue
        return path
    return None
