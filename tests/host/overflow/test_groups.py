"""Parameters that have no gradient yet, are frozen and thawed, or whose groups come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nearstep

from .jobs import BF16, HOMES, Drives, bits, drives, everything, images

SIZES = (100, 60, 2000)


def parameters(sizes: Sequence[int] = SIZES, first: float = -1.0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(first, 1, each) + at) for at, each in enumerate(sizes)]


def step(optimizer: Any, number: int, parameters: Sequence[Tensor]) -> None:
    """A step with gradients of these parameters alone."""
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def opened(on: Drives) -> Drives:
    """The same drives in another process."""
    on.store.close()
    return Drives([bytes(each.image) for each in on.places])


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest) -> tuple[str, str, dict[str, Any]]:
    url, plain, more = HOMES[request.param]
    return url, plain, {**more, **({"memory": 40_000} if more else {})}


Home = tuple[str, str, dict[str, Any]]


def make(given: Any, device: str, **on: Any) -> Any:
    return nearstep.optim.AdamW(given, lr=1e-2, device=device, **on)


@pytest.mark.parametrize("sizes", [SIZES, (100, 60)])
def test_an_added_group_without_a_gradient_is_resumed(home: Home, sizes: Sequence[int]) -> None:
    url, plain, more = home
    on, twin = Drives(images(2)), parameters(sizes)
    p = parameters(sizes)
    optimizer, reference = make(p[:1], url, drives=on.store, **more), make(twin[:1], plain)
    for each, own in ((optimizer, p), (reference, twin)):
        step(each, 0, own[:1])
        each.add_param_group({"params": own[1:]})
        step(each, 1, own[:1])
    assert everything(p, optimizer) == everything(twin, reference)
    on = opened(on)
    q = parameters(sizes, first=5.0)
    groups = [{"params": q[:1]}, {"params": q[1:]}]
    resumed = make(groups, url, drives=on.store, resume=True, **more)
    assert everything(q, resumed) == everything(twin, reference)
    for each, own in ((resumed, q), (reference, twin)):
        step(each, 2, own)
        step(each, 3, own[1:])
    assert everything(q, resumed) == everything(twin, reference)
    on.store.close()


def test_a_parameter_that_the_drives_have_not_keeps_its_numbers(home: Home) -> None:
    url, _, more = home
    on, p = Drives(images(2)), parameters()
    p[1].requires_grad_(False)
    step(make(p, url, drives=on.store, **more), 0, [p[0], p[2]])
    on = opened(on)
    q = parameters(first=5.0)
    own = bits(q[1])
    resumed = make(q, url, drives=on.store, resume=True, **more)
    assert [bits(q[0]), bits(q[1]), bits(q[2])] == [bits(p[0]), own, bits(p[2])]
    step(resumed, 1, q[:1])
    expected = everything(q, resumed)
    on = opened(on)
    again = parameters(first=9.0)
    assert everything(again, make(again, url, drives=on.store, resume=True, **more)) == expected
    on.store.close()


def test_a_kept_generation_has_thawed_parameters(home: Home) -> None:
    url, _, more = home
    on, p = Drives(images(2)), parameters()
    p[1].requires_grad_(False)
    optimizer = make(p, url, drives=on.store, **more)
    step(optimizer, 0, [p[0], p[2]])
    p[1].requires_grad_(True)
    p[1].data.fill_(5.0)
    optimizer.keep("best")
    expected = everything(p, optimizer)
    step(optimizer, 1, p)
    on = opened(on)
    q = parameters(first=9.0)
    assert everything(q, make(q, url, drives=on.store, resume="best", **more)) == expected
    on.store.close()


def test_frozen_parameters_are_restored_and_go_on_when_thawed(home: Home) -> None:
    url, plain, more = home
    on, p, twin = Drives(images(2)), parameters(), parameters()
    optimizer, reference = make(p, url, drives=on.store, **more), make(twin, plain)
    for each, own in ((optimizer, p), (reference, twin)):
        step(each, 0, own)
        step(each, 1, own)
    on = opened(on)
    q = parameters(first=5.0)
    q[1].requires_grad_(False)
    resumed = make(q, url, drives=on.store, resume=True, **more)
    assert everything(q, resumed) == everything(twin, reference)
    q[1].requires_grad_(True)
    for each, own in ((resumed, q), (reference, twin)):
        step(each, 2, own)
    assert everything(q, resumed) == everything(twin, reference)
    on.store.close()


def test_parameters_keep_their_state_while_groups_come_and_go(home: Home) -> None:
    url, plain, more = home
    sizes = (100, 90, 100, 80)
    on, p, twin = Drives(images(2)), parameters(sizes), parameters(sizes)
    pairs = []
    for own, device, given in ((p, url, {"drives": on.store, **more}), (twin, plain, {})):
        pairs.append((own, make([{"params": [each]} for each in own[:2]], device, **given)))
    for own, each in pairs:
        step(each, 0, own[:2])
        each.add_param_group(each.param_groups.pop(0))  # behind the other
        step(each, 1, own[:2])
        each.param_groups.pop(0)  # of the second, whose state stays
        each.add_param_group({"params": [own[2]]})
        step(each, 2, [own[0], own[2]])
        del each.state[own[1]]
        step(each, 3, [own[0], own[2]])
    (_, optimizer), (_, reference) = pairs
    for added in range(2):
        members = [0, 2, 3][: 2 + added]
        expected = everything([twin[at] for at in members], reference)
        assert everything([p[at] for at in members], optimizer) == expected
        on, p = opened(on), parameters(sizes, first=5.0)
        groups = [{"params": [p[at]]} for at in members]
        optimizer = make(groups, url, drives=on.store, resume=True, **more)
        assert everything([p[at] for at in members], optimizer) == expected
        if not added:  # gets the name of none that the drives still have
            p[3].data.copy_(twin[3])
            optimizer.add_param_group({"params": [p[3]]})
            reference.add_param_group({"params": [twin[3]]})
        for own, each in ((p, optimizer), (twin, reference)):
            step(each, 4 + added, [own[0], *own[2:]])
    on.store.close()


@pytest.mark.parametrize("device", [BF16, HOMES["cards"][0]])
def test_a_kept_generation_has_changes_of_16_bits(device: str) -> None:
    more = HOMES["host"][2] if device == BF16 else {}
    with drives() as on:
        p = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16))]
        optimizer = make(p, device, drives=on.store, **more)
        step(optimizer, 0, p)
        p[0].data.fill_(3.0)
        optimizer.keep("best")
        p[0].data.fill_(4.0)  # compared with what was kept
        optimizer.keep("next")
        step(optimizer, 1, p)
        last = bits(p[0])
        after = [bytes(each.image) for each in on.places]
    found = []
    for name in (True, "best", "next"):
        again = [nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))]
        store = Drives(after).store
        make(again, device, drives=store, resume=name, **more)
        store.close()
        found.append(bits(again[0]))
    assert found == [last, *(bits(torch.full((64,), v, dtype=torch.bfloat16)) for v in (3, 4))]
