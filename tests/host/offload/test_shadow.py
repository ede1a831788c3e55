"""The shadow model: addresses are those of the plan, and nothing else is allocated or copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nearstep
from nearstep.memferry.cost import Decision, Mode
from nearstep.torch.computation import FLOPS
from nearstep.torch.offload import Engine
from nearstep.torch.offload.errors import BudgetError, VectorWarning
from nearstep.torch.offload.shadow import ALIGNMENT, Location, Shadow

from .models import WIDTH
from .plans import places
from .training import COMPUTE, Made, alike, bits, loss_of, stack, step

COUNT = 9
ITERATIONS = 5
DEVICE = "golden:axdimm?memory_bytes=2MiB&rules=adam"
MODES = [Mode(i % 3) for i in range(COUNT)]


model_and_optimizer = partial(stack, COUNT, device=DEVICE)


def opened(
    modes: Mapping[str, Mode] | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Sequential, Any, Engine]:
    model, optimizer = model_and_optimizer(dtype=dtype)
    chosen = {str(i): mode for i, mode in enumerate(MODES)} if modes is None else modes
    plan = places(model, {name: Decision(mode) for name, mode in chosen.items()})
    options = {"budget": "200%", "policy": "memferry", "plan": plan, **options}
    return model, optimizer, nearstep.offload(model, optimizer, **options)


def shadow_of(engine: Engine) -> Shadow:
    assert engine.shadow is not None
    return engine.shadow


class Addresses(TorchDispatchMode):
    """Addresses that matrix products get, in forward and in backward; and how often `torch.empty`
    and `torch.empty_strided` are called for memory, which the engine does out of sight of modes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[bool, defaultdict[int, int]] = {
            False: defaultdict(int),
            True: defaultdict(int),
        }
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in args if func._overloadpacket in FLOPS else ():
            if isinstance(each, Tensor):
                self.seen[torch._C._current_graph_task_id() >= 0][each.data_ptr()] += 1
        return func(*args, **(kwargs or {}))

    def counting(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            result = function(*args, **kwargs)
            if result.device.type == COMPUTE.type:
                self.made += result.untyped_storage().nbytes() > 0
            return result

        return made


def used(location: Location, *, in_backward: bool) -> int | None:
    """The address that a plan names for a use."""
    direct = location.partition is Mode.DHA or (location.partition is Mode.DFGB and not in_backward)
    return location.host if direct else location.vector


@contextmanager
def checked(engine: Engine, loads: int) -> Iterator[Addresses]:
    """Check one iteration: what was used is where the plan has it, nothing was allocated, and what
    was copied is `loads` bytes, and what is in place."""
    shadow = shadow_of(engine)
    before = (shadow.loads, shadow.allocations, shadow.allocated)
    copied = engine.report().parameters_up
    with (
        Addresses() as addresses,
        patch.object(torch, "empty", addresses.counting(torch.empty)),
        patch.object(torch, "empty_strided", addresses.counting(torch.empty_strided)),
    ):
        yield addresses
    assert (shadow.loads, shadow.allocations, shadow.allocated) == (before[0] + loads, *before[1:])
    assert addresses.made == 0
    sent = 4 // engine._space.copies[0].like.element_size()  # what has come is the fp32 master
    assert engine.report().parameters_up - copied == sent * (loads + shadow.host_nbytes)


def loads_of(engine: Engine) -> int:
    """Bytes that go into the vector in an iteration: GFGB whole, and of DFGB what backward uses,
    which is no bias, and not the first layer."""
    needed = 0
    for name, location in shadow_of(engine).locations.items():
        layer, kind = name.split(".")
        loaded = location.partition is Mode.GFGB or (
            location.partition is Mode.DFGB and kind == "weight" and layer != "0"
        )
        needed += location.nbytes if loaded else 0
    return needed


@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_between_iterations_nothing_is_allocated_or_copied_that_the_plan_does_not_name(
    updates: str, dtype: torch.dtype
) -> None:
    plain, plain_optimizer = model_and_optimizer(dtype=dtype)
    model, optimizer, engine = opened(dtype=dtype, updates=updates)
    step(model, optimizer)
    step(plain, plain_optimizer)
    loads, shadow, count = loads_of(engine), shadow_of(engine), 0
    assert loads > 0
    before = dict(shadow.locations)
    for _ in range(ITERATIONS):
        with checked(engine, loads) as addresses:
            step(model, optimizer)
        for name, location in shadow.locations.items():
            forward = used(location, in_backward=False)
            assert addresses.seen[False][forward or 0] >= 1, name
            other = location.vector if forward == location.host else location.host
            assert not addresses.seen[False][other or 0], name
            count += 2
            if name.endswith("weight") and not name.startswith("0."):
                backward = used(location, in_backward=True)
                assert addresses.seen[True][backward or 0] >= 1, name
                other = location.vector if backward == location.host else location.host
                assert not addresses.seen[True][other or 0], name
                count += 2
        step(plain, plain_optimizer)
        assert shadow.locations == before
    assert count == ITERATIONS * (2 * 2 * COUNT + 2 * (COUNT - 1))
    assert bits(model.state_dict()) == bits(plain.state_dict())
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_are_by_partition_in_the_order_of_use_and_do_not_overlap(dtype: torch.dtype) -> None:
    model, _, engine = opened(dtype=dtype)
    shadow = shadow_of(engine)
    assert list(shadow.locations) == [name for name, _ in model.named_parameters()]
    checks = 0
    spans = []
    for name, location in shadow.locations.items():
        mode = MODES[int(name.split(".")[0])]
        assert location.partition is mode
        assert (location.vector is None) == (mode is Mode.DHA)
        assert (location.host is None) == (mode is Mode.GFGB)
        for address in (location.vector, location.host):
            assert address is None or address % ALIGNMENT == 0
            if address is not None:
                spans.append((address, address + location.nbytes))
            checks += 1
    in_vector = [each.vector for each in shadow.locations.values() if each.vector is not None]
    assert in_vector == sorted(in_vector)
    assert in_vector[-1] - in_vector[0] < shadow.nbytes
    spans.sort()
    for one, other in pairwise(spans):
        assert one[1] <= other[0]
        checks += 1
    assert checks == 4 * COUNT + len(spans) - 1
    assert shadow.nbytes == sum(
        -(-each.nbytes // 64) * 64 for each in shadow.locations.values() if each.vector is not None
    )
    engine.close()


# The checker finds what it looks for


def test_a_layer_that_the_plan_does_not_name_is_found_by_the_checker() -> None:
    model, optimizer, engine = opened({str(i): mode for i, mode in enumerate(MODES) if i})
    step(model, optimizer)
    before = shadow_of(engine).allocated
    with pytest.raises(AssertionError), checked(engine, loads_of(engine)) as addresses:
        step(model, optimizer)
    assert addresses.made == 2
    assert shadow_of(engine).allocated - before == 4 * (WIDTH * WIDTH + WIDTH)
    engine.close()


def test_a_parameter_that_is_loaded_twice_is_found_by_the_checker() -> None:
    model, optimizer, engine = opened()
    step(model, optimizer)

    def another() -> None:
        loss_of(model).backward()
        engine._space.release(engine._space.copies[0])
        model[0](torch.ones(1, WIDTH, device=COMPUTE))
        optimizer.step()

    with pytest.raises(AssertionError), checked(engine, loads_of(engine)):
        another()
    engine.close()


# What something refers to


@pytest.mark.parametrize("kind", ["view", "array", "storage"])
def test_a_place_that_something_refers_to_is_not_written(kind: str) -> None:
    if kind == "array" and COMPUTE.type != "cpu":
        pytest.skip("numpy has no memory of an accelerator")
    plain, plain_optimizer = model_and_optimizer()
    model, optimizer, engine = opened({str(i): Mode.GFGB for i in range(COUNT)})
    step(model, optimizer)
    step(plain, plain_optimizer)
    shadow, copy = shadow_of(engine), engine._space.copies[0]
    address = shadow.locations["0.weight"].vector
    weight: Any = model[0].weight
    kept: Any = weight.detach()
    assert kept.data_ptr() == address
    before = bits(kept.clone())
    if kind == "array":
        kept = kept.numpy()
    elif kind == "storage":
        kept = kept.untyped_storage()
    engine._space.release(copy)  # nobody asked whether it may go
    assert copy.storage is None
    allocations = shadow.allocations
    loss_of(model)
    assert shadow.allocations == allocations + 1
    assert copy.storage is not None
    assert copy.storage.data_ptr() != address
    step(model, optimizer)
    step(plain, plain_optimizer)
    if kind == "storage":
        kept = torch.empty(0, device=COMPUTE).set_(kept, 0, weight.shape)
    assert bits(torch.as_tensor(kept)) == before
    del kept
    for _ in range(2):
        step(model, optimizer)
        step(plain, plain_optimizer)
    allocations = shadow.allocations
    loss_of(model)
    assert shadow.allocations == allocations
    assert copy.storage.data_ptr() == address
    assert bits(model.state_dict()) == bits(plain.state_dict())
    engine.close()


def test_a_parameter_with_a_view_stays_where_it_is() -> None:
    plain, plain_optimizer = model_and_optimizer()
    model, optimizer, engine = opened()
    step(model, optimizer)
    step(plain, plain_optimizer)
    kept = [each.detach() for each in model.parameters()]
    same = [each.detach() for each in plain.parameters()]
    allocations = shadow_of(engine).allocations
    for _ in range(2):
        step(model, optimizer)
        step(plain, plain_optimizer)
        assert bits(kept) == bits(same)
    assert shadow_of(engine).allocations == allocations
    assert [each.data_ptr() for each in kept] == [
        each.detach().data_ptr() for each in model.parameters()
    ]
    engine.close()


# When


def test_dfgb_parameters_come_when_the_loading_of_gfgb_has_ended() -> None:
    """In the order of backward, each after its own forward."""
    modes = [Mode.GFGB, Mode.DFGB, Mode.DFGB, *[Mode.DHA] * (COUNT - 3)]
    model, optimizer, engine = opened({str(i): mode for i, mode in enumerate(modes)})
    step(model, optimizer)
    copies, loaded = engine._space.copies, []
    x = torch.ones(2, WIDTH, device=COMPUTE)
    for layer in model:
        x = layer(x)
        loaded.append([i for i in range(COUNT) if copies[2 * i] not in engine._space._direct])
    assert loaded == [*[[0]] * 3, *[[0, 1, 2]] * (COUNT - 3)]
    if COMPUTE.type != "cpu":
        engine.close()
        return  # nothing is recorded there
    step(model, optimizer, rows=20000)
    with engine.record("axdimm") as recording:
        step(model, optimizer, rows=20000)
    entries = {}
    for entry in recording.timeline.entries:
        entries.setdefault(entry.operation.name, entry)
    loads = [entries[f"fetch {i}.weight"] for i in range(3)]
    forward = [entries[f"forward {i}"] for i in range(COUNT)]
    for i in (1, 2):
        assert max(loads[0].end, forward[i].end) <= loads[i].start
        assert loads[i].end < forward[-1].start  # before forward has ended
    engine.close()


def test_an_evaluation_loads_nothing_for_backward() -> None:
    modes = [*[Mode.DFGB] * (COUNT - 1), Mode.DHA]
    model, optimizer, engine = opened({str(i): mode for i, mode in enumerate(modes)})
    step(model, optimizer)
    before = engine.report()
    with torch.no_grad():
        model(torch.ones(2, WIDTH, device=COMPUTE))
    after = engine.report()
    assert (after.fetches, after.prefetches) == (before.fetches, before.prefetches)
    step(model, optimizer)
    assert engine.report().prefetches > before.prefetches
    engine.close()


# Room


def test_a_vector_that_does_not_fit_beside_gradients_is_none() -> None:
    layer = 4 * (WIDTH * WIDTH + WIDTH)

    def use(model, optimizer, engine, fits):
        assert engine is None or shadow_of(engine).nbytes == (COUNT * layer if fits else 0)
        for _ in range(3):
            step(model, optimizer)
        if engine is not None:
            assert (engine.shadow.allocations == 0) == fits
            assert engine.shadow.loads == (3 * COUNT * layer if fits else 0)

    modes = {str(i): Decision(Mode.GFGB) for i in range(COUNT)}
    options = {"policy": "memferry", "plan": places(model_and_optimizer()[0], modes)}
    for layers, fits in ((COUNT + 1, True), (COUNT, False)):
        said = f"a budget of {(COUNT + 1) * layer} bytes.*with {layers * layer} each fetch"
        with nullcontext() if fits else pytest.warns(VectorWarning, match=said):
            used = partial(use, fits=fits)
            alike(used, model_and_optimizer, budget=layers * layer, **options)
    assert layer % ALIGNMENT == 0


def held_by(engine: Engine) -> int:
    """Bytes that parameters and gradients really have on the compute device: storages, and the
    vector, however little of it is used."""
    shadow, found = shadow_of(engine), {}
    first = shadow.vector.data_ptr()
    for copy in engine._space.copies:
        gradient = copy.raw_gradient()
        if gradient is not None:
            found[gradient.data_ptr()] = gradient.nbytes
        if copy.storage is not None and copy not in engine._space._direct:
            if not first <= copy.storage.data_ptr() < first + shadow.vector.nbytes:
                found[copy.storage.data_ptr()] = copy.nbytes
    return shadow.vector.nbytes + sum(found.values())


class Products(nn.Module):
    """Layers by twos: backward of a product makes the gradients of two modules at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.made: Callable[..., None] = lambda *_: None

    def forward(self, x: Tensor) -> Tensor:
        for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
            product = one.weight @ other.weight
            if product.grad_fn is not None:
                product.grad_fn.register_hook(lambda made, _: self.made(made))
            x = torch.tanh(x @ product)
        return x


PRODUCT = 4 * WIDTH * WIDTH


def products() -> Made:
    torch.manual_seed(11)
    model = Products().to(COMPUTE)
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=DEVICE)


def of_products(model: nn.Module) -> dict[str, Any]:
    plan = places(model, {f"layers.{i}": Decision(Mode.GFGB) for i in range(4)})
    return {"policy": "memferry", "plan": plan}


@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
@pytest.mark.parametrize("room", [5, 6, 7])
def test_the_whole_vector_counts_against_the_budget(room: int, updates: str) -> None:
    """In a budget with room for the vector and one gradient, two are made at once: the vector is
    freed, and nothing is on the compute device that is not counted."""
    most, checks = 0, 0

    def use(model, optimizer, engine):
        def made(gradients: Any) -> None:
            nonlocal most, checks
            held = held_by(engine) + sum(each.nbytes for each in gradients)
            assert held <= engine._space.ledger.used <= room * PRODUCT
            most, checks = max(most, held), checks + 1

        if engine is not None:
            assert shadow_of(engine).nbytes == 4 * PRODUCT
            model.made = made
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH, device=COMPUTE)).square().mean().backward()
            optimizer.step()
        if engine is not None:
            assert shadow_of(engine).nbytes == (4 * PRODUCT if room > 5 else 0)
            assert most <= engine.report().peak <= room * PRODUCT
            assert most == min(room, 6) * PRODUCT
        model.zero_grad()

    alike(use, products, budget=room * PRODUCT, updates=updates, **of_products(products()[0]))
    assert checks == 6


def test_a_vector_that_something_refers_to_is_not_freed() -> None:
    """An operation that does not fit beside it raises, and what is smaller works on."""
    model, optimizer = products()
    engine = nearstep.offload(model, optimizer, budget=5 * PRODUCT, **of_products(model))
    x = torch.ones(2, WIDTH, device=COMPUTE)
    loss = model(x).sum()
    view = model.layers[0].weight[:1].detach()
    with pytest.raises(BudgetError, match=r"layers\.0\.weight"):
        loss.backward()
    assert held_by(engine) <= engine.report().peak <= 5 * PRODUCT
    optimizer.zero_grad()
    (x @ model.layers[1].weight).sum().backward()
    optimizer.step()
    assert shadow_of(engine).nbytes == 4 * PRODUCT
    del view
    model(x).sum().backward()
    assert shadow_of(engine).nbytes == 0
    assert engine.report().peak <= 5 * PRODUCT
    engine.close()


def test_other_memory_frees_a_vector_that_leaves_no_room_for_it() -> None:
    model, optimizer = products()
    engine = nearstep.offload(model, optimizer, budget=5 * PRODUCT, **of_products(model))
    first = model.layers[0].weight
    first.grad = torch.ones(WIDTH, WIDTH, device=COMPUTE)
    kept = first.grad  # it cannot go to its owner
    first.data = torch.full((WIDTH, WIDTH), 0.5, device=COMPUTE)
    assert shadow_of(engine).nbytes == 0
    assert held_by(engine) == engine._space.ledger.used == 2 * PRODUCT
    assert bits(first.detach()) == bits(kept / 2)
    assert engine.report().peak <= 5 * PRODUCT
    engine.close()


def test_a_closed_engine_leaves_the_vector() -> None:
    model, optimizer, engine = opened()
    shadow = shadow_of(engine)
    step(model, optimizer)
    loss_of(model)
    first = min(each.vector for each in shadow.locations.values() if each.vector is not None)
    nbytes = shadow.nbytes
    assert nbytes
    engine.close()
    assert shadow.nbytes == 0
    places = [each.data_ptr() for each in model.parameters()]
    assert not any(first <= place < first + nbytes for place in places)


def test_other_memory_by_hand_is_left_for_the_place_with_the_next_fetch() -> None:
    plain, plain_optimizer = model_and_optimizer()
    model, optimizer, engine = opened()
    for each in (model, plain):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.data = torch.full(parameter.shape, 0.125, device=COMPUTE)
    for _ in range(3):
        step(model, optimizer)
        step(plain, plain_optimizer)
    assert bits(model.state_dict()) == bits(plain.state_dict())
    loss_of(model)
    shadow, checks = shadow_of(engine), 0
    for copy in engine._space.copies:
        assert copy.storage is not None
        location = shadow.locations[copy.name]
        if location.partition is Mode.GFGB:
            assert copy.storage.data_ptr() == location.vector
            checks += 1
    assert checks == 6
    engine.close()
