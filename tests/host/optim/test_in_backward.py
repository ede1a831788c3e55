"""Updates in backward without an engine: the bits of updates at the step, or a typed error before
anything is touched, after which a step can be made."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nearstep
from nearstep.torch import in_backward
from nearstep.torch.errors import (
    EarlyUpdateError,
    GradientError,
    HyperparameterError,
    InterruptedStepError,
    ParameterError,
    UnsupportedOptionError,
)
from nearstep.torch.in_backward import UsedGradient

from ..driver.conftest import chosen
from ..offload.models import KINDS, WIDTH, Stack, Unlucky
from ..offload.training import bits
from ..overflow.jobs import Drives, images
from .conftest import like_torch

SEED = 51407
DEVICES = {
    "host": "host:",
    "golden": "golden:axdimm?memory_bytes=4MiB",
    "host, drives": "host: on drives",
    "golden, drives": "golden:axdimm?memory_bytes=4MiB on drives",
    "dimm": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=4MiB&in_place=no",
    "card": "golden:smartssd?memory_bytes=4MiB",
    "sim": "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&memory=ideal&fu=native",
    "dimm, drives": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=4MiB on drives",
}
DRIVES = {name for name in DEVICES if name.endswith("drives")}
IN_DEPTH = {"dimm", "card", "sim", "golden, drives", "dimm, drives"}
MEMORY = {"memory": 16 << 10}
"""With drives: for the state of the largest parameter."""

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are updated alone, and smaller parameters together."""
    monkeypatch.setattr(in_backward, "TOGETHER", WIDTH * WIDTH)


class Training:
    """A model and its optimizer, with updates in backward or at the step.

    Attributes
    ----------
    seen : losses, and what else a program compares.
    early : gradients that were used in backward.
    """

    def __init__(self, url: str, *, early: bool, kind: str = "stack", torchs: bool = False) -> None:
        torch.manual_seed(SEED)
        self.generator = torch.Generator().manual_seed(SEED)
        unlucky = nn.Sequential(Stack(2), Unlucky(), Stack(2))
        self.model: Any = KINDS[kind]() if kind in KINDS else unlucky
        named = [p for n, p in self.model.named_parameters() if not n.startswith("frozen.weight")]
        groups = [
            {"params": [p for p in named if p.dim() > 1], "lr": torch.tensor(2e-2)},
            {"params": [p for p in named if p.dim() < 2]},
        ]
        kind_of = torch.optim.AdamW if torchs else nearstep.optim.AdamW
        url, _, self.on_drives = url.partition(" on ")
        options: dict[str, Any] = {"device": url, "updates": "in-backward" if early else "at-step"}
        if self.on_drives:
            options |= {"drives": Drives(images(2, 2000)).store, **MEMORY}
        self.optimizer: Any = kind_of(groups, lr=1e-2, **({"fused": True} if torchs else options))
        self.seen: list[Any] = []
        self.early = 0

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def loss(self) -> Tensor:
        x = torch.randn(4, WIDTH, generator=self.generator)
        return self.model(x).float().square().mean()

    def backward(self) -> None:
        loss = self.loss()
        self.seen.append(loss.item())
        loss.backward()
        self.early += sum(isinstance(p.grad, UsedGradient) for p in self.parameters)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def steps(self) -> None:
        for _ in range(2):
            self.step()

    def state(self) -> Any:
        return bits([self.seen, self.model.state_dict(), self.optimizer.state_dict()["state"]])


def schedule(each: Training) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        each.step()
        scheduler.step()


def evaluate(each: Training) -> None:
    for _ in range(2):
        each.step()
        with torch.no_grad():
            each.seen.append(each.loss().item())


def closures(each: Training) -> None:
    def closure() -> float:
        each.optimizer.zero_grad()
        each.backward()
        return each.seen[-1]

    each.seen += [each.optimizer.step(closure) for _ in range(2)]


