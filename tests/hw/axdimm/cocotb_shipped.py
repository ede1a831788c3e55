"""A shipped top of the AXDIMM family, its units in it: a driver runs the kernels, and memory must
hold what the golden model makes of it.

The tops have no port with a handshake: neither a host bus nor DFI can hold a command back. What
stalls is the host: it idles between commands, or takes accesses in order and owes refreshes, or
both.
"""

import json
import os
from collections.abc import Mapping

import cocotb
import numpy as np
from adam_run import AdamRun, Words
from cocotb.task import bridge
from cocotb_module import Module

from nearstep_sim.golden.rule import evaluate
from nearstep_spec.axdimm.registers import IDENT
from nearstep_spec.rule.rules import optimizer_named
from nearstep_spec.updater.config import UpdateKernelConfig

CONFIG = UpdateKernelConfig(**json.loads(os.environ["NEARSTEP_CONFIG"]))
PORTS = json.loads(os.environ["NEARSTEP_DFI"])
"""Names of the DFI ports, one for each channel."""
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
MODES = {
    "free": {},
    "idle": {"stall": 0.3},
    "owing": {"scheduler": "in-order", "postpone": 8},
    "idle and owing": {"stall": 0.3, "scheduler": "in-order", "postpone": 8},
}
HYPER = {
    "lr": 3e-3,
    "betas": (0.9, 0.99),
    "eps": 1e-7,
    "weight_decay": 0.05,
    "decoupled_weight_decay": True,
}
SPECIALS = np.array(
    [0, 0x8000_0000, 1, 0x807F_FFFF, 0x0080_0000, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000,
     0x7FC0_0000, 0x7F80_0001, 0xFFFF_FFFF],
    np.uint32,
)  # fmt: skip


class GoldenRun(AdamRun):
    """A step of Adam on one channel, of any bit patterns, a fifth of them special ones."""

    def __init__(self, module: Module, channel: int, count: int, seed: int, step: int) -> None:
        optimizer = optimizer_named("adam")
        values = optimizer.defaults | HYPER
        form = optimizer.form(values).ordered(CONFIG.order)
        self.scalars = form.registers(values, step, False)

        def results(arrays: Mapping[str, Words]) -> dict[str, Words]:
            given = {name: words.view(np.float32) for name, words in arrays.items()}
            made = evaluate(form.rule, given, self.scalars)
            return {name: array.view(np.uint32) for name, array in made.items()}

        super().__init__(module, channel, count, seed, results=results)
        rng = np.random.default_rng(seed + 1000)
        for name, words in self.arrays.items():
            special = rng.random(words.size) < 0.2
            words[special] = rng.choice(SPECIALS, special.sum())
            module.store(channel, self.bases[name], words.view(np.uint8))

    def configure(self, *, reach: int | None = None) -> None:
        super().configure(reach=reach)
        for name, value in self.scalars.items():
            if isinstance(value, int):
                self.bench.set(self.channel, {f"adam.mode.{name}": value})
            else:
                bits = int(np.float32(value).view(np.uint32))
                self.bench.set(self.channel, {f"adam.{name}.value": bits})

    def whole(self) -> int:
        """Wait for its end, and compare it, with the channel the host's again."""
        self.bench.wait(self.channel, "adam.status.done", 1, 20_000)
        assert self.bench.get(self.channel, "adam.committed.value") == self.count
        self.mode(0)
        assert self.bench.get(self.channel, "arbiter.status.refused_access") == 0
        return self.check()


def drive(module: Module) -> int:
    """Each channel by itself with the host on the others, then all at once. Words compared.

    One of them is given back to the host in the midst of its run.
    """
    compared = 0
    rng = np.random.default_rng(SEED)
    channels = range(len(PORTS))
    for channel in channels:
        run = GoldenRun(module, channel, 147 + channel, SEED + channel, 1 + channel)
        assert module.get(channel, "arbiter.id.value") == IDENT
        run.configure()
        run.mode(1)
        run.start()
        for other in channels:
            if other != channel:
                data = rng.integers(0, 256, 64 * 8, dtype=np.uint8)
                module.store(other, 0, data)
                assert np.array_equal(module.load(other, 0, data.size), data)
        compared += run.whole()
    runs = [GoldenRun(module, c, 210 - 3 * c, SEED + 7 + c, 100) for c in channels]
    for run in runs:
        run.configure()
        run.mode(1)
    for run in runs:
        run.start()
    runs[0].mode(0)
    assert module.get(0, "adam.status.busy") == 1
    runs[0].mode(1)
    return compared + sum(run.whole() for run in runs)


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def kernels_give_the_golden_bits(dut: object, mode: str) -> None:
    module = Module(dut, dfi=PORTS, kernel=CONFIG, **MODES[mode])
    await module.begin()
    compared = await bridge(drive)(module)
    assert compared == 4 * sum(160 + 224 - 16 * (c > 0) for c in range(len(PORTS)))
    print(f"seed {SEED}, {mode}: {compared} words compared in {module.host.cycle} cycles")
