"""The accumulator of an exact sum: fixed point as wide as a format, rounded once."""

from itertools import zip_longest

from amaranth import Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, exact_log2

from nearstep_spec.coarse.config import MAX_ADDENDS
from nearstep_spec.fp import FpFormat

WORD_BITS = 64
"""Default of the bits of a word: the adder of a word is one carry chain."""


class AddendLayout(data.StructLayout):
    """An addend, and whether it is the last one of its sum."""

    def __init__(self, fmt: FpFormat) -> None:
        super().__init__({"value": fmt.width, "last": 1})


class FlagLayout(data.StructLayout):
    """What the addends of a sum were, beside finite numbers other than zero."""

    def __init__(self) -> None:
        super().__init__({"nan": 1, "plus": 1, "minus": 1, "other": 1})


class ExactAccumulator(wiring.Component):
    """Adds numbers of a format exactly, and rounds the sum, or its quotient, to the format.

    A finite number is a whole number of the least one. The sum is kept in words of `word_bits`,
    each with its own carries: an addend changes two words at most, and no carry moves on before the
    last addend. Then carries are added word by word, from the lowest one on, `pace` words a cycle,
    to the sum, and to the sum less one, whose complement is the magnitude of a negative sum. Of
    both, the leading word, the one below it, and whether there is anything below those are kept.

    *Timing*: an addend a cycle. A sum of fewer addends than `turns` + 1 waits for the one before. A
    result follows `turns` + 4 cycles after the last addend. A division, unless it is that of a
    normal number by a power of two, takes a cycle more for each `digits` of the `precision` + 1 to
    `precision` + 11 bits from the first one of the sum to the last one of the quotient, and delays
    the sums behind it.

    *Numerics*: rounded once, to nearest even. The default NaN for a NaN, or infinities of both
    signs; -0 if all addends are -0, +0 for another sum of zero.

    Parameters
    ----------
    fmt : of addends and results.
    addends : most addends of a sum; a power of two.
    word_bits : a power of two, more than the significand and its carry, and with a division than
        the bits of `addends` beside them.
    pace : words that get their carries in a cycle, in `turns` cycles.
    digits : bits of a quotient in a cycle; 0: no division.

    Members
    -------
    i : addends; at most `addends` from one `last` to the next.
    o : sums.
    i_divisor : with `digits` alone: from 1 to `addends`; held.
    i_clear : clears all state.

    Ref: Kulisch, Computer Arithmetic and Validity (2013), chapter 8.
    """

    def __init__(
        self,
        fmt: FpFormat,
        *,
        addends: int = MAX_ADDENDS,
        word_bits: int = WORD_BITS,
        pace: int = 1,
        digits: int = 0,
    ) -> None:
        self.fmt = fmt
        self.addends = addends
        self.word_bits = word_bits
        self.digits = digits
        self.carry_bits = exact_log2(addends)
        exact_log2(word_bits)
        # Finite numbers are below 2 ** (precision + exponents of normal numbers - 1).
        self.number_bits = fmt.precision + fmt.exponent_ones - 2
        self.words = -(-(self.number_bits + self.carry_bits) // word_bits)
        self.pace = min(pace, self.words)
        self.turns = -(-self.words // self.pace)
        # A quotient may begin as many bits below the sum as the greatest divisor has zeros.
        self.needed_bits = fmt.precision + 1 + (self.carry_bits if digits else 0)
        if word_bits <= self.needed_bits:
            raise ValueError(f"word_bits must be above {self.needed_bits}, not {word_bits}")
        super().__init__(
            {
                "i": In(stream.Signature(AddendLayout(fmt))),
                "o": Out(stream.Signature(fmt.width)),
                "i_clear": In(1),
                **({"i_divisor": In(bits_for(addends))} if digits else {}),
            }
        )

    @property
    def latency(self) -> int:
        """Cycles from the last addend to the result."""
        return self.turns + 4

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        ends = Signal()  # the words have a whole sum, and the resolution takes it
        free = Signal()  # the resolution can take a sum
        last = Signal()
        words, flags = self._accumulate(m, last, ends, free)
        self._resolve(m, words, flags, ends, free)
        return ResetInserter(self.i_clear)(m)

    def _accumulate(
        self, m: Module, last: Signal, ends: Signal, free: Signal
    ) -> tuple[list[Signal], data.View]:
        """Shift each addend to its place, and add it to two words; two cycles."""
        fmt, width = self.fmt, self.word_bits
        place_bits = exact_log2(width)
        mantissa = self.i.payload.value[: fmt.mantissa]
        exponent = self.i.payload.value[fmt.mantissa : -1]
        negative = self.i.payload.value[-1]
        normal, special = exponent != 0, exponent == fmt.exponent_ones
        shift = Signal(fmt.exponent)
        wide = Signal(width + fmt.precision)
        placed = Signal(2 * width)
        index = Signal(max(1, fmt.exponent - place_bits))
        valid = Signal()
        minus = Signal()
        flag = Signal(FlagLayout())
        takes = Signal()
        m.d.comb += [
            shift.eq(Mux(normal, exponent - 1, 0)),
            wide.eq(Cat(mantissa, normal & ~special) << shift[:place_bits]),
            takes.eq(~valid | ~last | free),
            ends.eq(valid & last & free),
            self.i.ready.eq(takes),
        ]
        with m.If(takes):
            m.d.sync += [
                valid.eq(self.i.valid),
                last.eq(self.i.payload.last),
                placed.eq(Mux(special, 0, wide)),
                index.eq(shift >> place_bits),
                minus.eq(negative),
                flag.nan.eq(special & (mantissa != 0)),
                flag.plus.eq(special & (mantissa == 0) & ~negative),
                flag.minus.eq(special & (mantissa == 0) & negative),
                flag.other.eq(~negative | normal | (mantissa != 0)),
            ]
        flags = Signal(FlagLayout())
        all_flags = Signal(FlagLayout())
        m.d.comb += all_flags.as_value().eq(flags.as_value() | flag.as_value())
        words = []
        for number in range(self.words):
            word = Signal(signed(width + self.carry_bits + 1), name=f"word{number}")
            total = Signal.like(word, name=f"total{number}")
            part = Signal(width, name=f"part{number}")
            low = placed[:width] if number << place_bits < 1 << fmt.exponent else Const(0)
            high = placed[width:] if number else Const(0)
            m.d.comb += [
                part.eq(Mux(index == number, low, 0) | Mux(index + 1 == number, high, 0)),
                total.eq(Mux(minus, word - part, word + part)),
            ]
            with m.If(ends):
                m.d.sync += word.eq(0)
            with m.Elif(valid & takes):
                m.d.sync += word.eq(total)
            words.append(total)
        with m.If(ends):
            m.d.sync += flags.eq(0)
        with m.Elif(valid & takes):
            m.d.sync += flags.eq(all_flags)
        return words, all_flags

    def _resolve(
        self, m: Module, totals: list[Signal], flags: data.View, ends: Signal, free: Signal
    ) -> None:
        """Add carries word by word; find the leading words of the sum, and round them."""
        width, pace, turns = self.word_bits, self.pace, self.turns
        state = [Signal(signed(len(total)), name=f"left{n}") for n, total in enumerate(totals)]
        at = Signal(range(turns + 1), init=turns)  # the words that are added next; turns: none
        known = Signal(FlagLayout())
        done = Signal()  # all words were added, and the result waits for its rounding
        goes = Signal()
        m.d.comb += free.eq((at == turns) & (~done | goes))
        carries, leaders = [], []
        for name, first in (("sum", 0), ("less", -1)):
            carry = Signal(signed(self.carry_bits + 2), name=f"carry_{name}")
            before, low, high = (
                Signal(width, name=f"{each}_{name}") for each in ("before", "low", "high")
            )
            below, more = Signal(name=f"below_{name}"), Signal(name=f"more_{name}")
            lead = Signal(range(turns * pace + 1), name=f"lead_{name}")
            over, word, under = carry, before, below
            for number in range(pace):
                added = Signal(signed(width + self.carry_bits + 2), name=f"added{number}_{name}")
                now = Signal(width, name=f"now{number}_{name}")
                m.d.comb += [
                    added.eq((state[number] if number < len(state) else 0) + over),
                    now.eq(~added[:width] if first else added[:width]),
                ]
                with m.If((at != turns) & (now != 0)):
                    m.d.sync += [high.eq(now), low.eq(word), more.eq(under)]
                    m.d.sync += lead.eq(at * pace + number)
                over, word, under = added >> width, now, under | (word != 0)
            with m.If(ends):
                m.d.sync += [carry.eq(first), high.eq(0), low.eq(0), more.eq(0), lead.eq(0)]
                m.d.sync += [before.eq(0), below.eq(0)]
            with m.Elif(at != turns):
                m.d.sync += [carry.eq(over), before.eq(word), below.eq(under)]
            carries.append(carry)
            leaders.append((high, low, more, lead))
        with m.If(ends):
            m.d.sync += [at.eq(0), known.eq(flags)]
            m.d.sync += [left.eq(total) for left, total in zip(state, totals, strict=True)]
        with m.Elif(at != turns):
            m.d.sync += at.eq(at + 1)
            following = zip_longest(state, state[pace:], fillvalue=Const(0))
            m.d.sync += [left.eq(after) for left, after in following]
        with m.If(at == turns - 1):
            m.d.sync += done.eq(1)
        with m.Elif(goes):
            m.d.sync += done.eq(0)

        negative = carries[0][-1]
        chosen = []
        for name, total, less in zip(("high", "low", "more", "lead"), *leaders, strict=True):
            chosen.append(Signal.like(total, name=name))
            m.d.comb += chosen[-1].eq(Mux(negative, less, total))
        self._round(m, chosen, negative, known, done, goes)

    def _round(
        self,
        m: Module,
        chosen: list[Signal],
        negative: Value,
        known: data.View,
        done: Signal,
        goes: Signal,
    ) -> None:
        """Shift the leading bit to the top, in one cycle, and round in the next one."""
        fmt, width = self.fmt, self.word_bits
        kept_bits = width + self.needed_bits  # of the two words
        high, low, more, lead = chosen
        window = Signal(kept_bits)
        sticky = Signal()
        zeros = Signal(range(width))
        shift = Signal(range(width))  # a number with fewer bits than a significand is no further
        m.d.comb += [
            shift.eq(
                Mux((lead == 0) & (zeros > width - fmt.precision), width - fmt.precision, zeros)
            ),
            window.eq(Cat(low[width - (kept_bits - width) :], high)),
            sticky.eq(more | (low[: width - (kept_bits - width)] != 0)),
        ]
        for bit in range(width):  # the last assignment, of the leading bit, holds
            with m.If(high[bit]):
                m.d.comb += zeros.eq(width - 1 - bit)
        stages = []
        for name, shape in (
            ("top", kept_bits),
            ("rest", 1),
            ("dropped", fmt.exponent + 1),
            ("sign", 1),
            ("zero", 1),
        ):
            stages.append(Signal(shape, name=f"norm_{name}"))
        top, rest, dropped, sign, zero = stages
        flags = Signal(FlagLayout(), name="norm_flags")
        shifted = Signal()
        position = Signal(range((self.turns * self.pace + 1) * width))
        advance, rounds = Signal(), Signal()
        m.d.comb += [
            position.eq((lead << exact_log2(width)) + (width - 1) - shift),
            advance.eq(~self.o.valid | self.o.ready),
            goes.eq(done & (~shifted | rounds)),
        ]
        with m.If(goes):
            m.d.sync += [
                shifted.eq(1),
                top.eq(window << shift),
                rest.eq(sticky),
                dropped.eq(position - (fmt.precision - 1)),
                sign.eq(negative),
                zero.eq(high == 0),
                flags.eq(known),
            ]
        with m.Elif(rounds):
            m.d.sync += shifted.eq(0)

        kept = top[-fmt.precision :]
        guard, tail = top[-fmt.precision - 1], (top[: -fmt.precision - 1] != 0) | rest
        ended: Value | int = 1
        if self.digits:
            divides, ended, unit, quotient, left = self._divide(
                m, top, zero, dropped, position, goes
            )
            kept = Mux(divides, quotient[1:], kept)
            guard = Mux(divides, quotient[0], guard)
            tail = Mux(divides, (top != 0) | rest | left, tail)
            dropped = unit
        m.d.comb += rounds.eq(advance & ended)
        encoded = Signal(fmt.exponent + 1 + fmt.mantissa + 1)
        magnitude = Signal(fmt.width - 1)
        infinite = flags.plus | flags.minus
        m.d.comb += [
            encoded.eq((dropped << fmt.mantissa) + kept + (guard & (tail | kept[0]))),
            magnitude.eq(Mux(encoded >= fmt.infinity, fmt.infinity, encoded)),
        ]
        with m.If(advance):
            m.d.sync += self.o.valid.eq(shifted & ended)
            with m.If(flags.nan | (flags.plus & flags.minus)):
                m.d.sync += self.o.payload.eq(fmt.quiet_nan)
            with m.Elif(infinite):
                m.d.sync += self.o.payload.eq(Cat(Const(fmt.infinity, fmt.width - 1), flags.minus))
            with m.Elif(zero):
                m.d.sync += self.o.payload.eq(Mux(flags.other, 0, fmt.sign_bit))
            with m.Else():
                m.d.sync += self.o.payload.eq(Cat(magnitude, sign))

    def _divide(
        self,
        m: Module,
        top: Signal,
        zero: Signal,
        dropped: Signal,
        position: Signal,
        goes: Signal,
    ) -> tuple[Value, Value, Value, Value, Value]:
        """Divide `top`, which shifts out.

        It ends when the quotient has a bit more than a significand, or less than the least number.
        A power of two lowers the exponent of a normal number instead. The results: whether it is
        divided, has ended, the place of the last bit kept, the quotient with the bit below, and
        whether there is a remainder.
        """
        quotient = Signal(self.fmt.precision + 1)
        rest = Signal.like(self.i_divisor, name="remainder")  # less than the divisor
        unit = Signal.like(position)  # of the last bit but one
        divides, ended, binary = Signal(), Signal(), Signal()
        log = Signal(range(self.carry_bits + 1))  # of a power of two
        for bit in range(self.carry_bits + 1):
            with m.If(self.i_divisor[bit]):
                m.d.comb += log.eq(bit)
        m.d.comb += [
            binary.eq((self.i_divisor & (self.i_divisor - 1)) == 0),
            divides.eq(~binary | (dropped < log)),
            ended.eq(~divides | zero | quotient[-1] | (unit == 0)),
        ]
        now = top, quotient, rest, unit
        for _ in range(self.digits):
            dividend, found, over, place = now
            grown = Cat(dividend[-1], over)
            fits = grown >= self.i_divisor
            after = (
                dividend << 1,
                Cat(fits, found[:-1]),
                Mux(fits, grown - self.i_divisor, grown),
                place - 1,
            )
            stays = found[-1] | (place == 0)
            following = []
            for old, new in zip(now, after, strict=True):
                following.append(Signal.like(old))
                m.d.comb += following[-1].eq(Mux(stays, old, new))
            now = tuple(following)
        with m.If(goes):
            m.d.sync += [quotient.eq(0), rest.eq(0), unit.eq(position + 2)]
        with m.Elif(~ended):
            m.d.sync += [
                old.eq(new) for old, new in zip((top, quotient, rest, unit), now, strict=True)
            ]
        return divides, ended, Mux(divides, unit, dropped - log), quotient, rest != 0
