"""Steps of a job, in order of execution."""

from amaranth import Elaboratable, Module, Mux, ResetInserter, Signal, Value, signed
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.coarse.entry import BEAT_BITS, StepLayout, max_entry_beats
from nearstep_hw.coarse.wire import MEMBER_BITS, PHIT_BITS
from nearstep_spec.coarse.config import CoarseConfig

ROUND_BITS = MEMBER_BITS + 1  # of 0 to 2 * members - 2


class EntryWalker(wiring.Component):
    """Iterates over batches of chunks, rounds of a batch and the chunks of each round.

    A chunk is in rounds 0 to 2 * members - 2 at a core; the entry of a round is part `position`
    - round, modulo `members`. Round 0 of the first batch is first; round 0 of every other batch
    is merged with the last round of the previous batch, chunk by chunk: round 0 fills the
    outgoing link while the last round only receives and writes.

    In an exact sum a round before the last one of a part sends as many entries as devices have
    added to it: the rounds are the same, on lists. Woven, the rounds of different chunks are
    interleaved, so that one that only adds alternates with those that make lists longer: after
    round 0 of chunk h come round 1 of chunk h - 1, round 2 of chunk h - 2 and so on, with two
    devices of chunks h - 2 and h - 4; the last one is one step with round 0 of chunk h + 1.

    *Timing*: a step every three cycles; the first four cycles after `i_start`.

    Parameters
    ----------
    loads : output only steps that need the device's own values.

    Members
    -------
    i_start : pulse.
    i_members, i_position : of the ring, held.
    i_chunks, i_entry_beats, i_chunk_beats, i_tail_beats, i_tail_exist : from `TensorCut`, held.
    i_exact, i_woven, i_halves, i_ahead : with exact sums alone: the job is one; woven; its elements
        have 16 bits; chunks of a batch; held.
    o : the steps.
    i_clear : clears all state.
    """

    def __init__(self, config: CoarseConfig, *, loads: bool) -> None:
        self.config = config
        self.loads = loads
        entry_width = bits_for(max_entry_beats(config))
        super().__init__(
            {
                "i_start": In(1),
                "i_members": In(MEMBER_BITS),
                "i_position": In(MEMBER_BITS),
                "i_chunks": In(BEAT_BITS),
                "i_entry_beats": In(entry_width),
                "i_chunk_beats": In(entry_width + MEMBER_BITS),
                "i_tail_beats": In(entry_width),
                "i_tail_exist": In(entry_width + MEMBER_BITS),
                "o": Out(stream.Signature(StepLayout(config))),
                "i_clear": In(1),
                **(
                    {
                        **dict.fromkeys(("i_exact", "i_woven", "i_halves"), In(1)),
                        "i_ahead": In(range(config.chunks_ahead + 1)),
                    }
                    if config.exact
                    else {}
                ),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        most_ahead = self.config.chunks_ahead
        ahead_chunks = self.i_ahead if self.config.exact else most_ahead
        self.round = Signal(ROUND_BITS)
        self.chunk = Signal(range(most_ahead + 1))  # of the batch
        self.ahead = Signal()  # the step is in round 0 of the next batch
        self.part = Signal(MEMBER_BITS)
        self.left = Signal(BEAT_BITS)  # chunks left, with this batch
        self.count = Signal(range(most_ahead + 1))
        self.next_count = Signal(range(most_ahead + 1))
        self.batch_at = Signal(BEAT_BITS)
        self.chunk_at = Signal(BEAT_BITS)
        self.last_round = Signal(ROUND_BITS)
        step = self.o.payload
        merged = Signal()
        first = Signal()
        last_chunk = Signal()
        size = Signal.like(step.wire_beats)
        part = Signal(MEMBER_BITS)
        offset = Signal.like(self.i_chunk_beats)
        start_at = Signal(BEAT_BITS)
        exist = Signal(range(-(1 << len(offset)), 1 << len(offset)))
        in_last = Signal()
        batch_beats = Signal(len(self.i_chunk_beats) + bits_for(most_ahead))

        last = Mux(
            self.ahead,
            (self.left - ahead_chunks == self.next_count) & (self.chunk + 1 == self.next_count),
            (self.next_count == 0) & (self.chunk + 1 == self.count),
        )
        skipped: Value | int = batch_beats
        if self.config.exact:
            self._weave(m, merged, last_chunk)
            last = Mux(self.i_woven, self.number + 1 == self.i_chunks, last)
            skipped = Mux(self.i_woven, 0, batch_beats)
        m.d.comb += [
            self.last_round.eq(2 * self.i_members - 2),
            merged.eq(self.round == self.last_round),
            first.eq(self.ahead | (self.round == 0)),
            last_chunk.eq(last),
            size.eq(Mux(last_chunk, self.i_tail_beats, self.i_entry_beats)),
            part.eq(Mux(first, self.i_position, self.part)),
            batch_beats.eq(self.i_chunk_beats * ahead_chunks),
            exist.eq(self.i_tail_exist - offset),
        ]
        with m.FSM():
            with m.State("IDLE"), m.If(self.i_start):
                m.d.sync += [
                    self.round.eq(0),
                    self.chunk.eq(0),
                    self.ahead.eq(0),
                    self.batch_at.eq(0),
                    self.chunk_at.eq(0),
                    self.left.eq(self.i_chunks),
                ]
                if self.config.exact:
                    with m.If(self.i_woven):
                        m.d.sync += [
                            self.round.eq(self.last_round),
                            self.number.eq(-1),
                            self.head.eq(0),
                            self.head_at.eq(0),
                        ]
                m.next = "BATCH"
            with m.State("BATCH"):
                more = self.left - ahead_chunks
                over = self.left > ahead_chunks
                m.d.sync += [
                    self.count.eq(Mux(over, ahead_chunks, self.left)),
                    self.next_count.eq(Mux(over, Mux(more > ahead_chunks, ahead_chunks, more), 0)),
                ]
                m.next = "STEP"
            with m.State("STEP"):
                m.d.sync += [
                    offset.eq(part * size),
                    start_at.eq(self.chunk_at + Mux(self.ahead, skipped, 0)),
                    in_last.eq(last_chunk),
                    step.wire_beats.eq(size),
                    step.receive.eq(~first),
                    step.local.eq(self.ahead | (self.round < self.i_members)),
                    step.send.eq(self.ahead | ~merged),
                    step.write.eq(~self.ahead & (self.round + 1 >= self.i_members)),
                    step.final.eq(~self.ahead & (self.round + 1 == self.i_members)),
                    step.end.eq(merged & ~self.ahead & last_chunk),
                ]
                m.next = "PLACE"
                if self.config.exact:
                    m.d.sync += [
                        step.list.eq(self.i_exact & (first | (self.round < self.i_members))),
                        step.addends.eq(Mux(first, 0, self.round)),
                        step.apart.eq(self.joint | self.shares),
                    ]
                    with m.If(self.joint):
                        m.d.sync += [step.local.eq(1), step.send.eq(1)]
                    with m.If(self.i_woven & ~self.exists):
                        self._advance(m, merged, batch_beats, ahead_chunks)
                if self.loads:
                    with m.If(~self.ahead & (self.round >= self.i_members)):
                        self._advance(m, merged, batch_beats, ahead_chunks)
            with m.State("PLACE"):
                m.d.sync += [
                    step.at.eq(start_at + offset),
                    step.beats.eq(step.wire_beats),
                    step.tail.eq(0),
                ]
                with m.If(in_last):
                    m.d.sync += step.tail.eq((exist > 0) & (exist <= step.wire_beats))
                    with m.If(exist < step.wire_beats):
                        m.d.sync += step.beats.eq(Mux(exist > 0, exist, 0))
                m.next = "OFFER"
            with m.State("OFFER"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    self._advance(m, merged, batch_beats, ahead_chunks)
        return ResetInserter(self.i_clear)(m)

    def _advance(
        self, m: Module, merged: Signal, batch_beats: Signal, ahead_chunks: Signal | int
    ) -> None:
        """Advance to the next step."""
        m.next = "STEP"
        with m.If(merged & ~self.ahead & (self.chunk < self.next_count)):
            m.d.sync += self.ahead.eq(1)
        with m.Elif(self.chunk + 1 != self.count):
            m.d.sync += [
                self.ahead.eq(0),
                self.chunk.eq(self.chunk + 1),
                self.chunk_at.eq(self.chunk_at + self.i_chunk_beats),
            ]
        with m.Else():
            source = Mux((self.round == 0) | merged, self.i_position, self.part)
            m.d.sync += [
                self.ahead.eq(0),
                self.chunk.eq(0),
                self.chunk_at.eq(self.batch_at),
                self.round.eq(self.round + 1),
                self.part.eq(Mux(source == 0, self.i_members - 1, source - 1)),
            ]
            with m.If(merged):
                m.d.sync += [
                    self.round.eq(1),
                    self.batch_at.eq(self.batch_at + batch_beats),
                    self.chunk_at.eq(self.batch_at + batch_beats),
                    self.left.eq(self.left - ahead_chunks),
                ]
                m.next = "BATCH"
                with m.If(self.next_count == 0):
                    m.next = "IDLE"
        if self.config.exact:
            with m.If(self.i_woven):
                self._advance_woven(m, merged)

    def _weave(self, m: Module, merged: Signal, last_chunk: Signal) -> None:
        """Add the place in the order of a woven job."""
        self.number = Signal(signed(BEAT_BITS + 2))  # of the step's chunk
        self.head = Signal(BEAT_BITS + 1)  # the chunk of the next round 0
        self.head_at = Signal(BEAT_BITS)
        self.exists = Signal()  # the chunk
        self.joint = Signal()  # the step is the last round of a chunk, and round 0 of `head`
        self.shares = Signal()  # lists may have received and own elements in a beat
        m.d.comb += self.exists.eq((self.number >= 0) & (self.number < self.i_chunks))
        if not self.loads:  # own values are loaded for round 0 alone
            m.d.comb += self.joint.eq(
                (self.i_woven & self.i_halves & merged & ~self.ahead & self.exists)
                & (~last_chunk & (self.head + 1 < self.i_chunks))
            )
        if 32 * self.config.alus > PHIT_BITS:  # a beat has several phits
            m.d.comb += self.shares.eq(
                self.i_exact & self.i_halves & (self.round + 1 < self.i_members)
            )

    def _advance_woven(self, m: Module, merged: Signal) -> None:
        """Advance to the next step of a woven job."""
        pair = self.i_members == 2
        ends = merged & (self.ahead | self.joint)
        begins = merged & ~ends  # round 0, which is not joint
        number = Mux(merged, self.head, self.number)
        at = Mux(merged, self.head_at, self.chunk_at)
        back = Mux(pair, 2, 1)
        m.next = "STEP"
        m.d.sync += [
            self.ahead.eq(begins),
            self.round.eq(Mux(ends, 1, self.round + ~merged)),
            self.number.eq(number - Mux(begins, 0, back)),
            self.chunk_at.eq(at - Mux(begins, 0, self.i_chunk_beats << pair)),
        ]
        with m.If(~begins):
            source = Mux(merged, self.i_position, self.part)
            m.d.sync += self.part.eq(Mux(source == 0, self.i_members - 1, source - 1))
        with m.If(ends):
            m.d.sync += [
                self.head.eq(self.head + 1),
                self.head_at.eq(self.head_at + self.i_chunk_beats),
            ]
        with m.If(begins & (self.number + 1 == self.i_chunks)):
            m.next = "IDLE"
