"""Profiles of modules of torch: which layers, in which order, and times in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nearstep
from nearstep.errors import ArgumentError
from nearstep.memferry import planner
from nearstep.memferry import profile as profiles
from nearstep.memferry.errors import ProfileError
from nearstep.torch.errors import ParameterError
from nearstep.torch.memferry import model_fingerprint, profile
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import PlatformError

MACHINE = load("memferry-a100")
FLOPS, MEMORY, LINK = 19.5e12, 1935e9, 12.5e9
WIDTH, ROWS = 64, 256
ON = {"platform": MACHINE, "gpu": "gpu0"}


def profiled(model: nn.Module, x: Tensor | None = None, **options: Any) -> profiles.Profile:
    x = torch.randn(ROWS, WIDTH) if x is None else x
    return profile(model, lambda: model(x).square().mean().backward(), **ON, **options)


def layers_of(found: profiles.Profile) -> dict[str, profiles.LayerProfile]:
    return {each.name: each for each in found.layers}


class Calls(nn.Module):
    """Layers that a function calls, in its own order."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


# Which layers


def test_layers_are_in_the_order_of_their_first_use() -> None:
    model = Calls(
        lambda m, x: m.a(torch.tanh(m.c(m.b(m.c(x))))), a=linear(), b=linear(), c=linear(False)
    )
    found = profiled(model)
    assert [each.name for each in found.layers] == ["c", "b", "a"]
    sizes = [4 * WIDTH * WIDTH, 4 * WIDTH * (WIDTH + 1), 4 * WIDTH * (WIDTH + 1)]
    assert [each.parameter_bytes for each in found.layers] == sizes
    assert [each.gradient_bytes for each in found.layers] == sizes
    assert found.source == "modelled"
    assert profiles.from_json(found.to_json()) == found
    assert planner.make(found).plan.fingerprint == found.fingerprint == model_fingerprint(model)


def test_a_layer_called_twice_has_the_times_of_both_calls() -> None:
    twice = layers_of(profiled(Calls(lambda m, x: m.b(m.a(m.a(x))), a=linear(), b=linear())))
    once = layers_of(profiled(Calls(lambda m, x: m.b(m.a(x)), a=linear(), b=linear())))
    assert twice["a"].forward_s == pytest.approx(2 * once["b"].forward_s - loss(), rel=1e-9)
    assert twice["a"].parameter_bytes == once["a"].parameter_bytes
    assert twice["a"].forward_dha_s == pytest.approx(2 * once["a"].forward_dha_s)  # two reads


def loss() -> float:
    """Twice what the mean of squares adds to the last layer's forward."""
    square = 2 * 4 * ROWS * WIDTH / MEMORY  # read and written
    mean = (4 * ROWS * WIDTH + 4) / MEMORY
    ones = 4 / MEMORY
    return 2 * (square + mean + 2 * ones)


def test_a_shared_module_is_one_layer_and_a_tied_weight_is_loaded_by_both() -> None:
    shared = linear()
    model = Calls(lambda m, x: m.c(m.b(m.a(x))), a=shared, b=shared, c=linear())
    assert [each.name for each in profiled(model).layers] == ["a", "c"]
    tied = Calls(lambda m, x: m.b(m.a(x)), a=linear(), b=linear())
    tied.b.weight = tied.a.weight
    found = layers_of(profiled(tied))
    whole = 4 * WIDTH * (WIDTH + 1)
    assert [(each.parameter_bytes, each.gradient_bytes) for each in found.values()] == [
        (whole, whole),
        (whole, 4 * WIDTH),  # of its bias
    ]
    forward = [each.forward_dha_s for each in found.values()]
    assert forward[0] == pytest.approx(whole * reads(ROWS, WIDTH) / LINK)
    assert forward[1] >= forward[0]


def test_what_is_never_called_is_no_layer() -> None:
    model = Calls(lambda m, x: m.b(x), a=linear(), b=linear(), c=nn.LayerNorm(3))
    found = profiled(model)
    assert [each.name for each in found.layers] == ["b"]
    assert found.fingerprint == model_fingerprint(model)
    assert found.fingerprint != model_fingerprint(model.b)


