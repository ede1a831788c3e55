"""The host's driver, unchanged, on a ring of memory devices; all is compared bit for bit."""

import json
import os
from collections.abc import Callable

import cocotb
import numpy as np
import pytest
from cocotb.task import bridge

from nearstep.coarse import CoarsePool
from nearstep.coarse.device import CoarseDevice
from nearstep.coarse.errors import JobRefusedError
from nearstep.device import drive
from nearstep.errors import BusError
from nearstep_sim.coarse.cocotb_pool import GUARD, STALLS, CocotbPoolBackend
from nearstep_sim.coarse.pool_values import compare, draw, reduced
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.csr.model import BLOCK_BYTES

OPTIONS = json.loads(os.environ["NEARSTEP_CONFIG"])
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
DEVICES = int(os.environ["NEARSTEP_DEVICES"])
CONFIG = CoarseConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in OPTIONS.items()})
CHANNELS = ("ar", "r", "aw", "w", "b")


class PoolBench:
    """A pool on the ring, random numbers, and how many checks were made."""

    def __init__(self, pool: CoarsePool, backend: CocotbPoolBackend) -> None:
        self.pool = pool
        self.backend = backend
        self.random = np.random.default_rng(SEED)
        self.checks = 0

    def reduce(self, elements: int, op: str, wire: str, group: int | None = None) -> None:
        arrays = draw(self.pool, elements, self.random)
        tensor = self.pool.tensor(arrays)
        self.pool.all_reduce(tensor, op, wire, group=group)
        self.checks += compare(tensor, reduced(self.pool, arrays, op, wire, group))
        tensor.free()

    def guarded(self) -> None:
        """Nothing was written behind what was given out."""
        for device, memory in enumerate(self.backend.memory):
            used = CONFIG.memory_bytes - self.pool.device.free_bytes // self.pool.devices
            assert used < CONFIG.memory_bytes // 2, device
            assert (memory[-CONFIG.memory_bytes // 4 :] == GUARD).all()
            self.checks += CONFIG.memory_bytes // 4


async def on_ring(
    dut: object, name: str, job: Callable[[PoolBench], None], mode: str = "free"
) -> None:
    """Run `job` in a bridged thread; say how many checks were made."""
    backend = CocotbPoolBackend(dut, CONFIG, devices=DEVICES, mode=mode, seed=SEED)
    await backend.begin()

    def opened() -> int:
        device = drive(backend, "cocotb:coarse")
        assert isinstance(device, CoarseDevice)
        with CoarsePool(device) as pool:
            bench = PoolBench(pool, backend)
            job(bench)
            bench.guarded()
            return bench.checks

    checks = await bridge(opened)()
    for checker in backend.checkers:
        checker.finish()
        assert all(checker.transfers[channel] for channel in CHANNELS), checker.transfers
        checks += sum(checker.transfers.values())
    cocotb.log.info("%s_%s: %d checks, %d cycles", name, mode, checks, backend.cycles)


@cocotb.test()
@cocotb.parametrize(mode=list(STALLS))
async def reductions_are_those_of_the_golden_ring(dut: object, mode: str) -> None:
    """Each operation and wire; one tensor on both rings, on one of them, and several in flight."""

    def job(bench: PoolBench) -> None:
        chunk = DEVICES * CONFIG.entry_elements("fp32")
        bench.reduce(max(500, 2 * chunk + 17), "sum", "fp32")
        bench.reduce(333, "average", "fp16")
        bench.reduce(64, "max", "fp32", group=bench.pool.groups - 1)
        bench.reduce(1, "average", "fp16", group=0)
        arrays = [draw(bench.pool, size, bench.random) for size in (200, 0, 90)]
        tensors = [bench.pool.tensor(each) for each in arrays]
        bench.pool.all_reduce(tensors, "max", "fp16")
        for number, (tensor, values) in enumerate(zip(tensors, arrays, strict=True)):
            group = number % bench.pool.groups
            bench.checks += compare(tensor, reduced(bench.pool, values, "max", "fp16", group))

    await on_ring(dut, "reductions", job, mode)


@cocotb.test()
@cocotb.parametrize(mode=["free", "both"])
async def a_snapshot_and_the_host_while_jobs_run(dut: object, mode: str) -> None:
    """Frozen values stay; loads and stores of any size pass jobs and copies of pages.

    They start on beats, as the port's bursts do; the harness of `sim:coarse` aligns others itself.
    """

    def job(bench: PoolBench) -> None:
        pool, rng = bench.pool, bench.random
        arrays = draw(pool, 700, rng)
        tensor = pool.tensor(arrays)
        area = pool.device.alloc(3000, np.uint8, channel=1)
        mirror = rng.integers(0, 256, 3000, np.uint8)
        area.write(mirror)
        values = arrays
        with pool.freeze([tensor]) as frozen:
            for _ in range(3):
                event = pool.submit(tensor)
                during = 0
                while not event.ended:
                    size = int(rng.choice([1, 5, 64, 200]))
                    at = 64 * int(rng.integers(0, (3000 - size) // 64))
                    mirror[at : at + size] = data = rng.integers(0, 256, size, np.uint8)
                    bench.backend.write_memory(area.address + at, data)
                    out = np.empty(size, np.uint8)
                    at = 64 * int(rng.integers(0, (3000 - size) // 64))
                    bench.backend.read_memory(area.address + at, out)
                    np.testing.assert_array_equal(out, mirror[at : at + size])
                    bench.checks += size
                    during += 1
                assert during
                event.wait()
                values = [reduced(pool, values)] * pool.devices
                bench.checks += compare(tensor, values)
            for device, want in enumerate(arrays):
                np.testing.assert_array_equal(frozen.read(0, device).view("u4"), want.view("u4"))
                bench.checks += want.size
            assert all(device.pages_copied for device in pool.counters().devices)
        np.testing.assert_array_equal(area.read(), mirror)

    await on_ring(dut, "snapshot", job, mode)


@cocotb.test(skip=CONFIG.updater is None)
@cocotb.parametrize(mode=list(STALLS))
async def a_step_after_a_sum_has_the_bits_of_golden_devices(dut: object, mode: str) -> None:
    """Two rules, on what the rings have just summed."""

    def job(bench: PoolBench) -> None:
        size = 700
        values = {name: draw(bench.pool, size, bench.random) for name in "pgmv"}
        options = "".join(
            f"&{name}={','.join(value) if isinstance(value, list) else value}"
            for name, value in OPTIONS.items()
        )
        with CoarsePool.open(f"golden:coarse?devices={DEVICES}{options}") as golden:
            found, want = (stepped(pool, values) for pool in (bench.pool, golden))
        for name, each in found.items():
            np.testing.assert_array_equal(each.view("u4"), want[name].view("u4"), err_msg=name)
            bench.checks += each.size
        assert bench.checks == len(found) * size == 4 * DEVICES * size

    await on_ring(dut, "step", job, mode)


def stepped(pool: CoarsePool, values: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays of each device after a sum, a step of AdamW and one of SGD."""
    tensors = {name: pool.tensor(each) for name, each in values.items()}
    for device in range(pool.devices):
        tensors["v"].write(device, np.abs(values["v"][device]))
    pool.all_reduce(tensors["g"], "average")
    for optimizer, names, hyper in (
        ("adamw", "pgmv", {"lr": 1e-2, "step": 3}),
        ("sgd", "pg", {"lr": 0.1}),
    ):
        runs = [
            pool.device.update(optimizer, {n: tensors[n].front(d) for n in names}, **hyper)
            for d in range(pool.devices)
        ]
        for run in runs:
            assert run.wait().committed == tensors["p"].size
    return {
        f"{name} of device {device}": each.read(device)
        for name, each in tensors.items()
        for device in range(pool.devices)
    }


@cocotb.test()
async def a_job_that_is_refused_ends_all(dut: object) -> None:
    """Then a reset, and jobs as if nothing had been; and a register that is not there."""

    def job(bench: PoolBench) -> None:
        pool = bench.pool
        arrays = draw(pool, 300, bench.random)
        tensor = pool.tensor(arrays)
        pool.device.nodes[1].pool.window_limit.value = 64
        with pytest.raises(JobRefusedError) as found:
            pool.all_reduce(tensor)
        assert (found.value.device, found.value.cause) == (1, "WINDOW")
        assert dict(found.value.causes) == {
            device: "WINDOW" if device == 1 else "PEER" for device in range(DEVICES)
        }
        bench.checks += 2 + compare(tensor, arrays)
        with pytest.raises(BusError):
            bench.backend.read_register(BLOCK_BYTES - 4)
        pool.reset()
        bench.reduce(300, "sum", "fp32")
        bench.checks += 1

    await on_ring(dut, "refused", job)
