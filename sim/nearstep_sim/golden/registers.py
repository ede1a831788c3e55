"""Golden model of a register bank: `nearstep_hw.csr.bank.CsrBank` as visible to software."""

from typing import NamedTuple

from nearstep_spec.csr.model import WORD_BITS, WORD_BYTES, Access, Register, RegisterMap

WHOLE_WORD = (1 << WORD_BYTES) - 1
WORD_MASK = (1 << WORD_BITS) - 1


class Answer(NamedTuple):
    """Result of one access.

    Attributes
    ----------
    value : word read, 0 for a write or an error.
    error : the access was not carried out.
    pulses : `register.field` of every pulse caused by a write.
    """

    value: int = 0
    error: bool = False
    pulses: tuple[str, ...] = ()


WRITTEN = Answer()
"""Response to a write without a pulse."""


class _Part(NamedTuple):
    """Part of a field in one word.

    Attributes
    ----------
    path, access : of the field.
    mask : bits of the field in the register, within the word.
    lsb : of the field.
    """

    path: str
    access: Access
    mask: int
    lsb: int


class RegisterFile:
    """Values of all fields of a block, and the rules of software accesses.

    Fields are named `register.field`. `COUNTER` fields have a value set by the hardware and a
    captured one, which a read returns.
    """

    def __init__(self, register_map: RegisterMap) -> None:
        self.register_map = register_map
        self._values = {
            f"{register.name}.{field.name}": register_map.reset_value(field)
            for register, field in register_map.fields()
        }
        self._widths = {
            f"{register.name}.{field.name}": field.width
            for register, field in register_map.fields()
        }
        self._captured = dict.fromkeys(self._paths(Access.COUNTER), 0)
        self._words = {
            register.offset + index * WORD_BYTES: (register, index, _parts(register, index))
            for register in register_map
            for index in range(register.words)
        }

    def __getitem__(self, path: str) -> int:
        """Return the value of a field in the hardware."""
        return self._values[path]

    def __setitem__(self, path: str, value: int) -> None:
        """Set a field from the hardware's side. A falling busy captures the counters."""
        if value < 0 or value >> self._widths[path]:
            raise ValueError(f"{path} has {self._widths[path]} bits; {value:#x} does not fit")
        falls = path == self.register_map.busy and self._values[path] > value
        self._values[path] = value
        if falls:
            self.capture()

    def capture(self) -> None:
        """Capture all counters at once, for software to read."""
        for path in self._captured:
            self._captured[path] = self._values[path]

    def read(self, address: int) -> Answer:
        """Read one word; the two low bits of the address are ignored."""
        try:
            _, index, parts = self._words[address & -WORD_BYTES]
        except KeyError:
            return Answer(error=True)
        image = 0
        for path, access, _, lsb in parts:
            if access is not Access.PULSE:
                captured = self._captured.get(path)
                image |= (self._values[path] if captured is None else captured) << lsb
        return Answer(value=(image >> (index * WORD_BITS)) & WORD_MASK)

    def write(self, address: int, value: int, mask: int = WHOLE_WORD) -> Answer:
        """Write one word. Latch and clear have taken effect on return."""
        found = self._words.get(address & -WORD_BYTES)
        if found is None or not found[0].writable or mask != WHOLE_WORD:
            return Answer(error=True)
        register, index, parts = found
        if register.locked and (busy := self.register_map.busy) is not None and self._values[busy]:
            for path in self._paths(Access.REFUSED):
                self._values[path] = (1 << self._widths[path]) - 1
            return Answer(error=True)
        pulses = []
        shift = index * WORD_BITS
        for path, access, mine, lsb in parts:
            new = ((value << shift) & mine) >> lsb
            if access is Access.CONFIG:
                self._values[path] = (self._values[path] & ~(mine >> lsb)) | new
            elif new:
                pulses.append(path)
        if not pulses:
            return WRITTEN
        if self.register_map.latch in pulses:
            self.capture()
        if self.register_map.clear in pulses:
            for path in self._paths(Access.REFUSED):
                self._values[path] = 0
        return Answer(pulses=tuple(pulses))

    def _paths(self, access: Access) -> list[str]:
        return [
            f"{register.name}.{field.name}"
            for register, field in self.register_map.fields()
            if field.access is access
        ]


def _parts(register: Register, index: int) -> list[_Part]:
    """Return the parts of a register's fields in word `index`."""
    word = WORD_MASK << (index * WORD_BITS)
    return [
        _Part(f"{register.name}.{field.name}", field.access, field.mask & word, field.lsb)
        for field in register.fields
    ]
