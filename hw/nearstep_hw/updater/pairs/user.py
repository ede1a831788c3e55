"""A user's decompressor: records in, dense beats out."""

from collections.abc import Callable
from typing import Any, Protocol

from amaranth import Const, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.updater.pairs.layout import CAUSE_WIDTH, COUNT_WIDTH, PairLayout
from nearstep_spec.fp import FP32
from nearstep_spec.updater.compression import PairCause

__all__ = ["RecordCheck", "UnitSignature", "UserStage", "UserUnit"]


class UnitSignature(wiring.Signature):
    """Ports of a user's unit.

    Parameters
    ----------
    lanes : elements of a dense beat.
    records : of a beat.

    Members
    -------
    i : In(stream of `PairLayout`): records in order, `index` is the word, `value` is binary32.
        The last beat has `end`; records not in `keep` are undefined. A run without records is
        one empty beat with `end`. All records are valid.
    o : Out(stream): the gradient in order, element k of a beat in bits 32 k to 32 k + 31.
    i_count : elements of the run, 1 or more; stable during a run.
    """

    def __init__(self, *, lanes: int, records: int) -> None:
        super().__init__(
            {
                "i": In(stream.Signature(PairLayout(records))),
                "o": Out(stream.Signature(data.ArrayLayout(FP32.width, lanes))),
                "i_count": In(COUNT_WIDTH),
            }
        )


class UserUnit(Protocol):
    """Makes a user's unit: a component of `UnitSignature` in the domain `sync`.

    The unit is reset before each run (memories are not) and outputs at least ceil(count / lanes)
    beats for any records. Further beats are not accepted; lanes behind the last
    element are ignored. The unit need not consume all records. Valid and payload of a
    beat are held until it is accepted.
    """

    i: Any
    o: Any
    i_count: Any


class RecordCheck(wiring.Component):
    """Passes records up to the first that is wrong, and ends the run there.

    The beat with the wrong record has `end`, the cause `RANGE` and the position, and keeps the
    records before. No beat passes after an end until reset.

    *Timing*: one beat a cycle, two cycles of latency. The pipeline stalls while a beat waits at the
    output.

    Parameters
    ----------
    pairs : records of a beat.
    wrong : (word, number, count) to a value of one bit; None passes all records.

    Members
    -------
    i, o : streams of `PairLayout`.
    i_count : elements; stable during a run.
    """

    def __init__(self, *, pairs: int, wrong: Callable[[Any, Any, Any], Any] | None) -> None:
        self.pairs = pairs
        self._wrong = wrong
        super().__init__(
            {
                "i": In(stream.Signature(PairLayout(pairs))),
                "o": Out(stream.Signature(PairLayout(pairs))),
                "i_count": In(COUNT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        pairs = self.pairs
        advance, ended, full, stopped = Signal(), Signal(), Signal(), Signal()
        beat = Signal(PairLayout(pairs))
        wrong, good = Signal(pairs), Signal(pairs)
        number = Signal(COUNT_WIDTH)  # of the first record of the beat at the input
        first = Signal(COUNT_WIDTH)  # and of `beat`
        passed = Signal(range(pairs + 1))
        given = self.i.payload
        m.d.comb += [
            advance.eq(self.o.ready | ~self.o.valid),
            self.i.ready.eq(advance & ~ended),
        ]
        with m.If(advance):
            m.d.sync += full.eq(self.i.valid & ~ended)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                beat.eq(given),
                first.eq(number),
                number.eq(number + pairs),
                ended.eq(given.end),
            ]
            for lane in range(pairs):
                found = self._found(given.index[lane], (number + lane)[:COUNT_WIDTH])
                m.d.sync += wrong[lane].eq(given.keep[lane] & found)
        for lane in range(pairs):
            m.d.comb += good[lane].eq(beat.keep[lane] & ~wrong[: lane + 1].any())
        m.d.comb += passed.eq(sum(good[lane] for lane in range(pairs)))
        with m.If(advance):
            m.d.sync += [
                self.o.valid.eq(full & ~stopped),
                self.o.payload.eq(beat),
                self.o.payload.keep.eq(good),
                self.o.payload.end.eq(beat.end | wrong.any()),
                self.o.payload.cause.eq(Mux(wrong.any(), PairCause.RANGE, beat.cause)),
                self.o.payload.position.eq(first + passed),
            ]
            with m.If(full & ~stopped):
                m.d.sync += stopped.eq(beat.end | wrong.any())
        return m

    def _found(self, word: Value, number: Value) -> Value:
        if self._wrong is None:
            return Const(0, 1)
        return Value.cast(self._wrong(word, number, self.i_count)).any()


class UserStage(wiring.Component):
    """Connects a user's unit between checked records and the gradient stream, and counts dense
    beats.

    When all beats of the run are taken, the remaining records are dropped. A beat with a cause ends
    the run and its output.

    *Timing*: that of the unit; combinational by itself.

    Parameters
    ----------
    unit : see `UserUnit`.
    lanes, pairs : elements of a dense beat, and records of a beat.

    Members
    -------
    i : In(stream of `PairLayout`), checked.
    o : Out(stream), the dense beats.
    i_launch : begins a run, out of reset.
    i_count : elements; stable during a run.
    o_done : all beats are taken, and all records.
    o_cause, o_position : why, and after how many records, a run ended early.

    Raises
    ------
    TypeError : the unit has other ports.
    """

    def __init__(self, unit: UserUnit, *, lanes: int, pairs: int) -> None:
        self.lanes = lanes
        self._unit = unit
        ports = UnitSignature(lanes=lanes, records=pairs)
        if not isinstance(unit, wiring.Component) or unit.signature.members != ports.members:
            shown = getattr(getattr(unit, "signature", None), "members", type(unit).__name__)
            raise TypeError(
                f"A unit must be a Component of UnitSignature(lanes={lanes}, records={pairs}), "
                f"not {shown!r}"
            )
        super().__init__(
            {
                **ports.members,
                "i_launch": In(1),
                "o_done": Out(1),
                "o_cause": Out(CAUSE_WIDTH),
                "o_position": Out(COUNT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.unit = unit = self._unit
        low = exact_log2(self.lanes)
        running, whole, ended = Signal(), Signal(), Signal()
        left = Signal(COUNT_WIDTH - low + 1)  # beats not taken yet
        beat = self.i.payload
        bad = Signal()
        m.d.comb += [
            bad.eq(self.i.valid & beat.end & (beat.cause != PairCause.NONE)),
            whole.eq(running & (left == 0)),
            unit.i.payload.eq(beat),
            unit.i.valid.eq(self.i.valid & running & ~whole & ~bad),
            self.i.ready.eq((unit.i.ready & running & ~bad) | whole),
            unit.i_count.eq(self.i_count),
            self.o.payload.eq(unit.o.payload),
            self.o.valid.eq(unit.o.valid & running & ~whole),
            unit.o.ready.eq(self.o.ready & running & ~whole),
            self.o_done.eq(whole & ended),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += left.eq(left - 1)
        with m.If(self.i.valid & self.i.ready & beat.end & ~bad):
            m.d.sync += ended.eq(1)
        # An offered dense beat is held: the run ends when it has been taken.
        with m.If(running & bad & ~self.o.valid):
            m.d.sync += [
                running.eq(0),
                self.o_cause.eq(beat.cause),
                self.o_position.eq(beat.position),
            ]
        with m.If(self.i_launch):
            m.d.sync += [running.eq(1), left.eq((self.i_count + (self.lanes - 1)) >> low)]
        return m
