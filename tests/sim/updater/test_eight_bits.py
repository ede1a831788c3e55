"""Golden kernels with states in 8 bits: programmed register by register, compared byte by byte.

What the memory must hold comes from the golden rule and the numpy model of the format; where it
lies, and which bursts move it, is written down here once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import GuardError
from nearstep.updater.device import KernelDevice
from nearstep_sim.golden import fp
from nearstep_sim.golden.blockwise import Blockwise, dequantize, quantize
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.updater.golden import KEPT_TRANSACTIONS
from nearstep_sim.updater.golden_kernel import CONVERTED
from nearstep_spec.fp import BF16
from nearstep_spec.rule.rules import optimizer_of
from nearstep_spec.updater.registers import (
    Compression,
    CopyOutFormat,
    ErrorCause,
    GradientFormat,
    Stream,
)

RULES = ("adam", "adam_amsgrad", "adadelta", "sgd_momentum")
SIGNED = {"m": True, "v": False, "v_max": False, "d": False}
MEMORY_BYTES = 1 << 20
LINE_BYTES = 64
COMMON = f"state_format=dynamic8&memory_bytes=1MiB&rules={','.join(RULES)}"
SHAPES = {
    "1-lane": "lanes=1&block_bytes=1024",
    "8-lanes": "lanes=8&block_bytes=2048",
    "8-lanes-most": "lanes=8&block_bytes=8192",
    "16-lanes": "lanes=16&block_bytes=4096",
    "16-lanes-most": "lanes=16&block_bytes=16384",
}
URLS = {
    f"{engine}-{shape}": f"golden:axdimm?{COMMON}&engine={engine}&{options}"
    for engine in ("cpp", "numpy")
    for shape, options in SHAPES.items()
}
LARGE = "state_format=dynamic8&memory_bytes=4MiB"
URLS |= {f"{engine}-large": f"golden:axdimm?{LARGE}&engine={engine}" for engine in ("cpp", "numpy")}
URLS["dimm"] = f"golden:axdimm?{COMMON}&channels=1&block_bytes=4096"
URLS["card"] = f"golden:smartssd?{COMMON}&lanes=8&chunk_bytes=2048"
URLS["card-numpy"] = f"golden:smartssd?{COMMON}&lanes=8&chunk_bytes=2048&engine=numpy"

ODD = np.array(
    [0, 1 << 31, 1, 0x80000001, 0x2B8CBCCC, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
     0x7F800001, 0x7FC00000, 0xFFC12345], np.uint32,
)  # fmt: skip


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with nearstep.open(request.param) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


def devices(*names: str) -> pytest.MarkDecorator:
    """A test on these, each by its URL."""
    return pytest.mark.parametrize("device", [URLS[n] for n in names], ids=names, indirect=True)


class Job:
    """Arrays of a rule in memory that is a guard elsewhere, and the run of a kernel over them.

    Parameters
    ----------
    device
    rule, count, seed
    odd : some elements, and scales, are infinite, NaN, zero, subnormal or as large as can be.
    address : of arrays, where they are not one behind the other.
    half : g is bfloat16, and a copy of p is made in bfloat16.
    """

    def __init__(
        self,
        device: KernelDevice,
        rule: str,
        count: int,
        seed: int,
        *,
        odd: bool = False,
        address: Mapping[str, int] | None = None,
        half: bool = False,
    ) -> None:
        print(f"seed {seed}")
        self.device, self.count, self.half = device, count, half
        self.config = config = device.config
        self.number = config.rule_set.names.index(rule)
        self.rule = config.rule_set.rules[self.number]
        self.rng = np.random.default_rng(seed)
        self.kernel = device.channels[0].kernel
        optimizer = optimizer_of(rule)
        hyper = optimizer.defaults | {"lr": 3e-3, "weight_decay": 0.05}
        self.scalars = {
            "gradient_scale": 1.0,
            **optimizer.by_rule[rule].ordered(config.order).registers(hyper, 3, False),
        }
        self.capacity = device.backend.capacity_bytes
        self.elements, self.scale_bytes = config.block_bytes // 4, config.beat_bytes
        self.data = {name: self._random(name, odd) for name in self.rule.arrays_in}
        if half:
            self.data["g"] = fp.narrow32(self.data["g"].view(np.float32), BF16).view(np.uint8)
            self.data["copy_out"] = np.zeros(2 * count, np.uint8)
        self.address = {**self._places(), **(address or {})}
        self._write()

    def _random(self, name: str, odd: bool) -> NDArray[np.uint8]:
        """The first bytes of an array: scales of no element are anything."""
        rng, size = self.rng, self.count
        values = rng.standard_normal(size) * 2.0 ** rng.integers(-20, 3, size)
        values = values.astype(np.float32)
        if odd:
            where = rng.random(size) < 0.001
            values.view(np.uint32)[where] = rng.choice(ODD, int(where.sum()))
        if name not in SIGNED:
            return values.view(np.uint8)
        made = quantize(values, signed=SIGNED[name])
        if odd:
            where = rng.random(made.scales.size) < 0.2
            made.scales.view(np.uint32)[where] = rng.choice(ODD, int(where.sum()))
        return self.placed(made, rng)

    def placed(self, made: Blockwise, rng: np.random.Generator | None = None) -> NDArray[np.uint8]:
        """As it lies in memory: block after block, a beat of scales and the codes."""
        parts = []
        for first in range(0, self.count, self.elements):
            codes = made.codes[first : first + self.elements]
            header = np.zeros(self.scale_bytes, np.uint8)
            if rng is not None:
                header[:] = rng.integers(0, 256, self.scale_bytes)
            scales = made.scales[first // 256 : -(-(first + codes.size) // 256)].view(np.uint8)
            header[: scales.size] = scales
            parts += [header, codes]
        return np.concatenate(parts)

    def taken(self, data: NDArray[np.uint8]) -> Blockwise:
        """What lies there."""
        codes, scales = [], []
        for first in range(0, data.size, self.scale_bytes + self.elements):
            block = data[first : first + self.scale_bytes + self.elements]
            codes.append(block[self.scale_bytes :])
            scales.append(block[: -(-codes[-1].size // 256) * 4].view(np.float32))
        return Blockwise(np.concatenate(codes), np.concatenate(scales))

    def _places(self) -> dict[str, int]:
        """Addresses: beats, in any order, no line for two arrays."""
        names, beat, at = list(self.data), self.config.beat_bytes, 0
        self.rng.shuffle(names)
        found = {}
        for name in names:
            found[name] = at = at + LINE_BYTES + beat * int(self.rng.integers(0, 9))
            at = -(-(at + self.data[name].size) // LINE_BYTES) * LINE_BYTES
        return found

    def _write(self) -> None:
        """Write the arrays, and a pattern behind each, up to the end of its line."""
        backend = self.device.backend
        backend.protect(0, self.capacity)
        for name, data in self.data.items():
            end = self.address[name] + data.size
            rest = -end % LINE_BYTES
            backend.write_memory(self.address[name], data)
            backend.write_memory(end, np.arange(1, 1 + rest, dtype=np.uint8))
        self.before = self.memory()

    def memory(self) -> NDArray[np.uint8]:
        data = np.empty(self.capacity, np.uint8)
        self.device.backend.read_memory(0, data)
        return data

    def program(self) -> None:
        """Everything but START."""
        kernel, config = self.kernel, self.config
        for name, address in self.address.items():
            kernel[f"{name}_address"].value = address
        kernel.count.value = self.count
        if len(config.rules) > 1:
            kernel.rule.value = self.number
        if config.mixed:
            kernel.formats.set(
                gradient=GradientFormat.BF16 if self.half else GradientFormat.FP32,
                copy_out=CopyOutFormat.BF16 if self.half else CopyOutFormat.NONE,
            )
        for name in self.rule.scalars:
            kernel[name].value = float(self.scalars[name])
        switches = config.rule_set.switches
        kernel.mode.set(**{name: int(self.scalars.get(name, 0)) for name in switches})
        for k, name in enumerate(self.data):
            first, beat = self.address[name], config.beat_bytes
            kernel[f"window{k}_base"].value = first
            kernel[f"window{k}_limit"].value = -(-(first + self.data[name].size) // beat) * beat
            kernel[f"window{k}_permissions"].set(read=1, write=int(name != "g"), valid=1)

    def go(self) -> None:
        """START, and wait."""
        dimm = getattr(self.device, "dimm", None)
        if dimm is not None:
            with self.device.acceleration():
                self._go()
        else:
            self._go()

    def _go(self) -> None:
        self.kernel.start.go = 1
        self.device.backend.wait([self.kernel.status.poll(busy=0)], 100_000)

    def widened(self) -> dict[str, NDArray[np.float32]]:
        """The arrays as the units see them before the run."""
        found = {}
        for name in self.rule.arrays_in:
            data = self.data[name]
            if name in SIGNED:
                found[name] = dequantize(self.taken(data), signed=SIGNED[name])
            elif name == "g" and self.half:
                found[name] = fp.widen32(data.view(np.uint16), BF16)
            else:
                found[name] = data.view(np.float32)
        return found

    def expected(self) -> dict[str, NDArray[np.uint8]]:
        """The bytes of the arrays after the run."""
        made = evaluate(self.rule, self.widened(), self._own_scalars())
        after = {name: self.stored(name, values) for name, values in made.items()}
        if self.half:
            after["copy_out"] = fp.narrow32(made["p"], BF16).view(np.uint8)
        return self.data | after

    def _own_scalars(self) -> dict[str, float]:
        return {name: self.scalars[name] for name in (*self.rule.scalars, *self.rule.switches)}

    def stored(self, name: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        if name in SIGNED:
            return self.placed(quantize(values, signed=SIGNED[name]))
        return values.view(np.uint8)

    def check(self, committed: int | None = None) -> int:
        """Compare all of memory: elements of the states from `committed` on are as before.

        Gives the bytes of arrays that were written.
        """
        whole = self.before.copy()
        written = 0
        for name, data in self.expected().items():
            if name == "g":
                continue
            size = data.size if committed is None else self.offset(name, committed)
            whole[self.address[name] : self.address[name] + size] = data[:size]
            written += size
        found = self.memory()
        wrong = np.flatnonzero(found != whole)
        assert not wrong.size, f"{wrong[:8]} of {self.address} differ"
        return written

    def offset(self, name: str, element: int) -> int:
        """Where an element begins that begins a block."""
        blocks, rest = divmod(element, self.elements)
        assert not rest
        if name in SIGNED:
            return blocks * (self.elements + self.scale_bytes)
        return element * (self.data[name].size // self.count)

    def bursts(self, *, write: bool) -> list[tuple[str, int, int]]:
        """Bursts of one direction, in order: stream, first and last byte."""
        names = ["p", "g", "m", "v", "v_max", "d"]
        if write:
            names = [name for name in names if name != "g"] + ["copy_out"]
        names = [name for name in names if name in self.data and (write or name != "copy_out")]
        found = []
        for first in range(0, self.count, self.elements):
            size = min(self.elements, self.count - first)
            for name in names:
                stream = name.upper()
                if name != "copy_out":
                    stream += "_WRITE" if write else "_READ"
                at = self.address[name] + self.offset(name, first)
                if name in SIGNED:
                    end = at + self.scale_bytes + size
                else:
                    end = at + size * (self.data[name].size // self.count)
                while at < end:
                    most = self.config.burst_bytes
                    limit = min(end, (at // most + 1) * most)
                    found.append((stream, at, limit))
                    at = limit
        return found

    def beats(self, *, write: bool) -> int:
        beat = self.config.beat_bytes
        return sum(-(-(end - at) // beat) for _, at, end in self.bursts(write=write))

    def run(self) -> int:
        """A good run, all of it checked; gives the bytes written."""
        self.program()
        self.go()
        kernel = self.kernel
        assert kernel.status.done
        assert not kernel.status.error
        assert kernel.committed.value == self.count
        assert kernel.read_beats.value == self.beats(write=False)
        assert kernel.write_beats.value == self.beats(write=True)
        return self.check()

    def fault(self) -> tuple[int, int, int]:
        """A run that ends early: its cause, stream and address."""
        self.program()
        self.go()
        kernel = self.kernel
        assert kernel.status.error
        return kernel.error.cause, kernel.error.stream, kernel.error_address.value


def counts(device: KernelDevice) -> list[int]:
    """Those that cut groups, blocks and beats."""
    block, lanes = device.config.block_bytes // 4, device.config.lanes
    groups = [1, 255, 256, 257]
    blocks = [block - 1, block, block + 1, block + 4 * lanes + 1, 2 * block, 3 * block + 300]
    return sorted({*groups, *blocks})


@devices(*(name for name in URLS if "large" not in name))
def test_a_run_is_that_of_the_numbers_of_the_codes_quantized_once(device):
    written = expected = 0
    for index, count in enumerate(counts(device)):
        for rule in RULES if count > 257 else RULES[index % 4 :][:1]:
            job = Job(device, rule, count, seed=100 + count)
            written += job.run()
            states = [name for name in job.rule.states if name != "p"]
            blocks = -(-count // job.elements)
            expected += 4 * count + len(states) * (count + blocks * device.config.beat_bytes)
    assert written == expected > 0


@pytest.mark.deep
@devices(*(name for name in URLS if "large" not in name))
def test_runs_drawn_at_random(device):
    rng, block = np.random.default_rng(17), device.config.block_bytes // 4
    written = expected = 0
    for seed in range(300):
        rule, count = str(rng.choice(RULES)), int(rng.integers(1, 6 * block))
        job = Job(device, rule, count, seed=1000 + seed, odd=bool(rng.random() < 0.5))
        written += job.run()
        narrow = len(job.rule.states) - 1
        expected += 4 * count + narrow * (count + -(-count // block) * device.config.beat_bytes)
    assert written == expected


@devices("cpp-1-lane", "numpy-8-lanes", "cpp-16-lanes", "card")
def test_infinities_nan_and_odd_scales(device):
    block, seen = device.config.block_bytes // 4, np.zeros(2, int)
    for rule in RULES:
        job = Job(device, rule, 20 * block + 77, seed=3, odd=True)
        assert job.run() > 0
        for name in set(job.rule.states) & set(SIGNED):
            scales = job.taken(job.expected()[name]).scales
            seen += [np.isnan(scales).sum(), np.isfinite(scales).sum()]
    assert (seen > 10).all()


@devices("cpp-large", "numpy-large")
def test_more_elements_than_are_converted_at_a_time(device):
    for count in (CONVERTED, CONVERTED + 4096 + 257):
        job = Job(device, "adam", count, seed=13)
        assert job.run() == 4 * count + 2 * (count + -(-count // 4096) * 64)


@devices("cpp-1-lane", "numpy-8-lanes", "card")
def test_bursts_are_those_of_the_hardware(device):
    """Block by block one array after the other, cut at multiples of the longest: where addresses
    are logged, with an injection that hits nothing."""
    block, seen = device.config.block_bytes // 4, 0
    device.backend.inject(Injection(kind="slverr", write=True, base=1 << 19, limit=(1 << 19) + 1))
    for count in (block + 1, 2 * block - 3, 300 if block > 300 else 200):
        job = Job(device, "adam", count, seed=4)
        assert job.run() > 0
        number = len(job.bursts(write=False)) + len(job.bursts(write=True))
        assert number < KEPT_TRANSACTIONS
        text = device.backend.transactions()[-number:]
        for write in (False, True):
            kind = "write" if write else "read"
            found = [line.split(" ", 1)[1] for line in text if line.startswith(kind)]
            wanted = [f"{n} {a:#x}..{e:#x}" for n, a, e in job.bursts(write=write)]
            assert found == wanted
            seen += len(found)
    assert seen > 40


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@devices("cpp-8-lanes", "numpy-8-lanes")
def test_after_an_error_of_the_memory_what_is_committed_is_whole(device, write):
    """And of later blocks nothing is written."""
    way = "WRITE" if write else "READ"
    cause, block, checked = ErrorCause[f"{way}_RESPONSE"], 512, 0
    for name in ("m", "v"):
        for number, within in ((0, 0), (1, 0), (2, 500), (3, 40)):
            job = Job(device, "adam", 4 * block + 9, seed=5)
            begin = job.address[name] + job.offset(name, number * block) + within
            stream = f"{name}_{way}".upper()
            (address,) = [
                at
                for each, at, end in job.bursts(write=write)
                if each == stream
                if at <= begin < end
            ]
            device.backend.inject(
                Injection(kind="slverr", write=write, base=begin, limit=begin + 1)
            )
            assert job.fault() == (cause, Stream[stream], address)
            device.backend.heal()
            assert job.kernel.committed.value == number * block
            memory, expected = job.memory(), job.expected()
            for state in ("p", "m", "v"):
                first = job.address[state]
                whole = job.offset(state, number * block)
                later = job.offset(state, (number + write) * block)
                assert (memory[first:][:whole] == expected[state][:whole]).all()
                assert (
                    memory[first:][later : job.data[state].size] == job.data[state][later:]
                ).all()
                checked += whole
    blocks = 2 * (0 + 1 + 2 + 3)
    assert checked == blocks * (4 * block + 2 * (block + 32))


@devices("cpp-8-lanes", "numpy-8-lanes")
def test_a_guard_right_behind_an_array_is_not_touched_and_one_in_it_is(device):
    job = Job(device, "adam", 1029, seed=6)
    assert job.run() > 0
    last = job.address["v"] + job.data["v"].size - 1
    device.backend.protect(last // 64 * 64, 64)
    job.program()
    with pytest.raises(GuardError) as caught:
        job.go()
    assert caught.value.address == last // 64 * 64


@devices("card", "card-numpy")
def test_arrays_are_as_long_as_their_scales_and_codes(device):
    """By the checks at START: the end of memory, overlaps, windows."""
    count = 2 * 512 + 33
    nbytes = 3 * 32 + count  # ends within a beat
    whole = -(-nbytes // 32) * 32
    assert whole - nbytes == 31
    fits = {"m": MEMORY_BYTES - whole}
    assert Job(device, "adam", count, seed=7, address=fits).run() > 0
    job = Job(device, "adam", count, seed=7)
    job.address["m"] = MEMORY_BYTES - whole + 32
    assert job.fault() == (ErrorCause.ADDRESS_RANGE, Stream.M_READ, job.address["m"])
    base = 1 << 18
    beside = {"m": base, "v": base + whole}
    job = Job(device, "adam", count, seed=8, address=beside)
    assert job.run() > 0
    job.address["v"] = base + whole - 32
    assert job.fault() == (ErrorCause.OVERLAP, Stream.V_READ, base + whole - 32)
    job = Job(device, "adam", count, seed=9)
    for number, name in enumerate(job.data):
        if name == "m":
            job.program()
            job.kernel[f"window{number}_limit"].value -= 32
            job.go()
            assert job.kernel.error.cause == ErrorCause.WINDOW
            assert job.kernel.error.stream == Stream.M_READ
            assert job.check(0) == 0


@devices("cpp-8-lanes", "numpy-8-lanes", "cpp-16-lanes-most")
def test_lent_memory_whose_borders_cut_blocks(device):
    """Parts of any array, for writing or not: the results, and where they are."""
    block, lent = device.config.block_bytes // 4, 0
    for seed in range(8):
        job = Job(device, "adam", 4 * block + 300, seed=20 + seed)
        expected = job.expected()
        kept, borders = [], 0
        for name in ("p", "g", "m", "v"):
            writes = bool(job.rng.random() < 0.7) and name != "g"
            at, stop = sorted(job.rng.choice(job.data[name].size // 4, 2, replace=False) * 4)
            part = job.data[name][at:stop].copy()
            if device.backend.lend_memory(job.address[name] + at, part, writes=writes):
                kept.append((name, at, stop, part, writes))
                borders += 1
        assert borders == 4
        assert job.run() > 0
        for name, at, stop, part, writes in kept:
            wanted = expected if writes else job.data
            assert (part == wanted[name][at:stop]).all()
            device.backend.end_loan(job.address[name] + at)
            lent += 1
    assert lent == 32


@devices("card", "card-numpy")
def test_numbers_of_a_momentum_are_those_of_plain_numpy_over_steps(device):
    """`torch.optim.SGD(momentum=0.9)`, whose buffer is kept in 8 bits from step to step."""
    job = Job(device, "sgd_momentum", 1111, seed=10)
    hyper = optimizer_of("sgd_momentum").defaults | {"lr": 0.1, "momentum": 0.9}
    p = job.data["p"].view(np.float32).astype(np.float64)
    buffer = job.taken(job.data["m"])
    for step in range(1, 5):
        g = job.rng.standard_normal(1111).astype(np.float32)
        device.backend.write_memory(job.address["g"], g.view(np.uint8))
        form = optimizer_of("sgd_momentum").by_rule["sgd_momentum"]
        job.scalars |= form.registers(hyper, step, False)
        job.program()
        job.go()
        assert job.kernel.status.done
        m = dequantize(buffer, signed=True) * np.float32(0.9) + g
        buffer = quantize(m, signed=True)
        p += np.float32(-0.1).astype(np.float64) * m
        memory = job.memory()
        wanted = job.placed(buffer)
        assert (memory[job.address["m"] :][: wanted.size] == wanted).all()
        found = memory[job.address["p"] :][: 4 * 1111].view(np.float32)
        np.testing.assert_allclose(found, p, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ["cpp", "numpy"])
def test_gradients_in_bfloat16_and_as_pairs_and_a_copy(engine):
    url = (
        f"golden:smartssd?state_format=dynamic8&memory_bytes=1MiB&chunk_bytes=4096&engine={engine}"
    )
    with nearstep.open(url) as device:
        job = Job(device, "adam", 3333, seed=11, half=True)
        job.kernel.gradient_scale.value = 1.0
        assert job.run() > 0
        dense = np.zeros(3333, np.float32)
        index = np.sort(job.rng.choice(3333, 400, replace=False)).astype(np.uint32)
        values = job.rng.standard_normal(400).astype(np.float32)
        dense[index] = values
        job = Job(device, "adam", 3333, seed=12)
        job.data["g"] = values.view(np.uint8)
        job.data["index"] = index.view(np.uint8)
        job.address["index"] = 1 << 19
        device.backend.write_memory(job.address["g"], job.data["g"])
        device.backend.write_memory(job.address["index"], job.data["index"])
        job.before = job.memory()
        job.program()
        job.kernel.compression.form = int(Compression.FUSED)
        job.kernel.pairs.value = 400
        job.go()
        assert job.kernel.status.done
        job.data["g"] = dense.view(np.uint8)
        assert job.check() > 0
