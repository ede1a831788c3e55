"""Snapshots of tensors that the memory devices keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nearstep.coarse.service.client import Client
from nearstep.coarse.service.errors import RefusedError
from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep.torch.distributed.tensors import bytes_of

INDEX = "tensors"
"""Name of what says names, dtypes and shapes of the tensors of a snapshot, in JSON."""

OUTCOME = "outcome of client 0"
OUTCOME_BYTES = 1024


def save_snapshot(group: CoarseProcessGroup, path: str, tensors: Mapping[str, Tensor]) -> str:
    """Keep tensors of rank 0 in the devices, and write them to a file; all ranks call it.

    Parameters
    ----------
    path : the file is this and the number of its generation, on the service's machine.
    tensors : by name; of rank 0. Those of others are not looked at.

    Returns
    -------
    str : path of the file, at rank 0.

    Raises
    ------
    RefusedError : `kind` says why, at all ranks; the job goes on.
    JobError : the job has ended.

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

    group.carry_out("save a snapshot", partial(first_does, client, save))
    return names[0]


def restore_snapshot(group: CoarseProcessGroup, path: str) -> dict[str, Tensor]:
    """Tensors of a snapshot, at all ranks, of any number; all ranks call it.

    Parameters
    ----------
    path : of a file, or as it was given to `save_snapshot`: then the newest generation.

    Raises
    ------
    RefusedError : the file is torn or not there, as `kind` says; at all ranks.
    JobError : the job has ended.
    """
    client = group.client
    room = torch.zeros(1, dtype=torch.int64)

    def load() -> None:
        found = client.load(path)
        if INDEX not in found:
            names = ", ".join(found)
            raise RefusedError("SnapshotError", f"{path} must have {INDEX!r}, not {names}")
        room[0] = found[INDEX]

    group.carry_out("load a snapshot", partial(first_does, client, load))
    parts = [torch.zeros_like(room) for _ in range(client.clients)]
    group.allgather([parts], [room]).wait()
    said = np.empty(int(parts[0]), np.uint8)
    found: dict[str, Tensor] = {}

    def read() -> None:
        client.get(INDEX, said)
        for key, (dtype, shape) in json.loads(said.tobytes()).items():
            with torch.inference_mode(False):
                found[key] = torch.empty(shape, dtype=getattr(torch, dtype))
            client.get(f"tensor/{key}", bytes_of(found[key]))

    group.carry_out("read a snapshot", read)
    group.barrier().wait()
    return found


def first_does(client: Client, action: Callable[[], None]) -> None:
    """Have client 0 do something when all have come here, while the others wait for its outcome.

    Raises
    ------
    RefusedError : `action` was refused; all clients raise it, and none waits.
    JobError
    """
    client.barrier()
    said = np.zeros(OUTCOME_BYTES, np.uint8)
    if client.rank:
        client.get(OUTCOME, said)
        if (text := said.tobytes().rstrip(b"\0").decode(errors="replace")) != "":
            kind, _, detail = text.partition(": ")
            raise RefusedError(kind, detail)
        return
    try:
        action()
    except RefusedError as error:
        told = str(error).encode()[:OUTCOME_BYTES]
        said[: len(told)] = np.frombuffer(told, np.uint8)
        raise
    finally:
        if client.clients > 1:
            client.put(OUTCOME, said, readers=client.clients - 1)
