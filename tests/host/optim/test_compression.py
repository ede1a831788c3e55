"""Steps on compressed gradients, against torch's fused steps on what was kept of them."""

from __future__ import annotations

import copy
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
from .beside import KINDS as EVERY_KIND
from .beside import Beside, Side, clone, made, step_alone, tensors, through_a_file
from .conftest import IN_DEPTH, bits, like_torch

RULES = "rules=adam,sgd,sgd_momentum,adagrad"
KERNEL = f"{RULES}&gradient_formats=fp32,fp16,bf16&compression=fused,scatter&memory_bytes=64MiB"
URLS = {
    "kernel": f"golden:axdimm?{KERNEL}",
    "dimm": f"golden:axdimm?channels=2&block_bytes=512&{KERNEL}",
    "card": "golden:smartssd?memory_bytes=64MiB",
}
SHAPES = ((32, 48), (64,), (16, 3, 5), (16,))
KINDS = [kind for kind in EVERY_KIND if kind != "amsgrad"]


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def device(request):
    """A kernel by itself, a DIMM with small stripes and a card, all with every form of pairs."""
    with nearstep.open(URLS[request.param]) as opened:
        yield opened


class Compressed(Beside):
    """Beside torch's optimizer of gradients as they are after compression, densely."""

    beyond = ("residual",)

    def __init__(self, kind, device, contents=None, *, compression, **more):
        contents = tensors(SHAPES) if contents is None else contents
        names = {"error_feedback": "error_feedback", "compression_format": "format"}
        own = {"compression": compression} | {n: more.pop(n) for n in names if n in more}
        super().__init__(kind, device, contents, own=own, **more)
        given = {names[name]: value for name, value in own.items() if name in names}
        self.compression = Compression(share=compression, **given)
        self.residuals = {}
        self.sent = 0

    def give(self, skip=()):
        super().give(skip)
        self.replace()

    def replace(self):
        """Replace each gradient of torch's by what would be sent of it."""
        for index, p in enumerate(self.torchs.parameters):
            if p.grad is None:
                continue
            done = self.compression.compress(convert.to_float32(p.grad), self.residuals.get(index))
            dense = np.zeros(p.numel(), np.float32)
            dense[done.index] = convert.widen(done.value)
            p.grad, self.residuals[index] = torch.from_numpy(dense).view(p.shape), done.residual
            self.sent += done.index.size

    def check(self):
        """Of residuals, too; the number of values."""
        compared = super().check(gradients=False)
        for index, p in enumerate(self.mine.parameters):
            found = self.mine.state.get(p, {}).get("residual")
            expected = self.residuals.get(index)
            assert (found is None) == (expected is None)
            if found is not None:
                assert (found.dtype, found.shape) == (torch.float32, p.shape)
                assert found.reshape(-1).numpy().tobytes() == expected.tobytes()
                compared += found.numel()
        return compared


def residuals_of(side):
    return [side.state[p]["residual"] for p in side.parameters]


