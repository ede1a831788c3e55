"""Section V of the MemFerry paper."""

from dataclasses import replace
from functools import cache

import pytest

from nearstep.memferry import work
from nearstep.memferry.cost import Mode
from nearstep.paper import memferry
from nearstep.paper.memferry import Evaluation, Options, sized
from nearstep.paper.memferry_case import MemferryCase
from nearstep.paper.rows import errors

GPU = 0.2533
"""The fitted share, rounded."""


@cache
def assumed() -> Evaluation:
    return Evaluation(Options(gpu=GPU))


PRINTED = {
    "": (8, 1),
    "GB": (80, 32),
    "Gbit/s": (100,),
    "B": (0.11, 2.4),
    "%": (63, 63.1),
    "s": (5.41, 4.12),
    "x": (1.68, 1.27, 1.32, 1.37, 1.26, 1.12, 1.52, 1.21, 1.16),
    "+%": (
        *(10, 40, 21.7, 68.7, 7.1, 32.1, 5, 18.5, 1.5, 27, 28.1, 19.1, -3.4),
        *(-40.1, -17.6, -1.4, -25.4, -41.6, -61.7, -20.1, -74.4, -21.6, -18, -22),
    ),
}
"""Printed figures of the text with a row, by unit."""

NAMED = (
    *("99 %", "80 %", "third", "reserve factor", "figures 3 and 9 to 14", "two times the model"),
    *("128 and 12 (V-A), 8 (III-B)", "15 billion", "70 billion", "175 billion", "1.9.0"),
    *("32768 to 130528", "2048 to 4096", "378 to 4096", "free its buffer", "1, 8, and 128"),
    *("0.7 to 6.7 billion", "order of magnitude"),
)
"""Those without a row, in a reason or an input from the paper."""


def test_every_printed_number_has_a_row_or_a_reason() -> None:
    parts = ("figure_9", "utilisation", "memory", "v100", "sizes", "gpus", "largest", "machines")
    rows = [row for part in parts for row in getattr(assumed(), part)()]
    found = {(row.paper, row.unit) for row in rows}
    assert found == {(number, unit) for unit, each in PRINTED.items() for number in each}
    inputs = [each for each in assumed().inputs if each.label == "paper"]
    named = [*memferry.NOT_MODELLED, *(f"{each.name}: {each.value}" for each in inputs)]
    for text in NAMED:
        assert sum(text in each for each in named) == 1, text


def test_figure_12_is_over_the_batches_and_all_sizes_of_v_d_are_trained_alike() -> None:
    rows = {(row.name, row.section): row.found for row in assumed().memory()}
    small = [assumed().named(name, batch) for name in memferry.SMALL for batch in (1, 2, 4, 8)]
    saved = [100 * (each.memory.memferry / each.memory.deepspeed - 1) for each in small]
    where = "V-C, figure 12"
    assert rows["Memory: MemFerry, smaller models", where] == pytest.approx(sum(saved) / 8)
    assert rows["Memory: MemFerry, up to", "I"] == pytest.approx(min(saved))
    assert min(saved) in (saved[0], saved[4])  # the least batch saves most
    one = Evaluation(Options(gpu=GPU, batches=(8,)))
    least = {row.name: row.found for row in one.memory()}["Memory: MemFerry, up to"]
    assert least == pytest.approx(min(saved[3], saved[7]))
    alike, alone = assumed().large(4.3), Evaluation(Options(gpu=GPU, alike=False)).large(4.3)
    assert (alike.recompute, alone.recompute) == (True, False)
    assert alike.seconds.memferry > alone.seconds.memferry
    assert alike.memory.memferry < alone.memory.memferry


def test_one_constant_is_fitted_on_utilisation_alone() -> None:
    evaluation = Evaluation()
    assert evaluation.options.gpu == pytest.approx(GPU, abs=1e-4)
    busy = [evaluation.named(name).busy.deepspeed for name, _ in memferry.BUSY]
    assert sum(busy) / 2 == pytest.approx(0.6305, abs=1e-4)
    fitted = [each for each in evaluation.inputs if each.label == "fitted"]
    assert [each.on for each in fitted] == [tuple(name for _, name in memferry.BUSY)]
    rows = {row.name: row for row in evaluation.utilisation()}
    assert {row.name for row in rows.values() if row.unit == "%"} == {*fitted[0].on}
    assert rows["GPT-2, GPU busy over DeepSpeed, up to"].found == pytest.approx(
        evaluation.named("gpt2-medium").busy.go / busy[1]
    )


def test_a_gpu_at_its_peak_that_is_busier_is_not_fitted_beyond() -> None:
    assert Evaluation(Options(dtype="fp32")).options.gpu == 1.0


def test_rows_of_the_smaller_models_are_what_plans_give() -> None:
    case = assumed().named("bert-base")
    rows = {row.name: row for row in assumed().figure_9()}
    row = rows["Bert-base and Roberta: speed, most"]
    assert row.paper == 68.7
    best = max(assumed().named(name).speedup for name in memferry.SMALL)
    assert row.found == pytest.approx(100 * (best - 1))
    assert case.seconds.deepspeed > case.seconds.native > case.seconds.memferry
    assert not any(each.write for each in case.memferry.decisions)
    trained = [layer.trained for layer in case.profile.layers]
    assert [each.write for each in case.go.decisions] == trained
    assert case.memferry.plan.layers["embedding.word"].mode is Mode.DHA
    _, one, two, three = case.memory
    assert one > two > three > case.profile.activation_bytes


