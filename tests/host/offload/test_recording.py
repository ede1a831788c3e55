"""Recordings: the same bits, in time that overlaps, within the budget at every moment of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.base import Completion
from nearstep.errors import ArgumentError, DeviceError
from nearstep.measure.overlap import Overlap, Stack
from nearstep.torch.errors import EarlyUpdateError, InterruptedStepError, UnsupportedOptionError
from nearstep.torch.offload import Engine
from nearstep.torch.offload.errors import RecordingError
from nearstep.torch.offload.recording import backward_and_update
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import PlatformError

from ..overflow.jobs import drives
from . import training
from .models import KINDS
from .test_equality import random_plans
from .training import (
    Plan,
    assert_all_equal,
    assert_equal,
    bits,
    budget_of,
    state_of,
    train,
    train_in_least,
)

RULES = "rules=adam,sgd,sgd_momentum,adagrad"
ONE = f"golden:axdimm?memory_bytes=2MiB&{RULES}"
TWO = f"golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB&{RULES}"
DIMM = "sim:axdimm?memory=ddr4-1600&block_bytes=512&functional_units=4&channels=2&fu=native"
RTL = "sim:axdimm?memory=ideal"
SEED = 5021
WIDTH = 32
LAYER = 4 * WIDTH * WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


# Bits


def check_random_plans(count: int, seed: int) -> None:
    print(f"seed {seed}")
    checked = 0
    for number, (plan, share, policy) in enumerate(random_plans(count, seed)):
        plan = replace(plan, device=(ONE, TWO)[number % 2])
        plain = train(plan)
        least = train_in_least(plan, policy=policy, platform="axdimm")
        more = int(budget_of(least) * share)
        found = [least, train(plan, budget=more, policy=policy, platform="axdimm")]
        if plan.passes == 1 and not plan.keeps:
            options: dict[str, Any] = {"policy": policy, "updates": "in-backward"}
            found.append(train(plan, budget=more, platform="axdimm", **options))
        checked += assert_all_equal(found, plain, plan)
    assert checked >= 2 * count


def test_random_trainings_that_are_recorded() -> None:
    check_random_plans(3, SEED)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10))
def test_many_random_trainings_that_are_recorded(seed: int) -> None:
    check_random_plans(25, seed)


QUICK = [(kind, "in-backward") for kind in ("stack", "tied", "reentrant")]
EVERY = [(kind, updates) for kind in KINDS for updates in ("at-step", "in-backward")]


@pytest.mark.parametrize(
    ("kind", "updates"),
    [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.deep) for each in EVERY],
)
def test_every_kind_in_the_time_of_the_rtl(kind: str, updates: str) -> None:
    plan = Plan(kind=kind, device=DIMM)
    assert_equal(train_in_least(plan, updates=updates, platform="axdimm"), train(plan))


# Time


def layers(count: int, device: str, **more: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(count)
    linear = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
    model = nn.Sequential(*(each for layer in linear for each in (layer, nn.Tanh())))
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=device, **more)


step = partial(training.step, seed=3, rows=64)


def recorded(count: int, room: int, device: str, **options: Any) -> tuple[Timeline, Engine]:
    """The second step of a stack."""
    overlaps, platform = options.pop("overlaps", True), options.pop("platform", "axdimm")
    model, optimizer = layers(count, device)
    engine = nearstep.offload(model, optimizer, budget=room * LAYER, **options)
    step(model, optimizer)
    with engine.record(platform, overlaps=overlaps) as recording:
        step(model, optimizer)
    return recording.timeline, engine


def module_of(name: str) -> str:
    """The module that an operation of a stack is about."""
    return name.split(" ")[-1].removesuffix(".weight").split(" ")[0]


def occupied(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """From when to when which module's parameter or gradient is on the compute device at least."""
    by_index = {entry.operation.index: entry for entry in timeline.entries}
    computing: dict[str, list[tuple[int, int]]] = {}
    for entry in timeline.entries:
        kind, _, rest = entry.operation.name.partition(" ")
        if kind in ("forward", "backward"):
            computing.setdefault(module_of(rest), []).append((entry.start, entry.end))
    fetches: dict[str, dict[int, list[int]]] = {}
    for entry in timeline.entries:
        if entry.operation.name.startswith("fetch "):
            own = fetches.setdefault(module_of(entry.operation.name), {})
            own.setdefault(entry.start, []).append(entry.end)
    for module, starts in fetches.items():
        times = sorted(starts)
        for first, following in zip(times, [*times[1:], timeline.makespan + 1], strict=True):
            uses = [end for start, end in computing[module] if first <= start < following]
            if uses:
                yield first, max(uses), module
    for entry in timeline.entries:
        if entry.operation.name.startswith("send "):
            made = [by_index[need] for need in entry.operation.needs]
            ends = [each.end for each in made if each.operation.name.startswith("backward ")]
            yield max(ends), entry.end, f"gradient of {module_of(entry.operation.name)}"


