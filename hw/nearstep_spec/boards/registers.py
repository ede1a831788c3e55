"""Registers of a board itself, as plain data."""

from nearstep_spec.csr.block import bit_fields, identity, value_register
from nearstep_spec.csr.model import Access, Register, RegisterMap, place

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
                identity(
                    IDENT, VERSION, value_register("capabilities", Access.CONSTANT, "None yet.")
                ),
                [_control()],
                [_status(), _memory()],
                [
                    value_register(
                        "cycles", Access.COUNTER, "Cycles since the board was reset.", width=64
                    ),
                    value_register(
                        "dropped",
                        Access.COUNTER,
                        "Frames dropped: damaged, too short, too long, or without room.",
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


def _control() -> Register:
    return Register(
        name="control",
        doc="Commands that are accepted at any time.",
        fields=bit_fields(
            Access.PULSE,
            {
                "reset": "Resets the device and its path to memory; memory contents are kept.",
                "latch": "Captures all counters in one cycle.",
            },
        ),
    )


def _status() -> Register:
    return Register(
        name="status",
        doc="State of the board.",
        fields=bit_fields(
            Access.STATUS,
            {
                "resetting": "The device is being reset: neither it nor memory may be used.",
                "memory_ready": "Memory can be used, according to the hardware or memory.ready.",
            },
        ),
    )


def _memory() -> Register:
    return Register(
        name="memory",
        doc="State of memory, set by the host.",
        fields=bit_fields(
            Access.CONFIG, {"ready": "The host has initialised the memory controller."}
        ),
    )
