"""What must hold before a run touches memory."""

from amaranth import Array, Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.window import WindowMatch, window_port
from nearstep_hw.updater.array_lengths import ArrayLengths
from nearstep_hw.updater.fault import CAUSE_WIDTH, RESPONSE_WIDTH, STREAM_WIDTH, FaultLayout
from nearstep_spec.updater.config import AdamKernelConfig
from nearstep_spec.updater.registers import ErrorCause, Stream

ADDRESS_WIDTH = 64


class StartCheck(wiring.Component):
    """Checks a run's arrays, one condition a cycle, and finds the first fault.

    In this order: whatever the registers ask for must be there; then, unless `i_count` is 0, every
    array must start on a beat, every array must end within the memory, no two may share bytes, and
    one window must grant every array in full, in whole beats: each that is read for reading, then
    those that are written for writing. Arrays that the run does not have do not count. So a run
    with a bad array touches nothing.

    *Timing*: done within 1 + 4 n + n (n - 1) / 2 cycles of `i_start` with n arrays: 23 for Adam's.
    Each condition takes three cycles, and one for each window, if `config.cut`.

    Parameters
    ----------
    config : of the kernel.
    memory_bytes : where memory ends; None where the address space does.

    Members
    -------
    i_start : begins; the other inputs hold until `o_done`.
    i_address : byte address of each of `operands`.
    i_use : a bit for each array that the run has. If not all runs have all.
    i_count, i_pairs, i_narrow, i_paired : as of `ArrayLengths`; settled when `i_start` comes.
    i_formats : not 0 if a rule, format, scale or kind of run is set that the kernel does not have.
    i_copy_out : not 0 if a copy-out address is set.
    window : the windows, see `window_port`.
    o_done : the checks are over, in this cycle.
    o_fault : with `o_done`, the first fault, or cause 0.
    i_clear : goes idle.
    """

    def __init__(self, config: AdamKernelConfig, *, memory_bytes: int | None = None) -> None:
        self.config = config
        space = 1 << config.address_width
        self.memory_bytes = space if memory_bytes is None else min(memory_bytes, space)
        self.lengths = ArrayLengths(config)
        self.operands = self.lengths.operands
        self.selective = config.selective or tuple(self.operands) != config.arrays
        sizes = {k: v for k, v in self.lengths.signature.members.items() if k.startswith("i_")}
        super().__init__(
            {
                "i_start": In(1),
                "i_address": In(ADDRESS_WIDTH).array(len(self.operands)),
                **({"i_use": In(len(self.operands))} if self.selective else {}),
                **sizes,
                "i_formats": In(1),
                "i_copy_out": In(1),
                "window": window_port(
                    address_width=config.address_width,
                    windows=config.window_count,
                    cut=config.cut,
                ),
                "o_done": Out(1),
                "o_fault": Out(FaultLayout()),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        width = self.config.address_width
        m.submodules.match = match = WindowMatch(
            address_width=width, windows=self.config.window_count, cut=self.config.cut
        )
        m.submodules.lengths = lengths = self.lengths
        beat_bytes = self.config.beat_bytes
        arrays = list(self.operands.values())
        use = self.i_use if self.selective else Const((1 << len(arrays)) - 1, len(arrays))
        unused = Signal()
        other_unused = Signal()
        read = Signal()
        written = Signal()
        bases = Array(self.i_address)
        array = Signal(range(len(arrays)))
        other = Signal(range(len(arrays)))  # with OVERLAP: an array before `array`
        is_last = Signal()
        base = Signal(ADDRESS_WIDTH)
        length = Signal(lengths.length_width)
        end = Signal(lengths.length_width + 1)
        beyond = Signal()  # `base` or `length` has bits that no address has
        # What follows RANGE need not look at such bits.
        other_base = Signal(width)
        other_length = Signal(width + 1)
        other_end = Signal(width + 1)
        cause = Signal(CAUSE_WIDTH)
        stream = Signal(STREAM_WIDTH)
        address = Signal(ADDRESS_WIDTH)

        cut = self.config.cut
        empty, aligned, in_range, apart, granted = (Signal() for _ in range(5))
        # A register for what is compared, one for the ends, and those of comparisons.
        wait = 2 + self.config.window_count
        waited = Signal(range(wait + 1))
        act = Signal()  # the condition has been found out
        to = m.d.sync if cut else m.d.comb
        if cut:
            m.d.comb += act.eq(waited == wait)
            m.d.sync += waited.eq(Mux(act, 0, waited + 1))
        else:
            m.d.comb += act.eq(1)

        for name in lengths.signature.members:
            if name.startswith("i_"):
                m.d.comb += getattr(lengths, name).eq(getattr(self, name))
        for mine, its in zip(self.window, match.window, strict=True):
            for name in its.signature.members:
                m.d.comb += getattr(its, name).eq(getattr(mine, name))
        m.d.comb += [
            is_last.eq(array == len(arrays) - 1),
            match.i_start.eq(base[:width]),
            match.i_end.eq(end[: width + 1]),
            granted.eq(match.o_granted),
            address.eq(base),
            self.o_fault.eq(Cat(cause, stream, Const(0, RESPONSE_WIDTH), address)),
        ]

        to += [
            base.eq(bases[array]),
            unused.eq(~use.bit_select(array, 1)),
            other_unused.eq(~use.bit_select(other, 1)),
            other_base.eq(bases[other][:width]),
            length.eq(Array(lengths.o_bytes)[array]),
            other_length.eq(Array(lengths.o_bytes)[other]),
            beyond.eq(base[width:].any() | lengths.o_beyond.bit_select(array, 1)),
            end.eq(base[:width] + length),
            other_end.eq(other_base + other_length),
            empty.eq(self.i_count == 0),
            aligned.eq(base % beat_bytes == 0),
            in_range.eq((end <= self.memory_bytes) & ~beyond),
            apart.eq((end <= other_base) | (other_end <= base[:width])),
        ]

        with m.Switch(array):
            for index, operand in enumerate(arrays):
                with m.Case(index):
                    m.d.comb += [
                        stream.eq(operand.stream),
                        read.eq(operand.read != Stream.NONE),
                        written.eq(operand.write != Stream.NONE),
                    ]

        def check(holds: object, found: ErrorCause) -> object:
            """End with `found` unless `holds`; a context for what follows if it does."""
            with m.If(~holds):
                m.d.comb += [cause.eq(found), self.o_done.eq(1)]
                m.next = "IDLE"
            return m.Else()

        def next_array(then: str) -> None:
            m.d.sync += array.eq(array + 1)
            with m.If(is_last):
                m.d.sync += array.eq(0)
                m.next = then

        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [array.eq(0), waited.eq(0)]
                with m.If(self.i_start):
                    m.next = "FORMATS"
            with m.State("FORMATS"):
                m.d.sync += waited.eq(0)
                m.d.comb += [
                    stream.eq(Stream.NONE),
                    address.eq(0),
                ]
                with m.If(~self.i_formats & self.i_copy_out):
                    m.d.comb += stream.eq(Stream.COPY_OUT)
                with check(~self.i_formats & ~self.i_copy_out, ErrorCause.UNSUPPORTED):
                    m.next = "ALIGNMENT"
                    with m.If(empty):
                        m.d.comb += self.o_done.eq(1)
                        m.next = "IDLE"
            with (
                m.State("ALIGNMENT"),
                m.If(act),
                check(aligned | unused, ErrorCause.ALIGNMENT),
            ):
                next_array("RANGE")
            with m.State("RANGE"), m.If(act):
                m.d.sync += other.eq(0)
                with check(in_range | unused, ErrorCause.ADDRESS_RANGE):
                    next_array("OVERLAP")
                    with m.If(is_last):
                        m.d.sync += array.eq(1)
            with (
                m.State("OVERLAP"),
                m.If(act),
                check(apart | unused | other_unused, ErrorCause.OVERLAP),
            ):
                m.d.sync += array.eq(array + 1)
                with m.If(is_last):
                    m.d.sync += [other.eq(other + 1), array.eq(other + 2)]
                    with m.If(other == len(arrays) - 2):
                        m.d.sync += array.eq(0)
                        m.next = "READ_WINDOW"
            with m.State("READ_WINDOW"):
                m.d.comb += match.i_read.eq(1)
                with m.If(act), check(granted | unused | ~read, ErrorCause.WINDOW):
                    next_array("WRITE_WINDOW")
            with m.State("WRITE_WINDOW"):
                m.d.comb += match.i_write.eq(1)
                with m.Switch(array):
                    for index, operand in enumerate(arrays):
                        with m.Case(index):
                            m.d.comb += stream.eq(operand.write)
                with m.If(act), check(granted | unused | ~written, ErrorCause.WINDOW):
                    m.d.comb += self.o_done.eq(is_last)
                    next_array("IDLE")
        return ResetInserter(self.i_clear)(m)
