"""Gradients of a user's decompressor: what a step computes is torch's step of what was sent."""

from pathlib import Path

import numpy as np
import pytest
import torch

import nearstep
from nearstep.errors import ArgumentError, PairRangeError
from nearstep.torch.compression import Compression
from nearstep.torch.errors import HyperparameterError, UnsupportedOptionError
from nearstep_spec.updater.decompressor import DecompressorError, load

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TERNARY = f"{EXAMPLES / 'ternary.py'}:TERNARY"
CARDS = f"golden:smartssd?cards=2&chunk_bytes=512&memory_bytes=1MiB&compression={TERNARY}"
SIM = f"sim:smartssd?cards=2&lanes=4&chunk_bytes=512&memory_bytes=4MiB&compression={TERNARY}"
DEVICES = {
    "two-cards": CARDS,
    "numpy": f"{CARDS.replace('cards=2', 'cards=1')}&engine=numpy",
    "dimm": f"golden:axdimm?block_bytes=512&channels=2&memory_bytes=2MiB"
    f"&gradient_formats=fp32,fp16&compression={TERNARY}",
}
SIZES = (3000, 37, 16, 1)
SEED, STEPS, SHARE = 4711, 3, 0.25
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
OPTIONS = {"compression": SHARE, "compression_form": TERNARY}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED + 1 + step)
    return [torch.randn(size, generator=generator) for size in SIZES]


def train(device: nearstep.Device, **options: object) -> torch.Tensor:
    given = parameters()
    optimizer = nearstep.optim.AdamW(given, device=device, **ADAMW, **OPTIONS, **options)
    for step in range(STEPS):
        for each, gradient in zip(given, gradients(step), strict=True):
            each.grad = gradient
        optimizer.step()
    return torch.cat([each.detach() for each in given])


def oracle(*, format: str = "fp32", feedback: bool = True) -> torch.Tensor:
    """torch's fused AdamW, given what the user's functions make of each gradient by themselves."""
    user, given = load(TERNARY), parameters()
    rest = [np.zeros(size, np.float32) for size in SIZES]
    optimizer = torch.optim.AdamW(given, fused=True, **ADAMW)
    kind = {"fp32": np.float32, "fp16": np.float16}[format]
    for step in range(STEPS):
        for k, (each, gradient) in enumerate(zip(given, gradients(step), strict=True)):
            wanted = gradient.numpy() + rest[k]
            words, values = user.compress(wanted, SHARE)
            rounded = values.astype(kind).astype(np.float32)
            sent = user.decompress(words, rounded.view(np.uint32), wanted.size).view(np.float32)
            rest[k] = wanted - sent if feedback else rest[k]
            each.grad = torch.from_numpy(sent.copy())
        optimizer.step()
    return torch.cat([each.detach() for each in given])


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().view(np.uint32)


@pytest.mark.parametrize("url", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("format", "feedback"), [("fp32", True), ("fp16", True), ("fp32", False)])
def test_a_device_steps_as_torch_does_with_what_was_sent(url, format, feedback) -> None:
    with nearstep.open(url) as device:
        found = train(device, compression_format=format, error_feedback=feedback)
    expected = oracle(format=format, feedback=feedback)
    differing = int(np.count_nonzero(bits(found) != bits(expected)))
    print(f"seed {SEED}: {found.numel()} parameters, {differing} differ")
    assert (found.numel(), differing) == (sum(SIZES), 0)
    assert np.count_nonzero(bits(found) != bits(torch.cat([*parameters()]).detach())) > 3000


@pytest.mark.deep
@pytest.mark.parametrize("more", ["", "&fu=native&stall=0.3&seed=7"], ids=["rtl", "stalled"])
@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_simulated_cards_have_the_bits_of_golden_ones(more: str, format: str) -> None:
    found = []
    for url in (CARDS, SIM + more):
        with nearstep.open(url) as device:
            found.append(train(device, compression_format=format))
    assert found[0].numel() == sum(SIZES)
    assert (bits(found[0]) == bits(found[1])).all()


@pytest.mark.deep
def test_simulated_cards_with_drives_have_the_same_bits(tmp_path: Path) -> None:
    with nearstep.open(f"{SIM}&fu=native&subgroup_elements=512&drive={tmp_path}") as device:
        found = train(device)
    assert (bits(found) == bits(oracle())).all()


def test_cards_with_drives_have_the_same_bits(tmp_path: Path) -> None:
    with nearstep.open(f"{CARDS}&subgroup_elements=512&drive={tmp_path}") as device:
        found = train(device)
    assert (bits(found) == bits(oracle())).all()


def test_an_eighth_of_the_bytes_goes_down() -> None:
    with nearstep.open(CARDS) as device:
        given = [torch.nn.Parameter(torch.randn(4096))]
        optimizer = nearstep.optim.AdamW(given, device=device, **OPTIONS)
        given[0].grad = torch.randn(4096)
        optimizer.step()
        assert (optimizer.traffic.gradients_down, optimizer.traffic.pairs) == (2048, 256)


