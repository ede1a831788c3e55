"""Arrays of the runs of a kernel, for movers, checks, golden model and host."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from nearstep_spec.blockwise import SIGNED
from nearstep_spec.csr.model import NamedValue
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import (
    CODE_BYTES,
    COPY_OUT,
    ELEMENT_BYTES,
    HALF_BYTES,
    INDEX,
    UpdateKernelConfig,
)
from nearstep_spec.updater.registers import Stream, streams

FP32 = "fp32"


@dataclass(frozen=True)
class Operand:
    """An array of a run.

    Parameters
    ----------
    name : the register of its address is `<name>_address`.
    formats : formats of the elements in memory; a register selects among several.
    read, write : streams of the kernel that read and write the array, or NONE.
    paired : whether the array has an element for each pair, if gradients are pairs.
    """

    name: str
    formats: tuple[str, ...]
    read: NamedValue
    write: NamedValue
    paired: bool = False

    @property
    def format(self) -> str:
        """The default format."""
        return FP32 if FP32 in self.formats else self.formats[0]

    @property
    def has_16_bits(self) -> bool:
        """Whether elements can have 16 bits."""
        return any(form != FP32 and form not in SIGNED for form in self.formats)

    @property
    def has_8_bits(self) -> bool:
        """Whether elements have 8 bits, with scales of groups."""
        return self.format in SIGNED

    @property
    def stream(self) -> NamedValue:
        """Stream in an error of the array's address."""
        return self.read or self.write


def element_bytes(form: str) -> int:
    """Return the bytes of an element of a format; in 8 bits, of its code."""
    if form in SIGNED:
        return CODE_BYTES
    return ELEMENT_BYTES if form == FP32 else HALF_BYTES


def array_bytes(config: UpdateKernelConfig, form: str, count: int) -> int:
    """Compute the bytes of an array of `count` elements of a format, scales included."""
    if form in SIGNED:
        return config.block_layout.nbytes(count)
    return count * element_bytes(form)


@cache
def operands(config: UpdateKernelConfig) -> Mapping[str, Operand]:
    """Return the arrays of a kernel's runs, by name, in the order of their checks: the rules', then
    indices of pairs and the copy of the parameters, if the kernel has them.
    """
    formats, named = config.rule_set.whole.formats, streams(config)
    found = [
        Operand(
            name,
            config.gradient_formats if name == GRADIENT else (formats.get(name, FP32),),
            named[f"{name.upper()}_READ"],
            named[f"{name.upper()}_WRITE"] if name in config.states else named(Stream.NONE),
            name == GRADIENT,
        )
        for name in config.arrays
    ]
    if config.compression:
        found.append(Operand(INDEX, (FP32,), Stream.INDEX_READ, Stream.NONE, True))
    if config.copy_out_formats:
        found.append(Operand(COPY_OUT, config.copy_out_formats, Stream.NONE, Stream.COPY_OUT))
    return MappingProxyType({each.name: each for each in found})
