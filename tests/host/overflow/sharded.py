"""Programs of ranks that share parameters, each with drives of its own; each counts its checks."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from typer.testing import CliRunner

import nearstep
from nearstep.blockwise import dequantize as dequantized
from nearstep.blockwise import quantize
from nearstep.cli import storage as commands
from nearstep.storage.blocks import BlockFile
from nearstep.storage.drive_errors import (
    DriveFullError,
    DriveIOError,
    DriveVanishedError,
    NotADriveError,
    StorageError,
)
from nearstep.storage.errors import SnapshotSaveError
from nearstep.storage.store import Store
from nearstep.torch import export
from nearstep.torch.checkpoint import (
    Array,
    GenerationReader,
    GenerationWriter,
    load_generation,
)
from nearstep.torch.dtensor import local
from nearstep.torch.errors import StateError, UnsupportedOptionError
from nearstep.torch.export import export_safetensors
from nearstep.torch.formats import Quantized, dequantize
from nearstep.torch.homes.errors import (
    RanksDifferError,
    RanksDisagreeError,
    RanksFailedError,
    ResumeError,
    SharedDriveError,
)
from nearstep.torch.homes.opening import describe
from nearstep.torch.homes.ranks import Ranks
from nearstep_sim.models.drive import Event

from .jobs import Drives, bits, images

SEED = 11
GOLDEN = "golden:axdimm?memory_bytes=1MiB"
CARD = "golden:smartssd?memory_bytes=1MiB"
ON_CARDS = "cards=2&chunk_bytes=1024&subgroup_elements=256"
MEMORY = "8KiB"
"""Of `host:`, for one of the large parameters, and not for two."""


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(SEED)
    layers = nn.Linear(16, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 1), nn.Linear(1, 32)
    return nn.Sequential(*layers).to(dtype)


def fully(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Shards of FSDP2; some ranks have none of the row of the fourth layer."""
    made = model(dtype)
    fully_shard(made[0], mesh=mesh)
    return fully_shard(made, mesh=mesh)


