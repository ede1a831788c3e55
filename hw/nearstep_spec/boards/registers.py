"""Registers of a board itself, as plain data."""

from nearstep_spec.csr.block import constant_field, value_register
from nearstep_spec.csr.model import Access, Field, Register, RegisterMap, place

__all__ = ["IDENT", "VERSION", "board_map"]

IDENT = int.from_bytes(b"BORD", "big")
VERSION = (1, 0)


def board_map() -> RegisterMap:
    """The register map of `Space.BOARD`."""
    return RegisterMap(
        name="board",
        doc="A board behind a serial link: reset of its device, clock cycles, faults of the link.",
        registers=place(
            [
                _identity(),
                [_control()],
                [_status(), _memory()],
                [
                    value_register(
                        "cycles", Access.COUNTER, "Cycles since the board was reset.", width=64
                    ),
                    value_register(
                        "dropped",
                        Access.COUNTER,
                        "Frames that were damaged, too short or too long, or found no room.",
                    ),
                    value_register(
                        "framing_errors", Access.COUNTER, "Bytes without a stop bit on the line."
                    ),
                ],
            ]
        ),
        busy="status.resetting",
        latch="control.latch",
    )


def _bits(access: Access, docs: dict[str, str]) -> tuple[Field, ...]:
    return tuple(
        Field(name=name, access=access, lsb=lsb, doc=doc)
        for lsb, (name, doc) in enumerate(docs.items())
    )


def _identity() -> list[Register]:
    major, minor = VERSION
    return [
        value_register("id", Access.CONSTANT, "What the block is.", reset=IDENT),
        Register(
            name="version",
            doc="Version of the register interface.",
            fields=(
                constant_field("minor", 0, 16, minor, "Grows with compatible additions."),
                constant_field("major", 16, 16, major, "Grows when old host code would misread."),
            ),
        ),
        value_register("capabilities", Access.CONSTANT, "None yet."),
        value_register("map_hash", Access.MAP_HASH, "Hash of this register map."),
    ]


def _control() -> Register:
    return Register(
        name="control",
        doc="Commands that are accepted at any time.",
        fields=_bits(
            Access.PULSE,
            {
                "reset": "Resets the device and its path to memory; memory keeps what it holds.",
                "latch": "Captures all counters in one cycle.",
            },
        ),
    )


def _status() -> Register:
    return Register(
        name="status",
        doc="State of the board.",
        fields=_bits(
            Access.STATUS,
            {
                "resetting": "The device is being reset: neither it nor memory may be used.",
                "memory_ready": "Memory can be used: the hardware says so, or memory.ready.",
            },
        ),
    )


def _memory() -> Register:
    return Register(
        name="memory",
        doc="What the host says of memory.",
        fields=_bits(Access.CONFIG, {"ready": "The host has initialised the memory controller."}),
    )
