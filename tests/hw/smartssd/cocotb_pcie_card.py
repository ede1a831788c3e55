"""The host's driver, unchanged, on a card below a root complex, or at the ports of a card alone; a
peer that moves subgroups."""

import json
import os
from collections.abc import Callable

import cocotb
import numpy as np
import pytest
from cocotb.task import bridge, resume
from cocotbext.pcie.core.tlp import CplStatus
from numpy.typing import NDArray

from nearstep import Pairs
from nearstep.buffer import Buffer
from nearstep.device import drive
from nearstep.errors import CompletionError, PostedWriteError
from nearstep.registers import RefusedWriteError
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.bench.cocotb_pcie import STALLS
from nearstep_sim.bench.operands import SPECIALS
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.scan import scan
from nearstep_sim.smartssd.cocotb_card import (
    GUARD,
    CocotbCardBackend,
    CocotbPortsBackend,
    GuardWrittenError,
)
from nearstep_spec.rule.adam import adam_scalars
from nearstep_spec.rule.optimizer import Form
from nearstep_spec.rule.rules import optimizer_named
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import ARRAYS, ErrorCause, update_rule

OPTIONS = json.loads(os.environ["NEARSTEP_CONFIG"])
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
KERNEL = UpdateKernelConfig(
    **{k: tuple(v) if isinstance(v, list) else v for k, v in OPTIONS["kernel"].items()}
)
CONFIG = SmartssdConfig(
    kernel=KERNEL,
    memory_bytes=OPTIONS["memory_bytes"],
    subgroup_elements=OPTIONS["subgroup_elements"],
)
STATES = ("p", "m", "v")
Arrays = dict[str, NDArray[np.float32]]


class CardBench:
    """A driver on a card, arrays with known contents, and what they must become."""

    def __init__(
        self, device: SmartssdDevice, backend: CocotbCardBackend | CocotbPortsBackend, seed: int
    ) -> None:
        self.device = device
        self.backend = backend
        self.random = np.random.default_rng(seed)
        self.checks = 0
        self.runs = 0

    def arrays(self, count: int) -> Arrays:
        """Numbers for each array, every sixteenth gradient a special one."""
        made = {n: self.random.standard_normal(count).astype(np.float32) for n in ARRAYS}
        made["v"] = np.square(made["v"])
        chosen = self.random.random(count) < 1 / 16
        specials = self.random.choice(SPECIALS, np.count_nonzero(chosen))
        made["g"][chosen] = specials.view(np.float32)
        return made

    def upload(self, arrays: Arrays) -> dict[str, Buffer]:
        """Buffers with these contents."""
        buffers = {name: self.device.alloc(array.size) for name, array in arrays.items()}
        for name, array in arrays.items():
            buffers[name].write(array)
        return buffers

    def start(self, step: int = 1, **buffers: object) -> object:
        """Start a step of Adam."""
        self.runs += 1
        return self.device.update("adam", buffers, step=step, weight_decay=0.1)

    def ended(self) -> None:
        """Every run that was started has ended, with an interrupt each."""
        assert self.backend.interrupts == self.runs
        self.checks += 1

    def same(self, name: str, got: bytes, expected: NDArray[np.float32]) -> None:
        """Bit for bit."""
        bits = np.frombuffer(got, np.uint32)
        np.testing.assert_array_equal(bits, expected.view(np.uint32), err_msg=name)
        self.checks += bits.size

    def compare(self, buffers: dict[str, Buffer], arrays: Arrays) -> None:
        for name, buffer in buffers.items():
            self.same(name, buffer.read().tobytes(), arrays[name])


def updated(arrays: Arrays, step: int = 1) -> Arrays:
    """What a step makes of the arrays."""
    scalars = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.1, step, False)
    return arrays | evaluate(update_rule(KERNEL), arrays, scalars)


async def on_card(
    dut: object, name: str, job: Callable[[CardBench], None], mode: str = "free"
) -> None:
    """Run `job` in a bridged thread; say how many checks were made."""
    backend: CocotbCardBackend | CocotbPortsBackend
    if OPTIONS["ports"]:
        backend = CocotbPortsBackend(dut, CONFIG, mode=mode, seed=SEED)
    else:
        behind = {name: OPTIONS[name] for name in ("width", "crossed", "series7")}
        backend = CocotbCardBackend(dut, CONFIG, mode=mode, seed=SEED, **behind)
    await backend.begin()

    def opened() -> int:
        with drive(backend, "cocotb:smartssd") as device:
            bench = CardBench(device, backend, SEED)
            job(bench)
            bench.ended()
            return bench.checks

    checks = await bridge(opened)()
    assert checks > 0
    checks += await backend.finish()
    cocotb.log.info(
        "%s_%s: %d checks, %d interrupts, %d cycles",
        name, mode, checks, backend.interrupts, backend.cycles,
    )  # fmt: skip


