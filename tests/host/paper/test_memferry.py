"""Section V of the MemFerry paper."""

import pytest

from nearstep.memferry import work
from nearstep.memferry.cost import Mode
from nearstep.paper import memferry
from nearstep.paper.memferry import Evaluation, Options, sized


def test_rows_of_the_smaller_models_are_what_plans_give() -> None:
    evaluation = Evaluation()
    case = evaluation.named("bert-base")
    rows = {row.name: row for row in evaluation.figure_9()}
    row = rows["Bert-base and Roberta: speed, most"]
    assert row.paper == 68.7
    best = max(evaluation.named(name).speedup for name in memferry.SMALL)
    assert row.found == pytest.approx(100 * (best - 1))
    assert case.seconds.deepspeed > case.seconds.native > case.seconds.memferry
    assert case.memferry.gap == 0.0
    assert not any(each.write for each in case.memferry.decisions)
    trained = [layer.trained for layer in case.profile.layers]
    assert [each.write for each in case.go.decisions] == trained
    assert case.memferry.plan.layers["embedding.word"].mode is Mode.DHA
    _, one, two, three = case.memory
    assert one > two > three > case.profile.activation_bytes


def test_deepspeed_has_a_bucket_that_the_model_does_not_decide() -> None:
    case = Evaluation().named("bert-base")
    found = case.deepspeed_bytes - case.profile.activation_bytes - case.profile.parameter_bytes
    assert found == 4 * 500_000_000
    costs = case.costs
    times = costs.times(work.native(costs))
    backward = times.backward[0] + costs.before_backward[0]
    late = backward + costs.send.sum() + costs.update.sum()  # no bucket is full before
    assert case.deepspeed_s == pytest.approx(late / 1e12)
    changed = {
        name: Evaluation(options).named("bert-base")
        for name, options in memferry.VARIANTS.items()
        if name.startswith("DeepSpeed")
    }
    two = changed["DeepSpeed: two buckets, overlap_comm"]
    assert two.deepspeed_bytes == case.deepspeed_bytes + 4 * 500_000_000
    none = changed["DeepSpeed: no bucket, as native"]
    plan = work.native(none.costs)
    assert none.deepspeed_bytes == none.costs.bytes_of(plan) + none.activation_bytes
    assert none.deepspeed_s == none.native_s


@pytest.mark.parametrize("billions", [0.7, 1.0, 2.4, 4.3, 6.7])
def test_models_of_a_size_have_it(billions: float) -> None:
    layers = sized(billions).layers(1, 512, 4)
    count = sum(layer.parameter_count for layer in layers)
    assert count == pytest.approx(billions * 1e9, rel=0.05)


def test_an_assumption_changes_what_it_is_about() -> None:
    base, slow = (
        Evaluation(options).named("bert-base") for options in (Options(), Options(host=0.25))
    )
    assert slow.native_s > base.native_s
    assert slow.native_speedup < base.native_speedup
    found = [each for each in memferry.VARIANTS.values() if each == Options()]
    assert len(found) == 1


def test_activations_that_are_computed_again_are_those_of_one_layer() -> None:
    case = Evaluation(Options(recompute=True, batch=0.25)).named("bert-base")
    layers = case.model.layers(2, 512, 4)
    kept = sum(each.output_bytes for each in layers)
    assert case.activation_bytes == kept + max(each.activation_bytes for each in layers)


@pytest.mark.deep
def test_every_row_is_modelled() -> None:
    rows = [*Evaluation().rows()]
    assert len(rows) == len({(row.name, row.section) for row in rows}) == 39
    assert all(row.found == row.found for row in rows)
    mean = next(row for row in rows if row.name == "mean of sizes")
    assert abs(mean.error) < 0.15