def accumulate(each: Training) -> None:
    for _ in range(2):
        each.optimizer.zero_grad()
        with each.optimizer.accumulate():
            each.backward()
            each.backward()
        each.backward()
        each.optimizer.step()


def zeros(each: Training) -> None:
    for _ in range(2):
        each.step()
        each.optimizer.zero_grad(set_to_none=False)
        each.backward()
        each.optimizer.step()
        each.optimizer.zero_grad(set_to_none=False)
        each.optimizer.step()  # of zeros
        each.model.zero_grad()


def some_have_none(each: Training) -> None:
    fixed = each.parameters[1]
    for wanted in (True, False, True, True):
        fixed.requires_grad_(wanted)
        each.step()


def thawed(each: Training) -> None:
    for p in each.parameters[:3]:
        p.requires_grad_(False)
    each.step()
    for p in each.parameters[:3]:
        p.requires_grad_(True)
    each.steps()


def by_hand(each: Training) -> None:
    for _ in range(2):
        each.optimizer.zero_grad()
        gradients = torch.autograd.grad(each.loss(), each.parameters[:3])
        for p, gradient in zip(each.parameters, gradients, strict=False):
            p.grad = gradient
        each.backward()
        each.optimizer.step()


def late_group(each: Training) -> None:
    each.optimizer.zero_grad()
    each.backward()
    more = torch.linspace(-1, 1, WIDTH * WIDTH).requires_grad_()
    more.grad = torch.ones_like(more)
    each.optimizer.add_param_group({"params": [more], "lr": 0.5})
    each.optimizer.step()
    each.optimizer.zero_grad()
    more.square().sum().backward()
    each.early += isinstance(more.grad, UsedGradient)
    each.backward()
    each.optimizer.step()
    each.seen.append(more)


def checkpoints(each: Training) -> None:
    each.step()
    saved = copy.deepcopy([each.model.state_dict(), each.optimizer.state_dict()])
    each.steps()
    each.optimizer.zero_grad()
    each.backward()  # is never followed by a step
    each.model.load_state_dict(saved[0])
    each.optimizer.load_state_dict(saved[1])
    each.steps()


def copies(each: Training) -> None:
    if each.on_drives:
        pytest.skip("an optimizer with drives cannot be copied")
    each.step()
    for copied in (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))):
        each.model, each.optimizer = copied((each.model, each.optimizer))
        each.steps()


def failed(each: Training) -> None:
    """A step after backward has failed is of the gradients that there are, as in torch."""
    for where in ("backward", None, "forward"):
        each.optimizer.zero_grad()
        each.model[1].where = where
        try:
            each.backward()
        except OSError:
            each.seen.append(where)
            each.early += sum(isinstance(p.grad, UsedGradient) for p in each.parameters)
        each.optimizer.step()
    each.model[1].where = None
    each.steps()


def layouts(each: Training) -> None:
    for p in each.parameters[:2]:
        p.data = p.data.t().contiguous().t()
    each.steps()


KIND_OF = {failed: "unlucky"}
PROGRAMS: list[Callable[[Training], None]] = [
    schedule,
    evaluate,
    closures,
    accumulate,
    zeros,
    some_have_none,
    thawed,
    by_hand,
    late_group,
    checkpoints,
    copies,
    failed,
    layouts,
]


def compared(url: str, program: Callable[[Training], None], kind: str = "stack") -> int:
    """Run a program with updates at the step and in backward; early updates."""
    plain, early = (Training(url, early=early, kind=kind) for early in (False, True))
    for each in (plain, early):
        program(each)
        each.optimizer.zero_grad()
    assert early.state() == plain.state()
    assert plain.early == 0
    print(f"seed {SEED}: {early.early} updates in backward")
    return early.early


@pytest.mark.parametrize("device", chosen(DEVICES, IN_DEPTH))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_have_the_bits_of_updates_at_the_step(program: Any, device: str) -> None:
    assert compared(DEVICES[device], program, KIND_OF.get(program, "stack")) > 0


