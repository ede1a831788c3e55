# amaranth: UnusedElaboratable=no
"""States in 8 bits to binary32 and back, in RTL, against the golden model."""

from dataclasses import replace

import numpy as np
import pytest

from nearstep_hw.updater.blockwise.dequantize import Dequantize
from nearstep_hw.updater.blockwise.quantize import Quantize
from nearstep_hw.updater.blockwise.shape import BlockwiseShape
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden.blockwise import GROUP, dequantize, dynamic_map, quantize

BEATS_WIDTH = 20
NAN = 0x7FC0_0000


def shape_of(lanes: int, ways: int, elements: int, signed: bool) -> BlockwiseShape:
    return BlockwiseShape(lanes=lanes, ways=ways, block_elements=elements, signed=signed)


MAPS = [shape_of(4, 2, 512, signed) for signed in (True, False)]
DEEP = [
    shape_of(1, 1, 256, True),
    shape_of(2, 2, 512, False),
    shape_of(8, 1, 2048, True),
    shape_of(16, 4, 4096, False),
    shape_of(16, 16, 256, True),
    shape_of(16, 16, 4096, True),
    shape_of(16, 16, 4096, False),
]


def shapes(*, signed: bool) -> list[object]:
    """All, of which the one with this map is quick."""
    return [
        pytest.param(
            shape,
            id=f"{shape.lanes}-{shape.ways}-{shape.block_elements}-{shape.signed}",
            marks=[] if shape == MAPS[not signed] else [pytest.mark.deep],
        )
        for shape in (*MAPS, *DEEP)
    ]


def bench_of(kind: type, shape: BlockwiseShape) -> StreamBench:
    widths = {"beats_width": BEATS_WIDTH} if kind is Quantize else {}
    return StreamBench(kind(shape, **widths), name=kind.__name__.lower(), key=f"{shape}")


@pytest.fixture(scope="module", params=shapes(signed=True))
def quantizer(request):
    bench = bench_of(Quantize, request.param)
    yield bench, request.param
    bench.close()


@pytest.fixture(scope="module", params=shapes(signed=False))
def dequantizer(request):
    bench = bench_of(Dequantize, request.param)
    yield bench, request.param
    bench.close()


