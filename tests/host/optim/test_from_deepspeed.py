"""Training as a configuration in DeepSpeed's spelling says, against torch's optimizers."""

from __future__ import annotations

import copy
import gc
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nearstep
from nearstep.deepspeed.config import LossScaling
from nearstep.deepspeed.errors import ConfigError, UnknownKeyError
from nearstep.storage.drive_errors import DirectIOError, StorageError
from nearstep.torch.errors import GradientError, HyperparameterError, UnsupportedOptionError
from nearstep.torch.scaler import LossScaleError, LossScaler

from .conftest import like_torch

CARD = "golden:smartssd"
DIMM = "golden:axdimm?memory_bytes=1MiB"
EVERY = f"{DIMM}&rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad"
SCALES = f"{DIMM}&scan=yes&gradient_scale=yes&gradient_formats=fp32,fp16"
OFFLOAD = {"none": 0, "cpu": 2, "nvme": 3}
BOUND = 0.13
BATCHES = 12


def config(folder: Path, device: str = "nvme", **more: Any) -> dict[str, Any]:
    offload = {"device": device, "nvme_path": str(folder), "pin_memory": True, "buffer_count": 4}
    return {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.05},
        },
        "zero_optimization": {
            "stage": OFFLOAD[device],
            "offload_optimizer": offload,
            "sub_group_size": 2112,
            "overlap_comm": True,
        },
        "gradient_clipping": BOUND,
        "steps_per_print": 100,
        **more,
    }


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def batches(count: int = BATCHES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(8, 32, generator=generator) for _ in range(count)]


def made(*arguments: Any, **more: Any) -> nearstep.optim.Training:
    try:
        return nearstep.optim.from_deepspeed(*arguments, **more)
    except DirectIOError as error:
        pytest.skip(f"there is no O_DIRECT: {error}")


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(p.view(torch.int32), q.view(torch.int32)) for p, q in pairs)


def train(training: nearstep.optim.Training, ours: nn.Module, batch: Tensor) -> None:
    training.backward(ours(batch).square().mean())
    assert training.step()


def trains_like(table: dict[str, Any], other: Any, **more: Any) -> nearstep.optim.Training:
    """Train as a table says, and beside it with what `other` makes of parameters."""
    ours, theirs = model(), model()
    training = nearstep.optim.from_deepspeed(table, ours.parameters(), **more)
    reference = other(theirs.parameters())
    for batch in batches(3):
        train(training, ours, batch)
        reference.zero_grad()
        theirs(batch).square().mean().backward()
        reference.step()
    assert same(ours, theirs)
    assert not same(ours, model())
    return training


@like_torch
@pytest.mark.parametrize(
    ("device", "url"), [*((each, CARD) for each in OFFLOAD), ("nvme", "host:"), ("nvme", None)]
)
def test_a_model_trains_with_the_bits_of_torch(
    tmp_path: Path, device: str, url: str | None
) -> None:
    """AdamW with `fused=True` and `torch.nn.utils.clip_grad_norm_`, four passes a step."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config(tmp_path, device)))
    ours, theirs = model(), model()
    training = made(file, ours.parameters(), device=url)
    assert training.config.gradient_accumulation_steps == 4
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.05, fused=True
    )
    norms, compared = [], 0
    for index, batch in enumerate(batches()):
        training.backward(ours(batch).square().mean())
        (theirs(batch).square().mean() / 4).backward()
        last = index % 4 == 3
        assert training.step() == last
        if last:
            norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), BOUND).item())
            reference.step()
            reference.zero_grad()
        assert same(ours, theirs)
        assert all((p.grad is None) == last for p in ours.parameters())
    assert min(norms) < BOUND < max(norms), norms
    state = training.optimizer.state_dict()["state"]
    for index, each in reference.state_dict()["state"].items():
        for name, value in each.items():
            assert torch.equal(state[index][name], value)
            compared += 1
    assert compared == 12
    drives = [each.name for each in tmp_path.iterdir() if each != file]
    assert drives == (["nearstep-rank0.drive"] if device == "nvme" else [])
    if device == "nvme":
        assert training.optimizer.memory_peak <= 16 * 2112


@pytest.mark.parametrize("elements", [None, 1e9])
def test_subgroups_may_be_larger_than_the_model_or_not_be_stated(
    tmp_path: Path, elements: float | None
) -> None:
    """On two cards, where a parameter of a card ends within a stripe."""
    table, ours = config(tmp_path, train_batch_size=8), model()
    table["zero_optimization"]["sub_group_size"] = elements
    if elements is None:
        del table["zero_optimization"]["sub_group_size"]
    train(made(table, ours.parameters(), device=f"{CARD}?cards=2"), ours, batches(1)[0])
    pairs = zip(ours.parameters(), model().parameters(), strict=True)
    assert not any(torch.equal(p, q) for p, q in pairs)


def test_cards_with_drives_of_their_own_keep_the_state_there(tmp_path: Path) -> None:
    """If the folder is the one of the device's name, and the subgroup is, where it is stated."""
    table = config(tmp_path, train_batch_size=8)
    zero, url = table["zero_optimization"], f"{CARD}?cards=2&drive={tmp_path}"
    with pytest.raises(ConfigError, match="left out, or 1048576, the device's") as caught:
        nearstep.optim.from_deepspeed(table, model().parameters(), device=url)
    assert caught.value.key == "zero_optimization.sub_group_size"
    zero["sub_group_size"] = 1 << 20
    other = {**zero["offload_optimizer"], "nvme_path": str(tmp_path.parent)}
    elsewhere = {**table, "zero_optimization": {**zero, "offload_optimizer": other}}
    with pytest.raises(ConfigError, match="drive= says") as caught:
        nearstep.optim.from_deepspeed(elsewhere, model().parameters(), device=url)
    assert caught.value.key == "zero_optimization.offload_optimizer.nvme_path"
    assert list(tmp_path.iterdir()) == []
    ours, theirs = model(), model()
    training = made(table, ours.parameters(), device=url)
    plain = nearstep.optim.from_deepspeed(
        {**table, "zero_optimization": {"stage": 0}}, theirs.parameters(), device=f"{CARD}?cards=2"
    )
    for batch in batches(3):
        train(training, ours, batch)
        train(plain, theirs, batch)
    assert same(ours, theirs)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "card0of2.nearstep",
        "card1of2.nearstep",
    ]


