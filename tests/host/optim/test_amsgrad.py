"""`amsgrad` on the device against torch with `fused=True`, bit for bit."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import nearstep
from nearstep.errors import ArgumentError
from nearstep.torch.errors import StateError

CAPABILITY = torch.backends.cpu.get_cpu_capability()
KEYS = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]

pytestmark = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"ATen's capability is {CAPABILITY}; its fused Adam is vectorised for AVX2 and AVX512",
)

OPTIONS = {
    "default": {},
    "all": {"lr": 1e-2, "betas": (0.3, 0.9), "weight_decay": 0.1, "maximize": True},
    "eps_zero": {"eps": 0.0, "betas": (0.9, 0.5)},
}


@pytest.fixture
def pair(many_rules, make_parameters):
    """Both lists of parameters, an optimizer and torch's, of these options."""

    def make(name="AdamW", grouped=list, **options):
        ours, theirs = make_parameters(), make_parameters()
        optimizer = getattr(nearstep.optim, name)(grouped(ours), device=many_rules, **options)
        return (
            ours,
            theirs,
            optimizer,
            getattr(torch.optim, name)(grouped(theirs), fused=True, **options),
        )

    return make


def train(steps, give_gradients, ours, theirs, optimizer, reference):
    for _ in range(steps):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()


def clone(parameters):
    return [p.detach().clone().requires_grad_() for p in parameters]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_ten_steps_equal_torch_fused(name, options, pair, give_gradients, assert_equal_bits):
    both = ours, _, optimizer, _ = pair(name, amsgrad=True, **options)
    train(10, give_gradients, *both)
    assert_equal_bits(*both)
    assert list(optimizer.state[ours[0]]) == KEYS
    assert optimizer.traffic.launches == 10 * optimizer.device.channel_count
    state = optimizer.state[ours[0]]
    assert int((state["max_exp_avg_sq"] > state["exp_avg_sq"]).sum()) > 100


def test_groups_with_and_without_it_have_the_arrays_that_they_need(
    pair, give_gradients, assert_equal_bits
):
    def groups(parameters):
        return [
            {"params": parameters[:1], "amsgrad": True},
            {"params": parameters[1:2], "maximize": True},
            {"params": parameters[2:], "amsgrad": True, "maximize": True, "lr": 1e-2},
        ]

    both = ours, _, optimizer, _ = pair(grouped=groups)
    train(3, give_gradients, *both)
    assert_equal_bits(*both)
    assert [len(optimizer.state[p]) for p in ours] == [4, 3, 4]
    arrays = [set(optimizer.table.parameters[p].extent.segment.arenas[0]) for p in ours]
    assert ["v_max" in each for each in arrays] == [True, False, True]


def test_it_may_be_switched_off_and_on_again_as_in_torch(pair, give_gradients, assert_equal_bits):
    both = ours, _, optimizer, reference = pair(amsgrad=True)
    for amsgrad, maximize in ((True, False), (False, True), (True, False)):
        for chosen in (optimizer, reference):
            chosen.param_groups[0].update(amsgrad=amsgrad, maximize=maximize)
        before = [optimizer.state[p].get("max_exp_avg_sq") for p in ours]
        train(2, give_gradients, *both)
        assert_equal_bits(*both)
        for p, kept in zip(ours, before, strict=True):
            if kept is not None:
                assert torch.equal(optimizer.state[p]["max_exp_avg_sq"], kept) == (not amsgrad)


def test_it_cannot_be_switched_on_later_but_by_giving_the_state(
    pair, give_gradients, assert_equal_bits
):
    both = ours, theirs, optimizer, reference = pair()
    train(2, give_gradients, *both)
    for chosen in (optimizer, reference):
        chosen.param_groups[0]["amsgrad"] = True
    before, down = [p.detach().clone() for p in ours], optimizer.traffic.gradients_down
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        reference.step()
    with pytest.raises(StateError, match="have 'max_exp_avg_sq' for amsgrad"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(ours, before, strict=True))
    assert optimizer.traffic.gradients_down == down
    for parameters, chosen in ((ours, optimizer), (theirs, reference)):
        for p in parameters:
            chosen.state[p]["max_exp_avg_sq"] = torch.full_like(p, 0.25)
    train(2, give_gradients, *both)
    assert_equal_bits(*both)


