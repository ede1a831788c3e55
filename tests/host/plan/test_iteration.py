"""Iterations on a timeline, held against closed forms and against what memory holds."""

import random
from collections.abc import Sequence

import pytest

from nearstep.errors import ArgumentError
from nearstep.plan.iteration import Iterations, Limits, Roles
from nearstep.plan.pieces import Item, Layer, cut
from nearstep.plan.residency import NoRoomError, updated_first
from nearstep.plan.schedule import Schedule
from nearstep.work.executor import execute
from nearstep.work.timeline import Timeline

from .machines import DIMM, HOST, machine, random_layers


def planned(
    layers: Sequence[Layer],
    roles: Roles,
    capacity: int,
    count: int = 2,
    most: int = 1_000_000,
    limits: Limits | None = None,
) -> tuple[Iterations, Timeline]:
    channels = len(roles.memory)
    pieces = cut(layers, channels, most)
    borrowed = {
        index: [piece for piece in pieces[0] if piece.parameter == 0]
        for index, layer in enumerate(layers)
        if layer.borrowed
    }
    schedule = Schedule(
        pieces, borrowed=borrowed, capacity=[capacity] * channels, policy=updated_first
    )
    schedule.place()
    plan = Iterations(layers, pieces, schedule, machine(), roles, limits or Limits())
    for _ in range(count):
        plan.add()
    return plan, execute(plan.graph)


def test_one_layer_of_one_piece_takes_the_sum_of_its_parts() -> None:
    layer = Layer(name="only", parameters=(1_000_000,), forward_s=1e-3, backward_s=2e-3)
    plan, timeline = planned([layer], HOST, 16_000_000)
    copy = 4e6 / 16e9  # the PCIe link is the slowest between host and GPU
    for each in plan.times(timeline):
        assert each.forward_s == pytest.approx(copy + 1e-3, abs=1e-11)
        assert each.backward_s == pytest.approx(2e-3 + copy + 1e6 / 1.4e8, abs=1e-11)


def test_state_on_drives_is_gathered_and_put_back_over_their_link() -> None:
    layers = [Layer(name=str(i), parameters=(1_000_000,)) for i in range(4)]
    _, timeline = planned(layers, HOST, 16_000_000, count=1)
    # In memory are all arrays of the first piece and p of the second. Forward reads two parameters;
    # backward three, of which it wrote one, and gathers m and v of each piece, which put out what
    # was there: 16 MB, then three arrays of each piece before.
    assert timeline.traffic["nvme", 1] == (2 + 3 + 4 * 2) * 4_000_000
    assert timeline.traffic["nvme", 0] == (4 + 3 * 3) * 4_000_000


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))]
)
def test_memory_holds_no_more_than_it_has_at_any_time(seed: int) -> None:
    """Bytes from where they begin to come to where they are gone or given up, on the timeline."""
    print(f"seed {seed}")
    choose = random.Random(seed)
    checks = 0
    for _ in range(40):
        layers = random_layers(choose)
        roles = choose.choice((DIMM, HOST))
        capacity = choose.randint(16 * 1600, 16 * 9000)
        try:
            _, timeline = planned(layers, roles, capacity, most=choose.choice((1500, 4000)))
        except NoRoomError:
            continue
        checks += check_memory(timeline, len(roles.memory), capacity)
    assert checks > 300


def check_memory(timeline: Timeline, channels: int, capacity: int) -> int:
    """Assert it, and return how many arrays there were.

    What gives way without having come was there from the beginning; what was there and never gives
    way is not seen.
    """
    comes: dict[Item, int] = {}
    events: list[list[tuple[int, int]]] = [[] for _ in range(channels)]
    for entry in sorted(timeline.entries, key=lambda each: each.operation.index):
        kind = entry.operation.name.split()[0]
        touched = [each for each in entry.operation.writes if each.space[0] == "memory"]
        for each in touched:
            item = each.space[1]
            if kind in ("load", "send"):
                comes[item] = entry.start
            elif kind in ("evict", "drop"):
                begun = comes.pop(item, 0)
                events[item.piece.channel] += [(begun, item.nbytes), (entry.end, -item.nbytes)]
    for item, begun in comes.items():
        events[item.piece.channel].append((begun, item.nbytes))
    checks = 0
    for channel in events:
        held = 0
        for _, nbytes in sorted(channel):  # at one time what goes, goes first
            held += nbytes
            assert 0 <= held <= capacity
            checks += 1
    return checks


def test_a_later_iteration_begins_when_the_one_before_has_ended() -> None:
    layers = [Layer(name=str(i), parameters=(1000,), forward_s=1e-6) for i in range(3)]
    plan, timeline = planned(layers, DIMM, 1_000_000, count=3)
    times = plan.times(timeline)
    assert timeline.seconds == pytest.approx(sum(each.total_s for each in times), abs=1e-11)
    assert times[1].total_s == pytest.approx(times[2].total_s, abs=1e-11)


@pytest.mark.parametrize("layers", [12, 24])
def test_backward_and_updates_overlap_on_two_channels(layers: int) -> None:
    """At most 1.1 times the longest of computation, host link and the slower channel."""
    equal = [
        Layer(name=str(i), parameters=(250_000,) * 4, forward_s=1e-4, backward_s=2e-4)
        for i in range(layers)
    ]
    limits = Limits(layers_ahead=2, gradient_layers=2)
    plan, timeline = planned(equal, DIMM, 1_000_000_000, limits=limits)
    last = plan.times(timeline)[-1]
    channel = layers * 5e5 / DIMM.params_per_s
    link = (2 * layers - 1) * 4e6 / 8e9  # the last layer's parameters are there
    longest = max(layers * 2e-4, channel + link / 2, link)
    serial = layers * (2e-4 + 1e6 / DIMM.params_per_s) + link
    print(f"{last.backward_s / longest:.3f} of the longest, serial {serial / longest:.3f}")
    assert longest <= last.backward_s <= 1.1 * longest


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_than_the_layers_ahead_are_fetched(ahead: int) -> None:
    layers = [Layer(name=str(i), parameters=(1000,), forward_s=1e-3) for i in range(6)]
    _, timeline = planned(layers, DIMM, 1_000_000, limits=Limits(layers_ahead=ahead))
    fetches = [each.start for each in timeline.entries if each.operation.name == "fetch p4"]
    forwards = [each.end for each in timeline.entries if each.operation.name.startswith("forward")]
    assert len(fetches) == 4  # forward and backward, twice
    assert sum(end <= min(fetches) for end in forwards) == 4 - ahead


@pytest.mark.parametrize("waiting", [1, 2, 4])
def test_gradients_of_no_more_layers_wait(waiting: int) -> None:
    layers = [Layer(name=str(i), parameters=(1000,), backward_s=1e-9) for i in range(6)]
    _, timeline = planned(layers, DIMM, 1_000_000, 1, limits=Limits(gradient_layers=waiting))
    sent = {e.operation.name: e.end for e in timeline.entries if e.operation.name[:6] == "send g"}
    (begun,) = [e.start for e in timeline.entries if e.operation.name == "backward 0"]
    on_device = sum(end > begun for end in sent.values())  # its own among them
    assert len(sent) == 6
    assert on_device == waiting


def test_limits_that_nothing_can_keep_are_refused() -> None:
    for wrong in ({"layers_ahead": -1}, {"gradient_layers": 0}):
        with pytest.raises(ArgumentError, match="must be at least 0"):
            Limits(**wrong)
