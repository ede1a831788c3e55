"""Iterations of the Smart-Infinity paper as graphs of work."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest

from nearstep.errors import ArgumentError
from nearstep.paper.smart_infinity_case import METHODS, CsdCase, Method, blocks, shares
from nearstep.paper.smart_infinity_machine import Machine, Options
from nearstep.paper.smart_infinity_traffic import traffic
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep_spec.platform.layer import Layer
from nearstep_spec.platform.transformer import Transformer

SIZE = 200 * 10 * 640
"""Elements of a block's matrices; percents of pairs of it are whole on ten cards."""


@dataclass(frozen=True)
class Even:
    """A model whose layers all have the same elements, a multiple of what is dealt."""

    times: int = 1
    source: str = "a test"
    stated: float = 4.0 * SIZE

    @property
    def name(self) -> str:
        return f"even{self.times}"

    def layers(self, batch: int, sequence: int, element_bytes: int = 2) -> list[Layer]:
        flops = 2 * SIZE * self.times * batch * sequence
        return [
            Layer(
                name=f"layer{i}",
                parameters={"weight": (SIZE * self.times,)},
                forward_flops=flops,
                backward_flops=2 * flops,
                output_bytes=batch * sequence * element_bytes,
            )
            for i in range(4)
        ]


EVEN = Even()
LARGE = Transformer(
    name="large", source="a test", stated=2e9, blocks=10, hidden=4096, heads=32, vocabulary=512
)
FITTED = Options(gpu=0.5)


@pytest.mark.parametrize("drives", [1, 4, 10])
@pytest.mark.parametrize(
    ("method", "percent", "expected"),
    [
        ("base", 2, (6, 6, 2, 2)),
        ("su", 2, (2, 0, 0, 2)),
        ("su+o", 2, (2, 0, 0, 2)),
        ("su+o+c", 2, (2, 0, 0, Fraction(2, 50))),
        ("su+o+c", 10, (2, 0, 0, Fraction(1, 5))),
        ("su+o+c", 1, (2, 0, 0, Fraction(1, 50))),
    ],
)
def test_table_1_is_exact(method: Method, percent: float, expected, drives: int) -> None:
    case = CsdCase(model=EVEN, method=method, percent=percent, drives=drives)
    found = traffic(case)
    assert found[:4] == expected
    assert found.padding >= 0


@pytest.mark.parametrize(
    ("optimizer", "states"), [("adam", 6), ("sgd_momentum", 4), ("adagrad", 4)]
)
def test_bytes_of_an_optimizer_are_those_of_its_states(optimizer: str, states: int) -> None:
    base = traffic(CsdCase(model=EVEN, optimizer=optimizer))
    assert base[:4] == (states, states, 2, 2)
    ours = traffic(CsdCase(model=EVEN, optimizer=optimizer, method="su+o"))
    assert ours[:4] == (2, 0, 0, 2)


@pytest.mark.parametrize("drives", [1, 4, 10])
@pytest.mark.parametrize("method", METHODS)
def test_links_carry_the_bytes_of_the_operations(method: Method, drives: int) -> None:
    """The timeline's account beside Table I's, and what stays inside the cards."""
    case = CsdCase(model=EVEN, method=method, drives=drives, options=FITTED)
    found = case.timeline.traffic
    states_read, states_written, gradients_read, gradients_written, _ = traffic(case)
    unit = 2 * case.elements
    up, down = found["uplink", 1], found["uplink", 0]
    assert up == unit * (states_read + gradients_read)
    assert down == unit * (states_written + gradients_written)
    read, written, inside, back = (
        sum(found.get((f"{part}{drive}", way), 0) for drive in range(drives))
        for part, way in (("ssd", 0), ("ssd", 1), ("card-fpga", 0), ("card-fpga", 1))
    )
    own = method != "base"
    assert inside == own * unit * (6 + gradients_written)
    assert back == own * unit * 6
    assert read == up + inside
    assert written == down + back


@pytest.mark.parametrize("method", METHODS[1:])
def test_cards_with_their_share_each_take_the_time_of_one(method: Method) -> None:
    """Ten times the model on ten cards; only the last uploads share the uplink."""
    seconds = {
        n: CsdCase(model=Even(100 * n), method=method, drives=n, options=FITTED).phases.update
        for n in (1, 2, 3, 10)
    }
    for n in (2, 3):
        assert seconds[n] == pytest.approx(seconds[1], rel=1e-6)
    assert seconds[1] < seconds[10] < 1.25 * seconds[1]


def test_the_baseline_gains_by_four_drives_and_no_more() -> None:
    base = {
        n: CsdCase(model=LARGE, drives=n, options=FITTED).phases.update for n in (1, 2, 3, 4, 5, 10)
    }
    for n in (2, 3):
        assert base[n] * n == pytest.approx(base[1], rel=0.01)
    assert base[4] * 4 < 1.06 * base[1]
    assert base[10] * 10 > 2.4 * base[1]
    assert base[10] == pytest.approx(base[5], rel=0.04)


def test_an_update_takes_no_less_than_drives_and_uplink_need() -> None:
    checked = 0
    for method in METHODS:
        for drives in (1, 6, 10):
            case = CsdCase(model=LARGE, method=method, drives=drives, options=FITTED)
            least = case.timeline.least
            assert case.timeline.makespan >= max(least.values())
            assert f"ssd{drives - 1}" in least
            assert "uplink" in least
            checked += 1
    assert checked == 12


