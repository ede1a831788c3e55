"""Both sequencers alone: a part in every cycle, what waits for what, and how much has room."""

import random
from collections import deque

import pytest
from amaranth.hdl import Cat

from nearstep_hw.updater.free_sequencer import AROUND, FreeSequencer, results_depth
from nearstep_hw.updater.kernel_core import unit_bank
from nearstep_hw.updater.sequencer import UnitSequencer, units_latency
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import update_rule

from ..simulate import simulate

INPUTS, OUTPUTS = ("p", "g"), ("p",)
ROOTS = """
from nearstep_spec.rule.expr import sqrt
from nearstep_spec.rule.optimizer import Optimizer
from nearstep_spec.rule.rule import Rule


def roots(p, g):
    for _ in range(70):
        g = sqrt(g)
    return {"p": p + g}


ROOTS = Optimizer(
    rule=Rule("roots", roots, states=("p",), inputs=("g",), scalars=()),
    scalars=lambda: {},
    hyper={},
    state={},
)
"""


def run(
    sequencer, units, *, beats, latency=9, supply=1.0, room=1.0, stop=None, most=3000, rule="sgd"
):
    """Beats that came out, with the cycles of everything; p ^ g is what the units make."""
    config = UpdateKernelConfig(lanes=2, functional_units=units, block_bytes=64, rules=(rule,))
    latency = latency or units_latency(config)
    assert update_rule(config).arrays_in == INPUTS
    dut = sequencer(config, unit=unit_bank(config), inputs=INPUTS, outputs=OUTPUTS, beats_width=10)
    rng = random.Random(7)
    given = [[rng.getrandbits(64) for _ in range(beats + 4)] for _ in INPUTS]
    found = {"out": [], "fed": [], "starved": 0, "blocked": 0, "inside": 0}
    lines = Cat(
        dut.unit.i_en, dut.unit.i_valid, dut.o_taken, dut.o_beat_ready, dut.o_starved,
        dut.o_blocked, dut.o_empty, dut.i_p.ready, dut.i_g.ready, dut.o_p.valid,
    )  # fmt: skip

    async def bench(ctx):
        pipeline = deque([None] * latency)
        at = [0, 0]
        fed = made = 0
        ctx.set(dut.i_beats, beats)
        ctx.set(dut.i_launch, 1)
        await ctx.tick()
        ctx.set(dut.i_launch, 0)
        for cycle in range(most):
            have = [rng.random() < supply for _ in INPUTS]
            for stream, name in enumerate(INPUTS):
                ctx.set(getattr(dut, f"i_{name}").valid, have[stream])
                ctx.set(getattr(dut, f"i_{name}").payload, given[stream][at[stream]])
            space = rng.random() < room
            ctx.set(dut.o_p.ready, space)
            ctx.set(dut.i_stop, stop is not None and cycle >= stop)
            word = ctx.get(lines)
            en, valid, taken, put, starved, blocked, empty, *ready, out = (
                word >> k & 1 for k in range(10)
            )
            assert ready == [taken, taken]
            assert out == put
            if put:
                assert space
                found["out"].append((cycle, ctx.get(dut.o_p.payload)))
                made += 1
            entering = None
            if en and valid:
                assert fed < beats * config.cycles_per_beat
                entering = ctx.get(dut.unit.i_p) ^ ctx.get(dut.unit.i_g)
                found["fed"].append(cycle)
                fed += 1
            found["starved"] += starved
            found["blocked"] += blocked
            for stream in range(2):
                at[stream] += taken
            assert not taken or all(have)
            found["inside"] = max(found["inside"], at[0] - made)
            await ctx.tick()
            if en:
                pipeline.append(entering)
                pipeline.popleft()
                ctx.set(dut.unit.o_valid, pipeline[0] is not None)
                ctx.set(dut.unit.o_p, pipeline[0] or 0)
            if stop is None:
                if made == beats and empty:
                    break
            elif cycle > stop and empty:
                break
        else:
            raise AssertionError(f"not empty after {most} cycles")
        found["empty"] = cycle

    simulate(dut, bench)
    wanted = [p ^ g for p, g in zip(*given, strict=True)]
    assert [value for _, value in found["out"]] == wanted[: len(found["out"])]
    return found, config


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("sequencer", [UnitSequencer, FreeSequencer])
def test_a_part_moves_in_every_cycle_and_whatever_waits_is_told(sequencer, units):
    beats, latency, late = 40, 9, 4 if sequencer is FreeSequencer else 0
    found, config = run(sequencer, units, beats=beats, latency=latency)
    parts = beats * config.cycles_per_beat
    assert found["fed"] == list(range(bool(late), parts + bool(late)))
    assert found["out"][0][0] == config.cycles_per_beat - 1 + latency + late
    assert found["out"][-1][0] == parts - 1 + latency + late
    assert (found["starved"], found["blocked"]) == (0, 0)
    for supply, room in ((0.5, 1.0), (1.0, 0.3), (0.5, 0.5)):
        found, _ = run(sequencer, units, beats=beats, supply=supply, room=room)
        assert len(found["out"]) == beats
        assert len(found["fed"]) == parts
        assert (found["starved"] > 0) == (supply < 1)
        waited = found["fed"][-1] - bool(late) + 1 - parts
        if sequencer is FreeSequencer:
            assert found["starved"] + found["blocked"] == waited
        assert found["blocked"] == 0 or room < 1


@pytest.mark.parametrize("sequencer", [UnitSequencer, FreeSequencer])
def test_a_run_that_is_stopped_empties_the_pipelines_and_puts_nothing(sequencer):
    for stop in (0, 5, 30):
        found, _ = run(sequencer, 1, beats=40, stop=stop)
        assert all(cycle < stop for cycle, _ in found["out"])
        assert all(cycle < stop + 1 for cycle in found["fed"])
        assert found["empty"] <= stop + 12


@pytest.mark.parametrize("sequencer", [UnitSequencer, FreeSequencer])
def test_pipelines_of_more_than_1024_stages_are_emptied(sequencer, tmp_path):
    rule = tmp_path / "roots.py"
    rule.write_text(ROOTS)
    found, config = run(sequencer, 1, beats=600, latency=None, stop=1150, rule=f"{rule}:ROOTS")
    latency = units_latency(config)
    assert latency > 1024
    assert len(found["fed"]) > latency
    assert found["empty"] == found["fed"][-1] + latency + 1


def test_results_that_nobody_takes_fill_all_of_their_fifo_and_no_more():
    found, config = run(FreeSequencer, 2, beats=200, room=0.1, latency=60)
    depth = results_depth(config)
    assert depth >= AROUND
    assert found["inside"] == depth
    assert len(found["out"]) == 200
