"""A kernel that is told what to do through raw registers, and what its START leads to."""

from __future__ import annotations

import numpy as np

from nearstep.updater.device import KernelDevice
from nearstep_spec.rule.adam import ADAM, adam_scalars
from nearstep_spec.updater.operands import array_bytes
from nearstep_spec.updater.registers import (
    Compression,
    CopyOutFormat,
    ErrorCause,
    GradientFormat,
    RunKind,
    Stream,
)

from .job import Job, accelerated

COUNT, PAIRS = 300, 50
TOP = 1 << 34
READ = {"p": Stream.P_READ, "g": Stream.G_READ, "m": Stream.M_READ, "v": Stream.V_READ,
        "index": Stream.INDEX_READ, "copy_out": Stream.COPY_OUT}  # fmt: skip
WRITE = {"p": Stream.P_WRITE, "m": Stream.M_WRITE, "v": Stream.V_WRITE,
         "copy_out": Stream.COPY_OUT}  # fmt: skip
SCALARS = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.0, 1, False)
DONE = (ErrorCause.NONE, Stream.NONE, 0)
UNSUPPORTED = (ErrorCause.UNSUPPORTED, Stream.NONE, 0)


class Start:
    """A kernel that is ready for a step of Adam, and one window over all memory.

    Its gradients are pairs, and it writes a copy, where it can do that.

    Parameters
    ----------
    gradient : format of gradients that are no pairs; None: they are pairs if they can be.

    Attributes
    ----------
    arrays : that the run has, in the order in which they are checked.
    at : address of each.
    """

    def __init__(
        self, device: KernelDevice, count: int = COUNT, seed: int = 1, gradient: str | None = None
    ) -> None:
        self.device, self.count = device, count
        self.paired = gradient is None and "fused" in device.config.compression
        self.gradient = gradient or "fp32"
        self.work = Job(device, count, seed, gradient=gradient)
        buffers = dict(self.work.buffers)
        if self.paired:
            # the values are the first of as many as there are elements, for runs without pairs
            self.work.index = np.arange(PAIRS, dtype=np.uint32) * 6
            self.work.values = self.work.before["g"][:PAIRS]
            buffers["index"] = self.work.put(self.work.index)
        self.copy = None
        if device.config.copy_out_formats:
            self.copy = buffers["copy_out"] = self.work.put(np.full(count, 7, np.float16))
        self.arrays = [name for name in READ if name in buffers]
        self.at = {name: buffers[name].address for name in self.arrays}
        self.kernel = device.channels[0].kernel
        for name in ADAM.scalars:
            if name != "gradient_scale":
                self.kernel[name].value = float(SCALARS[name])
        self.kernel.mode.bits = 0
        self.kernel.mode.set(**{name: SCALARS[name] for name in ADAM.switches})
        if device.config.gradient_scale:
            self.kernel.gradient_scale.value = 1.0
        self.reset()

    def reset(self) -> None:
        """All registers but those of the rule as in the beginning."""
        kernel, config = self.kernel, self.device.config
        for name, address in self.at.items():
            kernel[f"{name}_address"].value = address
        kernel.count.value = self.count
        if len(config.rules) > 1:
            kernel.rule.value = 0
        if config.scan:
            kernel.operation.kind = RunKind.UPDATE
        if config.compression:
            kernel.compression.form = Compression.FUSED if self.paired else Compression.NONE
            kernel.pairs.value = PAIRS
        kernel.formats.set(
            gradient=GradientFormat[self.gradient.upper()],
            copy_out=CopyOutFormat.FP16 if self.copy is not None else CopyOutFormat.NONE,
        )
        self.windows((0, TOP, 0b111))

    def windows(self, *granted: tuple[int, int, int]) -> None:
        """Windows in force: base, limit, permissions."""
        for index in range(self.device.config.windows):
            base, limit, bits = granted[index] if index < len(granted) else (0, 0, 0)
            self.kernel[f"window{index}_base"].value = base
            self.kernel[f"window{index}_limit"].value = limit
            self.kernel[f"window{index}_permissions"].bits = bits

    def all_but(self, name: str, bits: int = 0, less: int = 0) -> None:
        """Windows over all memory without one array, which has other permissions, and a window of
        its own that is `less` bytes too short."""
        start = self.at[name]
        stop = start + self.bytes_of(name)
        self.windows((0, start, 0b111), (stop, TOP, 0b111), (start, stop - less, bits))

    def bytes_of(self, name: str) -> int:
        """Whole beats of an array of the run that this begins with."""
        beat = self.device.config.beat_bytes
        elements = PAIRS if self.paired and name in ("g", "index") else self.count
        forms = {"copy_out": "fp16", "g": self.gradient, "index": "fp32", **self.work.formats}
        return -(-array_bytes(self.device.config, forms[name], elements) // beat) * beat

    def set(self, **registers: object) -> None:
        """Registers by name: a value, or the values of fields."""
        for name, value in registers.items():
            if isinstance(value, dict):
                self.kernel[name].set(**value)
            else:
                self.kernel[name].value = value

    def outcome(self) -> tuple[int, int, int]:
        """Cause, stream and address after a START; checks what must hold with any."""
        kernel, config = self.kernel, self.device.config
        with accelerated(self.device):
            kernel.start.go = 1
            self.device.backend.wait([kernel.status.poll(busy=0)], 50_000)
        failed = kernel.error.cause != ErrorCause.NONE
        assert (kernel.status.error, kernel.status.done) == (failed, not failed)
        if failed:
            names = ["committed", "read_beats", "write_beats"]
            names += ["duplicates"] if config.compression else []
            assert [kernel[name].value for name in names] == [0] * len(names)
            if config.scan:
                assert (kernel.scan.found_inf, kernel.sum_of_squares.value) == (0, 0)
        return kernel.error.cause, kernel.error.stream, kernel.error_address.value

    def check_untouched(self) -> None:
        """Nothing was written."""
        assert self.copy is None or np.all(self.copy.read() == 7)
        assert self.work.check_untouched() == 3 * self.count

    def check_works(self) -> None:
        """The run that this begins with is done, and right."""
        self.reset()
        self.check_granted()

    def check_granted(self) -> None:
        """The run that this begins with is done with the windows as they are, and right."""
        assert self.outcome() == DONE
        self.work.expect("adam", pairs=self.paired, copy_out=self.copy, step=1)
        assert self.work.check() == (3 + (self.copy is not None)) * self.count
        if self.copy is not None:
            self.copy.fill(7)

    def refuses(self, *expected: int, untouched: bool = True, **registers: object) -> None:
        """START with other registers has this outcome, and nothing is written."""
        self.set(**registers)
        assert self.outcome()[: len(expected)] == expected, registers
        if untouched:
            self.check_untouched()
