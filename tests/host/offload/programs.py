"""Random programs of training, made beside each other with plain and with offloaded models."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import nearstep
from nearstep.errors import NearstepError
from nearstep.torch.errors import EarlyUpdateError
from nearstep.torch.offload import Engine
from nearstep.torch.offload.errors import BudgetError

from .models import KINDS, WIDTH
from .training import COMPUTE, GOLDEN, OPTIMIZERS, bits, computes, groups

MODELS = ("stack", "tied", "functional", "frozen", "checkpoint", "reentrant", "custom")
POLICIES = ("prefetch", "on-demand", "memferry")


class InjectedError(Exception):
    """Raised by a hook of a program."""


class Interrupted(BaseException):
    """The same, of what `except Exception` lets pass."""


class Passing(TorchDispatchMode):
    """A mode of the program that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    """The same, of functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass
class Trainee:
    """A model with its optimizer, and its engine if it is offloaded."""

    model: nn.Module
    optimizer: Any
    engine: Engine | None = None
    average: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """How one model is trained, within a share of the smallest budget."""

    kind: str
    optimizer: str
    policy: str
    updates: str
    share: float
    seed: int


def trainee(setting: Setting) -> Trainee:
    """A new model, plain."""
    torch.manual_seed(setting.seed)
    model = KINDS[setting.kind]().to(COMPUTE)
    return Trainee(model, OPTIMIZERS[setting.optimizer](groups(model), GOLDEN))


def offloaded(setting: Setting, found: Trainee) -> None:
    """Offload a model within a share of the smallest budget there is."""
    options: Any = {"policy": setting.policy, "updates": setting.updates}
    try:
        found.engine = nearstep.offload(found.model, found.optimizer, budget=1, **options)
    except BudgetError as error:
        budget = int(error.expected * setting.share)
        found.engine = nearstep.offload(found.model, found.optimizer, budget=budget, **options)


def audit(engine: Engine) -> None:
    """The budget was never exceeded, and what is counted is what there is."""
    report = engine.report()
    assert report.peak <= report.budget, f"{report.peak} of {report.budget} bytes"
    if engine.closed:
        return
    space = engine._space
    vector = torch.empty(0) if space.shadow is None else space.shadow.vector
    inside = range(vector.data_ptr(), vector.data_ptr() + vector.nbytes)
    here = vector.nbytes
    for copy in space.copies:
        if copy.storage is not None and copy not in space._direct:
            here += 0 if copy.storage.data_ptr() in inside else copy.nbytes
    gradients = [
        (copy, copy.raw_gradient()) for copy in space.copies if not copy.in_place.spares_gradient
    ]
    made = sum(g.numel() * g.element_size() for _, g in gradients if g is not None)
    assert space.ledger.parameters == here, "parameters that are counted are here, or a vector"
    reserved = sum(copy.reserved for copy in space.copies)
    assert space.ledger.gradients == made + reserved + space.sent, "gradients as well"


Act = Callable[[Sequence[Trainee], random.Random], Any]
ACTS: dict[str, Act] = {}


def act(function: Act) -> Act:
    """Make a function one of what a program does."""
    ACTS[function.__name__] = function
    return function


def _input(choose: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(choose.randrange(2**30))
    return torch.randn(4, WIDTH, generator=generator).to(COMPUTE)


def _loss(one: Trainee, choose: random.Random) -> Tensor:
    return one.model(_input(choose)).square().mean()


@act
def steps(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """Plain steps."""
    one = choose.choice(all_)
    losses = []
    for _ in range(choose.randint(1, 2)):
        one.optimizer.zero_grad()
        loss = _loss(one, choose)
        loss.backward()
        one.optimizer.step()
        losses.append(loss.item())
    return losses


@act
def accumulates(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """Several backward passes, and a step or none."""
    one = choose.choice(all_)
    if choose.random() < 0.7:
        one.optimizer.zero_grad()
    for _ in range(choose.randint(1, 3)):
        _loss(one, choose).backward()
        if choose.random() < 0.3:
            with torch.no_grad():
                one.model(_input(choose))
    if choose.random() < 0.7:
        one.optimizer.step()


@act
def closure(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """A step with a closure."""
    one = choose.choice(all_)
    x, passes = _input(choose), choose.randint(1, 2)

    def again() -> Any:
        for _ in range(passes):
            one.optimizer.zero_grad()
            loss = one.model(x).square().mean()
            loss.backward()
        return loss.item()

    return one.optimizer.step(again)


@act
def evaluates(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """Forward passes without gradients, of one model or of another between its passes."""
    one, other = choose.choice(all_), choose.choice(all_)
    around = choose.choice([torch.no_grad, torch.inference_mode, nullcontext])
    with around():
        seen = one.model(_input(choose)).sum().item()
    one.optimizer.zero_grad()
    loss = _loss(one, choose)
    with around():
        seen += other.model(_input(choose)).sum().item()
    loss.backward()
    with around():
        seen += other.model(_input(choose)).sum().item()
    one.optimizer.step()
    return seen


@contextmanager
def _failing(model: nn.Module, where: str, at: int, kind: type[BaseException]) -> Iterator[None]:
    """Have the forward of a module raise, or the backward of its result."""
    modules = [each for each in model.modules() if next(each.children(), None) is None]
    module = (modules or [model])[at % max(1, len(modules))]

    def fail(*_: Any) -> None:
        raise kind

    def after(_: nn.Module, __: Any, result: Any) -> None:
        if where == "forward":
            raise kind
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(fail)

    handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@act
def fails(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """An exception in forward, in backward or in a hook of a gradient; then anything."""
    one = choose.choice(all_)
    if choose.random() < 0.5:
        one.optimizer.zero_grad()
    kind = choose.choice([InjectedError, Interrupted])
    where, at, keeps = choose.choice(["forward", "backward"]), choose.randrange(8), False
    loss = None
    try:
        with _failing(one.model, where, at, kind):
            loss = _loss(one, choose)
            loss.backward(retain_graph=True)
    except (InjectedError, Interrupted) as error:
        if choose.random() < 0.5:
            KEPT.append(error)
        keeps = choose.random() < 0.5
    if not keeps:
        one.optimizer.zero_grad()


KEPT: list[BaseException] = []
"""Exceptions that a program keeps, with all frames that they came through."""


@act
def retries(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """A backward that fails, and is called again on the same graph."""
    one = choose.choice(all_)
    one.optimizer.zero_grad()
    armed = [True]

    def once(gradient: Tensor) -> None:
        if armed and armed.pop():
            raise InjectedError

    modules = [each for each in one.model.modules() if next(each.children(), None) is None]
    module = (modules or [one.model])[choose.randrange(8) % max(1, len(modules))]

    def after(_: nn.Module, __: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad and not result.is_leaf:
            result.register_hook(once)

    handle = module.register_forward_hook(after)
    try:
        loss = _loss(one, choose)
        for _ in range(3):
            try:
                loss.backward(retain_graph=True)
            except InjectedError:
                one.optimizer.zero_grad()
    finally:
        handle.remove()
    del loss
    if choose.random() < 0.7:
        one.optimizer.step()


def _made(one: Trainee, choose: random.Random) -> Tensor:
    """What is input to another model."""
    half = one.model(_input(choose)).reshape(-1)[:32]
    return torch.cat((half, half)).reshape(4, WIDTH)


@act
def adversarial(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """A GAN's loop: one model through another one, whose step is its own."""
    one, other = choose.choice(all_), choose.choice(all_)
    other.optimizer.zero_grad()
    made = _made(one, choose)
    other.model(made.detach()).square().mean().backward()
    if other is not one:
        other.optimizer.step()
    one.optimizer.zero_grad()
    if choose.random() < 0.5 and other is not one:
        made = _made(one, choose)
        other.model(made).mean().backward()
        one.optimizer.step()
    other.optimizer.zero_grad()


