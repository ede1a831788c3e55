"""What START refuses, through raw registers, on every device whose kernel has everything."""

from __future__ import annotations

import numpy as np
import pytest

import nearstep
from nearstep_spec.rule.adam import ADAM, adam_scalars
from nearstep_spec.updater.registers import (
    Compression,
    CopyOutFormat,
    ErrorCause,
    GradientFormat,
    Operation,
    Stream,
)

from .job import Job, accelerated

COUNT, PAIRS = 300, 50
TOP = 1 << 34
ARRAYS = ("p", "g", "m", "v", "index", "copy_out")
READ = {"p": Stream.P_READ, "g": Stream.G_READ, "m": Stream.M_READ, "v": Stream.V_READ,
        "index": Stream.INDEX_READ, "copy_out": Stream.COPY_OUT}  # fmt: skip
SCALARS = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, False)
DONE = (ErrorCause.NONE, Stream.NONE, 0)
UNSUPPORTED = (ErrorCause.UNSUPPORTED, Stream.NONE, 0)


class Start:
    """A kernel that is ready for an update with pairs and a copy, and one window over all memory.

    `set` changes registers by name; `outcome` is what START leads to.
    """

    def __init__(self, device, seed=1):
        self.device = device
        self.work = Job(device, COUNT, seed)
        # the values are the first of as many as there are elements, for runs without pairs
        self.work.index = np.arange(PAIRS, dtype=np.uint32) * 6
        self.work.values = self.work.before["g"][:PAIRS]
        self.copy = self.work.put(np.full(COUNT, 7, np.float16))
        self.index = self.work.put(self.work.index)
        buffers = {**self.work.buffers, "index": self.index, "copy_out": self.copy}
        self.at = {name: buffers[name].address for name in ARRAYS}
        self.kernel = device.channels[0].kernel
        for name in ADAM.scalars:
            if name != "gradient_scale":
                self.kernel[name].value = float(SCALARS[name])
        self.kernel.mode.bits = 0
        self.kernel.mode.set(**{name: SCALARS[name] for name in ADAM.switches})
        self.kernel.gradient_scale.value = 1.0
        self.reset()

    def reset(self):
        """All registers but those of the rule as in the beginning."""
        kernel = self.kernel
        for name, address in self.at.items():
            kernel[f"{name}_address"].value = address
        kernel.count.value = COUNT
        kernel.rule.value = 0
        kernel.operation.kind = Operation.UPDATE
        kernel.compression.form = Compression.FUSED
        kernel.pairs.value = PAIRS
        kernel.formats.set(gradient=GradientFormat.FP32, copy_out=CopyOutFormat.FP16)
        self.windows((0, TOP, 0b111))

    def windows(self, *granted):
        """Windows in force: base, limit, permissions."""
        for index in range(self.device.config.windows):
            base, limit, bits = granted[index] if index < len(granted) else (0, 0, 0)
            self.kernel[f"window{index}_base"].value = base
            self.kernel[f"window{index}_limit"].value = limit
            self.kernel[f"window{index}_permissions"].bits = bits

    def all_but(self, name, bits=0):
        """Windows over all memory without one array, which has other permissions."""
        start = self.at[name]
        stop = start + self.bytes_of(name)
        self.windows((0, start, 0b111), (stop, TOP, 0b111), (start, stop, bits))

    def bytes_of(self, name):
        """Whole beats of an array of the run that this begins with."""
        beat = self.device.config.beat_bytes
        elements = PAIRS if name in ("g", "index") else COUNT
        return -(-elements * (2 if name == "copy_out" else 4) // beat) * beat

    def set(self, **registers):
        """Registers by name: a value, or the values of fields."""
        for name, value in registers.items():
            if isinstance(value, dict):
                self.kernel[name].set(**value)
            else:
                self.kernel[name].value = value

    def outcome(self):
        """Cause, stream and address after a START; checks what must hold with any."""
        kernel = self.kernel
        with accelerated(self.device):
            kernel.start.go = 1
            self.device.backend.wait([kernel.status.poll(busy=0)], 50_000)
        failed = kernel.error.cause != ErrorCause.NONE
        assert (kernel.status.error, kernel.status.done) == (failed, not failed)
        if failed:
            names = ("committed", "read_beats", "write_beats", "duplicates")
            assert [kernel[name].value for name in names] == [0] * 4
            assert (kernel.scan.found_inf, kernel.sum_of_squares.value) == (0, 0)
        return kernel.error.cause, kernel.error.stream, kernel.error_address.value

    def check_untouched(self):
        """Nothing was written; the number of elements compared."""
        assert np.all(self.copy.read() == 7)
        return self.work.check_untouched()

    def check_works(self):
        """The run that this begins with is done, and right; the number of elements compared."""
        self.reset()
        assert self.outcome() == DONE
        self.work.expect("adam", pairs=True, copy_out=self.copy, step=1)
        compared = self.work.check()
        self.copy.fill(7)
        return compared


@pytest.fixture
def start(full):
    return Start(full)


def test_what_it_begins_with_is_right(start):
    assert start.check_works() == 4 * COUNT


LACKING = {
    "rule": {"rule": 4},
    "far rule": {"rule": 0xFFFF_FFFF},
    "gradient format": {"formats": {"gradient": 3}},
    "copy-out format": {"formats": {"copy_out": 3}},
    "operation": {"operation": {"kind": 2}},
    "form of pairs": {"compression": {"form": 3}},
    "scan of pairs": {"operation": {"kind": Operation.SCAN}, "formats": {"copy_out": 0}},
    "scan with a copy": {
        "operation": {"kind": Operation.SCAN},
        "compression": {"form": Compression.NONE},
    },
    "scan of too many": {
        "operation": {"kind": Operation.SCAN},
        "compression": {"form": Compression.NONE},
        "formats": {"copy_out": 0},
        "count": 1 << 32,
    },
    "pairs among too many": {"count": 1 << 32},
    "too many pairs": {"pairs": 1 << 32},
    "no pairs among too many": {"count": 1 << 32, "pairs": 0},
    "too many scattered pairs": {
        "compression": {"form": Compression.SCATTER},
        "pairs": (1 << 63) + 5,
    },
}


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(None, id="elements"),
        pytest.param(0, id="no elements", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("case", LACKING)
def test_what_the_kernel_lacks_is_unsupported(start, case, count):
    """Whatever else is wrong, and for no elements, too."""
    start.set(**LACKING[case], p_address=4, m_address=TOP)
    if count is not None and "count" not in LACKING[case]:
        start.set(count=count)
    start.windows()
    assert start.outcome() == UNSUPPORTED
    assert start.check_untouched() == 3 * COUNT
    assert start.check_works() == 4 * COUNT


@pytest.mark.parametrize(
    ("options", "register", "value", "stream"),
    [
        ("", "copy_out_address", 64, Stream.COPY_OUT),
        ("", "formats", {"copy_out": 1}, Stream.NONE),
        ("", "formats", {"gradient": 1}, Stream.NONE),
        ("copy_out_formats=fp16", "formats", {"copy_out": CopyOutFormat.BF16}, Stream.NONE),
        ("copy_out_formats=bf16", "formats", {"copy_out": CopyOutFormat.FP16}, Stream.NONE),
        ("gradient_formats=fp32,bf16", "formats", {"gradient": 1}, Stream.NONE),
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
        kernel = device.regs.adam0
        kernel.copy_out_address.value = 64
        kernel.formats.gradient = GradientFormat.FP16
        kernel.start.go = 1
        assert (kernel.error.cause, kernel.error.stream) == (ErrorCause.UNSUPPORTED, Stream.NONE)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_beside_a_beat_is_refused(start, name):
    bad = start.at[name] + start.device.config.beat_bytes // 2
    start.set(**{f"{name}_address": bad})
    assert start.outcome() == (ErrorCause.ALIGNMENT, READ[name], bad)
    assert start.check_untouched() == 3 * COUNT
    assert start.check_works() == 4 * COUNT


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_beyond_the_memory_is_refused(start, name):
    beat = start.device.config.beat_bytes
    for bad in ((1 << 64) - beat, TOP, 1 << 63):
        start.set(**{f"{name}_address": bad})
        assert start.outcome() == (ErrorCause.ADDRESS_RANGE, READ[name], bad)
    assert start.check_untouched() == 3 * COUNT
    assert start.check_works() == 4 * COUNT


def test_more_elements_than_addresses_are_refused(start):
    refused = 0
    for count in (TOP + COUNT, (1 << 63) + COUNT, (1 << 64) - 1):
        start.set(count=count, compression={"form": Compression.NONE})
        assert start.outcome() == (ErrorCause.ADDRESS_RANGE, Stream.P_READ, start.at["p"])
        refused += 1
    assert refused == 3
    assert start.check_untouched() == 3 * COUNT
    assert start.check_works() == 4 * COUNT


def test_two_arrays_that_share_bytes_are_refused(start):
    beat = start.device.config.beat_bytes
    refused = 0
    for first, one in enumerate(ARRAYS):
        for other in ARRAYS[first + 1 :]:
            start.reset()
            shared = start.at[one] + start.bytes_of(one) - beat  # the last beat
            start.set(**{f"{other}_address": shared})
            # it may reach into a third, in a pair that is looked at later
            assert start.outcome() == (ErrorCause.OVERLAP, READ[other], shared)
            refused += 1
    assert refused == 15
    assert start.check_untouched() == 3 * COUNT
    assert start.check_works() == 4 * COUNT


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_without_a_window_is_refused(start, name):
    start.all_but(name)
    assert start.outcome() == (ErrorCause.WINDOW, READ[name], start.at[name])
    start.all_but(name, 0b011)  # not in force
    assert start.outcome() == (ErrorCause.WINDOW, READ[name], start.at[name])
    assert start.check_untouched() == 3 * COUNT
    assert start.check_works() == 4 * COUNT


@pytest.mark.parametrize("name", ARRAYS)
def test_a_window_must_grant_what_is_done_and_no_more(start, name):
    writes = {"p": Stream.P_WRITE, "m": Stream.M_WRITE, "v": Stream.V_WRITE,
              "copy_out": Stream.COPY_OUT}  # fmt: skip
    start.all_but(name, 0b101)  # reading
    expected = (ErrorCause.WINDOW, writes.get(name), start.at[name]) if name in writes else DONE
    assert start.outcome() == expected
    if name not in writes:
        start = Start(start.device)
    start.all_but(name, 0b110)  # writing
    expected = DONE if name == "copy_out" else (ErrorCause.WINDOW, READ[name], start.at[name])
    assert start.outcome() == expected
    if name != "copy_out":
        assert start.check_untouched() == 3 * COUNT
        assert start.check_works() == 4 * COUNT


@pytest.mark.parametrize("name", ARRAYS)
def test_a_window_of_whole_beats_is_enough_and_one_less_is_not(start, name):
    base, nbytes = start.at[name], start.bytes_of(name)
    beat = start.device.config.beat_bytes
    rest = [(0, base, 0b111), (base + nbytes, TOP, 0b111)]
    start.windows(*rest, (base, base + nbytes - beat, 0b111))
    assert start.outcome() == (ErrorCause.WINDOW, READ[name], base)
    assert start.check_untouched() == 3 * COUNT
    start.windows(*rest, (base, base + nbytes, 0b111))
    assert start.outcome() == DONE


def test_a_window_beyond_the_address_space_grants_nothing(start):
    refused = 0
    for base in (TOP, TOP + start.at["p"], 3 * TOP, 1 << 63):
        start.windows((base, (1 << 64) - 1, 0b111))
        assert start.outcome() == (ErrorCause.WINDOW, Stream.P_READ, start.at["p"]), hex(base)
        refused += 1
    assert refused == 4
    assert start.check_untouched() == 3 * COUNT
    assert start.check_works() == 4 * COUNT


@pytest.mark.parametrize("limit", [2 * TOP, 1 << 63, (1 << 64) - 1])
def test_a_window_may_end_beyond_the_address_space(start, limit):
    start.windows((0, limit, 0b111))
    assert start.outcome() == DONE


ORDER = {
    "alignment of the last, range of the first": (
        {"copy_out": "beside", "p": "beyond"},
        (ErrorCause.ALIGNMENT, Stream.COPY_OUT),
    ),
    "alignment of index and copy": (
        {"index": "beside", "copy_out": "beside"},
        (ErrorCause.ALIGNMENT, Stream.INDEX_READ),
    ),
    "range of index, overlap of m with p": (
        {"index": "beyond", "m": "on p"},
        (ErrorCause.ADDRESS_RANGE, Stream.INDEX_READ),
    ),
    "overlap of g, index and copy": (
        {"copy_out": "on g", "index": "on g"},
        (ErrorCause.OVERLAP, Stream.INDEX_READ),
    ),
    "overlap of copy with p, and of index with g": (
        {"copy_out": "on p", "index": "on g"},
        (ErrorCause.OVERLAP, Stream.COPY_OUT),
    ),
}


@pytest.mark.parametrize("case", ORDER)
def test_the_first_fault_counts(start, case):
    changes, expected = ORDER[case]
    at = dict(start.at)
    for name, change in changes.items():
        if change == "beside":
            at[name] += 8
        elif change == "beyond":
            at[name] = (1 << 64) - start.device.config.beat_bytes
        else:
            at[name] = at[change.removeprefix("on ")]
    start.set(**{f"{name}_address": address for name, address in at.items()})
    assert start.outcome()[:2] == expected
    assert start.check_untouched() == 3 * COUNT


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
    assert start.outcome() == (ErrorCause.WINDOW, Stream.INDEX_READ, index)
    start.windows(
        (0, p, 0b111), (p, ends[p], 0b101), (ends[p], TOP, 0b111), (index, ends[index], 0b101)
    )
    assert start.outcome() == (ErrorCause.WINDOW, Stream.P_WRITE, p)
    assert start.check_untouched() == 3 * COUNT


def test_arrays_that_a_run_does_not_use_are_not_looked_at(start):
    bad = {"m": 4, "v": (1 << 64) - 4, "index": 12, "copy_out": 2, "g": 4, "p": 4}
    update = {"operation": {"kind": Operation.UPDATE}}
    none = {"compression": {"form": Compression.NONE}, "pairs": 1 << 40}
    runs = {
        "scan": (["p", "m", "v", "index", "copy_out"], {
            "operation": {"kind": Operation.SCAN}, **none,
            "formats": {"copy_out": CopyOutFormat.NONE}, "rule": 77,
        }),
        "sgd": (["m", "v"], {**update, "rule": 1}),
        "dense": (["index"], {**update, **none}),
        "no pairs": (["g", "index"], {**update, "pairs": 0}),
        "no copy": (["copy_out"], {**update, "formats": {"copy_out": CopyOutFormat.NONE}}),
    }  # fmt: skip
    for name, (unused, changes) in runs.items():
        start.reset()
        start.set(**changes, **{f"{each}_address": bad[each] for each in unused})
        assert start.outcome() == DONE, name
        for each in set(ARRAYS) - set(unused):
            start.set(**{f"{each}_address": start.at[each] + 8})
            cause, stream, _ = start.outcome()
            assert (cause, stream) == (ErrorCause.ALIGNMENT, READ[each]), (name, each)
            start.set(**{f"{each}_address": start.at[each]})


def test_no_elements_are_done_whatever_the_arrays(start):
    for kind in (Operation.UPDATE, Operation.SCAN):
        start.reset()
        start.set(count=0, operation={"kind": kind}, pairs=PAIRS, p_address=4, g_address=4)
        if kind is Operation.SCAN:
            start.set(compression={"form": 0}, formats={"copy_out": 0})
        start.windows()
        assert start.outcome() == DONE
        assert (start.kernel.scan.found_inf, start.kernel.sum_of_squares.value) == (0, 0)
        assert start.kernel.read_beats.value == 0
    assert start.check_untouched() == 3 * COUNT


def test_a_refused_start_forgets_the_scan_before_it(start):
    start.set(operation={"kind": Operation.SCAN}, compression={"form": 0}, formats={"copy_out": 0})
    assert start.outcome() == DONE
    assert start.kernel.sum_of_squares.value != 0
    start.set(operation={"kind": 2})
    assert start.outcome() == UNSUPPORTED
