"""Two link layers and the links between them: every entry once, whole and in order."""

import zlib

import numpy as np
import pytest

from nearstep_hw.coarse.crc import entry_crc, header_crc
from nearstep_sim.coarse.link_layer import DEVICES, Inputs, LinkBench
from nearstep_sim.models.link.faults import KINDS, LinkFault, LinkOptions
from nearstep_spec.coarse.config import FRAME_PHITS, CoarseConfig

from ..simulate import simulate

GROUPS = (1, 2, 4)
SMALL = {
    groups: CoarseConfig(groups=groups, entry_phits=16, buffer_entries=4, chunks_ahead=4)
    for groups in GROUPS
}
RATES = {
    "drop": {"drop": 0.05},
    "duplicate": {"duplicate": 0.05},
    "reorder": {"reorder": 0.05},
    "corrupt": {"corrupt": 0.05},
    "all": {"drop": 0.03, "duplicate": 0.03, "reorder": 0.03, "corrupt": 0.03},
}
BAD = ("replays", "bad_frames", "gaps", "duplicates")
ENTRIES = 300
COUNTED = ("sent_phits", "payload_phits", *BAD)
KNOWN = {
    (1, 2, 2, "all"): (8128, 14309, 11031, 112, 55, 128, 70, 2724203227),
    (1, 2, 1, "reorder"): (7370, 12796, 10298, 20, 0, 59, 20, 2097645658),
    (2, 2, 2, "corrupt"): (6977, 14078, 11037, 50, 80, 10, 0, 782052213),
    (2, 2, 1, "drop"): (7944, 13661, 11050, 59, 0, 57, 0, 1046759585),
}
"""Cycles, counters and digest over bad links, by seed, groups, ports and kind: a change by which
losses cost more, or a header has another bit, is noticed, although every entry comes."""


def total(bench: LinkBench) -> dict[str, int]:
    """Counters of all ports of both devices."""
    sums: dict[str, int] = {}
    for state in bench.state():
        for port in state.counters:
            for name, count in port.items():
                sums[name] = sums.get(name, 0) + count
    return sums


def digest(bench: LinkBench) -> int:
    """32 bits that every phit of both devices, and its cycle, have changed."""
    first, second = bench.state()
    return (first.digest ^ second.digest << 1) % (1 << 32)


def check(bench: LinkBench, entries: int | None = None) -> int:
    """Every phit that came is the one that was sent; how many were compared."""
    phits = 0
    for state in bench.state():
        assert state.mismatches == [0] * bench.config.groups
        assert (state.unused_port, state.unstable) == (0, 0)
        assert state.checks == state.phits
        if entries is not None:
            assert state.delivered == [entries] * bench.config.groups
        phits += sum(state.checks)
    return phits


def deliver(bench: LinkBench, entries: int, *, cycles: int = 400_000) -> int:
    """Send so many entries of each group, and wait for all of them. Returns the cycles."""
    bench.send(entries)
    ran = bench.run(cycles, until_delivered=True)
    assert ran < cycles, f"not delivered in {cycles} cycles: {bench.state()}"
    return ran


pytestmark = pytest.mark.deep
"""Fast tests run links, good and bad ones, in the pool: `tests/sim/coarse`."""


@pytest.mark.parametrize(("make", "width"), [(header_crc, 12), (entry_crc, 16)])
def test_crc_is_that_of_zlib(make, width):
    words = np.random.default_rng(5).integers(0, 256, (6, width), np.uint8)
    dut = make()
    seen = []

    async def bench(context):
        for index, word in enumerate(words):
            context.set(dut.start, index == 0)
            context.set(dut.valid, 1)
            context.set(dut.data, int.from_bytes(word.tobytes(), "little"))
            await context.tick()
            seen.append(context.get(dut.crc))

    simulate(dut, bench)
    assert seen == [zlib.crc32(words[: n + 1].tobytes()) for n in range(len(words))]