@act
def jointly(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """An actor-critic's loop: one loss of two models, a step of each."""
    one, other = choose.choice(all_), choose.choice(all_)
    x = _input(choose)
    for each in {id(one): one, id(other): other}.values():
        each.optimizer.zero_grad()
    value = other.model(x).mean()
    loss = one.model(x).square().mean() * value.detach() + value.square()
    loss.backward()
    for each in {id(one): one, id(other): other}.values():
        each.optimizer.step()
    return loss.item()


@act
def sharpness(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """SAM: a step from where the loss is largest nearby."""
    one = choose.choice(all_)
    one.optimizer.zero_grad()
    x = _input(choose)
    one.model(x).square().mean().backward()
    moved = []
    with torch.no_grad():
        for p in one.model.parameters():
            if p.grad is not None:
                moved.append((p, p.grad * 0.05))
                p.add_(moved[-1][1])
    one.optimizer.zero_grad()
    one.model(x).square().mean().backward()
    with torch.no_grad():
        for p, by in moved:
            p.sub_(by)
    one.optimizer.step()


@act
def averages(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """EMA: an average of parameters beside a step."""
    one = choose.choice(all_)
    steps([one], choose)
    with torch.no_grad():
        for name, p in one.model.named_parameters():
            known = one.average.get(name)
            if known is None:
                one.average[name] = p.detach().clone()
            else:
                known.lerp_(p.detach(), 0.1)
    return bits(one.average)


@act
def freezes(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """Some parameters are frozen, or thawed."""
    one = choose.choice(all_)
    owned = [p for group in one.optimizer.param_groups for p in group["params"]]
    for p in choose.sample(owned, min(2, len(owned))):
        p.requires_grad_(not p.requires_grad)


@act
def grads_for_a_caller(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """`torch.autograd.grad`, and a penalty of gradients."""
    one = choose.choice(all_)
    wanted = [p for p in one.model.parameters() if p.requires_grad]
    if not wanted:
        return None
    one.optimizer.zero_grad()
    x = _input(choose).requires_grad_()
    loss = one.model(x).square().mean()
    if choose.random() < 0.5:
        return bits(torch.autograd.grad(loss, wanted, allow_unused=True))
    (by,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
    if by is not None and by.requires_grad:
        by.square().sum().backward()
        one.optimizer.step()
    return None


@act
def reads(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """Gradients, state, views that are kept for a while."""
    one = choose.choice(all_)
    what = choose.choice(["gradients", "state", "view", "norm"])
    if what == "state":
        return bits(one.model.state_dict())
    if what == "view":
        parameters = list(one.model.parameters())
        held = choose.choice(parameters).detach()
        steps([one], choose)
        return held.shape
    one.optimizer.zero_grad()
    _loss(one, choose).backward()
    if what == "norm":
        norm = nn.utils.clip_grad_norm_(one.model.parameters(), 0.1)
        one.optimizer.step()
        return norm.item()
    return [None if p.grad is None else bits(p.grad) for p in one.model.parameters()]


@act
def in_modes(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """Anything with modes of the program around it, which it may leave by an exception."""
    name = choose.choice([each for each in ACTS if each != "in_modes"])
    with ExitStack() as stack:
        for _ in range(choose.randint(1, 2)):
            stack.enter_context(choose.choice([Passing, PassingFunctions])())
        return ACTS[name](all_, choose)


@act
def graphs(all_: Sequence[Trainee], choose: random.Random) -> Any:
    """Two graphs at once, backward in any order; one may never have any."""
    one, other = choose.choice(all_), choose.choice(all_)
    for each in (one, other):
        each.optimizer.zero_grad()
    losses = [_loss(one, choose), _loss(other, choose), _loss(one, choose)]
    choose.shuffle(losses)
    for _ in range(choose.randint(0, 3)):
        losses.pop().backward()
    del losses
    if choose.random() < 0.5:
        one.optimizer.step()


def last(all_: Sequence[Trainee], _: random.Random) -> Any:
    """A use of each model: where backward has updated it and no step came, that is refused."""
    return [bits(one.model.state_dict()) for one in all_]


def check_program(seed: int, length: int = 8) -> Counter[str]:
    """Make a program with plain and with offloaded models: bits are equal, and budgets held.

    Returns
    -------
    Counter[str] : how much was compared, and refused, by the name of the error.
    """
    choose = random.Random(seed)
    settings = [
        Setting(
            kind=choose.choice([each for each in MODELS if computes(each)]),
            optimizer=choose.choice(list(OPTIMIZERS)),
            policy=choose.choice(POLICIES),
            updates=choose.choice(("at-step", "at-step", "in-backward")),
            share=choose.choice((1.0, 1.1, 1.5, 2.5)),
            seed=choose.randrange(2**30),
        )
        for _ in range(choose.randint(1, 3))
    ]
    settings = [  # what `autograd.Function` saves torch alone checks, by an error of its own
        replace(each, updates="at-step") if each.kind == "custom" else each for each in settings
    ]
    plain, found = [trainee(each) for each in settings], [trainee(each) for each in settings]
    for setting, each in zip(settings, found, strict=True):
        offloaded(setting, each)
    counts: Counter[str] = Counter()
    done: list[str] = []
    try:
        for _ in range(length):
            name, number = choose.choice(list(ACTS)), choose.randrange(2**30)
            done.append(name)
            counts["acts"] += 1
            _both(ACTS[name], number, plain, found, counts)
            for each in found:
                assert each.engine is not None
                audit(each.engine)
            assert _get_current_dispatch_mode_stack() == []
            assert _len_torch_function_stack() == 0
        _both(last, 0, plain, found, counts)
        for one, other in zip(plain, found, strict=True):
            assert other.engine is not None
            other.engine.close()
            assert bits(other.model.state_dict()) == bits(one.model.state_dict())
            assert bits(other.optimizer.state_dict()) == bits(one.optimizer.state_dict())
            counts["compared"] += 1
    except BaseException as error:
        error.add_note(f"seed {seed}: {settings}, {done}")
        raise
    finally:
        KEPT.clear()
    return counts


def _both(
    does: Act, number: int, plain: Sequence[Trainee], found: Sequence[Trainee], counts: Counter[str]
) -> None:
    """Do the same with both; what is refused of the offloaded ones leaves them with what the plain
    ones had before."""
    try:
        seen = _done(does, number, found)
    except NearstepError as error:
        counts[type(error).__name__] += 1
        error.__traceback__ = None
        for one, other in zip(plain, found, strict=True):
            one.optimizer.zero_grad()
            with suppress(EarlyUpdateError):
                other.optimizer.zero_grad()
            other.average = {name: each.clone() for name, each in one.average.items()}
            for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
                q.requires_grad_(p.requires_grad)
            other.model.load_state_dict(one.model.state_dict())
            other.optimizer.load_state_dict(one.optimizer.state_dict())
            other.optimizer.zero_grad()
        return
    expected = _done(does, number, plain)
    assert seen == expected, f"{seen}, not {expected}"
    counts["compared"] += 1


def _done(does: Act, number: int, all_: Sequence[Trainee]) -> Any:
    """What a program gets: a result, or an error of torch's."""
    try:
        return does(all_, random.Random(number))
    except NearstepError:
        raise
    except Exception as error:
        return type(error), str(error)
