"""Registers of a channel's arbiter, and their addresses, as plain data."""

from enum import IntEnum

from nearstep_spec.csr.block import bit_fields, constant_field, identity, value_register
from nearstep_spec.csr.model import BLOCK_BYTES, Access, Field, Register, RegisterMap, place
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
                [_mode()],
                [_control()],
                [
                    _status(),
                    _debts(mapping.geometry.ranks),
                    value_register(
                        "refused_count", Access.STATUS, "Host accesses refused since control.clear."
                    ),
                    _refused_access(),
                    value_register(
                        "refused_address",
                        Access.STATUS,
                        "Byte address, within the channel, of the first access refused.",
                        width=64,
                    ),
                    value_register(
                        "lost_count",
                        Access.STATUS,
                        "Host commands lost since control.clear.",
                    ),
                    _lost_command(),
                    _mode_registers(),
                ],
                [value_register(name, Access.STATUS, doc) for name, doc in _HAND_OVERS.items()],
            ]
        ),
    )


_HAND_OVERS = {
    "to_acceleration_last": "Cycles from the last request of acceleration to that mode.",
    "to_acceleration_longest": "The longest of them since control.clear.",
    "to_normal_last": "Cycles from the last request of normal mode to that mode.",
    "to_normal_longest": "The longest of them since control.clear.",
}


def _capabilities(mapping: AddressMapping) -> Register:
    geometry = mapping.geometry
    order = MAPPINGS.index(mapping.order) if mapping.order in MAPPINGS else len(MAPPINGS)
    return Register(
        name="capabilities",
        doc="The memory behind the arbiter.",
        fields=(
            constant_field("address_bits", 0, 8, geometry.address_bits, "log2 of its bytes."),
            constant_field("bank_group_bits", 8, 4, geometry.bank_group_bits, "log2."),
            constant_field("bank_bits", 12, 4, geometry.bank_bits, "log2 of banks in a group."),
            constant_field("row_bits", 16, 8, geometry.row_bits, "log2 of rows of a bank."),
            constant_field("mapping", 24, 8, order, "Index of the address mapping."),
        ),
    )


def _configuration(mapping: AddressMapping, read_latency: int, write_latency: int) -> Register:
    rank = constant_field(
        "rank_bit", 24, 8, mapping.rank.shift, "Of two ranks: the bit of an address that selects."
    )
    return Register(
        name="configuration",
        doc="Shape of this instance.",
        fields=(
            constant_field("read_latency", 0, 8, read_latency, "Host clock pairs to read data."),
            constant_field("write_latency", 8, 8, write_latency, "Host clock pairs to write data."),
            constant_field("blocks", 16, 8, WINDOW_BLOCKS, "Register blocks in the window."),
            *([rank] if mapping.geometry.ranks > 1 else []),
        ),
    )


def _mode() -> Register:
    return Register(
        name="mode",
        doc="The mode that the host requests; status shows when it is reached.",
        fields=bit_fields(
            Access.CONFIG, {"acceleration": "1: the kernel owns the DRAM; 0: the host does."}
        ),
    )


def _control() -> Register:
    return Register(
        name="control",
        doc="Commands that are accepted at any time.",
        fields=bit_fields(
            Access.PULSE,
            {
                "clear": (
                    "Clears the flags but unsupported_mode, refused_*, lost_*, and the longest "
                    "hand-overs."
                ),
                "kernel_reset": (
                    "Takes the DRAM from the kernel and resets it at any time; the mode is then "
                    "normal, until mode is obeyed again."
                ),
            },
        ),
    )


def _status() -> Register:
    return Register(
        name="status",
        doc="State of the channel.",
        fields=bit_fields(
            Access.STATUS,
            {
                "acceleration": "The kernel owns the DRAM and may be started.",
                "normal": "The host owns the DRAM.",
                "refused_access": "An access outside the window was received while not in normal "
                "mode.",
                "refused_start": "START of the kernel was received while not in acceleration mode.",
                "refresh_overdue": "More refreshes than may be postponed were due to the DRAM.",
                "missing_data": "Data of a host write were missing when they were due.",
                "lost_command": (
                    "A command was lost: MRS of the host or the reserved code while not in normal "
                    "mode, or MRS of a register that no DRAM has; or a burst of the window, which "
                    "did not begin with its first byte, was reordered."
                ),
                "unsupported_mode": (
                    "A mode register has a value that the kernel does not support: the mode "
                    "remains normal until it is changed. See mode_registers."
                ),
            },
        ),
    )


def _debts(ranks: int) -> Register:
    def debt(name: str, lsb: int, doc: str) -> Field:
        return Field(name=name, access=Access.STATUS, lsb=lsb, width=8, doc=doc)

    return Register(
        name="refresh_debt",
        doc="Refreshes due, two's complement; negative when given in advance.",
        fields=(
            debt("host", 0, "Counted by the host's refreshes."),
            debt("dram", 8, "Counted by the DRAM's refreshes."),
            *(
                (
                    debt("host1", 16, "Of rank 1, counted by the host's refreshes."),
                    debt("dram1", 24, "Of rank 1, counted by the DRAM's refreshes."),
                )
                if ranks > 1
                else ()
            ),
        ),
    )


def _refused_access() -> Register:
    return Register(
        name="refused_access",
        doc="The first access refused since control.clear.",
        fields=bit_fields(Access.STATUS, {"write": "The access was a write."}),
    )


def _lost_command() -> Register:
    def pins(name: str, lsb: int, width: int, doc: str) -> Field:
        return Field(name=name, access=Access.STATUS, lsb=lsb, width=width, doc=doc)

    return Register(
        name="lost_command",
        doc="The first lost command since control.clear.",
        fields=(
            pins("pins", 0, ADDRESS_BITS, "A17 to A0; RAS_n, CAS_n, WE_n are A16, A15, A14."),
            pins("bank", 24, 4, "BA in the low two bits, then BG: the number of the register."),
        ),
    )


def _mode_registers() -> Register:
    unsupported = Field(
        name="unsupported",
        access=Access.STATUS,
        lsb=0,
        width=MODE_REGISTERS,
        doc="A bit for each of MR0 to MR6 whose value the kernel does not support.",
    )
    return Register(
        name="mode_registers",
        doc="The DRAM's mode registers, from the host's executed MRS commands.",
        fields=(unsupported,),
    )
