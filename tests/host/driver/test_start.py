"""What START refuses, through raw registers: arrays, windows, formats, and the order of checks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

import nearstep
from nearstep_spec.updater.registers import (
    Compression,
    CopyOutFormat,
    ErrorCause,
    GradientFormat,
    RunKind,
    Stream,
)

from .conftest import FULL, URLS, chosen
from .start import COUNT, DONE, PAIRS, READ, TOP, UNSUPPORTED, WRITE, Start

DEVICES = FULL | {f"{name}-adam": url for name, url in URLS.items()}
QUICK = {"golden-numpy", "golden-cpp", "golden-dimm", "golden-card", "sim-card-stalled"}
QUICK |= {f"{name}-adam" for name in ("golden-numpy", "golden-cpp", "golden-cards", "sim-ideal")}


@pytest.fixture(params=chosen(DEVICES, set(DEVICES) - QUICK))
def any_start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """On a kernel that has everything, or Adam alone."""
    with nearstep.open(DEVICES[request.param]) as device:
        yield Start(device)


@pytest.fixture
def start(full):
    return Start(full)


SCAN = {"operation": {"kind": RunKind.SCAN}}
DENSE, NO_COPY = {"compression": {"form": Compression.NONE}}, {"formats": {"copy_out": 0}}
LACKING = {
    "rule": {"rule": 4},
    "far rule": {"rule": 0xFFFF_FFFF},
    "gradient format": {"formats": {"gradient": 3}},
    "copy-out format": {"formats": {"copy_out": 3}},
    "both formats": {"formats": {"gradient": 3, "copy_out": 3}},
    "operation": {"operation": {"kind": 2}},
    "form of pairs": {"compression": {"form": 3}},
    "scan of pairs": {**SCAN, **NO_COPY},
    "scan with a copy": {**SCAN, **DENSE},
    "scan of too many": {**SCAN, **DENSE, **NO_COPY, "count": 1 << 32},
    "pairs among too many": {"count": 1 << 32},
    "too many pairs": {"pairs": 1 << 32},
    "no pairs among too many": {"count": 1 << 32, "pairs": 0},
    "too many scattered pairs": {"compression": {"form": Compression.SCATTER},
        "pairs": (1 << 63) + 5},
}  # fmt: skip


@pytest.mark.parametrize(
    "count", [pytest.param(None, id="some"), pytest.param(0, id="none", marks=pytest.mark.deep)]
)
def test_what_the_kernel_lacks_is_unsupported(start, count):
    """Whatever else is wrong, and for no elements, too."""
    start.check_works()
    for case, changes in LACKING.items():
        start.reset()
        start.windows()
        others = {} if count is None or "count" in changes else {"count": count}
        start.refuses(*UNSUPPORTED, p_address=4, m_address=TOP, **changes, **others)
        print(case)
    start.check_works()


@pytest.mark.parametrize(
    ("options", "register", "value", "stream"),
    [
        ("", "copy_out_address", 64, Stream.COPY_OUT),
        ("", "formats", {"copy_out": 1}, Stream.NONE),
        ("", "formats", {"gradient": 1}, Stream.NONE),
        ("", "gradient_scale", 1.0, Stream.NONE),
        ("copy_out_formats=fp16", "formats", {"copy_out": CopyOutFormat.BF16}, Stream.NONE),
        ("copy_out_formats=bf16", "formats", {"copy_out": CopyOutFormat.FP16}, Stream.NONE),
        ("gradient_formats=fp32,bf16", "formats", {"gradient": 1}, Stream.NONE),
        ("gradient_formats=fp32,bf16", "gradient_scale", 2.0, Stream.NONE),
        ("compression=fused", "compression", {"form": Compression.SCATTER}, Stream.NONE),
        ("compression=scatter", "compression", {"form": Compression.FUSED}, Stream.NONE),
        ("scan=yes", "operation", {"kind": 3}, Stream.NONE),
        ("scan=yes", "gradient_scale", 1.0, Stream.NONE),
    ],
)
def test_a_kernel_without_something_refuses_that(options, register, value, stream):
    url = f"golden:axdimm?engine=numpy&memory_bytes=1MiB{'&' * bool(options)}{options}"
    with nearstep.open(url) as device:
        kernel = device.regs.adam0
        if isinstance(value, dict):
            kernel[register].set(**value)
        else:
            kernel[register].value = value
        kernel.start.go = 1
        assert (kernel.error.cause, kernel.error.stream) == (ErrorCause.UNSUPPORTED, stream)
        assert kernel.error_address.value == 0


def test_what_is_lacking_comes_before_a_copy_that_cannot_be():
    with nearstep.open("golden:axdimm?engine=numpy&memory_bytes=1MiB") as device:
        start = Start(device)
        lacking = {"gradient": GradientFormat.FP16}
        start.refuses(*UNSUPPORTED, copy_out_address=64, formats=lacking)


@pytest.mark.parametrize("index, within", [(2, 0), (0, 1), (1 << 48, 0)])  # noqa: PT006
def test_an_index_of_rounding_that_begins_no_beat_is_refused(index, within):
    shape = "lanes=4&block_bytes=512&memory_bytes=1MiB&state_format=bf16&stochastic_rounding=yes"
    for engine in ("numpy", "cpp"):
        with nearstep.open(f"golden:axdimm?{shape}&engine={engine}") as device:
            start = Start(device)
            start.refuses(*UNSUPPORTED, element_index=index, element_within=within)
            start.set(element_index=0, element_within=0)
            start.check_works()


def test_an_array_beside_a_beat_or_beyond_the_memory_is_refused(any_start):
    start, beat = any_start, any_start.device.config.beat_bytes
    for name in start.arrays:
        register = f"{name}_address"
        bad = start.at[name] + beat // 2
        start.refuses(ErrorCause.ALIGNMENT, READ[name], bad, **{register: bad})
        for bad in ((1 << 64) - beat, TOP, 1 << 63):
            start.refuses(ErrorCause.ADDRESS_RANGE, READ[name], bad, **{register: bad})
        start.reset()
    start.check_works()


def test_more_elements_than_addresses_are_refused(any_start):
    dense = DENSE if any_start.paired else {}
    for count in (TOP + COUNT, (1 << 63) + COUNT, (1 << 64) - 1):
        expected = ErrorCause.ADDRESS_RANGE, Stream.P_READ, any_start.at["p"]
        any_start.refuses(*expected, count=count, **dense)
    any_start.check_works()


def test_two_arrays_that_share_bytes_are_refused(any_start):
    start, beat, refused = any_start, any_start.device.config.beat_bytes, 0
    for one, other in combinations(start.arrays, 2):
        start.reset()
        shared = start.at[one] + start.bytes_of(one) - beat  # the last beat
        # It may reach into a third, in a pair that is looked at later.
        start.refuses(ErrorCause.OVERLAP, READ[other], shared, **{f"{other}_address": shared})
        refused += 1
    assert refused == len(start.arrays) * (len(start.arrays) - 1) // 2 >= 6
    start.check_works()


def test_a_window_must_grant_what_is_done_of_all_beats_and_no_more(any_start):
    start, beat = any_start, any_start.device.config.beat_bytes
    for name in start.arrays:
        refused = (ErrorCause.WINDOW, READ[name], start.at[name])
        for bits, less in ((0, 0), (0b011, 0), (0b111, beat)):  # none; not in force; too short
            start.all_but(name, bits, less)
            start.refuses(*refused)
        start.all_but(name, 0b101)  # reading
        if name in WRITE:
            start.refuses(ErrorCause.WINDOW, WRITE[name], start.at[name])
        else:
            start.check_granted()
            start.all_but(name, 0b101)
        start.all_but(name, 0b110)  # writing
        if name == "copy_out":
            start.check_granted()
        else:
            start.refuses(*refused)
        start.all_but(name, 0b111)
        start.check_granted()
    start.check_works()


def test_a_window_is_clamped_to_the_address_space(any_start):
    start = any_start
    for base in (TOP, TOP + start.at["p"], 3 * TOP, 1 << 63):
        start.windows((base, (1 << 64) - 1, 0b111))
        start.refuses(ErrorCause.WINDOW, Stream.P_READ, start.at["p"])
    for limit in (2 * TOP, 1 << 63, (1 << 64) - 1):
        start.windows((0, limit, 0b111))
        start.check_granted()


ORDER = {
    "alignment of the last, range of the first": ({"copy_out": "beside", "p": "beyond"},
        (ErrorCause.ALIGNMENT, Stream.COPY_OUT)),
    "alignment of index and copy": ({"index": "beside", "copy_out": "beside"},
        (ErrorCause.ALIGNMENT, Stream.INDEX_READ)),
    "range of index, overlap of m with p": ({"index": "beyond", "m": "on p"},
        (ErrorCause.ADDRESS_RANGE, Stream.INDEX_READ)),
    "overlap of g, index and copy": ({"copy_out": "on g", "index": "on g"},
        (ErrorCause.OVERLAP, Stream.INDEX_READ)),
    "overlap of copy with p, and of index with g": ({"copy_out": "on p", "index": "on g"},
        (ErrorCause.OVERLAP, Stream.COPY_OUT)),
}  # fmt: skip


def test_the_first_fault_counts(start):
    for case, (changes, expected) in ORDER.items():
        at = dict(start.at)
        for name, change in changes.items():
            if change == "beside":
                at[name] += 8
            elif change == "beyond":
                at[name] = (1 << 64) - start.device.config.beat_bytes
            else:
                at[name] = at[change.removeprefix("on ")]
        print(case)
        start.refuses(*expected, **{f"{name}_address": address for name, address in at.items()})


def test_reading_is_checked_for_all_before_writing(start):
    """p must not be written, index not be read: the index is found first."""
    p, index = start.at["p"], start.at["index"]
    first, second = sorted((p, index))
    bits = {p: 0b101, index: 0b110}
    ends = {p: p + start.bytes_of("p"), index: index + start.bytes_of("index")}
    start.windows(
        (0, first, 0b111),
        (first, ends[first], bits[first]),
        (ends[first], second, 0b111),
        (second, ends[second], bits[second]),
        (ends[second], TOP, 0b111),
    )
    start.refuses(ErrorCause.WINDOW, Stream.INDEX_READ, index)
    start.windows(
        (0, p, 0b111), (p, ends[p], 0b101), (ends[p], TOP, 0b111), (index, ends[index], 0b101)
    )
    start.refuses(ErrorCause.WINDOW, Stream.P_WRITE, p)


def test_arrays_that_a_run_does_not_use_are_not_looked_at(start):
    bad = {"m": 4, "v": (1 << 64) - 4, "index": 12, "copy_out": 2, "g": 4, "p": 4}
    update = {"operation": {"kind": RunKind.UPDATE}}
    none = {**DENSE, "pairs": 1 << 40}
    runs = {
        "scan": (["p", "m", "v", "index", "copy_out"], {**SCAN, **none, **NO_COPY, "rule": 77}),
        "sgd": (["m", "v"], {**update, "rule": 1}),
        "dense": (["index"], {**update, **none}),
        "no pairs": (["g", "index"], {**update, "pairs": 0}),
        "no copy": (["copy_out"], {**update, **NO_COPY}),
    }
    for name, (unused, changes) in runs.items():
        start.reset()
        start.set(**changes, **{f"{each}_address": bad[each] for each in unused})
        assert start.outcome() == DONE, name
        for each in set(start.arrays) - set(unused):
            start.set(**{f"{each}_address": start.at[each] + 8})
            cause, stream, _ = start.outcome()
            assert (cause, stream) == (ErrorCause.ALIGNMENT, READ[each]), (name, each)
            start.set(**{f"{each}_address": start.at[each]})


def test_no_elements_are_done_whatever_the_arrays(start):
    for kind in (RunKind.UPDATE, RunKind.SCAN):
        start.reset()
        start.set(count=0, operation={"kind": kind}, pairs=PAIRS, p_address=4, g_address=4)
        if kind is RunKind.SCAN:
            start.set(**DENSE, **NO_COPY)
        start.windows()
        assert start.outcome() == DONE
        assert (start.kernel.scan.found_inf, start.kernel.sum_of_squares.value) == (0, 0)
        assert start.kernel.read_beats.value == 0
    start.check_untouched()


def test_a_refused_start_forgets_the_scan_before_it(start):
    start.set(**SCAN, **DENSE, **NO_COPY)
    assert start.outcome() == DONE
    assert start.kernel.sum_of_squares.value != 0
    start.refuses(*UNSUPPORTED, operation={"kind": 2})


def test_gradients_of_16_bits_are_half_as_long(full):
    """For windows, overlaps and the end of the memory."""
    beat, lanes = full.config.beat_bytes, full.config.lanes
    for count in (300, 16 * lanes, 17 * lanes):
        for form in ("fp16", "bf16"):
            start = Start(full, count, gradient=form)
            g, half = start.at["g"], start.bytes_of("g")
            start.all_but("g", 0b111)
            start.check_granted()
            start.all_but("g", 0b111, beat)
            start.refuses(ErrorCause.WINDOW, Stream.G_READ, g)
            start.reset()
            arena = start.work.put(np.zeros(2 * count + 4 * beat, np.float32))
            base, whole = arena.address, start.bytes_of("m")
            for places, refused in (
                ({"g": base, "m": base + half}, None),
                ({"g": base, "m": base + half - beat}, base + half - beat),
                ({"g": base + whole - beat, "m": base}, base),
                ({"g": base + whole, "m": base}, None),
            ):
                start.set(**{f"{name}_address": at for name, at in places.items()})
                expected = (ErrorCause.OVERLAP, Stream.M_READ, refused)
                assert start.outcome() == (DONE if refused is None else expected)
            start.set(g_address=base, m_address=base + half, formats={"gradient": 0})
            assert start.outcome()[0] == ErrorCause.OVERLAP  # twice the bytes
            start.work.free()
    start = Start(full, 4 * lanes, gradient="fp16")
    whole = getattr(full, "dimm", None) or getattr(full, "card", None)
    end = TOP if whole is None else whole.memory_bytes
    start.windows()
    for form, beats, over in ((1, 2, False), (1, 1, True), (0, 3, True), (0, 4, False)):
        at = end - beats * beat
        cause = ErrorCause.ADDRESS_RANGE if over else ErrorCause.WINDOW
        start.set(formats={"gradient": form}, g_address=at)
        stream = Stream.G_READ if over else Stream.P_READ
        assert start.outcome()[:2] == (cause, stream)
