"""The model of Top-K decompression against plain Python, and against torch."""

import numpy as np
import pytest
import torch

from nearstep_sim.golden.topk import decompress, widen
from nearstep_spec.updater.compression import PairCause, ValueFormat


def _naive(index, value, pairs, count, group, granule):
    dense, good, before = {}, 0, 0
    cause = PairCause.NONE
    for i, v in zip(index.tolist()[:pairs], value.tolist(), strict=False):
        if i >= count:
            cause = PairCause.RANGE
            break
        if good and i // group < before // group:
            cause = PairCause.ORDER
            break
        dense[i] = v
        good, before = good + 1, i
    else:
        if good < pairs:
            cause = PairCause.TRUNCATED
    emitted = count
    if cause != PairCause.NONE:
        emitted = before // granule * granule if good else 0
    words = [dense.get(i, 0) for i in range(emitted)]
    return words, good - len(dense), cause, good if cause != PairCause.NONE else 0


@pytest.mark.parametrize("seed", range(4))
def test_model_equals_plain_python(seed: int) -> None:
    rng = np.random.default_rng(seed)
    causes = []
    for _ in range(250):
        count, there = int(rng.integers(0, 80)), int(rng.integers(0, 60))
        group = int(rng.choice([1, 4, 16]))
        index = rng.integers(0, max(1, count), there).astype(np.uint32)
        index = index[np.argsort(index // group, kind="stable")]
        if there and rng.random() < 0.5:
            index[rng.integers(there)] = rng.integers(0, 2 * count + 1)
        value = rng.integers(0, 1 << 32, there, dtype=np.uint32)
        pairs = there + int(rng.choice([0, 0, 3, -2])) if there > 2 else there
        shape = {"pairs": pairs, "count": count, "group": group, "granule": 16}
        got = decompress(index, value, **shape)
        words, duplicates, cause, position = _naive(index, value, pairs, count, group, 16)
        assert (got.dense.tolist(), got.duplicates) == (words, duplicates)
        assert (got.cause, got.position) == (cause, position)
        causes.append(cause)
    print(f"seed {seed}: {len(causes)} cases")
    assert set(causes) == set(PairCause)


@pytest.mark.parametrize("form", [ValueFormat.FP16, ValueFormat.BF16])
def test_every_16_bit_value_widens_as_in_torch(form: ValueFormat) -> None:
    kind = torch.float16 if form == ValueFormat.FP16 else torch.bfloat16
    every = np.arange(1 << 16, dtype=np.uint32)
    theirs = torch.from_numpy(every.astype(np.uint16).view(np.int16)).view(kind).float().numpy()
    ours = widen(every, form)
    number = ~np.isnan(theirs)
    assert (ours[number] == theirs.view(np.uint32)[number]).all()
    assert (ours[~number] == 0x7FC0_0000).all()
    assert 100 < np.count_nonzero(~number) < 3000


def test_top_k_of_torch_comes_back() -> None:
    gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(3))
    index = torch.topk(gradient.abs(), 100).indices
    expected = torch.zeros_like(gradient)
    expected[index] = gradient[index]
    value = gradient[index].numpy().view(np.uint32)
    got = decompress(
        index.numpy().astype(np.uint32), value, pairs=100, count=10_000, group=16_384, granule=16
    )
    assert (got.dense == expected.numpy().view(np.uint32)).all()
    assert (got.duplicates, got.cause) == (0, PairCause.NONE)