@pytest.mark.parametrize("device", [ONE, pytest.param(RTL, marks=pytest.mark.deep)])
@pytest.mark.parametrize(("count", "room"), [(6, 2), (6, 3), (8, 5)])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_what_is_on_the_compute_device_at_any_time_is_within_the_budget(
    device: str, count: int, room: int, updates: str
) -> None:
    timeline, engine = recorded(count, room, device, updates=updates)
    spans = list(occupied(timeline))
    assert len(spans) >= 3 * count - room  # what is fetched once, again for backward, and gradients
    most = 0
    for moment in sorted({start for start, _, _ in spans}):
        here = {what for start, end, what in spans if start <= moment < end}
        most = max(most, len(here))
    assert 2 <= most <= room
    assert engine.report().peak <= room * LAYER


@pytest.mark.parametrize("device", [TWO, DIMM])
def test_a_resource_does_one_thing_at_a_time_and_bytes_are_those_of_the_report(device: str) -> None:
    model, optimizer = layers(6, device)
    with nearstep.offload(model, optimizer, budget=4 * LAYER, updates="in-backward") as engine:
        step(model, optimizer)
        before = engine.report()
        with engine.record("axdimm") as recording:
            step(model, optimizer)
        after = engine.report()
    timeline = recording.timeline
    checked = 0
    for entries in timeline.lanes.values():
        ordered = sorted(entries, key=lambda each: each.start)
        for one, other in pairwise(ordered):
            assert one.end <= other.start
            checked += 1
    assert checked > 60
    assert set(timeline.lanes) == {"bus", "channel 0", "channel 1", "gpu"}
    moved: Counter[str] = Counter()
    for entry in timeline.entries:
        kind = entry.operation.name.split(" ")[0]
        touched = entry.operation.reads if kind == "fetch" else entry.operation.writes
        moved[kind] += sum(each.stop - each.start for each in touched)
    assert moved["fetch"] == after.parameters_up - before.parameters_up
    assert moved["send"] == after.gradients_down - before.gradients_down == 6 * LAYER
    assert moved["update"] == 6 * LAYER * 3  # p, m and v
    needs = {e.operation.index: e for e in timeline.entries}
    for entry in timeline.entries:
        for need in entry.operation.needs:
            assert needs[need].end <= entry.start


def test_a_step_that_is_recorded_counts_no_forward_and_backward() -> None:
    cycles = []
    for records in (False, True):
        model, optimizer = layers(4, DIMM)
        with nearstep.offload(model, optimizer, budget=3 * LAYER) as engine:
            step(model, optimizer)
            before = optimizer.traffic.step_cycles
            with engine.record("axdimm") if records else nullcontext():
                step(model, optimizer, rows=4096)
            cycles.append(optimizer.traffic.step_cycles - before)
    assert cycles[0] > 0
    assert 0.8 < cycles[1] / cycles[0] < 1.25  # runs begin with other changes of mode under way