@pytest.mark.parametrize("ports", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_nothing_is_sent_again_on_a_good_link(groups, ports):
    bench = LinkBench(
        SMALL[groups],
        seed=groups,
        ports=ports,
        options=LinkOptions(latency=20),
        inputs=Inputs(source_stall=0.2, sink_stall=0.2),
    )
    deliver(bench, ENTRIES)
    payload = check(bench, ENTRIES)
    counters = total(bench)
    assert {name: counters[name] for name in BAD} == dict.fromkeys(BAD, 0)
    assert counters["received_entries"] == DEVICES * groups * ENTRIES
    assert counters["payload_phits"] == payload
    frames = bench.frames()
    control = frames - counters["received_entries"]
    assert counters["sent_phits"] == payload + FRAME_PHITS * (frames - control) + control


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("ports", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_entry_comes_once_and_in_order_over_a_bad_link(groups, ports, kind, seed):
    print("seed", seed)
    bench = LinkBench(
        SMALL[groups],
        seed=seed,
        ports=ports,
        options=LinkOptions(latency=20, seed=seed, **RATES[kind]),
        inputs=Inputs(source_stall=0.1, sink_stall=0.1),
    )
    cycles = deliver(bench, ENTRIES)
    assert check(bench, ENTRIES) > 7 * DEVICES * groups * ENTRIES
    faults, counters = bench.faults(), total(bench)
    made = (cycles, *(counters[name] for name in COUNTED), digest(bench))
    assert KNOWN.get((seed, groups, ports, kind), made) == made
    for name in RATES[kind]:
        assert faults[name] > 10
    if kind in ("drop", "corrupt", "all"):
        assert counters["replays"] > 0
        assert counters["gaps"] > 0
    if kind in ("corrupt", "all"):
        assert counters["bad_frames"] > 0
    if kind == "duplicate":
        assert 0 < counters["duplicates"] <= faults["duplicate"]
        assert counters["replays"] == counters["gaps"] == counters["bad_frames"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_long_runs_over_bad_links_of_any_latency(seed):
    print("seed", seed)
    rng = np.random.default_rng(seed)
    checks = 0
    for groups in (1, 2, 4):
        rates = {name: float(rng.uniform(0, 0.08)) for name in RATES["all"]}
        bench = LinkBench(
            SMALL[groups],
            seed=seed,
            ports=int(rng.integers(1, 3)),
            options=LinkOptions(
                latency=int(rng.integers(1, 200)),
                interval=int(rng.integers(1, 4)),
                seed=seed,
                **rates,
            ),
            inputs=Inputs(
                source_stall=float(rng.uniform(0, 0.9)),
                sink_stall=float(rng.uniform(0, 0.9)),
                keepalive=int(rng.integers(100, 500)),
                retry=int(rng.integers(1000, 3000)),
            ),
        )
        deliver(bench, 1000, cycles=20_000_000)
        checks += check(bench, 1000)
    assert checks > 10_000


@pytest.mark.parametrize("kind", ["drop", "duplicate", "reorder", "corrupt"])
@pytest.mark.parametrize("frame", ["entry", "control"])
@pytest.mark.parametrize("nth", [0, 1, 3, 4, 31, 62, 63, 64, 65, 127, 128])
def test_one_frame_goes_wrong_at_any_place(kind, frame, nth):
    """The first, those about a full window, and about where numbers wrap: 64 and 128."""
    bench = LinkBench(SMALL[1], seed=nth + 1, options=LinkOptions(latency=12), full=True)
    # Traffic in one direction only, so that there are control frames in the other.
    direction = 0 if frame == "entry" else 1
    bench.fault(LinkFault(kind=kind, frame=frame, nth=nth, direction=direction))
    bench.send(ENTRIES, device=0)
    assert bench.run(50_000, until_delivered=True) < 50_000
    bench.run(3_000)  # what was held back or is sent again
    assert check(bench) == ENTRIES * 16
    assert bench.faults()[kind] == 1
    counters = total(bench)
    if frame == "control":  # the next one tells the same
        assert {name: counters[name] for name in ("gaps", "duplicates")} == {
            "gaps": 0,
            "duplicates": 0,
        }
        assert counters["bad_frames"] <= (kind == "corrupt")
        assert counters["replays"] == 0
    elif kind == "duplicate":
        assert (counters["duplicates"], counters["gaps"], counters["replays"]) == (1, 0, 0)
    elif kind in ("drop", "corrupt"):
        assert counters["replays"] == 1
        assert counters["duplicates"] == 0
    assert counters["received_entries"] == ENTRIES


@pytest.mark.parametrize("kind", ["drop", "duplicate", "reorder", "corrupt"])
@pytest.mark.parametrize("which", ["last entry", "last acknowledgement"])
def test_the_last_frame_goes_wrong(kind, which):
    """Nothing comes behind it that would show the loss: only time does."""
    bench = LinkBench(SMALL[1], seed=1, options=LinkOptions(latency=12), full=True)
    bench.send(9, device=0)
    assert bench.run(20_000, until_delivered=True) < 20_000
    bench.run(1_500)  # all is quiet
    direction, frame = (0, "entry") if which == "last entry" else (1, "any")
    bench.fault(LinkFault(kind=kind, frame=frame, direction=direction))
    bench.send(1, device=0)
    assert bench.run(20_000, until_delivered=True) < 20_000
    bench.run(3_000)
    assert check(bench) == 10 * 16
    assert bench.faults()[kind] == 1
    bench.send(20)
    assert bench.run(20_000, until_delivered=True) < 20_000
    assert check(bench) == 50 * 16


@pytest.mark.parametrize("kind", ["drop", "duplicate", "reorder", "corrupt"])
@pytest.mark.parametrize("frame", ["entry", "control"])
def test_frames_go_wrong_while_buffers_are_full(kind, frame):
    bench = LinkBench(SMALL[1], seed=1, options=LinkOptions(latency=12), full=True)
    for device in range(DEVICES):
        bench.set(device, sink_stall=1.0)
    for direction in range(2):
        bench.fault(LinkFault(kind=kind, frame=frame, nth=2, times=2, direction=direction))
    bench.send(30)
    bench.run(10_000)
    # Both buffers are full, and the source has begun no further entry.
    assert [state.sent for state in bench.state()] == [[8], [8]]
    assert total(bench)["received_entries"] == 8
    for device in range(DEVICES):
        bench.set(device, sink_stall=0.0)
    assert bench.run(50_000, until_delivered=True) < 50_000
    assert bench.faults()[kind] == 4
    assert check(bench, 30) == 60 * 16


def test_a_sender_without_credits_sends_nothing():
    bench = LinkBench(SMALL[1], seed=1, full=True)
    bench.set(1, sink_stall=1.0)
    bench.send(30, device=0)
    bench.run(20_000)
    assert bench.state()[0].counters[1]["payload_phits"] == 4 * 16
    assert total(bench)["replays"] == 0
    bench.set(1, sink_stall=0.95)
    assert bench.run(50_000, until_delivered=True) < 50_000
    assert total(bench)["replays"] == 0
    assert check(bench) == 30 * 16


def test_a_core_that_takes_nothing_stops_only_its_group():
    bench = LinkBench(SMALL[4], seed=1, full=True, inputs=Inputs(blocked=0b0100))
    bench.send(100)
    bench.run(20_000)
    for state in bench.state():
        assert state.delivered == [100, 100, 0, 100]
    for device in range(DEVICES):
        bench.set(device, blocked=0)
    assert bench.run(20_000, until_delivered=True) < 20_000
    assert check(bench, 100) == DEVICES * 4 * 100 * 16


def test_an_acknowledgement_goes_alone_only_if_no_entry_carries_it():
    bench = LinkBench(
        SMALL[1],
        seed=1,
        full=True,
        options=LinkOptions(latency=4),
        inputs=Inputs(keepalive=0, retry=0),
    )
    bench.send(1, device=0)
    bench.run(500)
    # It came and was read within the time that a changed number waits: one frame tells both.
    assert bench.state()[1].counters[0]["sent_phits"] == 1
    assert bench.state()[0].counters[1]["sent_phits"] == 16 + FRAME_PHITS
    assert bench.frames() == 2
    check(bench)


@pytest.mark.parametrize("latency", [1, 12, 40])
def test_an_entry_takes_seven_cycles_its_phits_and_the_latency(latency):
    bench = LinkBench(SMALL[1], seed=1, full=True, options=LinkOptions(latency=latency))
    bench.send(1, device=0)
    cycles = bench.run(1_000, until_delivered=True)
    first_sent_to_last = SMALL[1].entry_phits - 1
    assert cycles == 2 * first_sent_to_last + 7 + SMALL[1].entry_phits + latency + 1
    assert check(bench) == SMALL[1].entry_phits


@pytest.mark.parametrize("groups", [1, 2])
def test_a_phit_a_cycle_in_both_directions(groups):
    config = CoarseConfig(groups=groups)
    bench = LinkBench(config, seed=1, full=True, options=LinkOptions(latency=100))
    bench.set(0, keepalive=1024, retry=4096)
    bench.set(1, keepalive=1024, retry=4096)
    bench.send(1000)
    bench.run(2_000)
    before = [state.counters[1 - d] for d, state in enumerate(bench.state())]
    cycles = 60_000
    bench.run(cycles)
    for d, state in enumerate(bench.state()):
        now = state.counters[1 - d]
        payload, sent = (
            (now[name] - before[d][name]) / cycles for name in ("payload_phits", "sent_phits")
        )
        print(f"groups {groups}, from device {d}: payload {payload:.4f}, sent {sent:.4f} a cycle")
        assert payload >= 0.98
        assert sent == 1
    assert check(bench) > 2 * 0.97 * cycles
    assert {name: total(bench)[name] for name in BAD} == dict.fromkeys(BAD, 0)


@pytest.mark.parametrize(("interval", "known"), [(2, 2390087360), (3, 4234102934)])
def test_a_slow_link_is_waited_for(interval, known):
    options = LinkOptions(latency=40, interval=interval)
    bench = LinkBench(SMALL[2], seed=1, full=True, options=options)
    cycles = deliver(bench, 100)
    counters = total(bench)
    assert check(bench, 100) == DEVICES * 200 * 16
    assert counters["stall"] > 0.9 * DEVICES * cycles * (interval - 1) / interval
    assert counters["replays"] == 0
    assert cycles < 1.05 * interval * 200 * (16 + FRAME_PHITS)
    bench.run(3_000)  # what acknowledges the last entries
    assert digest(bench) == known


def test_entries_are_sent_again_after_a_long_time_too():
    retry = 1 << 17
    bench = LinkBench(SMALL[2], seed=1, full=True, inputs=Inputs(retry=retry))
    bench.send(4)
    bench.fault(LinkFault(kind="stall", direction=1, cycles=retry + 2_000))
    bench.run(retry - 1_000)
    assert total(bench)["replays"] == 0
    bench.run(5_000)
    assert total(bench)["replays"] == 2 * 4
    check(bench, 4)


@pytest.mark.parametrize("ports", [1, 2])
def test_a_dead_link_is_silent_after_the_limit_and_no_other(ports):
    limit = 1_000
    bench = LinkBench(
        SMALL[2], seed=1, ports=ports, inputs=Inputs(silence_limit=limit, keepalive=200)
    )
    bench.run(5_000)  # nobody watches
    for device in range(DEVICES):
        bench.set(device, watch=1)
    bench.run(5_000)  # keepalive frames come
    assert [state.silent_cycles for state in bench.state()] == [[0, 0], [0, 0]]
    bench.fault(LinkFault(kind="dead", direction=0))
    bench.run(5_000)
    first, second = bench.state()
    assert first.silent_cycles == [0, 0]
    assert second.silent_cycles[1] == 0
    assert second.silent_cycles[0] > 2_000
    assert 10_000 + limit - 200 <= second.silent_since[0] <= 10_000 + limit + 10
    bench.set(1, watch=0)
    bench.run(100)
    assert bench.state()[1].silent_cycles[0] - second.silent_cycles[0] <= 1


def test_no_silence_without_a_limit():
    bench = LinkBench(SMALL[1], seed=1, inputs=Inputs(watch=1, silence_limit=0, keepalive=0))
    bench.run(10_000)
    assert [state.silent_cycles for state in bench.state()] == [[0, 0], [0, 0]]
    assert total(bench)["sent_phits"] == 0


def test_a_link_that_stalls_and_returns_loses_nothing():
    bench = LinkBench(SMALL[2], seed=1, inputs=Inputs(watch=1, silence_limit=3_000, keepalive=200))
    bench.send(100)
    bench.run(500)
    bench.fault(LinkFault(kind="stall", direction=1, cycles=20_000))
    bench.run(19_000)
    first, second = bench.state()
    assert first.silent_cycles[1] > 10_000
    assert second.silent_cycles[0] == 0
    assert bench.run(30_000, until_delivered=True) < 30_000
    bench.run(1_000)
    silent = bench.state()[0].silent_cycles[1]
    bench.run(5_000)
    assert bench.state()[0].silent_cycles[1] == silent
    check(bench, 100)
    assert total(bench)["replays"] > 0


def test_the_end_of_all_jobs_is_told_once_and_until_cleared():
    bench = LinkBench(SMALL[2], seed=1, inputs=Inputs(keepalive=100))
    bench.send(50)
    bench.run(300)
    bench.set(0, abort=1, abort_cause=8, abort_device=37, abort_port=1)
    bench.run(60)
    assert bench.state()[1].aborts == 1
    assert bench.state()[1].abort == (8, 37, 1)
    before = bench.state()[0].counters[1]
    bench.run(10_000)
    after = bench.state()[0].counters[1]
    assert bench.state()[1].aborts == 1
    assert after["payload_phits"] == before["payload_phits"]
    assert 95 <= after["sent_phits"] - before["sent_phits"] <= 101
    assert bench.state()[0].aborts == 0
    check(bench)

    bench.clear(epoch=2)
    deliver(bench, 50)
    check(bench)
    bench.set(1, abort=1, abort_cause=3, abort_device=2, abort_port=0)
    bench.run(200)
    assert [state.aborts for state in bench.state()] == [1, 1]
    assert bench.state()[0].abort == (3, 2, 0)
    assert digest(bench) == 205906766


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_that_goes_wrong_is_told_again_unless_the_link_is_dead(kind):
    bench = LinkBench(SMALL[1], seed=1, inputs=Inputs(keepalive=100))
    bench.run(300)
    stall = 1_000 * (kind == "stall")
    bench.fault(LinkFault(kind=kind, frame="abort", direction=0, cycles=stall))
    bench.set(0, abort=1, abort_cause=8, abort_device=37, abort_port=1)
    bench.run(60)
    assert bench.faults()[kind] == 1
    assert bench.state()[1].aborts == (kind == "duplicate")
    bench.run(2_000)
    told = (0, 0, 0) if kind == "dead" else (8, 37, 1)
    assert (bench.state()[1].aborts, bench.state()[1].abort) == (int(kind != "dead"), told)


@pytest.mark.parametrize("frame", ["entry", "control"])
@pytest.mark.parametrize("kind", ["dead", "stall"])
def test_a_link_fails_at_a_frame(kind, frame):
    """What is behind the frame comes late, or never."""
    limit = 2_000
    bench = LinkBench(SMALL[1], seed=1, full=True, inputs=Inputs(silence_limit=limit, watch=1))
    bench.fault(LinkFault(kind=kind, frame=frame, nth=2, cycles=3 * limit * (kind == "stall")))
    bench.send(30)
    ran = bench.run(50_000, until_delivered=True)
    assert bench.faults()[kind] == 1
    first, second = bench.state()
    assert first.silent_cycles == [0, 0]
    assert second.silent_cycles[0] > limit
    assert (ran < 50_000) == (kind == "stall")
    assert check(bench, 30 if kind == "stall" else None) > 0


@pytest.mark.parametrize(
    ("after", "known"), [(3, 240885887), (40, 4233117212), (111, 994648921), (500, 1806429444)]
)
def test_what_was_under_way_is_dropped_in_the_next_epoch(after, known):
    bench = LinkBench(
        SMALL[2],
        seed=after,
        options=LinkOptions(latency=80, interval=1 + after % 3, **RATES["all"]),
        inputs=Inputs(source_stall=0.1, sink_stall=0.1),
    )
    for epoch in range(2, 18):  # the number of the epoch wraps
        bench.send(40)
        bench.run(after + epoch)
        bench.clear(epoch % 16)
        deliver(bench, 40)
        check(bench)
    assert digest(bench) == known


def test_nothing_counts_of_another_epoch():
    bench = LinkBench(SMALL[1], seed=1, inputs=Inputs(watch=1, silence_limit=1_000))
    bench.set(1, epoch=2)
    bench.send(10)
    bench.run(5_000)
    for state in bench.state():
        assert state.delivered == [0]
        assert max(state.silent_cycles) > 3_000
    assert total(bench)["received_entries"] == total(bench)["bad_frames"] == 0


def test_nothing_is_sent_or_heard_on_a_port_without_peer():
    bench = LinkBench(SMALL[2], seed=1, ports=2, inputs=Inputs(used=0b10))
    bench.set(1, used=0b11)
    bench.send(20)
    bench.run(5_000)
    first, second = bench.state()
    assert (first.unused_port, second.unused_port) == (0, 0)
    assert second.counters[1]["sent_phits"] > 0  # to port 0 of the first, which drops it
    assert first.counters[0] == dict.fromkeys(first.counters[0], 0)
    # Group 0 runs over the link that is used, group 1 over the other.
    assert (first.delivered[0], second.delivered[0]) == (0, 20)


@pytest.mark.parametrize("nth", [1, 7])
def test_a_forged_entry_trips_the_check(nth):
    """A payload that was changed together with its CRC passes the receiver, not the bench."""
    bench = LinkBench(SMALL[1], seed=1)
    bench.forge(nth)
    deliver(bench, 20)
    assert total(bench)["bad_frames"] == 0
    assert [state.mismatches for state in bench.state()] == [[0], [1]]
    with pytest.raises(AssertionError):
        check(bench, 20)


@pytest.mark.parametrize("nth", [1, 5])
def test_an_entry_for_a_group_that_receives_on_another_port_is_a_bad_frame(nth):
    bench = LinkBench(SMALL[2], seed=1, ports=2)
    bench.forge(nth, "group")
    deliver(bench, 20)
    assert check(bench, 20) > 20
    assert [total(bench)[name] for name in ("bad_frames", "replays")] == [1, 1]


def test_a_report_of_a_group_that_does_not_exist_is_of_none():
    for nth in range(1, 41):
        bench = LinkBench(SMALL[2], seed=1, options=LinkOptions(latency=20))
        bench.forge(nth, "report")
        deliver(bench, 20)
        assert check(bench, 20) > 20
        assert {name: total(bench)[name] for name in BAD} == dict.fromkeys(BAD, 0), nth