@cocotb.test()
@cocotb.parametrize(mode=list(STALLS))
async def updates_are_those_of_the_golden_rule(dut: object, mode: str) -> None:
    """Two steps, of a part of a beat at the end too."""

    def job(bench: CardBench) -> None:
        arrays = bench.arrays(3 * KERNEL.block_elements + 5)
        buffers = bench.upload(arrays)
        for step in (1, 2):
            run = bench.start(step, **buffers).wait()
            bench.ended()
            assert run.committed == arrays["p"].size
            arrays = updated(arrays, step)
            bench.compare(buffers, arrays)
        assert int(dut.o_dropped.value) == 0
        assert int(dut.o_failed_reads.value) == 0

    await on_card(dut, "updates", job, mode)


@cocotb.test()
async def pairs_and_scans(dut: object) -> None:
    """Gradients in pairs, some of them twice; and a search for infinities."""

    def job(bench: CardBench) -> None:
        device, rng = bench.device, bench.random
        arrays = bench.arrays(2 * KERNEL.block_elements + 3)
        count, dense = arrays["p"].size, arrays.pop("g")
        buffers = bench.upload(arrays)
        index = np.sort(rng.integers(0, count, 60)).astype(np.uint32)
        value = rng.standard_normal(60).astype(np.float32)
        sent = device.alloc(60, np.uint32), device.alloc(60)
        for buffer, content in zip(sent, (index, value), strict=True):
            buffer.write(content)
        run = bench.start(**buffers, g=Pairs(*sent, "fused")).wait()
        gradient = np.zeros(count, np.float32)
        gradient[index] = value  # of several, numpy keeps the last
        assert run.duplicates == 60 - np.unique(index).size
        bench.compare(buffers, updated({**arrays, "g": gradient}))
        g = device.alloc(count)
        for gradients in (dense, gradient):
            g.write(gradients)
            bench.runs += 1
            found = device.scan(g).wait()
            expected = scan(gradients, lanes=KERNEL.lanes)
            assert found.found_inf == expected[0]
            np.testing.assert_equal(found.sum_of_squares, expected[1])
            bench.checks += 2
            bench.ended()

    await on_card(dut, "pairs", job)


@cocotb.test()
async def a_run_that_fails_interrupts_too(dut: object) -> None:
    """No window, a register that is locked, and then a run as if nothing had been."""

    def job(bench: CardBench) -> None:
        arrays = bench.arrays(3 * KERNEL.block_elements)
        buffers = bench.upload(arrays)
        run = bench.start(**buffers)
        with pytest.raises(RefusedWriteError):
            bench.device.regs.updater0.count.value = 0
        bench.checks += 1
        run.wait()
        arrays = updated(arrays)
        bench.compare(buffers, arrays)
        kernel = bench.device.regs.updater0
        kernel.start.go = 1  # what the last run left, but its windows
        bench.runs += 1
        bench.backend.wait([kernel.status.poll(busy=0)], 10_000)
        assert kernel.status.get() | {"busy": 0, "done": 0, "error": 1} == kernel.status.get()
        assert kernel.error.cause == ErrorCause.WINDOW
        addresses = [buffer.address for buffer in buffers.values()]
        assert kernel.error_address.value in addresses
        bench.checks += 3
        bench.ended()
        bench.compare(buffers, arrays)
        assert bench.start(2, **buffers).wait().done
        bench.compare(buffers, updated(arrays, 2))

    await on_card(dut, "failures", job)


@cocotb.test()
@cocotb.parametrize(mode=["free", "both"])
async def a_peer_moves_subgroups_while_runs_go_on(dut: object, mode: str) -> None:
    """One subgroup is updated while another device fetches the last one and brings the next."""

    def job(bench: CardBench) -> None:
        backend = bench.backend
        subgroups = [bench.arrays(3 * KERNEL.block_elements) for _ in range(4)]
        sets = [bench.upload(subgroups[0]), bench.upload(bench.arrays(subgroups[0]["p"].size))]
        during = 0

        def move(buffers: dict[str, Buffer], number: int, names: tuple[str, ...]) -> int:
            """Fetch, or bring, arrays of a subgroup; how many while the run went on."""
            before, seen = backend.interrupts, 0
            for name in names:
                buffer = buffers[name]
                if names is STATES:
                    got = resume(peer_read)(backend, buffer)
                    bench.same(f"{name} of subgroup {number}", got, done[number][name])
                else:
                    resume(peer_write)(backend, buffer, subgroups[number][name])
                seen += backend.interrupts == before
            return seen

        done: list[Arrays] = []
        for number, subgroup in enumerate(subgroups):
            mine, other = sets[number % 2], sets[1 - number % 2]
            run = bench.start(**mine)
            if number:
                during += move(other, number - 1, STATES)
            if number + 1 < len(subgroups):
                during += move(other, number + 1, ARRAYS)
            run.wait()
            bench.ended()
            done.append(updated(subgroup))
        move(sets[1], len(subgroups) - 1, STATES)
        bench.compare(sets[0], done[-2])  # the host sees what the peer has fetched
        bench.compare(sets[1], done[-1])
        assert during >= len(subgroups), f"{during} arrays were moved during runs"
        bench.checks += during

    await on_card(dut, "peer", job, mode)


