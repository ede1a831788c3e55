"""Steps as graphs: bits, what is counted, overlap in device cycles, and what a failure leaves."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import BusResponseError, BusyError, DeviceError, WaitTimeoutError
from nearstep.placement import Placement
from nearstep.torch import table as tables
from nearstep.torch.errors import GradientError, InterruptedStepError
from nearstep.torch.exchange import pieces
from nearstep.torch.homes import home
from nearstep.torch.homes.home import DeviceHome
from nearstep.work.trace import trace

from ..driver.conftest import DIMMS, EVERYTHING
from .beside import Beside, parameters, tensors
from .conftest import like_torch

SIM = DIMMS["sim-dimm"]
GOLDEN = f"golden:axdimm?block_bytes=512&memory_bytes=8MiB&{EVERYTHING}&channels="
SHAPES = ((3,), (64, 65), (16,), (), (5, 5), (4097,), (0,), (2048,), (20_000,), (7,), (33, 16))
"""Small ones and large ones, most of which end within a line."""

LARGE = ((128, 320), (16,), (512, 32), (8192,), (64,))
"""Of whole blocks of 16, so that torch's fused step has the same bits."""


@pytest.fixture
def as_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Devices without a clock make graphs, too, of many pieces; or those with one do not."""

    def choose(yes: bool) -> None:
        monkeypatch.setattr(tables, "DeviceHome", partial(DeviceHome, overlaps=yes))
        monkeypatch.setattr(home, "FEWEST", 512)

    return choose


def train(url: str, give, dtype=torch.float32, steps=3, **options: Any):
    """Parameters, state and counters after some steps; parameters are changed between them."""
    with nearstep.open(url) as device:
        ps = parameters(SHAPES, dtype)
        groups = [{"params": ps[:4]}, {"params": ps[4:]}]
        optimizer = nearstep.optim.AdamW(groups, lr=1e-2, device=device, **options)
        scaler = nearstep.optim.GradScaler(init_scale=2.0**10) if dtype != torch.float32 else None
        if scaler is not None:
            scaler.scale(torch.ones(()))
        for turn in range(steps):
            give(ps)
            if turn == 1:
                ps[7].grad = None  # its neighbours are no longer that
                with torch.no_grad():
                    ps[5].mul_(0.5)
            if scaler is None:
                optimizer.step()
                continue
            if turn == 1:
                ps[8].grad[-1] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        found = [p.detach().clone() for p in ps]
        for state in optimizer.state_dict()["state"].values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
        assert all(channel.run.ended for channel in device.channels)
        return found, optimizer.traffic.as_dict()


CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "norm": {"max_grad_norm": 0.5},
    "fp16 with a scaler": {"dtype": torch.float16},
    "bf16 with a scaler": {"dtype": torch.bfloat16},
    "pairs": {"compression": 0.1},
    "pairs in any order": {"compression": 0.03, "compression_form": "scatter"},
    "16-bit pairs and norm": {
        "compression": 0.2,
        "max_grad_norm": 1.0,
        "compression_format": "bf16",
    },
}


@pytest.mark.parametrize(
    ("case", "channels"), [*product(CASES, (1, 2)), ("dense", 4), ("pairs in any order", 4)]
)
def test_graphs_have_the_bits_and_the_traffic_of_a_sequence(case, channels, as_graphs):
    results = []
    for yes in (False, True):
        as_graphs(yes)
        generator = torch.Generator().manual_seed(99)

        def give(ps, generator=generator):
            for p in ps:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)

        results.append(train(f"{GOLDEN}{channels}", give, **CASES[case]))
    (expected, before), (found, after) = results
    compared = 0
    for one, other in zip(expected, found, strict=True):
        assert (
            one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()
            if (one.dtype != torch.bfloat16)
            else torch.equal(one.view(torch.int16), other.view(torch.int16))
        )
        compared += one.numel()
    assert compared > 3 * 30_000
    several = channels > 1 and not ("max_grad_norm" in CASES[case] and "compression" in CASES[case])
    assert (after.pop("launches") > before.pop("launches")) == several
    for each in (before, after):
        del each["run_seconds"], each["cycles"], each["step_cycles"]
    assert before == after
    print(f"{compared} values compared, seed 99; {after}")


def test_a_step_without_transfers_is_one_piece_and_takes_fewer_cycles(monkeypatch):
    seed = 21
    print(f"seed {seed}")
    monkeypatch.setattr(home, "FEWEST", 512)
    pieces_of = DeviceHome.pieces

    def cut(self, launches, *, whole, transfers):
        return pieces_of(self, launches, whole=whole, transfers=True)

    found = {}
    for name, made in (("cut", cut), ("whole", pieces_of)):
        monkeypatch.setattr(DeviceHome, "pieces", made)
        generator = torch.Generator().manual_seed(seed)
        with nearstep.open(SIM) as device:
            ps = [torch.randn(n, generator=generator).requires_grad_() for n in (3000, 16, 2048)]
            optimizer = nearstep.optim.AdamW(ps, lr=1e-2, device=device)
            for p in ps:
                resident = optimizer.resident(p)
                resident.push()
                resident.hold_gradient(torch.randn(p.shape, generator=generator))
            optimizer.step()
            for p in ps:
                optimizer.resident(p).pull()
            traffic = optimizer.traffic
            found[name] = ([p.detach().clone() for p in ps], traffic.launches, traffic.step_cycles)
    (expected, launches, slow), (ours, one_each, fast) = found["cut"], found["whole"]
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert one_each == 2 < launches
    print(f"{launches} runs in {slow} cycles, {one_each} in {fast}")
    assert fast < slow


def give_normal(seed: int) -> Callable[..., None]:
    generator = torch.Generator().manual_seed(seed)
    print(f"seed {seed}")

    def give(*lists):
        for same in zip(*lists, strict=True):
            values = torch.randn(same[0].shape, generator=generator)
            for p in same:
                p.grad = values.clone()

    return give


@pytest.fixture
def dimm() -> Iterator[nearstep.Device]:
    with nearstep.open(SIM) as device:
        yield device


@like_torch
def test_a_step_on_two_channels_takes_little_more_than_its_busiest_resource(dimm):
    beside = Beside("AdamW", dimm, tensors(LARGE))
    optimizer = beside.mine.optimizer
    assert optimizer.timeline is None
    for _ in range(3):
        beside.give()
        begun = dimm.cycles
        optimizer.step()
        cycles = dimm.cycles - begun
        beside.torchs.optimizer.step()
        timeline = optimizer.timeline
        busy = {lane: timeline.busy(lane) for lane in timeline.lanes}
        print("step", cycles, "timeline", timeline.makespan, busy)
        assert set(busy) == {"bus", "channel 0", "channel 1"}
        assert timeline.limit == max(busy.values())
        assert timeline.makespan == cycles
        assert cycles <= 1.1 * timeline.limit
    beside.check()


def test_a_graph_takes_fewer_cycles_than_a_sequence_and_always_the_same(as_graphs, monkeypatch):
    def cycles(overlaps: bool) -> tuple[int, object]:
        monkeypatch.setattr(tables, "DeviceHome", partial(DeviceHome, overlaps=overlaps))
        with nearstep.open(SIM) as device:
            ps = parameters(LARGE)
            optimizer = nearstep.optim.AdamW(ps, lr=1e-2, device=device)
            give = give_normal(6)
            give(ps)
            optimizer.step()
            give(ps)
            begun = device.cycles
            optimizer.step()
            spent = device.cycles - begun
            return spent, trace(optimizer.timeline)

    once, again, sequence = cycles(True), cycles(True), cycles(False)
    assert once == again
    print("graph", once[0], "sequence", sequence[0])
    assert once[0] < 0.9 * sequence[0]


def test_a_small_step_takes_about_as_long_as_in_sequence(monkeypatch):
    found = {}
    for overlaps in (True, False):
        monkeypatch.setattr(tables, "DeviceHome", partial(DeviceHome, overlaps=overlaps))
        with nearstep.open(SIM) as device:
            ps = parameters(((300,), (7, 5)))
            optimizer = nearstep.optim.AdamW(ps, lr=1e-2, device=device)
            give = give_normal(7)
            for _ in range(2):
                give(ps)
                begun = device.cycles
                optimizer.step()
                found[overlaps] = device.cycles - begun
    print(found)
    assert found[True] <= 1.02 * found[False]  # commands to the first channel come earlier


def test_the_timeline_keeps_no_data(dimm):
    ps = parameters(LARGE)
    optimizer = nearstep.optim.AdamW(ps, device=dimm)
    give_normal(8)(ps)
    optimizer.step()
    gradients = [weakref.ref(p.grad) for p in ps]
    for p in ps:
        p.grad = None
    assert [each() for each in gradients] == [None] * len(ps)
    assert len(optimizer.timeline.entries) > 6


@pytest.fixture(params=["golden", "sim"])
def failing(request, as_graphs):
    """A device, an optimizer that has made a step, its parameters; and a checkpoint."""
    as_graphs(True)
    url = f"{GOLDEN}2" if request.param == "golden" else SIM
    with nearstep.open(url) as device:
        ps = parameters(((64, 128), (16,), (4096,)))
        optimizer = nearstep.optim.AdamW(ps, lr=1e-2, device=device, max_cycles=20_000)
        give_normal(9)(ps)
        optimizer.step()
        yield device, optimizer, ps


def check_heals(device, optimizer, ps, before, saved):
    """A checkpoint is loaded, and the next step has the bits of one that was never interrupted."""
    assert not any(channel.accelerated for channel in device.channels)
    for p, bits in zip(ps, before, strict=True):
        assert torch.equal(p, bits)
    assert optimizer.traffic.steps == 1
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(InterruptedStepError):
            use()
    optimizer.load_state_dict(saved)
    twins = [p.detach().clone().requires_grad_() for p in ps]
    twin = nearstep.optim.AdamW(twins, lr=1e-2, device=device)
    twin.load_state_dict(saved)
    give_normal(10)(ps, twins)
    optimizer.step()
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(ps, twins, strict=True))


def test_a_failure_in_the_middle_is_typed_and_a_checkpoint_heals_it(failing):
    device, optimizer, ps = failing
    before, saved = [p.detach().clone() for p in ps], optimizer.state_dict()
    golden = device.cycles is None
    where = optimizer.table.parameters[ps[2]].extent.views("m")[1].address
    kind, error = ("slverr", BusResponseError) if golden else ("never", WaitTimeoutError)
    device.backend.inject(Injection(kind=kind, write=False, base=where, limit=where + 64))
    with pytest.raises(error) as caught:
        optimizer.step()
    device.backend.heal()
    (note,) = caught.value.__notes__
    print(note)
    assert "failed: " in note
    if not golden:
        assert caught.value.max_cycles > 20_000
        assert " fetch p " in note
    check_heals(device, optimizer, ps, before, saved)


def test_a_step_that_could_not_start_a_run_may_be_repeated(failing, monkeypatch):
    device, optimizer, ps = failing
    twins = [p.detach().clone().requires_grad_() for p in ps]
    twin = nearstep.optim.AdamW(twins, lr=1e-2, device=device)
    twin.load_state_dict(optimizer.state_dict())

    def busy(*_, **__) -> None:
        raise BusyError("another run has not ended")

    give_normal(11)(ps, twins)
    with monkeypatch.context() as patch:
        patch.setattr(device, "run_rule", busy)
        with pytest.raises(BusyError):
            optimizer.step()
    optimizer.step()
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(ps, twins, strict=True))


def test_a_start_whose_answer_is_lost_has_begun(failing, monkeypatch):
    device, optimizer, ps = failing
    before, saved = [p.detach().clone() for p in ps], optimizer.state_dict()
    run_rule = device.run_rule

    def lost(*arguments, **options):
        run_rule(*arguments, **options).wait()
        raise DeviceError("no answer to a write of a register")

    give_normal(12)(ps)
    with monkeypatch.context() as patch:
        patch.setattr(device, "run_rule", lost)
        with pytest.raises(DeviceError, match="no answer"):
            optimizer.step()
    check_heals(device, optimizer, ps, before, saved)


def test_ctrl_c_in_the_middle_leaves_the_device_idle(failing, monkeypatch):
    device, optimizer, ps = failing
    before, saved = [p.detach().clone() for p in ps], optimizer.state_dict()
    update, runs = device.run_rule, []

    def press(*arguments, **options):
        if len(runs) == 3:
            signal.raise_signal(signal.SIGINT)
        runs.append(update(*arguments, **options))
        return runs[-1]

    with monkeypatch.context() as patch:
        patch.setattr(device, "run_rule", press)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert len(runs) == 3
    assert all(run.ended for run in runs)
    check_heals(device, optimizer, ps, before, saved)


def test_a_norm_that_is_not_finite_updates_nothing(as_graphs):
    as_graphs(True)
    with nearstep.open(f"{GOLDEN}2") as device:
        ps = parameters(SHAPES)
        optimizer = nearstep.optim.AdamW(ps, device=device, max_grad_norm=1.0)
        before = [p.detach().clone() for p in ps]
        give = give_normal(12)
        give(ps)
        ps[1].grad[0, 0] = torch.nan
        with pytest.raises(GradientError):
            optimizer.step()
        assert all(torch.equal(p, bits) for p, bits in zip(ps, before, strict=True))
        give(ps)
        optimizer.step()


def test_a_copy_of_another_thread_waits_for_the_end_of_a_reservation():
    with nearstep.open(f"{GOLDEN}2") as device:
        buffers = [device.alloc(64, channel=channel) for channel in range(2)]
        for buffer in buffers:
            buffer.fill(1.0)
        done: list[int] = []
        with device.reserved():
            with device.acceleration(0):
                buffers[1].write(np.zeros(64, np.float32))
            other = threading.Thread(target=lambda: done.append(int(buffers[0].read()[0])))
            other.start()
            other.join(0.2)
            assert not done
        other.join()
        assert done == [1]


@pytest.mark.parametrize("elements", [None, 256, 512, 1024])
@pytest.mark.parametrize("whole", [False, True])
def test_pieces_have_every_element_once_and_are_cut_where_all_channels_had_their_turn(
    elements, whole
):
    with nearstep.open(f"{GOLDEN}2") as device:
        placement = Placement(device)
        extents = placement.place([100, 3000, 16, 700, 1, 5000])
        launches = list(placement.launches((e, n > 3) for n, e in enumerate(extents)))
        work = pieces(launches, elements, 256, whole=whole)
    cuts = [cut for piece in work for cut in piece]
    assert len(launches) == 2
    for launch in launches:
        own = [(cut.start, cut.stop) for cut in cuts if cut.launch is launch]
        assert (own[0][0], own[-1][1]) == (launch.start, launch.stop)
        assert all(a[1] == b[0] for a, b in pairwise(own))
        assert not whole or len(own) == 1
        assert all(stop % 256 == 0 for _, stop in own[:-1])
    sizes = [sum(cut.stop - cut.start for cut in piece) for piece in work]
    if elements is None:
        assert len(sizes) == 1
    elif not whole:
        assert all(elements <= size < elements + 256 for size in sizes[1:-1])
        assert 256 <= sizes[0] < 512