def hard(seed: int, count: int) -> np.ndarray:
    """Binary32 numbers in groups of every kind."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    groups = -(-count // GROUP)
    sizes = 10.0 ** rng.integers(-12, 3, (groups, GROUP))
    rows = (rng.standard_normal((groups, GROUP)) * sizes).astype(np.float32)
    rows[::2] = rng.standard_normal(rows[::2].shape)
    middles = dynamic_map(True).astype(np.float64)
    for number, row in enumerate(rows):
        match (number + seed) % 16:
            case 1:
                row[:] = 0
            case 3:
                row[:] = np.float32(-0.0)
            case 5:
                row[:] = rng.uniform(-3.4e38, 3.4e38, GROUP)
            case 7:
                row[rng.integers(GROUP)] = np.inf
            case 9:
                row[rng.integers(GROUP)] = -np.inf
            case 11:
                row.view(np.uint32)[rng.integers(GROUP)] = 0xFF80_0001
            case 13:
                row[:255], row[255] = (middles[:-1] + middles[1:]) / 2, 1
            case 15:
                row.view(np.uint32)[:] &= 0x807F_FFFF  # subnormal
    return rows.reshape(-1)[:count]


def packed(shape: BlockwiseShape, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes of blocks, whole beats."""
    beats, groups = [], shape.block_elements // GROUP
    for number in range(-(-codes.size // shape.block_elements)):
        header = np.zeros(shape.lanes, np.float32)
        own = scales[number * groups :][:groups]
        header[: own.size] = own
        part = codes[number * shape.block_elements :][: shape.block_elements]
        padding = -part.size % (4 * shape.lanes)
        beats += [header.tobytes(), part.tobytes(), bytes(padding)]
    return np.frombuffer(b"".join(beats), np.uint8)


def golden(shape: BlockwiseShape, values: np.ndarray) -> np.ndarray:
    codes, scales = quantize(values, signed=shape.signed)
    scales = np.where(np.isnan(scales), np.uint32(NAN).view(np.float32), scales)
    return packed(shape, codes, scales)


def counts(shape: BlockwiseShape) -> list[int]:
    """Elements of runs: of beats, groups and blocks that are whole and that are not."""
    block, beat = shape.block_elements, 4 * shape.lanes
    return [1, 255, 256, 257, beat + 1, block, 2 * block + 3, 3 * block + 259]


def clear(bench: StreamBench, inputs: dict[str, int]) -> None:
    bench.run({"i": np.zeros((0, 1), np.uint32)}, {**inputs, "i_clear": 1}, space=0, quiet=3)


def quantized(quantizer, values: np.ndarray, **options):
    """The run, and its bytes up to the last code."""
    bench, shape = quantizer
    lanes = shape.lanes
    rest = -values.size % lanes
    noise = np.full(rest, 0x7F80_0000, np.uint32)  # behind the last element: not to be looked at
    given = np.concatenate([values.view(np.uint32), noise]).reshape(-1, lanes)
    inputs = {
        "i_beats": len(given),
        "i_tail": (1 << (lanes - rest)) - 1,
        "i_clear": 0,
    }
    clear(bench, inputs)
    run = bench.run({"i": given}, inputs, space=len(given) + 8, quiet=4 * GROUP, **options)
    return run, run.streams["o"].astype(np.uint32).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("stalls", STALLS)
def test_blocks_have_the_golden_models_scales_and_codes(quantizer, stalls):
    checks = 0
    for number, count in enumerate(counts(quantizer[1])):
        values = hard(30 + number, count)
        _, made = quantized(quantizer, values, stalls=STALLS[stalls], seed=number)
        expected = golden(quantizer[1], values)
        assert made.size == expected.size
        used = expected.size - (-count % quantizer[1].block_elements) % (4 * quantizer[1].lanes)
        np.testing.assert_array_equal(made[:used], expected[:used])
        checks += used
    assert checks > sum(counts(quantizer[1]))


def test_every_element_of_many_groups(quantizer):
    shape = quantizer[1]
    values = hard(40, 64 * max(shape.block_elements, 1024))
    _, made = quantized(quantizer, values)
    np.testing.assert_array_equal(made, golden(shape, values))
    assert made.size == values.size + values.size // shape.block_elements * 4 * shape.lanes


def test_nothing_is_lost_where_hardly_anything_is_taken(quantizer):
    shape = quantizer[1]
    values = hard(44, 12 * shape.block_elements)
    _, made = quantized(quantizer, values, stalls=(0.0, 0.97), seed=44)
    np.testing.assert_array_equal(made, golden(shape, values))
    assert made.size > values.size


def test_elements_are_taken_and_given_without_a_pause(quantizer):
    bench, shape = quantizer
    values = hard(41, 16 * shape.block_elements)
    run, _ = quantized(quantizer, values)
    took = run.last["i"] - run.first["i"] + 1
    assert took <= values.size // shape.ways + 8
    assert (
        run.cycles <= took + 2 * shape.block_elements // shape.ways + 100 + bench.component.latency
    )


@pytest.mark.parametrize("stalls", STALLS)
def test_numbers_are_the_golden_models(dequantizer, stalls):
    bench, shape = dequantizer
    print("seed 50")
    rng = np.random.default_rng(50)
    checks = 0
    for number, count in enumerate(counts(shape)):
        codes = rng.integers(0, 256, count, dtype=np.uint8)
        scales = hard(60 + number, -(-count // GROUP))
        scales[rng.random(scales.size) < 0.1] = np.float32(np.nan)
        given = packed(shape, codes, scales).view(np.uint32).reshape(-1, shape.lanes)
        clear(bench, {})
        run = bench.run(
            {"i": given}, {"i_clear": 0}, space=4 * len(given), stalls=STALLS[stalls], seed=number
        )
        made = run.streams["o"].astype(np.uint32).reshape(-1)
        numbers = dequantize(quantize(np.zeros(0, np.float32), signed=shape.signed)._replace(
            codes=codes, scales=scales
        ), signed=shape.signed)  # fmt: skip
        expected = np.where(np.isnan(numbers), np.uint32(NAN), numbers.view(np.uint32))
        np.testing.assert_array_equal(made[:count], expected)
        checks += count
    assert checks == sum(counts(shape))


def test_every_code_with_many_scales(dequantizer):
    bench, shape = dequantizer
    groups = 64 * max(shape.block_elements, 1024) // GROUP
    codes = np.tile(np.arange(256, dtype=np.uint8), groups)
    scales = hard(51, groups)
    given = packed(shape, codes, scales).view(np.uint32).reshape(-1, shape.lanes)
    clear(bench, {})
    run = bench.run({"i": given}, {"i_clear": 0}, space=4 * len(given))
    with np.errstate(all="ignore"):
        numbers = (dynamic_map(shape.signed)[None] * scales[:, None]).reshape(-1)
    expected = np.where(np.isnan(numbers), np.uint32(NAN), numbers.view(np.uint32))
    np.testing.assert_array_equal(run.streams["o"].reshape(-1), expected)
    assert expected.size == 256 * groups
    blocks = codes.size // shape.block_elements
    assert run.cycles <= codes.size // shape.ways + blocks + bench.component.latency + 4


def test_a_run_that_was_cut_short_leaves_nothing(quantizer):
    values = hard(42, 300)
    bench, shape = quantizer
    rows = hard(43, 4 * GROUP).view(np.uint32).reshape(-1, shape.lanes)
    inputs = {"i_beats": 10 * len(rows), "i_tail": 0, "i_clear": 0}
    clear(bench, inputs)
    bench.run({"i": rows[:-1]}, inputs, space=4 * len(rows))
    _, made = quantized(quantizer, values)
    used = 300 + 4 * shape.lanes * -(-300 // shape.block_elements)
    np.testing.assert_array_equal(made[:used], golden(shape, values)[:used])


@pytest.mark.deep
@pytest.mark.parametrize("kind", [Quantize, Dequantize])
def test_pipelines_of_slower_fpgas_give_the_same(kind):
    shape = replace(shape_of(4, 2, 512, True), technology="ecp5")
    bench = bench_of(kind, shape)
    try:
        if kind is Quantize:
            test_every_element_of_many_groups((bench, shape))
        else:
            test_every_code_with_many_scales((bench, shape))
    finally:
        bench.close()
