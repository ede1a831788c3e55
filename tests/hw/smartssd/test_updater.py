# amaranth: UnusedElaboratable=no
"""The general updater: each rule by its number, and a number that names none."""

import numpy as np
import pytest

from nearstep_hw.smartssd.updater import GeneralUpdater
from nearstep_sim.bench.operands import operands, registers
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import register_words
from nearstep_spec.rule.adagrad import ADAGRAD
from nearstep_spec.rule.adam import ADAM
from nearstep_spec.rule.sgd import SGD, SGD_MOMENTUM

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
