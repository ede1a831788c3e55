"""Optimizers of torch from files: what they compute is the golden model's, bit for bit."""

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nearstep
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.errors import ArgumentError, BusResponseError, OptionError
from nearstep.torch.errors import HyperparameterError
from nearstep.torch.settings import OnDevice
from nearstep.updater.device import KernelDevice
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.rules import optimizer_named

from .conftest import like_torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LION = f"{EXAMPLES / 'lion.py'}:LION"
RMSPROP = f"{EXAMPLES / 'rmsprop.py'}:RMSPROP"
GOLDEN = "golden:axdimm?engine=numpy&memory_bytes=16MiB"
SMALL = "sim:axdimm?lanes=1&block_bytes=512&memory_bytes=1MiB&memory=ideal"
SEED = 20231


def parameters(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def give_gradients(given: list[torch.Tensor], step: int) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(SEED + step)
    for each in given:
        each.grad = torch.randn(each.shape, generator=generator)
    return [each.grad.numpy().copy() for each in given]


def bits(array: object) -> np.ndarray:
    return np.asarray(array).view(np.uint32)


@like_torch
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "root", "hyper", "roots_of_a_step"),
    [
        (RMSPROP, "sqrt", {"lr": 1e-2, "alpha": 0.9}, 1),
        ("rmsprop", "sqrt", {"lr": 1e-2, "alpha": 0.9}, 1),
        ("adadelta", "sqrt_", {"lr": 0.3, "rho": 0.95, "eps": 1e-5}, 2),
    ],
    ids=["rmsprop of a file", "rmsprop", "adadelta"],
)
def test_optimizers_with_the_nearest_root_have_the_bits_of_torch(
    name: str,
    root: str,
    hyper: dict[str, float],
    roots_of_a_step: int,
    weight_decay: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roots = 0

    def nearest_root(tensor: torch.Tensor) -> torch.Tensor:  # see tests/hw/rule/test_examples.py
        nonlocal roots
        roots += tensor.numel()
        found = torch.from_numpy(np.sqrt(tensor.numpy()))
        return tensor.copy_(found) if root.endswith("_") else found

    monkeypatch.setattr(torch.Tensor, root, nearest_root)
    ours, theirs = parameters(640, 64), parameters(640, 64)
    options = {**hyper, "weight_decay": weight_decay}
    kind = torch.optim.Adadelta if name == "adadelta" else torch.optim.RMSprop
    reference: Any = kind(theirs, foreach=False, **options)
    compared, arrays = 0, 1
    with nearstep.open(f"{GOLDEN}&rules={name}") as device:
        optimizer = nearstep.optim.from_rule(name, ours, device=device, **options)
        for step in range(4):
            give_gradients(ours, step)
            give_gradients(theirs, step)
            optimizer.step()
            reference.step()
            for mine, other in zip(ours, theirs, strict=True):
                state, expected = optimizer.state[mine], reference.state[other]
                assert list(state) == list(expected)
                arrays = len(expected)  # of moments, and the parameter in the place of the step
                assert state["step"] == expected["step"] == step + 1
                assert np.array_equal(bits(mine.detach()), bits(other.detach()))
                for key in list(expected)[1:]:
                    assert np.array_equal(bits(state[key]), bits(expected[key]))
                compared += arrays * mine.numel()
        saved = optimizer.state_dict()
    assert (compared, roots) == (4 * arrays * 704, 4 * roots_of_a_step * 704)
    assert arrays == 1 + roots_of_a_step
    reference.load_state_dict({**saved, "param_groups": reference.state_dict()["param_groups"]})


def test_a_checkpoint_a_copy_and_a_pickle_go_on_with_the_same_bits() -> None:
    url = f"{GOLDEN}&rules={LION}"
    given = parameters(96)
    with nearstep.open(url) as device:
        optimizer = nearstep.optim.from_rule(LION, given, lr=1e-2, device=device)
        give_gradients(given, 0)
        optimizer.step()
        start = given[0].detach().clone()
        saved = optimizer.state_dict()
        twin = copy.deepcopy(optimizer)
        thawed = pickle.loads(pickle.dumps(optimizer))
        others = parameters(96)
        others[0].data.copy_(start)
        loaded = nearstep.optim.from_rule(LION, others, lr=1.0, device=device)
        loaded.load_state_dict(saved)
        results = []
        for each in (optimizer, twin, thawed, loaded):
            (parameter,) = each.param_groups[0]["params"]
            give_gradients([parameter], 1)
            each.step()
            results.append(bits(parameter.detach()).copy())
            assert each.definition.name == "lion"
            assert each.param_groups[0]["lr"] == 1e-2
    assert not np.array_equal(results[0], bits(start))
    assert all(np.array_equal(results[0], each) for each in results[1:])


def test_data_makes_the_same_optimizer_as_the_class() -> None:
    ours, theirs = parameters(64), parameters(64)
    with nearstep.open(GOLDEN) as device:
        first = nearstep.optim.from_rule("adamw", ours, lr=1e-2, device=device)
        second = nearstep.optim.AdamW(theirs, lr=1e-2, device=device)
        for step in range(3):
            give_gradients(ours, step)
            give_gradients(theirs, step)
            first.step()
            second.step()
        assert np.array_equal(bits(ours[0].detach()), bits(theirs[0].detach()))
        assert set(first.state[ours[0]]) == set(second.state[theirs[0]])


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"rate": 1.0}, "a hyper-parameter of .*LION must be of lr, betas, weight_decay"),
        ({"lr": -1.0}, "lr must be finite and at least 0, not -1.0"),
        ({"lr": "fast"}, "lr must be a number, not 'fast'"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\), not 1.0"),
        ({"betas": 0.9}, "betas must be a pair of numbers, not 0.9"),
    ],
)
def test_a_wrong_hyper_parameter_is_told(hyper: dict[str, object], message: str) -> None:
    with (
        nearstep.open(f"{GOLDEN}&rules={LION}") as device,
        pytest.raises(HyperparameterError, match=message),
    ):
        nearstep.optim.from_rule(LION, parameters(16), device=device, **hyper)


