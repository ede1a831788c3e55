"""Snapshots of tensors that the memory devices keep."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep.torch.distributed.tensors import bytes_of

INDEX = "tensors"
"""Name of what says names, dtypes and shapes of the tensors of a snapshot, in JSON."""


def save_snapshot(group: CoarseProcessGroup, path: str, tensors: Mapping[str, Tensor]) -> str:
    """Keep tensors of rank 0 in the devices, and write them to a file; all ranks call it.

    Parameters
    ----------
    group
    path : the file is this and the number of its generation, on the service's machine.
    tensors : by name; of rank 0. Those of others are not looked at.

    Returns
    -------
    str : path of the file, at rank 0.

    Raises
    ------
    RefusedError : `kind` says why, at rank 0; the others wait at the barrier behind it.
    JobError : the job has ended.

    Ref: COARSE paper, section IV-A.
    """
    client, name = group.client, ""
    group.barrier().wait()
    if client.rank == 0:
        kinds = {
            key: [str(each.dtype).removeprefix("torch."), list(each.shape)]
            for key, each in tensors.items()
        }
        client.keep(INDEX, np.frombuffer(json.dumps(kinds).encode(), np.uint8))
        for key, each in tensors.items():
            client.keep(f"tensor/{key}", bytes_of(each.detach().contiguous()))
        name = client.save(path, [INDEX, *(f"tensor/{key}" for key in tensors)])
    group.barrier().wait()
    return name


def restore_snapshot(group: CoarseProcessGroup, path: str) -> dict[str, Tensor]:
    """Tensors of a snapshot, at all ranks, of any number; all ranks call it.

    Parameters
    ----------
    group
    path : of a file, or as it was given to `save_snapshot`: then the newest generation.

    Raises
    ------
    RefusedError : the file is torn or not there, as `kind` says; at rank 0.
    JobError : the job has ended.
    """
    client = group.client
    room = torch.zeros(1, dtype=torch.int64)
    if client.rank == 0:
        room[0] = client.load(path)[INDEX]
    parts = [torch.zeros_like(room) for _ in range(client.clients)]
    group.allgather([parts], [room]).wait()
    said = np.empty(int(parts[0]), np.uint8)
    client.get(INDEX, said)
    found = {}
    for key, (dtype, shape) in json.loads(said.tobytes()).items():
        found[key] = torch.empty(shape, dtype=getattr(torch, dtype))
        client.get(f"tensor/{key}", bytes_of(found[key]))
    group.barrier().wait()
    return found
