"""Named values of a job in the memory devices, and snapshots of them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.service.messages import Update
from nearstep.coarse.stored import PARAMETERS, StoredParameters, initial_values
from nearstep.coarse.tensor import PoolTensor
from nearstep.errors import ArgumentError, NearstepError
from nearstep.storage.errors import SnapshotError
from nearstep.storage.snapshot_file import Arrays, as_path, load, save


class KeyValueStore:
    """Named values of bytes, on every device.

    Parameters
    ----------
    snapshots : folder of all files; None: nothing can be saved or loaded.
    """

    def __init__(self, pool: CoarsePool, snapshots: Path | None) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self._tensors: dict[str, PoolTensor] = {}
        self._bytes: dict[str, int] = {}
        self._saving: threading.Thread | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of bytes of each value, by name."""
        return dict(self._bytes)

    def put(self, key: str, data: NDArray[np.uint8]) -> None:
        """Store a value. A snapshot that is being written keeps the old value in copies."""
        self._replace({key: data})

    def restore(self, arrays: Arrays) -> None:
        """Store all values of a snapshot under their names, or none after an error."""
        self._replace({key: np.ascontiguousarray(each[0]) for key, each in arrays.items()})

    def _replace(self, values: Mapping[str, NDArray[Any]]) -> None:
        words = {key: _words(each.tobytes()) for key, each in values.items()}
        other = [
            k for k, each in words.items() if k not in self or self._tensors[k].size != each.size
        ]
        arrays = ([words[key]] * self.pool.devices for key in other)
        # Allocate first: an error changes no value.
        new = dict(zip(other, self.pool.tensors(arrays, reduced=False), strict=True))
        for key, each in words.items():
            for device in range(self.pool.devices) if key not in new else ():
                self._tensors[key].write(device, each)
        if replaced := [self._tensors[key] for key in new if key in self]:
            self._wait()
            for tensor in replaced:
                tensor.free()
        self._tensors |= new
        self._bytes |= {key: each.nbytes for key, each in values.items()}

    def parameters(self, update: Update, elements: int) -> StoredParameters:
        """Return the parameters and states of an optimizer; states that are missing are created.

        Raises
        ------
        ArgumentError : the parameters are not stored, or a value has another size.
        """
        device, hyper = self.pool.device, hyper_of(update.hyper)
        optimizer = device.optimizer(update.optimizer)
        names = initial_values(device, optimizer, hyper)
        place = f"{update.key}/{PARAMETERS}"
        if place not in self:
            raise ArgumentError(f"parameters must be kept as {place!r} before they are updated")
        for name, initial in names.items():
            key = f"{update.key}/{name}"
            if key not in self:
                self.put(key, np.full(elements, initial, np.float32).view(np.uint8))
            if self._bytes[key] != 4 * elements:
                raise ArgumentError(f"{key!r} has {self._bytes[key]} bytes, not {4 * elements}")
        tensors = {name: self._tensors[f"{update.key}/{name}"] for name in names}
        return StoredParameters(self.pool, optimizer, tensors, hyper)

    def read(self, key: str, device: int, out: NDArray[np.uint8]) -> None:
        """Copy a value from the memory of a device."""
        out[...] = self._tensors[key].read(device).view(np.uint8)[: out.size]

    def save(
        self, path: str, keys: Sequence[str], done: Callable[[Path | NearstepError], None]
    ) -> None:
        """Write the current values to the next generation of `path`, in a thread.

        The thread calls `done` with the file or an error. The values may change meanwhile.

        Raises
        ------
        ArgumentError : a value is not stored.
        """
        missing = [key for key in keys if key not in self._tensors]
        if missing or not keys:
            raise ArgumentError(f"keys must be of {sorted(self._tensors)}, not {list(keys)}")
        self._wait()
        place = self._place(path)
        sizes = {key: self._bytes[key] for key in keys}
        shapes = {key: (size,) for key, size in sizes.items()}
        open_files = contextlib.ExitStack()
        tensors = [self._tensors[key] for key in sizes]
        frozen = open_files.enter_context(self.pool.freeze(tensors))
        limits = [*sizes.values()]

        def read(number: int, device: int) -> NDArray[np.uint8]:
            return frozen.read(number, device).view(np.uint8)[: limits[number]]

        def write() -> None:
            found: Path | NearstepError
            try:
                with open_files:
                    found = save(place, shapes, frozen.devices, read, dtype="U8")
            except NearstepError as error:
                found = error
            done(found)

        self._saving = threading.Thread(target=write, name="coarse snapshot")
        self._saving.start()

    def load(self, path: str, done: Callable[[Arrays | Exception], None]) -> None:
        """Read a snapshot of any number of devices, in a thread.

        The thread calls `done` with the argument of `restore` or an error.

        Raises
        ------
        SnapshotError : the path names no file.
        """
        place = self._place(path)
        if place.exists() and not (place.is_file() or place.is_dir()):
            raise SnapshotError(f"{place} must be a regular file or a folder")

        def read() -> None:
            try:
                done(load(place))
            except Exception as error:
                done(error)

        threading.Thread(target=read, name="coarse snapshot", daemon=True).start()

    def _place(self, path: str) -> Path:
        """Return a path below the folder. Raise `ArgumentError` for another one."""
        if self.snapshots is None:
            raise ArgumentError(
                "the service must have a folder for snapshots, and has none: --snapshots"
            )
        place = as_path(path).resolve()
        if not place.parent.is_relative_to(self.snapshots.resolve()):
            raise ArgumentError(f"path must be in {self.snapshots}, not {path!r}")
        return place

    def free(self) -> None:
        """Free the memory."""
        self._wait()
        for tensor in self._tensors.values():
            tensor.free()
        self._tensors.clear()
        self._bytes.clear()

    def _wait(self) -> None:
        """Wait for the snapshot that is being written."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None


def hyper_of(text: str) -> dict[str, Any]:
    """Return the hyper-parameters of a JSON object; none of an empty text.

    Raises
    ------
    ArgumentError : the text is no JSON object.
    """
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"hyper-parameters must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"hyper-parameters must be a JSON object, not {text[:80]!r}")
    return found


def _words(data: bytes) -> NDArray[np.float32]:
    """Return bytes as whole words, padded with zeros."""
    return np.frombuffer(data + b"\0" * (-len(data) % 4 or 4 * (not data)), np.float32).copy()
