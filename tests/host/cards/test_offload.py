"""A model whose parameters stream from the drives of cards, and its gradients to them."""

from __future__ import annotations

import torch
from torch import nn

import nearstep

from ..overflow.jobs import PLAIN, card_url, drives

STEPS = 3
WIDTH, LAYERS = 32, 5


def trained(url: str, budget: str | None, **on: object) -> tuple[list[torch.Tensor], object]:
    """Parameters after some steps, and the optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=url, **on)
    engine = None if budget is None else nearstep.offload(model, optimizer, budget=budget)
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return [p.detach().clone() for p in model.parameters()], optimizer


def test_an_offloaded_model_has_its_bits_and_the_host_link_the_traffic_of_table_1() -> None:
    """Gradients go to the owner's drive in the backward pass, and parameters come from there; what
    an update needs besides stays within the cards (section IV-A, Table I)."""
    expected, _ = trained(PLAIN, None)
    with drives(2, 1200) as on:
        found, optimizer = trained(card_url(2, 256), "40%", drives=on.store)
        traffic = optimizer.traffic  # type: ignore[attr-defined]
    same = [
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(expected, found, strict=True)
    ]
    assert same == [True] * 2 * LAYERS
    elements = LAYERS * (WIDTH * WIDTH + WIDTH)
    assert traffic.gradients_down == 4 * elements * STEPS
    assert traffic.to_drives == 4 * elements * (STEPS + 1)  # the first parameters, gradients
    assert traffic.moments_down == traffic.moments_up == traffic.gradients_up == 0
    assert traffic.drives_to_cards == 16 * elements * STEPS
    assert traffic.cards_to_drives == 12 * elements * STEPS
    assert 4 * elements * STEPS <= traffic.parameters_up <= 2 * 4 * elements * (STEPS + 1)
