"""Optimizers whose moments are in 8 bits: each parameter by itself in numpy, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nearstep
from nearstep import blockwise
from nearstep.torch import convert
from nearstep.torch.errors import (
    HyperparameterError,
    StateError,
    UnsupportedOptionError,
)
from nearstep.torch.formats import regrouped
from nearstep_sim.golden import blockwise as golden
from nearstep_sim.golden import fp
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.fp import BF16
from nearstep_spec.rule.optimizer import Optimizer
from nearstep_spec.rule.rules import optimizer_named

from ..driver.conftest import chosen
from ..optimizers import EXAMPLES
from .beside import through_a_file

RULES = "rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad,rmsprop,adadelta"
EIGHT = f"{RULES}&state_format=dynamic8"
URLS = {
    "golden-numpy": f"golden:axdimm?{EIGHT}&engine=numpy&lanes=4&block_bytes=1024",
    "golden-cpp": f"golden:axdimm?{EIGHT}",
    "golden-dimm": f"golden:axdimm?{EIGHT}&channels=2&block_bytes=2048",
    "golden-card": f"golden:smartssd?{EIGHT}&lanes=4&chunk_bytes=4096",
    "sim": f"sim:axdimm?{EIGHT}&lanes=4&block_bytes=1024&memory_bytes=1MiB&memory=halfduplex"
    "&stall=0.1",
    "sim-dimm": "sim:axdimm?state_format=dynamic8&memory=ddr4-1600&channels=2&fu=native",
}
IN_DEPTH = {"golden-card", "sim", "sim-dimm"}
SHAPES = ((1,), (255,), (256,), (257,), (4095,), (4097,), (10_000,), (37, 53), (), (0,), (512,))
SIGNED = {"m": True, "v": False, "v_max": False, "d": False}
"""Whether a state has the map with negative entries."""

KINDS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-2, "weight_decay": 0.1},
    "adamw": {"lr": 1e-2},
    "adamw amsgrad": {"lr": 1e-2, "amsgrad": True},
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "sgd alone": {"lr": 0.1},
    "adagrad": {"lr": 0.1, "initial_accumulator_value": 0.3},
    "rmsprop": {"lr": 1e-2},
    "adadelta": {"lr": 1.0},
}
OF_SIM_DIMM = {"adam", "adamw"}
STEPS = 3
SEED = 4711


@pytest.fixture(params=chosen(URLS, IN_DEPTH))
def url(request: pytest.FixtureRequest) -> str:
    return URLS[request.param]


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def give_gradients(given: Sequence[Tensor], step: int) -> None:
    """Of many sizes: those of one step are always the same."""
    generator = torch.Generator().manual_seed(SEED + step)
    for each in given:
        scale = 10.0 ** torch.randint(-6, 2, each.shape, generator=generator)
        each.grad = (torch.randn(each.shape, generator=generator) * scale).to(each.dtype)


class Alone:
    """A parameter and its moments in numpy, no other beside it; `kept` are formats of some."""

    def __init__(
        self,
        name: str,
        given: Tensor,
        hyper: dict[str, Any],
        parameter_format: str = "fp32",
        kept: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.wide = {array for array, form in kept.items() if form == "fp32"}
        self.definition: Optimizer = optimizer_named(name)
        self.hyper = self.definition.defaults | hyper
        self.form = self.definition.form(self.hyper)
        self.parameter_format = parameter_format
        self.p = convert.to_float32(given.detach()).copy()
        self.made = 0
        self.states = {}
        for array in self.form.rule.states:
            if array != "p":
                initial = self.definition.initial.get(array)
                value = 0.0 if initial is None else self.hyper[initial]
                wide = np.full(self.p.size, value, np.float32)
                self.states[array] = self._kept(array, wide)

    def _kept(self, array: str, values: Any) -> Any:
        """What is kept of a moment."""
        return values if array in self.wide else golden.quantize(values, signed=SIGNED[array])

    def step(self, gradient: Tensor, scale: float = 1.0) -> None:
        self.made += 1
        if not self.p.size:
            return
        registers = self.form.registers(self.hyper, self.made, self.made == 1)
        given = {
            array: each if array in self.wide else golden.dequantize(each, signed=SIGNED[array])
            for array, each in self.states.items()
        }
        g = fp.mul32(convert.to_float32(gradient), np.full(self.p.size, scale, np.float32))
        made = evaluate(self.form.rule, {"p": self.p, "g": g, **given}, registers)
        self.p = made.pop("p")
        if self.parameter_format == "bf16":
            self.p = fp.widen32(fp.narrow32(self.p, BF16), BF16)
        self.states = {array: self._kept(array, each) for array, each in made.items()}


def moments_are(state: Any, model: Alone) -> int:
    """Compare codes and scales; the number of elements compared."""
    compared = 0
    for key, array in model.definition.state.items():
        if array not in model.states:
            assert key not in state
            continue
        wanted = model.states[array]
        codes, scales = state[key], state[f"{key}_scale"]
        assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float32)
        assert scales.shape == (-(-model.p.size // 256),)
        assert codes.reshape(-1).numpy().tobytes() == wanted.codes.tobytes()
        assert scales.numpy().tobytes() == wanted.scales.tobytes()
        compared += codes.numel()
    return compared


class Trained:
    """An optimizer, and each of its parameters alone; `own` are options of the first one."""

    def __init__(
        self,
        kind: str,
        device: str,
        given: Sequence[torch.nn.Parameter] | None = None,
        hyper: dict[str, Any] | None = None,
        parameter_format: str = "fp32",
        kept: Mapping[str, str] = MappingProxyType({}),
        **own: Any,
    ) -> None:
        self.name = kind.split()[0]
        self.hyper = KINDS.get(kind, {}) if hyper is None else hyper
        self.given = parameters() if given is None else list(given)
        self.models = [
            Alone(self.name, each, dict(self.hyper), parameter_format, kept) for each in self.given
        ]
        self.made, self.optimizer = 0, self.another(device, **own)

    def another(self, device: str, **own: Any) -> Any:
        """An optimizer of the same parameters."""
        return nearstep.optim.from_rule(self.name, self.given, device=device, **self.hyper, **own)

    def step(self, times: int = 1, scale: float = 1.0, change: Any = None) -> None:
        """Of gradients that may be changed before the step."""
        for _ in range(times):
            give_gradients(self.given, self.made)
            self.made += 1
            if change is not None:
                change(self.given)
            self.optimizer.step()
            for each, model in zip(self.given, self.models, strict=True):
                if each.grad is not None:
                    model.step(each.grad, scale)

    def check(self) -> int:
        """Compare parameters and moments; the number of elements compared."""
        compared = 0
        for each, model in zip(self.given, self.models, strict=True):
            if not model.made:
                continue
            state = self.optimizer.state[each]
            assert convert.to_float32(each.detach()).tobytes() == model.p.tobytes()
            assert all(state[k].shape == each.shape for k in state if k in model.definition.state)
            compared += each.numel() + moments_are(state, model)
        assert compared > 0
        return compared

    @property
    def elements(self) -> int:
        return sum(each.numel() for each in self.given)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_each_parameter_alone(kind: str, url: str) -> None:
    if "ddr4" in url and kind not in OF_SIM_DIMM:
        pytest.skip("this kernel has the rule of Adam alone")
    trained = Trained(kind, url)
    trained.step()
    compared = trained.check()
    trained.step(STEPS - 1)  # the one after a step whose state nobody has read can be of bundles
    compared += trained.check()
    assert compared == (1 + len(trained.models[0].states)) * 2 * trained.elements


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("adam", {"eps": 0.0, "weight_decay": 0.1}),
        ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ],
    ids=["adam", "sgd"],
)
def test_state_is_nobodys_but_the_parameters(name: str, hyper: dict[str, Any]) -> None:
    """With hyper-parameters for which padding would become NaN, and infinite gradients."""

    def spoil(given: Sequence[Tensor]) -> None:
        given[0].grad[0] = torch.inf
        given[2].grad[1] = torch.nan

    given = parameters(((1,), (300,), (3,), (256,), (5,)))
    trained = Trained(name, URLS["golden-dimm"], given, hyper)
    for _ in range(3):
        trained.step(change=spoil)
        trained.check()


def test_groups_schedules_and_parameters_without_gradients(url: str) -> None:
    trained = Trained("adamw", url, hyper={"lr": 1e-2})
    given, hyper = trained.given, [{"lr": 0.1}, {"weight_decay": 0.3}]
    groups = [{"params": given[:5], **hyper[0]}, {"params": given[5:], **hyper[1]}]
    trained.optimizer = nearstep.optim.AdamW(groups, lr=1e-2, device=url)
    for number, model in enumerate(trained.models):
        model.hyper.update(hyper[number >= 5])

    def skip(given: Sequence[Tensor]) -> None:
        for number, each in enumerate(given):
            if (number + trained.made - 1) % 4 == 0:
                each.grad = None

    for _ in range(3):
        trained.step(change=skip)
        for group in trained.optimizer.param_groups:
            group["lr"] *= 0.5
        for model in trained.models:
            model.hyper["lr"] *= 0.5
    assert trained.check() > 3 * 20_000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bits_have_a_master_and_get_a_copy(dtype: torch.dtype) -> None:
    formats = "gradient_formats=fp32,fp16,bf16&copy_out_formats=fp16,bf16"
    given = parameters(dtype=dtype)
    trained = Trained("adamw", f"{URLS['golden-dimm']}&{formats}", given, {})
    trained.step(STEPS)
    saved = trained.optimizer.state_dict()["state"]
    for number, (each, model) in enumerate(zip(given, trained.models, strict=True)):
        assert saved[number]["master_param"].reshape(-1).numpy().tobytes() == model.p.tobytes()
        narrow = convert.narrow(model.p, convert.NAMES[dtype])
        assert convert.to_words(each.detach()).tobytes() == narrow.tobytes()
        moments_are(trained.optimizer.state[each], model)
    assert trained.optimizer.traffic.parameters_up == 2 * STEPS * trained.elements


def test_bf16_parameters_without_a_master() -> None:
    formats = "parameter_format=bf16&gradient_formats=fp32,bf16"
    given = parameters(dtype=torch.bfloat16)
    trained = Trained("adamw", f"{URLS['golden-cpp']}&{formats}", given, {}, "bf16")
    trained.step(STEPS)
    assert trained.check() == 3 * trained.elements
    assert "master_param" not in trained.optimizer.state_dict()["state"][0]


SCANNING = "scan=yes&gradient_scale=yes"


def test_gradients_are_clipped_on_the_device() -> None:
    trained = Trained("adamw", f"{URLS['golden-dimm']}&{SCANNING}", max_grad_norm=0.0)
    trained.step(2, scale=0.0)
    trained.check()


def test_a_scaler_divides_in_the_step_and_skips_one_with_an_infinity() -> None:
    trained = Trained("adamw", f"{URLS['golden-cpp']}&{SCANNING}")
    scaler = nearstep.optim.GradScaler("cpu", init_scale=2.0**4, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(4):
        give_gradients(trained.given, step)
        scale = scaler.get_scale()
        if step == 2:
            trained.given[3].grad[1] = torch.inf
        scaler.step(trained.optimizer)
        scaler.update()
        for each, model in zip(trained.given, trained.models, strict=True):
            if step != 2:
                model.step(each.grad, 1.0 / scale)
    assert trained.optimizer.traffic.skipped == 1
    trained.check()


@pytest.mark.parametrize("form", ["fused", "scatter"])
def test_compressed_gradients(form: str) -> None:
    url = f"{URLS['golden-dimm']}&compression=fused,scatter"
    options = {"compression": 0.1, "error_feedback": False, "compression_form": form}
    trained = Trained("adamw", url, hyper={}, **options)
    for step in range(STEPS):
        give_gradients(trained.given, step)
        trained.optimizer.step()
        for each, model in zip(trained.given, trained.models, strict=True):
            found = trained.optimizer.settings.compression.compress(
                each.grad.reshape(-1).numpy(), None
            )
            sent = np.zeros(each.numel(), np.float32)
            sent[found.index] = found.value
            model.step(torch.from_numpy(sent))
    assert trained.check() == 3 * trained.elements


def test_neighbours_of_whole_groups_share_runs_and_bundles() -> None:
    given = parameters(((256,), (2, 256), (768,), (1024,)))
    trained = Trained("adamw", URLS["golden-cpp"], given, {})
    trained.step(4)
    assert trained.optimizer.traffic.launches == 4
    trained.check()


CONFIGURATIONS = {
    "lanes": f"golden:axdimm?{EIGHT}&lanes=1&block_bytes=1024",
    "channels": f"golden:axdimm?{EIGHT}&channels=4&block_bytes=4096",
    "card": f"golden:smartssd?{EIGHT}&lanes=8&chunk_bytes=2048",
}


@pytest.mark.parametrize("other", CONFIGURATIONS)
@pytest.mark.parametrize("kind", ["adamw amsgrad", "sgd", "adagrad"])
def test_a_checkpoint_goes_on_with_the_same_bits_on_another_device(kind: str, other: str) -> None:
    trained = Trained(kind, URLS["golden-dimm"])
    trained.step(2)
    state = through_a_file(trained.optimizer.state_dict())
    trained.optimizer = trained.another(CONFIGURATIONS[other])
    trained.optimizer.load_state_dict(state)
    again = trained.optimizer.state_dict()["state"]
    for number, kept in state["state"].items():
        assert kept.keys() == again[number].keys()
        for key, value in kept.items():
            assert value.dtype == again[number][key].dtype
            assert value.equal(again[number][key])
    trained.step()
    trained.check()


@pytest.mark.parametrize("act", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_go_on_with_the_same_bits(act: Callable[[Any], Any]) -> None:
    trained = Trained("adamw", URLS["golden-dimm"], hyper={})
    trained.step(2)
    twin = copy.copy(trained)
    twin.optimizer = act(trained.optimizer)
    twin.models = [copy.copy(each) for each in trained.models]
    twin.given = twin.optimizer.param_groups[0]["params"]
    twin.step()
    twin.check()
    trained.check()


@pytest.mark.parametrize("kept", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["adamw amsgrad", "sgd"])
def test_wider_checkpoints_are_quantized_and_these_are_widened(kind: str, kept: str) -> None:
    """From a device of another format, and to it."""
    name, given = kind.split()[0], parameters()
    wide = f"golden:axdimm?{RULES}&state_format={kept}&channels=2"
    before = nearstep.optim.from_rule(name, given, device=wide, **KINDS[kind])
    give_gradients(given, 0)
    before.step()
    state = before.state_dict()
    eight = nearstep.optim.from_rule(name, given, device=URLS["golden-dimm"], **KINDS[kind])
    eight.load_state_dict(copy.deepcopy(state))
    definition, compared = optimizer_named(name), 0
    widened: dict[int, dict[str, Any]] = {}
    for number, each in enumerate(given):
        for key, array in definition.state.items():
            values = convert.to_float32(state["state"][number][key])
            wanted = golden.quantize(values, signed=SIGNED[array])
            found = eight.state[each]
            assert found[key].reshape(-1).numpy().tobytes() == wanted.codes.tobytes()
            assert found[f"{key}_scale"].numpy().tobytes() == wanted.scales.tobytes()
            widened.setdefault(number, {})[key] = golden.dequantize(wanted, signed=SIGNED[array])
            compared += each.numel()
    assert compared == len(definition.state) * sum(each.numel() for each in given)
    after = nearstep.optim.from_rule(name, given, device=wide, **KINDS[kind])
    after.load_state_dict(eight.state_dict())
    for number, each in enumerate(given):
        assert not any(key.endswith("_scale") for key in after.state[each])
        for key, values in widened[number].items():
            narrow = values if kept == "fp32" else fp.widen32(fp.narrow32(values, BF16), BF16)
            found = convert.to_float32(after.state[each][key])
            assert found.tobytes() == narrow.tobytes()
    give_gradients(given, 1)
    after.step()


@pytest.fixture
def stepped() -> Trained:
    """After a step."""
    trained = Trained("adamw", URLS["golden-dimm"], parameters(((5, 100), (256,), (3,))), {})
    trained.step()
    return trained


def test_codes_and_scales_that_are_changed_go_to_the_device(stepped) -> None:
    optimizer, given, models = stepped.optimizer, stepped.given, stepped.models
    state = optimizer.state[given[0]]
    assert list(state) == ["step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"]
    state["exp_avg"][2] = 200
    models[0].states["m"].codes[200:300] = 200
    optimizer.state[given[1]]["exp_avg_sq_scale"].mul_(4)
    models[1].states["v"].scales[:] *= 4
    optimizer.state[given[2]]["exp_avg_scale"] = torch.full((1,), 0.5)
    models[2].states["m"].scales[:] = 0.5
    before = optimizer.traffic.moments_down
    stepped.step()
    stepped.check()
    nbytes = optimizer.device.block_layout.nbytes
    assert optimizer.traffic.moments_down - before == nbytes(500) + nbytes(256) + nbytes(3)


def test_what_is_only_read_stays_on_the_device(stepped) -> None:
    optimizer, given = stepped.optimizer, stepped.given
    before = optimizer.traffic.moments_up
    for each in given:
        assert optimizer.state[each]["exp_avg"].shape == each.shape
        assert optimizer.state[each]["exp_avg_scale"].dtype == torch.float32
    layout = optimizer.device.block_layout
    assert optimizer.traffic.moments_up - before == sum(layout.nbytes(p.numel()) for p in given)
    down = optimizer.traffic.moments_down
    stepped.step()
    stepped.check()
    assert optimizer.traffic.moments_down == down


def test_a_floating_point_moment_is_quantized_when_it_is_assigned(stepped) -> None:
    optimizer, given, models = stepped.optimizer, stepped.given, stepped.models
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.linspace(-2, 3, 500).view(5, 100).to(dtype)
        optimizer.state[given[0]]["exp_avg"] = values
        wanted = golden.quantize(convert.to_float32(values), signed=True)
        assert optimizer.state[given[0]]["exp_avg"].reshape(-1).tolist() == wanted.codes.tolist()
        assert optimizer.state[given[0]]["exp_avg_scale"].tolist() == wanted.scales.tolist()
    models[0].states["m"] = wanted
    stepped.step()
    stepped.check()


def test_state_that_cannot_be_is_refused_and_nothing_is_changed(stepped) -> None:
    optimizer, given = stepped.optimizer, stepped.given
    state = optimizer.state[given[0]]
    for key, value, message in (
        ("exp_avg", torch.zeros(500, dtype=torch.uint8), r"'exp_avg' of shape \(5, 100\)"),
        ("exp_avg", torch.zeros(5, 100, dtype=torch.int8), "torch.uint8 as 'exp_avg'"),
        ("exp_avg", [1], "torch.uint8 as 'exp_avg'"),
        ("exp_avg", torch.zeros(3), r"'exp_avg' of shape \(5, 100\)"),
        ("exp_avg_scale", torch.zeros(3), r"'exp_avg_scale' of shape \(2,\), not \(3,\)"),
        ("exp_avg_scale", torch.zeros(2, 1), r"'exp_avg_scale' of shape \(2,\)"),
        ("exp_avg_scale", torch.zeros(2).double(), "torch.float32 as 'exp_avg_scale'"),
        ("exp_avg_scale", None, "torch.float32 as 'exp_avg_scale'"),
    ):
        with pytest.raises(StateError, match=message):
            state[key] = value
    kept = state.copy()
    for missing in ("exp_avg", "exp_avg_sq_scale"):
        del state[missing]
        give_gradients(given, 1)
        with pytest.raises(StateError, match=f"have '{missing}'"):
            optimizer.step()
        state[missing] = kept[missing]
    saved = optimizer.state_dict()
    for change, message in (
        (
            lambda s: s.pop("exp_avg_scale"),
            r"have 'exp_avg_scale' with 'exp_avg' of torch.uint8, not \['exp_avg', ",
        ),
        (lambda s: s.update(exp_avg=torch.zeros(5, 100)), "torch.uint8 as 'exp_avg'"),
        (lambda s: s.update(exp_avg_sq_scale=torch.zeros(7)), r"shape \(2,\), not \(7,\)"),
    ):
        wrong = copy.deepcopy(saved)
        change(wrong["state"][0])
        with pytest.raises(StateError, match=message):
            optimizer.load_state_dict(wrong)
    stepped.step()
    stepped.check()


def test_an_optional_moment_may_be_missing_and_comes_back() -> None:
    url = URLS["golden-dimm"]
    (given,) = parameters(((300,),))
    optimizer = nearstep.optim.SGD([given], lr=0.1, device=url)
    give_gradients([given], 0)
    optimizer.step()
    assert not optimizer.state[given].keys() & {"momentum_buffer", "momentum_buffer_scale"}
    optimizer.param_groups[0]["momentum"] = 0.9
    for step in (1, 2):
        give_gradients([given], step)
        optimizer.step()
    assert list(optimizer.state[given]) == ["momentum_buffer", "momentum_buffer_scale"]
    optimizer.state[given]["momentum_buffer"] = None
    assert "momentum_buffer_scale" not in optimizer.state[given]
    give_gradients([given], 3)
    optimizer.step()
    wanted = golden.quantize(given.grad.numpy(), signed=True)  # as after a first step
    assert optimizer.state[given]["momentum_buffer"].tolist() == wanted.codes.tolist()
    assert optimizer.state[given]["momentum_buffer_scale"].tolist() == wanted.scales.tolist()


@pytest.mark.parametrize("form", ["dynamic8", "dynamic8u"])
def test_groups_of_other_shards_keep_their_codes_if_they_are_whole(form: str) -> None:
    print("seed 7")
    rng, signed = np.random.default_rng(7), form == "dynamic8"
    values = rng.standard_normal(2000).astype(np.float32)
    values[300] = np.nan
    whole = blockwise.quantize(values if signed else np.abs(values), signed=signed)
    wide, each = blockwise.dequantize(whole, signed=signed), np.repeat(whole.scales, 256)[:2000]
    kept = 0
    for first, last in ((0, 2000), (512, 1024), (512, 1100), (100, 900), (3, 3), (1999, 2000)):
        part = slice(first, last)
        codes, scales = regrouped(
            torch.from_numpy(whole.codes[part].copy()), torch.from_numpy(each[part].copy()), form
        )
        anew = blockwise.quantize(wide[part].copy(), signed=signed)
        for at in range(0, last - first, 256):
            group, number = slice(at, at + 256), at // 256
            same = len(set(each[part][group].view(np.uint32).tolist())) == 1
            expected = whole.codes[part][group] if same else anew.codes[group]
            scale = each[part][at] if same else anew.scales[number]
            assert codes[group].tolist() == expected.tolist()
            assert scales[number].numpy().tobytes() == scale.tobytes()
            kept += same
        assert len(scales) == -(-(last - first) // 256)
    assert kept == 8 + 2 + 3 + 1 + 1


def test_state_dtype_says_what_is_expected() -> None:
    given = parameters(((3,),))
    nearstep.optim.AdamW(given, device=URLS["golden-cpp"], state_dtype=torch.uint8)
    for device, dtype, kept, wanted in (
        ("golden:axdimm?", torch.uint8, "fp32", "dynamic8"),
        ("golden:axdimm?state_format=bf16", torch.uint8, "bf16", "dynamic8"),
        (URLS["golden-cpp"], torch.float32, "dynamic8", "fp32"),
        (URLS["golden-cpp"], torch.bfloat16, "dynamic8", "bf16"),
    ):
        expected = f"the kernel keeps m in {kept}: open the device with state_format={wanted}"
        with pytest.raises(UnsupportedOptionError, match=expected):
            nearstep.optim.AdamW(given, device=device, state_dtype=dtype)
    with pytest.raises(HyperparameterError, match=r"torch\.uint8, or None, not torch\.int8"):
        nearstep.optim.AdamW(given, device=URLS["golden-cpp"], state_dtype=torch.int8)


def test_a_rule_of_a_file_names_its_formats_and_may_keep_one_moment_wider(tmp_path) -> None:
    text = (EXAMPLES / "adam_bf16.py").read_text()
    kept = {"m": "fp32", "v": "dynamic8u"}
    file = tmp_path / "adam_8.py"
    file.write_text(text.replace('{"m": "bf16", "v": "bf16"}', '{"v": "dynamic8u"}'))
    name = f"{file}:ADAM_BF16"
    device = f"golden:axdimm?rules={name}"
    trained = Trained(name, device, hyper={"lr": 1e-2}, kept=kept)
    trained.step(STEPS)
    given, optimizer = trained.given, trained.optimizer
    assert list(optimizer.state[given[0]]) == ["step", "exp_avg", "exp_avg_sq", "exp_avg_sq_scale"]
    for each, model in zip(given, trained.models, strict=True):
        assert convert.to_float32(each.detach()).tobytes() == model.p.tobytes()
        state, wanted = optimizer.state[each], model.states["v"]
        assert state["exp_avg"].reshape(-1).numpy().tobytes() == model.states["m"].tobytes()
        assert state["exp_avg_sq"].reshape(-1).numpy().tobytes() == wanted.codes.tobytes()
        assert state["exp_avg_sq_scale"].numpy().tobytes() == wanted.scales.tobytes()
    before, again = optimizer.state_dict(), trained.another(device)
    again.load_state_dict(copy.deepcopy(before))
    for number, state in again.state_dict()["state"].items():
        assert all(value.equal(before["state"][number][key]) for key, value in state.items())