def test_checkpoints_go_both_ways(pair, give_gradients, assert_equal_bits):
    both = ours, theirs, optimizer, reference = pair(amsgrad=True)
    train(3, give_gradients, *both)
    mine, other = optimizer.state_dict(), reference.state_dict()
    assert list(mine["state"][0]) == list(other["state"][0]) == KEYS
    for key in KEYS:
        assert mine["state"][0][key].dtype == other["state"][0][key].dtype
    a, b = clone(ours), clone(theirs)
    second = nearstep.optim.AdamW(a, device=optimizer.device)
    third = torch.optim.AdamW(b, fused=True)
    second.load_state_dict(other)
    third.load_state_dict(mine)
    assert second.param_groups[0]["amsgrad"]
    train(2, give_gradients, a, b, second, third)
    assert_equal_bits(a, b, second, third)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_with_the_same_bits(copied, pair, give_gradients, assert_equal_bits):
    both = ours, _, optimizer, _ = pair(amsgrad=True)
    train(2, give_gradients, *both)
    twins, twin = copied((ours, optimizer))
    give_gradients(ours, twins)
    optimizer.step()
    twin.step()
    assert_equal_bits(ours, twins, optimizer, twin)


def test_state_that_was_cleared_begins_at_zero(pair, give_gradients, assert_equal_bits):
    both = _, _, optimizer, reference = pair(amsgrad=True)
    train(2, give_gradients, *both)
    for chosen in (optimizer, reference):
        chosen.state.clear()
    train(2, give_gradients, *both)
    assert_equal_bits(*both)


def test_nan_and_inf_follow_torchs_maximum(many_rules, make_parameters):
    ours, theirs = make_parameters([(64,)]), make_parameters([(64,)])
    optimizer = nearstep.optim.Adam(ours, lr=1e-2, amsgrad=True, device=many_rules)
    reference = torch.optim.Adam(theirs, lr=1e-2, amsgrad=True, fused=True)
    gradient = torch.linspace(-1, 1, 64)
    special = gradient.clone()
    special[3], special[17], special[40], special[51] = math.nan, math.inf, -math.inf, -0.0
    for each in (gradient, special, gradient):
        ours[0].grad, theirs[0].grad = each.clone(), each.clone()
        optimizer.step()
        reference.step()
    compared = 0
    for key in ("max_exp_avg_sq", "exp_avg_sq", "exp_avg"):
        a, b = optimizer.state[ours[0]][key], reference.state[theirs[0]][key]
        assert torch.equal(a.isnan(), b.isnan())
        number = ~a.isnan()
        assert torch.equal(a[number].view(torch.int32), b[number].view(torch.int32))
        compared += int(number.sum())
    assert 3 * 60 < compared < 3 * 64


def test_a_kernel_without_the_rule_is_refused_when_the_optimizer_is_made(device):
    p = torch.ones(16, requires_grad=True)
    free = device.free_bytes
    with pytest.raises(ArgumentError, match=r"not adam_amsgrad: .* rules=adam,adam_amsgrad"):
        nearstep.optim.Adam([p], amsgrad=True, device=device)
    assert device.free_bytes == free
    optimizer = nearstep.optim.AdamW([p], device=device)
    p.grad = torch.ones(16)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ArgumentError, match="adam_amsgrad"):
        optimizer.step()
    assert torch.equal(p, torch.ones(16))
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.step()


@pytest.mark.deep
@pytest.mark.parametrize("fu", ["rtl", "native"])
@pytest.mark.parametrize("family", ["axdimm?block_bytes=512", "smartssd?chunk_bytes=512"])
def test_simulated_devices_equal_torch_fused(
    family, fu, make_parameters, give_gradients, assert_equal_bits
):
    url = f"sim:{family}&lanes=4&rules=adam,adam_amsgrad&memory=halfduplex&stall=0.2&fu={fu}"
    ours, theirs = make_parameters(), make_parameters()

    def groups(parameters):
        return [
            {"params": parameters[:2], "amsgrad": True, "weight_decay": 0.1},
            {"params": parameters[2:], "maximize": True},
        ]

    optimizer = nearstep.optim.AdamW(groups(ours), lr=1e-2, device=url)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True)
    train(3, give_gradients, ours, theirs, optimizer, reference)
    assert_equal_bits(ours, theirs, optimizer, reference)
    assert optimizer.traffic.cycles > 0