def test_drives_are_resumed_and_memory_may_be_said_otherwise(tmp_path: Path) -> None:
    ours = model()
    training = made(config(tmp_path), ours.parameters(), device=CARD)
    for batch in batches(4):
        training.backward(ours(batch).square().mean())
        training.step()
    held = [p.detach().clone() for p in ours.parameters()]
    del training
    gc.collect()
    again = model()
    with pytest.raises(StorageError, match="nearstep-rank0"):
        made(config(tmp_path), again.parameters(), device=CARD)
    resumed = made(config(tmp_path), again.parameters(), device=CARD, resume=True, memory="100%")
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), held, strict=True))
    assert {int(state["step"]) for state in resumed.optimizer.state.values()} == {1}


@like_torch
@pytest.mark.parametrize(
    ("kind", "params", "reference"),
    [
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam),
        ("AdamW", {"amsgrad": True, "weight_decay": 0.1}, torch.optim.AdamW),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
        ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}, torch.optim.Adagrad),
    ],
)
def test_every_optimizer_has_the_bits_of_torchs(
    kind: str, params: dict[str, Any], reference: type[torch.optim.Optimizer]
) -> None:
    deepspeeds = ("adam_w_mode", "torch_adam")
    given = {name: value for name, value in params.items() if name not in deepspeeds}
    table = {"optimizer": {"type": kind, "params": params}}
    trains_like(table, lambda ps: reference(ps, fused=True, **given), device=EVERY)


def test_the_default_weight_decay_is_none_as_in_deepspeed() -> None:
    for params, expected in (({}, 0.0), ({"torch_adam": True}, 0.01)):
        table = {"optimizer": {"type": "AdamW", "params": params}}
        training = nearstep.optim.from_deepspeed(table, model().parameters(), device=DIMM)
        assert training.optimizer.param_groups[0]["weight_decay"] == expected


def test_the_device_clips_on_request() -> None:
    table = {"optimizer": {"type": "AdamW"}, "gradient_clipping": BOUND}
    clips = {"weight_decay": 0, "device": SCALES, "max_grad_norm": BOUND}
    training = trains_like(
        table, lambda ps: nearstep.optim.AdamW(ps, **clips), device=SCALES, clipping="device"
    )
    assert training.optimizer.traffic.scans > 0
    with pytest.raises(UnsupportedOptionError, match="scan=yes"):
        nearstep.optim.from_deepspeed(table, model().parameters(), device=DIMM, clipping="device")