def given_up(each: Training) -> None:
    """Backward is followed by no step, and there are a step without gradients, and others."""
    each.step()
    each.optimizer.zero_grad()
    each.backward()
    each.optimizer.zero_grad()
    each.optimizer.step()
    each.steps()


@pytest.mark.parametrize("device", sorted(DRIVES))
def test_zero_grad_rolls_back_updates_on_drives(device: str) -> None:
    assert compared(DEVICES[device], given_up) > 0


@pytest.mark.parametrize("device", chosen(DEVICES, IN_DEPTH | DRIVES))
@pytest.mark.parametrize("kind", KINDS)
def test_models_have_the_bits_of_updates_at_the_step(kind: str, device: str) -> None:
    assert compared(DEVICES[device], schedule, kind) > 0


@like_torch
def test_bits_are_those_of_torch() -> None:
    both = [Training("host:", early=True), Training("", early=False, torchs=True)]
    for each in both:
        schedule(each)
    assert both[0].state() == both[1].state()
    assert both[0].early > 0


# What is refused


def scaler_step(each: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(each.optimizer)


def unscale(each: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(each.optimizer)


def slower(each: Training) -> None:
    each.optimizer.param_groups[1]["lr"] = 1e-3
    try:
        each.optimizer.step()
    finally:
        each.optimizer.param_groups[1]["lr"] = 1e-2


def slower_in_place(each: Training) -> None:
    each.optimizer.param_groups[0]["lr"].mul_(0.5)
    try:
        each.optimizer.step()
    finally:
        each.optimizer.param_groups[0]["lr"].mul_(2.0)


def another(each: Training) -> None:
    torch.optim.SGD(each.parameters, lr=0.1).step()


BETWEEN: dict[str, tuple[str, Callable[[Training], object]]] = {
    "zero_grad": (r"zero_grad\(\) is called before step", lambda e: e.optimizer.zero_grad()),
    "zeros": (r"zero_grad\(\)", lambda e: e.optimizer.zero_grad(set_to_none=False)),
    "state_dict": ("checkpoint is called before step", lambda e: e.optimizer.state_dict()),
    "pickle": ("pickle the optimizer", lambda e: pickle.dumps(e.optimizer)),
    "deepcopy": ("copy", lambda e: copy.deepcopy(e.optimizer)),
    "clip by norm": ("norm", lambda e: nn.utils.clip_grad_norm_(e.parameters, 1.0)),
    "clip by value": ("clamp", lambda e: nn.utils.clip_grad_value_(e.parameters, 1.0)),
    "unscale": ("non_finite_check", unscale),
    "options": ("options", slower),
    "options in place": ("options", slower_in_place),
    "another optimizer": ("add_", another),
    "sum of gradients": ("sum", lambda e: e.parameters[0].grad.sum()),
    "a second backward": ("add_", lambda e: e.loss().backward()),
}
"""Between backward and the step: what the error says, and a call that changes nothing."""

AFTER = {
    "a second step": ("step.. is called without zero_grad", lambda e: e.optimizer.step()),
    "no zero_grad": ("add_", lambda e: e.loss().backward()),
    "clip by norm": ("norm", lambda e: nn.utils.clip_grad_norm_(e.parameters, 1.0)),
}
"""After the step, until gradients are reset."""


@pytest.mark.parametrize("device", ["host:", DEVICES["golden"]])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_refused_call_changes_nothing_and_training_goes_on(device: str, is_after: bool) -> None:
    plain = Training(device, early=False)
    plain.steps()
    checked = 0
    for text, call in (AFTER if is_after else BETWEEN).values():
        each = Training(device, early=True)
        each.optimizer.zero_grad()
        each.backward()
        if is_after:
            each.optimizer.step()
        before, at = bits([*each.model.parameters()]), each.generator.get_state()
        with pytest.raises(EarlyUpdateError, match=text):
            call(each)
        each.generator.set_state(at)
        assert bits([*each.model.parameters()]) == before
        if not is_after:
            each.optimizer.step()
        each.step()
        each.optimizer.zero_grad()
        plain.optimizer.zero_grad()
        assert each.state() == plain.state()
        checked += 1
    assert checked == len(AFTER if is_after else BETWEEN)


def changed(each: Training) -> None:
    with torch.no_grad():
        each.parameters[0].mul_(2.0)
    each.optimizer.step()


def reset(each: Training) -> None:
    each.model.zero_grad()
    each.optimizer.step()


def reset_and_again(each: Training) -> None:
    each.model.zero_grad()
    each.loss().backward()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (changed, "was changed before step"),
        (reset, "reset or set before step"),
        (reset_and_again, "another backward"),
        (scaler_step, "GradScaler"),
    ],
)
def test_what_cannot_be_undone_is_refused_until_a_checkpoint_is_loaded(
    call: Callable[[Training], object], text: str
) -> None:
    plain, each = Training("host:", early=False), Training("host:", early=True)
    for one in (plain, each):
        one.step()
        one.optimizer.zero_grad()
    saved = copy.deepcopy([each.model.state_dict(), each.optimizer.state_dict()])
    at = each.generator.get_state()
    each.backward()
    with pytest.raises(EarlyUpdateError, match=text):
        call(each)
    for _ in range(2):
        with pytest.raises((EarlyUpdateError, InterruptedStepError)):
            each.optimizer.step()
    each.model.load_state_dict(saved[0])
    each.optimizer.load_state_dict(saved[1])
    each.generator.set_state(at)
    each.seen.pop()
    for one in (plain, each):
        one.steps()
    assert each.state() == plain.state()