def test_frozen_layers_have_no_gradients() -> None:
    model = Calls(lambda m, x: m.c(m.b(torch.relu(m.a(x)))), a=linear(), b=linear(), c=linear())
    model.b.requires_grad_(False)
    model.c.bias.requires_grad_(False)
    found = layers_of(profiled(model))
    assert [each.trained for each in found.values()] == [True, False, True]
    assert found["c"].gradient_bytes == 4 * WIDTH * WIDTH
    assert found["b"].backward_write_s is found["b"].backward_dha_write_s is None
    assert found["b"].update_s == found["b"].send_s == 0
    assert found["b"].backward_s < found["a"].backward_s  # one product, not two
    assert found["b"].backward_s > 0  # the gradient of its input


def test_a_parameter_whose_output_nobody_uses_has_no_gradient() -> None:
    model = Calls(lambda m, x: (m.a(x), m.b(x))[1], a=linear(), b=linear())
    found = layers_of(profiled(model))
    assert [(name, each.trained) for name, each in found.items()] == [("a", False), ("b", True)]


def test_parameters_that_are_used_without_a_call_are_their_modules() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x * self.scale, self.inner.weight.t())

    found = layers_of(profiled(Root()))
    assert [*found] == ["(model)", "inner"]
    assert found["(model)"].parameter_bytes == 4 * WIDTH
    assert found["inner"].gradient_bytes == 4 * WIDTH * WIDTH
    assert found["inner"].backward_s > found["inner"].forward_s > 0


# Times


def reads(rows: int, columns: int) -> int:
    tiles = math.ceil(rows / 128)
    return min(tiles, math.ceil(tiles * math.ceil(columns / 128) / 108))


def roof(flops: float, elements: int) -> float:
    return max(flops / FLOPS, 4 * elements / MEMORY)


@pytest.mark.parametrize("rows", [64, 4096, 40000])
def test_modelled_times_of_a_linear_layer_are_a_roofline_of_its_products(rows: int) -> None:
    model = Calls(
        lambda m, x: m.last(torch.tanh(m.mid(torch.tanh(m.first(x))))),
        first=linear(False),
        mid=linear(False),
        last=linear(False),
    )
    found = profiled(model, torch.randn(rows, WIDTH))
    mid = layers_of(found)["mid"]
    product = roof(2 * rows * WIDTH * WIDTH, 2 * rows * WIDTH + WIDTH * WIDTH)
    weight = 4 * WIDTH * WIDTH
    read = weight * reads(rows, WIDTH) / LINK
    assert mid.forward_s == pytest.approx(product, rel=1e-12)
    assert mid.backward_s == pytest.approx(2 * product, rel=1e-12)
    assert mid.forward_dha_s == pytest.approx(max(product, read), rel=1e-12)
    assert mid.backward_dha_s == pytest.approx(max(2 * product, read), rel=1e-12)
    assert mid.load_s == mid.send_s == weight / LINK
    assert mid.backward_write_s == pytest.approx(max(2 * product, weight / LINK), rel=1e-12)
    assert mid.backward_dha_write_s == pytest.approx(
        max(2 * product, read, weight / LINK), rel=1e-12
    )
    assert mid.update_s == WIDTH * WIDTH / 1e9
    activation = 2 * rows * WIDTH
    assert mid.between_forward_s == pytest.approx(roof(rows * WIDTH, activation), rel=1e-12)
    assert mid.between_backward_s == pytest.approx(roof(rows * WIDTH, 3 * rows * WIDTH), rel=1e-12)
    assert found.activation_bytes == 4 * rows * WIDTH * 4  # x, two tanh, the output


def test_an_embedding_is_read_by_rows_and_a_norm_once() -> None:
    model = nn.Sequential(nn.Embedding(5000, WIDTH), nn.LayerNorm(WIDTH), linear())
    found = [*layers_of(profiled(model, torch.randint(0, 5000, (10,)))).values()]
    assert found[0].forward_dha_s == pytest.approx(4 * 10 * WIDTH / LINK)
    assert found[0].backward_dha_s == found[0].backward_s  # reads nothing of it
    assert found[1].forward_dha_s == pytest.approx(2 * 4 * WIDTH / LINK)
    assert found[1].backward_dha_s == pytest.approx(
        max(found[1].backward_s, 4 * WIDTH / LINK), rel=1e-12
    )
    more = profiled(model, torch.randint(0, 5000, (20000,))).layers[0]
    assert more.forward_dha_s == pytest.approx(max(more.forward_s, 4 * 5000 * WIDTH / LINK))