@pytest.mark.parametrize("url", [CARDS, pytest.param(SIM, marks=pytest.mark.deep)])
def test_a_wrong_record_stops_a_run_before_anything_is_written(url: str) -> None:
    with nearstep.open(url) as device:
        p, m, v = (device.alloc(100, channel=1) for _ in "pmv")
        words, values = device.alloc(7, np.uint32, channel=1), device.alloc(7, channel=1)
        filled = {p: 0.5, m: 0.0, v: 0.0, values: 0.5}
        for buffer, value in filled.items():
            buffer.fill(value)
        arrays = {"p": p, "m": m, "v": v, "g": nearstep.Pairs(words, values, TERNARY)}
        bad = np.array([1, 3, 4, 2, 1, 1, 1], np.uint32)
        words.write(bad)
        with pytest.raises(PairRangeError) as error:
            device.update("adam", arrays, step=1).wait()
        assert error.value.position == 3
        assert all((buffer.read() == value).all() for buffer, value in filled.items())
        bad[3] = 0
        words.write(bad)
        run = device.update("adam", arrays, step=1).wait()
        lanes = device.config.lanes
        arrays_read, words_read = -(-100 // lanes), -(-7 // lanes)
        # Words are read twice: looked at first.
        assert run.counters["read_beats"] == 3 * arrays_read + 3 * words_read
        assert run.duplicates == 0
        assert np.flatnonzero(p.read() != 0.5).tolist() == [0, 16, 33, 64, 80, 96]
        with pytest.raises(ArgumentError, match="form of pairs must be a form of the kernel"):
            device.update("adam", arrays | {"g": nearstep.Pairs(words, values)}, step=1)


@pytest.mark.deep
def test_records_that_nobody_needs_are_read_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "any.py"
    path.write_text((EXAMPLES / "ternary.py").read_text().replace("wrong=wrong", "wrong=None"))
    name, shape = f"{path}:TERNARY", "lanes=2&block_bytes=512&memory_bytes=1MiB"
    rng, results = np.random.default_rng(SEED), []
    words = rng.integers(0, 1 << 32, 900, dtype=np.uint32)
    values = rng.standard_normal(900).astype(np.float32)
    for device_name in (f"golden:axdimm?engine=numpy&{shape}", f"sim:axdimm?{shape}&stall=0.3"):
        with nearstep.open(f"{device_name}&compression={name}") as device:
            for count, records in ((100, 900), (2000, 3), (2000, 0), (1, 900), (2000, 125)):
                p, m, v = (device.alloc(count) for _ in "pmv")
                for buffer in (p, m, v):
                    buffer.fill(0.5)
                word, value = device.alloc(records, np.uint32), device.alloc(records)
                word.write(words[:records])
                value.write(values[:records])
                arrays = {"p": p, "m": m, "v": v, "g": nearstep.Pairs(word, value, name)}
                run = device.update("adam", arrays, step=1).wait()
                found = [buffer.read().view(np.uint32).tolist() for buffer in (p, m, v)]
                beats = [run.counters[each] for each in ("read_beats", "write_beats")]
                results.append((count, records, beats, found))
    assert len(results) == 10
    for golden, simulated in zip(results[:5], results[5:], strict=True):
        print(*golden[:3], simulated[2], golden[3] == simulated[3])
    assert results[:5] == results[5:]


def test_what_a_device_cannot_do_is_refused(tmp_path: Path) -> None:
    given = parameters()
    with pytest.raises(UnsupportedOptionError, match=r"open the device with compression=.*TERNARY"):
        nearstep.optim.AdamW(given, device="golden:smartssd", **OPTIONS)
    with pytest.raises(UnsupportedOptionError, match="norm of values in memory"):
        nearstep.optim.AdamW(given, device=CARDS, max_grad_norm=1.0, **OPTIONS)
    with pytest.raises(HyperparameterError, match=r"compression_form.*there is no such file"):
        nearstep.optim.AdamW(given, device=CARDS, compression=0.1, compression_form="no.py:NONE")
    path = tmp_path / "mine.py"
    path.write_bytes((EXAMPLES / "ternary.py").read_bytes())
    mine = f"{path}:TERNARY"
    with nearstep.open(CARDS.replace(TERNARY, mine)) as device:
        path.write_text(path.read_text() + "# another\n")
        with pytest.raises(UnsupportedOptionError, match="file has changed since the device was"):
            nearstep.optim.AdamW(given, device=device, compression=1.0, compression_form=mine)


def test_a_compressor_that_loses_what_it_sent_is_told(tmp_path: Path) -> None:
    text = (EXAMPLES / "ternary.py").read_text()
    path = tmp_path / "lossy.py"
    path.write_text(text.replace("np.maximum(sent.sum(axis=1), 1)", "16"))
    compression = Compression(share=0.25, form=f"{path}:TERNARY")
    made = compression.compress(np.ones(32, np.float32), None)
    with pytest.raises(DecompressorError, match="element 0 of 32 was 0x3e800000 and became 0x3d8"):
        compression.records(made.index.astype(np.uint32), made.value, 32)


def test_lion_trains_on_an_array_of_cards() -> None:
    lion = f"{EXAMPLES / 'lion.py'}:LION"
    inputs, targets = torch.randn(64, 20), torch.randn(64, 5)
    found, losses = [], []
    for url in ("golden:smartssd?cards=2&chunk_bytes=512", "golden:axdimm?channels=1"):
        torch.manual_seed(SEED)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 5)
        )
        with nearstep.open(f"{url}&engine=numpy&memory_bytes=1MiB&rules={lion}") as device:
            optimizer = nearstep.optim.from_rule(lion, model.parameters(), lr=1e-2, device=device)
            for _ in range(20):
                optimizer.zero_grad()
                loss = (model(inputs) - targets).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            moments = [optimizer.state[p]["exp_avg"].detach() for p in model.parameters()]
        found.append(
            torch.cat([each.detach().flatten() for each in [*model.parameters(), *moments]])
        )
    print(f"seed {SEED}: {found[0].numel()} words, loss {losses[0]:.3f} to {losses[19]:.3f}")
    assert found[0].numel() == 2 * (20 * 50 + 50 + 50 * 5 + 5)
    assert (bits(found[0]) == bits(found[1])).all()
    assert losses[19] < 0.8 * losses[0]
