"""Models that are made on the device have the bits of plain ones, and fit while they are made."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_parameter_registration_hooks
from torch.overrides import _get_current_function_mode_stack

import nearstep
from nearstep.allocator import LINE_BYTES
from nearstep.errors import ArgumentError, OutOfDeviceMemoryError
from nearstep.torch.errors import BudgetFormatError, ParameterError
from nearstep.torch.offload import InitReport
from nearstep.torch.offload.errors import BudgetError, LostEngineError, NestedInitError
from nearstep.torch.offload.parameter import OffloadedParameter

from .models import KINDS, WIDTH, Stack
from .test_equality import CHANNELS, DIMM, SIMULATED
from .training import (
    GOLDEN,
    OPTIMIZERS,
    SEED,
    Plan,
    Result,
    assert_equal,
    bits,
    budget_of,
    groups,
    train,
    train_in_least,
    train_made,
)

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Scaled(nn.Module):
    """Parameters that `reset_parameters` makes, one of them through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("mean", torch.randn(WIDTH))
        self.register_parameter("missing", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.2)
        with torch.no_grad():
            row = self.weight[3]
            row.mul_(2.0)
            self.weight[:, 2] = 0.25
        self.scale.data = torch.full((), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) @ self.weight * self.scale


class Nested(nn.Module):
    """Modules in modules, some of them copies, and a function that initialises them anew."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Scaled())
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        self.scores = nn.Embedding(8, WIDTH, padding_idx=3)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)
        self.square = nn.Parameter(torch.empty(WIDTH, WIDTH))
        nn.init.orthogonal_(self.square)
        self.wide = nn.ParameterDict({"bias": torch.randn(WIDTH)})
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.2)
            nn.init.zeros_(module.bias)
        if isinstance(module, Scaled):
            module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = x + self.norm(self.conv(x[:, None])).mean(1)
        return x @ self.square + self.scores.weight.sum(0) + self.wide["bias"]


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, make in KINDS.items() if name != "convolutions"},
    "nested": Nested,
}


def module_bytes(model: nn.Module) -> int:
    """Of the largest module's own parameters."""
    return max(
        sum(4 * each.numel() for each in module.parameters(recurse=False))
        for module in model.modules()
    )


def used(device: nearstep.Device) -> int:
    """Bytes of a device's memory, besides the line that it keeps for itself."""
    return device.capacity_bytes - device.free_bytes - LINE_BYTES


def made_away(
    make: Callable[[], nn.Module], device: str | nearstep.Device = GOLDEN, seed: int = SEED
) -> tuple[nn.Module, nearstep.offload.init]:
    torch.manual_seed(seed)
    with nearstep.offload.init(device) as init:
        model = make()
    return model, init