def test_checkpointed_layers_compute_forward_again_in_backward() -> None:
    def block(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)))

    plain = layers_of(
        profiled(Calls(lambda m, x: m.c(block(m, x)), a=linear(), b=linear(), c=linear()))
    )
    again = layers_of(
        profiled(
            Calls(
                lambda m, x: m.c(checkpoint(block, m, x, use_reentrant=False)),
                a=linear(),
                b=linear(),
                c=linear(),
            )
        )
    )
    assert [*again] == [*plain] == ["a", "b", "c"]
    assert again["a"].forward_s == plain["a"].forward_s
    extra = again["a"].backward_s - plain["a"].backward_s
    assert extra == pytest.approx(plain["a"].forward_s, rel=1e-9)


def test_measured_times_are_of_the_same_layers() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(linear(), nn.Tanh(), nn.Linear(WIDTH, 4096), nn.Linear(4096, 8))
    modelled, measured = profiled(model), profiled(model, source="measured", runs=3)
    assert measured.source == "measured"
    for one, other in zip(modelled.layers, measured.layers, strict=True):
        for name in ("name", "parameter_bytes", "gradient_bytes", "load_s", "send_s", "update_s"):
            assert getattr(one, name) == getattr(other, name)
        assert other.forward_s > 0
        assert other.backward_s > 0
    assert measured.layers[0].between_forward_s > 0
    assert planner.make(measured).total > 0


# What it leaves, and what it refuses


def test_nothing_is_left_behind_even_by_an_exception() -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), linear())
    gradient = torch.randn(WIDTH, WIDTH)
    model[0].weight.grad = gradient
    torch.manual_seed(11)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    random = torch.get_rng_state()
    x = torch.randn(8, WIDTH)
    torch.set_rng_state(random)

    def fails() -> None:
        model(x).sum().backward()
        raise OSError("in the user's program")

    for run in (lambda: model(x).sum().backward(), fails):
        if run is fails:
            with pytest.raises(OSError, match="user's program"):
                profile(model, run, **ON)
        else:
            profile(model, run, **ON)
        assert torch.equal(torch.get_rng_state(), random)
        assert model[0].weight.grad is gradient
        assert model[3].weight.grad is None
        after = model.state_dict()
        assert all(torch.equal(after[name], each) for name, each in state.items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_cannot_be_profiled_is_refused() -> None:
    model, x = linear(), torch.randn(2, WIDTH)

    def run() -> None:
        model(x).sum().backward()

    checked = 0
    for options, kind, text in (
        ({"source": "guessed"}, ArgumentError, "source must be one of"),
        ({"runs": 0}, ArgumentError, "runs must be a whole number"),
        ({"host_params_per_s": 0.0}, ArgumentError, "host_params_per_s must be above 0"),
        ({"reads": "never"}, ArgumentError, "reads must be one of"),
        ({"gpu": "gpu9"}, ArgumentError, "there is no processor 'gpu9'"),
        ({"host": "gpu9"}, PlatformError, "gpu9"),
    ):
        with pytest.raises(kind, match=text):
            profile(model, run, **{**ON, **options})
        checked += 1
    with pytest.raises(ProfileError, match="no gradient was made"):
        profile(model, lambda: model(x), **ON)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ProfileError, match="weight changed"):
        profile(model, lambda: (run(), steps.step()), **ON)
    with pytest.raises(ArgumentError, match="must have parameters"):
        profile(nn.Tanh(), run, **ON)
    optimizer = nearstep.optim.SGD(
        model.parameters(), lr=0.1, device="golden:axdimm?memory_bytes=2MiB&rules=sgd"
    )
    with nearstep.offload(model, optimizer, budget="200%"), pytest.raises(ParameterError):
        profile(model, run, **ON)
    assert checked == 6


def test_a_run_that_uses_other_layers_each_time_is_refused() -> None:
    count = iter(range(10))
    model = Calls(lambda m, x: (m.a if next(count) % 2 else m.b)(x), a=linear(), b=linear())
    with pytest.raises(ProfileError, match=r"same layers each time, \['b'\]"):
        profiled(model)
