"""Optimizers that share a device, each in a thread of its own."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import nearstep
from nearstep.optim import AdamW

from ..driver.test_threads import at_once, often
from .test_graph import SIM, as_graphs

__all__ = ["as_graphs", "often"]

URLS = ["golden:axdimm", "golden:axdimm?channels=2", "golden:smartssd?rules=adam", SIM]
THREADS, STEPS = 2, 8
SIZES = (64, 1600)


@pytest.mark.parametrize("graphs", [False, True], ids=["sequence", "graphs"])
@pytest.mark.parametrize("url", URLS)
def test_two_optimizers_in_two_threads_give_the_bits_that_each_gives_alone(
    url, graphs, often, as_graphs
) -> None:
    if graphs:
        as_graphs(True)

    def train(number: int, device: nearstep.Device, begin: threading.Barrier) -> None:
        generator = torch.Generator().manual_seed(number)
        parameters = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in SIZES]
        optimizer = AdamW(parameters, lr=0.01 * (1 + number), device=device)
        begin.wait()
        for _ in range(STEPS):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        found[number] = [parameter.detach().clone() for parameter in parameters]

    found: dict[int, list[torch.Tensor]] = {}
    with nearstep.open(url) as device:
        for number in range(THREADS):
            train(number, device, threading.Barrier(1))
    alone, found = found, {}

    with nearstep.open(url) as device:
        begin = threading.Barrier(THREADS)
        at_once(*(partial(train, number, device, begin) for number in range(THREADS)))
    compared = 0
    assert alone.keys() == found.keys() == set(range(THREADS))
    for number, parameters in alone.items():
        for one, other in zip(parameters, found[number], strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
            compared += one.numel()
    assert compared == THREADS * sum(SIZES)
