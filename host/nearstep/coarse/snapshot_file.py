"""Files of snapshots.

A file is a preamble (magic, version, length of the header), the header in JSON, the SHA-256 of
both, and for each tensor and device the elements, float32 in little-endian order, with their
SHA-256. The file ``name.000003`` is generation 3 of ``name``; it appears under this name when it is
whole and on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.errors import SnapshotError, SnapshotSaveError, TornSnapshotError
from nearstep.coarse.frozen import Frozen
from nearstep.errors import ArgumentError

MAGIC = b"NSCOARSE"
VERSION = 1
PREAMBLE = struct.Struct("<8sII")
DIGEST_BYTES = 32
GENERATION_DIGITS = 6
LONGEST_HEADER = 1 << 24

Arrays = list[list[NDArray[np.float32]]]


class _TornError(Exception):
    """Why a file is no whole snapshot."""


def as_path(path: str | Path) -> Path:
    """Of a file that can be.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path must be a str or a Path, not {type(path).__name__}")
    found = Path(path)
    if not found.name or "\0" in str(path):
        raise ArgumentError(f"path must name a file, not {str(path)!r}")
    return found


def open_file(path: Path) -> BinaryIO:
    """A new file to write."""
    return path.open("xb")


def generations(path: Path) -> list[Path]:
    """Files of the generations of ``path``, oldest first."""
    found = [
        (int(each.suffix[1:]), each)
        for each in path.parent.glob(f"{_escaped(path.name)}.*")
        if each.suffix[1:].isdecimal() and each.stem == path.name and each.is_file()
    ]
    return [each for _, each in sorted(found)]


def save(path: Path, frozen: Frozen, opener: Callable[[Path], BinaryIO]) -> Path:
    """Write a snapshot to the next generation of ``path``.

    Raises
    ------
    SnapshotSaveError
        There is no new file then.
    SnapshotError, ClosedDeviceError
        From reading the devices; there is no new file then.
    """
    try:
        older = generations(path)
        number = 1 + (int(older[-1].suffix[1:]) if older else 0)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            with opener(partial) as file:
                for piece in _pieces(frozen):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            final = _named(partial, path, number)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        _sync_folder(final.parent)
    except OSError as error:
        raise SnapshotSaveError(path, error) from error
    return final


def load(path: Path, devices: int, shapes: Sequence[tuple[int, ...]] | None) -> Arrays:
    """Values of each tensor on each device, from a file or the newest generation of ``path``.

    Parameters
    ----------
    path: Path
    devices: int
        It must be of so many.
    shapes: Sequence[tuple[int, ...]] | None
        And of tensors like these, if given.

    Raises
    ------
    TornSnapshotError
        Names the newest older generation that is whole.
    SnapshotError
    """
    if path.is_file() and (_begins(path) or not generations(path)):
        name = path.with_suffix("") if path.suffix[1:].isdecimal() else path
        older = generations(name)
        older = older[: older.index(path)] if path in older else []
    else:
        *older, path = generations(path) or [path]
    try:
        header, arrays = _read(path)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error}") from error
    except _TornError as torn:
        raise TornSnapshotError(path, str(torn), _last_good(older)) from None
    if header["devices"] != devices:
        raise SnapshotError(f"{path} must be of {devices} devices, not {header['devices']}")
    saved = [tuple(each["shape"]) for each in header["tensors"]]
    if shapes is not None and saved != list(shapes):
        raise SnapshotError(f"{path} must be of tensors of shapes {list(shapes)}, not {saved}")
    return arrays


def _named(partial: Path, path: Path, number: int) -> Path:
    """The whole file under the first name that is free, from generation ``number`` on: another
    process may save at the same time."""
    while True:
        final = path.with_name(f"{path.name}.{number:0{GENERATION_DIGITS}}")
        try:
            os.link(partial, final)
        except FileExistsError:
            number += 1
        else:
            return final


def _begins(path: Path) -> bool:
    """Whether a file begins as a snapshot does, or is one of the generations of a name."""
    if path.suffix[1:].isdecimal():
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _pieces(frozen: Frozen) -> Iterator[bytes]:
    header = {
        "devices": frozen.devices,
        "dtype": "<f4",
        "digest": "sha256",
        "tensors": [{"shape": list(shape)} for shape in frozen.shapes],
    }
    text = json.dumps(header, sort_keys=True).encode()
    head = PREAMBLE.pack(MAGIC, VERSION, len(text)) + text
    yield head + hashlib.sha256(head).digest()
    for tensor in range(len(frozen.shapes)):
        for device in range(frozen.devices):
            part = frozen.read(tensor, device).astype("<f4", copy=False).tobytes()
            yield part
            yield hashlib.sha256(part).digest()


def _read(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Header and arrays of a whole file.

    Raises
    ------
    _TornError, OSError
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
        header: dict[str, Any] = json.loads(text)
        arrays: Arrays = []
        for number, tensor in enumerate(header["tensors"]):
            shape = tuple(tensor["shape"])
            arrays.append([])
            for device in range(header["devices"]):
                what = f"tensor {number} of device {device}"
                part = _take(file, 4 * math.prod(shape), what)
                _check_digest(file, part, what)
                values = np.frombuffer(part, "<f4").astype(np.float32, copy=False)
                arrays[-1].append(values.reshape(shape))
        if file.read(1):
            raise _TornError("there is something behind its end")
    return header, arrays


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


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _escaped(name: str) -> str:
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)
