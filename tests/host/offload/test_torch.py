"""What torch can do to an offloaded model has equal bits, or is refused by a typed error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import nearstep
from nearstep.torch.errors import EarlyUpdateError, ParameterError
from nearstep.torch.offload import Engine
from nearstep.torch.offload.errors import BudgetError, ChangedModelError, TransformError

from .models import WIDTH
from .training import COMPUTE, GOLDEN, Made, alike, bits, stack

LAYERS = 6
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(COMPUTE)
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2)).to(COMPUTE)

Opened = tuple[nn.Sequential, Any, Engine]


made = partial(stack, LAYERS)


def opened(policy: Any, *, updates: Any = "at-step", budget: str = "60%") -> Opened:
    """A stack with its optimizer and its engine."""
    model, optimizer = made()
    options: Any = {"budget": budget, "policy": policy, "updates": updates}
    return model, optimizer, nearstep.offload(model, optimizer, **options)


def step(model: nn.Module, optimizer: Any) -> float:
    optimizer.zero_grad()
    loss = model(X).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def check_usable(found: Opened) -> None:
    """It trains on as if nothing had been."""
    plain, plain_optimizer = made()
    model, optimizer, engine = found
    for _ in range(2):
        assert step(model, optimizer) == step(plain, plain_optimizer)
    assert bits(model.state_dict()) == bits(plain.state_dict())
    assert engine.report().peak <= engine.report().budget
    engine.close()


def held_by(engine: Engine) -> int:
    """Bytes of memory, and of gradients, that its parameters have."""
    found = [copy for copy in engine._space.copies if copy not in engine._space._direct]
    gradients = sum(copy.charge(copy.raw_gradient()) for copy in found)
    return gradients + sum(copy.storage.nbytes() for copy in found if copy.storage is not None)


policies = pytest.mark.parametrize("policy", ["prefetch", "on-demand", "memferry"])


def by_parameters(model: nn.Module, parameters: dict[str, Tensor], x: Tensor = X) -> Tensor:
    return functional_call(model, parameters, (x,)).square().mean()


TRANSFORMS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "grad": lambda model, own: torch.func.grad(partial(by_parameters, model))(own),
    "grad of inputs": lambda model, _: torch.func.grad(lambda x: model(x).mean())(X),
    "jacrev": lambda model, _: torch.func.jacrev(model)(X),
    "jvp": lambda model, _: torch.func.jvp(model, (X,), (X,)),
    "vjp": lambda model, own: torch.func.vjp(partial(by_parameters, model), own),
    "vmap of grad": lambda model, own: torch.func.vmap(
        torch.func.grad(partial(by_parameters, model)), in_dims=(None, 0)
    )(own, X[:, None]),
    "script": lambda model, _: torch.jit.script(model),
    "script of a layer": lambda model, _: torch.jit.script(model[1]),
    "trace": lambda model, _: torch.jit.trace(model, (X,)),
    "export": lambda model, _: torch.export.export(model, (X,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_keeps_or_differentiates_tensors_otherwise_is_refused(name: str) -> None:
    """A transform used to end in SIGSEGV."""
    policy = ("prefetch", "memferry")[list(TRANSFORMS).index(name) % 2]
    found = opened(policy)
    with pytest.raises((TransformError, ParameterError) if name == "export" else TransformError):
        TRANSFORMS[name](found[0], dict(found[0].named_parameters()))
    check_usable(found)


def test_vmap_over_inputs_has_equal_bits() -> None:
    alike(lambda model, *_: torch.func.vmap(model)(X), made, budget="200%")


@pytest.mark.parametrize("policy", ["prefetch", "memferry"])
def test_a_compiled_step_has_equal_bits(policy: str) -> None:
    def use(model, optimizer, _):
        compiled = torch.compile(partial(step, model, optimizer), backend="eager")
        return [compiled() for _ in range(3)]

    alike(use, made, budget="60%", policy=policy)


SAVED: dict[str, list[Any]] = {
    "nothing": [],
    "products": [torch.ops.aten.addmm.default],
    "activations": [torch.ops.aten.tanh.default],
    "views": [torch.ops.aten.t.default],
}


@pytest.mark.parametrize("policy", ["prefetch", "memferry"])
@pytest.mark.parametrize("saved", SAVED)
def test_selective_checkpointing_has_equal_bits(saved: str, policy: str) -> None:
    """Its modes, which give again what they have seen, used to see what the engine does."""
    contexts = partial(create_selective_checkpoint_contexts, SAVED[saved])

    def use(model, optimizer, _):
        for _ in range(3):
            optimizer.zero_grad()
            out = X
            for number in range(0, LAYERS, 2):
                block = nn.Sequential(model[number], nn.Tanh(), model[number + 1])
                out = checkpoint(block, out, use_reentrant=False, context_fn=contexts)
            out.square().mean().backward()
            optimizer.step()

    alike(use, made, budget="200%", policy=policy)
    refused = pytest.raises(BudgetError, match="something refers to")  # these modes, to parameters
    with refused if saved == "views" else nullcontext():
        alike(use, made, budget="40%", policy=policy)
    # torch's checkpoint saves tensors until its generator is gone, which the exception refers to.
    del refused
    gc.collect()


@policies
def test_safetensors(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model, optimizer, engine = opened(policy)
    plain, plain_optimizer = made()
    for one, its in ((model, optimizer), (plain, plain_optimizer)):
        step(one, its)
    expected = bits(plain.state_dict())
    save_file(model.state_dict(), path)
    assert bits(load_file(path)) == expected
    save_model(model, str(path))
    assert bits(load_file(path)) == expected
    with pytest.raises(ParameterError, match=r"model\.state_dict\(\)"):
        save_file(dict(model.named_parameters()), path)
    assert bits({name: each.clone() for name, each in model.named_parameters()}) == expected
    engine.close()
    save_file(dict(model.named_parameters()), path)
    assert bits(load_file(path)) == expected


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    def make() -> Made:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).to(COMPUTE)
        model[2].weight = model[0].weight
        return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=GOLDEN)

    path = tmp_path / "model.safetensors"
    model, optimizer = make()
    nearstep.offload(model, optimizer, budget="200%")
    before = model.state_dict()
    saved = bits(before)
    step(model, optimizer)
    for holder in (model, nn.ModuleDict({"inner": model})):
        after = holder.state_dict()
        first, _, last = after.values()
        assert first is last
        assert bits([*after.values()]) != [*saved.values()]
    assert bits(before) == saved
    save_model(model, str(path))
    found = make()[0]
    assert load_model(found, path) == (set(), [])
    assert bits(found.state_dict()) == bits(model.state_dict())


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage"])
def test_addresses_of_what_comes_and_goes_are_refused(name: str) -> None:
    found = opened("prefetch")
    with pytest.raises(ParameterError, match=r"p\.detach"):
        getattr(found[0][0].weight, name)()
    kept = found[0][0].weight.detach()
    address = kept.data_ptr()
    found[0](X)
    assert kept.data_ptr() == address
    del kept
    check_usable(found)


@policies
def test_swapped_parameters_are_refused(policy: str) -> None:
    found = opened(policy)
    other = nn.Parameter(torch.zeros(WIDTH, WIDTH, device=COMPUTE))
    torch.utils.swap_tensors(found[0][0].weight, other)
    with pytest.raises(ChangedModelError, match=r"0\.weight"):
        found[0](X)
    torch.utils.swap_tensors(found[0][0].weight, other)
    assert bits(found[0](X)) == bits(made()[0](X))


@policies
def test_an_engine_with_a_swapped_parameter_can_be_closed(policy: str) -> None:
    model, optimizer, engine = opened(policy)
    plain, its = made()
    for each in ((model, optimizer), (plain, its)):
        step(*each)
        each[0](X).square().mean().backward()
    x = X.clone().requires_grad_()
    loss = model[0](x).sum()
    other = nn.Parameter(torch.ones(WIDTH, WIDTH, device=COMPUTE))
    torch.utils.swap_tensors(model[0].weight, other)
    with pytest.raises(ChangedModelError, match=r"0\.weight was replaced"):
        engine.close()
    with pytest.raises(ParameterError, match=r"0\.weight must be in the memory"):
        torch.autograd.grad(loss, x)
    assert engine.closed
    engine.close()
    with torch.no_grad():
        plain[0].weight.fill_(1)
    plain[0].weight.grad = None
    states = [bits([m.state_dict(), [p.grad for p in m.parameters()]]) for m in (model, plain)]
    assert states[0] == states[1]
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    with nearstep.offload(model, optimizer, budget="60%"):
        assert step(model, optimizer) == step(plain, its)
    assert bits(model.state_dict()) == bits(plain.state_dict())


@pytest.mark.parametrize("policy", ["prefetch", "memferry"])
@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.skipif(COMPUTE.type == "accel", reason="it has no convolutions")
def test_channels_last_in_training_has_equal_bits(policy: str, when: int) -> None:
    def make() -> Made:
        torch.manual_seed(3)
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        model = nn.Sequential(*layers).to(COMPUTE)
        return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=GOLDEN)

    def use(model, optimizer, _):
        for number in range(3):
            if number == when:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            model(IMAGES).square().mean().backward()
            if number == when + 1:  # between backward and step
                model.to(memory_format=torch.contiguous_format)
            optimizer.step()
        return [each.stride() for each in model.parameters()]

    alike(use, make, budget="180%", policy=policy)


def test_data_of_a_weight_beside_a_bias_has_equal_bits() -> None:
    def use(model, optimizer, _):
        step(model, optimizer)
        x = X.clone().requires_grad_()
        functional.linear(x, model[0].weight.data, model[0].bias).square().sum().backward()
        return x.grad

    alike(use, made, budget="100%")


@pytest.mark.parametrize(("budget", "mixes"), [("42%", False), ("70%", True), ("300%", True)])
def test_a_parameter_with_an_offset_has_equal_bits(budget: str, mixes: bool) -> None:
    def use(model, optimizer, _):
        found = []
        for start in (4, 0):
            large = torch.randn(WIDTH + 4, WIDTH, generator=torch.Generator().manual_seed(3))
            large = large.to(COMPUTE)
            model[0].weight.data = large[start : start + WIDTH]
            x = X.clone().requires_grad_()
            loss = (large @ model[0].weight).square().mean() if mixes else torch.zeros(())
            del large
            (model(x).square().mean() + loss.to(COMPUTE)).backward()
            found.append(x.grad)
            optimizer.step()
        return found

    alike(use, made, budget=budget)


def test_mutation_of_saved_parameters_that_torch_allows_has_equal_bits() -> None:
    def use(model, *_):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = X.clone().requires_grad_()
            loss = model(x).square().mean()
            with torch.no_grad():
                model[1].weight.mul_(2)
            loss.backward()
        return x.grad

    alike(use, made, budget="300%")


# Budgets


def test_a_parameter_in_larger_memory_is_charged_for_its_own_once_it_is_fetched() -> None:
    model, optimizer = made()
    model[0].weight = nn.Parameter(torch.randn(10 * WIDTH, WIDTH, device=COMPUTE)[:WIDTH])
    optimizer = nearstep.optim.AdamW(model.parameters(), device=GOLDEN)
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    with pytest.raises(BudgetError) as raised:
        nearstep.offload(model, optimizer, budget=1)
    assert raised.value.expected == 2 * layer
    with nearstep.offload(model, optimizer, budget=2 * layer) as engine:
        step(model, optimizer)
        assert layer < engine.report().peak <= engine.budget
    with nearstep.offload(model, optimizer, budget="100%") as engine:
        model[0].weight.data = torch.randn(3 * WIDTH, WIDTH, device=COMPUTE)[:WIDTH]
        held = held_by(engine)
        assert held >= 3 * 4 * WIDTH * WIDTH
        for _ in range(2):
            step(model, optimizer)
            assert held_by(engine) == engine._space.ledger.used
        assert engine._space.ledger.gradients == 0
        model[0].weight.grad = None
        assert [copy.gradient_bytes for copy in engine._space.copies[:2]] == [1024, 64]


def test_a_closed_engine_keeps_no_memory_but_that_of_graphs() -> None:
    model, optimizer = made()
    plain, its = made()
    first = nearstep.offload(model, optimizer, budget="40%")
    first.close()
    assert not [copy for copy in first._space.copies if copy.storage is not None]
    second = nearstep.offload(model, optimizer, budget="40%", policy="memferry")
    for each in ((model, optimizer), (plain, its)):
        step(*each)
    losses = [each(X).square().mean() for each in (model, plain)]
    second.close()
    shadow = second.shadow
    assert shadow is None or shadow.nbytes == 0
    with pytest.raises(BudgetError, match="refers to"):  # the graph does
        nearstep.offload(model, optimizer, budget="40%")
    third = nearstep.offload(model, optimizer, budget="300%")
    for each in losses:
        each.backward()
    del losses, each
    gradients = [[p.grad for p in each.parameters()] for each in (model, plain)]
    assert bits(gradients[0]) == bits(gradients[1])
    del gradients
    third.close()
    with nearstep.offload(model, optimizer, budget="60%") as fourth:
        optimizer.zero_grad()
        assert step(model, optimizer) == step(plain, its)
        assert held_by(fourth) <= fourth.budget


def test_other_memory_after_close_leaves_that_of_a_graph() -> None:
    def use(model, optimizer, engine):
        step(model, optimizer)
        optimizer.zero_grad()
        x = X.clone().requires_grad_()
        loss = model(x).square().mean()
        if engine is not None:
            engine.close()
        model[3].weight.data = torch.zeros(WIDTH, WIDTH, device=COMPUTE)
        loss.backward()
        return x.grad

    alike(use, made, budget="60%")


class Added(torch.autograd.Function):
    """A function of the user's that saves no parameter."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x + x @ weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient, x.t() @ gradient


