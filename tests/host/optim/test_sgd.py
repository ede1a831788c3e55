"""SGD on the device against `torch.optim.SGD` with `fused=True`, bit for bit."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch

import nearstep
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.errors import ArgumentError, BusResponseError
from nearstep.torch.errors import (
    HyperparameterError,
    InterruptedStepError,
    StateError,
    UnsupportedOptionError,
)

CAPABILITY = torch.backends.cpu.get_cpu_capability()

pytestmark = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"ATen's capability is {CAPABILITY}; its fused SGD is vectorised for AVX2 and AVX512",
)

OPTIONS = {
    "default": {},
    "decay": {"lr": 0.1, "weight_decay": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "momentum_and_decay": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "dampening_one": {"lr": 0.1, "momentum": 0.5, "dampening": 1.0},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "nesterov_and_decay": {"lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.3},
    "momentum_above_one": {"lr": 0.1, "momentum": 1.5},
    "lr_zero": {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.1},
    "maximize": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    "maximize_without_momentum": {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
}
FLAGS = ["foreach", "differentiable"]


def clone(parameters):
    return [p.detach().clone().requires_grad_() for p in parameters]


def alone(parameters):
    """A group for each: torch's fused step starts all momentum buffers of a group at once."""
    return [{"params": [p]} for p in parameters]


@pytest.fixture
def pair(many_rules, make_parameters):
    """Both lists of parameters, an optimizer and torch's, of these options."""

    def make(grouped=list, **options):
        ours, theirs = make_parameters(), make_parameters()
        optimizer = nearstep.optim.SGD(grouped(ours), device=many_rules, **options)
        return ours, theirs, optimizer, torch.optim.SGD(grouped(theirs), fused=True, **options)

    return make


def train(steps, give_gradients, ours, theirs, optimizer, reference):
    for _ in range(steps):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ten_steps_equal_torch_fused(options, pair, give_gradients, assert_equal_bits):
    both = pair(**options)
    train(10, give_gradients, *both)
    assert_equal_bits(*both)
    optimizer = both[2]
    assert optimizer.traffic.launches == 10 * optimizer.device.channel_count


def test_groups_with_and_without_momentum(pair, give_gradients, assert_equal_bits):
    both = pair(
        lambda parameters: [
            {"params": parameters[:1], "momentum": 0.9},
            {"params": parameters[1:2], "weight_decay": 0.1},
            {"params": parameters[2:], "momentum": 0.5, "nesterov": True, "lr": 0.3},
        ],
        lr=0.1,
    )
    train(5, give_gradients, *both)
    assert_equal_bits(*both)