def tensor_parallel(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    plan = {"0": ColwiseParallel(output_layouts=Shard(0)), "1": SequenceParallel(sequence_dim=0)}
    made = nn.Sequential(nn.Linear(16, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 32))
    torch.manual_seed(SEED)
    for each in made.parameters():
        nn.init.normal_(each)
    plan["3"] = RowwiseParallel(input_layouts=Shard(0))
    return parallelize_module(made.to(dtype), mesh, plan)


HOMES = (
    ("fsdp", torch.float32, None),
    ("fsdp", torch.uint8, None),
    ("fsdp", torch.bfloat16, None),
    ("tp", torch.float32, None),
    ("tp", torch.bfloat16, None),
    ("tp", torch.uint8, None),
    ("fsdp", torch.float32, GOLDEN),
    ("fsdp", torch.uint8, f"{GOLDEN}&state_format=dynamic8"),
    ("fsdp", torch.float32, CARD),
    ("fsdp", torch.bfloat16, CARD),
    ("fsdp", torch.uint8, f"{CARD}&state_format=dynamic8"),
    ("fsdp", torch.bfloat16, GOLDEN),
    ("tp", torch.bfloat16, GOLDEN),
    ("tp", torch.uint8, f"{GOLDEN}&state_format=dynamic8"),
    ("tp", torch.float32, CARD),
    ("tp", torch.uint8, f"{CARD}&state_format=dynamic8"),
)
"""How parameters are sharded, their dtype, or that of the state of others in fp32, and the
device."""

HOW: dict[str, Callable[..., nn.Sequential]] = {"fsdp": fully, "tp": tensor_parallel}


def train(made: nn.Sequential, optimizer: Any, steps: Sequence[int], how: str = "fsdp") -> None:
    rank, dtype = dist.get_rank(), next(made.parameters()).dtype
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        made(x[rank * 2 : rank * 2 + 2] if how == "fsdp" else x).square().mean().backward()
        optimizer.step()


def everything(made: nn.Sequential, optimizer: Any) -> dict[str, bytes]:
    """Bits of what this rank has, and how it is placed."""
    saved = optimizer.state_dict()
    tensors = {f"p{at}": p for at, p in enumerate(made.parameters())}
    tensors |= {f"{at}.{k}": v for at, each in saved["state"].items() for k, v in each.items()}
    found = {name: bits(local(each)) for name, each in tensors.items()}
    for name, each in tensors.items():
        if isinstance(each, DTensor):
            found[f"{name} of"] = repr((each.shape, each.placements, each.stride())).encode()
    found["groups"] = repr(saved["param_groups"]).encode()
    return found


def make(made: nn.Module, folder: Path, resume: Any = False, **on: Any) -> Any:
    """An optimizer with this rank's drive."""
    place = folder / f"rank{dist.get_rank()}"
    if str(on.get("device")).startswith(CARD):
        on = {**on, "device": f"{on['device']}&{ON_CARDS}&drive={place}"}
        return nearstep.optim.AdamW(made.named_parameters(), lr=1e-2, resume=resume, **on)
    memory = "24KiB" if on.get("device") else MEMORY
    given = {"lr": 1e-2, "drives": [place], "memory": memory, "resume": resume, **on}
    return nearstep.optim.AdamW(made.named_parameters(), **given)


def same(mesh: DeviceMesh, folder: Path, how: str, dtype: torch.dtype, device: Any) -> int:
    """As without drives, bit by bit; resumed, too, by other processes as if."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    on: dict[str, Any] = {"device": device}
    if dtype is torch.uint8:
        dtype, on["state_dtype"] = torch.float32, dtype
    plain, drives = HOW[how](mesh, dtype), HOW[how](mesh, dtype)
    reference = nearstep.optim.AdamW(plain.named_parameters(), lr=1e-2, **on)
    memory: dict[str, Any] = {}
    if not str(device).startswith(CARD) and ("state_dtype" in on or how == "tp"):
        memory = {"memory": "512KiB" if "state_dtype" in on else "16KiB"}  # whole blocks
    optimizer = make(drives, folder, **on, **memory)
    compared = 0
    for step in range(3):
        train(plain, reference, [step], how)
        train(drives, optimizer, [step], how)
        expected = everything(plain, reference)
        assert everything(drives, optimizer) == expected, (how, dtype, device, step)
        compared += sum(map(len, expected.values()))
    optimizer.store.close()
    again = HOW[how](mesh, dtype)
    with torch.no_grad():
        for each in again.parameters():
            each.zero_()
    resumed = make(again, folder, True, **on, **memory)
    assert everything(again, resumed) == expected
    train(plain, reference, [3], how)
    train(again, resumed, [3], how)
    assert everything(again, resumed) == everything(plain, reference)
    resumed.load_state_dict(reference.state_dict())
    assert everything(again, resumed) == everything(plain, reference)
    meta = resumed.store.meta
    assert meta["made"][:2] == [5, 0]
    expected = whole(again, resumed)
    resumed.store.close()
    if str(device).startswith(CARD):
        dist.barrier()
        with pytest.raises(DriveVanishedError if dist.get_rank() else RanksDifferError):
            make(again, folder / ("none" if dist.get_rank() else ""), True, **on)
        other = HOW[how](mesh, dtype)
        if dtype is torch.float32 and "state_dtype" not in on:
            loads: Any = torch.optim.AdamW(other.named_parameters(), lr=0.5, fused=True)
        else:
            loads = nearstep.optim.AdamW(other.named_parameters(), lr=0.5, **on)
        load(other, loads, GenerationReader([folder / f"rank{r}" for r in range(mesh.size())]))
        assert whole(other, loads) == expected
        if dtype is torch.bfloat16 and dist.get_rank() == 0:  # masters are the parameters
            files = export_safetensors(places(folder, mesh.size()), folder / "out")
            assert not any("master" in key for key in load_file(files[1]))
            for name, value in load_file(files[0]).items():
                assert value.dtype is torch.float32
                assert bits(value.bfloat16()) == expected[f"{name}.p"]
        dist.barrier()
    return compared


@contextmanager
def failing(action: str, number: int) -> Iterator[None]:
    """A call of this rank's drives fails."""
    real, count = getattr(BlockFile, action), [0]

    def call(blocks: BlockFile, *where: Any) -> None:
        count[0] += 1
        if count[0] == number:
            error = OSError(errno.EIO, os.strerror(errno.EIO))
            raise DriveIOError(blocks.name, action, 0, error)
        real(blocks, *where)

    with mock.patch.object(BlockFile, action, call):
        yield
    assert count[0] >= number


def one_fails(mesh: DeviceMesh, folder: Path) -> int:
    """A step that fails on one rank is rolled back on all, and can be repeated; a change of one
    rank's shard by the program makes a generation on all."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    plain, drives, rank = fully(mesh), fully(mesh), dist.get_rank()
    reference = nearstep.optim.AdamW(plain.named_parameters(), lr=1e-2)
    optimizer, checks = make(drives, folder), 0
    train(plain, reference, [0])
    train(drives, optimizer, [0])
    for step, (action, number) in enumerate((("read", 1), ("write", 2), ("flush", 1)), 1):
        before, generation = everything(drives, optimizer), optimizer.store.generation
        if rank == step % 2:
            with failing(action, number), pytest.raises(StorageError):
                train(drives, optimizer, [step])
        else:
            with pytest.raises(RanksFailedError, match=f"rank {step % 2}: fail"):
                train(drives, optimizer, [step])
        assert everything(drives, optimizer) == before
        assert optimizer.store.generation == generation
        train(plain, reference, [step])
        train(drives, optimizer, [step])
        assert everything(drives, optimizer) == everything(plain, reference)
        checks += 3
    for each, others in ((plain, reference), (drives, optimizer)):
        if rank == 1:
            with torch.no_grad():
                local(next(each.parameters()))[0] = 0.5
        train(each, others, [9])
    assert everything(drives, optimizer) == everything(plain, reference)
    made = {tuple(each["made"][:2]) for each in optimizer.store.generations.values()}
    optimizer.store.close()
    return checks + len(made)


def apart(mesh: DeviceMesh, folder: Path) -> int:
    """Ranks whose drives have different last generations go on from the common one, and no
    generation of two lives is mixed."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    rank, drives = dist.get_rank(), fully(mesh)
    optimizer = make(drives, folder)
    states = []
    for step in range(3):
        train(drives, optimizer, [step])
        states.append(everything(drives, optimizer))
    optimizer.store.close()
    own = folder / f"rank{rank}"
    third = own.read_bytes()
    if rank == 0:  # rank 0 was killed before it wrote its last superblock
        with Store.open([own], owner=None, generation=3) as store:
            store.drop_other()
    dist.barrier()
    again = fully(mesh)
    resumed = make(again, folder, True)
    assert everything(again, resumed) == states[1]
    assert resumed.store.meta["made"][:2] == [2, 0]
    train(again, resumed, [77])  # another third step
    made = resumed.store.meta["made"]
    resumed.store.close()
    assert made[0] == 3
    kept = own.read_bytes()
    if rank == 0:
        own.write_bytes(third)  # the third step of the first life
        with Store.open([own], owner=None, generation=4) as store:
            store.drop_other()
    dist.barrier()
    with pytest.raises(RanksDifferError, match="no step is on the drives of all"):
        make(fully(mesh), folder, True)
    own.write_bytes(kept)
    dist.barrier()
    return 5


def refused(mesh: DeviceMesh, folder: Path) -> int:
    """What ranks must not do; nothing is touched by it."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    rank = dist.get_rank()
    with pytest.raises(SharedDriveError, match=r"of ranks \(0, 1\)"):
        make(fully(mesh), folder, drives=[folder / "both"])
    with pytest.raises(RanksDisagreeError, match="same rule and formats"):
        make(fully(mesh), folder, state_dtype=[None, torch.bfloat16][rank])
    with pytest.raises(RanksDisagreeError, match="same resume"):
        make(fully(mesh), folder, resume=[False, True][rank])
    kind = [nearstep.optim.AdamW, nearstep.optim.Adam][rank]
    with pytest.raises(RanksDisagreeError, match="same parameters"):
        kind(fully(mesh).parameters(), drives=[folder / f"rank{rank}"], memory=MEMORY)
    dist.barrier()
    assert not os.listdir(folder)
    dist.barrier()
    if rank == 1:  # what this rank alone finds out
        (folder / "rank1").write_bytes(bytes(5000))
    with pytest.raises(NotADriveError if rank else RanksFailedError):
        make(fully(mesh), folder)
    dist.barrier()
    assert os.listdir(folder) == ["rank1"]
    dist.barrier()
    if rank == 1:
        (folder / "rank1").unlink()
    make(fully(mesh), folder).store.close()
    swapped = [folder / f"rank{1 - rank}"]
    with pytest.raises(
        ResumeError, match=f"of rank {rank} of 2, not the shards of rank {1 - rank}"
    ):
        make(fully(mesh), folder, resume=True, drives=swapped)
    dist.barrier()
    missing = [folder / ("none" if rank else "rank0")]
    with pytest.raises(DriveVanishedError if rank else RanksDifferError):
        make(fully(mesh), folder, resume=True, drives=missing)
    dist.barrier()
    alone = model()
    with pytest.raises(ResumeError, match=f"not the shards of rank {rank} of 2: .*Reader"):
        make(alone, folder, resume=1)
    return 8


def if_any(mesh: DeviceMesh, folder: Path) -> int:
    """Ranks begin, and resume, together, wherever the first commit was cut off."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    rank, own, drives = dist.get_rank(), folder / f"rank{dist.get_rank()}", fully(mesh)
    optimizer = make(drives, folder, "if-any")
    begun = everything(drives, optimizer)
    optimizer.store.close()
    if rank == 0:  # killed before its first superblock
        with Store.open([own], owner=None, generation=0) as store:
            store.drop_other()
    dist.barrier()
    again = fully(mesh)
    optimizer = make(again, folder, "if-any")
    assert everything(again, optimizer) == begun
    assert optimizer.store.generation == 1
    train(again, optimizer, [0])
    state = everything(again, optimizer)
    optimizer.store.close()
    optimizer = make(drives, folder, "if-any")
    assert everything(drives, optimizer) == state
    optimizer.store.close()
    if rank == 0:
        own.unlink()
    dist.barrier()
    with pytest.raises(RanksDifferError if rank else DriveVanishedError):
        make(fully(mesh), folder, "if-any")
    return 5


def full(mesh: DeviceMesh, folder: Path) -> int:
    """A drive of one rank is full: no rank keeps the generation, or makes the step, which can be
    repeated when there is room."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    made, rank, place = fully(mesh), dist.get_rank(), folder / f"rank{dist.get_rank()}"
    owner, checks = describe("AdamW", [made.parameters()]), 0
    with Store.create([place], drive_bytes=(1000, 150)[rank] << 12, owner=owner) as store:
        optimizer = make(made, folder, drives=store)
        error: StorageError | None = None
        for step in range(9):
            before, kept = everything(made, optimizer), list(store.kept)
            try:
                train(made, optimizer, [step])
                before = everything(made, optimizer)
                optimizer.keep(f"after {step}")
            except StorageError as found:
                error = found
                break
            checks += 1
        assert isinstance(error, DriveFullError if rank else RanksFailedError)
        assert everything(made, optimizer) == before
        assert list(store.kept) == kept == [f"after {each}" for each in range(checks)]
        store.drop("after 0")
        for name in ("now", "still"):  # its blocks are free after the commit that follows
            optimizer.keep(name)
        train(made, optimizer, [9])
        assert everything(made, optimizer) != before
        assert "after 0" not in store.kept
    return checks + 5


def whole(made: nn.Module, optimizer: Any) -> dict[str, bytes]:
    """Bits of whole parameters and whole state, by their names."""
    found = {}
    for name, p in made.named_parameters():
        for key, value in {"p": p, **optimizer.state[p]}.items():
            found[f"{name}.{key}"] = bits(on_tensors(value))
    return found


def on_tensors(value: Any) -> Tensor:
    """The whole of a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(made: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(made),
        "optim": get_optimizer_state_dict(made, optimizer),
    }


def load(made: nn.Module, optimizer: Any, reader: Any) -> None:
    """Load a checkpoint of torch, or the drives of ranks."""
    state = state_of(made, optimizer)
    dcp.load(state, storage_reader=reader)
    set_model_state_dict(made, state["model"])
    set_optimizer_state_dict(made, optimizer, state["optim"])


def places(folder: Path, ranks: int) -> list[list[Path]]:
    return [[folder / f"rank{rank}"] for rank in range(ranks)]


def saved(mesh: DeviceMesh, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, bytes]:
    """Drives of ranks that have trained after a checkpoint, and what that has."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    made = fully(mesh, dtype)
    optimizer = make(made, folder)
    train(made, optimizer, range(2))
    written = optimizer.traffic.to_drives
    dcp.save(state_of(made, optimizer), storage_writer=GenerationWriter(optimizer, "after 2"))
    assert optimizer.traffic.to_drives == written, "nothing is copied"
    train(made, optimizer, range(2, 4))
    with torch.no_grad():
        for each in local(next(made.parameters()))[:1]:
            each.fill_(dist.get_rank())
    random = {**state_of(made, optimizer), "random": torch.get_rng_state()}
    one = dist.get_rank() == 1
    some = random if one else state_of(made, optimizer)
    with pytest.raises(StateError if one else RanksFailedError, match=r"random must|rank 1: fail"):
        dcp.async_save(some, storage_writer=GenerationWriter(optimizer, "other"))
    assert list(optimizer.store.kept) == ["after 2"]
    written = optimizer.traffic.to_drives
    with pytest.raises(UnsupportedOptionError, match="cannot be copied or pickled"):
        pickle.dumps(GenerationWriter(optimizer, "of another process"))
    saving = dcp.async_save(
        state_of(made, optimizer),
        storage_writer=GenerationWriter(optimizer, "kept"),
        process_group=dist.new_group(backend="gloo"),
    )
    assert list(optimizer.store.kept) == ["after 2", "kept"], "committed before it returns"
    most = sum(local(p).nbytes for p in made.parameters())  # small ones are written together
    assert optimizer.traffic.to_drives - written <= most, "no moment is copied"
    found = whole(made, optimizer)
    train(made, optimizer, range(4, 7))
    assert "optim.state.0.weight.exp_avg" in saving.result(60).state_dict_metadata
    with pytest.raises(CheckpointException, match="must be a new one, not 'kept'"):
        dcp.save(state_of(made, optimizer), storage_writer=GenerationWriter(optimizer, "kept"))
    with pytest.raises(CheckpointException, match="random must be a parameter"):
        dcp.save(random, storage_writer=GenerationWriter(optimizer, "other"))
    optimizer.store.drop("after 2")
    train(made, optimizer, [7])
    assert list(optimizer.store.kept) == ["kept"]
    optimizer.store.close()
    dist.barrier()
    return found


MOMENTS = ("step", "exp_avg", "exp_avg_sq")

KINDS = ("torch", "alone", "host", "drives", "resumed", "back")
"""Optimizers that read the drives of ranks."""


def loaded(
    mesh: DeviceMesh,
    folder: Path,
    ranks: int,
    expected: dict[str, bytes],
    kinds: Sequence[str] = KINDS,
) -> int:
    """The drives of so many ranks into models of this mesh: of torch, without drives and with, and
    of a process alone; and back from a checkpoint of torch."""
    compared, drives, files = 0, folder / f"by{mesh.size()}", folder / f"files{mesh.size()}"
    for each in (drives, drives / "back"):
        each.mkdir(exist_ok=True)
        dist.barrier()
    for kind in kinds:
        made = model() if kind == "alone" else fully(mesh)
        if kind in ("torch", "alone"):
            optimizer: Any = torch.optim.AdamW(made.named_parameters(), lr=0.5, fused=True)
        elif kind == "host":
            optimizer = nearstep.optim.AdamW(made.parameters(), lr=0.5)
        else:
            own = drives / "back" if kind == "back" else drives
            optimizer = make(made, own, resume=kind == "resumed", lr=0.5)
        if kind == "back":
            load(made, optimizer, dcp.FileSystemReader(files))
        elif kind != "resumed":
            load(made, optimizer, GenerationReader(places(folder, ranks), name="kept"))
        if kind == "torch":
            dcp.save(state_of(made, optimizer), checkpoint_id=files)
        assert whole(made, optimizer) == expected, kind
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        compared += len(expected)
        if kind in ("drives", "resumed", "back"):
            optimizer.store.close()
    return compared


def restored(mesh: DeviceMesh, folder: Path) -> int:
    """All ranks go back to a kept generation in place, or none; and not if they disagree."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    made, rank, own = fully(mesh), dist.get_rank(), folder / f"rank{dist.get_rank()}"
    optimizer = make(made, folder)
    train(made, optimizer, range(2))
    optimizer.keep("best")
    kept = everything(made, optimizer)
    train(made, optimizer, range(2, 5))
    last, number = everything(made, optimizer), optimizer.store.generation
    optimizer.store.close()
    for resume, state in (("best", kept), (True, last), ("best", kept), (True, kept)):
        again = fully(mesh)
        optimizer = make(again, folder, resume)
        assert everything(again, optimizer) == state
        assert optimizer.traffic.to_drives == 0
        optimizer.store.close()
        if resume == "best" and number and rank == 0:  # killed before its superblock
            with Store.open([own], owner=None, generation=number) as store:
                store.drop_other()
        number = 0
        dist.barrier()
    optimizer = make(again, folder, True)
    plain = fully(mesh)
    reference = nearstep.optim.AdamW(plain.named_parameters(), lr=1e-2)
    train(plain, reference, [0, 1, 77])
    train(again, optimizer, [77])
    assert everything(again, optimizer) == everything(plain, reference)
    if rank == 1:
        optimizer.store.drop("best")
    train(again, optimizer, [78, 79])
    last = everything(again, optimizer)
    optimizer.store.close()
    dist.barrier()
    with pytest.raises(RanksDisagreeError, match="same resume"):
        make(fully(mesh), folder, ["best", "worst"][rank])
    with pytest.raises(ResumeError if rank else RanksDifferError, match=r"'best'|does not resume"):
        make(fully(mesh), folder, "best")
    optimizer = make(again, folder, True)
    assert everything(again, optimizer) == last
    optimizer.keep("second")
    kept = everything(again, optimizer)
    train(again, optimizer, [80, 81])
    last = everything(again, optimizer)
    optimizer.store.close()
    broken = failing("write", 1) if rank else nullcontext()  # the index of the next generation
    with broken, pytest.raises(DriveIOError if rank else RanksFailedError):
        make(fully(mesh), folder, "second")
    for resume, state in ((True, last), ("second", kept)):
        optimizer = make(again, folder, resume)
        assert everything(again, optimizer) == state
        optimizer.store.close()
    return 11


def exported(folder: Path, ranks: int, expected: dict[str, bytes]) -> int:
    """Files of safetensors have the bits of a kept generation, and torch goes on from them."""
    out, compared = folder / "out", 0
    with pytest.raises(ResumeError, match=rf"shards of {ranks} ranks, not those of ranks \[1"):
        export_safetensors(places(folder, ranks)[1:], out)
    assert not out.exists()
    real = Array.rows
    with mock.patch.object(Array, "rows", lambda array, _: real(array, 200)):  # in many pieces
        files = export_safetensors(places(folder, ranks), out, name="kept")
    assert sorted(os.listdir(out)) == ["model.safetensors", "optimizer.safetensors"]
    tensors, state = map(load_file, files)
    with safe_open(files[1], framework="pt") as opened:
        (group,) = json.loads(opened.metadata()["param_groups"])
    made = model()
    made.load_state_dict(tensors)
    optimizer = torch.optim.AdamW(made.named_parameters(), lr=0.5, fused=True)
    names = group["params"]
    saved = {at: {k: state[f"state.{n}.{k}"] for k in MOMENTS} for at, n in enumerate(names)}
    groups = [{**group, "params": list(range(len(names))), "param_names": names}]
    optimizer.load_state_dict({"state": saved, "param_groups": groups})
    assert whole(made, optimizer) == expected
    assert optimizer.param_groups[0]["lr"] == 1e-2
    compared += len(expected)
    before = [each.read_bytes() for each in files]
    words = [*map(str, chain(*places(folder, ranks))), "--name", "kept", "-o", str(folder / "cli")]
    done = CliRunner().invoke(commands.app, ["export", *words])
    assert done.exit_code == 0, done.output
    assert [(folder / "cli" / each.name).read_bytes() for each in files] == before
    real_write = export._write
    for at in range(2):

        def full(path: Path, *some: Any, at: int = at) -> None:
            if path.name == (".model.safetensors.partial", ".optimizer.safetensors.partial")[at]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real_write(path, *some)

        with mock.patch.object(export, "_write", full), pytest.raises(SnapshotSaveError):
            export_safetensors(places(folder, ranks), out)
        assert sorted(os.listdir(out)) == ["model.safetensors", "optimizer.safetensors"]
        assert [each.read_bytes() for each in files] == before
        compared += 1
    return compared


def checkpoint(mesh: DeviceMesh, folder: Path, kinds: Sequence[str] = KINDS) -> int:
    """Generations of all ranks are read by any number of processes; what is missing is said."""
    expected, ranks = saved(mesh, folder), mesh.size()
    compared = loaded(mesh, folder, ranks, expected, kinds)
    if dist.get_rank() == 0:
        compared += exported(folder, ranks, expected)
    last = GenerationReader(places(folder, ranks)).read_metadata()
    assert len(last.state_dict_metadata) > len(expected)
    assert isinstance(last.state_dict_metadata["optim.state.0.weight.step"], TensorStorageMetadata)
    with pytest.raises(ResumeError, match="a generation named 'after 2'"):
        GenerationReader(places(folder, ranks), name="after 2").read_metadata()
    other = folder / "other"
    other.mkdir(exist_ok=True)
    dist.barrier()
    make(fully(mesh), other).store.close()
    dist.barrier()
    for some, message in (
        (places(folder, ranks)[1:], rf"shards of {ranks} ranks, not those of ranks \[1"),
        (places(folder, 1) * 2, r"not those of ranks \[0, 0"),
        ([*places(folder, 1), *places(other, 2)[1:]], "no step is on the drives"),
    ):
        with pytest.raises(ResumeError, match=message):
            GenerationReader(some).read_metadata()
        compared += 1
    unnamed = GenerationReader(places(folder, ranks), names=["only one"])
    with pytest.raises(ResumeError, match="1 parameters, as names, not 8"):
        unnamed.read_metadata()
    return compared


def distributed(value: np.ndarray, like: Tensor) -> Tensor:
    """Values of a whole parameter as a tensor with its shards."""
    tensor = torch.from_numpy(value.copy()).view(like.shape)
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor


def regrouped(made: nn.Module, optimizer: Any, values: dict[str, bytes]) -> tuple[int, int]:
    """Groups that have the values of other shards, and such as were quantized anew."""
    same = anew = 0
    for name, p in made.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            form = optimizer.layout.quantized[key]
            codes, scales = (optimizer.state[p][each] for each in (key, f"{key}_scale"))
            there = local(dequantize(Quantized(codes, scales), form)).reshape(-1)
            value = np.frombuffer(values[f"{name}.{key}"], np.float32)
            given = local(distributed(value, p)).reshape(-1)
            signed = key == "exp_avg"
            again = dequantized(quantize(given.numpy().copy(), signed=signed), signed=signed)
            for at in range(0, len(given), 256):
                group = slice(at, at + 256)
                if bits(there[group]) == bits(given[group]):
                    same += 1
                else:
                    assert bits(there[group]) == again[group].tobytes(), (name, key, at)
                    anew += 1
    return same, anew


def whole_rows(mesh: DeviceMesh, folder: Path) -> int:
    """If no group is of two shards, other shards have the same codes and scales."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    torch.manual_seed(SEED)
    rows, on = nn.Linear(256, 6, bias=False), dict[str, Any](state_dtype=torch.uint8)
    alone = copy.deepcopy(rows)
    fully_shard(rows, mesh=mesh)
    optimizer, checks = make(rows, folder, memory="512KiB", **on), 0
    for step in range(3):
        torch.manual_seed(step)
        rows(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = whole(rows, optimizer)
    optimizer.store.close()
    dist.barrier()
    found = nearstep.optim.AdamW(alone.named_parameters(), lr=0.5, **on)
    load_generation(alone, found, GenerationReader(places(folder, mesh.size())))
    for name, value in whole(alone, found).items():
        assert value == expected[name], name
        checks += 1
    return checks


def eight(mesh: DeviceMesh, folder: Path) -> int:
    """State in 8 bits: each shard is quantized as a parameter of its own; other shards take its
    values, and not its codes."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    ranks, on = mesh.size(), dict[str, Any](state_dtype=torch.uint8)
    made = fully(mesh)
    optimizer, checks = make(made, folder, memory="512KiB", **on), 0
    own = [nn.Parameter(local(p).clone()) for p in made.parameters()]
    alone = nearstep.optim.AdamW(own, lr=1e-2, **on)
    for step in range(3):
        train(made, optimizer, [step])
        for mine, p in zip(own, made.parameters(), strict=True):
            assert p.grad is not None
            mine.grad = local(p.grad).clone()
        alone.step()
    values = {}
    for (name, p), mine in zip(made.named_parameters(), own, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            codes, scales = (optimizer.state[p][each] for each in (key, f"{key}_scale"))
            assert bits(local(codes)) == bits(alone.state[mine][key])
            count = -(-mine.numel() // 256)
            assert bits(local(scales).flatten()[:count]) == bits(alone.state[mine][f"{key}_scale"])
            assert not local(scales).flatten()[count:].any()
            assert scales.placements == codes.placements
            form = optimizer.layout.quantized[key]
            wide = dequantize(Quantized(codes, scales), form)
            values[f"{name}.{key}"] = bits(on_tensors(wide))
            checks += 1
    optimizer.keep("kept")
    expected = everything(made, optimizer)
    optimizer.store.close()
    dist.barrier()

    def read(into: nn.Sequential, kind: Any, **more: Any) -> Any:
        found = kind(into.named_parameters(), lr=0.5, **more)
        load(into, found, GenerationReader(places(folder, ranks), name="kept"))
        return found

    again = fully(mesh)
    assert everything(again, read(again, nearstep.optim.AdamW, **on)) == expected
    for other in (fully(mesh), model()):
        found = read(other, torch.optim.AdamW, fused=True)
        read_back = whole(other, found)
        assert {name: read_back[name] for name in values} == values
        checks += 1
    columns = model()
    fully_shard(columns[0], mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    fully_shard(columns, mesh=mesh)
    for other in (model(), columns):
        with pytest.raises(CheckpointException, match=r"Size mismatch .*_scale"):
            read(other, nearstep.optim.AdamW, **on)
        found = nearstep.optim.AdamW(other.named_parameters(), lr=0.5, **on)
        load_generation(other, found, GenerationReader(places(folder, ranks), name="kept"))
        kinds = regrouped(other, found, values)
        assert min(kinds) > 0
        checks += sum(kinds)
    checks += whole_rows(mesh, folder / "rows")
    if dist.get_rank() == 0:
        files = export_safetensors(places(folder, ranks), folder / "out")
        for key, value in load_file(files[1]).items():
            if not key.endswith(".step"):
                assert bits(value) == values[key.removeprefix("state.")]
                checks += 1
    dist.barrier()
    return checks


class Recorded(NamedTuple):
    """What a rank has done to its drive.

    Attributes
    ----------
    image : of the drive at first.
    votes : for each vote, how many events came before it.
    states : bits of each array on the drives, by name, after a number of steps, and of changes.
    """

    image: bytes
    events: list[Event]
    votes: list[int]
    states: dict[tuple[int, int], dict[str, bytes]]


def recorded(mesh: DeviceMesh, steps: int = 3) -> Recorded:
    """Train with a drive in memory that records its writes; before the second step the program
    changes a moment of rank 1."""
    begin, votes, real = images(1, 200), list[int](), Ranks._vote
    on = Drives(begin)

    def vote(ranks: Ranks, own: Any) -> Any:
        votes.append(len(on.journal.events))
        found = real(ranks, own)
        assert len(on.journal.events) == votes[-1], "nothing is written during a vote"
        return found

    made = fully(mesh)

    def state() -> dict[str, bytes]:
        found = {}
        for at, p in enumerate(made.parameters()):
            found[f"0.{at}.p"] = bits(local(p))
            for key, array in (("exp_avg", "m"), ("exp_avg_sq", "v")):
                if key in optimizer.state[p]:
                    found[f"0.{at}.{array}"] = bits(local(optimizer.state[p][key]))
        return found

    with mock.patch.object(Ranks, "_vote", vote):
        optimizer = make(made, Path(), drives=on.store)
        states = {(0, 0): state()}
        for step in range(steps):
            if step == 1:
                moment = optimizer.state[next(made.parameters())]["exp_avg"]
                local(moment)[: dist.get_rank()] = 0.5
                states[step, 1] = state()
            train(made, optimizer, [step])
            states[step + 1, 0] = state()
    on.store.close()
    return Recorded(begin[0], on.journal.events, votes, states)


def two_ranks(mesh: DeviceMesh, folder: Path, *, deep: bool) -> dict[str, int]:
    """Run the programs, and return how many checks each has made."""
    found, kinds = {}, KINDS if deep else ("torch", "alone")
    for how, dtype, device in HOMES if deep else HOMES[:2]:
        name = f"{how} {dtype} {device}"
        found[name] = same(mesh, folder / f"same{len(found)}", how, dtype, device)
    found["refused"] = refused(mesh, folder / "refused")
    found["if any"] = if_any(mesh, folder / "if-any")
    found["one fails"] = one_fails(mesh, folder / "fails")
    found["apart"] = apart(mesh, folder / "apart")
    found["full"] = full(mesh, folder / "full")
    if deep:
        found["eight"] = eight(mesh, folder / "eight")
    found["restored"] = restored(mesh, folder / "restored")
    found["checkpoint"] = checkpoint(mesh, folder / "checkpoint", kinds)
    return found
