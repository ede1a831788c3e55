"""The registers of a block, generated from its register map."""

from functools import reduce
from operator import or_
from typing import Any

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib.wiring import Component, In, Member, Out

from nearstep_hw.csr.line import LINE_BITS, CsrLineSignature
from nearstep_hw.csr.signature import CsrSignature
from nearstep_spec.csr.model import (
    LINE_BYTES,
    WORD_BITS,
    WORD_BYTES,
    Access,
    Field,
    Register,
    RegisterMap,
    lone_field,
    nested,
    port_name,
)

NEIGHBOURS = 8
"""Consecutive words of the map that share a register in the read path."""


def _any(hits: Signal, kinds: list[bool]) -> Value:
    """Return whether a word with a hit has its flag in `kinds` set."""
    return Cat(hit for hit, kind in zip(hits, kinds, strict=True) if kind).any()


class CsrBank(Component):
    """Registers of one block.

    Reads have no side effects. A `CONFIG` field holds the written value; a `PULSE` is high for
    one cycle, that of the `ack` or, if `cut`, the one before. While `register_map.busy` is high,
    or a locked register has a pulse, a write of a locked register changes nothing, is acknowledged
    with `error`, and sets the `REFUSED` fields, until `register_map.clear` clears them. `COUNTER`
    fields are captured together by `register_map.latch` and in the first cycle in which `busy` is
    low again; reads return the captured values.

    The ports of a field are called `<name>`: `<register>` for the field `value`, and
    `<register>_<field>` otherwise.

    *Timing*: latency one cycle, three if `cut`; the next request may follow in the cycle after
    `ack`. See `CsrSignature`.

    Parameters
    ----------
    register_map : the registers.
    cut : requests are decoded into registers, and read data passes registers of `NEIGHBOURS` words
        each: one multiplexer of all words needs more wires in one place than small FPGAs have.
    line : adds a second port, for whole lines. If both ports write in one cycle, the line's write
        counts.

    Members
    -------
    bus : the register port, to be connected to a bus adapter.
    line : the line port, if there is one.
    i_<name> : value of a `STATUS` or `COUNTER` field, from the hardware.
    o_<name> : value of a `CONFIG` or `PULSE` field, to the hardware. Registers.

    Attributes
    ----------
    i, o : the ports by the path of their register and the name of the field:
        `o["window"][0]["base"]`.
    """

    def __init__(self, register_map: RegisterMap, *, line: bool = False, cut: bool = False) -> None:
        self.register_map = register_map
        self.cut = cut
        self.has_line = line
        members: dict[str, Member] = {"bus": In(CsrSignature())}
        if line:
            members["line"] = In(CsrLineSignature())
        for register, field in register_map.fields():
            name = port_name(register, field)
            if name is not None:
                direction = Out if field.access.writable else In
                members[name] = direction(field.width, init=field.reset)
        super().__init__(members)
        self.i = self._nested("i_")
        self.o = self._nested("o_")

    def _nested(self, direction: str) -> dict[str | int, Any]:
        """Return the ports of a direction by path."""
        ports: list[tuple[tuple[str | int, ...], Signal]] = []
        for register, field in self.register_map.fields():
            name = port_name(register, field)
            if name is not None and name.startswith(direction):
                last = () if lone_field(register) else (field.name,)
                ports.append(((*register.path, *last), getattr(self, name)))
        return nested(ports)

    def elaborate(self, platform: object) -> Module:
        m = Module()

        words = [
            (register, index) for register in self.register_map for index in range(register.words)
        ]
        hits = Signal(len(words))
        read, write, write_data = Signal(), Signal(), Signal(WORD_BITS)
        # The decoded request, registered with `cut`.
        to = m.d.sync if self.cut else m.d.comb
        to += [
            read.eq(self.bus.read),
            write.eq(self.bus.write),
            write_data.eq(self.bus.write_data),
        ]
        whole = Signal()
        to += whole.eq(self.bus.write & self.bus.write_mask.all())
        for hit, (register, index) in zip(hits, words, strict=True):
            to += hit.eq(self.bus.address[2:] == register.offset // WORD_BYTES + index)

        attempt = Signal()
        locked = Signal()
        held = Signal()
        m.d.comb += [
            held.eq(Cat(self._locks()).any()),
            attempt.eq(whole & _any(hits, [register.writable for register, _ in words])),
            locked.eq(held & _any(hits, [register.locked for register, _ in words])),
        ]

        line_refused = Signal()
        refuse = (attempt & locked) | line_refused
        values = {**self._constants(), **self._captured(m), **self._refused(m, refuse)}
        for register, field in self._fields(Access.PULSE):
            m.d.sync += self._port(register, field).eq(0)
        for hit, (register, index) in zip(hits, words, strict=True):
            if register.writable:
                # Equals `attempt & ~locked`, without logic of other registers.
                with m.If(hit & (whole & ~held if register.locked else whole)):
                    self._write(m, register, index, write_data)
        if self.has_line:
            self._read_lines(m, values)
            self._write_lines(m, line_refused)

        images = {register.name: self._image(register, values) for register in self.register_map}
        contents = [images[r.name].word_select(index, WORD_BITS) for r, index in words]
        answer = Cat(read | write, (read & ~hits.any()) | (write & ~(attempt & ~locked)))
        if self.cut:
            late = Signal.like(answer)
            m.d.sync += late.eq(answer)
            answer = late
            word = self._word_in_steps(m, read, hits, contents)
        else:
            word = Signal(WORD_BITS)
            with m.If(read), m.Switch(self.bus.address[2:]):
                for (register, index), content in zip(words, contents, strict=True):
                    with m.Case(register.offset // WORD_BYTES + index):
                        m.d.comb += word.eq(content)
        m.d.sync += [Cat(self.bus.ack, self.bus.error).eq(answer), self.bus.read_data.eq(word)]
        return m

    def _word_in_steps(self, m: Module, read: Signal, hits: Signal, contents: list[Value]) -> Value:
        """Return the word read, or 0, a cycle later: selected among neighbours, then among all."""
        chosen = [Mux(hit, content, 0) for hit, content in zip(hits, contents, strict=True)]
        parts = []
        for first in range(0, len(chosen), NEIGHBOURS):
            part = Signal(WORD_BITS, name=f"part{first}")
            some = reduce(or_, chosen[first : first + NEIGHBOURS])
            m.d.sync += part.eq(Mux(read, some, 0))
            parts.append(part)
        return reduce(or_, parts)

    def _fields(self, access: Access) -> list[tuple[Register, Field]]:
        return [each for each in self.register_map.fields() if each[1].access is access]

    def _port(self, register: Register, field: Field) -> Signal:
        name = port_name(register, field)
        assert name is not None, f"{register.name}.{field.name} has no port"
        return getattr(self, name)

    def _role(self, path: str | None) -> Value:
        return Const(0) if path is None else self._port(*self.register_map.lookup(path))

    def _locks(self) -> list[Value]:
        starts = [self._port(r, f) for r, f in self._fields(Access.PULSE) if r.locked]
        return [self._role(self.register_map.busy), *starts]

    def _constants(self) -> dict[tuple[str, str], Value]:
        return {
            (register.name, field.name): Const(self.register_map.reset_value(field), field.width)
            for access in (Access.CONSTANT, Access.MAP_HASH)
            for register, field in self._fields(access)
        }

    def _captured(self, m: Module) -> dict[tuple[str, str], Value]:
        """Return the captured values of counters."""
        busy = self._role(self.register_map.busy)
        was_busy = Signal()
        capture = Signal()
        m.d.sync += was_busy.eq(busy)
        m.d.comb += capture.eq(self._role(self.register_map.latch) | (was_busy & ~busy))
        values: dict[tuple[str, str], Value] = {}
        for register, field in self._fields(Access.COUNTER):
            port = self._port(register, field)
            value = Signal(field.width, name=f"captured_{port.name}")
            with m.If(capture):
                m.d.sync += value.eq(port)
            values[register.name, field.name] = value
        return values

    def _refused(self, m: Module, refuse: Value) -> dict[tuple[str, str], Value]:
        values: dict[tuple[str, str], Value] = {}
        for register, field in self._fields(Access.REFUSED):
            value = Signal(field.width, name=f"{register.name}_{field.name}")
            with m.If(refuse):
                m.d.sync += value.eq(~0)
            with m.Elif(self._role(self.register_map.clear)):
                m.d.sync += value.eq(0)
            values[register.name, field.name] = value
        return values

    def _image(self, register: Register, values: dict[tuple[str, str], Value]) -> Value:
        """Return all words of a register as read data."""
        parts: list[Value] = []
        end = 0
        for field in register.fields:
            parts.append(Const(0, field.lsb - end))
            if field.access is Access.PULSE:
                parts.append(Const(0, field.width))
            elif (register.name, field.name) in values:
                parts.append(values[register.name, field.name])
            else:
                parts.append(self._port(register, field))
            end = field.msb + 1
        return Cat(*parts, Const(0, register.width - end))

    def _read_lines(self, m: Module, values: dict[tuple[str, str], Value]) -> None:
        lines: dict[int, Value] = {}
        for register in self.register_map:
            number, offset = divmod(register.offset, LINE_BYTES)
            line = lines.get(number, Const(0, 0))
            gap = Const(0, 8 * offset - len(line))
            lines[number] = Cat(line, gap, self._image(register, values))
        content = Signal(LINE_BITS)
        with m.Switch(self.line.read_address):
            for number, line in lines.items():
                with m.Case(number):
                    m.d.comb += content.eq(line)
        m.d.sync += self.line.read_data.eq(content)

    def _write_lines(self, m: Module, refused: Signal) -> None:
        locked = Cat(self._locks()).any()
        for register in self.register_map:
            if not register.writable:
                continue
            number, offset = divmod(register.offset, LINE_BYTES)
            for index in range(register.words):
                place = offset // WORD_BYTES + index
                whole = self.line.write_mask.word_select(place, WORD_BYTES).all()
                with m.If(self.line.write & (self.line.write_address == number) & whole):
                    data = self.line.write_data.word_select(place, WORD_BITS)
                    if not register.locked:
                        self._write(m, register, index, data)
                        continue
                    with m.If(locked):
                        m.d.comb += refused.eq(1)
                    with m.Else():
                        self._write(m, register, index, data)

    def _write(self, m: Module, register: Register, index: int, data: Value) -> None:
        """Write one word of a register."""
        first, last = index * WORD_BITS, (index + 1) * WORD_BITS - 1
        for field in register.fields:
            low, high = max(first, field.lsb), min(last, field.msb)
            if field.access.writable and low <= high:
                port = self._port(register, field)[low - field.lsb : high - field.lsb + 1]
                m.d.sync += port.eq(data[low - first : high - first + 1])
