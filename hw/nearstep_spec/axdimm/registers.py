"""Registers of a channel's arbiter, and their addresses, as plain data."""

from enum import IntEnum

from nearstep_spec.csr.block import Row, identity, register, value_register, value_registers
from nearstep_spec.csr.model import BLOCK_BYTES, Access, Register, RegisterMap, place
from nearstep_spec.dram.address import MAPPINGS, AddressMapping
from nearstep_spec.dram.command import ADDRESS_BITS
from nearstep_spec.dram.mode_registers import MODE_REGISTERS
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map

__all__ = [
    "IDENT",
    "VERSION",
    "WINDOW_BLOCKS",
    "WINDOW_BYTES",
    "Block",
    "arbiter_map",
    "channel_maps",
    "window_base",
]

IDENT = int.from_bytes(b"ARBI", "big")
VERSION = (1, 1)


class Block(IntEnum):
    """Register blocks of a channel, in order of address."""

    ARBITER = 0
    KERNEL = 1


WINDOW_BLOCKS = len(Block)
WINDOW_BYTES = WINDOW_BLOCKS * BLOCK_BYTES


def window_base(mapping: AddressMapping) -> int:
    """Byte address, within the channel, of the first register: the window is the channel's end."""
    return mapping.geometry.capacity_bytes - WINDOW_BYTES


def channel_maps(
    config: UpdateKernelConfig, mapping: AddressMapping, *, read_latency: int, write_latency: int
) -> dict[str, tuple[int, RegisterMap]]:
    """Blocks of one channel: name to byte address within the channel and register map."""
    base = window_base(mapping)
    arbiter = arbiter_map(mapping, read_latency=read_latency, write_latency=write_latency)
    return {
        "arbiter": (base + Block.ARBITER * BLOCK_BYTES, arbiter),
        "adam": (base + Block.KERNEL * BLOCK_BYTES, adam_kernel_map(config)),
    }


def arbiter_map(mapping: AddressMapping, *, read_latency: int, write_latency: int) -> RegisterMap:
    """The register map of one arbiter.

    Parameters
    ----------
    mapping : of the channel.
    read_latency, write_latency : of the host's bus, cycles of 200 MHz.
    """
    return RegisterMap(
        name="arbiter",
        doc="Mode of one DDR4 channel: the host's, or the kernel's (AXDIMM paper, section 3.2).",
        registers=place(
            [
                [
                    *identity(IDENT, VERSION, _capabilities(mapping)),
                    _configuration(mapping, read_latency, write_latency),
                ],
                [_MODE],
                [_CONTROL],
                [_STATUS, _refresh_debt(mapping.geometry.ranks), *_REFUSED, *_LOST],
                value_registers(Access.STATUS, _HAND_OVERS, width=32),
            ]
        ),
    )


_HAND_OVERS = {
    "to_acceleration_last": "Cycles from the last request of acceleration to that mode.",
    "to_acceleration_longest": "Longest such change since control.clear.",
    "to_normal_last": "Cycles from the last request of normal mode to that mode.",
    "to_normal_longest": "Longest such change since control.clear.",
}


def _capabilities(mapping: AddressMapping) -> Register:
    geometry = mapping.geometry
    order = MAPPINGS.index(mapping.order) if mapping.order in MAPPINGS else len(MAPPINGS)
    return register(
        "capabilities",
        Access.CONSTANT,
        "The memory behind the arbiter.",
        ("address_bits", 0, 8, "log2 of the channel's bytes.", geometry.address_bits),
        ("bank_group_bits", 8, 4, "log2 of bank groups.", geometry.bank_group_bits),
        ("bank_bits", 12, 4, "log2 of banks in a group.", geometry.bank_bits),
        ("row_bits", 16, 8, "log2 of rows of a bank.", geometry.row_bits),
        ("mapping", 24, 8, "Index of the address mapping.", order),
    )


