"""Rows of the COARSE paper, and the timelines beside them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from nearstep.cli.paper_coarse import _dual
from nearstep.coarse.dual import best_split
from nearstep.coarse.iteration import Block
from nearstep.errors import ArgumentError
from nearstep.paper import coarse
from nearstep.paper.coarse import (
    FITTED_SHARE,
    P100,
    T4,
    TWO_NODES,
    V100,
    V100_SHARED,
    Evaluation,
    Iteration,
)
from nearstep.paper.coarse_case import (
    BOTH_WAYS_BYTES_PER_S,
    FIGURE_8,
    Communication,
    Layout,
    Options,
    Work,
    lowest,
    pair_bytes_per_s,
)
from nearstep.paper.coarse_pcie import Pcie
from nearstep.paper.coarse_picture import draw
from nearstep.paper.coarse_timeline import costs, pushed, runs
from nearstep.paper.rows import errors, labelled
from nearstep_spec.platform.load import load

SEED = 3
NETWORK = 100e9 / 8


def test_every_printed_number_has_a_row_or_a_reason() -> None:
    evaluation = Evaluation()
    rows = [*evaluation.rows()]
    assert len(rows) == len({(row.name, row.section) for row in rows}) == 45
    printed = {(row.paper, row.unit) for row in rows}
    for unit, numbers in {
        "": (8, 4),
        "GB": (384, 768, 128),
        "Gbit/s": (100,),
        "B": (0.3,),
        "%": (76, 18, 20, 28, 42, 23, 46, 10),
        "x": (1.483, 1.427, 1.386, 10.8, 13.8, 3.4, 3.3, 4.3, 11.3, 13.3, 9, 17, 1.25, 4, 2),
        "GB/s": (9, 16, 25, 18, 13),
        "MB": (2,),
    }.items():
        for number in numbers:
            assert (number, unit) in printed, number
    inputs = [each for each in evaluation.inputs if each.label == "paper"]
    named = [*coarse.NOT_MODELLED, *(f"{each.name}: {each.value}" for each in inputs)]
    for text in (
        "90 %",
        "34 %",
        "less than 10 % of in-network",
        "512 MB",
        "eight models",
        "order of magnitude",
        "2 lines",
        "32 GB",
        "CUDA 11.4",
        "figure 11: 2 and 4",
        "batch of 2, COARSE to 4",
        "ResNet50 64, BERT 2",
        "half of a machine's GPUs",
        "Figure 15",
    ):
        assert sum(text in each for each in named) == 1, text


def test_one_constant_is_fitted_on_section_2_alone() -> None:
    evaluation = Evaluation()
    rows = [*evaluation.rows()]
    (fitted,) = [row for row in rows if row.kind == "fitted"]
    assert fitted.section == "I, II-B, figure 2"
    assert fitted.found == pytest.approx(100 * FITTED_SHARE)
    assert not fitted.mean
    assert evaluation.options.gpu == pytest.approx(0.448, abs=1e-3)
    assert Evaluation(Options(gpu=0.3)).options.gpu == 0.3
    inputs = [row for row in rows if row.kind == "input"]
    assert len(inputs) == 13
    assert all(row.error == pytest.approx(0, abs=1e-6) for row in inputs)


def test_rows_are_as_far_from_print_as_the_page_says() -> None:
    evaluation = Evaluation()
    rows = {row.name: row for row in labelled(evaluation.rows(), evaluation.inputs)}
    assert {name for each in evaluation.inputs for name in each.on} <= rows.keys()
    found = errors(rows.values())
    assert found is not None
    assert found.count == 10
    assert found.mean == pytest.approx(0.189, abs=1e-3)
    assert found.largest.name == "V100, batch 4 over AllReduce's 2: 48.3 %"
    apart = errors(rows.values(), apart=True)
    assert apart is not None
    assert apart.count == 3
    assert apart.mean == pytest.approx(0.329, abs=1e-3)
    assert rows["P100, BERT: less blocked"].ours == pytest.approx(28.0)
    assert rows["T4, BERT over AllReduce: slightly lower"].ours == pytest.approx(1.15, abs=0.01)
    bounds = [row.name for row in rows.values() if row.holds is False]
    assert bounds == [
        "P100, BERT over AllReduce: beats it",
        "AllReduce: blocked, of DENSE's",
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", [*T4, P100, V100, V100_SHARED, TWO_NODES])
def test_m_is_that_of_the_papers_estimate(layout: Layout, overlap: bool) -> None:
    """The time is that of the busiest link with m bytes at the devices: counted in bytes."""
    options = Options(gpu=0.45, overlap=overlap)
    work = Work("bert-large", layout.machine, options=options)
    m = best_split(work.inputs(layout.workers))
    p, d, rest = layout.workers, layout.devices, work.nbytes - m
    ring, among = 2 * (p - 1) / p * rest, 2 * (d - 1) / d * m
    near, remote = (pair_bytes_per_s(layout.machine, local=local) for local in (True, False))
    link = BOTH_WAYS_BYTES_PER_S / 2
    hidden = work.backward_s if overlap else 0.0
    busy = [ring / remote, among / remote, m / max(near, remote)]
    busy += [(ring + m) / link, (among + p / d * m) / link]
    busy += [(ring + among) / NETWORK] * (layout.nodes > 1)
    blocked = max(ring / remote, *(each - hidden for each in busy))
    assert Communication(layout, options).coarse_s(work) == pytest.approx(blocked)


def test_what_is_blocked_on_the_p100_is_the_link_over_the_pair() -> None:
    """A ring of two alone is bound by the pair; all goes over a link once with the best m, and
    twice with an m of n, that of T_train."""
    local, remote = FIGURE_8["sdsc"]
    assert local == BOTH_WAYS_BYTES_PER_S
    for split, passes in (("best", 1), ("T_train", 2)):
        found = Evaluation(Options(split=split)).less_blocked(P100)
        assert found == pytest.approx(100 * (1 - passes * remote / local))


def test_constants_are_those_of_the_machines() -> None:
    for name, (local, remote) in FIGURE_8.items():
        assert pair_bytes_per_s(name, local=True) == local / 2
        assert pair_bytes_per_s(name, local=False) == remote / 2
        for other, both in (("gpu1", local), ("gpu2", remote)):
            found = coarse.both_ways(name, "gpu0", other)
            assert found == pytest.approx(both, rel=1e-6)
    assert pair_bytes_per_s("g4dn", local=True) == pair_bytes_per_s("g4dn", local=False) == 12.5e9
    for machine, dtype in (("p3", "fp16"), ("g4dn", "fp16"), ("sdsc", "fp32")):
        peak = load(f"coarse-{machine}").processors["gpu0"].flops[dtype]
        assert Work("resnet50", machine).flops_per_s == float(peak)
    assert Work("resnet50", "p3").nbytes == 4 * 25_557_032
    assert Work("bert-large", "p3").nbytes == 4 * 335_141_888
    assert Work("bert-large", "p3", 4).seconds == 2 * Work("bert-large", "p3").seconds


def test_the_best_split_is_the_lowest_point_of_all_links() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(50):
        lines = [(rng.uniform(-1, 2), rng.uniform(-1, 2)) for _ in range(rng.randint(1, 6))]
        grid = min(max(a + (b - a) * i / 500 for a, b in lines) for i in range(501))
        assert grid - 3 / 500 <= lowest(lines) <= grid + 1e-12


@pytest.mark.parametrize("options", [Options(), Options(share="pairs"), Options(share="uplinks")])
def test_devices_with_the_best_m_never_make_a_synchronization_longer(options: Options) -> None:
    checks = 0
    options = replace(options, split="best")
    for machine in ("p3", "sdsc", "g4dn"):
        work = Work("bert-large", machine, options=options)
        for workers in (2, 4, 8):
            for devices in (d for d in (1, 2, 4, 8) if workers % d == 0):
                layout = Layout(machine=machine, workers=workers, devices=devices)
                found = Communication(layout, options)
                assert 0 < found.coarse_s(work) <= found.all_reduce_s(work.nbytes)
                paper = Communication(layout, replace(options, split="T_train"))
                assert found.coarse_s(work) <= paper.coarse_s(work) * (1 + 1e-12)
                hiding = Communication(layout, replace(options, overlap=True))
                assert hiding.coarse_s(work) <= found.coarse_s(work)
                checks += 1
    assert checks == 27


def test_an_assumption_decides_what_it_is_about() -> None:
    named = coarse.VARIANTS
    assert [each for each in named.values() if each == (Options(), 128)] == [named["as assumed"]]
    found = {each.variant: each for each in coarse.sensitivity()}
    assert found.keys() == named.keys()
    plain = found["as assumed"]
    assert set(plain.values) == set(coarse.SENSITIVE.values())
    for variant, each in found.items():
        if variant != "as assumed":
            changed = each.values != plain.values or each.mean != plain.mean
            assert changed or each.gpu != plain.gpu, variant
    within = found["synchronization within backward (T_train)"]
    assert within.values["P100 less blocked"] == 100
    assert found["DENSE: one worker after the other"].mean > 4 * plain.mean
    assert found["PCIe packets of 256 bytes"].values["one way"] > plain.values["one way"]


def test_dense_waits_for_loads_and_stores() -> None:
    evaluation = Evaluation()
    work = Work("bert-large", "p3")
    for layout in (*T4, V100):
        dense = evaluation.dense("bert-large", layout)
        assert dense.blocked == pytest.approx(work.nbytes * (17 + 4) / 12.5e9)
    assert Iteration(1.0, 2.0).total == 3.0


def test_a_link_carries_packets_with_headers() -> None:
    link = Pcie(lanes=16)
    assert link.bytes_per_s == pytest.approx(15_753_846_154)
    assert link.one_way == pytest.approx(link.bytes_per_s * 128 / 152)
    assert link.both_ways < 2 * link.one_way
    assert link.one_way > link.writes(64) > link.writes(8)
    size = link.knee(0.95, 1e-6)
    reached = [each / link.one_way / (1e-6 + each / link.one_way) for each in (size // 2, size)]
    assert reached[0] < 0.95 <= reached[1]
    assert link.latency_before(1 << 20, 0.5) == pytest.approx((1 << 20) / link.one_way)
    for wrong in ({"lanes": 3}, {"lanes": 8, "payload": 64}):
        with pytest.raises(ArgumentError, match="must be"):
            Pcie(**wrong)


def test_the_papers_inputs_give_runs_of_all_machines() -> None:
    found = [*runs(1.0)]
    assert len(found) == 8
    for run in found:
        assert sum(block.nbytes for block in run.blocks) == run.inputs.nbytes
        assert 0 < run.m <= run.inputs.nbytes
        assert run.estimated(run.m) <= min(run.estimated(0), run.estimated(run.inputs.nbytes))


def test_shards_take_the_bound_of_the_slower_of_link_and_sum() -> None:
    whole, cut = pushed()
    assert whole.timeline.seconds is not None
    assert cut.timeline.seconds is not None
    assert whole.timeline.seconds > 1.7 * whole.bound
    assert cut.bound < cut.timeline.seconds < 1.1 * cut.bound
    assert min(cut.busy) > 1.7 * max(whole.busy)


def test_the_picture_has_rows_and_timelines(tmp_path: Path) -> None:
    first = next(runs(1.0))
    inputs = replace(first.inputs, nbytes=2 << 20)
    blocks = [Block(nbytes=1 << 20, forward_s=0.01, backward_s=0.02)] * 2
    run = replace(first, inputs=inputs, blocks=blocks)
    path = tmp_path / "coarse.svg"
    sums = [*costs((64, 128), (1 << 18,))]
    assert [each.fabric.racks for each in sums] == [1, 1, 4, 4]
    draw([*Evaluation().rows()], run, pushed(), sums, path)
    text = path.read_text(encoding="utf-8")
    assert "<svg" in text
    assert len(text) > 20_000


def test_the_best_ratio_is_that_of_the_best_m() -> None:
    moved = 0
    for run in [*runs(1.0)][:4]:
        row = _dual(run)
        best = round(row["best_m_of_n"] * run.inputs.nbytes)
        assert run.on_timeline(best) == pytest.approx(row["best_ratio"] * row["t_train_s"])
        assert row["best_ratio"] <= row["ratio"]
        moved += best == run.m
    print(f"m* is the best of {moved} runs")
    assert moved > 0


def test_iterations_of_all_machines_and_models_take_the_papers_estimate() -> None:
    for run in runs(1.0):
        ratio = run.on_timeline(run.m) / run.estimated(run.m)
        print(f"{run.machine}, {run.workers} workers, {run.model}: {ratio:.4f}")
        assert 1 - 1e-6 <= ratio <= 1.05
