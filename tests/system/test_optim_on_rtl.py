"""``optimizer.step()`` on the RTL of the kernel, against torch and against the golden device."""

from __future__ import annotations

import pytest
import torch

import nearstep

CAPABILITY = torch.backends.cpu.get_cpu_capability()
SEED = 77

like_torch = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"ATen's capability is {CAPABILITY}; its fused steps are vectorised for AVX2 and AVX512",
)


def train(factory, shapes, steps, groups=1, **options):
    """Train on random gradients; returns all bits of parameters and state, and the optimizer."""
    generator = torch.Generator().manual_seed(SEED)
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    optimizer = factory([{"params": parameters[start::groups]} for start in range(groups)])
    for _ in range(steps):
        for p in parameters:
            exponent = torch.rand(p.shape, generator=generator) * 12 - 10
            p.grad = torch.randn(p.shape, generator=generator) * 10**exponent
        optimizer.step()
    arrays = [
        x.detach().reshape(-1).view(torch.int32)
        for p in parameters
        for x in (p, *(x for key, x in optimizer.state.get(p, {}).items() if key != "step"))
    ]
    return torch.cat(arrays), optimizer


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [
        "",
        "?memory=halfduplex",
        "?memory=halfduplex&stall=0.3&seed=5",
        "?memory=ddr4-1600&channels=2&block_bytes=1024",
    ],
)
def test_any_sizes_and_groups_equal_the_golden_device(options, name):
    shapes = [(3,), (64, 65), (16,), (), (5, 5), (4097,), (0,), (2048,)]
    results = []
    for url in (f"sim:axdimm{options}", "golden:axdimm"):
        factory = getattr(nearstep.optim, name)
        bits, optimizer = train(
            lambda groups, make=factory, device=url: make(
                groups, lr=1e-2, weight_decay=0.1, device=device
            ),
            shapes,
            steps=3,
            groups=2,
        )
        results.append(bits)
        assert (optimizer.traffic.cycles is None) == url.startswith("golden")
    print(f"{len(results[0])} values compared, seed {SEED}")
    assert len(results[0]) > 0
    assert torch.equal(*results)


@like_torch
def test_whole_beats_equal_torch_fused():
    shapes = [(64, 64), (16,), (4096,), (48, 16)]
    ours, _ = train(lambda groups: nearstep.optim.AdamW(groups, device="sim:axdimm"), shapes, 4)
    theirs, _ = train(lambda groups: torch.optim.AdamW(groups, fused=True), shapes, 4)
    assert torch.equal(ours, theirs)


@like_torch
@pytest.mark.parametrize(
    "url",
    [
        "golden:axdimm",
        "golden:axdimm?channels=2",
        pytest.param("sim:axdimm", marks=pytest.mark.deep),
        pytest.param("sim:axdimm?memory=ddr4-1600&channels=2", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize(
    ("name", "weight_decay"), [("Adam", 0.0), ("Adam", 0.1), ("AdamW", 0.0), ("AdamW", 0.1)]
)
def test_ten_steps_of_a_million_parameters_equal_torch_fused(url, name, weight_decay):
    shapes, steps = [(1 << 20,)], 10
    ours, optimizer = train(
        lambda groups: getattr(nearstep.optim, name)(
            groups, lr=1e-3, weight_decay=weight_decay, device=url
        ),
        shapes,
        steps,
    )
    theirs, _ = train(
        lambda groups: getattr(torch.optim, name)(
            groups, lr=1e-3, weight_decay=weight_decay, fused=True
        ),
        shapes,
        steps,
    )
    print(f"{len(ours)} values compared; ATen capability {CAPABILITY}; torch {torch.__version__}")
    assert len(ours) == 3 << 20
    assert int((ours != theirs).sum()) == 0
    assert optimizer.traffic.elements == steps << 20


@like_torch
@pytest.mark.parametrize(
    ("name", "arrays", "options"),
    [
        ("SGD", 2, {"lr": 0.1, "weight_decay": 0.1}),
        ("SGD", 3, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adagrad", 3, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ],
    ids=["sgd", "sgd_momentum", "adagrad"],
)
def test_other_rules_on_the_dimm_equal_torch_fused(name, arrays, options):
    shapes, steps = [(64, 64), (16,), (33, 16)], 3
    url = "sim:axdimm?memory=ddr4-1600&channels=2&block_bytes=1024&functional_units=4"
    with nearstep.open(f"{url}&rules=adam,sgd,sgd_momentum,adagrad") as device:
        free = device.free_bytes
        ours, optimizer = train(
            lambda groups: getattr(nearstep.optim, name)(groups, device=device, **options),
            shapes,
            steps,
        )
        nbytes = 4 * sum(torch.Size(shape).numel() for shape in shapes)
        assert arrays * nbytes <= free - device.free_bytes < (arrays + 1) * nbytes
        assert optimizer.traffic.cycles > 0
    theirs, _ = train(
        lambda groups: getattr(torch.optim, name)(groups, fused=True, **options), shapes, steps
    )
    print(f"{len(ours)} values compared, seed {SEED}")
    assert len(ours) == (arrays - 1) * nbytes // 4
    assert torch.equal(ours, theirs)