def test_a_device_without_the_rule_says_so() -> None:
    missing = pytest.raises(ArgumentError, match=r"kernel \(adam\), not lion")
    with nearstep.open(GOLDEN) as device, missing:
        nearstep.optim.from_rule(LION, parameters(16), device=device)


def test_a_rule_alone_has_its_registers_as_hyper_parameters(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from nearstep_spec.rule.expr import fma\n"
        "from nearstep_spec.rule.rule import Rule\n"
        "def down(p, g, *, rate):\n"
        '    return {"p": fma(rate, g, p)}\n'
        'MINE = Rule("mine", down, states=("p",), inputs=("g",), scalars=("rate",))\n'
    )
    given = parameters(16)
    before = given[0].detach().numpy().copy()
    with nearstep.open(f"{GOLDEN}&rules={path}:MINE") as device:
        with pytest.raises(HyperparameterError, match="rate must be given"):
            nearstep.optim.from_rule(f"{path}:MINE", given, device=device)
        optimizer = nearstep.optim.from_rule(f"{path}:MINE", given, rate=-0.5, device=device)
        (gradient,) = give_gradients(given, 0)
        optimizer.step()
    assert np.array_equal(given[0].detach().numpy(), before - np.float32(0.5) * gradient)


def test_a_file_that_changed_since_the_device_was_opened_is_found(tmp_path: Path) -> None:
    text = Path(LION.rpartition(":")[0]).read_text()
    path = tmp_path / "mine.py"
    path.write_text(text)
    with nearstep.open(f"{GOLDEN}&rules={path}:LION") as device:
        nearstep.optim.from_rule(f"{path}:LION", parameters(16), device=device)
        path.write_text(text.replace("sign(fma(", "2.0 * sign(fma("))
        given = parameters(16)
        changed = nearstep.optim.from_rule(f"{path}:LION", given, device=device)
        give_gradients(given, 0)
        before = bits(given[0].detach()).copy()
        with pytest.raises(ArgumentError, match=r"mine.py:\d+: rule lion has another arithmetic"):
            changed.step()
        assert np.array_equal(bits(given[0].detach()), before)


