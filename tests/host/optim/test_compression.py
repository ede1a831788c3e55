"""Steps on compressed gradients, against torch's fused steps on what was kept of them."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import BusResponseError
from nearstep.torch import convert
from nearstep.torch.compression import Compression
from nearstep.torch.errors import (
    HyperparameterError,
    InterruptedStepError,
    StateError,
    UnsupportedOptionError,
)
from nearstep.torch.topk import BLOCK

from ..driver.conftest import chosen
from .conftest import IN_DEPTH, like_torch

RULES = "rules=adam,sgd,sgd_momentum,adagrad"
KERNEL = f"{RULES}&gradient_formats=fp32,fp16,bf16&compression=fused,scatter&memory_bytes=64MiB"
URLS = {
    "kernel": f"golden:axdimm?{KERNEL}",
    "dimm": f"golden:axdimm?channels=2&block_bytes=512&{KERNEL}",
    "card": "golden:smartssd?memory_bytes=64MiB",
}
SHAPES = ((32, 48), (64,), (16, 3, 5), (16,))
KINDS = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "weight_decay": 0.01},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
}


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request):
    """A kernel by itself, a DIMM with small stripes and a card, all with every form of pairs."""
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


def pair(kind, ours, theirs, device, **options):
    name = kind.split()[0]
    return (
        getattr(nearstep.optim, name)(ours, device=device, **KINDS[kind], **options),
        getattr(torch.optim, name)(theirs, fused=True, **KINDS[kind]),
    )


class Reference:
    """Gradients as they are after compression, densely, with residuals of its own."""

    def __init__(self, **options):
        self.compression = Compression(**options)
        self.residuals = {}
        self.sent = 0

    def replace(self, parameters):
        """Replace each gradient by what would be sent of it."""
        for index, p in enumerate(parameters):
            if p.grad is None:
                continue
            flat = convert.to_float32(p.grad)
            done = self.compression.compress(flat, self.residuals.get(index))
            dense = np.zeros(p.numel(), np.float32)
            dense[done.index] = convert.widen(done.value)
            p.grad = torch.from_numpy(dense).view(p.shape)
            self.residuals[index] = done.residual
            self.sent += done.index.size


def same_bits(mine, other):
    return torch.equal(mine.view(torch.int32), other.view(torch.int32))


def assert_equal(ours, theirs, optimizer, reference):
    compared = 0
    for a, b in zip(ours, theirs, strict=True):
        assert same_bits(a.detach(), b.detach())
        compared += a.numel()
        for key, value in reference.state.get(b, {}).items():
            assert same_bits(optimizer.state[a][key], value), key
            compared += value.numel()
    assert compared > 0
    return compared


@like_torch
@pytest.mark.parametrize("form", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("feedback", [True, pytest.param(False, marks=pytest.mark.deep)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_torchs_on_what_is_kept(
    kind, feedback, form, device, make_parameters, give_gradients
):
    ours, theirs = make_parameters(SHAPES), make_parameters(SHAPES)
    chosen = {"error_feedback": feedback, "compression_format": form}
    optimizer, reference = pair(kind, ours, theirs, device, compression=0.05, **chosen)
    dense = Reference(share=0.05, error_feedback=feedback, format=form)
    compared = 0
    for skipped in (None, 2, None, 0, None):
        give_gradients(ours, theirs)
        if skipped is not None:
            ours[skipped].grad = theirs[skipped].grad = None
        dense.replace(theirs)
        optimizer.step()
        reference.step()
        compared += assert_equal(ours, theirs, optimizer, reference)
    for index, p in enumerate(ours):
        if feedback:
            residual = optimizer.state[p]["residual"]
            assert residual.dtype == torch.float32
            assert residual.shape == p.shape
            flat = residual.reshape(-1).numpy()
            assert flat.tobytes() == dense.residuals[index].tobytes()
            assert np.abs(flat).max() > 0 or p.numel() == 1
        else:
            assert "residual" not in optimizer.state.get(p, {})
    traffic = optimizer.traffic
    assert traffic.pairs == dense.sent
    assert traffic.gradients_down == dense.sent * (8 if form == "fp32" else 6)
    print(f"{compared} values compared")


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_equals_no_compression_bit_for_bit(
    kind, device, make_parameters, give_gradients
):
    ours, theirs = make_parameters(SHAPES), make_parameters(SHAPES)
    name = kind.split()[0]
    compressed = getattr(nearstep.optim, name)(ours, device=device, compression=1.0, **KINDS[kind])
    whole = getattr(nearstep.optim, name)(theirs, device=device, **KINDS[kind])
    with torch.no_grad():
        for p in (*ours, *theirs):
            p[0] = -0.0
    compared = 0
    for _ in range(4):
        give_gradients(ours, theirs)
        for p in (*ours, *theirs):
            p.grad[0] = -0.0
        compressed.step()
        whole.step()
        compared += assert_equal(ours, theirs, compressed, whole)
    assert compressed.traffic.gradients_down == 2 * whole.traffic.gradients_down
    assert compared > 0


def test_sorted_pairs_are_taken_in_either_form(device, make_parameters, give_gradients):
    lists = [make_parameters(SHAPES) for _ in range(2)]
    optimizers = [
        nearstep.optim.AdamW(ps, device=device, compression=0.1, compression_form=form)
        for ps, form in zip(lists, ("fused", "scatter"), strict=True)
    ]
    for _ in range(3):
        give_gradients(*lists)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(*lists, *optimizers)


def test_all_that_was_sent_and_what_is_left_is_all_that_was_given(device):
    """SGD of lr 1 subtracts what is sent; whole numbers add up exactly."""
    shapes = [(700,), (1,), (33, 3)]
    ours = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    optimizer = nearstep.optim.SGD(ours, lr=1.0, device=device, compression=0.02)
    generator = torch.Generator().manual_seed(8)
    total = [torch.zeros(shape) for shape in shapes]
    for _ in range(30):
        for p, sum_of_gradients in zip(ours, total, strict=True):
            p.grad = torch.randint(-1000, 1000, p.shape, generator=generator).float()
            sum_of_gradients += p.grad
        optimizer.step()
    for p, expected in zip(ours, total, strict=True):
        assert torch.equal(optimizer.state[p]["residual"] - p.detach(), expected)
    assert optimizer.state[ours[0]]["residual"].abs().max() > 0


def test_tensors_of_any_size_of_which_some_have_no_pairs_on_a_channel(device):
    """Blocks of 128 elements take turns on the channels; a large value draws all pairs to one."""
    shapes = [(1,), (0,), (2,), (17,), (300,), (1, 1), (1000,), (BLOCK + 3,)]
    ours = [torch.ones(shape, requires_grad=True) for shape in shapes]
    theirs = [torch.ones(shape, requires_grad=True) for shape in shapes]
    optimizer = nearstep.optim.SGD(ours, lr=0.5, device=device, compression=0.01)
    reference = torch.optim.SGD(theirs, lr=0.5)
    dense = Reference(share=0.01)
    for turn in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.linspace(0, 1, mine.numel()).view(mine.shape)
            if mine.numel():
                mine.grad.view(-1)[130 * turn % mine.numel()] = 1e6
            other.grad = mine.grad.clone()
        dense.replace(theirs)
        optimizer.step()
        reference.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
    assert optimizer.traffic.pairs == dense.sent


def test_a_gradient_that_is_not_finite_reaches_the_parameter(device):
    p = torch.zeros(1000, requires_grad=True)
    optimizer = nearstep.optim.SGD([p], lr=1.0, device=device, compression=0.005)
    p.grad = torch.linspace(-1, 1, 1000)
    p.grad[500], p.grad[501], p.grad[502] = torch.nan, torch.inf, -torch.inf
    optimizer.step()
    assert p[500].isnan()
    assert p[501:503].tolist() == [-torch.inf, torch.inf]
    residual = optimizer.state[p]["residual"]
    assert residual.isfinite().all()
    assert int((residual == 0).sum()) == 5


def test_nothing_but_pairs_goes_down_and_no_memory_is_taken_for_gradients(make_parameters):
    with nearstep.open(URLS["kernel"]) as device:
        ours = make_parameters([(4096,), (1024,)])
        free = device.free_bytes
        optimizer = nearstep.optim.AdamW(ours, device=device, compression=0.01)
        taken = free - device.free_bytes
        kept = 41 + 10
        assert 12 * 5120 + 8 * kept <= taken < 13 * 5120
        for p in ours:
            p.grad = torch.randn(p.shape)
        optimizer.step()
        written = []
        write = device.backend.write_memory
        device.backend.write_memory = lambda address, data: (
            written.append(data.nbytes),
            write(address, data),
        )
        before = optimizer.traffic.as_dict()
        optimizer.step()
        assert sum(written) == 8 * kept
        assert optimizer.traffic.gradients_down - before["gradients_down"] == 8 * kept
        assert optimizer.traffic.launches == 2
        assert device.free_bytes == free - taken
        del optimizer
        assert device.free_bytes == free


@pytest.fixture
def trained(device, make_parameters, give_gradients):
    """Parameters and an optimizer with residuals, after three steps."""
    ours = make_parameters(SHAPES)
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device, compression=0.03)
    for _ in range(3):
        give_gradients(ours)
        optimizer.step()
    return ours, optimizer


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def resumed(how, ours, optimizer, device):
    """The parameters and an optimizer that goes on from where this one is."""
    if how == "deepcopy":
        return copy.deepcopy((ours, optimizer))
    if how == "pickle":
        return pickle.loads(pickle.dumps((ours, optimizer)))
    parameters = [p.detach().clone().requires_grad_() for p in ours]
    second = nearstep.optim.AdamW(parameters, device=device, compression=0.03)
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    return parameters, second


@pytest.mark.parametrize("how", ["checkpoint", "deepcopy", "pickle"])
def test_residuals_survive(how, trained, device, give_gradients):
    ours, optimizer = trained
    theirs, second = resumed(how, ours, optimizer, device)
    for a, b in zip(ours, theirs, strict=True):
        mine, other = optimizer.state[a]["residual"], second.state[b]["residual"]
        assert same_bits(mine, other)
        assert mine.data_ptr() != other.data_ptr()
        assert mine.abs().max() > 0
    for _ in range(3):
        give_gradients(ours, theirs)
        optimizer.step()
        second.step()
        assert_equal(ours, theirs, optimizer, second)
        for a, b in zip(ours, theirs, strict=True):
            assert same_bits(optimizer.state[a]["residual"], second.state[b]["residual"])


def test_torch_loads_the_checkpoint_and_a_checkpoint_of_torch_has_no_residual(trained, device):
    ours, optimizer = trained
    parameters = [p.detach().clone().requires_grad_() for p in ours]
    reference = torch.optim.AdamW(parameters)
    reference.load_state_dict(optimizer.state_dict())
    for p in parameters:
        p.grad = torch.ones_like(p)
    reference.step()
    saved = reference.state_dict()
    for state in saved["state"].values():
        state.pop("residual", None)
    optimizer.load_state_dict(saved)
    assert all("residual" not in optimizer.state[p] for p in ours)
    for p in ours:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all("residual" in optimizer.state[p] for p in ours)


def test_a_checkpoint_is_a_snapshot_of_the_residuals(trained, give_gradients):
    ours, optimizer = trained
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    optimizer.state[ours[0]]["residual"].zero_()
    give_gradients(ours)
    optimizer.step()
    for index, state in kept["state"].items():
        assert torch.equal(saved["state"][index]["residual"], state["residual"])


def test_a_residual_that_the_user_changes_is_what_the_next_step_adds(device):
    p = torch.zeros(64, requires_grad=True)
    optimizer = nearstep.optim.SGD([p], lr=1.0, device=device, compression=0.02)
    p.grad = torch.arange(64.0)
    optimizer.step()
    assert p[63] == -63
    optimizer.state[p]["residual"][5] = 1000.0
    optimizer.step()
    assert p[5] == -1005
    optimizer.state[p]["residual"] = torch.full((64,), 7.0)
    optimizer.step()
    assert p[63] == -63 - 70


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.zeros(3), "of shape"),
        (torch.zeros(64, dtype=torch.float16), "of torch.float32"),
        (torch.zeros(64, dtype=torch.int32), "floating-point"),
        (None, "floating-point"),
    ],
)
def test_a_residual_that_does_not_fit_is_refused(wrong, text, device):
    p = torch.zeros(64, requires_grad=True)
    optimizer = nearstep.optim.SGD([p], lr=1.0, device=device, compression=0.02)
    p.grad = torch.ones(64)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["residual"] = wrong
    with pytest.raises(StateError, match=text):
        optimizer.load_state_dict(saved)
    with pytest.raises(StateError, match=text):
        optimizer.state[p]["residual"] = wrong
    assert optimizer.state[p]["residual"].shape == (64,)


@like_torch
def test_parameters_of_16_bits_keep_their_residual_in_fp32(device, make_parameters, give_gradients):
    ours = make_parameters(SHAPES, torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in ours]
    optimizer = nearstep.optim.AdamW(ours, lr=1e-2, device=device, compression=0.05)
    reference = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    dense = Reference(share=0.05)
    for _ in range(4):
        give_gradients(ours)
        for p, master in zip(ours, masters, strict=True):
            master.grad = p.grad.float()
        dense.replace(masters)
        optimizer.step()
        reference.step()
    for p, master in zip(ours, masters, strict=True):
        assert torch.equal(p, master.to(torch.bfloat16))
        assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[master]["exp_avg"])
        assert optimizer.state[p]["residual"].dtype == torch.float32
    saved = optimizer.state_dict()
    assert all(state["residual"].dtype == torch.float32 for state in saved["state"].values())
    optimizer.load_state_dict(saved)
    for index, p in enumerate(ours):
        flat = optimizer.state[p]["residual"].reshape(-1).numpy()
        assert flat.tobytes() == dense.residuals[index].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_that_is_none_is_refused(kind, device):
    p = torch.zeros(4, requires_grad=True)
    for share in (0.0, -1, 1.5, float("nan"), "1%"):
        with pytest.raises(HyperparameterError, match=r"^compression must be"):
            pair(kind, [p], [p], device, compression=share)


def test_a_share_of_any_real_number_is_taken(device):
    p = torch.zeros(16, requires_grad=True)
    optimizer = nearstep.optim.SGD([p], device=device, compression=np.float32(0.25))
    p.grad = torch.arange(16.0)
    optimizer.step()
    assert optimizer.traffic.pairs == 4


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("", {}, "compression=fused"),
        ("&compression=scatter", {}, "compression=fused"),
        ("&compression=fused", {"compression_form": "scatter"}, "compression=scatter"),
        ("&compression=fused", {"compression_format": "fp16"}, "gradient_formats="),
    ],
)
def test_what_the_kernel_has_not_is_refused_and_the_option_named(url, options, text):
    p = torch.zeros(4, requires_grad=True)
    name = f"golden:axdimm?memory_bytes=1MiB{url}"
    with pytest.raises(UnsupportedOptionError, match=text):
        nearstep.optim.AdamW([p], device=name, compression=0.1, **options)


def test_a_step_that_fails_half_way_is_healed_by_a_checkpoint(trained, give_gradients):
    ours, optimizer = trained
    parameters, saved = [p.detach().clone() for p in ours], optimizer.state_dict()
    give_gradients(ours)
    gradients = [p.grad.clone() for p in ours]
    optimizer.step()
    expected = [p.detach().clone() for p in ours]
    residuals = [optimizer.state[p]["residual"].clone() for p in ours]

    def back():
        with torch.no_grad():
            for p, old, gradient in zip(ours, parameters, gradients, strict=True):
                p.copy_(old)
                p.grad = gradient.clone()
        optimizer.load_state_dict(saved)

    back()
    at = optimizer.table.parameters[ours[2]].extent.views("v")[0].address
    backend = optimizer.device.backend
    backend.inject(Injection(kind="slverr", write=True, base=at, limit=at + 4))
    with pytest.raises(BusResponseError):
        optimizer.step()
    backend.heal()
    with pytest.raises(InterruptedStepError):
        optimizer.step()
    assert torch.equal(optimizer.state[ours[0]]["residual"], saved["state"][0]["residual"])
    back()
    optimizer.step()
    for p, value, residual in zip(ours, expected, residuals, strict=True):
        assert torch.equal(p, value)
        assert same_bits(optimizer.state[p]["residual"], residual)