@pytest.mark.parametrize("nesterov", [False, True])
def test_parameters_without_a_gradient_start_their_momentum_later(
    nesterov, pair, make_parameters, many_rules, give_gradients, assert_equal_bits
):
    """In one group here, as in torch's steps that are not fused; in torch's fused in groups."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    _, theirs, _, reference = pair(alone, **options)
    ours = make_parameters()
    optimizer = nearstep.optim.SGD(ours, device=many_rules, **options)
    launches = []
    for skipped in [(1,), (), (0, 2), (1, 2), ()]:
        give_gradients(ours, theirs)
        for index in skipped:
            ours[index].grad = theirs[index].grad = None
        before = optimizer.traffic.launches
        optimizer.step()
        reference.step()
        launches.append(optimizer.traffic.launches - before)
        assert_equal_bits(ours, theirs, optimizer, reference)
    assert launches[1] >= 3  # the second parameter starts between its neighbours
    assert launches[4] == many_rules.channel_count


def test_torchs_fused_step_cannot_start_some_buffers_of_a_group(pair, give_gradients):
    """What the docstring says of torch."""
    ours, theirs, optimizer, reference = pair(momentum=0.9)
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        parameters[0].grad = torch.ones_like(parameters[0])
        chosen.step()
        parameters[1].grad = torch.ones_like(parameters[1])
    with pytest.raises(TypeError):
        reference.step()
    optimizer.step()
    assert torch.equal(optimizer.state[ours[1]]["momentum_buffer"], torch.ones_like(ours[1]))


def test_momentum_may_be_switched_on_and_off(pair, give_gradients, assert_equal_bits):
    both = ours, _, optimizer, reference = pair(lr=0.1)
    array = 4 * sum(p.numel() for p in ours)
    for momentum in (0.0, 0.9, 0.0, 0.5):
        free = optimizer.device.free_bytes
        for chosen in (optimizer, reference):
            chosen.param_groups[0]["momentum"] = momentum
        train(2, give_gradients, *both)
        assert_equal_bits(*both)
        needed = free - optimizer.device.free_bytes
        if momentum == 0.9:
            assert array <= needed < array + (1 << 15)
        else:
            assert needed == 0


def test_only_arrays_that_a_group_needs_are_allocated(many_rules, make_parameters):
    shapes = [(1 << 16,)]
    array = 4 << 16
    for options, arrays in (({}, 2), ({"momentum": 0.9}, 3)):
        free = many_rules.free_bytes
        optimizer = nearstep.optim.SGD(make_parameters(shapes), device=many_rules, **options)
        assert arrays * array <= free - many_rules.free_bytes < (arrays + 1) * array
        del optimizer
        assert many_rules.free_bytes == free


def test_only_gradients_and_parameters_move(pair, give_gradients):
    both = ours, _, optimizer, _ = pair(momentum=0.9)
    train(5, give_gradients, *both)
    nbytes = 4 * sum(p.numel() for p in ours)
    traffic = optimizer.traffic
    assert (traffic.gradients_down, traffic.parameters_up) == (5 * nbytes, 5 * nbytes)
    assert (traffic.masters_down, traffic.moments_down, traffic.moments_up) == (nbytes, 0, 0)


@pytest.mark.parametrize("size", [1, 7, 15, 17, 100, 4097])
@pytest.mark.parametrize("name", ["decay", "dampening", "nesterov_and_decay"])
def test_sizes_that_are_not_multiples_of_16_differ_only_in_torchs_scalar_tail(
    name, size, many_rules, make_parameters, give_gradients
):
    ours, theirs = make_parameters([(size,)]), make_parameters([(size,)])
    optimizer = nearstep.optim.SGD(ours, device=many_rules, **OPTIONS[name])
    reference = torch.optim.SGD(theirs, fused=True, **OPTIONS[name])
    train(6, give_gradients, ours, theirs, optimizer, reference)
    (a,), (b,) = ours, theirs
    pairs = [(a.detach(), b.detach())]
    pairs += [(optimizer.state[a][key], value) for key, value in reference.state[b].items()]
    assert len(pairs) == (1 if name == "decay" else 2)
    for mine, other in pairs:
        differ = (mine.view(torch.int32) != other.view(torch.int32)).nonzero().flatten().tolist()
        print(f"{len(differ)} of {size % 16} values of the tail differ from torch's")
        assert not [index for index in differ if index < size - size % 16]
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_nan_and_inf_gradients_follow_ieee_754_as_in_torch(many_rules, make_parameters):
    ours, theirs = make_parameters([(64,)]), make_parameters([(64,)])
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = nearstep.optim.SGD(ours, device=many_rules, **options)
    reference = torch.optim.SGD(theirs, fused=True, **options)
    gradient = torch.linspace(-1, 1, 64)
    gradient[3], gradient[17], gradient[40] = math.nan, math.inf, -math.inf
    gradient[50], gradient[51] = 3e38, -0.0
    for _ in range(3):
        ours[0].grad, theirs[0].grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    for a, b in (
        (ours[0].detach(), theirs[0].detach()),
        *((optimizer.state[ours[0]][k], v) for k, v in reference.state[theirs[0]].items()),
    ):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a[~a.isnan()].view(torch.int32), b[~b.isnan()].view(torch.int32))
        assert 0 < int(a.isnan().sum()) < 64


def test_a_learning_rate_in_a_tensor(pair, give_gradients, assert_equal_bits):
    both = _, _, optimizer, reference = pair(momentum=0.9)
    for scale in (1.0, 0.5, 0.25):
        for chosen in (optimizer, reference):
            chosen.param_groups[0]["lr"] = torch.tensor(1e-2 * scale)
        train(1, give_gradients, *both)
    assert_equal_bits(*both)


def test_state_has_torchs_keys(pair, give_gradients):
    for momentum in (0.0, 0.9):
        both = ours, _, optimizer, reference = pair(momentum=momentum)
        assert not optimizer.state
        train(1, give_gradients, *both)
        saved, expected = optimizer.state_dict(), reference.state_dict()
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys()
        assert len(saved["state"]) == (3 if momentum else 0)
        for index, state in expected["state"].items():
            assert type(saved["state"][index]) is dict
            assert list(saved["state"][index]) == list(state) == ["momentum_buffer"]
            buffer = saved["state"][index]["momentum_buffer"]
            assert torch.equal(buffer, state["momentum_buffer"])
        assert [id(p) for p in optimizer.state] == [id(p) for p in ours if momentum]


@pytest.mark.parametrize(
    "direction", ["to itself", "from torch", "to torch", "to torch that was not fused"]
)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_checkpoints_are_interchangeable_with_torchs(
    momentum, steps, direction, pair, many_rules, give_gradients, assert_equal_bits
):
    both = ours, theirs, optimizer, reference = pair(lr=0.1, momentum=momentum, weight_decay=0.01)
    train(steps, give_gradients, *both)
    source = reference if direction == "from torch" else optimizer
    resumed = clone(ours)
    if direction.startswith("to torch"):
        second = torch.optim.SGD(resumed, fused=True if direction == "to torch" else None)
    else:
        second = nearstep.optim.SGD(resumed, device=many_rules)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    for _ in range(4):
        give_gradients(ours, resumed, theirs)
        for each in (optimizer, second, reference):
            each.step()
        assert_equal_bits(resumed, theirs, second, reference)
        assert_equal_bits(ours, theirs, optimizer, reference)


def test_a_buffer_of_none_is_one_that_has_not_started(pair, give_gradients, assert_equal_bits):
    """Old checkpoints of torch have it."""
    both = ours, _, optimizer, reference = pair(lr=0.1, momentum=0.9)
    train(2, give_gradients, *both)
    for chosen in (optimizer, reference):
        saved = chosen.state_dict()
        saved["state"] = {index: {"momentum_buffer": None} for index in range(len(ours))}
        chosen.load_state_dict(saved)
    train(2, give_gradients, *both)
    assert_equal_bits(*both)


@pytest.mark.parametrize("how", ["load nothing", "clear", "replace", "delete", "pop", "None"])
def test_a_buffer_that_is_thrown_away_starts_again(how, pair, give_gradients, assert_equal_bits):
    both = ours, theirs, optimizer, reference = pair(alone, lr=0.1, momentum=0.9)
    train(3, give_gradients, *both)
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        p = parameters[1]
        if how == "load nothing":
            chosen.load_state_dict({**chosen.state_dict(), "state": {}})
        elif how == "clear":
            chosen.state[p].clear()
        elif how == "replace":
            chosen.state[p] = {}
        elif how == "delete":
            del chosen.state[p]
        elif how == "pop":
            chosen.state[p].pop("momentum_buffer")
        else:
            chosen.state[p]["momentum_buffer"] = None
    train(2, give_gradients, *both)
    assert_equal_bits(*both)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_buffer_may_be_changed_and_assigned(momentum, pair, give_gradients, assert_equal_bits):
    both = ours, theirs, optimizer, reference = pair(lr=0.1, momentum=momentum)
    train(2, give_gradients, *both)
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        for p in parameters:
            chosen.state[p]["momentum_buffer"] = torch.full_like(p, 0.25).detach()
        if momentum:
            chosen.state[parameters[0]]["momentum_buffer"].mul_(0.5)
    for later in (momentum, 0.9):
        for chosen in (optimizer, reference):
            chosen.param_groups[0]["momentum"] = later
        train(2, give_gradients, *both)
        assert_equal_bits(*both)
    with pytest.raises(StateError, match="'momentum_buffer' of shape"):
        optimizer.state[ours[0]]["momentum_buffer"] = torch.zeros(3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_copies_go_on_alone(momentum, pair, give_gradients, assert_equal_bits):
    both = ours, theirs, optimizer, reference = pair(lr=0.1, momentum=momentum)
    train(3, give_gradients, *both)
    pickled = pickle.loads(pickle.dumps((ours, optimizer)))
    copied = copy.deepcopy((ours, optimizer))
    assert pickled[1].device is not optimizer.device
    assert copied[1].device is optimizer.device
    for _ in range(2):
        give_gradients(ours, theirs, pickled[0], copied[0])
        for each in (optimizer, reference, pickled[1], copied[1]):
            each.step()
    for mine, chosen in ((ours, optimizer), pickled, copied):
        assert_equal_bits(mine, theirs, chosen, reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_16_bit_parameters_have_fp32_masters_and_buffers(
    momentum, dtype, many_rules, make_parameters, give_gradients
):
    options = {"lr": 1e-3, "momentum": momentum}
    ours = make_parameters(dtype=dtype)
    masters = [p.detach().float().requires_grad_() for p in ours]
    optimizer = nearstep.optim.SGD(ours, device=many_rules, **options)
    reference = torch.optim.SGD(masters, fused=True, **options)
    for step in range(6):
        if step == 3:  # a checkpoint keeps the bits that the parameters have not
            saved = optimizer.state_dict()
            ours = clone(ours)
            optimizer = nearstep.optim.SGD(ours, device=many_rules)
            optimizer.load_state_dict(saved)
            torch.optim.SGD(clone(ours), fused=True).load_state_dict(saved)
        give_gradients(ours)
        for p, master in zip(ours, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        reference.step()
    state = optimizer.state_dict()["state"]
    for index, (p, master) in enumerate(zip(ours, masters, strict=True)):
        assert torch.equal(p, master.to(dtype))
        assert torch.equal(state[index]["master_param"], master)
        if momentum:
            buffer = optimizer.state[p]["momentum_buffer"]
            assert torch.equal(buffer, reference.state[master]["momentum_buffer"])


def test_a_first_step_that_fails_half_way_starts_again(pair, give_gradients, assert_equal_bits):
    both = ours, _, optimizer, _ = pair(lr=0.1, momentum=0.9)
    before = clone(ours)
    saved = optimizer.state_dict()
    backend = optimizer.device.backend
    assert isinstance(backend, EmulatedBackend)
    backend.inject(Injection(kind="slverr", write=True, base=0, limit=1 << 26))
    give_gradients(ours)
    with pytest.raises(BusResponseError):
        optimizer.step()
    backend.heal()
    with pytest.raises(InterruptedStepError):
        optimizer.step()
    assert_equal_bits(ours, before)
    optimizer.load_state_dict(saved)
    assert not optimizer.state
    train(2, give_gradients, *both)
    assert_equal_bits(*both)


@pytest.mark.parametrize(
    ("rules", "momentum", "missing"),
    [
        ("", 0.0, "sgd"),
        ("", 0.9, "sgd_momentum"),
        ("&rules=adam,sgd", 0.9, "sgd_momentum"),
        ("&rules=sgd_momentum", 0.0, "sgd"),
    ],
)
def test_a_device_without_the_rule_is_refused_before_anything_is_allocated(
    rules, momentum, missing, monkeypatch
):
    with nearstep.open(f"golden:axdimm?memory_bytes=1MiB{rules}") as device:
        monkeypatch.setattr(device, "alloc", None)
        with pytest.raises(ArgumentError, match=rf"not {missing}: name it in .* rules="):
            nearstep.optim.SGD(
                [torch.ones(4, requires_grad=True)], momentum=momentum, device=device
            )


def test_momentum_that_the_kernel_does_not_have_is_refused_later_too(make_parameters):
    ours = make_parameters()
    with nearstep.open("golden:axdimm?memory_bytes=1MiB&rules=sgd") as device:
        optimizer = nearstep.optim.SGD(ours[:2], device=device)
        with pytest.raises(ArgumentError, match="rules="):
            optimizer.add_param_group({"params": ours[2:], "momentum": 0.9})
        assert len(optimizer.param_groups) == 1
        other = torch.optim.SGD(make_parameters()[:2], momentum=0.9)
        with pytest.raises(ArgumentError, match="rules="):
            optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["momentum"] == 0
        optimizer.param_groups[0]["momentum"] = 0.9
        ours[0].grad = torch.ones_like(ours[0])
        with pytest.raises(ArgumentError, match="rules="):
            optimizer.step()
        assert optimizer.traffic.gradients_down == 0


@pytest.mark.parametrize("flag", FLAGS)
def test_an_unsupported_flag_is_refused_by_name(flag, pair, make_parameters, many_rules):
    with pytest.raises(UnsupportedOptionError, match=f"{flag}=True is not supported"):
        nearstep.optim.SGD(make_parameters(), device=many_rules, **{flag: True})
    _, _, optimizer, _ = pair()
    with pytest.raises(UnsupportedOptionError, match=flag):
        optimizer.add_param_group({"params": make_parameters(), flag: True})
    optimizer.param_groups[0][flag] = True
    optimizer.step()  # without a gradient there is nothing to refuse
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.raises(UnsupportedOptionError, match=flag):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lr", {"lr": -1.0}),
        ("lr", {"lr": "fast"}),
        ("momentum", {"momentum": -0.9}),
        ("momentum", {"momentum": math.nan}),
        ("dampening", {"momentum": 0.9, "dampening": -0.1}),
        ("weight_decay", {"weight_decay": math.inf}),
        ("nesterov", {"nesterov": True}),
        ("nesterov", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ],
)
def test_a_bad_hyperparameter_is_refused_by_name(name, options, make_parameters, many_rules):
    with pytest.raises(HyperparameterError, match=f"^{name} must be"):
        nearstep.optim.SGD(make_parameters(), device=many_rules, **options)
    with pytest.raises(HyperparameterError, match=f"^{name} must be"):
        nearstep.optim.SGD([{"params": make_parameters(), **options}], device=many_rules)
