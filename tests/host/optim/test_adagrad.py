"""Adagrad on the device against `torch.optim.Adagrad` with `fused=True`, bit for bit."""

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
from nearstep.torch.errors import HyperparameterError, StateError, UnsupportedOptionError

from .conftest import late_adagrad

CAPABILITY = torch.backends.cpu.get_cpu_capability()

pytestmark = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"ATen's capability is {CAPABILITY}; its fused Adagrad is vectorised for AVX2 and "
    "AVX512",
)

OPTIONS = {
    "default": {},
    "decay": {"lr": 0.1, "weight_decay": 0.1},
    "decay_of_the_rate": {"lr": 0.5, "lr_decay": 0.1},
    "initial_value": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "all": {
        "lr": 0.3,
        "lr_decay": 1e-3,
        "weight_decay": 0.01,
        "initial_accumulator_value": 0.7,
        "eps": 1e-3,
    },
    "eps_zero": {"eps": 0.0, "initial_accumulator_value": 1e-20},
    "lr_zero": {"lr": 0.0, "weight_decay": 0.1},
    "maximize": {"weight_decay": 0.1, "maximize": True},
}
FLAGS = ["foreach", "differentiable"]


def clone(parameters):
    return [p.detach().clone().requires_grad_() for p in parameters]


@pytest.fixture
def pair(many_rules, make_parameters):
    """Both lists of parameters, an optimizer and torch's, of these options."""

    def make(grouped=list, **options):
        ours, theirs = make_parameters(), make_parameters()
        optimizer = nearstep.optim.Adagrad(grouped(ours), device=many_rules, **options)
        return ours, theirs, optimizer, torch.optim.Adagrad(grouped(theirs), fused=True, **options)

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


def test_groups_and_parameters_without_a_gradient(pair, give_gradients, assert_equal_bits):
    both = ours, theirs, optimizer, reference = pair(
        lambda parameters: [
            {"params": parameters[:1], "lr": 0.1},
            {"params": parameters[1:], "lr_decay": 0.5, "eps": 1e-5},
        ],
        initial_accumulator_value=0.1,
        weight_decay=0.1,
    )
    for skipped in [(1,), (), (0, 2), (1, 2), ()]:
        give_gradients(ours, theirs)
        for index in skipped:
            ours[index].grad = theirs[index].grad = None
        optimizer.step()
        reference.step()
        assert_equal_bits(*both)
    assert [int(optimizer.state[p]["step"]) for p in ours] == [4, 3, 3]


def test_state_from_the_beginning_as_in_torch(pair, give_gradients, assert_equal_bits):
    both = ours, _, optimizer, reference = pair(initial_accumulator_value=0.25)
    assert_equal_bits(*both)
    for steps in (0, 2):
        train(steps, give_gradients, *both)
        saved, expected = optimizer.state_dict(), reference.state_dict()
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys() == {0, 1, 2}
        for index, state in expected["state"].items():
            assert type(saved["state"][index]) is dict
            assert list(saved["state"][index]) == list(state) == ["step", "sum"]
            for key, value in state.items():
                assert torch.equal(saved["state"][index][key], value)
                assert saved["state"][index][key].dtype == value.dtype
    assert list(optimizer.state[ours[0]]) == ["step", "sum"]


@late_adagrad
def test_groups_that_are_added_later_start_like_torchs(
    pair, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs, optimizer, reference = pair(initial_accumulator_value=0.25)
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        parameters += make_parameters([(8, 16)])
        chosen.add_param_group({"params": parameters[-1:], "lr": 0.5})
        assert parameters[-1] not in chosen.state
    train(2, give_gradients, ours, theirs, optimizer, reference)
    assert_equal_bits(ours, theirs, optimizer, reference)


def test_a_frozen_parameter_has_memory_and_state_when_it_is_trained(
    many_rules, make_parameters, give_gradients, assert_equal_bits
):
    ours, theirs = make_parameters(), make_parameters()
    options = {"initial_accumulator_value": 0.5}
    for parameters in (ours, theirs):
        parameters[0].requires_grad_(False)
    optimizer = nearstep.optim.Adagrad(ours, device=many_rules, **options)
    reference = torch.optim.Adagrad(theirs, fused=True, **options)
    assert ours[0] not in optimizer.state
    free = many_rules.free_bytes
    for parameters in (ours, theirs):
        parameters[0].requires_grad_()
    train(2, give_gradients, ours, theirs, optimizer, reference)
    array = 4 * ours[0].numel()
    assert 3 * array <= free - many_rules.free_bytes < 4 * array
    assert {id(p) for p in optimizer.state} == {id(p) for p in ours}
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[a]["sum"], reference.state[b]["sum"])
    assert_equal_bits(ours, theirs)


