"""Layers on an accelerator, `$NEARSTEP_TEST_COMPUTE`: run by `test_accelerator.py`."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nearstep
from nearstep.memferry import planner
from nearstep.memferry.cost import Decision, Mode
from nearstep.memferry.profile import Profile
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.errors import ParameterError, UnsupportedOptionError
from nearstep.torch.memferry import profile
from nearstep.torch.offload.mapped import MAPPERS, PINNERS
from nearstep.torch.offload.streams import Arrival, Download, Streams
from nearstep.torch.parameter import DeviceParameter

from . import accelerator, training
from .models import WIDTH
from .plans import everywhere, places
from .training import (
    COMPUTE,
    GOLDEN,
    HOST,
    Plan,
    alike,
    assert_equal,
    bits,
    made,
    state_of,
    steps,
    train,
    train_in_least,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = f"{GOLDEN}&gradient_formats=fp32,fp16,bf16&copy_out_formats=fp16,bf16"
is_fake = COMPUTE.type == "accel"


stack = partial(training.stack, 6)


def trained(model: nn.Module, optimizer: Any, count: int = 3) -> list[Any]:
    """Train; losses, and bits of parameters and moments."""
    return [steps(model, optimizer, count), state_of(model, optimizer)]


@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
@pytest.mark.parametrize("policy", ["prefetch", "memferry"])
def test_the_processor_of_the_host_updates_with_the_bits_of_a_device(
    policy: Any, updates: Any
) -> None:
    plain = stack()
    model, optimizer = stack(device=HOST)
    with nearstep.offload(model, optimizer, budget="60%", policy=policy, updates=updates) as engine:
        assert trained(model, optimizer) == trained(*plain)
        assert engine.report().peak <= engine.budget


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("url", [GOLDEN, FORMATS], ids=["fp32", "formats"])
def test_offloaded_parameters_of_every_dtype_have_the_bits_of_plain_ones(
    dtype: torch.dtype, url: str
) -> None:
    def use(model, optimizer, engine):
        found = trained(model, optimizer)
        assert engine is None or engine.report().prefetches > 0
        return found

    alike(use, partial(stack, dtype=dtype, device=url), budget="60%")
    if is_fake:  # it computes as the CPU does
        on_cpu, there = stack(dtype=dtype, device=url)[0].cpu(), stack(dtype=dtype, device=url)
        optimizer = nearstep.optim.AdamW(on_cpu.parameters(), lr=1e-2, device=url)
        assert trained(on_cpu, optimizer) == trained(*there)


def test_moments_are_where_their_parameter_is() -> None:
    model, optimizer = stack()
    trained(model, optimizer, 1)
    state = optimizer.state_dict()["state"]
    assert {state[index]["exp_avg"].device.type for index in state} == {COMPUTE.type}
    assert {state[index]["step"].device.type for index in state} == {"cpu"}
    other, again = stack()
    again.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    assert trained(model, optimizer) == trained(other, again)


def test_copies_go_beside_what_the_accelerator_computes() -> None:
    model, optimizer = stack()
    with nearstep.offload(model, optimizer, budget="60%") as engine:
        before = accelerator.counts().late if is_fake else 0
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH, device=COMPUTE)).sum().backward()
            optimizer.step()
        found = engine.report()
        assert found.prefetches > 0
        if is_fake:
            late = accelerator.counts().late - before
            assert late == found.fetches + found.prefetches + found.gradients


def test_memory_of_the_accelerator_is_that_of_the_budget() -> None:
    if not is_fake:
        pytest.skip("an allocator of a GPU keeps memory: counted on the fake one")
    width = 256
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    model.to(COMPUTE)
    optimizer = nearstep.optim.SGD(model.parameters(), lr=0.1, device="golden:axdimm?rules=sgd")
    x = torch.zeros(1, width, device=COMPUTE)
    layer = width * width * 4
    with nearstep.offload(model, optimizer, budget=3 * layer) as engine:
        base = accelerator.counts().nbytes
        peaks = []
        for _ in range(3):
            model(x).sum().backward()
            peaks.append(accelerator.counts().nbytes - base)
            optimizer.step()
        torch.accelerator.synchronize()
        assert max(peaks) <= 3 * layer + 64 * width * 4  # activations are a row each
        assert engine.report().peak <= 3 * layer


def test_models_are_made_there_and_go_at_once() -> None:
    whole, plain = stack()
    largest = max(each.numel() * 4 for each in whole.parameters())
    torch.manual_seed(training.SEED)
    with nearstep.offload.init(device=GOLDEN) as init, torch.device(COMPUTE):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    assert init.report().peak == largest
    assert {each.device.type for each in model.parameters()} == {COMPUTE.type}
    optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=init.device)
    state = {name: each.cpu() for name, each in model.state_dict().items()}
    with nearstep.offload(model, optimizer, budget="60%"):
        found = trained(model, optimizer)
    whole.load_state_dict(state)
    assert found == trained(whole, plain)


@torch.library.custom_op("nearstep_test::halve", mutates_args=())
def halve(x: Tensor) -> None:
    """What does not say what it does."""
    x.data.mul_(0.5)


def by_storage(p: Tensor) -> None:
    words = torch.empty(0, device=p.device, dtype=p.dtype)
    words.set_(p.detach().untyped_storage(), 0, p.shape, p.stride()).mul_(0.5)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda p: p.data.mul_(0.5),
    "data of a view": lambda p: p.view(-1).data.mul_(0.5),
    "data of a view without gradients": torch.no_grad()(lambda p: p.view(-1).data.mul_(0.5)),
    "data of what is detached": lambda p: p.detach().data.mul_(0.5),
    "an operator": lambda p: torch.ops.nearstep_test.halve(p),
    "storage": by_storage,
    "in place": torch.no_grad()(lambda p: p.mul_(0.5)),
    "other data": lambda p: setattr(p, "data", p.detach() * 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_are_changed_there_are_sent(change: str) -> None:
    def use(model, optimizer, _):
        first = trained(model, optimizer, 1)
        for parameter in model.parameters():
            CHANGES[change](parameter)
        return first, steps(model, optimizer, 3)

    alike(use, stack, budget="40%")


def test_what_torch_does_not_tell_of_is_looked_for_where_it_is_still_there() -> None:
    def use(model, optimizer, _):
        steps(model, optimizer, 1)
        weight = model[2].weight
        weight.sum()  # it is here
        lent = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight))
        lent.mul_(0.5)
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH, device=COMPUTE)).sum().backward()
        optimizer.step()
        lent.mul_(0.5)
        del lent
        return steps(model, optimizer, 3)

    alike(use, stack, budget="100%")


def test_a_layer_that_is_thawed_has_its_values_in_its_new_place() -> None:
    def use(model, optimizer, _):
        for thawed in (False, True):
            model.first.bias.requires_grad_(thawed)
            model(torch.ones(4, WIDTH, device=COMPUTE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    alike(use, lambda: made(Plan(kind="frozen")), budget="100%")


def test_a_model_whose_engine_is_closed_is_in_the_memory_of_the_accelerator() -> None:
    plan = Plan(kind="stack")
    model, optimizer = made(plan)
    found = everywhere(plan, Decision(Mode.DHA))
    engine = nearstep.offload(model, optimizer, budget="100%", policy="memferry", plan=found)
    before = accelerator.counts().nbytes if is_fake else 0
    state = bits(model.state_dict())
    engine.close()
    assert bits(model.state_dict()) == state
    if is_fake:
        nbytes = sum(each.numel() * 4 for each in model.parameters())
        assert accelerator.counts().nbytes - before == nbytes


def test_in_place_is_mapped_memory_of_the_host() -> None:
    plan = Plan(kind="stack")
    found = train_in_least(plan, policy="memferry", plan=everywhere(plan, Decision(Mode.DHA)))
    assert_equal(found, train(plan))
    assert found.report is not None
    assert found.report.peak_parameters == found.report.fetches == found.report.prefetches == 0
    model, optimizer = made(plan)
    options = {"policy": "memferry", "plan": places(model, {"layers.0": Decision(Mode.DHA)})}
    with nearstep.offload(model, optimizer, budget="100%", **options) as engine:
        weight = model.layers[0].weight
        copy = next(each for each in engine._space.copies if each.parameter is weight)
        assert copy.present
        assert copy.storage is not None
        assert weight.device.type == COMPUTE.type
        before = weight.detach().cpu()
        x = torch.ones(4, WIDTH, device=COMPUTE)
        model(x).sum().backward()
        optimizer.step()
        assert not torch.equal(weight.detach().cpu(), before)


def test_a_plan_is_made_in_the_first_step() -> None:
    plan = Plan(kind="stack", steps=3)
    assert_equal(train_in_least(plan, policy="memferry"), train(plan))
    model, optimizer = made(plan)
    with nearstep.offload(model, optimizer, budget="100%", policy="memferry") as engine:
        assert engine.plan is None
        trained(model, optimizer)
        assert engine.plan is not None
        assert engine.shadow is not None


@pytest.mark.parametrize("source", ["modelled", "measured"])
def test_a_model_is_profiled_where_it_computes(source: Any) -> None:
    def profiled(device: torch.device) -> Profile:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8)).to(device)
        x = torch.randn(256, 64, device=device)
        state = torch.get_rng_state()
        found = profile(
            model,
            lambda: model(x).square().mean().backward(),
            platform="memferry-a100",
            gpu="gpu0",
            source=source,
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert all(each.grad is None for each in model.parameters())
        return found

    there, here = profiled(COMPUTE), profiled(torch.device("cpu"))
    assert [each.name for each in there.layers] == ["0", "2"]
    assert [each.trained for each in there.layers] == [True, True]
    for one, other in zip(there.layers, here.layers, strict=True):
        assert one.backward_write_s == pytest.approx(one.backward_s + one.send_s)  # apart
        assert one.forward_s > 0 < one.backward_s
        if source == "modelled" and is_fake:  # CUDA has other operations
            assert (one.forward_s, one.backward_s) == (other.forward_s, other.backward_s)
    if source == "measured":
        assert f"measured on {COMPUTE}" in there.description
        assert "measured on this CPU" in here.description
    plan = planner.make(there, budget=there.layers[0].parameter_bytes).plan
    assert [*plan.layers] == ["0", "2"]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(kind="stack")
    model, optimizer = made(plan)
    engine = nearstep.offload(model, optimizer, budget="100%")
    with pytest.raises(UnsupportedOptionError, match="layers compute on the CPU while"):
        engine.record("axdimm").__enter__()
    engine.close()
    direct = everywhere(plan, Decision(Mode.DHA))
    monkeypatch.delitem(MAPPERS, COMPUTE.type)
    with pytest.raises(UnsupportedOptionError, match=f"not on {COMPUTE.type}"):
        nearstep.offload(model, optimizer, budget="100%", policy="memferry", plan=direct)
    mixed = nn.Sequential(nn.Linear(4, 4, device=COMPUTE), nn.Linear(4, 4))
    optimizer = nearstep.optim.AdamW(mixed.parameters(), device=GOLDEN)
    with pytest.raises(ParameterError, match="as the first one, not on cpu"):
        nearstep.offload(mixed, optimizer, budget="100%")
    with pytest.raises(ParameterError, match="as the first one, not on cpu"):
        profile(mixed, lambda: None, platform="memferry-a100", gpu="gpu0")


# The program's own streams


def test_a_stream_of_the_programs_own() -> None:
    def use(model, optimizer, _):
        torch.accelerator.synchronize()
        with torch.Stream(device=COMPUTE):
            found = trained(model, optimizer)
        torch.accelerator.synchronize()
        return found

    alike(use, stack, budget="60%")


def test_streams_that_use_parameters_without_waiting_for_each_other() -> None:
    kept: list[Tensor] = []  # the program's own memory goes when all has ended

    def use(model, optimizer, engine):
        stream, losses = torch.Stream(device=COMPUTE), []
        for x in torch.ones(3, 4, WIDTH, device=COMPUTE):
            torch.accelerator.synchronize()
            optimizer.zero_grad()
            first = second = x
            for layer in model:
                first = layer(first)
                with stream:
                    second = layer(second)
            torch.accelerator.current_stream().wait_stream(stream)
            (first * second).sum().backward()
            losses.append((first + second).sum().item())
            optimizer.step()
        kept.extend((first, second))
        assert engine is None or engine.report().prefetches > 0
        return losses

    alike(use, stack, budget="60%")


def test_the_hosts_memory_stays_until_kernels_that_read_it_in_place_have_run() -> None:
    plan = Plan(kind="stack")
    model, optimizer = made(plan)
    options = {"policy": "memferry", "plan": everywhere(plan, Decision(Mode.DFGB))}
    with nearstep.offload(model, optimizer, budget="100%", **options) as engine:
        for _ in range(3):  # nothing has the host wait between forward and backward
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH, device=COMPUTE)).sum().backward()
            optimizer.step()
        assert engine.report().releases > 0


def test_gradients_that_are_yet_to_be_negated() -> None:
    def negated() -> training.Made:
        model, optimizer = stack()
        for parameter in model.parameters():
            parameter.register_hook(torch._neg_view)
        return model, optimizer

    alike(lambda model, optimizer, _: trained(model, optimizer), negated, budget="60%")


def under_way(budget: str) -> tuple[nn.Module, Any, Any, Tensor]:
    """A model, its optimizer, its engine, which has begun fetches, and what the model gave."""
    model, optimizer = stack()
    engine = nearstep.offload(model, optimizer, budget=budget)
    model(torch.ones(4, WIDTH, device=COMPUTE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    result = model[0](torch.ones(4, WIDTH, device=COMPUTE))
    arrivals = [copy.arrival for copy in engine._space.copies]
    assert sum(each is not None and each.staged is not None for each in arrivals) > 1
    return model, optimizer, engine, result


def assert_goes(gone: weakref.ref[Any]) -> None:
    for _ in range(100):  # a thread of torch's may have the last of backward yet
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.05)
    assert gone() is None


def test_a_model_that_goes_while_copies_to_it_are_under_way() -> None:
    model, optimizer, engine, result = under_way("80%")
    result.sum().backward()
    gone = weakref.ref(engine)
    del model, optimizer, engine, result
    assert_goes(gone)


def test_a_closed_model_is_there_for_every_stream() -> None:
    model, _, engine, _ = under_way("400%")
    assert all(copy.present for copy in engine._space.copies)
    engine.close()
    with torch.Stream(device=COMPUTE):
        found = [each.detach().clone() for each in model.parameters()]
    torch.accelerator.synchronize()
    assert bits(found) == bits(list(model.parameters()))


def test_a_gradient_that_cannot_be_sent_is_not_counted_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LinkError(Exception):
        pass

    def fail(_: DeviceGradient) -> None:
        monkeypatch.undo()
        raise LinkError

    def run() -> list[Any]:
        x = torch.ones(4, WIDTH, device=COMPUTE)
        model(x).sum().backward()
        return state_of(model, optimizer)

    found = []
    for fails in (False, True):
        model, optimizer = stack()
        with nearstep.offload(model, optimizer, budget="300%") as engine:
            run()
            torch.accelerator.synchronize()
            if fails:
                monkeypatch.setattr(DeviceGradient, "land", fail)
                with pytest.raises(LinkError):
                    optimizer.step()
            optimizer.step()
            assert engine._space.sent == engine._space.ledger.gradients == 0
            found.append(run())
    assert found[0] == found[1]


# The checker of orders of streams is one that trips.


def test_an_update_waits_for_copies_from_the_memory_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forward before a step has the parameters from before the step."""
    waited, ends = [], DeviceParameter._end_reads

    def seen(parameter: DeviceParameter) -> None:
        waited.append(parameter.reader)
        ends(parameter)

    def outputs(model: nn.Module, optimizer: Any) -> list[Any]:
        found = []
        for number in range(3):
            x = torch.full((4, WIDTH), number + 1.0, device=COMPUTE)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                out = model(x)
            optimizer.step()
            found.append(bits(out))
        return found

    expected = outputs(*stack())
    monkeypatch.setattr(DeviceParameter, "_end_reads", seen)
    model, optimizer = stack(device=HOST)
    with nearstep.offload(model, optimizer, budget="60%"):
        assert outputs(model, optimizer) == expected
        assert sum(each is not None for each in waited) >= 3 * len(model), "in each step"
        table = optimizer.table.parameters.values()
        assert not any(each.reader for each in table if each.offloaded)


