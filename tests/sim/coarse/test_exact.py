"""`sim:coarse?exact=`: exact sums in RTL have the bits of golden devices and of integers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import JobRefusedError
from nearstep.coarse.pool import OPERATIONS, WIRES
from nearstep.coarse.rings import Addends, Pending
from nearstep.coarse.split import Part
from nearstep.errors import OptionError
from nearstep_sim.coarse.pool_values import SMALL_MEMORY, SMALLEST, compare, draw, reduced

from ...oracle.exact_sums import exact_sum
from .small_pool import random

pytestmark = pytest.mark.deep

SHAPE = f"{SMALLEST.partition('&')[2]}&{SMALL_MEMORY}&exact=fp32,fp16,bf16"
WOVEN = SHAPE.replace("alus=4", "alus=8").replace("buffer_entries=4", "buffer_entries=8")
"""With room for the rounds of different chunks at once, and beats of several phits."""
LISTED = {"stall": 0.3, "link_latency": 30, "drop": 0.03, "corrupt": 0.03, "reorder": 0.03}
FEW = 40  # elements that Python's integers sum
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 1e-40, 3e38, -3e38], np.float32)


def opened(kind: str, devices: int, shape: str = SHAPE, **options: object) -> CoarsePool:
    text = "".join(f"&{name}={value}" for name, value in options.items())
    pool = CoarsePool.open(f"{kind}:coarse?devices={devices}&{shape}{text}")
    for node in pool.device.nodes:
        node.pool.retry.value = 512
        node.pool.keepalive.value = 128
    return pool


@pytest.fixture(params=[(2, SHAPE), (3, SHAPE), (4, SHAPE), (3, WOVEN), (4, WOVEN)])
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[CoarsePool, CoarsePool]]:
    with opened("sim", *request.param) as sim, opened("golden", request.param[0]) as golden:
        yield sim, golden


def addends(pool: CoarsePool, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Of near and far magnitudes, that cancel, and specials."""
    arrays = draw(pool, size, rng)
    for each in arrays:
        with np.errstate(all="ignore"):
            each *= np.ldexp(np.float32(1), rng.choice([0, 0, -20, 20, -120, 100], size))
        some = rng.random(size) < 0.15
        each[some] = rng.choice(SPECIAL, int(some.sum()))
    turned = rng.random(size) < 0.2
    arrays[-1][turned] = -arrays[0][turned]
    for row in arrays:
        row[: SPECIAL.size] = SPECIAL
    return arrays


def both(sim: CoarsePool, golden: CoarsePool, size: int, rng: np.random.Generator) -> int:
    """Every operation and format; the number of elements compared."""
    compared = 0
    for wire in ("bf16", "fp16", "fp32"):
        for op, divisor in (("sum", 1), ("average", sim.devices)):
            arrays = addends(sim, size, rng)
            found, expected = sim.tensor(arrays), golden.tensor(arrays)
            for pool, tensor in ((sim, found), (golden, expected)):
                pool.all_reduce(tensor, op, wire, exact=True)
            compared += compare(found, expected.read(0))
            for i in range(min(FEW, size)):
                column = [int(each.view(np.uint32)[i]) for each in arrays]
                assert found.read(0).view(np.uint32)[i] == exact_sum(column, wire, divisor)
    return compared


def test_bits_are_those_of_golden_devices_and_of_integers(pools) -> None:
    rng = random(91)
    sizes = (17, 130, 1501)
    compared = sum(both(*pools, size, rng) for size in sizes)
    assert compared == 6 * pools[0].devices * sum(sizes)


def test_sums_in_the_order_of_the_ring_are_as_before(pools) -> None:
    sim, _ = pools
    rng, compared = random(92), 0
    for op, wire in (("sum", "bf16"), ("average", "fp16"), ("max", "fp32")):
        sim.all_reduce(sim.tensor(draw(sim, 40, rng)), wire=wire, exact=True)
        arrays = draw(sim, 700, rng)
        tensor = sim.tensor(arrays)
        sim.all_reduce(tensor, op, wire)
        compared += compare(tensor, reduced(sim, arrays, op, wire))
    assert compared == 3 * 700 * sim.devices


@pytest.mark.parametrize("shape", [SHAPE, WOVEN], ids=["batches", "woven"])
@pytest.mark.parametrize("devices", [2, 4])
def test_bits_are_the_same_on_bad_links_and_slow_memories(devices: int, shape: str) -> None:
    rng = random(93)
    options = {**LISTED, "seed": 5}
    with opened("sim", devices, shape, **options) as sim, opened("golden", devices) as golden:
        compared = both(sim, golden, 900, rng)
        replays = sum(link.replays for d in sim.counters().devices for link in d.links)
    assert compared == 6 * 900 * devices
    assert replays > 0


@pytest.mark.parametrize(
    ("devices", "addends"),
    [
        (2, Addends(2, 64)),  # two arrays of a device
        (2, Addends(1, 0, 1025)),
        (8, Addends()),  # lists of seven addends do not fit into buffers of four entries
    ],
    ids=str,
)
def test_sums_that_the_rtl_does_not_have_are_refused(devices: int, addends: Addends) -> None:
    with opened("sim", devices) as pool:
        tensor = pool.tensor(draw(pool, 16, random(94)))
        before = tensor.read(0)
        job = pool.rings.make_job(
            Part(group=0, start=0, stop=16),
            OPERATIONS["sum"],
            WIRES["bf16"],
            [tensor.front(device).address for device in range(devices)],
            [tensor.back(device).address for device in range(devices)],
            addends=addends,
        )
        pending = Pending(pool.rings, [job])
        pool.rings.begin(pending)
        for device in range(devices):
            pool.rings.push(job, device)
        with pytest.raises(JobRefusedError):
            pending.wait()
        pool.reset()
        assert (tensor.read(0) == before).all()


def test_one_device_has_no_ring() -> None:
    with pytest.raises(OptionError, match="devices must lie in"):
        opened("sim", 1)
