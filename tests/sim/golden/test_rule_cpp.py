"""The C++ kernel of a rule: arguments, environment, and what it leaves alone.

That it equals the numpy model is tested for every rule beside the RTL.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nearstep_sim.golden import rule_cpp
from nearstep_sim.golden.rule import ArrayMismatchError, SparseGradient, evaluate
from nearstep_sim.golden.rule_cpp import CXX_FLAGS, BlockKernel, kernel, register_words
from nearstep_spec.rule.adam import ADAM, adam_scalars
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.remainder import crossed
from nearstep_spec.rule.rule import Rule

SCALARS = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.01, 3, True)


def _arrays(count: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {name: rng.random(count, np.float32) for name in "pgmv"}


@pytest.mark.parametrize("count", [0, 1, 7, 15, 16, 17, 31, 33, 1000])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_any_length_and_alignment(count: int, offset: int) -> None:
    backing = _arrays(count + offset + 20)
    arrays = {name: array[offset : offset + count] for name, array in backing.items()}
    expected = evaluate(ADAM, arrays, SCALARS)
    before = {name: array.copy() for name, array in backing.items()}
    kernel(ADAM)(arrays, SCALARS)
    for name in "pmv":
        assert (arrays[name].view(np.uint32) == expected[name].view(np.uint32)).all()
    for name, array in backing.items():
        assert (array[:offset] == before[name][:offset]).all()
        assert (array[offset + count :] == before[name][offset + count :]).all()
    assert (backing["g"] == before["g"]).all()


def test_parts_are_updated_where_they_are_and_nothing_else() -> None:
    backing = _arrays(1000)
    expected = {name: array.copy() for name, array in backing.items()}
    parts, end = [], dict.fromkeys("pgmv", 0)
    for count in (1, 16, 0, 37, 100):
        places = []
        for skip, name in enumerate(ADAM.arrays_in, 1):  # a part begins elsewhere in each array
            first = end[name] + skip
            end[name] = first + count
            places.append((name, first))
        parts.append([count, *(backing[name].ctypes.data + 4 * at for name, at in places)])
        arrays = {name: expected[name][at : at + count] for name, at in places}
        for name, result in evaluate(ADAM, arrays, SCALARS).items():
            arrays[name][:] = result
    kernel(ADAM).in_place(np.array(parts), SCALARS)
    assert all((backing[n].view(np.uint32) == expected[n].view(np.uint32)).all() for n in "pgmv")
    assert len(parts) == 5


def test_subnormals_survive_a_caller_that_flushes_them() -> None:
    arrays = _arrays(64)
    for array in arrays.values():
        array.view(np.uint32)[:] %= 0x0080_0000
    expected = evaluate(ADAM, arrays, SCALARS)
    assert (expected["m"].view(np.uint32) & 0x7F80_0000 == 0).all()
    assert expected["m"].any()
    try:
        torch.set_flush_denormal(True)
        kernel(ADAM)(arrays, SCALARS)
        still = torch.tensor([1e-40]) * torch.tensor([0.5])
    finally:
        torch.set_flush_denormal(False)
    assert still.item() == 0.0
    for name in "pmv":
        assert (arrays[name].view(np.uint32) == expected[name].view(np.uint32)).all()


def test_registers_are_rounded_once_and_in_order() -> None:
    words = register_words(ADAM, SCALARS | {"eps": 1e39, "decoupled": 7, "v_decay": float("nan")})
    named = dict(zip(ADAM.registers(), words.tolist(), strict=True))
    assert named["eps"] == 0x7F80_0000
    assert named["v_decay"] == 0x7FC0_0000
    assert (named["decoupled"], named["m_from_g"]) == (1, 0)


def _read_only(array: NDArray[np.float32]) -> NDArray[np.float32]:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a | {"g": a["g"].astype(np.float64)}, "'g' must be float32"),
        (lambda a: a | {"v": a["v"][:-1]}, r"'v' must be float32 of shape \(32,\)"),
        (lambda a: a | {name: array[::2] for name, array in a.items()}, "must be contiguous"),
        (lambda a: a | {"m": _read_only(a["m"])}, "'m' is written but is read-only"),
        (lambda a: a | {"m": a["v"]}, "overlap in memory"),
        (lambda a: {name: a[name] for name in "pgm"}, "works on p, g, m, v, not p, g, m"),
    ],
    ids=["dtype", "length", "stride", "read-only", "overlap", "missing"],
)
def test_arrays_that_do_not_fit_are_refused_untouched(change: Callable, text: str) -> None:
    arrays = _arrays(32)
    before = {name: array.copy() for name, array in arrays.items()}
    with pytest.raises(ArrayMismatchError, match=text):
        kernel(ADAM)(change(arrays), SCALARS)
    assert all((arrays[name] == before[name]).all() for name in arrays)


def test_read_only_inputs_are_accepted() -> None:
    arrays = _arrays(32)
    expected = evaluate(ADAM, arrays, SCALARS)
    kernel(ADAM)(arrays | {"g": _read_only(arrays["g"])}, SCALARS)
    assert (arrays["p"] == expected["p"]).all()


def test_blocks_are_counted_through_and_any_part_of_them_can_be_run() -> None:
    """Elements outside of the part, and blocks without elements, are left alone."""
    seed = 17
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    words, ran = register_words(ADAM, SCALARS), 0
    for _ in range(100):
        counts = rng.choice([0, 1, 33, 256, 300, 700], rng.integers(1, 7)).tolist()
        ends = np.cumsum([-(-count // 256) * 256 for count in counts])
        begin, end = (256 * sorted(rng.integers(0, ends[-1] // 256 + 1, 2))[k] for k in (0, 1))
        blocks = [_arrays(count, seed=index) for index, count in enumerate(counts)]
        expected = [{name: array.copy() for name, array in each.items()} for each in blocks]
        for each, stop, count in zip(expected, ends, counts, strict=True):
            first = stop + -count // 256 * 256
            part = slice(max(0, begin - first), max(0, min(count, end - first)))
            kernel(ADAM)({name: array[part] for name, array in each.items()}, SCALARS)
            ran += each["p"][part].size
        addresses = [[b[name].ctypes.data for name in "pgmv"] for b in blocks]
        heads = [[stop, count, 0] for stop, count in zip(ends, counts, strict=True)]
        rows = np.concatenate([np.array(heads, np.uint64), np.array(addresses, np.uint64)], 1)
        BlockKernel(ADAM, Columns()).on(words, rows)(int(begin), int(end))()
        for mine, other in zip(blocks, expected, strict=True):
            for name in "pgmv":
                assert (mine[name].view(np.uint32) == other[name].view(np.uint32)).all()
    assert ran > 1000


@pytest.mark.parametrize("count", [0, 1, 33, 8191, 8192, 8193, 20_000])
@pytest.mark.parametrize("pairs", [0, 1, 300])
def test_pairs_are_a_gradient_that_is_zero_elsewhere(count: int, pairs: int) -> None:
    """Of equal positions the last counts; every bit of a value arrives, that of a NaN, too."""
    rng = np.random.default_rng(count + pairs)
    arrays = _arrays(count)
    index = np.sort(rng.integers(0, max(1, count), pairs if count else 0)).astype(np.uint32)
    if index.size == 300:
        index[:2], index[-1] = 0, count - 1
    value = rng.integers(0, 1 << 32, index.size, dtype=np.uint32)
    dense = np.zeros(count, np.uint32)
    for position, word in zip(index, value, strict=True):
        dense[position] = word
    expected = evaluate(ADAM, arrays | {"g": dense.view(np.float32)}, SCALARS)
    del arrays["g"]
    kernel(ADAM).of_pairs(arrays, SCALARS, SparseGradient(index, value))
    for name in "pmv":
        assert (arrays[name].view(np.uint32) == expected[name].view(np.uint32)).all()


@pytest.mark.parametrize(
    ("index", "size", "text"),
    [
        ([3, 32], 2, "index 1 must be below 32 and not below the one before, not 32"),
        ([8200, 5], 2, "index 0 must be below 32"),
        ([3], 2, r"value must be uint32 of shape \(1,\)"),
    ],
    ids=["range", "first", "shape"],
)
def test_pairs_that_do_not_fit_are_refused(index: list[int], size: int, text: str) -> None:
    arrays = {name: array for name, array in _arrays(32).items() if name != "g"}
    value = np.zeros(size, np.uint32)
    gradient = SparseGradient(np.array(index, np.uint32), value)
    with pytest.raises(ArrayMismatchError, match=text):
        kernel(ADAM).of_pairs(arrays, SCALARS, gradient)
    gradient = SparseGradient(value[:0], value[:0])
    with pytest.raises(ArrayMismatchError, match="works on p, m, v, not p, m"):
        kernel(ADAM).of_pairs({n: arrays[n] for n in "pm"}, SCALARS, gradient)


def test_arrays_may_be_called_like_anything_in_the_source() -> None:
    def define(i, x0, count, registers, environment, *, float_, sign):
        return {"int": i + x0 * float_, "i": count / registers, "count": -environment + sign}

    rule = Rule(
        "names",
        define,
        states=("i", "count"),
        inputs=("x0", "registers", "environment"),
        outputs=("int",),
        scalars=("float_", "sign"),
    )
    rng = np.random.default_rng(0)
    arrays = {name: rng.random(50, np.float32) for name in rule.arrays_in}
    scalars = {"float_": 0.1, "sign": 3.0}
    expected = evaluate(rule, arrays, scalars)
    arrays["int"] = np.zeros(50, np.float32)
    kernel(rule)(arrays, scalars)
    assert all((arrays[name] == expected[name]).all() for name in rule.arrays_out)


COLUMNS = {
    "fp32": Columns(),
    "bf16": Columns(tuple((name, "bf16") for name in "pgmv")),
    "stochastic": Columns(tuple((name, "bf16") for name in "pgmv"), (("p", 1), ("m", 2), ("v", 3))),
    "8 bits": Columns((("m", "dynamic8"), ("v", "dynamic8u"))),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_instruction_sets_and_cuts_change_no_bit_of_blocks(name, monkeypatch):
    columns, scalars = COLUMNS[name], adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.01, 10, True)
    remainder = crossed(ADAM) if columns.uniform(ADAM) else None
    words = np.concatenate([register_words(ADAM, scalars), np.array([9, 10], np.uint32)])
    sizes = (1000, 7, 0, 263)
    found = []
    for flags in (("-O3",), ("-O3", "-march=x86-64-v3"), ("-O0",)):
        rng = np.random.default_rng(5)
        monkeypatch.setattr(rule_cpp, "CXX_FLAGS", (*CXX_FLAGS, *flags))
        kernel, arrays, rows, end = BlockKernel(ADAM, columns, remainder), [], [], 0
        for size in sizes:
            row = []
            for array, scales in columns.parts(ADAM.arrays_in):
                values = np.abs(rng.standard_normal(size, np.float32))
                made = {
                    "fp32": values,
                    "bf16": (values.view(np.uint32) >> 16).astype(np.uint16),
                    "dynamic8": rng.integers(0, 256, size, np.uint8),
                    "dynamic8u": rng.integers(0, 256, size, np.uint8),
                }[columns.format_of(array)]
                row.append(np.ones(-(-size // 256), np.float32) if scales else made)
            end += -(-size // 256) * 256
            rows.append([end, size, 32 * len(rows), *(each.ctypes.data for each in row)])
            arrays += row
        run = kernel.on(words, np.array(rows, np.uint64))
        cuts = (0, end) if len(flags) == 2 else (0, 256, 768, end)
        for first, stop in pairwise(cuts):
            run(first, stop)()
        found.append([each.tobytes() for each in arrays])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == len(sizes) * len(columns.parts(ADAM.arrays_in))