def test_a_graph_of_gradients_is_refused_before_the_first_update() -> None:
    each = Training("host:", early=True)
    before = bits([*each.model.parameters()])
    with pytest.warns(UserWarning, match="create_graph"), pytest.raises(EarlyUpdateError):
        each.loss().backward(create_graph=True)
    assert bits([*each.model.parameters()]) == before
    each.optimizer.zero_grad()
    each.step()
    assert each.early > 0


def test_a_gradient_that_cannot_be_used_raises_in_backward() -> None:
    table = nn.Embedding(WIDTH, WIDTH, sparse=True)
    optimizer = nearstep.optim.SGD(table.parameters(), updates="in-backward")
    before = bits(table.weight)
    with pytest.raises(GradientError, match="dense"):
        table(torch.arange(3)).sum().backward()
    optimizer.zero_grad()
    assert bits(table.weight) == before


def test_gradients_are_freed_as_they_are_used() -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def look(parameter: Tensor) -> None:
        made.append(weakref.ref(parameter.grad))
        alive.append(sum(each() is not None for each in made))

    for p in model.parameters():  # before the optimizer's hooks
        p.register_post_accumulate_grad_hook(look)
    optimizer = nearstep.optim.AdamW(model.parameters(), updates="in-backward")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).sum().backward()
        assert not any(each() for each in made)
        optimizer.step()
    assert alive == [1] * 16
    assert optimizer.traffic.elements == 16 * WIDTH * WIDTH


def test_each_gradient_can_be_clipped_by_itself_in_a_hook() -> None:
    def clip(parameter: Tensor) -> None:
        nn.utils.clip_grad_norm_([parameter], 0.01)

    found = []
    for updates in ("at-step", "in-backward"):
        torch.manual_seed(SEED)
        model = Stack(2)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clip)
        optimizer = nearstep.optim.AdamW(model.parameters(), updates=updates)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        found.append(bits(model.state_dict()))
    assert found[0] == found[1]