def _configuration(mapping: AddressMapping, read_latency: int, write_latency: int) -> Register:
    rank = "Address bit that selects one of two ranks."
    ranks: list[Row] = [("rank_bit", 24, 8, rank, mapping.rank.shift)]
    return register(
        "configuration",
        Access.CONSTANT,
        "Shape of this instance.",
        ("read_latency", 0, 8, "Host clock pairs to read data.", read_latency),
        ("write_latency", 8, 8, "Host clock pairs to write data.", write_latency),
        ("blocks", 16, 8, "Register blocks in the window.", WINDOW_BLOCKS),
        *(ranks if mapping.geometry.ranks > 1 else []),
    )


_MODE = register(
    "mode",
    Access.CONFIG,
    "The mode that the host requests; status shows when it is reached.",
    ("acceleration", 0, 1, "1: the kernel owns the DRAM; 0: the host does."),
)
_CLEARS = "Clears refused_*, lost_*, longest changes of mode, and flags except unsupported_mode."
_RESETS = (
    "Resets the kernel at any time and takes the DRAM from it; the mode is then "
    "normal for a cycle or more, before the register mode takes effect again. "
    "A change to acceleration mode that is in progress is completed instead."
)
_CONTROL = register(
    "control",
    Access.PULSE,
    "Commands that are accepted at any time.",
    ("clear", 0, 1, _CLEARS),
    ("kernel_reset", 1, 1, _RESETS),
)
_LOSES = (
    "A command was lost: MRS of the host or the reserved code while not in normal"
    " mode, or MRS of a register that no DRAM has; or a burst of the window, "
    "which did not begin with its first byte, was reordered."
)
_UNSUPPORTED = (
    "A mode register has a value that the kernel does not support: the mode "
    "remains normal until the value is changed. See mode_registers."
)
_STATUS = register(
    "status",
    Access.STATUS,
    "State of the channel.",
    ("acceleration", 0, 1, "The kernel owns the DRAM and may be started."),
    ("normal", 1, 1, "The host owns the DRAM."),
    ("refused_access", 2, 1, "An access outside the window was received while not in normal mode."),
    ("refused_start", 3, 1, "START of the kernel was received while not in acceleration mode."),
    ("refresh_overdue", 4, 1, "More refreshes than may be postponed were due to the DRAM."),
    ("missing_data", 5, 1, "Data of a host write were missing when they were due."),
    ("lost_command", 6, 1, _LOSES),
    ("unsupported_mode", 7, 1, _UNSUPPORTED),
)


def _refresh_debt(ranks: int) -> Register:
    rows: list[Row] = [
        ("host", 0, 8, "Counted by the host's refreshes."),
        ("dram", 8, 8, "Counted by the DRAM's refreshes."),
        ("host1", 16, 8, "Of rank 1, counted by the host's refreshes."),
        ("dram1", 24, 8, "Of rank 1, counted by the DRAM's refreshes."),
    ]
    what = "Refreshes due, two's complement; negative when given in advance."
    return register("refresh_debt", Access.STATUS, what, *rows[: 2 * ranks])


_REFUSED = [
    value_register("refused_count", Access.STATUS, "Host accesses refused since control.clear."),
    register(
        "refused_access",
        Access.STATUS,
        "The first access refused since control.clear.",
        ("write", 0, 1, "The access was a write."),
    ),
    value_register(
        "refused_address",
        Access.STATUS,
        "Byte address, within the channel, of the first access refused.",
        width=64,
    ),
]
_MODES = "A bit for each of MR0 to MR6 whose value the kernel does not support."
_LOST = [
    value_register("lost_count", Access.STATUS, "Host commands lost since control.clear."),
    register(
        "lost_command",
        Access.STATUS,
        "The first lost command since control.clear.",
        ("pins", 0, ADDRESS_BITS, "A17 to A0; RAS_n, CAS_n, WE_n are A16, A15, A14."),
        ("bank", 24, 4, "BA in the low two bits, then BG: the number of the register."),
    ),
    register(
        "mode_registers",
        Access.STATUS,
        "The DRAM's mode registers, from the host's executed MRS commands.",
        ("unsupported", 0, MODE_REGISTERS, _MODES),
    ),
]
