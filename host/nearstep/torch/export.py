"""Generations on drives as files of safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor

from nearstep.storage.blocks import sync_folder
from nearstep.storage.errors import SnapshotSaveError
from nearstep.storage.snapshot_file import header
from nearstep.torch.checkpoint import Array, GenerationReader
from nearstep.torch.state import MASTER

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
"""Files of a checkpoint."""

NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Of dtypes, in these files."""

PIECE_BYTES = 8 << 20
"""That are in memory at once: whole extents, which are read to check their CRCs."""


def export_safetensors(
    drives: Sequence[Sequence[str | Path] | str | Path],
    folder: str | Path,
    *,
    name: str = "",
    names: Sequence[str] | None = None,
) -> list[Path]:
    """Write a generation of all ranks to files of safetensors, `PIECE_BYTES` at a time.

    `model.safetensors` has the parameters, whole, by their names; `optimizer.safetensors` has the
    state of each as `state.NAME.exp_avg`, with `state.NAME.step`, and the options of the groups as
    JSON, `param_groups` of its metadata. State in 8 bits is written in float32. Both get their
    names when both are complete and flushed, in place of older ones.

    Parameters
    ----------
    drives, name, names : as of `nearstep.torch.checkpoint.GenerationReader`.

    Returns
    -------
    list[Path] : the files.

    Raises
    ------
    ResumeError, StorageError : as of the reader.
    SnapshotSaveError : a file cannot be written; older ones are as they were.
    """
    reader, place = GenerationReader(drives, name=name, names=names), Path(folder)
    reader.read_metadata()
    with ExitStack() as ends:
        ends.callback(reader.close)
        arrays = {k: each for k, each in reader.arrays.items() if not _is_repeated(k, each)}
        tensors = arrays | {k: v for k, v in reader.values.items() if isinstance(v, Tensor)}
        groups = {"param_groups": json.dumps(reader.groups)}
        files = []
        for file, prefix, more in ((MODEL, "model.", {}), (OPTIMIZER, "optim.", groups)):
            own = {
                key.removeprefix(prefix): value
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            partial = place / f".{file}.partial"
            ends.callback(_remove, partial)
            try:
                place.mkdir(parents=True, exist_ok=True)
                _write(partial, own, {"format": "pt", **more})
            except OSError as error:
                raise SnapshotSaveError(place / file, error) from error
            files.append((partial, place / file))
        try:
            for partial, final in files:
                os.replace(partial, final)
            sync_folder(place)
        except OSError as error:
            raise SnapshotSaveError(place, error) from error
    return [final for _, final in files]


def _is_repeated(key: str, array: Array) -> bool:
    """Return whether other tensors have the values of an array: scales, and masters, which are the
    parameters of the model."""
    return array.is_scales or (key.startswith("optim.") and key.endswith(f".{MASTER}"))


def _write(path: Path, tensors: Mapping[str, Array | Tensor], metadata: Mapping[str, str]) -> None:
    with path.open("wb") as file:
        dtypes = {k: v.dtype if isinstance(v, Tensor) else v.wide for k, v in tensors.items()}
        listed = {key: (NAMES[dtypes[key]], list(each.shape)) for key, each in tensors.items()}
        file.write(header(metadata, listed))
        for each in tensors.values():
            for piece in [each] if isinstance(each, Tensor) else each.rows(PIECE_BYTES):
                if piece.numel():
                    file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