def test_without_overlap_one_thing_is_done_after_the_other() -> None:
    timeline, engine = recorded(6, 4, TWO, updates="in-backward", overlaps=False)
    engine.close()
    ordered = sorted(timeline.entries, key=lambda each: each.start)
    assert all(one.end <= other.start for one, other in pairwise(ordered))
    assert timeline.makespan == sum(each.duration for each in ordered)
    overlapped, engine = recorded(6, 4, TWO, updates="in-backward")
    engine.close()
    phase, serial = backward_and_update(overlapped), backward_and_update(timeline)
    assert phase.duration < 0.7 * serial.duration
    assert phase.longest <= phase.duration
    assert phase.busy["gpu"] == serial.busy["gpu"]


def test_modelled_times_are_those_of_the_platform() -> None:
    machine = load("axdimm")
    timeline, engine = recorded(3, 8, ONE, policy="on-demand", overlaps=False)
    engine.close()
    gpu = machine.processors["gpu"]
    flops, memory = float(gpu.flops["fp32"]), float(gpu.memory_bytes_per_s or 0)
    seconds = {
        "fetch": LAYER / min(hop.bytes_per_s for hop in machine.route("axdimm.0", "gpu")),
        "send": LAYER / min(hop.bytes_per_s for hop in machine.route("gpu", "axdimm.0")),
        "update": 3 * WIDTH * WIDTH / (float(machine.dimms["axdimm"].adam_params_per_s) / 2),
    }
    product = max(2 * 64 * WIDTH * WIDTH / flops, (4 * WIDTH * WIDTH + 8 * 64 * WIDTH) / memory)
    tanh = max(64 * WIDTH / flops, 8 * 64 * WIDTH / memory)
    seconds["forward"] = product + tanh
    checked: Counter[str] = Counter()
    for entry in timeline.entries:
        kind, _, rest = entry.operation.name.partition(" ")
        if kind in seconds and (kind, rest) != ("forward", "4"):  # which has the loss, too
            assert abs(entry.duration - seconds[kind] * 1e12) <= 2, entry.operation.name
            checked[kind] += 1
    assert checked == {"fetch": 3, "send": 3, "update": 1, "forward": 2}


def test_links_beyond_the_bus_of_a_dimm_take_their_time() -> None:
    machine = load("axdimm")
    found = {}
    for rate in (0.2e9, 100e9):
        figure = replace(machine.links["pcie"].bytes_per_s, value=rate)
        pcie = replace(machine.links["pcie"], bytes_per_s=figure)
        platform = replace(machine, links={**machine.links, "pcie": pcie})
        timeline, engine = recorded(3, 8, DIMM, platform=platform, overlaps=False)
        engine.close()
        moves = [e for e in timeline.entries if e.operation.name.split(" ")[0] in ("fetch", "send")]
        found[rate] = [each.duration for each in moves]
        for each in moves:  # a half to each channel
            least = LAYER / 2 / rate * timeline.hertz if timeline.hertz else 0
            assert each.duration >= int(least) > 0
    assert len(found[0.2e9]) == len(found[100e9]) == 12
    assert min(found[0.2e9]) > 4 * max(found[100e9])  # there it is the bus


@pytest.mark.deep
@pytest.mark.parametrize(
    ("count", "rows", "room", "most"),
    [(24, 1024, 6, 1.1), (24, 4096, 6, 1.1), (12, 8192, 6, 1.1), (12, 2048, 5, 1.15)],
)
def test_overlap_on_two_channels_of_the_rtl(count: int, rows: int, room: int, most: float) -> None:
    """Layers of 16,384 parameters: changes of mode take part of the time of a transfer."""
    device = "sim:axdimm?memory=ddr4-1600&channels=2"
    found = Overlap.of(Stack(device=device, layers=count, width=128, batch=rows, room=room))
    assert found.bits == 0
    assert found.ratio <= most
    assert found.gain > 1.6


