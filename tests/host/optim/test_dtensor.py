"""Parameters that are spread over processes: FSDP2, tensor parallelism, DTensors by hand.

What a device has of a DTensor is its local tensor, the position in which torch's fused step works,
too. Two processes talk over gloo on the loopback; a mesh of one process is there for what needs no
other.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import nearstep
from nearstep.torch.errors import (
    GradientError,
    ParameterError,
    StateError,
    UnsupportedOptionError,
)

from .conftest import like_torch

URL = "golden:axdimm?memory_bytes=1MiB&scan=yes&gradient_scale=yes&rules=adam,sgd,sgd_momentum"
SEED = 7


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def words(tensor):
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().reshape(-1).view(torch.int32)


def assert_equal(ours, theirs, optimizer=None, reference=None) -> int:
    """Bits, and how the state is spread; returns how many words were compared."""
    compared = 0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(words(a), words(b))
        compared += words(a).numel()
        if optimizer is None:
            continue
        mine, other = optimizer.state[a], reference.state[b]
        assert list(mine) == list(other)
        for key, value in other.items():
            assert type(mine[key]) is type(value), key
            assert mine[key].shape == value.shape
            if isinstance(value, DTensor):
                assert mine[key].placements == value.placements
                assert mine[key].stride() == value.stride()
            assert torch.equal(words(mine[key]), words(value)), key
            compared += words(value).numel()
    return compared


def spread(mesh, *shapes, placements=None):
    generator = torch.Generator().manual_seed(SEED)
    tensors = (torch.randn(shape, generator=generator) for shape in shapes)
    return [
        torch.nn.Parameter(distribute_tensor(each, mesh, placements or [Shard(0)]))
        for each in tensors
    ]


def give(mesh, turn, *lists):
    generator = torch.Generator().manual_seed(SEED + turn)
    for same in zip(*lists, strict=True):
        whole = torch.randn(same[0].shape, generator=generator)
        for p in same:
            p.grad = distribute_tensor(whole.clone(), mesh, p.placements)


@like_torch
def test_a_spread_parameter_has_the_bits_of_torch_and_spread_state(mesh):
    ours, theirs = (spread(mesh, (32, 16), (64,)) for _ in range(2))
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=URL)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for turn in range(3):
        give(mesh, turn, ours, theirs)
        optimizer.step()
        reference.step()
        compared = assert_equal(ours, theirs, optimizer, reference)
    assert compared == 3 * (32 * 16 + 64) + 2
    saved = optimizer.state_dict()
    for key, value in reference.state_dict()["state"][0].items():
        assert type(saved["state"][0][key]) is type(value)
    for source in (saved, reference.state_dict()):
        resumed = [p.detach().clone().requires_grad_() for p in ours]
        second = nearstep.optim.AdamW(resumed, device=URL)
        second.load_state_dict(copy.deepcopy(source))
        give(mesh, 9, resumed)
        second.step()
    give(mesh, 9, ours, theirs)
    reference.load_state_dict(saved)
    optimizer.step()
    reference.step()
    assert_equal(ours, theirs, optimizer, reference)
    assert_equal(resumed, theirs, second, reference)


@like_torch
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_on_the_processor_the_local_part_is_updated_in_place(scale, mesh):
    spreads = {(32, 16): Shard(0), (16, 16): Replicate(), (64, 32): Shard(1)}
    ours, theirs = (
        [p for shape, how in spreads.items() for p in spread(mesh, shape, placements=[how])]
        for _ in range(2)
    )
    places = [p.to_local().data_ptr() for p in ours]
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for turn in range(3):
        give(mesh, turn, ours, theirs)
        if turn == 2:  # a gradient that is spread otherwise
            whole = torch.full((64, 32), 0.3)
            ours[2].grad = distribute_tensor(whole, mesh, [Replicate()])
            theirs[2].grad = distribute_tensor(whole, mesh, [Shard(1)])
        before = [p._version for p in ours]
        for each in (optimizer, reference):
            each.grad_scale = torch.tensor(scale)
            each.step()
        assert all(p._version > version for p, version in zip(ours, before, strict=True))
    compared = assert_equal(ours, theirs, optimizer, reference)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(words(a.grad), words(b.grad))
    assert [p.to_local().data_ptr() for p in ours] == places
    assert compared == 3 * (sum(p.numel() for p in ours) + 1)


@like_torch
@pytest.mark.parametrize("device", ["host:", "golden:axdimm?memory_bytes=1MiB&rules=muon"])
def test_muon_of_spread_matrices_has_the_bits_of_torch(device, mesh):
    """What the host computes between two runs is of the whole matrix."""
    ours, theirs = (spread(mesh, (32, 16), (7, 31)) for _ in range(2))
    optimizer = nearstep.optim.Muon(ours, device=device)
    reference = torch.optim.Muon(theirs)
    for turn in range(3):
        give(mesh, turn, ours, theirs)
        optimizer.step()
        reference.step()
    assert assert_equal(ours, theirs, optimizer, reference) == 2 * (32 * 16 + 7 * 31)


def test_state_of_a_spread_parameter_is_spread_as_it_is(mesh):
    (p,) = spread(mesh, (32, 16))
    optimizer = nearstep.optim.AdamW([p], device=URL)
    give(mesh, 0, [p])
    optimizer.step()
    whole = torch.zeros(32, 16)
    for wrong, message in (
        (whole, "on this process alone"),
        (distribute_tensor(whole, mesh, [Shard(1)]), r"Shard\(dim=1\)"),
    ):
        with pytest.raises(StateError, match=message):
            optimizer.state[p]["exp_avg"] = wrong
    optimizer.state[p]["exp_avg"].mul_(2)
    give(mesh, 1, [p])
    down = optimizer.traffic.moments_down
    optimizer.step()
    assert optimizer.traffic.moments_down - down == 4 * 32 * 16


def test_what_cannot_be_right_is_refused_before_anything_is_sent(mesh):
    part = DTensor.from_local(torch.ones(16), mesh, [Partial()])
    with pytest.raises(ParameterError, match="sums that are yet to be made"):
        nearstep.optim.AdamW([torch.nn.Parameter(part)], device=URL)
    (p,) = spread(mesh, (32,))
    plain = torch.nn.Parameter(torch.ones(32))
    optimizer = nearstep.optim.AdamW([p, plain], device=URL)
    p.grad = torch.ones(32)
    with pytest.raises(GradientError, match=r"must be spread by .* not on this process alone"):
        optimizer.step()
    p.grad, plain.grad = None, distribute_tensor(torch.ones(32), mesh, [Shard(0)])
    with pytest.raises(GradientError, match=r"must be on this process alone, not spread by"):
        optimizer.step()
    assert optimizer.traffic.gradients_down == 0


def test_sums_of_a_gradient_are_made_and_a_mesh_of_one_is_clipped_and_scaled(mesh):
    ours, theirs = spread(mesh, (32,)), [torch.nn.Parameter(spread(mesh, (32,))[0].to_local())]
    optimizer = nearstep.optim.SGD(ours, lr=0.5, momentum=0.9, max_grad_norm=1.0, device=URL)
    reference = nearstep.optim.SGD(theirs, lr=0.5, momentum=0.9, max_grad_norm=1.0, device=URL)
    assert optimizer.looks_for_inf
    for turn in range(2):
        gradient = torch.randn(32, generator=torch.Generator().manual_seed(turn))
        ours[0].grad = DTensor.from_local(gradient, mesh, [Partial()])
        theirs[0].grad = gradient
        for chosen in (optimizer, reference):
            scaler = nearstep.optim.GradScaler(init_scale=4.0)
            scaler.scale(torch.ones(()))
            scaler.step(chosen)
    assert assert_equal(ours, theirs) == 32
    assert optimizer.traffic.scans == 2


def sharded(mesh, rank) -> int:
    """Even, uneven and empty shards, state, checkpoints, other placements of gradients."""
    shapes = ((32, 16), (3, 16), (1, 16), (64,))
    ours, theirs = (spread(mesh, *shapes) for _ in range(2))
    assert [p.to_local().numel() for p in ours] == [[256, 32, 16, 32], [256, 16, 0, 32]][rank]
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=URL)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    compared = 0
    for turn in range(3):
        give(mesh, turn, ours, theirs)
        if turn == 1:
            for p, *_ in (ours, theirs):
                p.grad = p.grad.redistribute(placements=[Replicate()])
        if turn == 2:
            for _, p, *_ in (ours, theirs):
                half = p.grad.redistribute(placements=[Replicate()]).to_local() / 2
                p.grad = DTensor.from_local(half, mesh, [Partial()])
        optimizer.step()
        reference.step()
        compared += assert_equal(ours, theirs, optimizer, reference)
        optimizer.load_state_dict(reference.state_dict())
    assert not optimizer.looks_for_inf
    with pytest.raises(UnsupportedOptionError, match=r"max_grad_norm=1.0 .*shards"):
        nearstep.optim.AdamW(spread(mesh, (32,)), max_grad_norm=1.0, device=URL)
    nearstep.optim.AdamW(
        spread(mesh, (32,), placements=[Replicate()]), max_grad_norm=1.0, device=URL
    )
    return compared


def scaled(mesh, rank) -> int:
    """An infinity of one process makes all skip; whole gradients are clipped by torch."""
    ours, theirs = (spread(mesh, (64,)) for _ in range(2))
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=URL)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    scalers = nearstep.optim.GradScaler(init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    compared = 0
    for turn in range(4):
        give(mesh, turn, ours, theirs)
        for (p,), chosen, scaler in zip(
            (ours, theirs), (optimizer, reference), scalers, strict=True
        ):
            scaler.scale(torch.ones(()))
            if turn == 1 and rank == 1:
                p.grad.to_local()[3] = torch.inf
            if turn == 3:
                scaler.unscale_(chosen)
                torch.nn.utils.clip_grad_norm_([p], 0.1)
            scaler.step(chosen)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (4.0 if turn == 0 else 2.0)
        compared += assert_equal(ours, theirs, optimizer, reference)
    assert optimizer.traffic.skipped == 1
    return compared


def model():
    torch.manual_seed(SEED)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 48), torch.nn.LayerNorm(48), torch.nn.GELU(), torch.nn.Linear(48, 32)
    )


def trained(ours, theirs, rank, inputs=lambda x: x) -> int:
    optimizer = nearstep.optim.AdamW(ours.parameters(), lr=1e-2, device=URL)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    compared = 0
    for turn in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(turn))
        for each, chosen in ((ours, optimizer), (theirs, reference)):
            chosen.zero_grad()
            each(inputs(x)).square().mean().backward()
            chosen.step()
        parameters = list(ours.parameters()), list(theirs.parameters())
        compared += assert_equal(*parameters, optimizer, reference)
    for chosen in (optimizer, reference):
        chosen.zero_grad()
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        mine = get_optimizer_state_dict(ours, optimizer, options=options)
        other = get_optimizer_state_dict(theirs, reference, options=options)
        assert mine["state"].keys() == other["state"].keys()
        for name, state in other["state"].items():
            for key, value in state.items():
                assert type(mine["state"][name][key]) is type(value)
                assert torch.equal(words(mine["state"][name][key]), words(value))
                compared += words(value).numel()
        fresh = nearstep.optim.AdamW(ours.parameters(), device=URL)
        set_optimizer_state_dict(ours, fresh, other, options=options)
        compared += assert_equal(*parameters, fresh, reference)
    return compared


def fully_sharded(mesh, rank) -> int:
    ours, theirs = model(), model()
    for each in (ours, theirs):
        fully_shard(each[0], mesh=mesh)
        fully_shard(each, mesh=mesh)
    return trained(ours, theirs, rank, lambda x: x[2 * rank : 2 * rank + 2])


def tensor_parallel(mesh, rank) -> int:
    plan = {"0": ColwiseParallel(output_layouts=Shard(0)), "1": SequenceParallel(sequence_dim=0)}
    plan["3"] = RowwiseParallel(input_layouts=Shard(0))
    return trained(*(parallelize_module(model(), mesh, plan) for _ in range(2)), rank)


CASES = {each.__name__: each for each in (sharded, scaled, fully_sharded, tensor_parallel)}


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for name, case in CASES.items():
            Path(f"{folder}/{name}.{rank}").write_text(str(case(mesh, rank)))
    except BaseException:
        Path(f"{folder}/error.{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


@pytest.mark.deep
def test_two_processes_have_the_bits_of_torch(tmp_path: Path):
    context = torch.multiprocessing.get_context("spawn")
    each = [context.Process(target=process, args=(rank, str(tmp_path))) for rank in range(2)]
    for one in each:
        one.start()
    for one in each:
        one.join()
    errors = [path.read_text() for path in sorted(tmp_path.glob("error.*"))]
    assert not errors, "\n".join(errors)
    for name in CASES:
        counts = [int((tmp_path / f"{name}.{rank}").read_text()) for rank in range(2)]
        print(f"{name}: {counts} words compared in two processes")
        assert min(counts) > 0


@pytest.mark.parametrize("device", ["golden:axdimm?state_format=dynamic8", None])
def test_state_in_8_bits_is_that_of_the_local_tensor(mesh, device):
    value = torch.linspace(-1, 1, 300).reshape(20, 15)
    whole = torch.nn.Parameter(value.clone())
    spread = torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(1)]))
    compared = 0
    optimizers = [
        nearstep.optim.AdamW([p], device=device, state_dtype=torch.uint8) for p in (whole, spread)
    ]
    for step in range(2):
        whole.grad = value * (step + 1)
        spread.grad = distribute_tensor(whole.grad, mesh, [Shard(1)])
        for each in optimizers:
            each.step()
    plain, state = (each.state[p] for each, p in zip(optimizers, (whole, spread), strict=True))
    for key, scales in (("exp_avg", "exp_avg_scale"), ("exp_avg_sq", "exp_avg_sq_scale")):
        assert torch.equal(state[key].to_local(), plain[key])
        assert state[scales].shape == (1, 1, 2)
        assert state[scales].placements == spread.placements
        assert torch.equal(state[scales].to_local().flatten(), plain[scales])
        compared += 302
    wrong = optimizers[1].state_dict()
    wrong["state"] = {0: {**wrong["state"][0], "exp_avg_scale": plain["exp_avg_scale"]}}
    with pytest.raises(StateError, match=r"'exp_avg_scale' of shape \(1, 1, 2\)"):
        optimizers[1].load_state_dict(wrong)
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    assert torch.equal(optimizers[1].state[spread]["exp_avg"].to_local(), plain["exp_avg"])
    assert compared == 604
