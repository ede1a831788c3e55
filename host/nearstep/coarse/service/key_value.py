"""What a job keeps in the memory devices: bytes under names, and snapshots of them."""

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
    """Bytes under names, on every device. A value that is written again is another version of it.

    Parameters
    ----------
    snapshots : folder of all files; None: there are none.
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
        """Bytes of each value, by name."""
        return dict(self._bytes)

    def put(self, key: str, data: NDArray[np.uint8]) -> None:
        """Keep bytes. While a snapshot is written, its version stays in copies."""
        words = _words(data.tobytes())
        tensor = self._tensors.get(key)
        if tensor is None or tensor.size != words.size:
            new = self.pool.tensor([words] * self.pool.devices, reduced=False)
            if tensor is not None:
                self._wait()
                tensor.free()
            self._tensors[key] = new
        else:
            for device in range(self.pool.devices):
                tensor.write(device, words)
        self._bytes[key] = data.size

    def parameters(self, update: Update, elements: int) -> StoredParameters:
        """The parameters of an optimizer and its states, which begin anew where none are kept.

        Raises
        ------
        ArgumentError : there are no such parameters, the devices do not have the rule, or a
            hyper-parameter is wrong.
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
        """Copy a value, from the memory of one device."""
        out[...] = self._tensors[key].read(device).view(np.uint8)[: out.size]

    def save(
        self, path: str, keys: Sequence[str], done: Callable[[Path | NearstepError], None]
    ) -> None:
        """Write the version that is here now to the next generation of `path`, in a thread.

        `done` is called there, with the file or an error. What is here goes on and may change.

        Raises
        ------
        ArgumentError : there is no such value.
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
        """Read a snapshot, that of any number of devices, in a thread.

        `done` is called there, with what `restore` takes or an error.

        Raises
        ------
        SnapshotError : it is something else than a file.
        """
        place = self._place(path)
        if place.exists() and not (place.is_file() or place.is_dir()):
            raise SnapshotError(f"{place} must be a file, and is another thing")

        def read() -> None:
            try:
                done(load(place))
            except Exception as error:
                done(error)

        threading.Thread(target=read, name="coarse snapshot", daemon=True).start()

    def restore(self, arrays: Arrays) -> None:
        """Store the values of a snapshot under their names."""
        for key, each in arrays.items():
            self.put(key, np.ascontiguousarray(each[0]).reshape(-1).view(np.uint8))

    def _place(self, path: str) -> Path:
        """A path, if it is in the folder. Raises `ArgumentError` if not."""
        if self.snapshots is None:
            raise ArgumentError(
                "the service must have a folder for snapshots, and has none: --snapshots"
            )
        place = as_path(path).resolve()
        if not place.is_relative_to(self.snapshots.resolve()):
            raise ArgumentError(f"path must be in {self.snapshots}, not {path!r}")
        return place

    def free(self) -> None:
        """Give the memory back."""
        self._wait()
        for tensor in self._tensors.values():
            tensor.free()
        self._tensors.clear()
        self._bytes.clear()

    def _wait(self) -> None:
        """One snapshot after the other."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None


def hyper_of(text: str) -> dict[str, Any]:
    """Hyper-parameters of a JSON object; none of an empty text.

    Raises
    ------
    ArgumentError : it is none.
    """
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"hyper-parameters must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"hyper-parameters must be a JSON object, not {text[:80]!r}")
    return found


def _words(data: bytes) -> NDArray[np.float32]:
    """Bytes as whole words, with zeros at the end."""
    return np.frombuffer(data + b"\0" * (-len(data) % 4 or 4 * (not data)), np.float32).copy()