def test_a_computation_waits_for_no_transfer_while_others_have_left_room() -> None:
    """Three parameters and two gradients fit: a gradient is sent while the next one is computed."""
    stack = Stack(device="golden:axdimm?channels=2", layers=6, width=128, batch=4096, room=5)
    timeline = Overlap.of(stack).overlapped.timeline
    assert timeline is not None
    named = (e for e in timeline.entries if e.operation.name.startswith("backward "))
    computed = sorted(named, key=lambda entry: entry.start)
    assert [after.start - before.end for before, after in pairwise(computed)] == [0] * 11


# What is recorded, and what is not


@pytest.mark.parametrize("on", [TWO, pytest.param(DIMM, marks=pytest.mark.deep)])
def test_clipping_and_parameters_beside_are_recorded_too(on: str) -> None:
    """Steps that look at the gradients first, or fetch what they leave."""

    def trained(**options: Any) -> tuple[Any, Timeline | None]:
        torch.manual_seed(4)
        model, beside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 1)
        parameters = [*model.parameters(), *beside.parameters()]
        device = f"{on}&scan=yes&gradient_scale=yes"
        optimizer = nearstep.optim.AdamW(parameters, lr=1e-2, device=device, max_grad_norm=0.1)
        engine = nearstep.offload(model, optimizer, **options) if options else None
        timeline = None
        for number in range(2):
            optimizer.zero_grad()
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            if engine is None:
                beside(model(x)).square().mean().backward()
                optimizer.step()
                continue
            with engine.record("axdimm") as recording:
                beside(model(x)).square().mean().backward()
                optimizer.step()
            timeline = recording.timeline
        if engine is not None:
            engine.close()
        return bits([each.detach() for each in parameters]), timeline

    found, timeline = trained(budget="200%")
    assert found == trained()[0]
    assert timeline is not None
    kinds = Counter(entry.operation.name.split(" ")[0] for entry in timeline.entries)
    assert kinds["fetch"] >= 2
    if on == DIMM:  # steps have a timeline of their own where there is a clock
        assert kinds["scan"] == 2
        assert kinds["update"] >= 2


def test_what_else_reads_the_device_gets_what_is_there() -> None:
    model, optimizer = layers(4, DIMM)
    plain, plain_optimizer = layers(4, DIMM)
    with nearstep.offload(model, optimizer, budget=6 * LAYER) as engine, engine.record("axdimm"):
        for _ in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
            for each in (model, plain):
                each(x).sum().backward()
            gradients = [p.grad for p in model.parameters()][::3]
            assert bits(gradients) == bits([p.grad for p in plain.parameters()][::3])
            assert bits(model.state_dict()) == bits(plain.state_dict())
            optimizer.step()
            plain_optimizer.step()
            assert bits(optimizer.state_dict()) == bits(plain_optimizer.state_dict())
            assert bits(model(x)) == bits(plain(x))
    assert bits(model.state_dict()) == bits(plain.state_dict())


def assert_like_steps(
    model: nn.Module, optimizer: Any, make: Callable[[], Any], count: int
) -> None:
    """A plain model has the same state after so many steps."""
    plain, its = make()
    for _ in range(count):
        step(plain, its)
    assert state_of(model, optimizer) == state_of(plain, its)


def test_an_engine_may_be_closed_in_a_recording() -> None:
    model, optimizer = layers(4, TWO)
    engine = nearstep.offload(model, optimizer, budget=3 * LAYER)
    with engine.record("axdimm"):
        step(model, optimizer)
        engine.close()
        step(model, optimizer)
    assert_like_steps(model, optimizer, lambda: layers(4, TWO), 2)


# Faults


