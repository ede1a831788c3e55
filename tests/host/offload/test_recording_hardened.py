"""Recordings: values, times, and what fails."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.errors import ArgumentError, DeviceError
from nearstep.torch.computation import Computation
from nearstep.torch.offload import Engine
from nearstep.work.clock import Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep_spec.platform.load import load

from .test_recording import LAYER, ONE, WIDTH, assert_like_steps, layers, step
from .training import bits, state_of

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def check_ledger(engine: Engine) -> None:
    """What is counted is there."""
    space = engine._space
    gradients = [copy.raw_gradient() for copy in space.copies]
    assert space.ledger.parameters == sum(copy.nbytes for copy in space.copies if copy.present)
    assert space.ledger.gradients == sum(4 * g.numel() for g in gradients if g is not None)


# Values


@pytest.mark.parametrize("how", ["gradient", "detached", "array"])
def test_a_gradient_that_is_changed_after_it_was_sent_is_the_one_that_was_sent(how: str) -> None:
    def trained(*, records: bool) -> Any:
        model, optimizer = layers(3, ONE)
        kept: list[Any] = []
        for p in model.parameters():  # what hooks of the user keep
            if how == "gradient":
                p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
            elif how == "detached":
                p.register_hook(lambda gradient: kept.append(gradient.detach()))
            else:
                p.register_hook(lambda gradient: kept.append(gradient.numpy()))
        engine = nearstep.offload(model, optimizer, budget=16 * LAYER)
        with engine.record("axdimm") if records else nullcontext():
            model(torch.ones(4, WIDTH)).square().mean().backward()
            assert len(kept) == 3
            for each in kept:
                each[:] = 1000.0
            optimizer.step()
        return state_of(model, optimizer)

    assert trained(records=True) == trained(records=False)


def test_data_of_transfers_goes_when_they_have_ended() -> None:
    """Not when all has."""
    torch.manual_seed(1)
    width, count = 128, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    device = "golden:axdimm?memory_bytes=8MiB"
    optimizer = nearstep.optim.AdamW(model.parameters(), device=device)
    layer = 4 * width * width
    engine = nearstep.offload(model, optimizer, budget=3 * layer)
    x = torch.ones(1, width)
    with engine.record("axdimm"):
        tracemalloc.start()
        try:
            model(x).sum().backward()
            left, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert left < most < 5 * layer


# Time


@pytest.mark.parametrize("name", ["linear", "conv2d", "matmul", "scaled_dot_product_attention"])
def test_computation_takes_as_long_in_inference_mode(name: str) -> None:
    x, weight = torch.ones(4, 64, 256), torch.ones(256, 256)
    image, kernel, heads = torch.ones(2, 64, 16, 16), torch.ones(64, 64, 3, 3), x.view(4, 4, 64, 64)
    compute: Callable[[], torch.Tensor] = {
        "linear": lambda: nn.functional.linear(x, weight),
        "conv2d": lambda: nn.functional.conv2d(image, kernel),
        "matmul": lambda: x @ weight,
        "scaled_dot_product_attention": lambda: nn.functional.scaled_dot_product_attention(
            heads, heads, heads
        ),
    }[name]
    processor = load("axdimm").processors["gpu"]
    seconds = []
    for mode in (torch.no_grad, torch.inference_mode):
        with Computation(processor) as computation, mode():
            found = compute()
        seconds.append(sum(each for _, each in computation.take()))
        assert bits(found.clone()) == bits(compute())
    assert seconds[0] == seconds[1] > 0


def test_what_touches_no_element_takes_no_time() -> None:
    processor = load("axdimm").processors["gpu"]
    x = torch.ones(4, 8, 16)
    with Computation(processor) as computation:
        torch.empty_like(x).new_empty(3)
        assert not computation.take()
        _ = x @ torch.ones(16, 16)
        rows = 32
        moved = 4 * (2 * 16 * rows + 16 * 16)
        flops, memory = 2 * rows * 16 * 16, float(processor.memory_bytes_per_s or 0)
        ones = 4 * 16 * 16 / memory
        expected = max(flops / float(processor.flops["fp32"]), moved / memory) + ones
        assert computation.take() == [(False, pytest.approx(expected, rel=1e-12))]


def test_parameters_of_one_function_are_used_until_it_is_computed() -> None:
    """Backward of a norm asks for two of them, one after the other."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.LayerNorm(256), nn.Linear(256, WIDTH))
    optimizer = nearstep.optim.AdamW(model.parameters(), device=ONE)
    engine = nearstep.offload(model, optimizer, budget="400%")
    with engine.record("axdimm"):
        model(torch.ones(64, WIDTH)).sum().backward()
        space = engine._space
        assert space.recording is not None
        last = {copy.name: space.recording._used[copy] for copy in space.copies}
        assert last["1.weight"] is last["1.bias"]
        assert last["1.weight"].name == "backward 1"