def test_a_norm_that_is_not_finite_is_refused_before_anything_is_updated() -> None:
    ours = model()
    table = {"optimizer": {"type": "AdamW"}, "gradient_clipping": 1.0}
    training = nearstep.optim.from_deepspeed(table, ours.parameters(), device=DIMM)
    held = copy.deepcopy(ours.state_dict())
    training.backward(ours(batches(1)[0]).sum() * math.inf)
    with pytest.raises(GradientError, match="finite norm"):
        training.step()
    assert all(torch.equal(held[name], value) for name, value in ours.state_dict().items())
    training.zero_grad()
    training.backward(ours(batches(1)[0]).sum())
    assert training.step()


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_step_that_failed_is_repeated_or_given_up(
    monkeypatch: pytest.MonkeyPatch, gives_up: bool
) -> None:
    """Gradients are clipped once, and those of a step that begins anew are clipped, too."""
    table = {
        "optimizer": {"type": "SGD", "params": {"lr": 1}},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1e-3,
    }
    results = []
    for fails in (False, True):
        ours = [nn.Parameter(torch.zeros(16))]
        training = nearstep.optim.from_deepspeed(table, ours, device=EVERY)
        for number in (0, 1) if fails else (1,):
            for _ in range(2):
                training.backward((ours[0] * torch.arange(16.0)).sum() * 3)
                with monkeypatch.context() as patch:
                    if fails and not number:
                        patch.setattr(training.optimizer, "step", broken)
                    try:
                        training.step()
                    except OSError:
                        assert ours[0].grad is not None
                        assert ours[0].grad.norm() < 1.1e-3
            if fails and not number:
                if gives_up:
                    training.zero_grad()
                else:
                    assert training.step()
                    break
        results.append(ours[0].detach())
    assert results[0].norm() == pytest.approx(1e-3, rel=1e-2)
    assert torch.equal(*results)


def test_what_backward_adds_after_a_failure_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [nn.Parameter(torch.zeros(16))]
    table = {"optimizer": {"type": "SGD", "params": {"lr": 1}}, "gradient_clipping": 1e-3}
    training = nearstep.optim.from_deepspeed(table, ours, device=EVERY)
    training.backward(ours[0].sum())
    with monkeypatch.context() as patch:
        patch.setattr(training.optimizer, "step", broken)
        with pytest.raises(OSError, match="drive"):
            training.step()
    training.optimizer.zero_grad()
    training.backward(ours[0].sum())
    assert training.step()
    assert ours[0].detach().norm() == pytest.approx(1e-3, rel=1e-2)


def broken() -> None:
    raise OSError("as if a drive had failed")


def fp16(**more: Any) -> dict[str, Any]:
    scaling = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "fp16": scaling, **more}


@pytest.mark.parametrize("bound", [None, 0.5])
@pytest.mark.parametrize("device", [CARD, SCALES, "host:", None])
def test_an_fp16_model_is_scaled_as_by_torchs_scaler(
    device: str | None, bound: float | None
) -> None:
    ours, theirs = ([nn.Parameter(torch.ones(64).half())] for _ in range(2))
    table = fp16(**({} if bound is None else {"gradient_clipping": bound}))
    training = nearstep.optim.from_deepspeed(table, ours, device=device)
    other = nearstep.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0, device=device)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    assert training.scaler is not None
    updates, scales = [], []
    for turn in range(8):
        factor = torch.linspace(-0.01, 0.02 * (turn + 1), 64).half()
        if turn in (2, 5):
            factor[3] = torch.inf
        training.backward((ours[0] * factor).sum(dtype=torch.float32))
        scaler.scale((theirs[0] * factor).sum(dtype=torch.float32)).backward()
        gradient = theirs[0].grad
        norm = (gradient.double().square().sum().sqrt() / scaler.get_scale()).item()
        if bound is not None and math.isfinite(norm):
            norm32 = torch.linalg.vector_norm(gradient, dtype=torch.float32).item()
            gradient.mul_(min(1.0, bound / (norm32 / scaler.get_scale() + 1e-6)))
        updates.append(training.step())
        scaler.step(other)
        scaler.update()
        other.zero_grad()
        assert training.scaler.get_scale() == scaler.get_scale()
        scales.append(scaler.get_scale())
        assert torch.equal(ours[0].view(torch.int16), theirs[0].view(torch.int16))
    assert updates == [turn not in (2, 5) for turn in range(8)]
    assert len(set(scales)) >= 2
    assert not torch.equal(ours[0], torch.ones(64).half())


def turn(scaler: LossScaler | torch.amp.GradScaler, overflow: bool) -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale(torch.ones(()))
    p.grad = torch.full((1,), math.inf if overflow else 1.0)
    scaler.step(optimizer)
    scaler.update()


def test_without_patience_scales_are_torchs() -> None:
    choose = random.Random(5)
    ours = LossScaler(LossScaling(scale=2.0**40, dynamic=True, window=3, hysteresis=1))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    seen = set()
    for _ in range(60):
        overflow = choose.random() < 0.3
        turn(ours, overflow)
        turn(theirs, overflow)
        assert ours.get_scale() == theirs.get_scale()
        assert ours.overflowed == overflow
        seen.add(ours.get_scale())
    assert len(seen) > 5


