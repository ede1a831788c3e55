"""The AXI4 checker accepts what is legal and trips on every rule."""

import pytest

from nearstep_sim.bench.axi_checker import RULES, AxiChecker, ProtocolError
from nearstep_sim.bench.axi_sample import Address, AxiSample, ReadBeat, WriteBeat, WriteResponse

ALL = frozenset({"ar", "r", "aw", "w", "b"})
BEAT = 64
SIZE = 6


def address(*, id=0, addr=0x1000, len=1, size=SIZE, burst=1):
    return Address(id, addr, len, size, burst)


def shows(ready=ALL, **channels):
    return AxiSample(**channels, ready=ready)


READ = [
    shows(ar=address()),
    shows(r=ReadBeat(0, 1, 0, 0)),
    shows(r=ReadBeat(0, 2, 0, 1)),
]
WRITE = [
    shows(aw=address()),
    shows(w=WriteBeat(1, 1, 0)),
    shows(w=WriteBeat(2, 1, 1)),
    shows(b=WriteResponse(0, 0)),
]
LEGAL = {
    "read": READ,
    "write": WRITE,
    "waits": [
        shows(ready=frozenset(), ar=address()),
        shows(ready=frozenset(), ar=address()),
        *READ,
    ],
    "interleaved": [
        shows(ar=address(id=0)),
        shows(ar=address(id=1)),
        shows(r=ReadBeat(1, 0, 0, 0)),
        shows(r=ReadBeat(0, 0, 0, 0)),
        shows(r=ReadBeat(1, 0, 0, 1)),
        shows(r=ReadBeat(0, 0, 0, 1)),
    ],
    "responses out of order": [
        shows(aw=address(id=0, len=0)),
        shows(aw=address(id=1, len=0), w=WriteBeat(0, 1, 1)),
        shows(w=WriteBeat(0, 1, 1)),
        shows(b=WriteResponse(1, 0)),
        shows(b=WriteResponse(0, 0)),
    ],
    "data before the address is taken": [
        shows(ready=frozenset(), aw=address()),
        shows(ready=frozenset("w"), aw=address(), w=WriteBeat(0, 1, 0)),
        shows(ready=frozenset("w"), aw=address(), w=WriteBeat(0, 1, 1)),
        shows(aw=address()),
        shows(aw=address(id=1, len=0), w=WriteBeat(0, 1, 1), b=WriteResponse(0, 0)),
        shows(b=WriteResponse(1, 0)),
    ],
    "up to the page": [shows(ar=address(addr=0x1FC0, len=0)), shows(r=ReadBeat(0, 0, 0, 1))],
    "longest": [
        shows(aw=address(addr=0x1000, len=63)),
        *[shows(w=WriteBeat(0, 1, int(n == 63))) for n in range(64)],
        shows(b=WriteResponse(0, 2)),
    ],
}
NOT_READY = frozenset({"ar", "aw", "w"})
ILLEGAL = {
    "valid_held": [shows(ready=frozenset(), ar=address()), shows()],
    "payload_held": [
        shows(ready=frozenset(), aw=address()),
        shows(ready=frozenset(), aw=address(addr=0x2000)),
    ],
    "burst_type": [shows(ar=address(burst=2))],
    "burst_size": [shows(aw=address(size=SIZE - 1))],
    "burst_aligned": [shows(ar=address(addr=0x1020))],
    "burst_page": [shows(ar=address(addr=0x1FC0, len=1))],
    "id_range": [shows(aw=address(id=2))],
    "write_data_after_address": [shows(w=WriteBeat(0, 1, 1))],
    "write_last": [shows(aw=address(len=1)), shows(w=WriteBeat(0, 1, 1))],
    "response_to_burst": [*WRITE[:2], shows(b=WriteResponse(0, 0))],
    "read_beat_of_burst": [shows(ar=address(id=0)), shows(r=ReadBeat(1, 0, 0, 0))],
    "read_last": [shows(ar=address(len=1)), shows(r=ReadBeat(0, 0, 0, 1))],
    "always_ready": [shows(ar=address()), shows(ready=NOT_READY, r=ReadBeat(0, 1, 0, 0))],
    "quiet_end": READ[:2],
}
MORE_ILLEGAL = [
    (
        "write_data_after_address",
        [shows(ready=frozenset("w"), aw=address(len=0), w=WriteBeat(0, 1, 1))] * 2,
    ),
    (
        "response_to_burst",
        [
            shows(ready=frozenset("w"), aw=address(len=0), w=WriteBeat(0, 1, 1)),
            shows(ready=frozenset("b"), aw=address(len=0), b=WriteResponse(0, 0)),
        ],
    ),
    ("write_last", [shows(aw=address(len=0)), shows(w=WriteBeat(0, 1, 0))]),
    ("read_last", [shows(ar=address(len=0)), shows(r=ReadBeat(0, 0, 0, 0))]),
    ("read_beat_of_burst", [shows(ar=address(), r=ReadBeat(0, 0, 0, 0))]),
    ("read_beat_of_burst", [*READ, shows(r=ReadBeat(0, 0, 0, 1))]),
    ("response_to_burst", [*WRITE, shows(b=WriteResponse(0, 0))]),
    ("response_to_burst", [shows(b=WriteResponse(3, 0))]),
    ("id_range", [shows(ar=address(id=3))]),
    ("burst_page", [shows(aw=address(addr=0x1040, len=63))]),
    ("quiet_end", WRITE[:3]),
    ("quiet_end", WRITE[:1]),
    ("valid_held", [shows(aw=address()), shows(ready=frozenset(), w=WriteBeat(1, 1, 0)), shows()]),
]


def follow(samples):
    checker = AxiChecker(beat_bytes=BEAT, read_ids=2, write_ids=2)
    for sample in samples:
        checker.step(sample)
    checker.finish()
    return checker


@pytest.mark.parametrize("name", LEGAL)
def test_legal_traffic_passes(name):
    assert sum(follow(LEGAL[name]).transfers.values()) > 0


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trips(rule):
    with pytest.raises(ProtocolError) as caught:
        follow(ILLEGAL[rule])
    assert caught.value.rule == rule


@pytest.mark.parametrize(("rule", "samples"), MORE_ILLEGAL)
def test_rules_trip_in_other_ways(rule, samples):
    with pytest.raises(ProtocolError) as caught:
        follow(samples)
    assert caught.value.rule == rule


def test_reset_forgets_what_was_outstanding():
    checker = AxiChecker(beat_bytes=BEAT, read_ids=2, write_ids=2)
    for sample in (READ[0], WRITE[0], WRITE[1], shows(ready=frozenset(), ar=address())):
        checker.step(sample)
    checker.reset()
    checker.step(shows())
    checker.finish()
    with pytest.raises(ProtocolError, match="read_beat_of_burst"):
        checker.step(READ[1])


def test_most_ahead_counts_bursts_not_beats():
    checker = follow([*READ, *LEGAL["interleaved"]])
    assert checker.most_ahead == 2
