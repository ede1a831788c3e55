"""`torch.compile` around a step: the device works as it does without."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import nearstep

from .beside import Beside, tensors
from .conftest import like_torch

URL = "golden:axdimm?memory_bytes=1MiB&scan=yes&gradient_scale=yes"
TURNS = 4


class Training:
    """A model, its optimizer and batches, equal for everyone who makes one."""

    def __init__(self, ours, compiled):
        torch.manual_seed(5)
        self.ours = ours
        self.compiled = compiled
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
        )
        self.batches = [torch.randn(4, 16) for _ in range(TURNS)]
        self.optimizer = self.make(self.model.parameters())

    def make(self, parameters):
        if self.ours:
            return nearstep.optim.AdamW(parameters, lr=1e-2, device=URL)
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    def loss(self, x):
        return self.model(x).square().mean()

    def backward(self, x):
        self.optimizer.zero_grad()
        self.loss(x).backward()

    def run(self, train):
        compiled = self.compiled(train)
        for x in self.batches:
            compiled(x)


def step(t):
    compiled = t.compiled(t.optimizer.step)
    for x in t.batches:
        t.backward(x)
        compiled()


def train_function(t):
    def train(x):
        t.backward(x)
        t.optimizer.step()

    t.run(train)


def model(t):
    forward = t.compiled(t.model)
    for x in t.batches:
        t.optimizer.zero_grad()
        forward(x).square().mean().backward()
        t.optimizer.step()


def closure(t):
    compiled = t.compiled(t.optimizer.step)
    for x in t.batches:

        def evaluate(x=x):
            t.optimizer.zero_grad()
            loss = t.loss(x)
            loss.backward()
            return loss

        assert isinstance(compiled(evaluate), torch.Tensor)


def train_function_with_closure(t):
    def train(x):
        def evaluate():
            t.optimizer.zero_grad()
            loss = t.loss(x)
            loss.backward()
            return loss

        return t.optimizer.step(evaluate)

    t.run(train)


def hooks(t):
    seen = []
    t.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    t.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step(t)
    assert seen == ["before", "after"] * TURNS


def torchs_scaler(t, kind=torch.amp.GradScaler):
    scaler = kind("cpu", init_scale=2.0**10)

    def train(x):
        t.optimizer.zero_grad()
        scaler.scale(t.loss(x)).backward()
        scaler.step(t.optimizer)
        scaler.update()

    t.run(train)


def nearsteps_scaler(t):
    torchs_scaler(t, nearstep.optim.GradScaler if t.ours else torch.amp.GradScaler)


def clipping(t):
    def train(x):
        t.backward(x)
        torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.optimizer.step()

    t.run(train)


def checkpoints(t):
    def train(x):
        t.backward(x)
        t.optimizer.step()
        t.optimizer.load_state_dict(t.optimizer.state_dict())

    t.run(train)


def another_group(t):
    q = torch.nn.Parameter(torch.ones(32))
    t.model.register_parameter("q", q)
    t.compiled(lambda: t.optimizer.add_param_group({"params": [q], "lr": 0.5}))()

    def train(x):
        t.optimizer.zero_grad()
        (t.loss(x) + q.square().sum()).backward()
        t.optimizer.step()

    t.run(train)


def made_and_copied(t):
    def train(x):
        optimizer = t.make(t.model.parameters())
        t.loss(x).backward()
        optimizer.step()
        both, twin = copy.deepcopy((t.model, optimizer))
        twin.step()
        return list(both.parameters())

    copies = t.compiled(train)(t.batches[0])
    for p, q in zip(t.model.parameters(), copies, strict=True):
        p.copied = q


def state(t):
    """Read and changed in compiled code, as an argument: dynamo confuses tensors in dicts."""
    look = t.compiled(lambda state: state["exp_avg"] * 2)
    sums = t.compiled(lambda state: [value.sum() for value in state.values()])
    change = t.compiled(lambda state: state["exp_avg"].mul_(0.5))
    step(t)
    for p in t.model.parameters():
        mine = t.optimizer.state[p]
        assert torch.equal(look(mine), mine["exp_avg"] * 2)
        assert sums(mine)[1] == mine["exp_avg"].sum()
        change(mine)
    t.backward(t.batches[0])
    t.optimizer.step()


CASES = [
    step,
    train_function,
    model,
    closure,
    train_function_with_closure,
    hooks,
    torchs_scaler,
    nearsteps_scaler,
    clipping,
    checkpoints,
    another_group,
    made_and_copied,
    state,
]
FAST = (step, train_function)


def parameters_after(case, ours, compiled):
    torch._dynamo.reset()
    before, training = Training(ours, compiled), Training(ours, compiled)
    trained = list(training.model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case(training)
    for p, initial in zip(before.model.parameters(), trained, strict=True):
        assert not torch.allclose(p, initial, rtol=1e-3, atol=1e-3)
    each = list(training.model.parameters())
    return [p.detach() for p in each] + [p.copied for p in each if hasattr(p, "copied")]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(
            case,
            backend,
            id=f"{case.__name__}-{backend}",
            marks=() if case in FAST and backend == "eager" else pytest.mark.deep,
        )
        for backend in ("eager", "inductor")
        for case in CASES
    ],
)
def test_what_is_compiled_trains_as_what_is_not(case, backend):
    compiled = parameters_after(case, True, lambda f: torch.compile(f, backend=backend))
    plain = parameters_after(case, True, lambda f: f)
    for a, b in zip(compiled, plain, strict=True):
        if case is model or backend == "inductor":  # whose forward and backward are others
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(a, b)
    assert len(compiled) >= 4


@like_torch
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.deep)])
def test_a_compiled_step_has_the_bits_of_torch(backend):
    """Gradients are given, so that nothing but the step is compiled: several of one shape, which
    dynamo confused."""
    torch._dynamo.reset()
    beside = Beside("AdamW", URL, tensors([(32,), (32,), (32,), (64,)]))
    compiled = torch.compile(beside.mine.optimizer.step, backend=backend)
    for _ in range(3):
        beside.give()
        compiled()
        beside.torchs.optimizer.step()
        beside.check()
    assert beside.mine.optimizer.traffic.elements == 3 * 160


def test_a_step_is_no_part_of_one_whole_graph():
    training = Training(True, None)
    compiled = torch.compile(training.optimizer.step, backend="eager", fullgraph=True)
    training.backward(training.batches[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no graph contains"):
        compiled()
    assert training.optimizer.traffic.gradients_down == 0