def test_the_papers_plans_are_beside_better_ones_of_the_exact_planner() -> None:
    case, ours = assumed().named("bert-base"), assumed().ours.named("bert-base")
    assert case.memferry.least is None
    assert ours.memferry.least is not None
    assert ours.profile == case.profile
    assert ours.memferry.total < case.memferry.total
    assert ours.seconds[:2] == case.seconds[:2]


def test_deepspeed_has_a_bucket_that_the_model_does_not_decide() -> None:
    case = assumed().named("bert-base")
    found = case.memory.deepspeed - case.activation_bytes - case.profile.parameter_bytes
    assert found == 4 * 500_000_000
    costs = case.base
    times = costs.times(work.native(costs))
    backward = times.backward[0] + costs.before_backward[0]
    late = backward + costs.send.sum() + costs.update.sum()  # no bucket is full before
    assert case.seconds.deepspeed == pytest.approx(late / 1e12)
    changed = {
        name: Evaluation(replace(options, gpu=GPU)).named("bert-base")
        for name, options in memferry.VARIANTS.items()
        if name.startswith("DeepSpeed")
    }
    two = changed["DeepSpeed: two buckets, overlap_comm"]
    assert two.memory.deepspeed == case.memory.deepspeed + 4 * 500_000_000
    none = changed["DeepSpeed: no bucket, as native"]
    plan = work.native(none.base)
    assert none.memory.deepspeed == none.base.bytes_of(plan) + none.activation_bytes
    assert none.seconds.deepspeed == none.seconds.native


@pytest.mark.parametrize("name", ["gpt2-medium", "4.3"])
def test_a_tied_matrix_is_loaded_and_held_once(name: str) -> None:
    case = assumed().named(name) if name == "gpt2-medium" else assumed().case(sized(4.3))
    matrix = 4 * case.model.vocabulary * case.model.hidden
    parameters = sum(each.parameter_count for each in case.model.layers(1, 1)) * 4
    assert case.base.taken(work.native(case.base)) == (parameters, parameters)
    assert case.profile.parameter_bytes == parameters + matrix
    for plan in (case.memferry, case.go):
        layers = plan.plan.layers
        assert layers["embedding.word"].mode is Mode.DHA  # so that only the product loads it
        assert layers["head.tied"].mode is Mode.GFGB


@pytest.mark.parametrize("billions", [0.7, 1.0, 2.4, 4.3, 6.7])
def test_models_of_a_size_have_it(billions: float) -> None:
    layers = sized(billions).layers(1, 512, 4)
    count = sum(layer.parameter_count for layer in layers)
    assert count == pytest.approx(billions * 1e9, rel=0.05)


def test_a_model_that_does_not_fit_with_all_activations_computes_them_again() -> None:
    fits, large = (assumed().case(sized(each)) for each in (4.3, 6.7))
    assert fits.kept_bytes < fits.capacity == 80 * 2**30 < large.kept_bytes
    assert large.kept_bytes == pytest.approx(126e9, rel=0.01)
    assert (fits.recompute, large.recompute) == (False, True)
    assert fits.memory.native == fits.kept_bytes
    assert max(large.memory) < large.capacity
    kept = MemferryCase(model=large.model, options=Options(gpu=GPU, recompute=False))
    assert kept.memory.native == kept.kept_bytes == large.kept_bytes
    assert large.seconds.native > kept.seconds.native
    notes = [row.note for row in assumed().sizes()]
    assert all("gpt-6.7b at 8 x 512 needs 126 GB of 86" in note for note in notes)


def test_parameters_pass_the_link_to_each_of_eight_gpus_twice() -> None:
    one = assumed().case(sized(4.3), batch=1)
    eight = assumed().case(sized(4.3), batch=1, gpus=8)
    assert (2 * one.costs.load == eight.costs.load).all()
    assert (one.costs.send == eight.costs.send).all()
    scattered = MemferryCase(model=one.model, batch=1, gpus=8, options=Options(gpu=GPU, copies=1))
    assert scattered.profile == one.profile


def test_an_assumption_changes_what_it_is_about() -> None:
    base, slow = (Evaluation(Options(gpu=GPU, host=each)).named("bert-base") for each in (1, 0.25))
    assert slow.seconds.native > base.seconds.native
    assert slow.native_speedup < base.native_speedup
    found = [each for each in memferry.VARIANTS.values() if each == Options()]
    assert len(found) == 1


def test_activations_that_are_computed_again_are_those_of_one_layer() -> None:
    case = Evaluation(Options(gpu=GPU, recompute=True, batch=0.25)).named("bert-base")
    layers = case.model.layers(2, 512, 4)
    kept = sum(each.output_bytes for each in layers)
    assert case.activation_bytes == kept + max(each.activation_bytes for each in layers)


@pytest.mark.deep
def test_every_row_is_modelled_and_means_are_those_of_the_page() -> None:
    rows = [*Evaluation().rows()]
    assert len(rows) == len({(row.name, row.section) for row in rows}) == 45
    assert [row.kind for row in rows if not row.mean] == [*["input"] * 5, "counted"]
    assert all(row.found == row.found for row in rows)
    names = {row.name for row in rows}
    assert sum(row.ours is not None for row in rows) > 20
    speed = [row for row in rows if not memferry.of_memory(row)]
    memory = [row for row in rows if memferry.of_memory(row)]
    means = [errors(rows), *(errors(each, apart=True) for each in (rows, speed, memory))]
    found = [(each.count, round(100 * each.mean, 1)) for each in means if each is not None]
    assert found == [(39, 9.0), (28, 9.2), (18, 4.9), (10, 17.1)]  # as the page says
    assert {name for each in Evaluation().inputs for name in each.on} <= names