@pytest.mark.parametrize(
    ("error", "machine", "said"),
    [
        (PlatformError, {"platform": "nothing"}, "nothing"),
        (ArgumentError, {"platform": "axdimm", "host_params_per_s": -1.0}, "above 0 and finite"),
        (ArgumentError, {"platform": "axdimm", "compute": "cpu"}, "compute must be"),
        (ArgumentError, {"platform": "axdimm", "compute": "none"}, "compute must be"),
        (ArgumentError, {"platform": "axdimm", "memory": "gpu"}, "memory must be"),
        (ArgumentError, {"platform": "memferry-v100"}, "memory must be"),
    ],
)
def test_machines_that_cannot_be(error: type[Exception], machine: Any, said: str) -> None:
    model, optimizer = layers(2, ONE)
    engine = nearstep.offload(model, optimizer, budget=4 * LAYER)
    with pytest.raises(error, match=said), engine.record(**machine):
        raise AssertionError
    with engine.record("axdimm"):
        step(model, optimizer)
    engine.close()


@pytest.mark.parametrize("platform", ["memferry-v100", "memferry-a100"])
def test_a_host_whose_rate_the_platform_does_not_know(platform: str) -> None:
    model, optimizer = layers(4, ONE)
    compute = "gpu0" if platform == "memferry-a100" else "gpu"
    found = {}
    with nearstep.offload(model, optimizer, budget=6 * LAYER) as engine:
        step(model, optimizer)
        for rate in (1e9, 2e9):
            with engine.record(platform, compute=compute, host_params_per_s=rate) as recording:
                step(model, optimizer)
            updates = [e for e in recording.timeline.entries if "update" in e.operation.name]
            assert len(updates) == 1
            found[rate] = updates[0].duration
    assert abs(found[1e9] - 2 * found[2e9]) <= 2
    assert abs(found[1e9] - 4 * WIDTH * WIDTH / 1e9 * 1e12) <= 2


def test_a_device_of_more_channels_than_the_platform_is_refused() -> None:
    model, optimizer = layers(2, "golden:axdimm?channels=4")
    engine = nearstep.offload(model, optimizer, budget=4 * LAYER)
    with pytest.raises(ArgumentError, match="2 channels"), engine.record("axdimm"):
        raise AssertionError


def test_recordings_that_cannot_begin(tmp_path: Any) -> None:
    model, optimizer = layers(2, ONE)
    engine = nearstep.offload(model, optimizer, budget=4 * LAYER)
    again = pytest.raises(RecordingError, match="already")
    with engine.record("axdimm"), again, engine.record("axdimm"):
        raise AssertionError
    engine.close()
    with pytest.raises(RecordingError, match="closed"), engine.record("axdimm"):
        raise AssertionError
    torch.manual_seed(1)
    plain = nn.Linear(WIDTH, WIDTH)
    card = f"golden:smartssd?memory_bytes=1MiB&drive={tmp_path}"
    engine = nearstep.offload(
        plain, nearstep.optim.AdamW(plain.parameters(), device=card), budget="300%"
    )
    with pytest.raises(UnsupportedOptionError, match="cards' drives"), engine.record("axdimm"):
        raise AssertionError
    with drives(3) as on:
        plain = nn.Linear(WIDTH, WIDTH)
        more: Any = {"device": ONE, "drives": on.store, "memory": "1MiB"}
        optimizer = nearstep.optim.AdamW(plain.parameters(), **more)
        engine = nearstep.offload(plain, optimizer, budget="300%")
        with pytest.raises(ArgumentError, match="3 drives or more, not 2"), engine.record("axdimm"):
            raise AssertionError