@like_torch
@pytest.mark.parametrize("form", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("feedback", [True, pytest.param(False, marks=pytest.mark.deep)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_torchs_on_what_is_kept(kind, feedback, form, device):
    chosen = {"error_feedback": feedback, "compression_format": form}
    beside = Compressed(kind, device, compression=0.05, **chosen)
    compared = 0
    for skipped in ((), (2,), (), (0,), ()):
        beside.step(1, skipped)
        compared += beside.check()
    assert compared > 0
    if feedback:
        assert all(np.abs(each).max() > 0 or each.size == 1 for each in beside.residuals.values())
    traffic = beside.mine.optimizer.traffic
    assert traffic.pairs == beside.sent
    assert traffic.gradients_down == beside.sent * (8 if form == "fp32" else 6)


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_equals_no_compression_bit_for_bit(kind, device):
    beside = Beside(kind, device, tensors(SHAPES), own={"compression": 1.0})
    beside.torchs.optimizer = made(kind, beside.torchs.parameters, device)
    with torch.no_grad():
        for side in beside:
            for p in side.parameters:
                p[0] = -0.0
    for _ in range(4):
        beside.give()
        for side in beside:
            for p in side.parameters:
                p.grad[0] = -0.0
        step_alone(beside)
        beside.beyond = ("residual",)
        beside.check()
        assert not any(each.any() for each in residuals_of(beside.mine))
    compressed, whole = (side.optimizer.traffic for side in beside)
    assert compressed.gradients_down == 2 * whole.gradients_down


def test_sorted_pairs_are_taken_in_either_form(device):
    beside = Beside("AdamW", device, tensors(SHAPES), own={"compression": 0.1})
    scatter = {"compression": 0.1, "compression_form": "scatter"}
    beside.torchs.optimizer = made("AdamW", beside.torchs.parameters, device, **scatter)
    beside.step(3)
    beside.check()


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
    contents = [torch.ones(shape) for shape in shapes]
    beside = Compressed("SGD", device, contents, compression=0.01, lr=0.5, weight_decay=0.0)
    beside.torchs.optimizer = torch.optim.SGD(beside.torchs.parameters, lr=0.5)
    for turn in range(4):
        for p, q in zip(*(side.parameters for side in beside), strict=True):
            p.grad = torch.linspace(0, 1, p.numel()).view(p.shape)
            if p.numel():
                p.grad.view(-1)[130 * turn % p.numel()] = 1e6
            q.grad = p.grad.clone()
        beside.replace()
        step_alone(beside)
        beside.check()
    assert beside.mine.optimizer.traffic.pairs == beside.sent


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


def test_nothing_but_pairs_goes_down_and_no_memory_is_taken_for_gradients():
    with nearstep.open(URLS["kernel"]) as device:
        ours = clone(tensors([(4096,), (1024,)]))
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
def trained(device):
    """Parameters and an optimizer with residuals, after three steps."""
    beside = Beside("AdamW", device, tensors(SHAPES), own={"compression": 0.03})
    beside.step(3)
    return beside


def loaded(side, device):
    parameters = clone(side.parameters)
    optimizer = made("AdamW", parameters, device, compression=0.03)
    optimizer.load_state_dict(through_a_file(side.optimizer.state_dict()))
    return parameters, optimizer


RESUMED = {
    "checkpoint": loaded,
    "deepcopy": lambda side, _: copy.deepcopy((side.parameters, side.optimizer)),
    "pickle": lambda side, _: pickle.loads(pickle.dumps((side.parameters, side.optimizer))),
}


@pytest.mark.parametrize("how", RESUMED)
def test_residuals_survive(how, trained, device):
    trained.torchs = Side(*RESUMED[how](trained.mine, device))
    for one, other in zip(*map(residuals_of, trained), strict=True):
        assert torch.equal(bits(one), bits(other))
        assert one.data_ptr() != other.data_ptr()
        assert one.abs().max() > 0
    for _ in range(3):
        trained.step()
        trained.check()


def test_torch_loads_the_checkpoint_and_a_checkpoint_of_torch_has_no_residual(trained):
    ours, optimizer = trained.mine.parameters, trained.mine.optimizer
    parameters = clone(ours)
    reference = torch.optim.AdamW(parameters)
    reference.load_state_dict(optimizer.state_dict())
    for p in (*ours, *parameters):
        p.grad = torch.ones_like(p)
    reference.step()
    saved = reference.state_dict()
    for state in saved["state"].values():
        state.pop("residual", None)
    optimizer.load_state_dict(saved)
    assert all("residual" not in optimizer.state[p] for p in ours)
    optimizer.step()
    assert all("residual" in optimizer.state[p] for p in ours)


def test_a_checkpoint_is_a_snapshot_of_the_residuals(trained):
    optimizer = trained.mine.optimizer
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    residuals_of(trained.mine)[0].zero_()
    trained.step()
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
def test_parameters_of_16_bits_keep_their_residual_in_fp32(device):
    beside = Compressed("AdamW", device, dtype=torch.bfloat16, compression=0.05)
    beside.step(4)
    beside.check()
    saved = beside.mine.optimizer.state_dict()
    assert all(state["residual"].dtype == torch.float32 for state in saved["state"].values())
    beside.mine.optimizer.load_state_dict(saved)
    beside.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_that_is_none_is_refused(kind, device):
    for share in (0.0, -1, 1.5, float("nan"), "1%"):
        with pytest.raises(HyperparameterError, match=r"^compression must be"):
            made(kind, clone(tensors()), device, compression=share)


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


def test_a_step_that_fails_half_way_is_healed_by_a_checkpoint(trained):
    ours, optimizer = trained.mine.parameters, trained.mine.optimizer
    parameters, saved = clone(ours), optimizer.state_dict()
    trained.give()
    gradients = [p.grad.clone() for p in ours]
    optimizer.step()
    expected = clone(ours)
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
        assert torch.equal(bits(optimizer.state[p]["residual"]), bits(residual))