def train_away(
    plan: Plan, make: Callable[[], nn.Module], budget: int | str
) -> tuple[Result, InitReport]:
    """`train`, of a model that was made away, offloaded."""
    model, init = made_away(make, plan.device, plan.seed)
    assert all(isinstance(each, OffloadedParameter) for each in model.parameters())
    optimizer = OPTIMIZERS[plan.optimizer](groups(model), init.device)
    made = init.report()
    del init
    engine = nearstep.offload(model, optimizer, budget=budget)
    found = train_made(plan, model, optimizer, engine)
    assert all(type(each) is nn.Parameter for each in model.parameters())
    return found, made


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `train` know the model that is made here."""
    monkeypatch.setitem(KINDS, "nested", Nested)


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("kind", MODELS)
def test_models_have_the_bits_of_plain_ones_and_train_as_they_do(kind: str) -> None:
    plan = Plan(kind=kind, evaluates=True, schedules=True)
    model, init = made_away(MODELS[kind])
    torch.manual_seed(SEED)
    plain = MODELS[kind]()
    after = torch.get_rng_state()
    assert bits(model.state_dict()) == bits(plain.state_dict())
    made_away(MODELS[kind])
    assert torch.equal(torch.get_rng_state(), after)
    report = init.report()
    assert 0 < report.peak <= module_bytes(plain)
    assert report.releases >= len(list(plain.parameters()))
    least = train_in_least(plan)
    found, made = train_away(plan, MODELS[kind], budget_of(least))
    assert_equal(found, least)
    assert made.peak == report.peak
    assert least.report is not None
    assert found.report is not None
    assert found.report.peak == least.report.peak
    assert found.report.fetches == least.report.fetches
    assert found.report.parameters_down == 0  # the optimizer has adopted what was there


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_adopts_parameters(optimizer: str) -> None:
    plan = Plan(kind="frozen", optimizer=optimizer)
    found, _ = train_away(plan, KINDS["frozen"], "150%")
    assert_equal(found, train(plan))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bits(dtype: torch.dtype) -> None:
    formats = "gradient_formats=fp32,fp16,bf16&copy_out_formats=fp16,bf16"
    results = []
    for away in (True, False):
        torch.manual_seed(SEED)
        url = f"golden:axdimm?memory_bytes=2MiB&{formats}"
        layers = [WIDTH] * 3

        def make(layers: list[int] = layers) -> nn.Module:
            return nn.Sequential(*(nn.Linear(WIDTH, each, dtype=dtype) for each in layers))

        model, device = make(), nearstep.open(url)
        if away:
            model, _ = made_away(make, device)
        else:
            torch.manual_seed(SEED)
            model = make()
        optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=device)
        generator = torch.Generator().manual_seed(1)
        with nearstep.offload(model, optimizer, budget="150%"):
            for _ in range(2):
                x = torch.randn(4, WIDTH, generator=generator).to(dtype)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(bits([model.state_dict(), optimizer.state_dict()["state"]]))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["stack", "tied"])
def test_channels_of_a_dimm(kind: str) -> None:
    plan = Plan(kind=kind, device=DIMM)
    assert_equal(train_away(plan, MODELS[kind], "200%")[0], train(plan))


@pytest.mark.deep
@pytest.mark.parametrize("device", [SIMULATED, CHANNELS], ids=["sim", "sim-dimm"])
def test_on_the_rtl(device: str) -> None:
    plan = Plan(kind="stack", device=device)
    assert_equal(train_away(plan, MODELS["stack"], "200%")[0], train(plan))


def test_compressed_gradients_of_parameters_that_were_adopted() -> None:
    results = []
    for away in (True, False):
        device = nearstep.open("golden:axdimm?memory_bytes=2MiB&compression=fused")
        torch.manual_seed(SEED)
        model = made_away(lambda: Stack(2), device)[0] if away else Stack(2)
        optimizer = nearstep.optim.AdamW(
            model.parameters(), lr=1e-2, device=device, compression=0.25
        )
        for _ in range(3):
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(bits([model.state_dict(), optimizer.state_dict()["state"]]))
    assert results[0] == results[1]


def test_the_peak_is_what_one_operation_uses() -> None:
    _, init = made_away(lambda: Stack(6))
    report = init.report()
    assert report.peak == 4 * WIDTH * WIDTH
    assert report.parameters == 6 * 4 * (WIDTH * WIDTH + 3 * WIDTH)
    assert report.budget is None


def test_what_the_program_refers_to_stays_and_counts() -> None:
    with nearstep.offload.init(GOLDEN) as init:
        first = nn.Linear(WIDTH, WIDTH, bias=False)
        row = first.weight.data[0]
        nn.Linear(WIDTH, WIDTH, bias=False)
        assert init.report().peak == 2 * 4 * WIDTH * WIDTH
        row.fill_(7.0)
        del row
        nn.Linear(WIDTH, WIDTH, bias=False)
    assert first.weight[0].tolist() == [7.0] * WIDTH
    assert init.report().peak == 2 * 4 * WIDTH * WIDTH


def test_a_budget_is_kept_or_refused_by_name() -> None:
    needed = 4 * WIDTH * WIDTH
    with nearstep.offload.init(GOLDEN, budget=needed) as init:
        Stack(2)
    assert init.report().peak == init.report().budget == needed
    with nearstep.open(GOLDEN) as device:
        with (
            pytest.raises(BudgetError, match=r"Linear\.weight") as raised,
            nearstep.offload.init(device, budget=needed - 4),
        ):
            Stack(2)
        assert device.free_bytes == device.capacity_bytes - LINE_BYTES
    assert (raised.value.expected, raised.value.actual) == (needed, needed - 4)
    for wrong in ("25%", 0, "much"):
        with pytest.raises(BudgetFormatError):
            nearstep.offload.init(GOLDEN, budget=wrong)


def assert_unpatched() -> None:
    assert not _global_parameter_registration_hooks
    assert not _get_current_function_mode_stack()
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_an_exception_leaves_the_device_free_and_torch_as_it_was() -> None:
    made: list[nn.Module] = []

    def failing() -> None:
        made.append(Stack(3))
        assert used(device) > 0
        raise ZeroDivisionError

    with nearstep.open(GOLDEN) as device:
        with pytest.raises(ZeroDivisionError) as raised, nearstep.offload.init(device):
            failing()
        assert device.free_bytes == device.capacity_bytes - LINE_BYTES
        assert_unpatched()
        with pytest.raises(LostEngineError):
            next(made[0].parameters()).sum()
        assert raised.value is not None
        again, _ = made_away(lambda: Stack(3), device)
        assert isinstance(again.layers[0].weight, OffloadedParameter)


def test_a_device_that_is_full() -> None:
    with nearstep.open("golden:axdimm?memory_bytes=64KiB") as device:
        with pytest.raises(OutOfDeviceMemoryError), nearstep.offload.init(device):
            Stack(100)
        assert device.free_bytes == device.capacity_bytes - LINE_BYTES
    assert_unpatched()


def test_memory_goes_back_with_dropped_parameters() -> None:
    with nearstep.open("golden:axdimm?memory_bytes=64KiB") as device:
        with nearstep.offload.init(device):
            for _ in range(30):  # more than the device has
                model = Stack(2)
        assert 0 < used(device) <= 64 << 10
        parameter = weakref.ref(model.layers[0].weight)
        del model
        gc.collect()
        assert used(device) == 0
        assert parameter() is None


def test_without_an_optimizer_values_are_there_and_close_frees_the_device() -> None:
    with nearstep.open(GOLDEN) as device:
        model, init = made_away(lambda: Stack(3), device)
        torch.manual_seed(SEED)
        plain = Stack(3)
        x = torch.randn(2, WIDTH)
        assert torch.equal(model(x), plain(x))
        for _ in range(2):
            init.close()
            assert used(device) == 0
            assert all(type(each) is nn.Parameter for each in model.parameters())
            assert bits(model.state_dict()) == bits(plain.state_dict())
    assert_unpatched()


def test_a_device_that_was_opened_by_name_stays_open_with_its_parameters() -> None:
    model, init = made_away(lambda: nn.Linear(WIDTH, WIDTH))
    device = init.device
    del init
    assert not device.closed
    assert model.weight.isfinite().all()
    del model
    gc.collect()
    assert device.closed


def test_training_without_an_engine_and_after_an_optimizer_is_gone() -> None:
    with nearstep.open(GOLDEN) as device:
        model, _ = made_away(lambda: Stack(3), device)
        before = used(device)
        torch.manual_seed(SEED)
        plain = Stack(3)
        for _ in range(2):  # each with an optimizer of its own
            plans = [(model, device), (plain, GOLDEN)]
            for each, on in plans:
                optimizer = nearstep.optim.AdamW(each.parameters(), lr=1e-2, device=on)
                for _ in range(2):
                    each(torch.ones(2, WIDTH)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                del optimizer
            assert bits(model.state_dict()) == bits(plain.state_dict())
            assert used(device) == before


@pytest.mark.parametrize("in_place", ["yes", "no"])
def test_large_parameters_that_stay_here_during_steps(in_place: str) -> None:
    url = f"golden:axdimm?memory_bytes=2MiB&in_place={in_place}"

    def make() -> nn.Module:
        return nn.Linear(160, 160)

    with nearstep.open(url) as device:
        model, _ = made_away(make, device)
        torch.manual_seed(SEED)
        plain = make()
        trained = [(model, device), (plain, url)]
        optimizers = [
            nearstep.optim.AdamW(each.parameters(), lr=1e-2, device=on) for each, on in trained
        ]

        def train_both() -> None:
            for (each, _), optimizer in zip(trained, optimizers, strict=True):
                for _ in range(2):
                    each(torch.ones(2, 160)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert bits(model.state_dict()) == bits(plain.state_dict())

        view = model.weight.detach()
        train_both()
        assert torch.equal(view, plain.weight)
        del view
        train_both()
        with nearstep.offload(model, optimizers[0], budget="220%"):
            train_both()
        train_both()


def test_contexts_are_not_nested_and_entered_once() -> None:
    with nearstep.offload.init(GOLDEN) as init:
        with pytest.raises(NestedInitError), nearstep.offload.init(GOLDEN):
            pass
        with pytest.raises(NestedInitError), init:
            pass
        assert isinstance(nn.Linear(2, 2).weight, OffloadedParameter)
    with pytest.raises(NestedInitError), init:
        pass
    assert_unpatched()


def test_modules_of_other_threads_are_plain() -> None:
    found: list[type] = []
    with nearstep.offload.init(GOLDEN):
        thread = threading.Thread(target=lambda: found.append(type(nn.Linear(2, 2).weight)))
        thread.start()
        thread.join()
    assert found == [nn.Parameter]


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    for make in (
        lambda: nn.LazyLinear(4),
        lambda: nn.Linear(4, 4, dtype=torch.float64),
        lambda: nn.Linear(4, 4, device="meta"),
        lambda: nn.Linear(4, 4).half(),
    ):
        with pytest.raises(ParameterError, match=r"Linear\.weight"), nearstep.offload.init(GOLDEN):
            make()
        assert_unpatched()
    with (
        pytest.raises(ParameterError, match="inference"),
        nearstep.offload.init(GOLDEN),
        torch.inference_mode(),
    ):
        nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="OffloadedParameter"), nearstep.offload.init(GOLDEN):
        KINDS["convolutions"]()  # weight_norm makes a parameter of a parameter
    with pytest.raises(ArgumentError):
        nearstep.offload.init(1)  # type: ignore[arg-type]


def test_an_optimizer_elsewhere_is_refused() -> None:
    model, init = made_away(lambda: nn.Linear(WIDTH, WIDTH))
    other = nearstep.optim.AdamW(model.parameters(), device=GOLDEN)
    with pytest.raises(ParameterError, match="device=init"):
        nearstep.offload(model, other, budget="400%")
    first = nearstep.optim.AdamW(model.parameters(), device=init.device)
    second = nearstep.optim.AdamW(model.parameters(), device=init.device)
    with pytest.raises(ParameterError, match="device=init"):
        nearstep.offload(model, second, budget="400%")
    nearstep.offload(model, first, budget="400%").close()
    assert type(model.weight) is nn.Parameter


def test_a_model_made_away_takes_a_checkpoint() -> None:
    torch.manual_seed(1)
    saved = Stack(2).state_dict()
    with nearstep.offload.init(GOLDEN) as init:
        model = Stack(2)
        model.load_state_dict(saved)
        assert init.report().peak == 4 * WIDTH * WIDTH
        twin = Stack(2)
        twin.load_state_dict(saved, assign=True)  # its memory is that of `saved`
        assert init.report().peak > init.report().parameters / 3 - 4 * WIDTH * WIDTH
    assert bits(model.state_dict()) == bits(twin.state_dict()) == bits(saved)


def test_frozen_parameters_take_no_memory_of_the_device_with_each_step() -> None:
    with nearstep.open(GOLDEN) as device:
        model = KINDS["frozen"]()
        optimizer = nearstep.optim.AdamW(groups(model), device=device)
        taken = []
        with nearstep.offload(model, optimizer, budget="150%"):
            for _ in range(3):
                model(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                taken.append(used(device))
        assert len(set(taken)) == 1
