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


class Interrupted:
    """An optimizer whose fourth step fails in the second of two runs, and a checkpoint."""

    def __init__(self, url, make_parameters, give_gradients, monkeypatch):
        self.device = nearstep.open(url)
        self.ours, self.theirs = make_parameters(), make_parameters()
        self.optimizer = nearstep.optim.AdamW(
            self.groups(self.ours), lr=1e-2, device=self.device, max_cycles=20_000
        )
        self.reference = torch.optim.AdamW(self.groups(self.theirs), lr=1e-2, fused=True)
        addresses = []
        update = self.device.run_rule

        def spy(optimizer, arrays, **options):
            addresses.append({name: each.address for name, each in arrays.items()})
            return update(optimizer, arrays, **options)

        with monkeypatch.context() as patch:
            patch.setattr(self.device, "run_rule", spy)
            for _ in range(3):
                give_gradients(self.ours, self.theirs)
                self.optimizer.step()
                self.reference.step()
        self.second_run = addresses[-1]
        self.parameters = [p.detach().clone() for p in self.ours]
        self.state = self.optimizer.state_dict()

    @staticmethod
    def groups(parameters):
        return [{"params": parameters[:1]}, {"params": parameters[1:]}]

    def fail(self, failure, give_gradients):
        options, array, error = FAILURES[failure]
        backend = self.device.backend
        assert isinstance(backend, EmulatedBackend)
        address = self.second_run[array]
        backend.inject(Injection(base=address, limit=address + 64, **options))
        give_gradients(self.ours)
        with pytest.raises(error):
            self.optimizer.step()
        backend.heal()


@pytest.fixture(params=URLS)
def before(request, make_parameters, give_gradients, monkeypatch):
    prepared = Interrupted(request.param, make_parameters, give_gradients, monkeypatch)
    yield prepared
    prepared.device.close()


@pytest.fixture(params=FAILURES)
def interrupted(request, before, give_gradients):
    before.fail(request.param, give_gradients)
    return before


def test_the_host_keeps_the_old_parameters_and_counts_no_step(interrupted):
    for p, saved in zip(interrupted.ours, interrupted.parameters, strict=True):
        assert torch.equal(p, saved)
    assert interrupted.optimizer.traffic.steps == 3
    assert interrupted.optimizer.state[interrupted.ours[0]]["step"] == 3


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
def test_it_refuses_further_use(use, before, give_gradients):
    before.fail("read answered with SLVERR", give_gradients)
    with pytest.raises(InterruptedStepError, match="BusResponseError"):
        use(before.optimizer)


@like_torch
def test_a_checkpoint_heals_it(interrupted, give_gradients, assert_equal_bits):
    ours, theirs = interrupted.ours, interrupted.theirs
    with torch.no_grad():
        for p, saved in zip(ours, interrupted.parameters, strict=True):
            p.copy_(saved)
    interrupted.optimizer.load_state_dict(interrupted.state)
    for _ in range(2):
        give_gradients(ours, theirs)
        interrupted.optimizer.step()
        interrupted.reference.step()
    assert_equal_bits(ours, theirs, interrupted.optimizer, interrupted.reference)


def test_other_optimizers_of_the_device_go_on(
    interrupted, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    optimizer = nearstep.optim.AdamW(ours, device=interrupted.device)
    reference = torch.optim.AdamW(theirs, fused=True)
    give_gradients(ours, theirs)
    optimizer.step()
    reference.step()
    assert_equal_bits(ours, theirs, optimizer, reference)


@like_torch
def test_a_step_that_could_not_start_may_be_repeated(
    before, give_gradients, monkeypatch, assert_equal_bits
):
    def busy(*_, **__) -> None:
        raise BusyError("another run has not ended")

    give_gradients(before.ours, before.theirs)
    with monkeypatch.context() as patch:
        patch.setattr(before.device, "run_rule", busy)
        with pytest.raises(DeviceError):
            before.optimizer.step()
    before.optimizer.step()
    before.reference.step()
    assert_equal_bits(before.ours, before.theirs, before.optimizer, before.reference)


def _groups(parameters):
    a, b, c = parameters
    return [{"params": [a]}, {"params": [b, c], "lr": 2e-2}]


@like_torch
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_ctrl_c_leaves_the_old_step_or_the_new_one_on_the_host(first, layout, make_parameters):
    seed = 11
    print(f"seed {seed}")
    shapes = [(16, 16), (48,), (32, 4)]

    def begin(made, **on):
        parameters = make_parameters(shapes)
        if layout == "strided" and made is nearstep.optim.AdamW:
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
        tensors = [*parameters, *(s[k] for s in states for k in ("step", "exp_avg") if k in s)]
        return [each.detach().contiguous().numpy().tobytes() for each in tensors]

    reference = begin(torch.optim.AdamW, fused=True)
    expected = [found(*reference)]
    for number in range(4):
        step(*reference, number)
        expected.append(found(*reference))
    before = 0 if first else 1

    def run(at):
        ours = begin(nearstep.optim.AdamW)
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

    whole, _ = run(0)
    late = range(whole.count - 2_500, whole.count)  # where tensors are changed
    ends = [run(at) for at in [whole.count // 3, *random.Random(seed).sample(late, 30)]]
    assert all(interrupts.where for interrupts, _ in ends)
    assert {made for _, made in ends} == {before, before + 1}