def test_bytes_are_counted_once_whether_or_not_memory_can_be_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for pins in (True, False):
        if not pins:
            monkeypatch.delitem(PINNERS, COMPUTE.type)
        model, optimizer = stack(device=HOST)
        with nearstep.offload(model, optimizer, budget="60%"):
            found.append((trained(model, optimizer), optimizer.traffic.as_dict()))
    assert found[0][0] == found[1][0]
    assert found[0][1]["parameters_up"] == found[1][1]["parameters_up"] > 0


def without_waiting_for_memory(self: Streams, staged: Tensor, target: Tensor) -> Arrival:
    with self._up:
        target.copy_(staged, non_blocking=True)
        event = self._up.record_event()
    return Arrival(self._device, event, staged=staged)


def without_meeting(self: Arrival, parameter: Tensor) -> None:
    pass


def without_the_gradient(self: Streams, gradient: Tensor) -> Download:
    staged = torch.empty_like(gradient, device="cpu", pin_memory=True)
    with self._down:
        staged.copy_(gradient, non_blocking=True)
        return Download(gradient, staged, self._down.record_event())


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (Streams, "upload", without_waiting_for_memory),
        (Arrival, "meet", without_meeting),
        (Streams, "download", without_the_gradient),
    ],
)
def test_a_wait_that_is_left_out_is_seen(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any
) -> None:
    if not is_fake:
        pytest.skip("what a GPU leaves to chance is not seen on it")
    monkeypatch.setattr(where, name, broken)
    train_in_least(Plan(kind="stack", steps=2))
    assert accelerator.hazards() != []
