"""The bank against its golden model, and the behaviour that has no other witness."""

import random
from collections.abc import Callable

import pytest
from amaranth.sim import Simulator, SimulatorContext

from nearstep_hw.csr.bank import CsrBank
from nearstep_sim.golden.registers import WHOLE_WORD, Answer, RegisterFile
from nearstep_spec.csr.model import Access, RegisterMap, port_name
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map


class Bench:
    """Accesses of a bank's port; inputs of the hardware side by field path."""

    def __init__(self, ctx: SimulatorContext, bank: CsrBank) -> None:
        self.ctx = ctx
        self.bank = bank
        self.ports = {
            f"{register.name}.{field.name}": getattr(bank, name)
            for register, field in bank.register_map.fields()
            if (name := port_name(register, field)) is not None
        }
        self.pulse_paths = [
            path for path in self.ports if bank.register_map.lookup(path)[1].access is Access.PULSE
        ]

    def drive(self, path: str, value: int) -> None:
        self.ctx.set(self.ports[path], value)

    def output(self, path: str) -> int:
        return self.ctx.get(self.ports[path])

    def pulses(self) -> tuple[str, ...]:
        return tuple(path for path in self.pulse_paths if self.output(path))

    async def idle(self, cycles: int = 1) -> None:
        for _ in range(cycles):
            await self.ctx.tick()
            assert not self.ctx.get(self.bank.bus.ack)

    async def read(self, address: int) -> Answer:
        return await self._access(self.bank.bus.read, address)

    async def write(self, address: int, value: int, mask: int = WHOLE_WORD) -> Answer:
        self.ctx.set(self.bank.bus.write_data, value)
        self.ctx.set(self.bank.bus.write_mask, mask)
        return await self._access(self.bank.bus.write, address)

    async def _access(self, strobe: object, address: int) -> Answer:
        bus = self.bank.bus
        self.ctx.set(bus.address, address)
        self.ctx.set(strobe, 1)
        await self.ctx.tick()
        self.ctx.set(strobe, 0)
        if self.bank.cut:
            assert not self.ctx.get(bus.ack)
            await self.ctx.tick()
        pulses = self.pulses()
        if self.bank.cut:
            assert not self.ctx.get(bus.ack)
            await self.ctx.tick()
        assert self.ctx.get(bus.ack), f"no ack for {address:#x}"
        answer = Answer(self.ctx.get(bus.read_data), bool(self.ctx.get(bus.error)), pulses)
        await self.ctx.tick()
        assert not self.ctx.get(bus.ack)
        assert self.pulses() == (), "a pulse lasts longer than a cycle"
        return answer


def simulate(register_map: RegisterMap, body: Callable, *, cut: bool = False) -> None:
    bank = CsrBank(register_map, cut=cut)
    simulator = Simulator(bank)
    simulator.add_clock(1e-6)

    async def testbench(ctx: SimulatorContext) -> None:
        await body(Bench(ctx, bank))

    simulator.add_testbench(testbench)
    simulator.run()


