"""What the optimizers take, and what they refuse, by name and before the device is touched."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.parameter import UninitializedParameter

import nearstep
from nearstep.errors import ArgumentError, OptionError, OutOfDeviceMemoryError, UrlError
from nearstep.torch.errors import (
    ConflictingOptionsError,
    GradientError,
    HyperparameterError,
    MissingOptionError,
    ParameterError,
    StateError,
    UnsupportedOptionError,
)

FLAGS = ["capturable", "differentiable"]
OF = {
    "Adam": nearstep.optim.Adam,
    "AdamW": nearstep.optim.AdamW,
    "SGD": nearstep.optim.SGD,
    "Adagrad": nearstep.optim.Adagrad,
}


def parameter(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        (kind, flag)
        for kind, flag in product(OF, FLAGS)
        if flag != "capturable" or kind.startswith("Adam")
    ],
)
def test_an_unsupported_flag_is_refused_by_name_whenever_it_is_given(kind, flag, many_rules):
    p = parameter(4)
    with pytest.raises(UnsupportedOptionError, match=f"{flag}=True is not supported") as caught:
        OF[kind]([p], device=many_rules, **{flag: True})
    assert caught.value.option == flag
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnsupportedOptionError, match=flag):
        OF[kind]([{"params": [p], flag: True}], device=many_rules)
    optimizer = OF[kind]([p], device=many_rules)
    with pytest.raises(UnsupportedOptionError, match=flag):
        optimizer.add_param_group({"params": [parameter(4)], flag: True})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][flag] = True
    optimizer.step()  # without a gradient there is nothing to refuse
    p.grad = torch.ones(4)
    with pytest.raises(UnsupportedOptionError, match=flag):
        optimizer.step()
    assert torch.equal(p, torch.ones(4))
    assert optimizer.traffic.gradients_down == 0


@pytest.mark.parametrize("kind", OF)
def test_fused_and_foreach_change_nothing_and_are_never_both_true(kind, many_rules):
    torchs = getattr(torch.optim, kind)
    found = []
    for fused, foreach in product((None, False, True), (None, False, True)):
        if fused and foreach:
            expected = "^`fused` and `foreach` cannot be `True` together.$"
            with pytest.raises(RuntimeError, match=expected):
                torchs([parameter(16)], fused=True, foreach=True)
            for device in (many_rules, None):
                with pytest.raises(ConflictingOptionsError, match=expected):
                    OF[kind]([parameter(16)], device=device, fused=True, foreach=True)
            continue
        p = parameter(16)
        for device in (many_rules, None):
            optimizer = OF[kind]([p], device=device, fused=fused, foreach=foreach)
            p.grad = torch.linspace(-1, 1, 16)
            optimizer.step()
            assert optimizer.param_groups[0]["foreach"] is foreach
            (saved,) = optimizer.state_dict()["param_groups"]
            assert (saved["fused"], saved["foreach"]) == (True, None)
        found.append(p.detach().clone())
    assert len(found) == 8
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("AdamW", "lr", {"lr": -1.0}),
        ("AdamW", "lr", {"lr": float("nan")}),
        ("AdamW", "lr", {"lr": "fast"}),
        ("AdamW", "lr", {"lr": torch.ones(2)}),
        ("AdamW", "eps", {"eps": -1e-8}),
        ("AdamW", "weight_decay", {"weight_decay": -0.1}),
        ("AdamW", r"betas\[0\]", {"betas": (1.0, 0.9)}),
        ("AdamW", r"betas\[1\]", {"betas": (0.9, -0.1)}),
        ("AdamW", "betas", {"betas": 0.9}),
        ("AdamW", "betas", {"betas": (0.9,)}),
        ("AdamW", "lr", {"lr": torch.tensor(1j)}),
        ("AdamW", "lr", {"lr": np.ones(2)}),
        ("AdamW", "lr", {"lr": 10**400}),
        ("AdamW", "eps", {"eps": np.complex64(1)}),
        ("SGD", "lr", {"lr": -1.0}),
        ("SGD", "lr", {"lr": "fast"}),
        ("SGD", "momentum", {"momentum": -0.9}),
        ("SGD", "momentum", {"momentum": math.nan}),
        ("SGD", "dampening", {"momentum": 0.9, "dampening": -0.1}),
        ("SGD", "weight_decay", {"weight_decay": math.inf}),
        ("SGD", "nesterov", {"nesterov": True}),
        ("SGD", "nesterov", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        ("Adagrad", "lr", {"lr": -1.0}),
        ("Adagrad", "lr_decay", {"lr_decay": math.nan}),
        ("Adagrad", "weight_decay", {"weight_decay": -0.1}),
        ("Adagrad", "eps", {"eps": "small"}),
        ("Adagrad", "initial_accumulator_value", {"initial_accumulator_value": -1.0}),
        ("Adagrad", "initial_accumulator_value", {"initial_accumulator_value": 1e39}),
    ],
)
def test_a_bad_hyperparameter_is_refused_by_name(kind, name, options, many_rules):
    for parameters, given in (
        ([parameter(4)], options),
        ([{"params": [parameter(4)], **options}], {}),
    ):
        if given is not options and "initial_accumulator_value" in options:
            continue  # all groups have the one of the optimizer
        with pytest.raises(HyperparameterError, match=f"^{name} must be"):
            OF[kind](parameters, device=many_rules, **given)


@pytest.mark.parametrize(
    ("kind", "options", "rules", "missing"),
    [
        ("SGD", {}, "", "sgd"),
        ("SGD", {"momentum": 0.9}, "", "sgd_momentum"),
        ("SGD", {"momentum": 0.9}, "&rules=adam,sgd", "sgd_momentum"),
        ("SGD", {}, "&rules=sgd_momentum", "sgd"),
        ("Adagrad", {}, "&rules=adam,sgd", "adagrad"),
        ("Adam", {"amsgrad": True}, "", "adam_amsgrad"),
    ],
)
def test_a_device_without_the_rule_is_refused_before_anything_is_allocated(
    kind, options, rules, missing, monkeypatch
):
    with nearstep.open(f"golden:axdimm?memory_bytes=1MiB{rules}") as device:
        monkeypatch.setattr(device, "alloc", None)
        free = device.free_bytes
        with pytest.raises(ArgumentError, match=rf"not {missing}: name it in .* rules="):
            OF[kind]([parameter(4)], device=device, **options)
        assert device.free_bytes == free


@pytest.mark.parametrize(
    ("kind", "rules", "options"),
    [("SGD", "sgd", {"momentum": 0.9}), ("AdamW", "adam", {"amsgrad": True})],
)
def test_an_option_that_asks_for_a_rule_that_is_missing_is_refused_later_too(kind, rules, options):
    (option,) = options
    p, q = parameter(16), parameter(16)
    with nearstep.open(f"golden:axdimm?memory_bytes=1MiB&rules={rules}") as device:
        optimizer = OF[kind]([p], device=device)
        without = optimizer.param_groups[0][option]
        with pytest.raises(ArgumentError, match="rules="):
            optimizer.add_param_group({"params": [q], **options})
        assert len(optimizer.param_groups) == 1
        other = getattr(torch.optim, kind)([q], **options)
        with pytest.raises(ArgumentError, match="rules="):
            optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0][option] == without
        optimizer.param_groups[0].update(options)
        p.grad = torch.ones(16)
        with pytest.raises(ArgumentError, match=r"rules=.*adam_amsgrad|rules=.*sgd_momentum"):
            optimizer.step()
        assert optimizer.traffic.gradients_down == 0
        assert torch.equal(p, torch.ones(16))
        optimizer.param_groups[0][option] = without
        optimizer.step()
        assert not torch.equal(p, torch.ones(16))


def test_one_parameter_in_two_groups_is_refused_as_by_torch(device):
    p = parameter(16)
    for make in (
        lambda groups: nearstep.optim.AdamW(groups, device=device),
        lambda groups: torch.optim.AdamW(groups, fused=True),
    ):
        with pytest.raises(ValueError, match="appear in more than one parameter group"):
            make([{"params": [p]}, {"params": [p]}])


def test_betas_are_two_of_a_kind_as_torchs_constructor_demands(device):
    mixed = torch.tensor(0.9), 0.999
    for make in (
        lambda **options: nearstep.optim.Adam([parameter(4)], device=device, **options),
        lambda **options: torch.optim.Adam([parameter(4)], **options),
    ):
        for betas in (mixed, mixed[::-1]):
            with pytest.raises(
                ValueError, match="betas must be either both floats or both Tensors"
            ):
                make(betas=betas)
        make(betas=(torch.tensor(0.9), torch.tensor(0.999)))


def test_a_learning_rate_that_became_nan_is_refused_before_anything_is_updated(device):
    p, q = parameter(16), parameter(16)
    optimizer = nearstep.optim.AdamW([{"params": [p]}, {"params": [q]}], device=device)
    p.grad, q.grad = torch.ones(16), torch.ones(16)
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(HyperparameterError, match="lr"):
        optimizer.step()
    assert torch.equal(p, torch.ones(16))
    assert optimizer.traffic.launches == 0


KINDS = {kind: make for kind, make in OF.items() if kind != "Adam"}


@pytest.mark.parametrize(
    ("option", "value"), [("lr", 1e39), ("weight_decay", 1e39), ("weight_decay", 10**38 * 10)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_no_register_holds_is_refused_before_the_first_run(
    kind, option, value, many_rules
):
    p, q = parameter(16), parameter(16)
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = KINDS[kind]([{"params": [p]}, {"params": [q]}], device=many_rules, lr=0.5, **more)
    p.grad, q.grad = torch.ones(16), torch.ones(16)
    good = optimizer.param_groups[1][option]
    optimizer.param_groups[1][option] = value
    with pytest.raises(ArgumentError, match="would overflow binary32"):
        optimizer.step()
    assert optimizer.traffic.launches == 0
    assert optimizer.traffic.gradients_down == 0
    assert torch.equal(p, torch.ones(16))
    optimizer.param_groups[1][option] = good
    optimizer.step()
    assert torch.equal(p, q)
    assert not torch.equal(p, torch.ones(16))


def test_state_that_the_user_spoilt_is_refused_before_anything_is_sent(device):
    p, q = parameter(16), parameter(16)
    optimizer = nearstep.optim.AdamW([{"params": [p]}, {"params": [q]}], device=device)
    p.grad, q.grad = torch.ones(16), torch.ones(16)
    optimizer.step()
    down, after = optimizer.traffic.gradients_down, p.detach().clone()
    optimizer.state[q]["step"] = torch.tensor(2.0**63)
    with pytest.raises(StateError, match="below"):
        optimizer.step()
    optimizer.state[q] = {"step": 1}
    with pytest.raises(StateError, match="exp_avg"):
        optimizer.step()
    assert optimizer.traffic.gradients_down == down
    assert torch.equal(p, after)


@pytest.mark.parametrize("option", ["lr", "betas", "amsgrad", "decoupled_weight_decay"])
def test_an_option_that_was_deleted_is_missed_by_name(option, device):
    p = parameter(16)
    optimizer = nearstep.optim.AdamW([p], device=device)
    p.grad = torch.ones(16)
    value = optimizer.param_groups[0].pop(option)
    with pytest.raises(MissingOptionError, match=f"must have {option}, not only "):
        optimizer.step()
    assert optimizer.traffic.gradients_down == 0
    optimizer.param_groups[0][option] = value
    optimizer.step()


@pytest.mark.parametrize("max_cycles", [-5, "x", 1.5, True, 1 << 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_that_is_none_is_refused_by_the_constructor(kind, max_cycles, many_rules):
    free = many_rules.free_bytes
    with pytest.raises(
        HyperparameterError, match=r"^max_cycles must be an integer from 0"
    ) as caught:
        KINDS[kind]([parameter(4)], device=many_rules, max_cycles=max_cycles)
    assert caught.value.actual == max_cycles
    assert many_rules.free_bytes == free


@pytest.mark.parametrize("option", ["compression_form", "compression_format"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_form_of_pairs_that_is_none_is_refused_without_compression_too(kind, option, many_rules):
    with pytest.raises(HyperparameterError, match=rf"^{option} must be one of .* not 'fp8'"):
        KINDS[kind]([parameter(4)], device=many_rules, **{option: "fp8"})


def test_without_a_device_the_processor_is_used_and_options_of_devices_are_refused():
    assert nearstep.optim.AdamW([parameter(4)]).table.source == "host:"
    for option in ({"compression": 0.5}, {"max_grad_norm": 1.0}, {"max_cycles": 10}):
        with pytest.raises(UnsupportedOptionError, match="give one by device="):
            nearstep.optim.AdamW([parameter(4)], **option)
    with pytest.raises(ArgumentError, match="device with memory"):
        _ = nearstep.optim.AdamW([parameter(4)]).device


@pytest.mark.parametrize(
    ("device_name", "error"),
    [("axdimm", UrlError), ("warp:axdimm", UrlError), ("golden:axdimm?lane=4", OptionError)],
)
def test_a_device_that_cannot_be_opened(device_name, error):
    with pytest.raises(error):
        nearstep.optim.AdamW([parameter(4)], device=device_name)


def test_something_that_is_no_device():
    with pytest.raises(ArgumentError, match="device"):
        nearstep.optim.AdamW([parameter(4)], device=torch.device("cpu"))


def test_parameters_as_generator_list_named_and_groups(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    count = sum(p.numel() for p in model.parameters())
    for parameters in (
        model.parameters(),
        list(model.parameters()),
        model.named_parameters(),
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}],
        [{"params": model[0].named_parameters()}, {"params": model[1].named_parameters()}],
    ):
        optimizer = nearstep.optim.AdamW(parameters, device=device)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert optimizer.traffic.elements == count


@pytest.mark.parametrize("bad", [[], torch.ones(3), [1.0], [{"params": {parameter(2)}}]])
def test_what_torch_refuses_as_parameters_is_refused(bad, device):
    with pytest.raises((TypeError, ValueError)):
        nearstep.optim.AdamW(bad, device=device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_a_parameter_of_another_dtype_is_refused(dtype, device):
    with pytest.raises(ParameterError, match=f"parameter 1 of group 0 .*not {dtype}"):
        nearstep.optim.AdamW([parameter(4), parameter(4, dtype=dtype)], device=device)


def test_a_parameter_elsewhere_is_refused(device):
    with pytest.raises(ParameterError, match="on the CPU or an accelerator, not on meta"):
        nearstep.optim.AdamW([torch.ones(4, device="meta", requires_grad=True)], device=device)


SHARED = {
    "one element": lambda: torch.ones(1).expand(32),
    "a column": lambda: torch.ones(4, 1).expand(4, 8),
    "windows": lambda: torch.ones(16).unfold(0, 4, 2),
}


@pytest.mark.parametrize("shared", SHARED)
def test_a_parameter_whose_elements_share_memory_is_refused(shared, device):
    p = torch.nn.Parameter(SHARED[shared]())
    with pytest.raises(ParameterError, match=r"parameter 0 of group 0 .* share no memory"):
        nearstep.optim.AdamW([p], device=device)


STRIDED = {
    "a transpose": lambda: torch.ones(4, 8).t(),
    "every other": lambda: torch.ones(16)[::2],
    "interleaved": lambda: torch.ones(32).as_strided((3, 4), (2, 3)),
    "empty": lambda: torch.ones(1).expand(0),
}


@pytest.mark.parametrize("strided", STRIDED)
def test_a_strided_parameter_is_taken(strided, device):
    p = torch.nn.Parameter(STRIDED[strided]())
    optimizer = nearstep.optim.AdamW([p], device=device)
    p.grad = torch.ones(p.shape)
    optimizer.step()
    assert bool((p < 1.0).all())


def test_a_sparse_gradient_is_refused_by_the_parameters_name(device):
    embedding = torch.nn.Embedding(8, 4, sparse=True)
    dense = parameter(4)
    optimizer = nearstep.optim.AdamW([("dense", dense), ("table", embedding.weight)], device=device)
    dense.grad = torch.ones(4)
    embedding(torch.tensor([1, 2])).sum().backward()
    before = dense.detach().clone()
    with pytest.raises(GradientError, match="parameter table of group 0 must be dense"):
        optimizer.step()
    assert torch.equal(dense, before)
    assert optimizer.traffic.gradients_down == 0
    assert not optimizer.state


def test_parameters_that_do_not_fit_are_refused_when_they_are_added():
    optimizer = nearstep.optim.AdamW([parameter(4)], device="golden:axdimm?memory_bytes=64KiB")
    free = optimizer.device.free_bytes
    with pytest.raises(OutOfDeviceMemoryError):
        optimizer.add_param_group({"params": [parameter(1 << 16)]})
    assert len(optimizer.param_groups) == 1
    assert optimizer.device.free_bytes == free


@pytest.mark.parametrize("kind", KINDS)
def test_a_lazy_parameter_is_placed_when_it_has_a_shape(kind, many_rules):
    lazy, eager = UninitializedParameter(), parameter(32)
    optimizer = KINDS[kind]([lazy, eager], device=many_rules)
    eager.grad = torch.ones(32)
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == ([1] if kind != "SGD" else [])
    lazy.materialize((16,))
    with torch.no_grad():
        lazy.fill_(1.0)
    reference = parameter(16)
    same = KINDS[kind]([reference], device=many_rules)
    lazy.grad, reference.grad = torch.ones(16), torch.ones(16)
    optimizer.step()
    same.step()
    assert torch.equal(lazy, reference)
    assert not torch.equal(lazy, torch.ones(16))


def test_state_of_a_parameter_without_a_shape_is_refused(device):
    q = parameter(16)
    q.grad = torch.ones(16)
    trained = nearstep.optim.AdamW([q], device=device)
    trained.step()
    optimizer = nearstep.optim.AdamW([UninitializedParameter()], device=device)
    with pytest.raises(StateError, match="wait until the parameter has a shape"):
        optimizer.load_state_dict(trained.state_dict())


def negative(size):
    """A tensor of 1 whose elements are stored as -1: what torch calls a negative bit."""
    tensor = torch.complex(torch.zeros(size), -torch.ones(size)).conj().imag
    assert tensor.is_neg()
    return tensor


@pytest.mark.parametrize("options", [{}, {"compression": 0.5}], ids=["whole", "compressed"])
def test_a_negative_bit_is_resolved(options):
    for p, gradient in (
        (parameter(16), negative(16)),
        (torch.nn.Parameter(negative(16)), torch.ones(16)),
        (torch.nn.Parameter(negative(16)), negative(16)),
    ):
        q = parameter(16)
        url = "golden:axdimm?memory_bytes=1MiB&compression=fused"
        optimizer = nearstep.optim.AdamW([p], device=url, **options)
        reference = nearstep.optim.AdamW([q], device=url, **options)
        p.grad, q.grad = gradient, torch.ones(16)
        for chosen in (optimizer, reference):
            chosen.step()
            chosen.step()
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"])
        optimizer.state[p]["exp_avg"] = -negative(16)
        optimizer.step()
        down = optimizer.traffic.masters_down
        optimizer.step()
        assert optimizer.traffic.masters_down == down


def test_a_default_device_without_memory_is_of_no_account(device):
    p = parameter(16)
    strided = torch.nn.Parameter(torch.ones(32).as_strided((3, 4), (2, 3)))
    torch.set_default_device("meta")
    try:
        optimizer = nearstep.optim.AdamW([p, strided], device=device)
        scaler = nearstep.optim.GradScaler()
        p.grad = torch.ones(16, device="cpu")
        scaler.scale(torch.ones((), device="cpu"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state[p]["step"] = 5
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert optimizer.state[p]["step"] == 6
    assert {value.device.type for value in optimizer.state[p].values()} == {"cpu"}


class Wrapped(torch.Tensor):
    """A tensor whose elements are another tensor's."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Wrapped(args[0].inner)


