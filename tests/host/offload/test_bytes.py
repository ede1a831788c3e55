"""What is moved, and what is on the compute device at most, against closed forms."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import nearstep
from nearstep.torch.budget import budget_bytes, share_of
from nearstep.torch.errors import BudgetFormatError
from nearstep.torch.offload import Report
from nearstep.torch.offload.errors import BudgetError
from nearstep.torch.offload.ledger import Ledger
from nearstep.torch.offload.order import UseOrder

from .training import Plan, made, run

WIDTH = 16
LAYER = 4 * WIDTH * WIDTH
"""Bytes of a layer's parameters, and of its gradient."""

STEPS = 3


def train(layers: int, room: int, **options: str) -> Report:
    """Train equal layers without bias, in a budget of `room` of them."""
    torch.manual_seed(layers)
    linear = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    model = nn.Sequential(*(each for layer in linear for each in (layer, nn.Tanh())))
    device = "golden:axdimm?memory_bytes=1MiB"
    optimizer = nearstep.optim.AdamW(model.parameters(), device=device)
    with nearstep.offload(model, optimizer, budget=room * LAYER, **options) as engine:
        for _ in range(STEPS):
            model(torch.randn(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.report()


@pytest.mark.parametrize(("layers", "room"), [(1, 2), (2, 2), (5, 2), (6, 4), (6, 6), (6, 9)])
@pytest.mark.parametrize("policy", ["prefetch", "on-demand"])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_bytes_moved_and_peak_of_equal_layers(
    layers: int, room: int, policy: str, updates: str
) -> None:
    found = train(layers, room, policy=policy, updates=updates)
    # Forward fetches every layer. When it ends, `room` of them are here; backward begins with one
    # that gives way to a gradient, and needs the others but the first, whose input wants no
    # gradient.
    again = max(0, layers - room)
    fetched = STEPS * (layers + again)
    assert found.fetches + found.prefetches == fetched
    assert found.parameters_up == LAYER * fetched
    assert found.gradients_down == LAYER * layers * STEPS
    assert found.gradients == layers * STEPS
    assert found.parameters_down == LAYER * layers  # once, when the engine was opened
    assert found.gradients_up == 0
    assert found.peak == LAYER * min(room, layers + 1)
    assert found.peak_gradients == LAYER
    assert (found.prefetches > 0) == (policy == "prefetch" and layers > 1)


def test_what_is_counted_is_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(kind="functional", passes=2)
    model, optimizer = made(plan)
    engine = nearstep.offload(model, optimizer, budget=4096)
    parameters = list(model.parameters())
    looked = 0

    def look(ledger: Ledger) -> None:
        nonlocal looked
        with torch._C.DisableTorchFunctionSubclass():
            sizes = [p.untyped_storage().nbytes() for p in parameters]
            whole = [p.numel() * 4 for p in parameters]
            gradients = [torch.Tensor.grad.__get__(p) for p in parameters]
        here = sum(size for size, full in zip(sizes, whole, strict=True) if size == full > 4)
        made = sum(g.numel() * 4 for g in gradients if g is not None)
        scalars = sum(4 for full in whole if full == 4)  # as small as the place of one that is away
        assert here <= ledger.parameters <= here + scalars
        assert made <= ledger.gradients
        assert ledger.used <= engine.budget
        looked += 1

    monkeypatch.setattr(Ledger, "_look", look)
    run(plan, model, optimizer)
    assert looked > 100


def test_gradients_that_are_added_up_go_both_ways() -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = nearstep.optim.SGD(layer.parameters(), device="golden:axdimm?rules=sgd")
    engine = nearstep.offload(layer, optimizer, budget=2 * LAYER)
    passes = 4
    for _ in range(passes):
        layer(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert engine.report().gradients_down == passes * LAYER
    assert engine.report().gradients_up == (passes - 1) * LAYER


def test_a_second_gradient_of_a_parameter_counts_besides_the_first() -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = nearstep.optim.SGD(layer.parameters(), device="golden:axdimm?rules=sgd")
    x = torch.ones(2, WIDTH, requires_grad=True)  # so that its backward needs the parameter
    with nearstep.offload(layer, optimizer, budget=2 * LAYER) as engine:
        with pytest.raises(BudgetError) as raised:
            layer(torch.tanh(layer(x))).sum().backward()
        assert raised.value.expected == 3 * LAYER
        layer(x).sum().backward()  # what was expected of the other backward is forgotten
        assert engine.report().peak == 2 * LAYER
    with nearstep.offload(layer, optimizer, budget=raised.value.expected) as engine:
        layer(torch.tanh(layer(x))).sum().backward()
        assert engine.report().peak == 3 * LAYER
        assert engine.report().peak_gradients == 2 * LAYER


def test_the_order_of_uses_repeats() -> None:
    chance = random.Random(7)
    print("seed 7")
    checked = 0
    for _ in range(50):
        uses = [chance.randrange(6) for _ in range(chance.randint(1, 30))]
        later = [chance.random() < 0.5 for _ in uses]
        order = UseOrder([], most=1000)
        for use in zip(uses, later, strict=True):
            order.used(*use)
        order.end_period()
        for at, key in enumerate(uses):
            ahead = uses[at:] + uses[:at]
            for other in range(6):
                expected = ahead.index(other) if other in ahead else 2 * len(uses) + 1
                assert order.distance(other) == expected
                checked += 1
            assert list(order.upcoming()) == [*zip(uses, later, strict=True)][at:]
            order.used(key, later[at])
    assert checked > 1000


def test_uses_out_of_order_are_found_again() -> None:
    forward, backward = [(key, False) for key in range(4)], [(2, True), (1, True)]
    order = UseOrder([*forward, *backward], most=1000)
    order.used(3, False)
    assert list(order.upcoming()) == backward
    order.used(0, False)  # from the beginning
    assert list(order.upcoming()) == [*forward[1:], *backward]
    order.used(9, False)  # never seen: nothing is known
    assert list(order.upcoming()) == [*forward[1:], *backward]


def test_a_period_that_nobody_ends_is_bounded() -> None:
    order = UseOrder([(0, False)], most=4)
    for _ in range(4):
        order.used(5, True)
    assert list(order.upcoming()) == [(5, True)] * 4


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, 1),
        ("4096", 4096),
        ("3B", 3),
        ("2GiB", 2 << 30),
        ("1.5KiB", 1536),
        ("25%", 250),
        ("0.1%", 1),
        (" 12.5 % ", 125),
        ("300%", 3000),
    ],
)
def test_budgets(budget: int | str, expected: int) -> None:
    assert budget_bytes(budget, 1000) == expected


def test_a_share_for_bytes_is_the_least_that_is_enough() -> None:
    for nbytes, total in ((133_120, 498_688), (1, 3), (7, 7), (9, 4), (1000, 10**12)):
        share = share_of(nbytes, total)
        assert budget_bytes(share, total) >= nbytes
        assert (float(share[:-1]) - 0.01) * total / 100 < nbytes
    assert share_of(133_120, 498_688) == "26.7%"


@pytest.mark.parametrize("budget", [0, -1, "", "0", "0%", "2GB", "-5%", "1e3", True, 2.0, None])
def test_what_is_no_budget(budget: object) -> None:
    with pytest.raises(BudgetFormatError) as raised:
        budget_bytes(budget, 1000)  # type: ignore[arg-type]
    assert raised.value.actual is budget
