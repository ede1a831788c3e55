"""Muon beside torch's, bit for bit: a step with a part that is not elementwise, in every home."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nearstep
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.errors import BusResponseError
from nearstep.torch.errors import (
    GradientError,
    HyperparameterError,
    InterruptedStepError,
    ParameterError,
    StateError,
    UnsupportedOptionError,
)
from nearstep_spec.rule.optimizer import Optimizer

from ..overflow.jobs import drives
from .beside import through_a_file
from .conftest import SEED, bits, like_torch

pytestmark = like_torch

AXDIMM = "golden:axdimm?rules=muon&memory_bytes=4MiB"
CARD = "golden:smartssd?rules=muon&memory_bytes=4MiB"
HOMES = {
    "host": "host:",
    "kernel": AXDIMM,
    "dimm": f"{AXDIMM}&channels=2&block_bytes=512",
    "card": CARD,
    "cards": f"{CARD}&cards=2&subgroup_elements=1024&chunk_bytes=512&drive=unused",
    "host, drives": "host:",
    "kernel, drives": AXDIMM,
    "rtl": "sim:axdimm?rules=muon&lanes=4&block_bytes=512&memory_bytes=1MiB&fu=native",
}
SHAPES = ((1, 1), (3, 5), (5, 3), (7, 1), (1, 33), (16, 16), (17, 9), (64, 33), (40, 130))
WHOLE = ((16, 16), (16, 48), (64, 32), (96, 1), (1, 96))
"""Of whole vectors of torch's in bf16."""

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain momentum": {"nesterov": False},
    "second form of lerp": {"momentum": 0.3, "weight_decay": 0.0},
    "momentum of 0.5": {"momentum": 0.5},
    "no momentum": {"momentum": 0.0},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "lr": 0.02},
    "original": {"adjust_lr_fn": "original", "lr": torch.tensor(0.05)},
    "another iteration": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    "no iteration": {"ns_steps": 0},
}


