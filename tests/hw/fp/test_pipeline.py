# amaranth: UnusedElaboratable=no
"""The pipeline builder against a list of what went in."""

import random

import pytest
from amaranth.hdl import Const, Module, Signal

from nearstep_hw.fp.pipeline import DELAYS as DELAY_FORMS
from nearstep_hw.fp.pipeline import Parts, Pipeline, PipelineError, Step, spread

from ..simulate import simulate

DELAYS = (1, 2, 3, 5, 7, 9, 16, 17, 18, 33, 80)


@pytest.mark.parametrize("delay", DELAY_FORMS)
@pytest.mark.parametrize("width", [1, 5, 32, 70])
def test_delays_count_enabled_cycles(delay, width):
    m = Module()
    data, en, valid = Signal(width), Signal(), Signal()
    pipe = Pipeline(m, en=en, delay=delay)
    value = pipe.source(data)
    taps = {n: pipe.at(value, n) for n in random.Random(1).sample(DELAYS, len(DELAYS))}
    last = pipe.valid(valid, DELAYS[-1])
    seed = f"{delay} {width}"
    rng = random.Random(seed)
    went_in, checks = [], 0

    async def bench(ctx):
        nonlocal checks
        for _ in range(300):
            item = (rng.getrandbits(width), rng.getrandbits(1))
            enabled = rng.random() < 0.7
            ctx.set(data, item[0])
            ctx.set(valid, item[1])
            ctx.set(en, enabled)
            for n, tap in taps.items():
                if len(went_in) >= n:
                    assert ctx.get(tap) == went_in[-n][0], f"{n} cycles before, seed {seed!r}"
                    checks += 1
            expected = went_in[-DELAYS[-1]][1] if len(went_in) >= DELAYS[-1] else 0
            assert ctx.get(last) == expected
            await ctx.tick()
            if enabled:
                went_in.append(item)

    simulate(m, bench)
    assert checks > 1000


def test_users_of_a_value_share_its_delay():
    pipe = Pipeline(Module())
    value = pipe.source(Signal(8))
    assert pipe.at(value, 4) is pipe.at(value, 4)
    assert pipe.at(value, 0) is value.value


def test_constants_are_present_at_every_stage():
    pipe = Pipeline(Module())
    scalar = Signal(8)
    assert pipe.at(pipe.constant(scalar), 17) is scalar
    literal = pipe.source(Const(3, 8))
    assert pipe.at(literal, 5) is literal.value
    assert pipe.latest(pipe.constant(1), literal, pipe.source(scalar, 6)) == 6
    assert pipe.delayed(pipe.constant(scalar), 9).stage == 9


def test_a_value_cannot_be_used_before_it_exists():
    pipe = Pipeline(Module())
    with pytest.raises(PipelineError, match="present from stage 3, not at 2"):
        pipe.at(pipe.source(Signal(8), 3), 2)
    with pytest.raises(PipelineError, match="another pipeline"):
        Pipeline(Module()).at(pipe.source(Signal(8)), 1)
    with pytest.raises(PipelineError, match="one of ring, shift, counted, not 'bram'"):
        Pipeline(Module(), delay="bram")


@pytest.mark.parametrize(
    ("costs", "depth", "stages"),
    [
        ((1, 1, 1), 3, [0, 1, 2]),
        ((1, 1, 1), 1, [0, 0, 0]),
        ((1, 1, 1), 6, [0, 2, 4]),
        ((1, 0.5, 0.5, 1), 3, [0, 1, 1, 2]),
        ((3, 1, 1, 1), 2, [0, 1, 1, 1]),
    ],
)
def test_steps_share_stages_evenly(costs, depth, stages):
    pipe = Pipeline(Module())
    assert [step.stage for step in pipe.steps(10, costs, depth)] == [10 + k for k in stages]


@pytest.mark.parametrize(
    ("depth", "whole", "stages"),
    [
        (2, None, [[0, 0], [1], [1, 1, 1]]),
        (3, None, [[0, 0], [1], [2, 2, 2]]),
        (3, 2, [[0, 1], [1], [1, 2, 2]]),
        (5, None, [[0, 1], [2], [3, 3, 4]]),
        (6, None, [[0, 1], [2], [3, 4, 5]]),
        (12, None, [[0, 2], [4], [6, 8, 10]]),
    ],
)
def test_steps_are_divided_where_there_are_more_stages(depth, whole, stages):
    costs = (Parts(1, (5, 5)), Parts(0.5, (2,)), Parts(1, (1, 4, 5)))
    steps = Pipeline(Module()).steps(0, costs, depth, whole=whole)
    assert [[step.stage for step in parts] for parts in steps] == stages


def test_items_share_the_stages_of_successive_steps():
    pipe = Pipeline(Module())
    first, second = Step(pipe, 3), Step(pipe, 5)
    assert spread([first, first, second], [1, 1, 4]) == [first, first, second]
    assert spread([first, second], [1]) == [first]
    assert spread([first, first], [1, 1, 1]) == [first] * 3


@pytest.mark.parametrize("depth", [0, -1, 1.5])
def test_depth_must_be_positive(depth):
    with pytest.raises(PipelineError, match="positive integer, not"):
        Pipeline(Module()).steps(0, (1, 1), depth)
