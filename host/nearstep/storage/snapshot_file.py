"""Files of snapshots.

A file is a preamble (magic, version, length of the header), the header in JSON, the SHA-256 of
both, and for each tensor and device the elements, float32 in little-endian order, with their
SHA-256. The file `name.000003` is generation 3 of `name`; it gets this name when it is whole and on
the disk.
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
"""Fields with one value in every header."""

FLOAT_BYTES = 4
DIMENSIONS = 32
"""Most dimensions of a tensor: numpy 1 has no more."""

LONGEST = (1 << 63) - 1
"""Most bytes of an array."""

Arrays = list[list[NDArray[np.float32]]]
"""For each tensor, its values on each device."""


class Snapshot(Protocol):
    """Values of tensors on devices, which do not change while they are saved."""

    @property
    def devices(self) -> int: ...

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Shapes of the tensors, each of which is float32."""
        ...

    def read(self, tensor: int, device: int) -> NDArray[np.float32]:
        """Read the values of a tensor, by its number, on a device."""
        ...


class _TornError(Exception):
    """Reason why a file is no whole snapshot."""


def as_path(path: str | Path) -> Path:
    """Check the path of a file.

    Raises
    ------
    ArgumentError : it is no path, or names no file.
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
    """Files of the generations of `path`, oldest first."""
    found = [
        (int(each.suffix[1:]), each)
        for each in path.parent.glob(f"{glob.escape(path.name)}.*")
        if each.suffix[1:].isdecimal() and each.stem == path.name and each.is_file()
    ]
    return [each for _, each in sorted(found)]


def save(path: Path, snapshot: Snapshot, opener: Callable[[Path], BinaryIO] = open_file) -> Path:
    """Write a snapshot to the next generation of `path`, and return that.

    Raises
    ------
    SnapshotSaveError : no file was added, as after an error of the snapshot.
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
    """Load the values of each tensor on each device from a file, or the newest generation of it.

    Parameters
    ----------
    devices : expected number, if given.
    shapes : expected shapes of the tensors, if given.

    Raises
    ------
    TornSnapshotError : the error names the newest older generation that is whole.
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
    """Name a whole file by the first free generation from `number` on: another process may save at
    the same time."""
    while True:
        final = path.with_name(f"{path.name}.{number:0{GENERATION_DIGITS}}")
        try:
            os.link(partial, final)
        except FileExistsError:
            number += 1
        else:
            return final


def _begins(path: Path) -> bool:
    """Whether a file begins as a snapshot does, or has the name of a generation."""
    if path.suffix[1:].isdecimal():
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _pieces(snapshot: Snapshot) -> Iterator[bytes]:
    header = {
        "devices": snapshot.devices,
        **FIXED,
        "tensors": [{"shape": list(shape)} for shape in snapshot.shapes],
    }
    text = json.dumps(header, sort_keys=True).encode()
    head = PREAMBLE.pack(MAGIC, VERSION, len(text)) + text
    yield head + hashlib.sha256(head).digest()
    for tensor in range(len(snapshot.shapes)):
        for device in range(snapshot.devices):
            part = snapshot.read(tensor, device).astype("<f4", copy=False).tobytes()
            yield part
            yield hashlib.sha256(part).digest()


def _read(path: Path) -> tuple[int, list[tuple[int, ...]], Arrays]:
    """Read devices, shapes and arrays of a file.

    Raises
    ------
    _TornError : it is not whole.
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
        if found != needed:  # before memory is allocated for sizes of the header alone
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
    """Devices and shapes of a header.

    Raises
    ------
    _TornError : the header is malformed, whoever wrote it.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _TornError(f"its header must be JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict) or found.keys() != {"devices", "tensors", *FIXED}:
        names = ", ".join(sorted({"devices", "tensors", *FIXED}))
        raise _TornError(f"its header must have {names}")
    for name, value in FIXED.items():
        if found[name] != value:
            raise _TornError(f"its {name} must be {value!r}, not {_short(found[name])}")
    devices, tensors = found["devices"], found["tensors"]
    if not is_whole(devices) or devices < 1:
        raise _TornError(f"its devices must be a number of at least 1, not {_short(devices)}")
    if not isinstance(tensors, list):
        raise _TornError(f"its tensors must be a list, not {_short(tensors)}")
    for each in tensors:
        if not isinstance(each, dict) or each.keys() != {"shape"} or not _is_shape(each["shape"]):
            raise _TornError(f"its tensors must have a shape each, not {_short(each)}")
    return devices, [tuple(each["shape"]) for each in tensors]


def _is_shape(value: Any) -> bool:
    """Whether numpy can have an array of this shape."""
    if not isinstance(value, list) or len(value) > DIMENSIONS:
        return False
    if not all(is_whole(dim) and 0 <= dim <= LONGEST for dim in value):
        return False
    nbytes: int = FLOAT_BYTES * math.prod(max(1, dim) for dim in value)
    return nbytes <= LONGEST


def _short(value: Any) -> str:
    """A value of a header, cut for a message."""
    text = f"{value:#x}" if is_whole(value) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


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
