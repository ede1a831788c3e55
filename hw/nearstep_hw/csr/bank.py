"""The registers of a block, in hardware, made from its register map."""

from amaranth.hdl import Cat, Const, Module, Signal, Value
from amaranth.lib.wiring import Component, In, Member, Out

from nearstep_hw.csr.model import (
    WORD_BITS,
    WORD_BYTES,
    Access,
    Field,
    Register,
    RegisterMap,
    port_name,
)
from nearstep_hw.csr.signature import CsrSignature


class CsrBank(Component):
    """Registers of one block.

    Reads have no side effects. A `CONFIG` field keeps what was written; a `PULSE` is high for one
    cycle, that of the `ack`. While `register_map.busy` is high, or a locked register gives a pulse,
    a write of a locked register changes nothing, is answered with `error`, and sets the `REFUSED`
    fields, until `register_map.clear` clears them. `COUNTER` fields are captured together by
    `register_map.latch` and in the first cycle in which `busy` is low again; reads give what was
    captured.

    *Timing*: latency one cycle, a request every two cycles; see `CsrSignature`.

    Parameters
    ----------
    register_map : the registers.

    Members
    -------
    bus : the register port, to be connected to a bus adapter.
    i_<name> : value of a `STATUS` or `COUNTER` field, from the hardware.
    o_<name> : value of a `CONFIG` or `PULSE` field, to the hardware. Registers.

    <name> is `<register>` for the field `value`, and `<register>_<field>` otherwise.
    """

    def __init__(self, register_map: RegisterMap) -> None:
        self.register_map = register_map
        members: dict[str, Member] = {"bus": In(CsrSignature())}
        for register, field in register_map.fields():
            name = port_name(register, field)
            if name is not None:
                direction = Out if field.access.writable else In
                members[name] = direction(field.width, init=field.reset)
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        m = Module()

        known = Signal()
        writable = Signal()
        lockable = Signal()
        word = Signal(WORD_BITS)
        attempt = Signal()
        locked = Signal()
        accept = Signal()
        m.d.comb += [
            attempt.eq(self.bus.write & self.bus.write_mask.all() & writable),
            locked.eq(lockable & Cat(self._locks()).any()),
            accept.eq(attempt & ~locked),
        ]

        values = {**self._constants(), **self._captured(m), **self._refused(m, attempt & locked)}
        for register, field in self._fields(Access.PULSE):
            m.d.sync += self._port(register, field).eq(0)
        with m.Switch(self.bus.address[2:]):
            for register in self.register_map:
                image = self._image(register, values)
                for index in range(register.words):
                    with m.Case(register.offset // WORD_BYTES + index):
                        m.d.comb += [
                            known.eq(1),
                            writable.eq(register.writable),
                            lockable.eq(register.locked),
                            word.eq(image.word_select(index, WORD_BITS)),
                        ]
                        with m.If(accept):
                            self._write(m, register, index)

        m.d.sync += [
            self.bus.ack.eq(self.bus.read | self.bus.write),
            self.bus.error.eq((self.bus.read & ~known) | (self.bus.write & ~accept)),
            self.bus.read_data.eq(word & self.bus.read.replicate(WORD_BITS)),
        ]
        return m

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
        """Counters as software sees them."""
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
        """What a read gives: all words of a register."""
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

    def _write(self, m: Module, register: Register, index: int) -> None:
        """Takes one word of a register from the bus."""
        first, last = index * WORD_BITS, (index + 1) * WORD_BITS - 1
        for field in register.fields:
            low, high = max(first, field.lsb), min(last, field.msb)
            if field.access.writable and low <= high:
                port = self._port(register, field)[low - field.lsb : high - field.lsb + 1]
                m.d.sync += port.eq(self.bus.write_data[low - first : high - first + 1])