class Adding(nn.Module):
    """A layer that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return Added.apply(x, self.weight)


def test_a_gradient_that_torch_does_not_announce_has_room_or_an_error() -> None:
    """That of an `autograd.Function`: other parameters go for it; nothing is counted above."""
    size = 4 * WIDTH * WIDTH
    for room, fits in ((2, False), (3, True)):
        torch.manual_seed(5)
        model = nn.Sequential(*(Adding() for _ in range(4))).to(COMPUTE)
        optimizer = nearstep.optim.SGD(model.parameters(), lr=1e-2, device=GOLDEN)
        with nearstep.offload(model, optimizer, budget=room * size + 200) as engine:
            loss = model(X).square().mean()
            held = [model[number].weight.detach() for number in range(2)]
            with nullcontext() if fits else pytest.raises(BudgetError, match="backward of"):
                loss.backward()
            del held, loss
            step(model, optimizer)
            assert size < engine.report().peak <= engine.budget


def test_larger_memory_for_a_parameter_has_room_or_an_error() -> None:
    model, optimizer, engine = opened("prefetch")
    weight = model[0].weight
    large = torch.zeros(LAYERS * WIDTH, WIDTH, device=COMPUTE)[:WIDTH]
    with pytest.raises(BudgetError, match=r"other memory of 0\.weight"):
        weight.data = large
    check_usable((model, optimizer, engine))


# Updates in backward


def test_a_backward_that_failed_and_is_called_again_is_refused_by_name() -> None:
    """It used to end in torch's error about an in-place operation."""
    model, optimizer, engine = opened("prefetch", updates="in-backward")
    step(model, optimizer)
    checkpoints = model.state_dict(), optimizer.state_dict()
    armed = [True]

    def fail(_: Tensor) -> None:
        if armed and armed.pop():
            raise OSError("in the user's program")

    optimizer.zero_grad()
    hidden = model[:2](X)
    hidden.register_hook(fail)
    loss = model[2:](hidden).square().mean()
    with pytest.raises(OSError, match="user's program"):
        loss.backward(retain_graph=True)
    for _ in range(2):
        with pytest.raises(EarlyUpdateError):
            loss.backward(retain_graph=True)
    del loss, hidden
    model.load_state_dict(checkpoints[0])
    optimizer.load_state_dict(checkpoints[1])
    plain, plain_optimizer = made()
    step(plain, plain_optimizer)
    assert step(model, optimizer) == step(plain, plain_optimizer)
    assert bits(model.state_dict()) == bits(plain.state_dict())
    engine.close()