def test_a_rule_of_a_file_is_not_taken_for_that_of_nearstep_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(Path(LION.rpartition(":")[0]).read_text().replace('"lion"', '"sgd_momentum"'))
    with nearstep.open(f"{GOLDEN}&rules={path}:LION") as device:
        p, g, m = (device.alloc(16) for _ in range(3))
        device.update("sgd_momentum", {"p": p, "g": g, "m": m}, lr=0.5)
        optimizer = nearstep.optim.SGD(parameters(16), momentum=0.9, device=device)
        give_gradients(optimizer.param_groups[0]["params"], 0)
        with pytest.raises(ArgumentError, match="sgd_momentum has another arithmetic"):
            optimizer.step()
        with pytest.raises(ArgumentError, match="sgd_momentum has another arithmetic"):
            device.update("sgd", {"p": p, "g": g, "m": m}, momentum=0.9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("update = sign", "update = sgn", r"mine.py:\d+: NameError: name 'sgn'"),
        ("- m, m)}", "- mm, m)}", r"mine.py:\d+: NameError: name 'mm'"),
        ('states=("p", "m")', 'states=("p",)', r"mine.py:\d+: Unknown state.* 'm'"),
        (
            "(lr, betas, weight_decay)",
            "(lr, betas, decay)",
            r"mine.py:\d+: Unknown hyper-parameter",
        ),
        ('"exp_avg": "m"', '"exp_avg": "v"', r"mine.py:\d+: Unknown state 'v'; declared: m, p"),
        ("1 - betas[1], -lr", "-lr", r"mine.py:\d+: ValueError: zip"),
        ("def _lion", "def _lion(", r"mine.py:\d+: "),
        ("LION = ", "TIGER = ", r"LION must be an Optimizer or a Rule, and is not there; .*TIGER"),
        ('"m"', '"u"', r"mine.py:\d+: "),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = Path(LION.rpartition(":")[0]).read_text()
    assert old in text
    path = tmp_path / "mine.py"
    path.write_text(text.replace(old, new))
    with pytest.raises(OptionError, match=message):
        nearstep.open(f"{GOLDEN}&rules={path}:LION")


OWN_STATES = """
from nearstep_spec.rule.expr import fma
from nearstep_spec.rule.optimizer import Number, Optimizer
from nearstep_spec.rule.rule import Rule


def _define(p, g, slow, fast, *, rate, weight):
    slow, fast = fma(weight, g - slow, slow), g + fast
    return {"p": fma(rate, slow + fast, p), "slow": slow, "fast": fast}


OWN = Optimizer(
    rule=Rule("own", _define, states=("p", "slow", "fast"), inputs=("g",),
              scalars=("rate", "weight"), formats={"fast": "fp16"}),
    scalars=lambda lr: {"rate": -lr, "weight": 0.25},
    hyper={"lr": Number(0.5)},
    state={"slow_average": "slow", "fast_sum": "fast"},
)
"""


@pytest.mark.parametrize(
    "device",
    [
        "golden:axdimm?engine=numpy&memory_bytes=64KiB",
        "golden:smartssd?engine=numpy&memory_bytes=256KiB",
        pytest.param(SMALL, marks=pytest.mark.deep),
    ],
)
def test_states_may_have_any_names(tmp_path: Path, device: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_STATES)
    name = f"{path}:OWN"
    rule = optimizer_named(name).rule
    (given,) = parameters(1003)
    with nearstep.open(f"{device}&rules={name}", KernelDevice) as opened:
        optimizer = nearstep.optim.from_rule(name, [given], device=opened, lr=0.25)
        states = {"p": given.detach().numpy().copy()}
        states |= {each: np.zeros(1003, np.float32) for each in ("slow", "fast")}
        for step in range(3):
            (gradient,) = give_gradients([given], step)
            optimizer.step()
            made = evaluate(rule, states | {"g": gradient}, {"rate": -0.25, "weight": 0.25})
            states = made | {"fast": made["fast"].astype(np.float16).astype(np.float32)}
        assert (bits(given.detach().numpy()) == bits(states["p"])).all()
        state = optimizer.state[given]
        assert (bits(state["slow_average"].numpy()) == bits(states["slow"])).all()
        assert state["fast_sum"].dtype == torch.float16
        assert (state["fast_sum"].float().numpy() == states["fast"]).all()

        arrays = {n: opened.alloc(200, np.float16 if n == "fast" else np.float32)
                  for n in opened.config.arrays}  # fmt: skip
        for each in arrays.values():
            each.fill(0)
        for array, stream in (("slow", "SLOW_WRITE"), ("fast", "FAST_WRITE"), ("g", "G_READ")):
            where = arrays[array].address
            assert isinstance(opened.backend, EmulatedBackend)
            opened.backend.inject(
                Injection(kind="slverr", write=array != "g", base=where, limit=where + 1)
            )
            with pytest.raises(BusResponseError) as caught:
                opened.update("own", arrays).wait()
            assert caught.value.stream == stream
        assert opened.update("own", arrays).wait().counters["committed"] == 200


@pytest.mark.parametrize("start", [0.3, 1.0, 0.2509765625, 0.2529296875, 1e-40])
@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_a_state_of_16_bits_begins_with_its_value_rounded(
    tmp_path: Path, form: str, start: float
) -> None:
    path = tmp_path / "own.py"
    text = OWN_STATES.replace('"fp16"', f'"{form}"')
    text = text.replace("lambda lr:", "lambda lr, start:").replace(
        "    hyper={", "    initial={'fast': 'start'},\n    hyper={'start': Number(0.0), "
    )
    path.write_text(text)
    name = f"{path}:OWN"
    (given,) = parameters(101)
    optimizer = nearstep.optim.from_rule(
        name, [given], device=f"{GOLDEN}&rules={name}", start=start
    )
    given.grad = torch.zeros(101)
    optimizer.step()
    dtype = torch.float16 if form == "fp16" else torch.bfloat16
    expected = torch.full((101,), start, dtype=torch.float32).to(dtype)
    found = optimizer.state[given]["fast_sum"]
    assert found.dtype == dtype
    assert found.view(torch.int16).equal(expected.view(torch.int16))


def test_a_kernel_has_no_more_arrays_than_it_has_numbers_for(tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    for others in (5, 6):
        names = [f"s{number}" for number in range(others)]
        path.write_text(
            "from nearstep_spec.rule.rule import Rule\n"
            f"def _many(p, g, {', '.join(names)}, *, rate):\n"
            f"    return {{'p': p + rate * g, {', '.join(f'{n!r}: {n} + g' for n in names)}}}\n"
            f"MANY = Rule('many', _many, states={('p', *names)!r}, inputs=('g',),\n"
            "            scalars=('rate',))\n"
        )
        options = "compression=fused"
        url = f"golden:axdimm?memory_bytes=256KiB&engine=numpy&{options}&rules={path}:MANY"
        if others == 6:
            with pytest.raises(OptionError, match=r"at most 7 arrays together.*, not 8: p, g, s0"):
                nearstep.open(url)
            continue
        (given,) = parameters(33)
        before = given.detach().clone()
        optimizer = nearstep.optim.from_rule(f"{path}:MANY", [given], device=url, rate=1.0)
        given.grad = torch.ones(33)
        optimizer.step()
        assert (given.detach() == before + 1.0).all()
        assert all((optimizer.state[given][name] == 1.0).all() for name in names)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("index", "no state may be called 'index'"),
        ("copy_out", "no state may be called 'copy_out'"),
        ("error", "error_address_lo of error_address is there twice"),
        ("Fast", "name must be lower snake case, not 'Fast'"),
    ],
)
def test_a_state_with_the_name_of_something_else_is_told(
    tmp_path: Path, state: str, message: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_STATES.replace("fast", state))
    with pytest.raises(OptionError, match=message):
        nearstep.open(f"{GOLDEN}&rules={path}:OWN")


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_classes_take_what_torch_takes_and_say_what_else(name: str) -> None:
    make = getattr(nearstep.optim, name)
    ours = inspect.signature(make).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    assert set(ours) - set(theirs) <= {
        "device",
        *OnDevice.__annotations__,
        "decoupled_weight_decay",
    }
    for key, each in theirs.items():
        if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert list(ours).index(key) == list(theirs).index(key)
            assert ours[key].default == each.default
    assert set(OnDevice.__annotations__) <= set(ours)
    assert (ours["error_feedback"].default, ours["compression_form"].default) == (True, "fused")
    with pytest.raises(
        TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'amsgard'"
    ):
        make(parameters(16), device=GOLDEN, amsgard=True)
    assert make(parameters(16)).table.source == "host:"


