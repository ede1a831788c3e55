"""The model of a link: when phits arrive, and what happens to frames."""

import pytest

from nearstep_sim.models.link.faults import LinkFault, LinkOptionError, LinkOptions
from nearstep_sim.models.link.probe import Sample, run_link

ENTRY, CONTROL = 2, 1


def frames(count: int, phits: int = 4, kind: int = ENTRY, every: int = 0) -> list[list[Sample]]:
    """Frames whose phits are all different; one may begin each `every` cycles."""
    made = []
    for number in range(count):
        head = kind | (phits - 3) << 15 if kind == ENTRY else kind
        made.append(
            [
                Sample(
                    (number * 1000 + place) << 64 | (head if place == 0 else number),
                    place == 0,
                    place == phits - 1,
                    number * every,
                )
                for place in range(phits)
            ]
        )
    return made


def flat(many: list[list[Sample]]) -> list[Sample]:
    return [phit for frame in many for phit in frame]


def content(samples: list[Sample]) -> list[tuple[int, bool, bool]]:
    return [(sample.data, sample.head, sample.last) for sample in samples]


@pytest.mark.parametrize("latency", [1, 2, 7, 100])
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_a_phit_arrives_after_the_latency(latency, interval):
    sent = flat(frames(20))
    run = run_link(sent, LinkOptions(latency=latency, interval=interval), cycles=1000)
    assert run.taken == [interval * i for i in range(80)]
    assert [s.cycle for s in run.arrived] == [cycle + latency for cycle in run.taken]
    assert content(run.arrived) == content(sent)
    assert (run.frames, run.delivered_phits, sum(run.faults.values())) == (20, 80, 0)


@pytest.mark.parametrize("nth", [0, 1, 8, 9])
def test_a_dropped_frame_is_missing(nth):
    sent = frames(10)
    run = run_link(flat(sent), LinkOptions(), [LinkFault(kind="drop", nth=nth)], cycles=500)
    assert content(run.arrived) == content(flat(sent[:nth] + sent[nth + 1 :]))
    assert run.faults["drop"] == 1


@pytest.mark.parametrize("nth", [0, 9])
def test_a_doubled_frame_comes_twice(nth):
    sent = frames(10)
    run = run_link(flat(sent), LinkOptions(), [LinkFault(kind="duplicate", nth=nth)], cycles=500)
    assert content(run.arrived) == content(flat([*sent[: nth + 1], *sent[nth:]]))
    assert run.faults["duplicate"] == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_frame_held_back_comes_behind_the_next_or_the_one_after(seed):
    sent = frames(10)
    run = run_link(
        flat(sent), LinkOptions(seed=seed), [LinkFault(kind="reorder", nth=3)], cycles=500
    )
    behind = [content(flat([*sent[:3], *sent[4:n], sent[3], *sent[n:]])) for n in (5, 6)]
    assert content(run.arrived) in behind
    assert run.faults["reorder"] == 1


def test_a_frame_held_back_comes_at_last_without_another():
    sent = frames(1)
    run = run_link(flat(sent), LinkOptions(), [LinkFault(kind="reorder")], cycles=3000)
    assert run.arrived == []
    run = run_link(flat(sent), LinkOptions(), [LinkFault(kind="reorder")], cycles=5000)
    assert content(run.arrived) == content(sent[0])


@pytest.mark.parametrize("seed", range(20))
def test_a_corrupt_frame_differs_in_up_to_three_bits_of_one_phit(seed):
    sent = flat(frames(5))
    run = run_link(sent, LinkOptions(seed=seed), [LinkFault(kind="corrupt", nth=2)], cycles=500)
    pairs = list(zip(content(run.arrived), content(sent), strict=True))
    wrong = [index for index, (got, was) in enumerate(pairs) if got != was]
    assert len(wrong) <= 1  # flips of the same bit undo each other
    for index in wrong:
        (data, head, last), (was, had_head, had_last) = pairs[index]
        assert 8 <= index < 12
        flips = (data ^ was).bit_count() + (head != had_head) + (last != had_last)
        assert 1 <= flips <= 3
    assert run.faults["corrupt"] == 1


def test_corruption_hits_any_phit():
    places = set()
    sent = flat(frames(1))
    for seed in range(60):
        run = run_link(sent, LinkOptions(seed=seed), [LinkFault(kind="corrupt")], cycles=100)
        pairs = zip(content(run.arrived), content(sent), strict=True)
        places |= {index for index, (got, was) in enumerate(pairs) if got != was}
    assert places == {0, 1, 2, 3}


def test_a_fault_counts_frames_of_its_kind():
    mixed = [*frames(2), *frames(3, 1, CONTROL), *frames(2)]
    fault = LinkFault(kind="drop", frame="control", nth=1, times=2)
    run = run_link(flat(mixed), LinkOptions(), [fault], cycles=500)
    assert content(run.arrived) == content(flat([*mixed[:3], *mixed[5:]]))
    assert run.faults["drop"] == 2


def test_nothing_passes_a_dead_link():
    sent = flat(frames(10))
    run = run_link(sent, LinkOptions(), [LinkFault(kind="dead", nth=5)], cycles=500)
    assert run.swallowed == 20
    assert run.taken[-1] == 39  # the sender is not told
    assert content(run.arrived) == content(sent)[: len(run.arrived)]
    run = run_link(sent, LinkOptions(), [LinkFault(kind="dead")], cycles=500)
    assert run.arrived == []


def test_all_is_delivered_behind_a_stall():
    sent = flat(frames(100))
    run = run_link(
        sent, LinkOptions(latency=10), [LinkFault(kind="stall", cycles=1000)], cycles=2000
    )
    assert content(run.arrived) == content(sent)
    assert min(s.cycle for s in run.arrived) == 1000
    assert run.taken[0] == 0
    assert run.taken[-1] >= 1000  # what is under way is limited
    # The sender goes on once what is late is on its way: a gap of at most the latency.
    assert run.arrived[-1].cycle <= 1000 + 400 + 10


@pytest.mark.parametrize("kind", ["drop", "duplicate", "reorder", "corrupt"])
def test_rates_are_kept_and_the_seed_decides(kind):
    sent = flat(frames(4000, every=8))
    options = [LinkOptions(seed=seed, **{kind: 0.1}) for seed in (1, 1, 2)]
    runs = [run_link(sent, each, cycles=40_000) for each in options]
    assert runs[0] == runs[1] != runs[2]
    for run in runs:
        assert 330 <= run.faults[kind] <= 470
    delivered = {"drop": -4, "duplicate": 4}.get(kind, 0) * runs[0].faults[kind]
    assert runs[0].delivered_phits == 16_000 + delivered


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LinkOptions(latency=0), "latency must be a whole number from 1 to"),
        (lambda: LinkOptions(interval=0), "interval must be"),
        (lambda: LinkOptions(seed=-1), "seed must be"),
        (lambda: LinkOptions(drop=1.5), "drop must be a chance from 0 to 1, not 1.5"),
        (lambda: LinkOptions(corrupt=-0.1), "corrupt must be"),
        (lambda: LinkFault(kind="late"), "kind must be one of drop, duplicate"),
        (lambda: LinkFault(kind="drop", frame="head"), "frame must be one of any"),
        (lambda: LinkFault(kind="drop", direction=2), "direction must be"),
        (lambda: LinkFault(kind="drop", times=0), "times must be"),
        (lambda: LinkFault(kind="stall"), "cycles must be a whole number from 1 to"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, text):
    with pytest.raises(LinkOptionError, match=text):
        make()
