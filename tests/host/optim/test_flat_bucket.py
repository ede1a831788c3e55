"""Small parameters that are stepped together have what they have when each is by itself."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

import nearstep
from nearstep.errors import DeviceError
from nearstep.torch.errors import GradientError, MissingOptionError, StateError
from nearstep.torch.exchange import SMALL_ELEMENTS, TOGETHER_ELEMENTS

from .conftest import on_all

SHAPES = ((16,), (2, 8), (5,), (3, 7), (4, 1, 8), (33,))
"""Some do not fill their last line."""


class Pair:
    """An optimizer, and one that has no buckets; every action is done to both."""

    def __init__(self, device, shapes=SHAPES, make=nearstep.optim.AdamW, **options):
        self.generator = torch.Generator().manual_seed(7)
        start = [torch.randn(shape, generator=self.generator) for shape in shapes]
        self.bucketed = [each.clone().requires_grad_() for each in start]
        self.alone = [each.clone().requires_grad_() for each in start]
        self.optimizer = make(self.bucketed, device=device, **options)
        self.reference = make(self.alone, device=device, **options)
        self.prepared = 0
        self._watch()

    def _watch(self):
        """Count the parameters that are prepared by themselves."""
        prepare = self.optimizer._stepper._prepare

        def counted(owner, item, *arguments):
            self.prepared += item.parameter is not None
            return prepare(owner, item, *arguments)

        self.optimizer._stepper._prepare = counted
        self.reference._stepper._keep_buckets = lambda *_: None

    def both(self, action):
        for each in ((self.optimizer, self.bucketed), (self.reference, self.alone)):
            action(*each)

    def give_gradients(self):
        for one, other in zip(self.bucketed, self.alone, strict=True):
            gradient = torch.randn(one.shape, generator=self.generator)
            one.grad, other.grad = gradient, gradient.clone()

    def step(self):
        """A step of both. Returns how many parameters were prepared by themselves."""
        self.prepared = 0
        self.give_gradients()
        self.both(lambda optimizer, _: optimizer.step())
        return self.prepared

    def check(self):
        assert all(map(_same, self.bucketed, self.alone))
        for p, q in zip(self.bucketed, self.alone, strict=True):
            one, other = (
                each.snapshot() for each in (self.optimizer.state[p], self.reference.state[q])
            )
            assert one.keys() == other.keys()
            assert all(_same(one[name], other[name]) for name in one)
        counters = [each.traffic.as_dict() for each in (self.optimizer, self.reference)]
        for each in counters:
            del each["run_seconds"], each["launches"]
        assert counters[0] == counters[1]


def _same(one, other):
    one, other = (each.detach().resolve_neg().numpy() for each in (one, other))
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@pytest.fixture
def pair(device):
    made = Pair(device, weight_decay=0.1)
    assert made.step() == len(SHAPES)
    assert made.step() == 0
    return made


@on_all("device")
@pytest.mark.parametrize("maximize", [False, True])
def test_steps_have_the_bits_of_steps_one_by_one(maximize, device):
    pair = Pair(device, maximize=maximize)
    pair.step()
    assert [pair.step() for _ in range(3)] == [0, 0, 0]
    pair.check()


def test_a_bucket_may_be_as_large_as_a_large_parameter(device):
    pair = Pair(device, [(SMALL_ELEMENTS - 1,)] * 3 + [(SMALL_ELEMENTS,), (16,), (17,)])
    assert pair.step() == 6
    assert pair.step() == 1, "the large one is by itself"
    assert pair.step() == 1
    pair.check()


def test_buckets_are_bounded(device):
    count = TOGETHER_ELEMENTS // SMALL_ELEMENTS + 2
    pair = Pair(device, [(SMALL_ELEMENTS - 1,)] * count)
    pair.step()
    buckets = pair.optimizer._stepper.buckets
    assert [each.extent.count <= TOGETHER_ELEMENTS for each in buckets] == [True, True]
    assert pair.step() == 0
    pair.check()


def test_nan_and_infinities_go_through(pair):
    for parameters in (pair.bucketed, pair.alone):
        parameters[1].data[0, 0] = float("nan")
        parameters[3].data[0, 0] = -float("inf")
        parameters[4].data[0, 0, 0] = -0.0
    pair.step()
    pair.step()
    pair.check()


def widen_count(state):
    state["step"].data = state["step"].data.double()


def swap_states(optimizer, parameters):
    one, other = (optimizer.state[p] for p in parameters[:2])
    values = [dict(each) for each in (one, other)]
    for state, taken, p in zip((one, other), values[::-1], parameters[:2], strict=True):
        state["exp_avg"] = taken["exp_avg"].reshape(p.shape)


def load(optimizer, _):
    state = copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        each["exp_avg"].mul_(2.0)
        each["step"].add_(3)
    optimizer.load_state_dict(state)


def add_group(optimizer, parameters):
    parameters.append(torch.linspace(0, 1, 20).requires_grad_())
    optimizer.add_param_group({"params": [parameters[-1]], "lr": 0.3})


def move_to_another_group(optimizer, parameters):
    group = optimizer.param_groups[0]
    optimizer.param_groups.append({**group, "params": [group["params"].pop(1)], "lr": 0.25})


def set_data(p, value):
    p.data = value


CHANGES = {
    "scale in place": lambda o, ps: ps[1].detach().mul_(0.5),
    "last element through numpy": lambda o, ps: np.add.at(ps[2].detach().numpy(), -1, 1.0),
    "sign of a zero": lambda o, ps: ps[0].data[3:5].copy_(torch.tensor([0.0, -0.0])),
    "other memory": lambda o, ps: set_data(ps[3], torch.full_like(ps[3].data, 0.75)),
    "other shape": lambda o, ps: set_data(ps[1], ps[1].data.view(8, 2)),
    "other strides": lambda o, ps: set_data(ps[3], ps[3].data.t().contiguous().t()),
    "negation": lambda o, ps: set_data(ps[1], torch._neg_view(ps[1].data.clone())),
    "other count": lambda o, ps: o.state[ps[2]]["step"].fill_(9),
    "other count of all": lambda o, ps: [o.state[p]["step"].fill_(9) for p in ps],
    "assigned count": lambda o, ps: o.state[ps[2]].update(step=torch.tensor(9.0)),
    "count of another dtype": lambda o, ps: o.state[ps[2]].update(step=torch.tensor(9)),
    "counts of another dtype through data": lambda o, ps: [widen_count(o.state[p]) for p in ps],
    "moment read": lambda o, ps: o.state[ps[4]]["exp_avg"].isfinite().all(),
    "moment changed": lambda o, ps: o.state[ps[4]]["exp_avg"].mul_(3.0),
    "moment assigned": lambda o, ps: o.state[ps[4]].update(exp_avg_sq=torch.ones_like(ps[4])),
    "key of the user": lambda o, ps: o.state[ps[0]].update(mine=torch.ones(3)),
    "state thrown away": lambda o, ps: o.state.pop(ps[1]),
    "all state thrown away": lambda o, ps: o.state.clear(),
    "state assigned": lambda o, ps: o.state.update({ps[1]: o.state[ps[1]].copy()}),
    "states swapped": swap_states,
    "loaded": load,
    "other options": lambda o, ps: o.param_groups[0].update(lr=0.5, betas=(0.5, 0.5)),
    "group added": add_group,
    "taken out of the group": lambda o, ps: o.param_groups[0]["params"].pop(2),
    "order changed": lambda o, ps: o.param_groups[0]["params"].reverse(),
    "in its group twice": lambda o, ps: o.param_groups[0]["params"].append(ps[2]),
    "moved to another group": move_to_another_group,
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_between_steps_is_found(change, pair):
    pair.both(CHANGES[change])
    pair.step()
    pair.check()
    pair.step()
    pair.step()
    pair.check()


def test_a_change_of_a_parameter_alone_takes_it_out_of_no_bucket(pair):
    pair.both(CHANGES["scale in place"])
    assert [pair.step(), pair.step()] == [0, 0]
    pair.check()


@pytest.mark.parametrize("at", [0, 3])
def test_a_parameter_without_a_gradient_is_left_out(at, pair):
    for index in range(3):
        pair.give_gradients()
        if index != 1:
            pair.both(lambda _, parameters: setattr(parameters[at], "grad", None))
        pair.both(lambda optimizer, _: optimizer.step())
    pair.check()


@pytest.mark.parametrize(
    "change", [lambda g: torch._neg_view(g), lambda g: g.t().contiguous().t(), lambda g: g.clone()]
)
def test_gradients_come_in_any_form(change, pair):
    pair.give_gradients()
    pair.both(lambda _, ps: setattr(ps[3], "grad", change(ps[3].grad)))
    pair.both(lambda optimizer, _: optimizer.step())
    pair.check()


def test_a_wrong_gradient_is_refused_and_nothing_is_updated(pair):
    before = [each.detach().clone() for each in pair.bucketed]
    pair.give_gradients()
    pair.bucketed[3].grad = torch.zeros(3, 7).to_sparse()
    with pytest.raises(GradientError, match="parameter 3 of group 0"):
        pair.optimizer.step()
    assert all(map(_same, before, pair.bucketed))
    pair.step()
    pair.check()


def test_padding_makes_no_parameter_look_changed(pair, monkeypatch):
    def fails(*_):
        raise AssertionError("a parameter was looked at by itself")

    monkeypatch.setattr("nearstep.torch.parameter.DeviceParameter.send_master_if_changed", fails)
    for _ in range(2):
        pair.give_gradients()
        pair.optimizer.step()


def test_a_missing_option_is_named(pair):
    pair.give_gradients()
    del pair.optimizer.param_groups[0]["amsgrad"]
    with pytest.raises(MissingOptionError, match="amsgrad"):
        pair.optimizer.step()


def test_a_moment_that_some_lack_is_missed(many_rules):
    pair = Pair(many_rules)
    pair.step()
    pair.both(lambda o, ps: o.state[ps[0]].update(max_exp_avg_sq=torch.zeros_like(ps[0])))
    pair.step()
    pair.both(lambda o, _: o.param_groups[0].update(amsgrad=True))
    pair.give_gradients()
    with pytest.raises(StateError, match="parameter 1 of group 0 must have 'max_exp_avg_sq'"):
        pair.optimizer.step()


def test_a_rule_with_more_state_is_switched_on(many_rules):
    pair = Pair(many_rules, make=nearstep.optim.SGD, lr=0.1)
    assert [pair.step(), pair.step()] == [6, 6], "no state, nothing to keep together"
    pair.both(lambda o, _: o.param_groups[0].update(momentum=0.9))
    pair.step()
    pair.step()
    assert pair.step() == 0
    pair.both(lambda o, _: o.param_groups[0].update(momentum=0.0))
    pair.step()
    pair.both(lambda o, _: o.param_groups[0].update(momentum=0.5))
    pair.step()
    pair.check()


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_has_buckets_of_its_own(twin_of, pair):
    def twin(optimizer):
        made = twin_of(optimizer)
        for ours, theirs in zip(_parameters(made), _parameters(optimizer), strict=True):
            ours.grad = theirs.grad.clone()
        return made

    pair.give_gradients()
    copies = [twin(pair.optimizer), twin(pair.reference)]
    copies[1]._stepper._keep_buckets = lambda *_: None
    for _ in range(3):
        for each in copies:
            each.step()
    assert all(map(_same, *map(_parameters, copies)))
    pair.step()
    pair.check()


def _parameters(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"]]


def test_a_step_that_fails_interrupts_every_parameter(pair, monkeypatch):
    state = copy.deepcopy(pair.optimizer.state_dict())
    before = [each.detach().clone() for each in pair.bucketed]

    def fails(*_):
        raise DeviceError("broken")

    pair.give_gradients()
    with monkeypatch.context() as patch:
        patch.setattr("nearstep.buffer.Buffer.submit_read", fails)
        with pytest.raises(DeviceError, match="broken"):
            pair.optimizer.step()
    assert all(map(_same, before, pair.bucketed))
    with pytest.raises(nearstep.errors.NearstepError, match="DeviceError"):
        pair.optimizer.state_dict()
    pair.optimizer.load_state_dict(state)
    pair.optimizer.step()
    pair.reference.step()
    pair.optimizer.step()
    pair.reference.step()
    assert all(map(_same, pair.bucketed, pair.alone))


def test_a_bucket_that_inference_mode_made_is_used_outside(device):
    pair = Pair(device)
    pair.step()
    pair.both(CHANGES["moment read"])
    with torch.inference_mode():
        assert pair.step() == len(SHAPES)
    assert pair.step() == 0
    pair.check()


def test_autograd_notices_the_step(pair):
    versions = [each._version for each in pair.bucketed]
    assert pair.step() == 0
    assert [each._version for each in pair.bucketed] == [each + 1 for each in versions]


def test_gradients_are_not_kept_after_the_step(pair):
    pair.step()
    gone = [weakref.ref(each.grad) for each in pair.bucketed]
    for each in pair.bucketed:
        each.grad = None
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
