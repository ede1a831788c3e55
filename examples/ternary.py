"""A decompressor of one's own: sparse ternary gradients, `compression=examples/ternary.py:TERNARY`
in a device's name, and `compression_form="examples/ternary.py:TERNARY"` of an optimizer.

Of every 16 elements the largest are sent, all with one magnitude, their mean: a record is a word
with two bits for each element (1 it is sent, 2 it is negative) and the magnitude. That is 64 bits
for 16 elements, or 48 with values of 16 bits, whatever the share is.

`nearstep decompressor check` compares the unit with the numpy functions, and tells how fast it is.

Ref: Sattler et al., Robust and Communication-Efficient Federated Learning From Non-i.i.d. Data,
Algorithm 1, here for groups of 16 instead of tensors.
"""

import numpy as np
from amaranth import Array, Module, Mux, Signal
from amaranth.lib import wiring

from nearstep_hw.updater.pairs.user import UnitSignature
from nearstep_spec.updater.decompressor import Decompressor

GROUP = 16  # elements of a record
SENT, NEGATIVE = 0x5555_5555, 0xAAAA_AAAA
SIGN, NAN = 0x8000_0000, 0x7FC0_0000


def compress(gradient, share):
    """Keep ceil(16 share) of each group: of equal magnitudes the first; zeros never."""
    groups = -(-gradient.size // GROUP)
    bits = np.zeros((groups, GROUP), np.uint32)
    bits.reshape(-1)[: gradient.size] = gradient.view(np.uint32)
    size = bits & np.uint32(SIGN - 1)  # patterns of magnitudes are in the order of these
    kept = max(1, int(np.ceil(GROUP * share)))
    order = np.argsort(~size, axis=1, kind="stable")
    sent = np.zeros((groups, GROUP), np.bool_)
    np.put_along_axis(sent, order[:, :kept], True, axis=1)
    sent &= size != 0
    total = np.zeros(groups)
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(GROUP):  # in this order, on any machine
            total += np.where(sent[:, k], size[:, k].view(np.float32), 0).astype(np.float64)
        mean = (total / np.maximum(sent.sum(axis=1), 1)).astype(np.float32)
    value = np.where(np.isnan(mean), np.uint32(NAN), mean.view(np.uint32))
    word = np.zeros(groups, np.uint32)
    for k in range(GROUP):
        code = sent[:, k] * np.where(bits[:, k] & np.uint32(SIGN), 3, 1)
        word |= (code << 2 * k).astype(np.uint32)
    return word, value.astype(np.uint32).view(np.float32)


def decompress(word, value, count):
    """Patterns of the elements; +0 where nothing was sent."""
    groups = min(word.size, -(-count // GROUP))
    dense = np.zeros((-(-count // GROUP), GROUP), np.uint32)
    for k in range(GROUP):
        code = (word[:groups] >> np.uint32(2 * k)) & np.uint32(3)
        flipped = value[:groups] ^ ((code >> np.uint32(1)) << np.uint32(31))
        dense[:groups, k] = np.where(code & np.uint32(1), flipped, np.uint32(0))
    return dense.reshape(-1)[:count]


def wrong(word, number, count):
    """A negative element that is not sent, or a record behind the last element."""
    return ((word & NEGATIVE & ((SENT & ~word) << 1)) != 0) | (number * GROUP >= count)


class TernaryUnit(wiring.Component):
    """A dense beat of `lanes` elements a cycle, from one record after the other."""

    def __init__(self, *, lanes, records):
        self.lanes, self.records = lanes, records
        super().__init__(UnitSignature(lanes=lanes, records=records))

    def elaborate(self, platform):
        m = Module()
        beat = self.i.payload
        turn = Signal(range(self.records))  # record of the beat
        part = Signal(range(max(2, GROUP // self.lanes)))  # beat of the record
        ended, there, more, last = Signal(), Signal(), Signal(), Signal()
        word, value = Signal(32), Signal(32)
        following = [*(beat.keep[k] for k in range(1, self.records)), 0]
        m.d.comb += [
            there.eq(Array(beat.keep)[turn] & ~ended),
            more.eq(Array(following)[turn]),
            last.eq(part == GROUP // self.lanes - 1),
            word.eq(Array(beat.index[k] for k in range(self.records))[turn]),
            value.eq(Array(beat.value[k] for k in range(self.records))[turn]),
            self.o.valid.eq(self.i.valid | ended),
            self.i.ready.eq(self.o.ready & last & ~more & ~ended),
        ]
        for lane in range(self.lanes):
            code = word.word_select(part * self.lanes + lane, 2)
            signed = value ^ (code[1] << 31)
            m.d.comb += self.o.payload[lane].eq(Mux(there & code[0], signed, 0))
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += part.eq(Mux(last, 0, part + 1))
            with m.If(last & ~ended):
                m.d.sync += [turn.eq(Mux(more, turn + 1, 0)), ended.eq(beat.end & ~more)]
        return m


TERNARY = Decompressor(
    compress=compress,
    decompress=decompress,
    unit=TernaryUnit,
    elements_per_record=GROUP,
    wrong=wrong,
)
