"""The packer against a list of dwords."""

import random

import pytest

from nearstep_hw.pcie.dword_packer import DwordPacker

from ..simulate import giving, simulate, taking

WIDTH = 9


def packed(lane: int, dwords: list[int], lanes: int) -> list[list[int]]:
    """Beats that a packet fills from a lane on."""
    flat = [0] * lane + dwords
    flat += [0] * (-len(flat) % lanes)
    return [flat[at : at + lanes] for at in range(0, len(flat), lanes)]


@pytest.mark.parametrize(
    ("elements", "lanes"),
    [
        *((2, 16), (4, 4)),
        *(
            pytest.param(*each, marks=pytest.mark.deep)
            for each in ((2, 2), (4, 16), (8, 8), (16, 16))
        ),
    ],
)
@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_runs_are_packed_side_by_side(elements, lanes, stall):
    rng = random.Random(f"{elements} {lanes} {stall}")
    runs, expected = [], []
    for _ in range(60):
        lane, dwords, discontinue = rng.randrange(lanes), [], rng.randrange(2)
        for index in range(count := rng.randrange(1, 7)):
            run = [rng.randrange(1, 1 << WIDTH) for _ in range(rng.randrange(1, elements + 1))]
            last = index == count - 1
            start = rng.randrange(lanes) if index else lane  # counts in the first run only
            runs.append((run, start, last, discontinue if last else rng.randrange(2)))
            dwords += run
        beats = packed(lane, dwords, lanes)
        for beat in beats:
            last = beat is beats[-1]
            expected.append((beat, last, last and bool(discontinue)))

    dut, got = DwordPacker(elements=elements, lanes=lanes, element_width=WIDTH), []
    shown = [
        {
            "elements": run + [rng.randrange(1 << WIDTH) for _ in range(elements - len(run))],
            "count": len(run),
            "lane": lane,
            "last": last,
            "discontinue": discontinue,
        }
        for run, lane, last, discontinue in runs
    ]
    simulate(
        dut,
        giving(dut.i, shown, lambda: rng.random() < stall and rng.randrange(1, 5)),
        taking(dut.o, got, len(expected), lambda: rng.random() >= stall),
    )
    got = [
        ([beat.elements[at] for at in range(lanes)], bool(beat.last), bool(beat.discontinue))
        for beat in got
    ]
    assert got == expected
    print(f"{len(got)} beats of {len(runs)} runs")


@pytest.mark.parametrize(("elements", "lanes"), [(4, 2), (4, 12)])
def test_lanes_that_do_not_fit_are_errors(elements, lanes):
    with pytest.raises(ValueError, match=f"power of two and at least {elements}, not {lanes}"):
        DwordPacker(elements=elements, lanes=lanes, element_width=WIDTH)
