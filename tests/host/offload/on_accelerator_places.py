"""Where a plan has parameters and gradients on an accelerator: run by `test_accelerator.py`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nearstep
from nearstep.memferry.cost import Decision, Mode
from nearstep.memferry.profile import LayerProfile
from nearstep.torch.offload import streams
from nearstep.torch.offload.errors import CaptureError
from nearstep.torch.offload.streams import Download, Streams

from . import accelerator, hosted
from .models import WIDTH
from .on_accelerator import DTYPES, FORMATS, assert_goes, is_fake, stack, trained
from .plans import everywhere, places
from .training import (
    COMPUTE,
    GOLDEN,
    Plan,
    assert_equal,
    bits,
    loss_of,
    state_of,
    step,
    train,
    train_in_least,
)

WRITTEN = Decision(Mode.DHA, write=True)
MODULE = 4 * WIDTH * (WIDTH + 1)
"""Bytes of the gradients of a layer of `stack`."""

SPECIAL = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0xFFC1, 0x3F80, 0x7F01]
"""Upper halves of fp32: zeros of both signs, subnormals, infinities, quiet NaNs with a payload."""


def offloaded(
    decision: Decision, budget: str = "100%", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any, Any]:
    url = GOLDEN if dtype is torch.float32 else FORMATS
    model, optimizer = stack(dtype=dtype, device=url)
    plan = places(model, {str(i): decision for i in range(len(model))})
    options = {"policy": "memferry", "plan": plan}
    return model, optimizer, nearstep.offload(model, optimizer, budget=budget, **options)


# Gradients


@pytest.mark.parametrize("mode", Mode)
def test_gradients_that_a_plan_writes_are_written_by_kernels(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    def fail(*_: Any) -> NoReturn:
        raise AssertionError("a copy of a gradient")

    monkeypatch.setattr(Streams, "download", fail)
    plan = Plan(kind="stack", passes=2, evaluates=True, steps=3)
    found = train_in_least(
        plan, policy="memferry", plan=everywhere(plan, Decision(mode, write=True))
    )
    assert_equal(found, train(plan))
    assert found.report is not None
    assert found.report.gradients > 0
    if mode is Mode.DHA:  # nothing but the gradients of one module, while they are made
        assert found.report.peak == found.report.budget == MODULE


def test_memory_of_a_gradient_that_is_written_is_free_when_its_kernel_is_launched() -> None:
    held = []
    for write in (True, False):
        model, optimizer, engine = offloaded(Decision(Mode.DHA, write), "400%")
        step(model, optimizer)
        torch.accelerator.synchronize()
        optimizer.zero_grad()
        loss = loss_of(model)
        engine._space.end_sending()
        before = accelerator.counts().nbytes if is_fake else 0
        loss.backward()
        counted = engine._space.ledger.gradients
        after = accelerator.counts().nbytes if is_fake else counted
        held.append((counted, after - before - counted))
        optimizer.step()
        engine.close()
    assert held[0][0] == 0
    assert held[1][0] >= MODULE or not is_fake  # copies are under way
    assert held[0][1] == held[1][1]  # of activations


def test_parameters_in_place_are_sent_to_the_memory_of_the_host_if_they_were_changed() -> None:
    model, optimizer = stack(device="host:")
    plan = places(model, {str(i): Decision(Mode.DHA) for i in range(len(model))})
    with nearstep.offload(model, optimizer, policy="memferry", plan=plan, budget="100%"):
        step(model, optimizer)
        before = optimizer.traffic.masters_down
        for _ in range(2):
            step(model, optimizer)
        assert optimizer.traffic.masters_down == before
        with torch.no_grad():
            model[1].weight.mul_(0.5)
        step(model, optimizer)
        assert optimizer.traffic.masters_down == before + 4 * WIDTH * WIDTH
    other, plain = stack()
    for _ in range(3):
        step(other, plain)
    with torch.no_grad():
        other[1].weight.mul_(0.5)
    step(other, plain)
    assert bits(model.state_dict()) == bits(other.state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_a_gradient_is_written(dtype: torch.dtype) -> None:
    words = torch.tensor(SPECIAL, dtype=torch.int32).to(torch.int16)
    if dtype is torch.float32:
        words = torch.stack([words + 1, words], 1).view(torch.int32)[:, 0]
    special = words.repeat(WIDTH * WIDTH)[: WIDTH * WIDTH].view(dtype).view(WIDTH, WIDTH)
    for write in (False, True):
        model, _, engine = offloaded(Decision(Mode.DHA, write), dtype=dtype)
        for strided in (special, special.t()):
            made_there = strided.to(COMPUTE)
            hook = model[2].weight.register_hook(lambda _, made=made_there: made)
            model[2].weight.grad = None
            loss_of(model).backward()
            assert engine._copies[model[2].weight].resident.held is not None
            assert bits(model[2].weight.grad) == bits(strided)
            hook.remove()
        engine.close()


def test_a_gradient_that_is_reset_while_it_is_written() -> None:
    found = []
    for offloads in (False, True):
        model, optimizer = offloaded(WRITTEN)[:2] if offloads else stack()
        for _ in range(3):
            loss_of(model).backward()
            optimizer.zero_grad()
            loss_of(model).backward()
            loss_of(model).backward()  # added to the one before
            optimizer.step()
        found.append(state_of(model, optimizer))
    assert found[0] == found[1]


def test_a_model_that_goes_while_gradients_are_written() -> None:
    model, optimizer, engine = offloaded(WRITTEN)
    loss_of(model).backward()
    assert engine._space.streams._departures
    gone = weakref.ref(engine)
    del model, optimizer, engine
    assert_goes(gone)


def before_the_kernel(self: Streams, gradient: Tensor) -> Download:
    event = torch.accelerator.current_stream().record_event()
    return Download(None, WRITE(self, gradient).staged, event)


WRITE = Streams.write


def test_a_wait_for_a_kernel_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_fake:
        pytest.skip("what a GPU leaves to chance is not seen on it")
    found = []
    monkeypatch.setattr(streams, "_tell", lambda *_: None)  # whose memory goes when it has run
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(Streams, "write", before_the_kernel)
        model, optimizer, engine = offloaded(WRITTEN)
        loss_of(model).backward()
        optimizer.step()
        engine.close()
        found.append(bits(model.state_dict()))
    assert found[0] != found[1]
    accelerator.hazards()


def test_a_profile_made_there_has_gradients_written_after_backward() -> None:
    times: list[dict[str, LayerProfile]] = []
    for device in (COMPUTE, torch.device("cpu")):
        model = stack()[0].to(device)
        optimizer = nearstep.optim.AdamW(model.parameters(), device=GOLDEN)
        with nearstep.offload(model, optimizer, budget="400%", policy="memferry") as engine:
            model(torch.ones(4, WIDTH, device=device)).sum().backward()
            optimizer.step()
            assert engine.profile is not None
            times.append({each.name: each for each in engine.profile.layers})
    assert len(times[0]) == len(times[1]) == 6
    for name, there in times[0].items():
        assert there.backward_write_s is not None
        assert there.backward_write_s == there.backward_s + there.send_s
        here = times[1][name]
        assert here.backward_write_s == max(here.backward_s, here.send_s) or name == "5"


# Parameters: what is in `test_shadow.py`, and several streams


def used_in_another_stream(decision: Decision) -> tuple[nn.Module, Any, Any, Tensor]:
    """A model with a vector, which the host does not know to have left another stream."""
    model, optimizer, engine = offloaded(decision, "400%")
    loss_of(model).backward()
    optimizer.step()
    assert engine.shadow.allocations == 0
    x, stream = torch.ones(4, WIDTH, device=COMPUTE), torch.Stream(device=COMPUTE)
    x.record_stream(stream)
    torch.accelerator.synchronize()
    with stream, torch.no_grad():
        return model, optimizer, engine, model(x)


def test_places_are_loaded_again_after_every_stream_that_used_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, plain_optimizer = stack()
    for _ in range(2):
        step(plain, plain_optimizer)
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(Streams, "_used", lambda *_: None)
        model, optimizer, engine, _ = used_in_another_stream(Decision(Mode.GFGB))
        optimizer.zero_grad()
        optimizer.step()  # all go
        loss_of(model).backward()
        optimizer.step()
        assert engine.shadow.nbytes == len(model) * MODULE
        assert engine.shadow.allocations == 0
        assert engine.shadow.loads == 3 * engine.shadow.nbytes
        assert bits(model.state_dict()) == bits(plain.state_dict())
        if is_fake:
            assert any("write after read" in each for each in accelerator.hazards()) == broken
        engine.close()
    del model, optimizer, engine
    gc.collect()
    if is_fake:
        accelerator.hazards()  # the vector was freed too early


def test_places_of_the_host_are_written_when_every_stream_has_read_them() -> None:
    model, optimizer, engine, _ = used_in_another_stream(Decision(Mode.DFGB))
    copy = engine._copies[model[3].weight]
    optimizer.zero_grad()
    loss_of(model).backward()
    assert len(copy._readers) == 2  # an event of each stream
    optimizer.step()
    assert copy._readers == []
    assert engine.shadow.allocations == 0
    here = engine.shadow.locations["3.weight"].host
    assert copy.storage is not None
    assert copy.storage.data_ptr() == here
    engine.close()


# Graphs


def test_what_is_captured_is_refused_before_anything_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def captured(yes: bool) -> None:
        module = torch.get_device_module(COMPUTE)
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: yes, raising=False)

    found = trained(*stack())
    model, optimizer, engine = offloaded(WRITTEN)
    loss = loss_of(model)
    before = engine.report()
    captured(True)
    for use in (lambda: loss_of(model), loss.backward, optimizer.step):
        with pytest.raises(CaptureError, match=r"is being captured.*engine.close"):
            use()
    assert engine.report() == before
    captured(False)
    optimizer.zero_grad()
    assert trained(model, optimizer) == found
    engine.close()
    captured(True)
    loss_of(model).backward()  # a plain one


# Several workers: what they send each other is in `test_workers.py`


@contextmanager
def group() -> Iterator[None]:
    """A process group of this process alone."""
    if is_fake:
        hosted.register()
    backend = hosted.NAME if is_fake else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_two_streams(engine_of: Callable[[nn.Module, Any], Any]) -> list[Any]:
    model, optimizer = stack()
    found, engine = engine_of(model, optimizer)
    stream, losses = torch.Stream(device=COMPUTE), []
    model.forward = lambda x: first_and_second(model, x, stream)  # type: ignore[method-assign]
    for x in torch.ones(3, 4, WIDTH, device=COMPUTE):
        torch.accelerator.synchronize()
        optimizer.zero_grad()
        loss = found(x).sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    if engine:
        engine.close()
    return [losses, bits(model.state_dict())]


def first_and_second(model: nn.Module, x: Tensor, stream: torch.Stream) -> Tensor:
    first = second = x
    for number, layer in enumerate(model.children()):
        if number % 2:
            first = layer(first)
            continue
        with stream:
            second = layer(second)
    here = torch.accelerator.current_stream()
    here.wait_stream(stream)
    second.record_stream(here)
    return first * second


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_averages_of_gradients_that_are_made_in_several_streams() -> None:
    def wrapped(model: nn.Module, optimizer: Any) -> Any:
        ddp = DistributedDataParallel(model)
        return ddp, nearstep.offload(ddp, optimizer, budget="300%")

    plain = in_two_streams(lambda model, _: (model, None))
    with group():
        assert in_two_streams(wrapped) == plain
