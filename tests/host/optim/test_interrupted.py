"""A step that fails half way is never called done, and a checkpoint heals it."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch

import nearstep
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.errors import BusResponseError, BusyError, DeviceError, WaitTimeoutError
from nearstep.torch.errors import InterruptedStepError

from ...interrupts import Interrupts
from .beside import Beside, clone, step_alone
from .conftest import like_torch

URLS = [
    "golden:axdimm?memory_bytes=1MiB",
    "golden:axdimm?channels=2&block_bytes=512&memory_bytes=2MiB",
    "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB",
]

FAILURES = {
    "read answered with SLVERR": ({"kind": "slverr", "write": False}, "g", BusResponseError),
    "write answered with DECERR": ({"kind": "decerr", "write": True}, "v", BusResponseError),
    "read never answered": ({"kind": "never", "write": False}, "m", WaitTimeoutError),
}


class Interrupted(Beside):
    """An optimizer whose fourth step fails in the second of two runs, and a checkpoint."""

    def __init__(self, url, monkeypatch):
        self.opened = nearstep.open(url)
        super().__init__(
            "AdamW",
            self.opened,
            grouped=lambda ps: [{"params": ps[:1]}, {"params": ps[1:]}],
            own={"max_cycles": 20_000},
        )
        addresses = []
        update = self.opened.run_rule

        def spy(optimizer, arrays, **options):
            addresses.append({name: each.address for name, each in arrays.items()})
            return update(optimizer, arrays, **options)

        with monkeypatch.context() as patch:
            patch.setattr(self.opened, "run_rule", spy)
            self.step(3)
        self.second_run = addresses[-1]
        self.before = clone(self.mine.parameters)
        self.saved = self.mine.optimizer.state_dict()

    def fail(self, failure):
        options, array, error = FAILURES[failure]
        backend = self.opened.backend
        assert isinstance(backend, EmulatedBackend)
        address = self.second_run[array]
        backend.inject(Injection(base=address, limit=address + 64, **options))
        generator = self.generator.get_state()
        self.give()
        with pytest.raises(error):
            self.mine.optimizer.step()
        backend.heal()
        self.generator.set_state(generator)


@pytest.fixture(params=URLS)
def before(request, monkeypatch):
    prepared = Interrupted(request.param, monkeypatch)
    yield prepared
    prepared.opened.close()


@pytest.fixture(params=FAILURES)
def interrupted(request, before):
    before.fail(request.param)
    return before


def test_the_host_keeps_the_old_parameters_and_counts_no_step(interrupted):
    ours, optimizer = interrupted.mine.parameters, interrupted.mine.optimizer
    assert all(torch.equal(p, saved) for p, saved in zip(ours, interrupted.before, strict=True))
    assert optimizer.traffic.steps == 3
    assert optimizer.state[ours[0]]["step"] == 3


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer: optimizer.step(),
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.state[optimizer.param_groups[1]["params"][0]]["exp_avg"],
        pickle.dumps,
        copy.deepcopy,
    ],
    ids=["step", "state_dict", "state", "pickle", "deepcopy"],
)
def test_it_refuses_further_use(use, before):
    before.fail("read answered with SLVERR")
    with pytest.raises(InterruptedStepError, match="BusResponseError"):
        use(before.mine.optimizer)


@like_torch
def test_a_checkpoint_heals_it(interrupted):
    with torch.no_grad():
        for p, saved in zip(interrupted.mine.parameters, interrupted.before, strict=True):
            p.copy_(saved)
    interrupted.mine.optimizer.load_state_dict(interrupted.saved)
    interrupted.step(2)
    interrupted.check()


@like_torch
def test_other_optimizers_of_the_device_go_on(interrupted):
    other = Beside("AdamW", interrupted.opened)
    other.step()
    other.check()


@like_torch
def test_a_step_that_could_not_start_may_be_repeated(before, monkeypatch):
    def busy(*_, **__) -> None:
        raise BusyError("another run has not ended")

    before.give()
    with monkeypatch.context() as patch:
        patch.setattr(before.opened, "run_rule", busy)
        with pytest.raises(DeviceError):
            before.mine.optimizer.step()
    step_alone(before)
    before.check()


def _groups(parameters):
    a, b, c = parameters
    return [{"params": [a]}, {"params": [b, c], "lr": 2e-2}]


@like_torch
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layout", ["dense", "strided"])
@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_ctrl_c_leaves_the_old_step_or_the_new_one_on_the_host(kind, first, layout):
    seed = 11
    print(f"seed {seed}")
    shapes = [(16, 16), (48, 1), (32, 4)]
    ours_of, fused = getattr(nearstep.optim, kind), {"fused": True} if kind == "AdamW" else {}

    def begin(made, **on):
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(each, generator=generator) for each in shapes]
        parameters = [torch.nn.Parameter(each) for each in tensors]
        if layout == "strided" and made is ours_of:
            wide = [torch.stack([p.detach(), p.detach()], -1) for p in parameters]
            parameters = [torch.nn.Parameter(each[..., 0]) for each in wide]
        return parameters, made(_groups(parameters), lr=1e-2, **on)

    def step(parameters, optimizer, number):
        generator = torch.Generator().manual_seed(number)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    def found(parameters, optimizer):
        states = [optimizer.state.get(p, {}) for p in parameters]
        tensors = [*parameters, *(s[k] for s in states for k in s if k != "exp_avg_sq")]
        return [each.detach().contiguous().numpy().tobytes() for each in tensors]

    reference = begin(getattr(torch.optim, kind), **fused)
    expected = [found(*reference)]
    for number in range(4):
        step(*reference, number)
        expected.append(found(*reference))
    before = 0 if first else 1

    def run(at):
        ours = begin(ours_of)
        for number in range(before):
            step(*ours, number)
        interrupts = Interrupts(at)
        try:
            with interrupts.armed():
                step(*ours, before)
        except KeyboardInterrupt:
            pass
        made = expected.index(found(*ours))
        assert made in (before, before + 1), interrupts.where
        for number in range(made, 4):
            step(*ours, number)
        assert found(*ours) == expected[4], interrupts.where
        return interrupts, made

    run(0)  # a first step compiles, and does more
    whole, _ = run(0)
    late = range(whole.count - 2_500, whole.count)  # where tensors are changed
    ends = [run(at) for at in [whole.count // 3, *random.Random(seed).sample(late, 30)]]
    assert all(interrupts.where for interrupts, _ in ends)
    assert {made for _, made in ends} == {before, before + 1}
