"""What the optimizers take, and what they refuse, by name and before the device is touched."""

from __future__ import annotations

import pytest
import torch

import nearstep
from nearstep.errors import ArgumentError, OptionError, OutOfDeviceMemoryError, UrlError
from nearstep.torch.errors import (
    GradientError,
    HyperparameterError,
    ParameterError,
    UnsupportedOptionError,
)

FLAGS = ["amsgrad", "maximize", "foreach", "capturable", "differentiable"]


def parameter(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("optimizer", [nearstep.optim.Adam, nearstep.optim.AdamW])
def test_an_unsupported_flag_is_refused_by_name(optimizer, flag, device):
    with pytest.raises(UnsupportedOptionError, match=f"{flag}=True is not supported") as caught:
        optimizer([parameter(4)], device=device, **{flag: True})
    assert caught.value.option == flag
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("flag", FLAGS)
def test_an_unsupported_flag_of_one_group_is_refused(flag, device):
    with pytest.raises(UnsupportedOptionError, match=flag):
        nearstep.optim.AdamW([{"params": [parameter(4)], flag: True}], device=device)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_set_after_construction_is_refused_by_the_step(flag, device):
    p = parameter(4)
    p.grad = torch.ones(4)
    optimizer = nearstep.optim.AdamW([p], device=device)
    optimizer.param_groups[0][flag] = True
    with pytest.raises(UnsupportedOptionError, match=flag):
        optimizer.step()
    assert torch.equal(p, torch.ones(4))
    assert optimizer.traffic.gradients_down == 0


@pytest.mark.parametrize("fused", [None, False, True])
def test_fused_is_accepted(fused, device):
    nearstep.optim.AdamW([parameter(4)], fused=fused, device=device)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lr", {"lr": -1.0}),
        ("lr", {"lr": float("nan")}),
        ("lr", {"lr": "fast"}),
        ("lr", {"lr": torch.ones(2)}),
        ("eps", {"eps": -1e-8}),
        ("weight_decay", {"weight_decay": -0.1}),
        (r"betas\[0\]", {"betas": (1.0, 0.9)}),
        (r"betas\[1\]", {"betas": (0.9, -0.1)}),
        ("betas", {"betas": 0.9}),
        ("betas", {"betas": (0.9,)}),
    ],
)
def test_a_bad_hyperparameter_is_refused_by_name(name, options, device):
    with pytest.raises(HyperparameterError, match=f"^{name} must be"):
        nearstep.optim.AdamW([parameter(4)], device=device, **options)
    with pytest.raises(HyperparameterError, match=f"^{name} must be"):
        nearstep.optim.AdamW([{"params": [parameter(4)], **options}], device=device)


def test_a_learning_rate_that_became_nan_is_refused_before_anything_is_updated(device):
    p, q = parameter(16), parameter(16)
    optimizer = nearstep.optim.AdamW([{"params": [p]}, {"params": [q]}], device=device)
    p.grad, q.grad = torch.ones(16), torch.ones(16)
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(HyperparameterError, match="lr"):
        optimizer.step()
    assert torch.equal(p, torch.ones(16))
    assert optimizer.traffic.launches == 0


def test_the_device_must_be_named():
    with pytest.raises(TypeError, match="device"):
        nearstep.optim.AdamW([parameter(4)])


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
    with pytest.raises(ParameterError, match="on the CPU, not on meta"):
        nearstep.optim.AdamW([torch.ones(4, device="meta", requires_grad=True)], device=device)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_duplicate_parameter_is_refused(device):
    p = parameter(4)
    with pytest.raises(ParameterError, match="duplicates"):
        nearstep.optim.AdamW([p, p], device=device)


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


def test_a_group_that_is_refused_is_not_added(device):
    optimizer = nearstep.optim.AdamW([parameter(4)], device=device)
    with pytest.raises(UnsupportedOptionError):
        optimizer.add_param_group({"params": [parameter(4)], "maximize": True})
    assert len(optimizer.param_groups) == 1
