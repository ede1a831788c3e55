"""Training with state on drives, of the host or of cards, has the bits that it has without."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nearstep
from nearstep.torch.errors import UnsupportedOptionError
from nearstep.torch.homes.errors import MemoryTooSmallError

from .jobs import (
    BF16,
    DIMM,
    HOMES,
    OPTIMIZERS,
    PLAIN,
    URL,
    Job,
    bits,
    card_url,
    drives,
    everything,
    iteration,
    random_job,
    stack,
)

STEPS = 3
SHAPES = [(40, 16), (16,), (30, 20), (7,), (1,)]
LARGE = [(160, 128), (128, 130), (64, 300)]


@dataclass(frozen=True)
class Home:
    """A device whose state is on drives, and the same device without."""

    url: str
    plain: str
    count: int = 2
    options: dict[str, Any] = field(default_factory=dict)


def cards(count: int, subgroup: int) -> Home:
    return Home(card_url(count, subgroup), PLAIN, count)


def smallest(job: Job, url: str) -> int:
    """The memory that is named where there is too little."""
    with drives() as on, pytest.raises(MemoryTooSmallError) as caught:
        job.make(job.parameters(), url, drives=on.store, memory=1)
    assert caught.value.actual == 1
    assert f"at least {caught.value.expected} bytes, not 1" in str(caught.value)
    return caught.value.expected


def host(job: Job, url: str = URL, eviction: str = "updated_first", more: float = 1.0) -> Home:
    """With the smallest memory, or some times as much."""
    memory = int(smallest(job, url) * more)
    return Home(url, url, options={"memory": memory, "eviction": eviction})


def processor(job: Job, more: float = 1.0, eviction: str = "updated_first") -> Home:
    return host(job, "host:", eviction, more)


def compare(job: Job, home: Home, **more: Any) -> int:
    """Train with drives and without; values that were compared."""
    plain, own = job.parameters(), job.parameters()
    expected = job.make(plain, home.plain, **more)
    compared = 0
    with drives(home.count, 1200) as on:
        found = job.make(own, home.url, drives=on.store, **home.options, **more)
        for step in range(STEPS):
            job.step(expected, plain, step)
            job.step(found, own, step)
            here, there = everything(own, found), everything(plain, expected)
            assert here == there, (job, home, step)
            compared += len(here)
        assert on.store.generation == STEPS + 1
        if home.options:
            assert 0 < found.memory_peak <= home.options["memory"]
            return compared
        for name, tensor in on.store.tensors.items():
            drives_of = {each.drive for each in tensor.table.extents() if not each.is_hole}
            assert drives_of <= {int(name.partition("@")[2])}
            compared += 1
    return compared


@pytest.mark.parametrize("home", ["updated_first", "belady", "cards", "processor"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer(optimizer: str, home: str) -> None:
    """On drives of the host under the smallest memory, with every policy."""
    job = Job(SHAPES, optimizer, skips=4)
    made = cards(2, 128) if home == "cards" else processor(job)
    if home in ("updated_first", "belady"):
        made = host(job, eviction=home)
    assert compare(job, made) >= STEPS * 6
    if home == "updated_first":
        least = made.options["memory"]
        if OPTIMIZERS[optimizer][1].get("amsgrad"):
            assert least == 5 * 4 * 640
        with drives() as on, pytest.raises(MemoryTooSmallError, match=str(least)):
            job.make(job.parameters(), URL, drives=on.store, memory=least - 1)


@pytest.mark.parametrize("home", [URL, DIMM, 1, 2], ids=["host", "host-dimm", "card", "cards"])
def test_large_parameters_that_the_device_updates_in_place(home: str | int) -> None:
    job = Job(LARGE)
    made = host(job, home) if isinstance(home, str) else cards(home, 8192)
    assert made.options.get("memory", 1 << 30) >= 16 * 160 * 128
    assert compare(job, made) > 20


@pytest.mark.parametrize(
    ("home", "dtype"),
    [(URL, "bfloat16"), (BF16, "bfloat16"), (3, "bfloat16"), (3, "float16")],
    ids=["host", "host-copies", "cards", "cards-fp16"],
)
def test_masters_of_16_bit_parameters_move_with_their_state(home: str | int, dtype: str) -> None:
    job = Job([*SHAPES[:4], (9,)], dtype=getattr(torch, dtype), skips=3)
    assert compare(job, host(job, home) if isinstance(home, str) else cards(home, 256)) > 20


@pytest.mark.parametrize("more", [1.0, 2.5])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_formats_of_the_processor_of_parameters_of_any_size(
    dtype: str, state: str, more: float
) -> None:
    """Large ones are used where they are; 8-bit state has its scales with it."""
    job = Job([*SHAPES, (127, 133), (4096,), (5000,), (3, 5461)], dtype=getattr(torch, dtype))
    kept: dict[str, Any] = {"state_dtype": getattr(torch, state)}
    if "bfloat16" in (dtype, state):
        kept["rounding"] = "stochastic"
    with drives() as on, pytest.raises(MemoryTooSmallError) as caught:
        job.make(job.parameters(), "host:", drives=on.store, memory=1, **kept)
    memory = int(caught.value.expected * more)
    assert compare(job, Home("host:", "host:", 2, {"memory": memory}), **kept) > 20


@pytest.mark.parametrize(
    ("count", "more"),
    [(0, {}), (1, {}), (3, {"compression": 0.1})],
    ids=["host", "card", "cards-compressed"],
)
def test_8_bit_state_of_a_device_moves_with_its_scales(count: int, more: dict[str, Any]) -> None:
    job = Job([(40, 16), (700,), (30, 41)], skips=3)
    url = "golden:axdimm?memory_bytes=8MiB&block_bytes=2048&state_format=dynamic8"
    home = Home(url, url, 2, {"memory": 40_000})
    if count:
        eight = "chunk_bytes=1024&state_format=dynamic8"
        plain = PLAIN.replace("chunk_bytes=512", eight)
        home = Home(card_url(count, 512).replace("chunk_bytes=512", eight), plain, count)
    assert compare(job, home, **more) > 20


@pytest.mark.parametrize("seed", range(2))
def test_the_processor_has_the_bits_of_torch(seed: int) -> None:
    """Torch rounds the last elements of a tensor otherwise: of any size."""
    print(f"seed {seed}")
    choose = np.random.default_rng(seed)
    shapes = [(int(n),) for n in choose.integers(1, 40_000, 8)] + [(8,), (1,), (16384,), (33,)]
    job = Job([shapes[at] for at in choose.permutation(len(shapes))])
    plain, own = job.parameters(), job.parameters()
    expected = torch.optim.AdamW(plain, lr=1e-2, fused=True)
    compared = 0
    with drives(2, 1200) as on:
        found = nearstep.optim.AdamW(own, lr=1e-2, drives=on.store, memory="60%")
        for step in range(STEPS):
            job.step(expected, plain, step)
            job.step(found, own, step)
            for p, q in zip(plain, own, strict=True):
                assert bits(p) == bits(q), (seed, p.numel())
                for key, value in expected.state[p].items():
                    assert bits(value) == bits(found.state[q][key]), (seed, key, p.numel())
                    compared += value.numel()
    assert compared > 2 * STEPS * sum(p.numel() for p in plain)


@pytest.mark.parametrize("count", [1, 3])
def test_compressed_gradients_with_error_feedback(count: int) -> None:
    assert compare(Job(SHAPES), cards(count, 256), compression=0.1) > 20


def rounds(kind: str, first: int, count: int) -> int:
    compared = 0
    for seed in range(first, first + count):
        print(f"seed {seed}")
        choose = np.random.default_rng(seed)
        job = random_job(choose, str(choose.choice(list(OPTIMIZERS))), seed=seed)
        more: dict[str, Any] = {}
        if kind == "cards":
            more = {"compression": 0.05} if choose.random() < 0.3 else {}
            home = cards(int(choose.integers(1, 5)), 128 * int(choose.integers(1, 9)))
        elif kind == "processor":
            home = processor(
                job, choose.uniform(1, 6), str(choose.choice(["updated_first", "belady"]))
            )
        else:
            share = 1.0 if choose.random() < 0.3 else choose.uniform(1, 6)
            eviction = str(choose.choice(["updated_first", "belady"]))
            home = host(job, str(choose.choice([URL, DIMM])), eviction, share)
            home = Home(home.url, home.plain, int(choose.integers(1, 4)), home.options)
        compared += compare(job, home, **more)
    return compared


@pytest.mark.parametrize(("kind", "count"), [("host", 8), ("cards", 6), ("processor", 6)])
def test_random_models_and_homes(kind: str, count: int) -> None:
    assert rounds(kind, 300, count) > 100


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["host", "cards", "processor"])
def test_many_random_models_and_homes(kind: str) -> None:
    assert rounds(kind, 1000, 150) > 3000


@pytest.mark.parametrize("options", ["", "&copy_out_formats=bf16&gradient_formats=fp32,bf16"])
def test_a_subgroup_of_which_nothing_is_said_has_room(tmp_path: Path, options: str) -> None:
    """Steps of more than two subgroups, in a memory that holds two, with what is beside them."""
    url = f"golden:smartssd?chunk_bytes=512&memory_bytes=64KiB{options}&drive={tmp_path}/drive"
    weight = torch.nn.Parameter(torch.ones(6000, dtype=torch.bfloat16 if options else None))
    with nearstep.open(url) as device:
        optimizer = nearstep.optim.AdamW([weight], lr=0.5, device=device)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert bool((weight < 0.1).all())


def test_parameters_and_state_changed_on_the_host_between_steps() -> None:
    job = Job([(40, 16), (16,), (30, 20)])
    compared = 0
    with drives() as on:
        plain, own = job.parameters(), job.parameters()
        expected = job.make(plain, URL)
        found = job.make(own, URL, drives=on.store, memory=smallest(job, URL))
        for step in range(4):
            for parameters, optimizer in ((plain, expected), (own, found)):
                job.step(optimizer, parameters, step)
                with torch.no_grad():
                    parameters[step % 3].mul_(0.5)
                    optimizer.state[parameters[0]]["exp_avg"].add_(0.25)
                optimizer.state[parameters[2]]["exp_avg_sq"] = torch.ones(30, 20)
                if step == 1:
                    optimizer.param_groups[0]["lr"] = 0.5
            here, there = everything(own, found), everything(plain, expected)
            assert here == there
            compared += len(here)
    assert compared > 30


def test_a_parameter_that_is_added_later_and_one_that_is_thawed() -> None:
    job = Job([(40, 16), (16,), (30, 20)])
    results = []
    for overflows in (False, True):
        with drives() as on:
            more = {"drives": on.store, "memory": 64 << 10} if overflows else {}
            parameters = job.parameters()
            parameters[1].requires_grad_(False)
            optimizer = nearstep.optim.AdamW(parameters[:2], device=URL, **more)
            parameters[0].grad = torch.ones(40, 16)
            optimizer.step()
            parameters[1].requires_grad_(True)
            optimizer.add_param_group({"params": parameters[2:], "lr": 0.5})
            for step in range(2):
                job.step(optimizer, parameters, step)
            results.append(everything(parameters, optimizer))
    assert len(results[0]) > 10
    assert results[0] == results[1]


def test_a_moment_that_one_parameter_has_of_those_that_share_a_unit() -> None:
    """It was updated alone, in less memory."""
    job = Job([(16,), (200, 200), (200, 100)], "sgd", skips=2)
    plain, expected = job.trained("host:", 1)
    with drives() as on:
        parameters, optimizer = job.trained("host:", 1, drives=on.store, memory="1MiB")
        for found, each in ((parameters, optimizer), (plain, expected)):
            each.param_groups[1]["momentum"] = each.param_groups[0]["momentum"] = 0.9
            job.step(each, found, 1)
        again, resumed = job.resumed("host:", drives=on.store, memory="64MiB")
        assert everything(again, resumed) == everything(plain, expected)
        for found, each in ((again, resumed), (plain, expected)):
            job.go_on(found, each, (2, 3))
        assert everything(again, resumed) == everything(plain, expected)


@pytest.mark.parametrize("shapes", [((40, 16), (), (16,), (0,)), ((0,), (3, 0))])
def test_groups_of_empty_parameters_alone(shapes: tuple[tuple[int, ...], ...]) -> None:
    results = []
    for overflows in (False, True):
        with drives() as on:
            more = {"drives": on.store, "memory": "1MiB"} if overflows else {}
            parameters = Job(shapes).parameters()
            groups = [{"params": [each]} for each in parameters]
            optimizer = nearstep.optim.AdamW(groups, **more)
            Job(shapes).go_on(parameters, optimizer, range(2))
            results.append(everything(parameters, optimizer))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, nearstep.optim.GradScaler])
@pytest.mark.parametrize("more", ["", "&scan=yes&gradient_scale=yes"])
def test_loss_scaling_and_a_step_that_is_skipped(kind: type, more: str) -> None:
    job = Job([(40, 16), (16,), (30, 20)])
    results = []
    for overflows in (False, True):
        with drives() as on:
            parameters = job.parameters()
            least = {"drives": on.store, "memory": smallest(job, URL)} if overflows else {}
            optimizer = job.make(parameters, URL + more, **least)
            scaler = kind("cpu", init_scale=8.0)
            scaler.scale(torch.ones(()))
            for step in range(3):
                job.gradients(parameters, step)
                for p in parameters:
                    p.grad.mul_(8.0)
                if step == 1:
                    parameters[2].grad[3, 3] = torch.inf
                scaler.step(optimizer)
                scaler.update()
                scaler.update(8.0)
            assert (on.store.generation == 3) == overflows
            results.append(everything(parameters, optimizer))
    assert len(results[0]) > 10
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [8.0, 3.0])
def test_the_processor_divides_by_any_scale_as_without_drives(
    scale: float, dtype: torch.dtype
) -> None:
    # The third and the last one share a run, each in memory of its own.
    job = Job([(40, 17), (300, 160), (128, 128), (17,), (128, 128)], dtype=dtype)
    results = []
    for overflows in (False, True):
        with drives() as on:
            parameters = job.parameters()
            more = {"drives": on.store, "memory": "100%"} if overflows else {}
            optimizer = job.make(parameters, "host:", **more)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scaler.scale(torch.ones(()))
            for step in range(2):
                job.gradients(parameters, step)
                scaler.step(optimizer)
                scaler.update(scale)
            results.append([bits(p) for p in parameters] + [bits(p.grad) for p in parameters])
    assert len(results[0]) == 10
    assert results[0] == results[1]


@pytest.mark.parametrize("home", ["memory", "host", "cards"])
def test_an_offloaded_model_on_top(home: str) -> None:
    """Where cards have drives, gradients go to the owner's drive in the backward pass, and
    parameters come from there; what an update needs besides stays within the cards (section IV-A,
    Table I)."""
    steps, passes = 4, 1 if home == "cards" else 2
    url, plain_url, _ = HOMES["host" if home == "memory" else home]
    sizes = (32, 32, 32, 32) if home == "cards" else (24, 40, 24, 8)  # whole lines on both cards
    plain, expected = stack(plain_url, sizes)
    own_options: dict[str, Any] = {"memory": 17_000} if home == "host" else {}
    with drives(2, 1200) as on:
        if home != "memory":
            own_options["drives"] = on.store
        own, found = stack(url, sizes, **own_options)
        with nearstep.offload(own, found, budget=9000 if home == "cards" else 8000) as engine:
            for step in range(steps):
                losses = iteration(plain, expected, step, passes)
                assert iteration(own, found, step, passes) == losses
            assert engine.report().peak <= engine.budget
            found.zero_grad()
        traffic = replace(found.traffic)
        assert type(own[0].weight) is nn.Parameter
        here = everything(list(own.parameters()), found)
        assert here == everything(list(plain.parameters()), expected)
    if home == "cards":
        elements = sum(p.numel() for p in plain.parameters())
        assert traffic.gradients_down == 4 * elements * steps
        assert traffic.to_drives == 4 * elements * (steps + 1)  # the first parameters, too
        assert traffic.moments_down == traffic.moments_up == traffic.gradients_up == 0
        assert traffic.drives_to_cards == 16 * elements * steps
        assert traffic.cards_to_drives == 12 * elements * steps
        least = 4 * elements * steps
        assert least <= traffic.parameters_up <= 2 * 4 * elements * (steps + 1)


def test_parameters_that_are_on_the_device_cannot_overflow(tmp_path: Path) -> None:
    with nearstep.offload.init("golden:axdimm") as init:
        model = torch.nn.Linear(64, 64)
    with pytest.raises(UnsupportedOptionError, match=r"nearstep\.offload\.init"):
        nearstep.optim.AdamW(
            model.parameters(), device=init.device, drives=[tmp_path / "a"], memory="1MiB"
        )
    assert torch.isfinite(model.weight).all()
