"""The AXI checker of the in-process simulation fires on every rule that it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nearstep_sim.updater.port_bench import AddressPins, Checker, ManagerPins, SubordinatePins

BEAT = 16
Cycle = tuple[ManagerPins, SubordinatePins]


def address(addr: int = 0x1000, beats: int = 4, **changes: int) -> AddressPins:
    return AddressPins(**{
        "valid": True, "addr": addr, "len": beats - 1, "size": 4, "burst": 1, **changes
    })  # fmt: skip


def cycle(ready: bool = True, **manager: object) -> Cycle:
    return ManagerPins(rready=True, bready=True, **manager), SubordinatePins(
        arready=ready, awready=ready, wready=ready
    )


def beat(last: bool = False, ready: bool = True, data: int = 0, **more: object) -> Cycle:
    return cycle(ready, wvalid=True, wlast=last, wstrb=0xFFFF, wdata=(data,), **more)


def legal() -> list[Cycle]:
    return [
        cycle(),
        cycle(ready=False, ar=address(), aw=address()),
        cycle(ar=address(), aw=address()),
        beat(ready=False, data=1),
        *(beat(data=i, last=i == 4) for i in (1, 2, 3, 4)),
        cycle(ar=address(0x1FF0, 1)),
    ]


BROKEN: dict[str, tuple[Callable[[], list[Cycle]], tuple[str, str]]] = {
    "valid after reset": (
        lambda: [cycle(ar=address())],
        ("AR/AW/W", "no VALID in the cycle after reset"),
    ),
    "address valid falls": (
        lambda: [cycle(), cycle(ready=False, ar=address()), cycle()],
        ("AR", "VALID holds until READY"),
    ),
    "address changes": (
        lambda: [cycle(), cycle(ready=False, aw=address()), cycle(aw=address(0x2000))],
        ("AW", "payload holds until READY"),
    ),
    "data valid falls": (
        lambda: [cycle(), cycle(aw=address()), beat(ready=False), cycle()],
        ("W", "VALID holds until READY"),
    ),
    "data changes": (
        lambda: [cycle(), cycle(aw=address()), beat(ready=False, data=1), beat(data=2)],
        ("W", "payload holds until READY"),
    ),
    "fixed burst": (lambda: [cycle(), cycle(ar=address(burst=0))], ("AR", "bursts are INCR")),
    "narrow beats": (
        lambda: [cycle(), cycle(ar=address(size=2))],
        ("AR", "beats are as wide as the port"),
    ),
    "misaligned": (
        lambda: [cycle(), cycle(ar=address(0x1004))],
        ("AR", "addresses are aligned to beats"),
    ),
    "crosses a page": (
        lambda: [cycle(), cycle(aw=address(0x1FF0, 2))],
        ("AW", "bursts do not cross 4 KiB"),
    ),
    "data without an address": (
        lambda: [cycle(), beat()],
        ("W", "data does not precede its address"),
    ),
    "last too early": (
        lambda: [cycle(), cycle(aw=address()), beat(last=True)],
        ("W", "LAST marks the last beat"),
    ),
    "last missing": (
        lambda: [cycle(), cycle(aw=address(beats=1)), beat()],
        ("W", "LAST marks the last beat"),
    ),
}


@pytest.fixture
def checker() -> Iterator[Checker]:
    made = Checker(BEAT)
    yield made
    made.close()


def test_legal_traffic_passes(checker):
    cycles = legal()
    for manager, subordinate in cycles:
        checker.cycle(manager, subordinate)
    assert len(cycles) == 9
    assert checker.violation() is None


@pytest.mark.parametrize("case", BROKEN)
def test_broken_traffic_is_caught(checker, case):
    make, expected = BROKEN[case]
    cycles = make()
    for manager, subordinate in cycles[:-1]:
        checker.cycle(manager, subordinate)
    assert checker.violation() is None
    checker.cycle(*cycles[-1])
    assert checker.violation() == expected
