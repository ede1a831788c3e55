# amaranth: UnusedElaboratable=no
"""The general updater: each rule by its number, and a number that names none."""

import random

import numpy as np
import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.smartssd.updater import GeneralUpdater
from nearstep_sim.bench.operands import operands, registers
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import register_words
from nearstep_spec.rule.adagrad import ADAGRAD
from nearstep_spec.rule.adam import ADAM
from nearstep_spec.rule.combine import selector
from nearstep_spec.rule.sgd import SGD, SGD_MOMENTUM

from ..simulate import simulate

RULES = (ADAM, SGD_MOMENTUM, SGD, ADAGRAD)
LANES = 2
SEED = 51


@pytest.fixture(scope="module")
def bench():
    unit = StreamBench(GeneralUpdater(RULES, lanes=LANES), name="updater", key=f"{LANES}")
    yield unit
    unit.close()


def _inputs(bench, rule, scalars, number):
    values = dict.fromkeys(bench.inputs, 0)
    for name, word in zip(rule.registers(), register_words(rule, scalars).tolist(), strict=True):
        values[f"s_{name}"] = word
    return values | {"rule": number}


def _rows(arrays, names, count):
    return np.concatenate(
        [arrays[name].view(np.uint32).reshape(count, LANES) for name in names], axis=1
    )


@pytest.mark.deep
@pytest.mark.parametrize("mode", STALLS)
def test_every_rule_equals_its_model_in_any_stall_mode(bench, mode: str) -> None:
    print(f"seed {SEED}")
    common = bench.component.whole
    count, compared = 3000, 0
    for number, rule in enumerate(RULES):
        arrays = operands(common.arrays_in, count * LANES, SEED + number)
        scalars = registers(dict(rule.registers()), number)
        run = bench.run(
            {"i": _rows(arrays, common.arrays_in, count)},
            _inputs(bench, rule, scalars, number),
            space=count,
            stalls=STALLS[mode],
            seed=SEED,
        )
        expected = evaluate(rule, {name: arrays[name] for name in rule.arrays_in}, scalars)
        assert run.transfers == {"i": count, "o": count}
        assert run.outputs["o_unknown"] == 0
        for name, words in expected.items():
            place = common.arrays_out.index(name) * LANES
            got = run.streams["o"][:, place : place + LANES].reshape(-1)
            assert (got == words.view(np.uint32)).all(), (rule.name, name)
            compared += got.size
        if mode == "free":
            assert run.first["o"] - run.first["i"] == bench.component.latency
            assert run.last["o"] - run.first["o"] + 1 == count
    assert compared == 8 * count * LANES


@pytest.mark.deep
def test_a_number_that_names_no_rule_moves_nothing(bench) -> None:
    common = bench.component.whole
    arrays = operands(common.arrays_in, 10 * LANES, SEED)
    inputs = _inputs(bench, ADAM, registers(dict(ADAM.registers()), 0), 0)
    for number in range(len(RULES), 1 << bench.inputs["rule"]):
        run = bench.run(
            {"i": _rows(arrays, common.arrays_in, 10)}, inputs | {"rule": number}, space=10
        )
        assert run.outputs["o_unknown"] == 1
        assert run.transfers == {"i": 0, "o": 0}
    assert bench.inputs["rule"] == 3


class Echo(wiring.Component):
    """A unit of one stage: p with the registers of the run instead of its low bits."""

    def __init__(self, rule) -> None:
        self.rule = rule
        super().__init__(
            {
                "i_en": In(1),
                "i_valid": In(1),
                **{f"i_{name}": In(32) for name in rule.arrays_in},
                **{f"s_{name}": In(width) for name, width in rule.registers().items()},
                "o_valid": Out(1),
                **{f"o_{name}": Out(32) for name in rule.arrays_out},
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        told = Signal(32)
        for name, width in self.rule.registers().items():
            if width == 1:  # switches and selectors
                told = (told << 1) ^ getattr(self, f"s_{name}")
            else:
                told = told ^ getattr(self, f"s_{name}")
        with m.If(self.i_en):
            m.d.sync += self.o_valid.eq(self.i_valid)
            for number, name in enumerate(self.rule.arrays_out):
                m.d.sync += getattr(self, f"o_{name}").eq(
                    (getattr(self, f"i_{name}") + number) ^ told
                )
        return m


@pytest.mark.parametrize(("number", "lanes"), [*((k, 2) for k in range(len(RULES) + 1)), (0, 1)])
def test_each_number_selects_one_rule_in_every_lane_and_one_more_moves_nothing(
    number: int, lanes: int
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    dut = GeneralUpdater(RULES, lanes=lanes, unit=Echo)
    rule, sent, taken = dut.whole, [], []
    registers = {name: rng.getrandbits(width) for name, width in rule.registers().items()}
    names = [selector(each) for each in RULES[1:]]
    registers |= {name: int(k == number) for k, name in enumerate(names, 1)}
    told = 0
    for name, width in rule.registers().items():
        told = (told << (width == 1)) ^ registers[name]

    async def bench(ctx):
        ctx.set(dut.rule, number)
        for name, value in registers.items():
            if name not in names:
                ctx.set(getattr(dut, f"s_{name}"), value)
        held = None
        for cycle in range(200):
            if held is None and cycle < 180 and rng.random() < 0.7:
                held = {n: [rng.getrandbits(32) for _ in range(lanes)] for n in rule.arrays_in}
                ctx.set(dut.i.payload, held)
            ctx.set(dut.i.valid, held is not None)
            ctx.set(dut.o.ready, rng.random() < 0.6)
            assert ctx.get(dut.o_unknown) == (number == len(RULES))
            if ctx.get(dut.o.valid) and ctx.get(dut.o.ready):
                result = ctx.get(dut.o.payload)
                taken.append({n: list(getattr(result, n)) for n in rule.arrays_out})
            if held is not None and ctx.get(dut.i.ready):
                sent.append(held)
                held = None
            await ctx.tick()

    simulate(dut, bench)
    mask = (1 << 32) - 1
    assert taken == [
        {
            name: [(word + k & mask) ^ (told & mask) for word in beat[name]]
            for k, name in enumerate(rule.arrays_out)
        }
        for beat in sent[: len(taken)]
    ]
    assert len(taken) == len(sent) > 50 if number < len(RULES) else not sent