def test_a_tensor_made_of_others_is_refused_by_name(device):
    with pytest.raises(ParameterError, match="with memory of its own, not a Wrapped"):
        nearstep.optim.AdamW([torch.nn.Parameter(Wrapped(torch.ones(16)))], device=device)


OUT_OF_RANGE = {
    "betas": (1.0, 0.9),
    "lr": -1.0,
    "eps": -1.0,
    "weight_decay": -0.1,
    "capturable": True,
}


@pytest.mark.parametrize("option", OUT_OF_RANGE)
def test_options_of_a_group_without_gradients_are_of_no_account_as_in_torch(option, device):
    """torch looks at options when an optimizer is made, and at no other time."""
    p, q = parameter(16), parameter(16)
    for chosen in (
        nearstep.optim.AdamW([{"params": [p]}, {"params": [q]}], device=device),
        torch.optim.AdamW([{"params": [p]}, {"params": [q]}], fused=True),
    ):
        p.grad = torch.ones(16)
        chosen.param_groups[1][option] = OUT_OF_RANGE[option]
        before = p.detach().clone()
        chosen.step()
        assert not torch.equal(p, before)
    optimizer = nearstep.optim.AdamW([q], device=device)
    optimizer.param_groups[0][option] = OUT_OF_RANGE[option]
    optimizer.step()
    q.grad = torch.ones(16)
    with pytest.raises((HyperparameterError, UnsupportedOptionError), match=option):
        optimizer.step()
    assert torch.equal(q, torch.ones(16))