def test_only_gradients_and_parameters_move(pair, give_gradients):
    both = ours, _, optimizer, _ = pair(initial_accumulator_value=0.5)
    train(5, give_gradients, *both)
    nbytes = 4 * sum(p.numel() for p in ours)
    traffic = optimizer.traffic
    assert (traffic.gradients_down, traffic.parameters_up) == (5 * nbytes, 5 * nbytes)
    assert (traffic.masters_down, traffic.moments_down, traffic.moments_up) == (nbytes, 0, 0)


@pytest.mark.parametrize("size", [1, 7, 15, 17, 100, 4097])
def test_sizes_that_are_not_multiples_of_16_differ_at_most_in_torchs_scalar_tail(
    size, many_rules, make_parameters, give_gradients
):
    ours, theirs = make_parameters([(size,)]), make_parameters([(size,)])
    optimizer = nearstep.optim.Adagrad(ours, device=many_rules, **OPTIONS["all"])
    reference = torch.optim.Adagrad(theirs, fused=True, **OPTIONS["all"])
    train(6, give_gradients, ours, theirs, optimizer, reference)
    (a,), (b,) = ours, theirs
    for mine, other in (
        (a.detach(), b.detach()),
        (optimizer.state[a]["sum"], reference.state[b]["sum"]),
    ):
        differ = (mine.view(torch.int32) != other.view(torch.int32)).nonzero().flatten().tolist()
        print(f"{len(differ)} of {size % 16} values of the tail differ from torch's")
        assert not [index for index in differ if index < size - size % 16]
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["to itself", "from torch", "to torch"])
@pytest.mark.parametrize("steps", [0, 3])
def test_checkpoints_are_interchangeable_with_torchs(
    steps, direction, pair, many_rules, give_gradients, assert_equal_bits
):
    both = ours, theirs, optimizer, reference = pair(**OPTIONS["all"])
    train(steps, give_gradients, *both)
    source = reference if direction == "from torch" else optimizer
    resumed = clone(ours)
    if direction == "to torch":
        second = torch.optim.Adagrad(resumed, fused=True)
    else:
        second = nearstep.optim.Adagrad(resumed, device=many_rules)
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


@late_adagrad
@pytest.mark.parametrize("how", ["load nothing", "clear all", "clear one", "delete"])
def test_state_that_is_thrown_away_starts_again_from_the_initial_value(
    how, pair, give_gradients, assert_equal_bits
):
    both = ours, theirs, optimizer, reference = pair(initial_accumulator_value=0.5)
    train(3, give_gradients, *both)
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        if how == "load nothing":
            chosen.load_state_dict({**chosen.state_dict(), "state": {}})
        elif how == "clear all":
            chosen.state.clear()
        elif how == "clear one":
            chosen.state[parameters[1]].clear()
        else:
            del chosen.state[parameters[1]]
    train(2, give_gradients, *both)
    assert_equal_bits(*both)


def test_a_sum_may_be_changed_and_assigned(pair, give_gradients, assert_equal_bits):
    both = ours, theirs, optimizer, reference = pair(lr=0.1)
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        chosen.state[parameters[0]]["sum"] = torch.full_like(parameters[0], 0.25).detach()
        chosen.state[parameters[1]]["sum"].add_(0.5)
        chosen.state[parameters[2]]["step"] = torch.tensor(7.0)
    train(2, give_gradients, *both)
    assert_equal_bits(*both)
    with pytest.raises(StateError, match="'sum' of shape"):
        optimizer.state[ours[0]]["sum"] = torch.zeros(3)
    del optimizer.state[ours[0]]["sum"]
    with pytest.raises(StateError, match="sum"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 3])