def random_accesses(
    register_map: RegisterMap, seed: int, count: int, *, cut: bool = False
) -> dict[str, int]:
    """Random accesses of bank and golden model; how often each kind of thing happened."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    golden = RegisterFile(register_map)
    seen = dict.fromkeys(("read", "write", "pulse", "error", "refused", "compared"), 0)
    addresses = [r.offset + 4 * i for r in register_map for i in range(r.words)]
    commands = [r.offset for r, f in register_map.fields() if f.access is Access.PULSE]
    addresses += commands * (len(addresses) // (4 * len(commands)) + 1)
    inputs = [
        (f"{r.name}.{f.name}", f.width)
        for r, f in register_map.fields()
        if f.access in (Access.STATUS, Access.COUNTER)
    ]
    outputs = [f"{r.name}.{f.name}" for r, f in register_map.fields() if f.access is Access.CONFIG]

    async def body(bench: Bench) -> None:
        for _ in range(count):
            for path, width in rng.sample(inputs, rng.randrange(len(inputs))):
                value = rng.choice((0, (1 << width) - 1, rng.getrandbits(width)))
                bench.drive(path, value)
                if path != register_map.busy:
                    golden[path] = value
            golden[register_map.busy] = bench.output(register_map.busy)
            await bench.idle(rng.randint(1, 3))

            address = rng.choice(addresses) if rng.random() < 0.9 else rng.randrange(0, 4096)
            if rng.random() < 0.5:
                answer, expected = await bench.read(address), golden.read(address)
                seen["read"] += 1
            else:
                value = rng.choice((0, 1, 0xFFFF_FFFF, rng.getrandbits(32)))
                mask = WHOLE_WORD if rng.random() < 0.8 else rng.randrange(16)
                answer = await bench.write(address, value, mask)
                expected = golden.write(address, value, mask)
                seen["write"] += 1
                seen["pulse"] += bool(expected.pulses)
                seen["refused"] += golden["status.refused"]
            assert answer == expected, f"{address:#x}"
            seen["error"] += expected.error
            for path in outputs:
                assert bench.output(path) == golden[path], path
                seen["compared"] += 1

    simulate(register_map, body, cut=cut)
    return seen


@pytest.mark.parametrize("cut", [False, True])
def test_random_accesses_agree_with_the_golden_model(every_kind: RegisterMap, cut: bool) -> None:
    seen = random_accesses(every_kind, seed=1, count=1500, cut=cut)
    print(seen)
    assert min(seen.values()) > 30


@pytest.mark.parametrize("lanes", [1, 16])
def test_adam_bank_agrees_with_the_golden_model(lanes: int) -> None:
    seen = random_accesses(adam_kernel_map(UpdateKernelConfig(lanes=lanes)), seed=2, count=400)
    print(seen)
    assert min(seen.values()) > 10


def test_configuration_resets_to_what_the_map_says(every_kind: RegisterMap) -> None:
    async def body(bench: Bench) -> None:
        assert bench.output("wide.low") == 0x12345
        assert bench.output("wide.across") == 0x1_5A5A
        assert bench.output("free.value") == 7
        words = [await bench.read(every_kind["wide"].offset + at) for at in (0, 4)]
        assert words[0].value | words[1].value << 32 == (0x12345 << 3 | 0x1_5A5A << 24 | 9 << 60)

    simulate(every_kind, body)


def test_map_hash_reads_as_the_hash_of_the_map(every_kind: RegisterMap) -> None:
    async def body(bench: Bench) -> None:
        assert (await bench.read(every_kind["map_hash"].offset)).value == every_kind.hash()

    simulate(every_kind, body)


def test_counters_are_captured_in_the_first_idle_cycle(every_kind: RegisterMap) -> None:
    async def body(bench: Bench) -> None:
        low = every_kind["cycles"].offset
        bench.drive("status.busy", 1)
        bench.drive("cycles.value", 0xFFFF_FFFF_FFFF_FFF0)
        await bench.idle()
        assert (await bench.read(low)).value == 0
        bench.drive("status.busy", 0)
        bench.drive("cycles.value", 0x1_2345_6789)
        await bench.idle()
        bench.drive("cycles.value", 5)
        assert (await bench.read(low)).value == 0x2345_6789
        assert (await bench.read(low + 4)).value == 1

    simulate(every_kind, body)


def test_counters_captured_by_latch_do_not_tear(every_kind: RegisterMap) -> None:
    async def body(bench: Bench) -> None:
        low = every_kind["cycles"].offset
        bench.drive("status.busy", 1)
        bench.drive("cycles.value", 0xFFFF_FFFF)
        bench.drive("beats.value", 11)
        await bench.idle()
        await bench.write(every_kind["control"].offset, 2)
        bench.drive("cycles.value", 0x1_0000_0000)
        bench.drive("beats.value", 12)
        words = [(await bench.read(low + at)).value for at in (0, 4, 8, 12)]
        assert words == [0xFFFF_FFFF, 0, 11, 0]

    simulate(every_kind, body)


def test_start_in_the_cycle_of_a_start_is_refused(every_kind: RegisterMap) -> None:
    async def body(bench: Bench) -> None:
        bus, ctx = bench.bank.bus, bench.ctx
        ctx.set(bus.address, every_kind["start"].offset)
        ctx.set(bus.write_data, 1)
        ctx.set(bus.write_mask, WHOLE_WORD)
        ctx.set(bus.write, 1)
        answers = []
        for _ in range(2):
            await ctx.tick()
            answers.append((bench.output("start.go"), ctx.get(bus.error)))
        ctx.set(bus.write, 0)
        assert answers == [(1, 0), (0, 1)]
        await ctx.tick()
        assert (await bench.read(every_kind["status"].offset)).value >> 30 == 1

    simulate(every_kind, body)


def test_golden_model_refuses_a_value_that_does_not_fit(every_kind: RegisterMap) -> None:
    golden = RegisterFile(every_kind)
    with pytest.raises(ValueError, match=r"beats\.value has 40 bits"):
        golden["beats.value"] = 1 << 40
