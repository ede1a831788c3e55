"""The host's driver, unchanged, on the whole kernel in cocotb."""

import json
import os
import time

import cocotb
import numpy as np
from cocotb.task import bridge

from nearstep.axdimm.device import AxdimmDevice
from nearstep.device import drive
from nearstep.errors import AbortedError
from nearstep.registers import RefusedWriteError
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.updater.cocotb_backend import CocotbBackend
from nearstep_spec.rule.adam import adam_scalars
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import ARRAYS, update_rule

CONFIG = UpdateKernelConfig(**json.loads(os.environ["NEARSTEP_CONFIG"]))
COUNT = int(os.environ.get("NEARSTEP_COUNT", "1001"))
SEED = 1


async def on_device(dut: object, job: object) -> None:
    """Run `job` with a device, in a bridged thread."""
    backend = CocotbBackend(dut, CONFIG, 64 * (COUNT + 4096))
    await backend.begin()

    def opened() -> None:
        with drive(backend, "cocotb:axdimm") as device:
            job(device)

    await bridge(opened)()


def host_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    return {n: np.abs(rng.standard_normal(COUNT)).astype(np.float32) for n in ARRAYS}


@cocotb.test()
async def two_steps_give_the_bits_of_the_golden_rule(dut: object) -> None:
    def job(device: AxdimmDevice) -> None:
        arrays = host_arrays()
        buffers = {name: device.alloc(COUNT) for name in ARRAYS}
        for name, array in arrays.items():
            buffers[name].write(array)
        for step in (1, 2):
            start = time.perf_counter()
            run = device.update(
                "adam", buffers, step=step, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True
            )
            run.wait()
            rate = COUNT / (time.perf_counter() - start)
            print(f"params_per_s {rate:.0f} cycles {run.cycles}")
            scalars = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.1, step, True)
            arrays.update(evaluate(update_rule(CONFIG), arrays, scalars))
            assert run.done
            assert run.committed == COUNT
            for name, array in arrays.items():
                bits = buffers[name].read().view(np.uint32)
                np.testing.assert_array_equal(bits, array.view(np.uint32), err_msg=name)

    await on_device(dut, job)


@cocotb.test()
async def refusals_aborts_and_resets_are_as_in_process(dut: object) -> None:
    def job(device: AxdimmDevice) -> None:
        buffers = {name: device.alloc(COUNT) for name in ARRAYS}
        for buffer in buffers.values():
            buffer.fill(1.0)
        run = device.update("adam", buffers, step=1)
        try:
            device.regs.adam0.count.value = 0
        except RefusedWriteError:
            pass
        else:
            raise AssertionError("a locked register was written while busy")
        run.abort()
        assert isinstance(run.error, AbortedError)
        run = device.update("adam", buffers, step=1)
        device.reset()
        assert isinstance(run.error, AbortedError)
        assert device.update("adam", buffers, step=1).wait().done

    await on_device(dut, job)