def test_copies_go_on_alone(steps, pair, give_gradients, assert_equal_bits):
    both = ours, theirs, optimizer, reference = pair(**OPTIONS["all"])
    train(steps, give_gradients, *both)
    pickled = pickle.loads(pickle.dumps((ours, optimizer)))
    copied = copy.deepcopy((ours, optimizer))
    for _ in range(2):
        give_gradients(ours, theirs, pickled[0], copied[0])
        for each in (optimizer, reference, pickled[1], copied[1]):
            each.step()
    for mine, chosen in ((ours, optimizer), pickled, copied):
        assert_equal_bits(mine, theirs, chosen, reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_have_fp32_masters_and_sums(
    dtype, many_rules, make_parameters, give_gradients
):
    ours = make_parameters(dtype=dtype)
    masters = [p.detach().float().requires_grad_() for p in ours]
    optimizer = nearstep.optim.Adagrad(ours, device=many_rules, **OPTIONS["all"])
    reference = torch.optim.Adagrad(masters, fused=True, **OPTIONS["all"])
    for step in range(6):
        if step == 3:
            saved = optimizer.state_dict()
            ours = clone(ours)
            optimizer = nearstep.optim.Adagrad(ours, device=many_rules)
            optimizer.load_state_dict(saved)
            torch.optim.Adagrad(clone(ours), fused=True).load_state_dict(saved)
        give_gradients(ours)
        for p, master in zip(ours, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        reference.step()
    state = optimizer.state_dict()["state"]
    for index, (p, master) in enumerate(zip(ours, masters, strict=True)):
        assert torch.equal(p, master.to(dtype))
        assert torch.equal(state[index]["master_param"], master)
        assert torch.equal(optimizer.state[p]["sum"], reference.state[master]["sum"])


def test_a_checkpoint_heals_a_step_that_failed_half_way(pair, give_gradients, assert_equal_bits):
    both = ours, _, optimizer, _ = pair(initial_accumulator_value=0.5)
    before = clone(ours)
    saved = optimizer.state_dict()
    backend = optimizer.device.backend
    assert isinstance(backend, EmulatedBackend)
    backend.inject(Injection(kind="slverr", write=True, base=0, limit=1 << 26))
    give_gradients(ours)
    with pytest.raises(BusResponseError):
        optimizer.step()
    backend.heal()
    assert_equal_bits(ours, before)
    optimizer.load_state_dict(saved)
    train(2, give_gradients, *both)
    assert_equal_bits(*both)


def test_a_device_without_the_rule_is_refused_before_anything_is_allocated(monkeypatch):
    with nearstep.open("golden:axdimm?memory_bytes=1MiB&rules=adam,sgd") as device:
        monkeypatch.setattr(device, "alloc", None)
        p = torch.ones(4, requires_grad=True)
        with pytest.raises(ArgumentError, match=r"not adagrad: name it in .* rules="):
            nearstep.optim.Adagrad([p], device=device)


@pytest.mark.parametrize("flag", FLAGS)
def test_an_unsupported_flag_is_refused_by_name(flag, make_parameters, many_rules):
    with pytest.raises(UnsupportedOptionError, match=f"{flag}=True is not supported"):
        nearstep.optim.Adagrad(make_parameters(), device=many_rules, **{flag: True})
    optimizer = nearstep.optim.Adagrad(make_parameters(), device=many_rules)
    optimizer.param_groups[0][flag] = True
    optimizer.step()  # without a gradient there is nothing to refuse
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.raises(UnsupportedOptionError, match=flag):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr_decay", math.nan),
        ("weight_decay", -0.1),
        ("eps", "small"),
        ("initial_accumulator_value", -1.0),
        ("initial_accumulator_value", 1e39),
    ],
)
def test_a_bad_hyperparameter_is_refused_by_name(name, value, make_parameters, many_rules):
    with pytest.raises(HyperparameterError, match=f"^{name} must be"):
        nearstep.optim.Adagrad(make_parameters(), device=many_rules, **{name: value})