def test_a_drive_does_one_of_reading_and_writing() -> None:
    seconds = {}
    for duplex in (None, "half", "full"):
        machine, graph = Machine(Options(drive=duplex)), Graph()  # type: ignore[arg-type]
        ways = (("ssd0", "fpga0", 3_200_000_000), ("fpga0", "ssd0", 2_000_000_000))
        for *ends, nbytes in ways:
            graph.add(str(ends), transfer=machine.transfer(*ends, nbytes))
        seconds[duplex] = execute(graph).seconds
    assert seconds == {None: 2.0, "half": 2.0, "full": 1.0}


def test_the_uplink_has_the_rate_of_four_drives() -> None:
    half, full = (Machine(Options(uplink=each)) for each in ("half", "full"))
    assert half.drive_bytes_per_s == pytest.approx(7 / (4 / 3.2e9 + 3 / 2.0e9))
    assert half.uplink_bytes_per_s == pytest.approx(4 * half.drive_bytes_per_s)
    assert full.uplink_bytes_per_s == pytest.approx(4 * 4 / (4 / 3.2e9 + 3 / 2.0e9))
    given = Machine(Options(uplink_bytes_per_s=5e9))
    assert given.uplink_bytes_per_s == 5e9
    origins = {each.platform.links["uplink"].bytes_per_s.origin for each in (half, full)}
    assert origins == {"fitted"}


def test_the_handler_gains_where_reads_go_beside_writes() -> None:
    gains = {}
    for drive in ("half", "full"):
        options = Options(gpu=0.5, drive=drive)  # type: ignore[arg-type]
        naive, handler = (
            CsdCase(model=LARGE, method=method, drives=1, options=options).phases.update
            for method in ("su", "su+o")
        )
        gains[drive] = naive / handler
    assert gains["half"] == pytest.approx(1.0, abs=0.01)
    assert gains["full"] > 1.1


def test_parameters_of_a_subgroup_are_written_and_go_up_before_its_moments() -> None:
    case = CsdCase(model=LARGE, method="su+o", drives=1, options=FITTED)
    at = {entry.operation.name: entry for entry in case.timeline.entries}
    subgroups = sum(name.startswith("update 0.") for name in at)
    assert subgroups == -(-case.elements * 16 // 2**32) > 3
    for i in range(subgroups):
        assert at[f"write p 0.{i}"].end <= at[f"write m 0.{i}"].start
        assert at[f"upload p 0.{i}"].start >= at[f"write p 0.{i}"].end
        assert at[f"update 0.{i}"].start >= at[f"read g 0.{i}"].end
    for i in range(subgroups - 1):
        assert at[f"read p 0.{i + 1}"].start >= at[f"write p 0.{i}"].end
        assert at[f"read p 0.{i + 1}"].start < at[f"write v 0.{i}"].end  # beside it
    naive = CsdCase(model=LARGE, method="su", drives=1, options=FITTED)
    at = {entry.operation.name: entry for entry in naive.timeline.entries}
    assert all(
        at[f"read p 0.{i + 1}"].start >= at[f"write v 0.{i}"].end for i in range(subgroups - 1)
    )


def test_the_update_begins_when_all_gradients_are_on_the_drives() -> None:
    for method in METHODS:
        case = CsdCase(model=EVEN, method=method, drives=2, options=FITTED)
        entries = case.timeline.entries
        gradients = [e for e in entries if e.operation.name.startswith("offload gradient")]
        later = [
            e for e in entries if e.operation.name.startswith(("upload", "read", "update", "write"))
        ]
        assert len(gradients) == 2 * len(case.blocks)
        assert max(e.end for e in gradients) <= min(e.start for e in later)
        assert case.phases.total == pytest.approx(case.timeline.seconds)


def test_several_gpus_share_a_layer_and_the_uplink() -> None:
    one, three = (
        CsdCase(model=LARGE, gpus=tuple(f"a4000-{i}" for i in range(count)), options=FITTED)
        for count in (1, 3)
    )
    assert three.phases.forward < one.phases.forward
    beside = CsdCase(model=LARGE, options=FITTED).timeline.traffic["uplink", 0]
    assert one.timeline.traffic["uplink", 0] > beside + 2 * 2 * one.elements - 100
    sums = [each for each in three.graph if each.name.endswith("sums")]
    assert len(sums) == 3 * 2 * len(three.blocks)
    assert not any(each.name.endswith("sums") for each in one.graph)


def test_blocks_and_shares_lose_nothing() -> None:
    layers = LARGE.layers(4, 128)
    found = blocks(layers, 5)
    assert len(found) == 5
    assert sum(each.elements for each in found) == sum(each.parameter_count for each in layers)
    assert sum(each.forward_flops for each in found) == sum(each.forward_flops for each in layers)
    assert len(blocks(layers)) == len(layers)
    assert shares(10, 4) == [2, 3, 2, 3]
    assert all(sum(shares(total, 7)) == total for total in range(50))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "su+c"}, "must be of base, su, su"),
        ({"drives": 0}, "1 to 10, not 0"),
        ({"drives": 11}, "1 to 10, not 11"),
        ({"optimizer": "lion"}, "adam, sgd_momentum, adagrad, not 'lion'"),
        ({"percent": 0.0}, "above 0, to 100, not 0.0"),
        ({"percent": 101.0}, "not 101.0"),
        ({"gpus": ()}, "must name one"),
    ],
)
def test_what_a_case_cannot_be_is_refused(values, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CsdCase(model=EVEN, **values)