OF_RULES = {
    "adam": ("adam", {"weight_decay": 0.1}),
    "sgd": ("sgd", {"weight_decay": 0.05}),
    "sgd_momentum": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("adagrad", {"lr_decay": 0.01}),
}
"""An optimizer, with options, for each rule."""


def form_of(rule: str) -> tuple[str, dict[str, object], Form, dict[str, float]]:
    """Optimizer, options, form and registers of its third step."""
    name, hyper = OF_RULES[rule]
    optimizer = optimizer_named(name)
    form = optimizer.form(optimizer.defaults | hyper).ordered(KERNEL.order)
    assert form.rule.name == rule
    return name, hyper, form, dict(form.registers(optimizer.defaults | hyper, 3, False))


def some_pairs(
    rng: np.random.Generator, count: int, number: int, form: str
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Pairs, some of them of the same element, in an order that the form allows."""
    index = np.sort(rng.integers(0, count, number)).astype(np.uint32)
    if form == "scatter":
        block = index // KERNEL.block_elements
        index = index[np.lexsort((rng.random(number), block))]
    return index, rng.standard_normal(number).astype(np.float32)


@cocotb.test()
@cocotb.parametrize(mode=list(STALLS))
async def every_rule_with_whole_gradients_and_with_pairs(dut: object, mode: str) -> None:
    """All that a card has in one kernel, one run after the other."""

    def job(bench: CardBench) -> None:
        device, rng = bench.device, bench.random
        seen = set()
        for rule in KERNEL.rules:
            name, hyper, form, registers = form_of(rule)
            for pairs in (None, *KERNEL.compression):
                count = KERNEL.block_elements + 37 if rule == "adam" else 333
                arrays = {n: bench.arrays(count)[n] for n in form.rule.arrays_in}
                if pairs is not None:
                    index, value = some_pairs(rng, count, 90, pairs)
                    arrays["g"] = np.zeros(count, np.float32)
                    for at, number in zip(index.tolist(), value, strict=True):
                        arrays["g"][at] = number
                buffers = bench.upload({n: a for n, a in arrays.items() if n != "g"})
                given: dict[str, object] = dict(buffers)
                if pairs is None:
                    given["g"] = bench.upload({"g": arrays["g"]})["g"]
                else:
                    sent = device.alloc(index.size, np.uint32), device.alloc(value.size)
                    sent[0].write(index)
                    sent[1].write(value)
                    given["g"] = Pairs(*sent, pairs)
                bench.runs += 1
                run = device.update(name, given, step=3, **hyper).wait()
                assert run.committed == count
                bench.compare(buffers, arrays | evaluate(form.rule, arrays, registers))
                seen.add((rule, pairs))
                for buffer in buffers.values():
                    buffer.free()
        assert len(seen) == len(KERNEL.rules) * (1 + len(KERNEL.compression))
        bench.checks += len(seen)
        bench.ended()

    await on_card(dut, "rules", job, mode)


async def peer_read(backend: CocotbCardBackend, buffer: Buffer) -> bytes:
    system = backend.system
    return bytes(await system.peer.mem_read(system.base + buffer.address, buffer.nbytes))


async def peer_write(backend: CocotbCardBackend, buffer: Buffer, array: NDArray) -> None:
    system = backend.system
    await system.peer.mem_write(system.base + buffer.address, array.tobytes())
    # A read comes back behind the writes: the next run may be started by the host.
    await system.peer.mem_read(system.base + buffer.address, 1)


@cocotb.test()
async def nothing_is_beyond_the_memory(dut: object) -> None:
    """An address that the BAR has and the memory has not; and the guard there is looked at."""

    def job(bench: CardBench) -> None:
        backend, end = bench.backend, CONFIG.memory_bytes
        assert backend.refused(end) == CplStatus.UR
        assert backend.refused(end - 4) == CplStatus.SC
        assert int(dut.o_failed_reads.value) == 1
        for expected, access in (
            (PostedWriteError, lambda: backend.write_memory(end, np.ones(64, np.uint8))),
            (CompletionError, lambda: backend.read_memory(end, np.empty(64, np.uint8))),
        ):
            with pytest.raises(expected):
                access()
            bench.checks += 1
        assert int(dut.o_dropped.value) == 1
        bench.checks += 4
        backend.check_guard()
        backend.memory[end + 5] ^= 1
        with pytest.raises(GuardWrittenError) as caught:
            backend.check_guard()
        assert (caught.value.address, caught.value.actual) == (end + 5, GUARD ^ 1)
        bench.checks += 1
        backend.memory[end + 5] = GUARD

    await on_card(dut, "beyond", job)