@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
@pytest.mark.parametrize("device", [TWO, pytest.param(DIMM, marks=pytest.mark.deep)])
def test_transfers_of_drives_are_recorded_beside_updates(device: str, updates: Any) -> None:
    """As many bytes as the drives transfer; a drive transfers one array at a time."""
    with drives() as on:
        model, optimizer = layers(6, device, drives=on.store, memory=13 * LAYER)
        engine = nearstep.offload(model, optimizer, budget=4 * LAYER, updates=updates)
        step(model, optimizer)
        before = optimizer.traffic.as_dict()
        with engine.record("axdimm") as recording:
            step(model, optimizer)
        after, timeline = optimizer.traffic.as_dict(), recording.timeline
        engine.close()
    moved: Counter[str] = Counter()
    ends = {entry.operation.index: entry.end for entry in timeline.entries}
    for entry in timeline.entries:
        kind, operation = entry.operation.name.split(" ")[0], entry.operation
        assert all(ends[need] <= entry.start for need in operation.needs)
        if "drives" in operation.holds:
            touched = operation.writes if kind == "load" else operation.reads
            direct = LAYER * (kind in ("fetch", "send"))  # between drives and compute device
            moved[kind] += direct or sum(each.stop - each.start for each in touched)
    assert moved["load"] + moved["fetch"] == after["from_drives"] - before["from_drives"] > 0
    assert moved["store"] + moved["send"] == after["to_drives"] - before["to_drives"]
    gradients = moved["store"] + moved["send"] - 18 * LAYER  # besides p, m and v
    assert gradients > 0 if updates == "at-step" else gradients == 0
    lanes = timeline.lanes
    for entries in lanes.values():
        ordered = sorted(entries, key=lambda each: each.start)
        assert all(one.end <= other.start for one, other in pairwise(ordered))
    updating = [each for each in timeline.entries if each.operation.name.startswith("update")]
    beside = [
        each
        for each in lanes["drives"]
        if any(one.start < each.end and each.start < one.end for one in updating)
    ]
    assert len(updating) >= 12
    assert len(beside) > 3


def test_an_exception_of_the_program_ends_a_recording() -> None:
    model, optimizer = layers(4, DIMM)
    engine = nearstep.offload(model, optimizer, budget=3 * LAYER)
    step(model, optimizer)
    before = bits(model.state_dict())

    def failing() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), engine.record("axdimm"):
        failing()
    optimizer.zero_grad()
    assert bits(model.state_dict()) == before
    step(model, optimizer)
    engine.close()
    assert_like_steps(model, optimizer, lambda: layers(4, DIMM), 2)


def fail(device: AxdimmDevice, method: str, after: int) -> Callable[[], None]:
    """Have a method of the device's backend fail once; what makes it whole again."""
    backend: Any = device.backend
    original, left = getattr(backend, method), [after]

    def failing(*arguments: Any) -> Completion:
        left[0] -= 1
        if not left[0]:
            raise DeviceError("the device is gone")
        found: Completion = original(*arguments)
        return found

    setattr(backend, method, failing)
    return lambda: setattr(backend, method, original)


@pytest.mark.parametrize("method", ["read_memory", "write_memory"])
@pytest.mark.parametrize("after", [1, 3, 6])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_a_transfer_that_fails(method: str, after: int, updates: str) -> None:
    """Either all is as before the step, or the optimizer refuses steps: nothing is half there."""
    with nearstep.open(DIMM) as device:
        assert isinstance(device, AxdimmDevice)
        make = partial(training.stack, 4, WIDTH, bias=False)
        model, optimizer = make(device=device)
        engine = nearstep.offload(model, optimizer, budget=3 * LAYER, updates=updates)  # type: ignore[arg-type]
        step(model, optimizer)
        saved = model.state_dict(), optimizer.state_dict()
        mend = fail(device, method, after)
        with pytest.raises(DeviceError, match="gone"), engine.record("axdimm"):
            step(model, optimizer)
        mend()
        try:
            step(model, optimizer)
        except (EarlyUpdateError, InterruptedStepError):
            assert updates == "in-backward"
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            step(model, optimizer)
        engine.close()
        assert_like_steps(model, optimizer, partial(make, device=DIMM), 2)