class Twins:
    """Matrices of nearstep and of torch, with equal gradients."""

    def __init__(
        self,
        device: Any,
        *,
        shapes: Any = SHAPES,
        dtype: torch.dtype = torch.float32,
        on: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        print(f"seed {SEED}")
        self.generator = torch.Generator().manual_seed(SEED)
        given = [torch.randn(each, generator=self.generator).to(dtype) for each in shapes]
        self.ours = [each.clone().requires_grad_() for each in given]
        self.theirs = [each.clone().requires_grad_() for each in given]
        self.optimizer = nearstep.optim.Muon(self.ours, device=device, **options, **(on or {}))
        self.reference = torch.optim.Muon(self.theirs, **options)

    def give(self, factor: float = 1.0) -> None:
        for a, b in zip(self.ours, self.theirs, strict=True):
            gradient = torch.randn(a.shape, generator=self.generator).to(a.dtype)
            a.grad, b.grad = gradient * factor, gradient * factor

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.give()
            self.optimizer.step()
            self.reference.step()

    def check(self) -> int:
        """Compare parameters, gradients and momentum; the number of values compared."""
        compared = 0
        for a, b in zip(self.ours, self.theirs, strict=True):
            assert torch.equal(bits(a), bits(b)), tuple(a.shape)
            mine, other = self.optimizer.state[a], self.reference.state[b]
            assert list(mine) == list(other) == ["momentum_buffer"]
            found, expected = mine["momentum_buffer"], other["momentum_buffer"]
            assert found.dtype == expected.dtype
            assert torch.equal(bits(found), bits(expected)), tuple(a.shape)
            assert torch.equal(bits(a.grad), bits(b.grad))
            compared += 3 * a.numel()
        print(f"{compared} values compared, bit for bit")
        return compared


@contextmanager
def opened(name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A device of `HOMES`, and the arguments for its drives."""
    url = HOMES[name]
    with drives(2) if name == "cards" or name.endswith("drives") else nullcontext() as on:
        more: dict[str, Any] = {} if on is None else {"drives": on.store}
        if name.endswith("drives"):
            more["memory"] = 1 << 17
        with nullcontext(url) if url == "host:" else nearstep.open(url) as device:
            yield device, more


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, each) for name in ("host", "kernel") for each in OPTIONS),
        *((name, "default") for name in HOMES if name not in ("host", "kernel", "rtl")),
        pytest.param("rtl", "default", marks=pytest.mark.deep),
    ],
)
def test_steps_have_the_bits_of_torch(name: str, options: str) -> None:
    with opened(name) as (device, on):
        twins = Twins(device, on=on, **OPTIONS[options])
        twins.step(3)
        traffic, elements = copy.copy(twins.optimizer.traffic), sum(a * b for a, b in SHAPES)
        assert (traffic.steps, traffic.elements) == (3, 3 * elements)
        assert traffic.moments_up == (0 if name == "host" else 3 * 4 * elements)
        assert twins.check() == 3 * elements


@pytest.mark.parametrize(
    ("dtype", "shapes", "options"),
    [
        (torch.float16, SHAPES, {}),
        (torch.float16, SHAPES, {"nesterov": False}),
        (torch.bfloat16, WHOLE, {}),
        (torch.bfloat16, WHOLE, {"lr": 0.3, "momentum": 0.2}),
    ],
)
@pytest.mark.parametrize("url", ["host:", f"{AXDIMM}&parameter_format={{0}}&state_format={{0}}"])
def test_steps_in_16_bits_have_the_bits_of_torch(
    url: str, dtype: torch.dtype, shapes: Any, options: dict[str, Any]
) -> None:
    if dtype == torch.float16 and url != "host:":
        url = "host:"  # no kernel keeps parameters in fp16
    form = "bf16" if dtype == torch.bfloat16 else "fp16"
    twins = Twins(f"{url.format(form)}", shapes=shapes, dtype=dtype, **options)
    twins.step(3)
    assert twins.check() == 3 * sum(a * b for a, b in shapes)


@pytest.mark.parametrize(
    "layout", [lambda t: t.t().contiguous().t(), lambda t: torch._neg_view(-t)]
)
def test_any_layout_of_a_parameter(layout: Any) -> None:
    twins = Twins("host:", shapes=[(24, 16)])
    p = layout(twins.theirs[0].detach()).requires_grad_()
    twins.ours, twins.optimizer = [p], nearstep.optim.Muon([p])
    place = p.data_ptr()
    twins.step(3)
    assert twins.check() == 3 * 24 * 16
    assert p.data_ptr() == place


@pytest.mark.parametrize("name", ["host", "kernel", "host, drives", "cards"])
@pytest.mark.parametrize("direction", ["from torch", "to torch", "to itself", "pickled", "copied"])
def test_checkpoints_are_interchangeable_with_torchs(direction: str, name: str) -> None:
    with opened(name) as (device, on):
        twins = Twins(device, on=on, lr=0.02)
        if on and direction in ("pickled", "copied"):
            with pytest.raises(UnsupportedOptionError, match="cannot be copied or pickled"):
                pickle.dumps(twins.optimizer)
            return
        twins.step(2)
        if direction == "copied":
            twins.ours, twins.optimizer = copy.deepcopy((twins.ours, twins.optimizer))
        elif direction == "pickled":
            twins.ours, twins.optimizer = pickle.loads(pickle.dumps((twins.ours, twins.optimizer)))
        else:
            source = twins.reference if direction == "from torch" else twins.optimizer
            saved = through_a_file(source.state_dict())
            assert saved["param_groups"] == twins.reference.state_dict()["param_groups"]
            if direction == "to torch":
                resumed = [p.detach().clone().requires_grad_() for p in twins.ours]
                twins.reference = torch.optim.Muon(resumed)
                twins.theirs = resumed
                twins.reference.load_state_dict(saved)
            else:
                twins.optimizer.load_state_dict(saved)
        twins.step(2)
        assert twins.check() == 3 * sum(a * b for a, b in SHAPES)


def test_a_group_is_added_and_options_change() -> None:
    for name in ("host", "kernel"):
        with opened(name) as (device, _):
            twins = Twins(device)
            twins.step()
            for p, optimizer in ((twins.ours, twins.optimizer), (twins.theirs, twins.reference)):
                p.append(torch.ones(8, 6, requires_grad=True))
                optimizer.add_param_group({"params": p[-1:], "lr": 0.5, "nesterov": False})
                optimizer.param_groups[0].update(lr=0.1, ns_steps=2)
            twins.step(2)
            twins.give()
            for each in (twins.ours, twins.theirs):
                each[1].grad = each[-1].grad = None
            twins.optimizer.step()
            twins.reference.step()
            twins.give()
            assert twins.check() == 3 * (sum(a * b for a, b in SHAPES) + 48)


def test_a_scaler_unscales_on_the_host() -> None:
    """As with every optimizer of torch that is not fused."""
    for url in ("host:", f"{AXDIMM}&scan=yes&gradient_scale=yes"):
        twins, both = Twins(url), [torch.amp.GradScaler("cpu") for _ in range(2)]
        for scaler in both:
            scaler.scale(torch.ones(()))
        for bad in (False, True, False):
            twins.give(both[0].get_scale())
            for parameters in (twins.ours, twins.theirs) if bad else ():
                parameters[2].grad[0, 0] = torch.inf
            for scaler, optimizer in zip(both, (twins.optimizer, twins.reference), strict=True):
                scaler.step(optimizer)
                scaler.update()
        assert twins.check() == 3 * sum(a * b for a, b in SHAPES)
        assert twins.optimizer.traffic.skipped == 0  # torch skips the call


def test_from_rule_is_the_same_and_maximizes() -> None:
    for url in ("host:", AXDIMM):
        twins = Twins(url)
        twins.optimizer = nearstep.optim.from_rule("muon", twins.ours, device=url, maximize=True)
        for _ in range(2):
            twins.give()
            for p in twins.theirs:
                p.grad.neg_()
            twins.optimizer.step()
            twins.reference.step()
        for p in twins.theirs:
            p.grad.neg_()
        assert twins.check() == 3 * sum(a * b for a, b in SHAPES)


def test_an_optimizer_of_a_file_has_a_part_of_its_own(tmp_path: Path) -> None:
    """Signs of the gradient, less the mean of each row."""
    file = tmp_path / "centred.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from nearstep_spec.rule.rules import OPTIMIZERS\n"
        "def _centred(g, lr):\n"
        "    return (g - g.mean(1, keepdim=True)).sign() * lr\n"
        "def _scalars(weight_decay, step, part):\n"
        "    return {'decay': 1 - weight_decay, 'm_weight': 0.5, 'step_size': -step,\n"
        "            'm_from_g': 0, 'second': part.number}\n"
        "CENTRED = replace(OPTIMIZERS['muon'], name='centred', between=_centred,\n"
        "                  scalars=_scalars, counts=True)\n"
    )
    for url in ("host:", f"golden:axdimm?rules={file}:CENTRED&memory_bytes=1MiB"):
        p = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        p.grad = torch.arange(12.0).view(3, 4).square()
        rows = p.grad - p.grad.mean(1, keepdim=True)
        expected = p.detach() * 0.5 - rows.sign() * 0.25
        optimizer = nearstep.optim.from_rule(
            f"{file}:CENTRED", [p], device=url, lr=0.25, weight_decay=0.5
        )
        optimizer.step()
        assert torch.equal(p, expected)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], p.grad / 2)
        optimizer.step()
        assert torch.equal(p, expected * 0.5 - rows.sign() * 0.5)  # of step 2
        assert optimizer.state[p]["step"] == 2


def _matrix() -> Tensor:
    return torch.ones(4, 6, requires_grad=True)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a learning rate below 0": ({"lr": -1.0}, HyperparameterError, "lr must be finite and at"),
    "momentum": ({"momentum": -0.1}, HyperparameterError, "momentum must be finite"),
    "a weight decay": ({"weight_decay": -1}, HyperparameterError, "weight_decay must be finite"),
    "a name": (
        {"adjust_lr_fn": "adamw"},
        HyperparameterError,
        "adjust_lr_fn must be None or one of original, match_rms_adamw, not 'adamw'",
    ),
    "two coefficients": (
        {"ns_coefficients": (1.0, 2.0)},
        HyperparameterError,
        r"ns_coefficients must be 3 numbers, not \(1.0, 2.0\)",
    ),
    "a hundred steps": (
        {"ns_steps": 100},
        HyperparameterError,
        r"ns_steps must be a whole number in \[0, 100\), not 100",
    ),
    "half a step": ({"ns_steps": 1.5}, HyperparameterError, "ns_steps must be a whole number"),
    "compression": ({"compression": 0.1}, UnsupportedOptionError, "compression=0.1 is not"),
    "a bound": ({"max_grad_norm": 1.0}, UnsupportedOptionError, "max_grad_norm=1.0 is not"),
    "stochastic": (
        {"rounding": "stochastic"},
        UnsupportedOptionError,
        "rounding='stochastic' is not",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "url", ["host:", f"{AXDIMM}&scan=yes&gradient_scale=yes&compression=fused"]
)
def test_wrong_options_are_refused(wrong: str, url: str) -> None:
    options, error, message = WRONG[wrong]
    if url == "host:" and error is UnsupportedOptionError and wrong != "stochastic":
        message = "it is for a device"
    with pytest.raises(error, match=message):
        nearstep.optim.Muon([_matrix()], device=url, **options)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameters_that_are_no_matrices_are_refused() -> None:
    for url in ("host:", AXDIMM):
        for shape in ((4,), (2, 3, 4), ()):
            p = torch.ones(shape, requires_grad=True)
            for reference in (torch.optim.Muon, nearstep.optim.Muon):
                with pytest.raises(ValueError, match="parameter"):
                    reference([p])
            with pytest.raises(ParameterError, match="of 2 dimensions for muon, not of shape"):
                nearstep.optim.Muon([p], device=url)
        p = _matrix()
        optimizer = nearstep.optim.Muon([p], device=url)
        with pytest.raises(ParameterError, match="of 2 dimensions"):
            optimizer.add_param_group({"params": [torch.ones(3, requires_grad=True)]})
        assert len(optimizer.param_groups) == 1
        lazy = torch.nn.parameter.UninitializedParameter()
        optimizer.add_param_group({"params": [lazy]})
        lazy.materialize((5,))
        p.grad, lazy.grad, before = torch.ones(4, 6), torch.ones(5), p.detach().clone()
        with pytest.raises(ParameterError, match="of 2 dimensions"):
            optimizer.step()
        twice = nearstep.optim.Muon([p, p], device=url)
        with pytest.raises(ParameterError, match="in its group once for muon, not 2"):
            twice.step()
        p.grad = torch.ones(4, 6).to_sparse()
        with pytest.raises(GradientError):
            nearstep.optim.Muon([p], device=url).step()
        assert torch.equal(p, before)


def test_momentum_in_8_bits_is_refused() -> None:
    for url, on in (
        (f"{AXDIMM}&state_format=dynamic8", {}),
        ("host:", {"state_dtype": torch.uint8}),
    ):
        with pytest.raises(
            UnsupportedOptionError, match="two runs of a step of muon would quantize"
        ):
            nearstep.optim.Muon([_matrix()], device=url, **on)


def test_a_kernel_without_the_rule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"not muon: name it in the device's rules=adam,muon"):
        nearstep.optim.Muon([_matrix()], device="golden:axdimm?memory_bytes=1MiB")


def test_wrong_state_is_refused() -> None:
    for url in ("host:", AXDIMM):
        twins = Twins(url, shapes=[(4, 6)])
        saved = twins.reference.state_dict()
        saved["state"] = {0: {"momentum_buffer": torch.ones(6, 4)}}
        with pytest.raises(StateError, match=r"of shape \(4, 6\), not \(6, 4\)"):
            twins.optimizer.load_state_dict(saved)


@pytest.mark.parametrize("number", [0, 1])
def test_a_device_that_fails_in_either_run_interrupts_the_step(number: int) -> None:
    with nearstep.open(AXDIMM) as device:
        twins = Twins(device, shapes=[(16, 16)])
        twins.step()
        saved = copy.deepcopy((twins.ours[0].detach(), twins.optimizer.state_dict()))
        twins.give()
        real, calls = device.run_rule, []

        def failing(*given: Any, **options: Any) -> Any:
            calls.append(given)
            if len(calls) == number + 1:
                assert isinstance(device.backend, EmulatedBackend)
                device.backend.inject(Injection(kind="slverr", write=True))
            return real(*given, **options)

        device.run_rule = failing  # type: ignore[method-assign]
        with pytest.raises(BusResponseError):
            twins.optimizer.step()
        device.run_rule = real  # type: ignore[method-assign]
        assert len(calls) == number + 1
        with pytest.raises(InterruptedStepError):
            twins.optimizer.step()
        with torch.no_grad():
            twins.ours[0].copy_(saved[0])
        twins.optimizer.load_state_dict(saved[1])
        twins.optimizer.step()
        twins.reference.step()
        assert twins.check() == 3 * 16 * 16


@pytest.mark.parametrize("name", ["host", "kernel", "host, drives", "cards"])
def test_an_error_between_the_runs_interrupts_the_step_or_rolls_drives_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    real = Optimizer.second_gradient

    def failing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) >= 3:
            raise MemoryError("no room")
        return real(*given)

    with opened(name) as (device, on):
        twins = Twins(device, on=on)
        twins.step()
        before = copy.deepcopy(([p.detach() for p in twins.ours], twins.optimizer.state_dict()))
        twins.give()
        with monkeypatch.context() as patch:
            patch.setattr(Optimizer, "second_gradient", failing)
            with pytest.raises(MemoryError):
                twins.optimizer.step()
        assert len(calls) >= 3
        if not on:
            with pytest.raises(InterruptedStepError, match="failed half way \\(MemoryError\\)"):
                twins.optimizer.step()
            with torch.no_grad():
                for p, old in zip(twins.ours, before[0], strict=True):
                    p.copy_(old)
            twins.optimizer.load_state_dict(before[1])
        twins.optimizer.step()
        twins.reference.step()
        assert twins.check() == 3 * sum(a * b for a, b in SHAPES)


@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_gradients_that_the_device_keeps_are_as_before(updates: Any) -> None:
    """The second run has its gradients in the array of the first ones."""
    sides = []
    for _ in range(2):
        torch.manual_seed(SEED)
        layers = (torch.nn.Linear(a, b, bias=False) for a, b in ((32, 48), (48, 8), (8, 32)))
        sides.append(torch.nn.Sequential(*layers))
    ours, theirs = sides
    optimizer = nearstep.optim.Muon(ours.parameters(), device=AXDIMM)
    reference = torch.optim.Muon(theirs.parameters())
    engine = nearstep.offload(ours, optimizer, budget="150%", updates=updates)
    compared = 0
    for _ in range(3):
        given = torch.randn(4, 32)
        for model, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            model(given).square().mean().backward()
            each.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(bits(p.grad), bits(q.grad))
            compared += p.numel()
    engine.close()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert compared == 3 * (32 * 48 + 48 * 8 + 8 * 32)
