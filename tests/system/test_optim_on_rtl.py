"""`optimizer.step()` on the RTL of the kernel, against torch and against the golden device."""

from __future__ import annotations

import pytest
import torch

import nearstep

CAPABILITY = torch.backends.cpu.get_cpu_capability()
SEED = 77
SMALL = "lanes=4&block_bytes=512&memory_bytes=4MiB"
"""The shape of the driver's tests and of `test_train_gpt.py`, so that it is built once."""

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
        pytest.param("", marks=pytest.mark.deep),
        pytest.param("?memory=halfduplex", marks=pytest.mark.deep),
        pytest.param("?memory=halfduplex&stall=0.3&seed=5", marks=pytest.mark.deep),
        f"?{SMALL}",
        f"?{SMALL}&memory=halfduplex&stall=0.3&seed=5",
        pytest.param("?memory=ddr4-1600&channels=2&block_bytes=1024", marks=pytest.mark.deep),
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
@pytest.mark.parametrize("options", [pytest.param("", marks=pytest.mark.deep), f"?{SMALL}"])
def test_whole_beats_equal_torch_fused(options):
    shapes = [(64, 64), (16,), (4096,), (48, 16)]
    device = f"sim:axdimm{options}"
    ours, _ = train(lambda groups: nearstep.optim.AdamW(groups, device=device), shapes, 4)
    theirs, _ = train(lambda groups: torch.optim.AdamW(groups, fused=True), shapes, 4)
    assert torch.equal(ours, theirs)


@like_torch
@pytest.mark.parametrize(
    "url",
    [
        pytest.param("golden:axdimm", marks=pytest.mark.deep),
        "golden:axdimm?channels=2",
        pytest.param("sim:axdimm", marks=pytest.mark.deep),
        pytest.param("sim:axdimm?memory=ddr4-1600&channels=2", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize(
    ("name", "weight_decay"),
    [
        ("AdamW", 0.1),
        pytest.param("Adam", 0.1, marks=pytest.mark.deep),
        *(pytest.param(name, 0.0, marks=pytest.mark.deep) for name in ("Adam", "AdamW")),
    ],
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
@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "arrays", "options"),
    [
        ("AdamW", 5, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
        ("SGD", 2, {"lr": 0.1, "weight_decay": 0.1}),
        ("SGD", 3, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adagrad", 3, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ],
    ids=["adam_amsgrad", "sgd", "sgd_momentum", "adagrad"],
)
def test_other_rules_on_the_dimm_equal_torch_fused(name, arrays, options):
    shapes, steps = [(64, 64), (16,), (33, 16)], 3
    url = "sim:axdimm?memory=ddr4-1600&channels=2&block_bytes=1024&functional_units=4"
    with nearstep.open(f"{url}&rules=adam,adam_amsgrad,sgd,sgd_momentum,adagrad") as device:
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


WITH_EVERYTHING = [
    pytest.param(memory, marks=pytest.mark.deep)
    for memory in ("memory=halfduplex", "memory=ddr4-1600&channels=2")
]
"""Deep: their libraries take long to build. Cards train with all of it in the fast tests."""

EVERYTHING = (
    "rules=adam,sgd_momentum&scan=yes&gradient_scale=yes&compression=fused,scatter"
    "&gradient_formats=fp32,fp16,bf16&copy_out_formats=fp16,bf16&block_bytes=1024"
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"compression": 0.03}),
        ("AdamW", {"compression": 0.2, "max_grad_norm": 1.0, "compression_format": "bf16"}),
        ("SGD", {"compression": 0.05, "compression_form": "scatter", "momentum": 0.9}),
        ("SGD", {"max_grad_norm": 0.5, "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("memory", WITH_EVERYTHING)
def test_compression_and_clipping_equal_the_golden_device(memory, name, options):
    shapes = [(3,), (64, 65), (16,), (), (5, 5), (4097,), (0,), (2048,)]
    channels = "channels=2&" if "channels" in memory else ""
    results = []
    for url in (f"sim:axdimm?{memory}&{EVERYTHING}", f"golden:axdimm?{channels}{EVERYTHING}"):
        bits, optimizer = train(
            lambda groups, device=url: getattr(nearstep.optim, name)(
                groups, lr=1e-2, weight_decay=0.1, device=device, **options
            ),
            shapes,
            steps=3,
            groups=2,
        )
        results.append((bits, optimizer.traffic.pairs, optimizer.traffic.scans))
    print(f"{len(bits)} values compared, seed {SEED}; {results[0][1:]} pairs and scans")
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert (results[0][1] > 0) == ("compression" in options)
    assert (results[0][2] > 0) == ("max_grad_norm" in options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", WITH_EVERYTHING)
def test_loss_scaling_of_16_bit_parameters_equals_the_golden_device(memory, dtype):
    channels = "channels=2&" if "channels" in memory else ""
    results = []
    for url in (f"sim:axdimm?{memory}&{EVERYTHING}", f"golden:axdimm?{channels}{EVERYTHING}"):
        generator = torch.Generator().manual_seed(SEED)
        shapes = ((100, 7), (16,), (1,), (3000,))
        ps = [
            torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
        ]
        optimizer = nearstep.optim.AdamW(ps, lr=1e-2, device=url)
        scaler = nearstep.optim.GradScaler(init_scale=2.0**10)
        scaler.scale(torch.ones(()))
        for turn in range(4):
            for p in ps:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            if turn == 1:
                ps[3].grad[2999] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        elements = sum(p.numel() for p in ps)
        traffic = optimizer.traffic
        assert traffic.gradients_down == 4 * 2 * elements
        assert traffic.parameters_up == 3 * 2 * elements
        assert (traffic.skipped, traffic.steps) == (1, 3)
        masters = [optimizer.state_dict()["state"][index]["master_param"] for index in range(4)]
        results.append([*(p.detach().float() for p in ps), *masters])
    compared = 0
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32))
        compared += mine.numel()
    assert compared == 2 * elements
