"""Registers of a board itself, as plain data."""

from nearstep_spec.csr.block import identity, register, value_register, value_registers
from nearstep_spec.csr.model import Access, RegisterMap, place

__all__ = ["IDENT", "VERSION", "board_map"]

IDENT = int.from_bytes(b"BORD", "big")
VERSION = (1, 0)


def board_map() -> RegisterMap:
    """The register map of `Space.BOARD`."""
    return RegisterMap(
        name="board",
        doc="A board behind a serial link: reset of its device, clock cycles, faults of the link.",
        registers=place(_LINES),
        busy="status.resetting",
        latch="control.latch",
    )


_LINES = [
    identity(IDENT, VERSION, value_register("capabilities", Access.CONSTANT, "None yet.")),
    [
        register(
            "control",
            Access.PULSE,
            "Commands that are accepted at any time.",
            (
                "reset",
                0,
                1,
                "Resets the device and its path to memory; memory contents are kept.",
            ),
            ("latch", 1, 1, "Captures all counters in one cycle."),
        )
    ],
    [
        register(
            "status",
            Access.STATUS,
            "State of the board.",
            ("resetting", 0, 1, "The device is being reset: neither it nor memory may be used."),
            (
                "memory_ready",
                1,
                1,
                "Memory can be used, according to the hardware or memory.ready.",
            ),
        ),
        register(
            "memory",
            Access.CONFIG,
            "State of memory, set by the host.",
            ("ready", 0, 1, "The host has initialised the memory controller."),
        ),
    ],
    [
        value_register("cycles", Access.COUNTER, "Cycles since the board was reset.", width=64),
        *value_registers(
            Access.COUNTER,
            {
                "dropped": "Frames dropped: damaged, too short, too long, or without room.",
                "framing_errors": "Bytes without a stop bit on the line.",
            },
            width=32,
        ),
    ],
]