BACKWARDS = """
from nearstep_spec.rule.rule import Rule

BACKWARDS = Rule("backwards", lambda g, p: {"p": p - g}, states=("p",), inputs=("g",))
"""


def test_the_rules_that_an_error_advises_open_a_device_with_the_rule(tmp_path: Path) -> None:
    opened = 0
    for name, query in (
        (LION, ""), (LION, "&rules=adam,sgd"), ("sgd", f"&rules={LION}"), ("rmsprop", ""),
    ):  # fmt: skip
        given = parameters(32)
        refused = pytest.raises(ArgumentError, match="must be a rule of the kernel")
        with nearstep.open(GOLDEN + query) as device, refused as caught:
            nearstep.optim.from_rule(name, given, device=device)
        advised = str(caught.value).partition("name it in the device's ")[2]
        give_gradients(given, 0)
        with nearstep.open(f"{GOLDEN}&{advised}") as device:
            nearstep.optim.from_rule(name, given, device=device).step()
            opened += 1
    assert opened == 4
    (tmp_path / "rule.py").write_text(BACKWARDS)
    with nearstep.open(GOLDEN) as device:
        with pytest.raises(ArgumentError, match=r"cannot have it as well .*must have one order"):
            nearstep.optim.from_rule(
                f"{tmp_path / 'rule.py'}:BACKWARDS", parameters(32), device=device
            )
        with pytest.raises(ArgumentError, match=r"device's rules=adam,FILE.py:NAME of lion"):
            device.check_rule("lion")
