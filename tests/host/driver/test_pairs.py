"""Gradients in pairs of index and value, on every device whose kernel takes them."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep import Pairs
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    AlignmentError,
    ArgumentError,
    BusResponseError,
    BusyError,
    DtypeError,
    ForeignBufferError,
    FreedBufferError,
    OptionError,
    OverlapError,
    PairError,
    PairOrderError,
    PairRangeError,
    ShapeError,
    UninitialisedError,
    WaitTimeoutError,
)

from .conftest import FULL
from .job import Job, accelerated, host_reaches
from .patterns import FORMATS, NARROW, gradients, indices, widened

COUNTS = (1, 2, 3, 4, 5, 15, 16, 17, 127, 128, 129, 1001, 4099)
FORMS = ("fused", "scatter")


def group_of(device, form):
    return 1 if form == "fused" else device.config.block_elements


def free(pairs):
    pairs.index.free()
    pairs.value.free()


def numbers_of_pairs(count):
    """From none to more than there are elements."""
    return sorted({0, 1, count // 100, count // 2, count, 2 * count + 3})


def beats(device, count, pairs, width):
    """Read beats of Adam with pairs: indices twice, values once."""
    beat = device.config.beat_bytes
    return 3 * -(-4 * count // beat) + 2 * -(-4 * pairs // beat) + -(-width * pairs // beat)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "value_form", ["bf16", *(pytest.param(f, marks=pytest.mark.deep) for f in ("fp32", "fp16"))]
)
def test_any_pairs_of_any_length_are_a_step_of_the_dense_gradients(full, form, value_form):
    compared = runs = duplicates = 0
    for count in COUNTS:
        work = Job(full, count, 300 + count)
        for pairs in numbers_of_pairs(count):
            index = indices(work.rng, count, pairs, group_of(full, form))
            g = work.pairs(index, gradients(work.rng, pairs, value_form), form)
            scale = 0.3 if pairs % 2 else 1.0
            run = work.run("adam", g=g, step=1, gradient_scale=scale)
            compared += work.check()
            assert run.duplicates == pairs - len(set(index.tolist()))
            assert (run.done, run.committed) == (True, count)
            width = 4 if value_form == "fp32" else 2
            assert run.counters["read_beats"] == beats(full, count, pairs, width)
            assert run.counters["write_beats"] == 3 * -(-count // full.config.lanes)
            assert g.index.read().tobytes() == index.tobytes()
            assert g.value.read().tobytes() == work.values.tobytes()
            duplicates += run.duplicates
            runs += 1
            free(g)
        work.free()
    assert compared == sum(3 * count * len(numbers_of_pairs(count)) for count in COUNTS)
    print(f"{runs} runs, {duplicates} duplicates")
    assert runs >= 60
    assert duplicates > 1000


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_for_every_element_is_the_dense_step(full, form):
    """In order, and within blocks in any."""
    count = 1001
    dense, sparse = (Job(full, count, 1, gradient="fp32") for _ in range(2))
    values = dense.before["g"]
    dense.run("adam", step=1)
    order = np.arange(count)
    if form == "scatter":
        block = full.config.block_elements
        for first in range(0, count, block):
            sparse.rng.shuffle(order[first : first + block])
    g = sparse.pairs(order.astype(np.uint32), values[order], form)
    assert sparse.run("adam", g=g, step=1).duplicates == 0
    for name in "pmv":
        assert sparse.buffers[name].read().tobytes() == dense.buffers[name].read().tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_the_last_of_equal_indices_counts(full, form):
    work = Job(full, 300, 2)
    index = np.repeat(np.array([0, 127, 128, 299], np.uint32), 50)
    values = np.arange(200, dtype=np.float32)
    run = work.run("sgd", g=work.pairs(index, values, form), lr=1.0)
    dense = np.zeros(300, np.float32)
    dense[[0, 127, 128, 299]] = [49, 99, 149, 199]
    np.testing.assert_array_equal(work.dense(), dense)
    assert work.check() == 900
    assert run.duplicates == 196


@pytest.mark.parametrize("form", FORMS)
def test_all_pairs_may_name_one_element(full, form):
    for count, at in ((1, 0), (4099, 4098)):
        work = Job(full, count, 3)
        values = work.rng.standard_normal(5000).astype(np.float32)
        g = work.pairs(np.full(5000, at, np.uint32), values, form)
        assert work.run("sgd", g=g, lr=1.0).duplicates == 4999
        assert work.check() == 3 * count


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_every_rule_takes_pairs_and_copies_out(full, form, scale):
    work = Job(full, 777, 4)
    index = indices(work.rng, 777, 99, group_of(full, form))
    g = work.pairs(index, gradients(work.rng, 99, "fp16"), form)
    copy = work.copy("bf16")
    for name, hyper in (
        ("sgd", {"lr": 0.3, "weight_decay": 0.01}),
        ("sgd", {"lr": 0.1, "momentum": 0.9, "first": True}),
        ("adagrad", {"step": 2}),
        ("adam", {"step": 1}),
    ):
        work.run(name, g=g, gradient_scale=scale, copy_out=copy, **hyper)
        assert work.check() == 4 * 777


@pytest.mark.parametrize("form", FORMS)
def test_without_pairs_the_gradient_is_zero_and_nothing_of_it_is_read(full, form):
    work = Job(full, 300, 5)
    g = work.pairs(np.zeros(0, np.uint32), np.zeros(0, np.float32), form)
    run = work.run("adam", g=g, step=1, weight_decay=0.1)
    assert not work.dense().any()
    assert work.check() == 900
    assert (run.duplicates, run.counters["read_beats"]) == (0, beats(full, 300, 0, 4))


def test_dense_runs_and_pairs_in_turn_do_not_see_each_other(full):
    work = Job(full, 500, 6, gradient="fp32")
    for form in (*FORMS, *FORMS):
        run = work.run("adam", step=1)
        assert work.check() == 1500
        assert run.duplicates == 0
        g = work.pairs(np.zeros(7, np.uint32), np.ones(7, np.float32), form)
        assert work.run("adam", g=g, step=1).duplicates == 6
        assert work.check() == 1500


def test_pairs_of_no_elements_are_done_unread(full):
    work = Job(full, 300, 7)
    g = work.pairs(np.array([5], np.uint32), np.ones(1, np.float32), "fused")
    states = {name: buffer[0:0] for name, buffer in work.buffers.items()}
    with accelerated(full):
        run = full.update("adam", {**states, "g": g}, step=1).wait()
    assert (run.done, run.counters["read_beats"]) == (True, 0)
    assert work.check_untouched() == 900


def bad(kind, index, position, device, count):
    """Spoil the pair at a position; the error that it must give."""
    block = device.config.block_elements
    if kind == "index of the end":
        index[position] = count
    elif kind == "largest index":
        index[position] = 0xFFFF_FFFF
    elif kind == "below the one before":
        index[position] = index[position - 1] - 1
    elif kind == "block before":
        index[position] = index[position - 1] // block * block - 1
    return PairRangeError if kind in ("index of the end", "largest index") else PairOrderError


BAD = [
    ("fused", "index of the end"),
    ("fused", "largest index"),
    ("fused", "below the one before"),
    ("fused", "block before"),
    ("scatter", "index of the end"),
    ("scatter", "largest index"),
    ("scatter", "block before"),
]


@pytest.mark.parametrize(("form", "kind"), BAD)
@pytest.mark.parametrize("value_form", ["fp32", pytest.param("bf16", marks=pytest.mark.deep)])
def test_one_bad_pair_anywhere_is_told_and_nothing_is_written(full, form, kind, value_form):
    """The first bad pair counts, whatever comes after it."""
    count, pairs = 4099, 2501
    block = full.config.block_elements
    work = Job(full, count, 8)
    good = indices(work.rng, count, pairs, group_of(full, form))
    good[good < block] = block  # so that there is a block before
    good = good[np.argsort(good // group_of(full, form), kind="stable")]
    values = gradients(work.rng, pairs, value_form)
    g = work.pairs(good, values, form)
    copy = work.copy("fp16")
    copy.fill(7)
    positions = [1, 2, 3, 4, 5, 15, 16, 17, 1000, pairs - 2, pairs - 1]
    if kind in ("index of the end", "largest index"):
        positions.insert(0, 0)
    refused = 0
    for position in positions:
        index = good.copy()
        error = bad(kind, index, position, full, count)
        index[position + 2 :: 7] = count  # bad, but later
        g.index.write(index)
        with pytest.raises(error) as caught:
            work.run("adam", g=g, step=1, copy_out=copy)
        told = caught.value
        assert isinstance(told, PairError)
        assert (told.position, told.stream) == (position, "INDEX_READ")
        assert told.address == g.index.address + 4 * position
        assert told.cause == ("PAIR_RANGE" if error is PairRangeError else "PAIR_ORDER")
        assert f"of pair {position}" in str(told)
        assert (told.committed, told.count) == (0, count)
        kernel = full.channels[0].kernel
        assert (kernel.status.done, kernel.status.error, kernel.status.busy) == (0, 1, 0)
        assert (kernel.committed.value, kernel.write_beats.value) == (0, 0)
        closed = [kernel[f"window{i}_permissions"].bits for i in range(full.config.windows)]
        assert closed == [0] * full.config.windows
        assert work.check_untouched() == 3 * count
        assert np.all(copy.read() == 7)
        assert g.index.read().tobytes() == index.tobytes()
        refused += 1
    assert refused >= 11
    g.index.write(good)
    work.run("adam", g=g, step=1, copy_out=copy)
    assert work.check() == 4 * count


@pytest.mark.parametrize("form", FORMS)
def test_out_of_range_and_then_out_of_order_is_out_of_range(full, form):
    work = Job(full, 300, 9)
    g = work.pairs(np.array([299, 0xFFFF_FFFF, 0], np.uint32), np.ones(3, np.float32), form)
    with pytest.raises(PairRangeError) as caught:
        work.run("adam", g=g, step=1)
    assert caught.value.position == 1


def test_free_order_within_a_block_is_for_scatter_alone(full):
    work = Job(full, 300, 10)
    index = np.array([3, 1, 2, 127, 0], np.uint32)
    values = np.ones(5, np.float32)
    g = work.pairs(index, values, "fused")
    with pytest.raises(PairOrderError) as caught:
        work.run("adam", g=g, step=1)
    assert caught.value.position == 1
    work.run("adam", g=work.pairs(index, values, "scatter"), step=1)
    assert work.check() == 900


@pytest.mark.parametrize("form", FORMS)
def test_duplicates_are_known_at_the_end_only(full, form):
    work = Job(full, 4000, 11)
    g = work.pairs(np.zeros(3, np.uint32), np.ones(3, np.float32), form)
    with accelerated(full):
        run = work.start("adam", g=g, step=1)
        with pytest.raises(BusyError, match="adam of 4000 elements has not ended"):
            _ = run.duplicates
        run.wait()
    assert run.duplicates == 2
    g.index.fill(4000)
    with accelerated(full):
        run = work.start("adam", g=g, step=1)
        for _ in range(2):
            with pytest.raises(PairRangeError):
                run.wait()
    with pytest.raises(PairRangeError):
        _ = run.duplicates


def test_buffers_of_pairs_cannot_be_changed_while_they_are_used(full):
    work = Job(full, 4000, 12)
    g = work.pairs(np.zeros(3, np.uint32), np.ones(3, np.float32), "fused")
    with accelerated(full):
        run = work.start("adam", g=g, step=1)
        for name, buffer in (("index", g.index), ("g", g.value)):
            uses = [buffer.free]
            if host_reaches(full):
                uses.append(lambda used=buffer: used.fill(1))
                assert buffer.read().size == 3
            for use in uses:
                with pytest.raises(BusyError, match=f"uses it as {name}, has not ended"):
                    use()
        run.wait()
    free(g)


def check_reusable(full, work, form):
    """Another run, with what was there before, gives the right bits."""
    full.backend.heal()
    work.upload()
    index = indices(work.rng, work.count, 500, group_of(full, form))
    g = work.pairs(index, gradients(work.rng, 500, "fp16"), form)
    run = work.run("adam", g=g, step=1)
    assert run.duplicates == 500 - len(set(index.tolist()))
    return work.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["check", "update", "value"])
def test_an_error_response_to_pairs_stops_the_run(full, form, which):
    """Reading the indices for the first time, for the second, or the values."""
    count = pairs = 40 * full.config.block_elements
    work = Job(full, count, 13)
    g = work.pairs(np.arange(pairs, dtype=np.uint32), np.ones(pairs, np.float32), form)
    used = g.value if which == "value" else g.index
    hit = used.address + 4 * (pairs // 2 + 1)
    nth = int(which == "update")
    full.backend.inject(Injection(kind="decerr", write=False, base=hit, limit=hit + 4, nth=nth))
    with pytest.raises(BusResponseError) as caught:
        work.run("adam", g=g, step=1)
    error = caught.value
    assert (error.cause, error.stream) == (
        "READ_RESPONSE",
        "G_READ" if which == "value" else "INDEX_READ",
    )
    assert hit - full.config.burst_bytes < error.address <= hit
    if which == "check":
        assert error.committed == 0
        assert work.check_untouched() == 3 * count
    else:
        assert error.committed <= pairs // 2 + 1
        assert work.check(0, error.committed) == 3 * error.committed
    assert check_reusable(full, work, form) == 3 * count


@pytest.mark.parametrize("form", FORMS)
def test_indices_that_never_come_end_in_a_bounded_wait(full, form):
    count = 4099
    work = Job(full, count, 14)
    g = work.pairs(np.zeros(3000, np.uint32), np.ones(3000, np.float32), form)
    base, limit = g.index.address, g.index.address + g.index.nbytes
    full.backend.inject(Injection(kind="never", write=False, base=base, limit=limit, nth=3))
    with accelerated(full):
        run = work.start("adam", g=g, step=1)
        with pytest.raises(WaitTimeoutError):
            run.wait(max_cycles=20_000)
        run.abort(max_cycles=2_000)
        full.backend.heal()
    assert isinstance(run.error, AbortedError)
    assert run.committed == 0
    assert work.check_untouched() == 3 * count
    assert check_reusable(full, work, form) == 3 * count


@pytest.mark.parametrize("form", FORMS)
def test_an_abort_while_indices_are_checked_changes_nothing(full, form):
    count = 4099
    work = Job(full, count, 15)
    g = work.pairs(np.zeros(3000, np.uint32), np.ones(3000, np.float32), form)
    base, limit = g.index.address, g.index.address + g.index.nbytes
    late = Injection(kind="late", write=False, base=base, limit=limit, delay=5_000)
    full.backend.inject(late)
    with accelerated(full):
        run = work.start("adam", g=g, step=1)
        run.abort(max_cycles=50_000)
    assert isinstance(run.error, AbortedError)
    assert run.committed == 0
    assert work.check_untouched() == 3 * count
    assert check_reusable(full, work, form) == 3 * count


@pytest.mark.parametrize("used", ["index", "value"])
def test_pairs_that_nobody_wrote_are_a_fault(full, used):
    work = Job(full, 300, 16)
    g = Pairs(full.alloc(40, np.uint32), full.alloc(40))
    (g.value if used == "index" else g.index).fill(0)
    with pytest.raises(UninitialisedError) as caught, accelerated(full):
        full.update("adam", {**work.buffers, "g": g}, step=1).wait()
    assert caught.value.address == getattr(g, used).address
    full.reset()
    assert check_reusable(full, work, "fused") == 900


WRONG = {
    "no such form": ({"form": "sorted"}, {}, ArgumentError, r"\(fused, scatter\), not 'sorted'"),
    "index of int32": ({"index": np.zeros(4, np.int32)}, {}, DtypeError, "must be uint32"),
    "fewer values": ({"value": np.zeros(3, np.float32)}, {}, ShapeError, "of 4 elements"),
    "values of int32": ({"value": np.zeros(4, np.int32)}, {}, DtypeError, "g: dtype must be"),
    "bf16 unnamed": ({"value": np.zeros(4, np.uint16)}, {}, DtypeError, "gradient_format='bf16'"),
    "half of single": ({}, {"gradient_format": "fp16"}, DtypeError, "must be float16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_pairs_fail_before_the_device_is_touched(full, case, monkeypatch):
    changes, others, error, text = WRONG[case]
    work = Job(full, 100, 1)
    arrays = {"index": np.zeros(4, np.uint32), "value": np.zeros(4, np.float32), **changes}
    form = arrays.pop("form", "fused")
    buffers = {name: work.put(array) for name, array in arrays.items()}
    touched = []
    monkeypatch.setattr(full.backend, "write_register", lambda *args: touched.append(args))
    with pytest.raises(error, match=text) as caught:
        full.update("adam", {**work.buffers, "g": Pairs(**buffers, form=form)}, step=1, **others)
    print(caught.value)
    assert touched == []


def test_buffers_that_cannot_be_pairs_are_refused(full):
    work = Job(full, 100, 1)
    index, value = work.put(np.zeros(40, np.uint32)), work.put(np.zeros(40, np.float32))
    with nearstep.open(FULL["golden-numpy"]) as other:
        foreign = other.alloc(40, np.uint32)
        for pairs, error in (
            (Pairs(np.zeros(40, np.uint32), value), DtypeError),
            (Pairs(index, np.zeros(40, np.float32)), DtypeError),
            (Pairs(index[1:5], value[0:4]), AlignmentError),
            (Pairs(foreign, value), ForeignBufferError),
            (Pairs(index, work.buffers["p"][:40]), OverlapError),
        ):
            with pytest.raises(error) as caught:
                full.update("adam", {**work.buffers, "g": pairs}, step=1)
            print(caught.value)
    index.free()
    with pytest.raises(FreedBufferError):
        full.update("adam", {**work.buffers, "g": Pairs(index, value)}, step=1)
    with pytest.raises(DtypeError, match="Pairs"):
        full.scan(Pairs(index, value))


@pytest.mark.parametrize(("options", "has"), [("", "none"), ("&compression=fused", "fused")])
def test_a_form_that_the_kernel_does_not_have_is_refused_at_once(options, has):
    with nearstep.open(f"golden:axdimm?engine=numpy&memory_bytes=1MiB{options}") as device:
        work = Job(device, 100, 1)
        g = work.pairs(np.zeros(4, np.uint32), np.ones(4, np.float32), "scatter")
        with pytest.raises(ArgumentError, match=rf"kernel has \({has}\), not 'scatter'"):
            device.update("adam", {**work.buffers, "g": g}, step=1)


@pytest.mark.parametrize("forms", ["dense", "fused,fused", "fused,"])
def test_forms_that_cannot_be(forms):
    with pytest.raises(OptionError):
        nearstep.open(f"golden:axdimm?compression={forms}")


def test_more_elements_than_indices_can_name_are_refused():
    from nearstep.updater.pairs import check_count

    check_count("pairs", (1 << 32) - 1)
    with pytest.raises(ArgumentError, match=r"fewer than 2\*\*32"):
        check_count("pairs", 1 << 32)


def test_values_of_16_bits_are_widened_exactly(full):
    for value_form in NARROW:
        every = np.arange(1 << 16, dtype=np.uint16).view(FORMATS[value_form][1])
        work = Job(full, 1 << 14, 17)
        for first in range(0, every.size, work.count):
            part = every[first : first + work.count]
            g = work.pairs(np.arange(work.count, dtype=np.uint32), part, "fused")
            work.run("sgd", g=g, lr=1.0)
            assert work.dense().tobytes() == widened(part, value_form).tobytes()
            assert work.check() == 3 * work.count
            free(g)
        work.free()


@pytest.mark.parametrize("form", FORMS)
def test_a_memory_that_is_watched_gives_the_same(full, form):
    """An injection that never hits: emulations may then take another way, burst by burst."""
    count, pairs = 4099, 1501
    outcomes = []
    for watched in (False, True):
        work = Job(full, count, 18)
        index = indices(work.rng, count, pairs, group_of(full, form))
        g = work.pairs(index, gradients(work.rng, pairs, "fp16"), form)
        copy = work.copy("fp16")
        if watched:
            full.backend.inject(Injection(kind="slverr", write=True, base=1 << 40))
        run = work.run("adam", g=g, step=1, copy_out=copy)
        assert work.check() == 4 * count
        names = ("committed", "read_beats", "write_beats", "duplicates")
        outcomes.append([run.counters[name] for name in names])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == beats(full, count, pairs, 2)
