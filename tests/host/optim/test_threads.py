"""Optimizers that share a device, each in a thread of its own."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import nearstep
from nearstep.optim import AdamW

THREADS, STEPS = 2, 8
SIZES = (64, 1600)


@pytest.mark.parametrize(
    "url", ["golden:axdimm", "golden:axdimm?channels=2", "golden:smartssd?rules=adam"]
)
def test_two_optimizers_in_two_threads_give_the_bits_that_each_gives_alone(url) -> None:
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

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with nearstep.open(url) as device:
            begin = threading.Barrier(THREADS)
            running = [
                threading.Thread(target=train, args=(number, device, begin))
                for number in range(THREADS)
            ]
            for each in running:
                each.start()
            for each in running:
                each.join()
    finally:
        sys.setswitchinterval(before)
    compared = 0
    assert alone.keys() == found.keys() == set(range(THREADS)), "a thread ended with an error"
    for number, parameters in alone.items():
        for one, other in zip(parameters, found[number], strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
            compared += one.numel()
    assert compared == THREADS * sum(SIZES)