def test_a_second_backward_clips_by_the_global_norm() -> None:
    """Norms of the first one, whose gradients are freed, are those of the second one."""
    found, norms, seen = [], {}, []
    factor: Tensor | None = None

    def clip(parameter: Tensor) -> None:
        if factor is None:
            norms[parameter], parameter.grad = torch.linalg.vector_norm(parameter.grad), None
        else:
            parameter.grad.mul_(factor)

    for updates in ("at-step", "in-backward"):
        torch.manual_seed(SEED)
        model = Stack(2)
        if updates == "in-backward":
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(clip)
        optimizer = nearstep.optim.AdamW(model.parameters(), updates=updates)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(torch.full((2, WIDTH), step + 1.0)).square().sum()
            if updates == "at-step":
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                factor = None
                loss.backward(retain_graph=True)
                total = torch.linalg.vector_norm(
                    torch.stack([norms[p] for p in model.parameters()])
                )
                factor = (0.1 / (total + 1e-6)).clamp(max=1.0)
                seen.append(factor.item())
                loss.backward()
            optimizer.step()
        found.append(bits([model.state_dict(), optimizer.state_dict()["state"]]))
    assert found[0] == found[1]
    assert all(each < 1.0 for each in seen)


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (UnsupportedOptionError, "not known before the last", {"max_grad_norm": 1.0}),
        (HyperparameterError, "one of", {"updates": "now"}),
    ],
)
def test_options_are_refused(error: Any, text: str, options: dict[str, Any]) -> None:
    url = "golden:axdimm?scan=yes&gradient_scale=yes"
    p = torch.zeros(WIDTH, requires_grad=True)
    with pytest.raises(error, match=text):
        nearstep.optim.AdamW([p], device=url, **{"updates": "in-backward", **options})
    assert not p._post_accumulate_grad_hooks


def test_views_of_one_memory_are_refused() -> None:
    views = [each.detach().requires_grad_() for each in torch.ones(64).chunk(2)]
    with pytest.raises(ParameterError, match="memory of its own"):
        nearstep.optim.SGD(views, updates="in-backward")


def test_an_engine_has_updates_of_its_own() -> None:
    model = Stack(2)
    optimizer = nearstep.optim.AdamW(
        model.parameters(), device=DEVICES["golden"], updates="in-backward"
    )
    with pytest.raises(UnsupportedOptionError, match=r"nearstep\.offload updates"):
        nearstep.offload(model, optimizer, budget="100%")


def test_hooks_go_with_the_optimizer() -> None:
    model = Stack(2)
    optimizer = nearstep.optim.AdamW(model.parameters(), updates="in-backward")
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.fixture
def one_worker() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_late", [False, True])
def test_gradients_that_workers_average_are_refused(one_worker: None, is_late: bool) -> None:
    model = Stack(2)
    optimizer: Any = None
    for make_optimizer in (is_late, not is_late):
        if make_optimizer:
            optimizer = nearstep.optim.AdamW(model.parameters(), updates="in-backward")
        else:
            wrapper = DistributedDataParallel(model)
    before = bits(model.state_dict())
    with pytest.raises(UnsupportedOptionError, match="averages"):
        wrapper(torch.ones(2, WIDTH)).sum().backward()
    assert bits(model.state_dict()) == before
    assert not optimizer.state


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_update_is_made_once(error: type[BaseException], monkeypatch: Any) -> None:
    """Whatever raises while a parameter is updated, or just after."""
    plain, each = Training("host:", early=False), Training("host:", early=True)
    plain.step()
    processor, calls = each.optimizer.table._processor, []
    blocks = processor.blocks

    def interrupted(*args: Any, **options: Any) -> Callable[[], None]:
        run = blocks(*args, **options)

        def make() -> None:
            run()
            calls.append(run)
            if len(calls) == 2:
                raise error

        return make

    monkeypatch.setattr(processor, "blocks", interrupted)
    each.optimizer.zero_grad()
    with pytest.raises(error):
        each.backward()
    each.optimizer.step()  # of the gradients that there are
    counts = {float(state["step"]) for state in each.optimizer.state.values()}
    assert counts == {1.0}
    pairs = zip(each.parameters, plain.parameters, strict=True)
    compared = [bits(p) == bits(q) for p, q in pairs if p in each.optimizer.state]
    assert all(compared)
    assert len(compared) >= len(calls) // 2 > 0
