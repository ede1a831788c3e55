"""A kernel in Amaranth's simulator beside its golden model.

Both have the same registers and the same memory, and are told the same. The functional units are
those of the golden model as well.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping

import numpy as np
from amaranth.hdl import ClockDomain, ClockSignal, Module, ResetInserter, Signal
from amaranth.sim import Simulator, SimulatorContext
from numpy.typing import NDArray

from nearstep_hw.updater.kernel_core import KernelCore
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.axi_memory import STALL_MODES, AxiMemory
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.updater.golden import make_engines
from nearstep_sim.updater.golden_channel import GoldenChannel
from nearstep_spec.updater.config import COPY_OUT, UpdateKernelConfig
from nearstep_spec.updater.operands import operands
from nearstep_spec.updater.registers import COUNTERS, adam_kernel_map, update_rule

from ..axi_port import AxiPins

LATENCY = 7  # of the functional units, in enabled cycles
MEMORY_BYTES = 1 << 14
PLACE_BYTES = 1 << 11  # from an array to the next
SHOWN = (
    "status", "error", "error_address", "scan", "sum_of_squares",
    "committed", "read_beats", "write_beats", "duplicates",
)  # fmt: skip
EVENTS = ("cycles", "read_beats", "write_beats", "stall_read_address", "stall_write_data")
"""Counters of what can be seen from outside."""


class ShellBench:
    """One kernel and its golden model.

    Parameters
    ----------
    config
    top : what the kernel is in, with its ports; None for the shell alone.
    seed : of numbers in memory, scalars and stalls.

    Attributes
    ----------
    data : memory of the kernel.
    defaults : fields of registers, as runs have them: arrays apart, one window for all of memory.
    seen : events of the last run, by name: what the counters should have counted.
    checks : values and bytes that were compared.
    counted : counters that are compared with `seen`.
    beside : called in every cycle, before its clock edge.
    """

    def __init__(
        self, config: UpdateKernelConfig, top: object | None = None, *, seed: int = 1
    ) -> None:
        print(f"seed {seed}")
        self.config = config
        self.rng = np.random.default_rng(seed)
        self.map = adam_kernel_map(config)
        self.shell = top or KernelCore(config, memory_bytes=MEMORY_BYTES)
        self.busy = (self.shell.kernel if top else self.shell).o_busy
        ids = 1 << len(self.shell.m_axi.ar.payload.id)
        numbers = self.rng.standard_normal(MEMORY_BYTES // 4).astype(np.float32)
        self.data = np.abs(numbers).view(np.uint8)
        self.memory = AxiMemory(self.data, beat_bytes=config.beat_bytes, seed=seed)
        self.checker = AxiChecker(
            beat_bytes=config.beat_bytes,
            read_ids=ids,
            write_ids=ids if top else len(config.states) + bool(config.copy_out_formats),
            always_ready=not config.compression,
        )
        self.golden = GoldenChannel(
            config,
            0,
            MEMORY_BYTES,
            (0, self.map),
            make_engines(config, "numpy"),
            lambda line: None,
            MEMORY_BYTES,
        )
        self.pins = AxiPins(self.shell.m_axi)
        self.rule = update_rule(config)
        self.defaults = self._defaults()
        self.written: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        self.checks = 0
        self.counted: tuple[str, ...] = EVENTS
        self.beside: list[Callable[[SimulatorContext], None]] = []
        self._pipeline: deque[dict[str, int] | None] = deque([None] * LATENCY)
        self._reset = Signal()

    def _defaults(self) -> dict[str, int]:
        names = [name for name in operands(self.config) if name != COPY_OUT]
        places = {f"{name}_address.value": PLACE_BYTES * k for k, name in enumerate(names)}
        scalars = self.rng.uniform(0.1, 0.9, len(self.rule.scalars)).astype(np.float32)
        return {
            **places,
            **{
                f"{name}.value": int(each.view(np.uint32))
                for name, each in zip(self.rule.scalars, scalars, strict=True)
            },
            **{f"mode.{name}": 1 for name in self.config.rule_set.switches},
            "window0_limit.value": MEMORY_BYTES,
            **{f"window0_permissions.{name}": 1 for name in ("read", "write", "valid")},
        }

    def simulate(self, bench: Callable[[ShellBench], Coroutine]) -> None:
        """Run a bench from reset on."""
        m = Module()
        m.submodules.shell = ResetInserter(self._reset)(self.shell)
        if self.config.compression:
            m.d.comb += self.shell.i_pairs_clk.eq(ClockSignal())
        m.domains.sync = ClockDomain()
        simulator = Simulator(m)
        simulator.add_clock(1e-6)

        async def testbench(ctx: SimulatorContext) -> None:
            self.ctx = ctx
            await bench(self)

        simulator.add_testbench(testbench)
        simulator.run()
        print(f"{self.checks} checks in {self.checker.cycles} cycles")
        assert self.checks > 0

    def disturb(self, mode: str = "free", *, latency: int = 1, errors: tuple = ()) -> None:
        """How the memory behaves from now on."""
        self.memory.stalls, self.memory.latency = STALL_MODES[mode], latency
        self.memory.reorder = mode == "both"
        self.memory.errors = errors
        self.memory._seen = {}

    async def cycle(self) -> None:
        """One clock edge, with memory, checker and functional units."""
        ctx, fu = self.ctx, self.shell.fu
        self.pins.answer(ctx, self.memory)
        for each in self.beside:
            each(ctx)
        seen = self.pins.sample(ctx)
        self.checker.step(seen)
        self._count(seen)
        enabled, valid = ctx.get(fu.i_en), ctx.get(fu.i_valid)
        entering = None
        if enabled and valid:
            entering = {name: ctx.get(getattr(fu, f"i_{name}")) for name in self.rule.arrays_in}
            self._scalars = {
                name: ctx.get(getattr(fu, f"s_{name}"))
                for name in (*self.rule.scalars, *self.rule.switches)
            }
        await ctx.tick()
        self.memory.step(seen)
        if enabled:
            self._pipeline.append(entering)
            self._pipeline.popleft()
            leaving = self._pipeline[0]
            ctx.set(fu.o_valid, leaving is not None)
            if leaving is not None:
                for name, value in self._results(leaving).items():
                    ctx.set(getattr(fu, f"o_{name}"), value)

    def _count(self, seen: object) -> None:
        ctx = self.ctx
        events = (
            ctx.get(self.busy),
            seen.r is not None,
            seen.fires("w"),
            seen.ar is not None and not seen.fires("ar"),
            seen.w is not None and not seen.fires("w"),
        )
        for name, happened in zip(EVENTS, events, strict=True):
            self.seen[name] += happened

    def _results(self, operands: Mapping[str, int]) -> dict[str, int]:
        """What the functional units make of a part of a beat."""
        nbytes = 4 * self.config.units

        def numbers(value: int) -> NDArray[np.float32]:
            return np.frombuffer(value.to_bytes(nbytes, "little"), np.float32)

        bits = {name: np.uint32(self._scalars[name]) for name in self.rule.scalars}
        scalars = {name: float(each.view(np.float32)) for name, each in bits.items()}
        scalars |= {name: self._scalars[name] for name in self.rule.switches}
        arrays = {name: numbers(value) for name, value in operands.items()}
        made = evaluate(self.rule, arrays, scalars)
        return {name: int.from_bytes(each.tobytes(), "little") for name, each in made.items()}

    async def access(self, offset: int, value: int | None = None) -> int | None:
        """Read or write a word of a register; None is an error."""
        csr, ctx = self.shell.csr, self.ctx
        strobe = csr.read if value is None else csr.write
        ctx.set(csr.address, offset)
        ctx.set(csr.write_data, value or 0)
        ctx.set(csr.write_mask, 0xF)
        ctx.set(strobe, 1)
        await self.cycle()
        ctx.set(strobe, 0)
        for _ in range(8):
            if ctx.get(csr.ack):
                found = None if ctx.get(csr.error) else ctx.get(csr.read_data)
                await self.cycle()
                return found
            await self.cycle()
        raise AssertionError(f"no answer to an access at {offset:#x}")

    async def read(self, name: str) -> int:
        """The value of a register; of a counter the low word, which is all of it here."""
        register = self.map[name]
        few = 1 if name in COUNTERS else register.words
        words = [await self.access(register.offset + 4 * k) for k in range(few)]
        assert None not in words, name
        return sum(word << 32 * k for k, word in enumerate(words))

    async def field(self, path: str) -> int:
        """The value of a field, `register.field`."""
        register, field = self.map.lookup(path)
        return (await self.read(register.name) & field.mask) >> field.lsb

    async def write(self, name: str, value: int) -> bool:
        """Write a register; whether that was refused."""
        offset, words = self.map[name].offset, self.map[name].words
        answers = [
            await self.access(offset + 4 * k, value >> 32 * k & 0xFFFFFFFF) for k in range(words)
        ]
        return None in answers

    async def configure(self, fields: Mapping[str, int]) -> None:
        """Give the registers of both the values of `defaults`, but for these fields."""
        values = dict.fromkeys(self.written, 0)
        for path, value in {**self.defaults, **fields}.items():
            register, field = self.map.lookup(path)
            values[register.name] = values.get(register.name, 0) | value << field.lsb
        for name, value in values.items():
            if self.written.get(name) == value:
                continue
            self.written[name] = value
            assert not await self.write(name, value), name
            register = self.map[name]
            for k in range(register.words):
                word = value >> 32 * k & 0xFFFFFFFF
                assert not self.golden.write_register(register.offset + 4 * k, word).error, name

    async def go(self, fields: Mapping[str, int]) -> None:
        """Begin a run."""
        await self.configure(fields)
        self.seen.clear()
        assert not await self.write("start", 1)

    async def until_idle(self, most: int = 5000) -> None:
        for _ in range(most):
            await self.cycle()
            if not await self.field("status.busy"):
                if not self.beside:
                    self.checker.finish()
                return
        raise AssertionError(f"busy after {most} cycles")

    async def compare_counters(self) -> None:
        """What the counters counted is what was seen on the port."""
        for name in self.counted:
            value = self.seen[name]
            found = await self.read(name)
            assert found == value, f"{name} is {found}, {value} expected"
            self.checks += 1

    def run_model(self) -> None:
        """A run of the golden model, on the memory of the kernel."""
        self.golden.memory.write(0, self.data)
        self.golden.write_register(self.map["start"].offset, 1)
        while self.golden.can_advance:
            self.golden.advance(1 << 20)

    async def run(self, fields: Mapping[str, int], below: int = MEMORY_BYTES) -> int:
        """The cycles of a run of both, with all that they show after it, and memory `below`."""
        await self.configure(fields)
        self.run_model()
        await self.go(fields)
        await self.until_idle()
        for register in self.map:
            name = register.name
            if name not in SHOWN:
                continue
            wanted = sum(
                self.golden.read_register(register.offset + 4 * k).value << 32 * k
                for k in range(register.words)
            )
            found = await self.read(name)
            assert found == wanted, f"{name} is {found:#x}, {wanted:#x} expected: {fields}"
            self.checks += 1
        if self.seen["read_beats"] or self.seen["cycles"] == 1:
            await self.compare_counters()
        different = np.flatnonzero(self.data[:below] != self.golden.memory.data[:below])
        assert not different.size, f"{different.size} bytes differ from {different[:8]}: {fields}"
        self.checks += below
        return self.seen["cycles"]

    async def reset(self) -> None:
        """Reset the kernel, and what is on the way to memory and back."""
        self.ctx.set(self._reset, 1)
        await self.ctx.tick()
        self.ctx.set(self._reset, 0)
        self.checker.reset()
        self.memory.reset()
        self.golden.reset()
        self.written.clear()
        self._pipeline = deque([None] * LATENCY)
        self.ctx.set(self.shell.fu.o_valid, 0)