# Faults


@pytest.mark.parametrize("error", [DeviceError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["read_memory", "write_memory"])
def test_what_fails_in_a_recording_is_not_counted_any_more(
    method: str, error: type[BaseException]
) -> None:
    model, optimizer = layers(6, ONE)
    engine = nearstep.offload(model, optimizer, budget=3 * LAYER)
    step(model, optimizer)
    with engine.record("axdimm"):
        step(model, optimizer)
    backend: Any = optimizer.device.backend
    original, left = getattr(backend, method), [2]

    def failing(*arguments: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise error("gone")
        original(*arguments)

    def trained() -> None:
        with engine.record("axdimm"):
            setattr(backend, method, failing)
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH)).sum().backward()

    with pytest.raises(error, match="gone"):
        trained()
    setattr(backend, method, original)
    assert engine._space.recording is engine._space.ledger.grown is None
    optimizer.zero_grad()
    check_ledger(engine)
    step(model, optimizer)
    engine.close()
    assert_like_steps(model, optimizer, lambda: layers(6, ONE), 3)


def test_a_run_that_fails_when_it_is_looked_at_gives_its_channel_back() -> None:
    """One after the other, each access to a register after its end."""
    checked = 0
    with nearstep.open("golden:axdimm?channels=2&memory_bytes=2MiB") as device:
        assert isinstance(device, AxdimmDevice)
        arrays = {name: device.alloc(64) for name in "pgmv"}
        for each in arrays.values():
            each.fill(1.0)
        backend: Any = device.backend
        write, left = backend.write_register, [0]

        def failing(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise DeviceError("gone")
            write(*arguments)

        def begin(after: int) -> Any:
            run = device.accelerated(0, lambda: device.update("adam", arrays, step=1, lr=1e-3))
            left[0] = after
            return run

        for after in range(1, 4):
            graph = Graph()
            graph.add("run", "channel 0", action=partial(begin, after))
            backend.write_register = failing
            with pytest.raises(WorkError, match="gone"):
                execute(graph, Clock([device.backend], 1e9))
            backend.write_register = write
            assert np.isfinite(arrays["p"].read()).all()
            checked += 1
    assert checked == 3


def test_a_machine_without_a_way_is_refused_before_anything_is_recorded() -> None:
    model, optimizer = layers(2, ONE)
    engine = nearstep.offload(model, optimizer, budget=4 * LAYER)
    platform = load("axdimm")
    cpu = replace(platform.processors["cpu"], flops=platform.processors["gpu"].flops)
    platform = replace(platform, processors={**platform.processors, "cpu": cpu})
    for machine in ({"compute": "cpu", "memory": "cpu"}, {"compute": "gpu", "memory": "cpu"}):
        there = machine["compute"] != machine["memory"]
        same = r"cpu would compute and own the parameters.*name a machine"
        refused = nullcontext() if there else pytest.raises(ArgumentError, match=same)
        with refused, engine.record(platform, **machine):
            assert there
            step(model, optimizer)
    engine.close()
