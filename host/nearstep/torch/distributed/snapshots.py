"""Snapshots of tensors through the memory devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions

from nearstep.coarse.service.errors import JobError, RefusedError
from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep.torch.distributed.tensors import bytes_of

INDEX = "tensors"
"""Name of the value with names, dtypes and shapes of a snapshot's tensors, in JSON."""

OUTCOME_BYTES = 1024
"""Size of what rank 0 tells others: 1 after a failure, and its type and text."""


def save_snapshot(group: CoarseProcessGroup, path: str, tensors: Mapping[str, Tensor]) -> str:
    """Store tensors of rank 0 in the devices, and write them to a file; all ranks call it.

    Parameters
    ----------
    path : on the service's machine; the number of the generation follows it.
    tensors : of rank 0, by name; those of other ranks are ignored.

    Returns
    -------
    str : path of the file at rank 0; empty at other ranks.

    Ref: COARSE paper, section IV-A.
    """
    client, names = group.client, [""]

    def save() -> None:
        kinds = {
            key: [str(each.dtype).removeprefix("torch."), list(each.shape)]
            for key, each in tensors.items()
        }
        client.keep(INDEX, np.frombuffer(json.dumps(kinds).encode(), np.uint8))
        for key, each in tensors.items():
            client.keep(f"tensor/{key}", bytes_of(each.detach().contiguous()))
        names[0] = client.save(path, [INDEX, *(f"tensor/{key}" for key in tensors)])

    group.carry_out("save a snapshot", partial(first_does, group, save))
    return names[0]


def restore_snapshot(group: CoarseProcessGroup, path: str) -> dict[str, Tensor]:
    """Return the tensors of a snapshot at all ranks, of any number; all ranks call it.

    Parameters
    ----------
    path : a file, or the argument of `save_snapshot`: then the newest generation.

    Raises
    ------
    RefusedError : at all ranks; `kind` is the error of the file, such as `TornSnapshotError`.
    """
    client = group.client
    room = torch.zeros(1, dtype=torch.int64, device="cpu")

    def load() -> None:
        found = client.load(path)
        if INDEX not in found:
            names = ", ".join(found)
            raise RefusedError("SnapshotError", f"{path} must have {INDEX!r}, not {names}")
        room[0] = found[INDEX]

    group.carry_out("load a snapshot", partial(first_does, group, load))
    group.broadcast(room, 0).wait()
    said = np.empty(int(room), np.uint8)
    found: dict[str, Tensor] = {}

    def read() -> None:
        client.get(INDEX, said)
        for key, (dtype, shape) in json.loads(said.tobytes()).items():
            with torch.inference_mode(False):
                found[key] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            client.get(f"tensor/{key}", bytes_of(found[key]))

    group.carry_out("read a snapshot", read)
    group.barrier().wait()
    return found


def first_does(group: CoarseProcessGroup, action: Callable[[], None]) -> None:
    """Run an action at rank 0 after a barrier; the other ranks wait for its outcome.

    Raises
    ------
    Exception : of the action, at rank 0; a `RefusedError` of its type and text at the others.
    """
    group.client.barrier()
    failure: Exception | None = None
    said = torch.zeros(OUTCOME_BYTES, dtype=torch.uint8, device="cpu")
    if group.client.rank == 0:
        try:
            action()
        except JobError:  # it ends the group
            raise
        except Exception as error:
            failure = error
            kind = "" if isinstance(error, RefusedError) else f"{type(error).__name__}: "
            data = f"\1{kind}{error}".encode(errors="replace")[:OUTCOME_BYTES]
            said[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group.gloo.wait([group.gloo.group.broadcast([said], BroadcastOptions())])
    if failure is not None:
        raise failure
    if said[0]:
        text = bytes_of(said[1:]).tobytes().rstrip(b"\0").decode(errors="replace")
        kind, _, detail = text.partition(": ")
        raise RefusedError(kind, detail)
