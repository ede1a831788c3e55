"""Snapshot files.

A file is a preamble (magic, version, length of the header), the header in JSON, the SHA-256 of
both, and for each tensor and device the elements, little-endian float32, with their SHA-256. The
file `name.000003` is generation 3 of `name`; the file is renamed to this once all data has been
flushed.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole
from nearstep.storage.blocks import sync_folder
from nearstep.storage.errors import SnapshotError, SnapshotSaveError, TornSnapshotError

MAGIC = b"NSCOARSE"
VERSION = 1
PREAMBLE = struct.Struct("<8sII")
DIGEST_BYTES = 32
GENERATION_DIGITS = 6
LONGEST_HEADER = 1 << 24

FIXED = {"dtype": "<f4", "digest": "sha256"}
"""Header fields with a fixed value."""

FLOAT_BYTES = 4
DIMENSIONS = 32
"""Most dimensions of a tensor, numpy 1's limit."""

LONGEST = (1 << 63) - 1
"""Most bytes of an array."""

Arrays = list[list[NDArray[np.float32]]]
"""The values of each tensor on each device."""


class Snapshot(Protocol):
    """Values of tensors on devices, which do not change during a save."""

    @property
    def devices(self) -> int: ...

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Shapes of the float32 tensors."""
        ...

    def read(self, tensor: int, device: int) -> NDArray[np.float32]:
        """Read the values of tensor number `tensor` on a device."""
        ...


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


def save(path: Path, snapshot: Snapshot, opener: Callable[[Path], BinaryIO] = open_file) -> Path:
    """Write a snapshot to the next generation of `path`, and return its file.

    Raises
    ------
    SnapshotSaveError : the write failed, and no file was added.
    """
    try:
        older = generations(path)
        number = 1 + (int(older[-1].suffix[1:]) if older else 0)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            with opener(partial) as file:
                for piece in _pieces(snapshot):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            final = _named(partial, path, number)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        sync_folder(final.parent)
    except OSError as error:
        raise SnapshotSaveError(path, error) from error
    return final


def load(path: Path, devices: int | None, shapes: Sequence[tuple[int, ...]] | None) -> Arrays:
    """Load the values of each tensor on each device from a file or its newest generation.

    Parameters
    ----------
    devices : expected number, if not None.
    shapes : expected shapes of the tensors, if not None.

    Raises
    ------
    TornSnapshotError : the file is damaged; the error names the newest older intact generation.
    SnapshotError
    """
    if path.is_file() and (_begins(path) or not generations(path)):
        name = path.with_suffix("") if path.suffix[1:].isdecimal() else path
        older = generations(name)
        older = older[: older.index(path)] if path in older else []
    else:
        *older, path = generations(path) or [path]
    try:
        found, saved, arrays = _read(path)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error}") from error
    except _TornError as torn:
        raise TornSnapshotError(path, str(torn), _last_good(older)) from None
    if devices is not None and found != devices:
        raise SnapshotError(f"{path} must be of {devices} devices, not {found}")
    if shapes is not None and saved != list(shapes):
        raise SnapshotError(f"{path} must be of tensors of shapes {list(shapes)}, not {saved}")
    return arrays


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
        return file.read(len(MAGIC)) == MAGIC


def _pieces(snapshot: Snapshot) -> Iterator[bytes]:
    described = _described(snapshot.devices, snapshot.shapes)
    text = json.dumps(described, sort_keys=True).encode()
    head = PREAMBLE.pack(MAGIC, VERSION, len(text)) + text
    yield head + hashlib.sha256(head).digest()
    for tensor in range(len(snapshot.shapes)):
        for device in range(snapshot.devices):
            part = snapshot.read(tensor, device).astype("<f4", copy=False).tobytes()
            yield part
            yield hashlib.sha256(part).digest()


def _read(path: Path) -> tuple[int, list[tuple[int, ...]], Arrays]:
    """Read the number of devices, the shapes and the arrays of a file.

    Raises
    ------
    _TornError : the file is damaged.
    """
    with path.open("rb") as file:
        preamble = _take(file, PREAMBLE.size, "preamble")
        magic, version, length = PREAMBLE.unpack(preamble)
        if magic != MAGIC:
            raise _TornError(f"it must begin with {MAGIC!r}, not {magic!r}")
        if version != VERSION:
            raise _TornError(f"its version must be {VERSION}, not {version}")
        if length > LONGEST_HEADER:
            raise _TornError(f"its header must be below {LONGEST_HEADER} bytes, not {length}")
        text = _take(file, length, "header")
        _check_digest(file, preamble + text, "header")
        devices, shapes = _header(text)
        sizes = [FLOAT_BYTES * math.prod(shape) for shape in shapes]
        needed = file.tell() + devices * sum(size + DIGEST_BYTES for size in sizes)
        found = os.fstat(file.fileno()).st_size
        if found != needed:  # before the allocation of sizes that only the header claims
            behind = "there is something behind its end: " if found > needed else ""
            raise _TornError(f"{behind}it must have {needed} bytes, not {found}")
        arrays: Arrays = []
        for number, shape in enumerate(shapes):
            arrays.append([])
            for device in range(devices):
                what = f"tensor {number} of device {device}"
                part = _take(file, sizes[number], what)
                _check_digest(file, part, what)
                values = np.frombuffer(part, "<f4").astype(np.float32, copy=False)
                arrays[-1].append(values.reshape(shape))
    return devices, shapes, arrays


def _header(text: bytes) -> tuple[int, list[tuple[int, ...]]]:
    """Return the number of devices and the shapes in a header.

    Raises
    ------
    _TornError : the header is malformed.
    """
    try:
        found = json.loads(text)
        devices, shapes = found["devices"], [tuple(each["shape"]) for each in found["tensors"]]
        good = found == _described(devices, shapes) and all(map(_is_shape, [(devices,), *shapes]))
    except (ValueError, TypeError, KeyError, RecursionError):
        good = False
    if not good or devices < 1:
        expected = "JSON of devices, from 1, and tensors with a shape each"
        raise _TornError(f"its header must be {expected}, with {FIXED}, not {text[:100]!r}")
    return devices, shapes


def _described(devices: int, shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of a header."""
    return {"devices": devices, **FIXED, "tensors": [{"shape": list(each)} for each in shapes]}


def _is_shape(shape: tuple[Any, ...]) -> bool:
    """Return whether numpy supports an array of this shape."""
    return (
        len(shape) <= DIMENSIONS
        and all(is_whole(dim) and 0 <= dim <= LONGEST for dim in shape)
        and FLOAT_BYTES * math.prod(max(1, dim) for dim in shape) <= LONGEST
    )


def _take(file: BinaryIO, nbytes: int, what: str) -> bytes:
    data = file.read(nbytes)
    if len(data) != nbytes:
        raise _TornError(f"{what} must have {nbytes} bytes, not {len(data)}")
    return data


def _check_digest(file: BinaryIO, data: bytes, what: str) -> None:
    expected = _take(file, DIGEST_BYTES, f"SHA-256 of the {what}")
    actual = hashlib.sha256(data).digest()
    if actual != expected:
        raise _TornError(f"SHA-256 of the {what} must be {expected.hex()}, not {actual.hex()}")


def _last_good(older: Sequence[Path]) -> Path | None:
    for path in reversed(older):
        try:
            _read(path)
        except (_TornError, OSError):
            continue
        return path
    return None