@pytest.mark.parametrize(
    ("consecutive", "overflows", "expected"),
    [
        (False, "x.x..xx.", [16, 16, 8, 8, 16, 16, 8, 8]),
        (True, "x.x..xx.", [16, 16, 16, 16, 32, 32, 16, 16]),
        (False, "xxx.....", [16, 8, 4, 4, 8, 8, 16, 16]),
    ],
)
def test_patience_and_its_checkpoints(
    consecutive: bool, overflows: str, expected: list[float]
) -> None:
    options = LossScaling(
        scale=16.0, dynamic=True, window=2, hysteresis=2, consecutive=consecutive, least=2.0
    )
    scaler, found = LossScaler(options), []
    for each in overflows:
        turn(scaler, each == "x")
        found.append(scaler.get_scale())
        saved = scaler.state_dict()
        scaler = LossScaler(options)
        scaler.load_state_dict(saved)
    assert found == expected


def test_the_least_scale_and_a_static_one() -> None:
    scaler = LossScaler(LossScaling(scale=4.0, dynamic=True, hysteresis=1, least=3.0))
    turn(scaler, True)
    assert scaler.get_scale() == 3.0
    with pytest.raises(LossScaleError, match="at least 3"):
        turn(scaler, True)
    turn(scaler, False)
    static = LossScaler(LossScaling(scale=3.0, dynamic=False))
    for overflow in (True, True, False):
        turn(static, overflow)
        assert (static.get_scale(), static.overflowed) == (3.0, overflow)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be opened."""

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError(f"opened {arguments}")

    monkeypatch.setattr("nearstep.torch.configured.open_device", refuse)
    monkeypatch.setattr("nearstep.torch.unclaimed.open_device", refuse)
    monkeypatch.setattr("nearstep.torch.homes.opening.Store", refuse)


@pytest.mark.usefixtures("untouched")
def test_errors_come_before_anything_is_opened(tmp_path: Path) -> None:
    good, parameters = config(tmp_path), list(model().parameters())

    def refused(error: type[Exception], table: dict[str, Any], **more: Any) -> Any:
        with pytest.raises(error) as caught:
            nearstep.optim.from_deepspeed(
                table, more.pop("params", parameters), device=CARD, **more
            )
        return caught.value

    assert refused(UnknownKeyError, {**good, "gradient_cliping": 1}).near[0] == "gradient_clipping"
    assert refused(ConfigError, {**good, "train_batch_size": 33}).key == "train_batch_size"
    assert refused(ConfigError, {**good, "bf16": {"enabled": True}}).key == "bf16.enabled"
    half = [p.detach().half() for p in parameters]
    error = refused(ConfigError, good, params=[{"params": half[:1]}, {"params": half[1:]}])
    assert error.key == "fp16.enabled or bf16.enabled"
    assert refused(HyperparameterError, good, clipping="both").name == "clipping"
    assert refused(HyperparameterError, good, max_grad_norm=1.0).name == "max_grad_norm"
    assert refused(ConfigError, good, world_size=3).key == "train_batch_size"
    assert "unexpected keyword argument 'drive'" in str(refused(TypeError, good, drive="x"))
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'device'"):
        nearstep.optim.from_deepspeed(good, parameters)  # type: ignore[call-arg]
    assert list(tmp_path.iterdir()) == []


def test_a_device_or_a_folder_that_does_not_fit(tmp_path: Path) -> None:
    parameters = list(model().parameters())

    def refused(table: dict[str, Any], device: str | None = CARD) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            nearstep.optim.from_deepspeed(table, parameters, device=device)
        assert list(tmp_path.iterdir()) == []
        return caught.value

    error = refused(config(tmp_path / "nothing"))
    assert error.key == "zero_optimization.offload_optimizer.nvme_path"
    small = config(tmp_path)
    small["zero_optimization"]["sub_group_size"] = 2047
    error = refused(small)
    assert error.key == "zero_optimization.sub_group_size"
    assert (error.expected.split(":")[0], error.actual) == ("at least 2048", 2047)
    assert refused(small, None).key == "zero_optimization.sub_group_size"
    large = config(tmp_path)
    large["zero_optimization"]["sub_group_size"] = 1e9
    error = refused(large, "golden:axdimm?memory_bytes=32KiB")
    assert error.key == "zero_optimization.sub_group_size"
    assert (error.expected.split(":")[0], error.actual) == ("at most 2048", 10**9)
    half = [nn.Parameter(p.detach().half()) for p in parameters]
    with pytest.raises(UnsupportedOptionError, match=r"fp16\.enabled.*scan=yes"):
        nearstep.optim.from_deepspeed(fp16(), half, device=DIMM)
