"""Mode registers: settings that a controller with fixed latencies supports, as plain data.

Ref: JESD79-4, "Programming the Mode Registers".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from nearstep_spec.dram.timing import DramTiming

__all__ = ["MODE_REGISTERS", "Supported", "supported_modes"]

MODE_REGISTERS = 7
"""MR0 to MR6. MR7 addresses the registering clock driver of a module, not the DRAM."""

_CL_BITS = (2, 4, 5, 6, 12)  # of MR0, the lowest first
_CL_CODES = {
    latency: code
    for code, latency in enumerate(
        (*range(9, 17), 18, 20, 22, 24, 23, 17, 19, 21, 25, 26, 27, 28, 29, 30, 31, 32)
    )
}
_CWL_CODES = {latency: code for code, latency in enumerate((9, 10, 11, 12, 14, 16, 18, 20))}
_CWL_LSB = 3  # of MR2

_FIXED: Mapping[int, tuple[tuple[int, int], ...]] = MappingProxyType(
    {
        0: ((0x0003, 0), (0x0080, 0)),  # bursts of eight; no test mode
        # DLL on; no additive latency, no write levelling, DM and not TDQS, outputs on
        1: ((0x0001, 1), (0x0018, 0), (0x0080, 0), (0x0800, 0), (0x1000, 0)),
        2: ((0x1000, 0),),  # no write CRC
        3: ((0x0004, 0), (0x0008, 0), (0x0010, 0), (0x01C0, 0)),  # MPR, gear down, PDA, refresh 1x
        # no maximum power down, temperature-controlled refresh, Vref monitor, post-package repair,
        # command latency, preamble training; preambles of a clock
        4: (
            *((0x0002, 0), (0x000C, 0), (0x0010, 0), (0x2020, 0)),
            *((0x01C0, 0), (0x0400, 0), (0x1800, 0)),
        ),
        5: ((0x0007, 0), (0x0400, 0x0400), (0x1800, 0)),  # no parity; data mask; no DBI
        6: ((0x0080, 0),),  # no training of VrefDQ
    }
)


class Supported(NamedTuple):
    """A register is valid if its bits in `mask` equal those of `value`."""

    mask: int
    value: int


def supported_modes(timing: DramTiming) -> tuple[Supported, ...]:
    """Required values of MR0 to MR6: bursts of eight, the latencies of `timing`, data masks,
    refresh in the 1x mode, and no setting that shifts a command or data in time.

    Other bits, such as drive strength, termination and write recovery, are free.

    A latency without a code results in a value that no setting has.
    """
    registers = {number: dict(bits) for number, bits in _FIXED.items()}
    code = _CL_CODES.get(timing.cl)
    mask = sum(1 << bit for bit in _CL_BITS)
    registers[0][mask] = (
        _NEVER
        if code is None
        else sum((code >> index & 1) << bit for index, bit in enumerate(_CL_BITS))
    )
    code = _CWL_CODES.get(timing.cwl)
    registers[2][7 << _CWL_LSB] = _NEVER if code is None else code << _CWL_LSB
    return tuple(Supported(sum(bits), sum(bits.values())) for _, bits in sorted(registers.items()))


_NEVER = 1 << 14  # above the bits of a mode register
