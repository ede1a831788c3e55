"""The common registers and commands of every block.

Line 0 identifies the block, line 1 is START alone (so a host that can only write whole 64-byte
lines never starts a block by accident), line 2 is CONTROL, line 3 STATUS and ERROR.

The hardware behind a bank must drive these registers as follows:

- an accepted START raises `status.busy` from the next cycle on, for at least one cycle, even if
  the run has nothing to do or is refused for its arguments; it clears `done`, `error`, the error
  registers and the counters in the same cycle;
- `done` or `error` is high from the first cycle in which `busy` is low again, until the next START;
- counters do not change while `busy` is low. The bank captures them when `busy` falls.
"""

from collections.abc import Mapping, Sequence

from nearstep_spec.csr.model import Access, Field, Kind, NamedValue, Register, RegisterMap, place

Row = tuple[str, int, int, str] | tuple[str, int, int, str, int | type[NamedValue]]
"""A field: name, lowest bit, bits, meaning. Then, optionally, the value after reset (a constant's
value) if not 0, or the class of its named values, or a named value for both.
"""

BUSY = "status.busy"
LATCH = "control.latch"
CLEAR = "control.clear"


class Response(NamedValue):
    """AXI responses, as RRESP and BRESP encode them."""

    OKAY = 0, "Success."
    EXOKAY = 1, "Success of an exclusive access, which no block makes."
    SLVERR = 2, "The subordinate failed."
    DECERR = 3, "No subordinate has the address."


def value_register(
    name: str,
    access: Access,
    doc: str,
    *,
    width: int = 32,
    kind: Kind = Kind.UINT,
    reset: int = 0,
    locked: bool = False,
    values: type[NamedValue] | None = None,
    path: tuple[str | int, ...] = (),
) -> Register:
    """A register of one field, `value`, over its whole width."""
    field = Field(name="value", access=access, width=width, kind=kind, reset=reset, values=values)
    return Register(name=name, fields=(field,), width=width, locked=locked, doc=doc, path=path)


def value_registers(
    access: Access,
    docs: Mapping[str, str],
    *,
    prefix: str = "",
    at: tuple[str | int, ...] = (),
    width: int = 64,
    kind: Kind = Kind.UINT,
    locked: bool = False,
) -> list[Register]:
    """Registers of one field each, by name and meaning.

    Parameters
    ----------
    prefix : prefix of their names in the map.
    at : path of the registers in hardware, followed by their names without the prefix.
    """
    return [
        value_register(
            prefix + name,
            access,
            doc,
            width=width,
            kind=kind,
            locked=locked,
            path=(*at, name) if at else (),
        )
        for name, doc in docs.items()
    ]


def register(
    name: str,
    access: Access,
    doc: str,
    *rows: Row,
    locked: bool = False,
    path: tuple[str | int, ...] = (),
) -> Register:
    """A register of 32 bits with a row for each field."""
    return Register(name=name, doc=doc, fields=fields(access, *rows), locked=locked, path=path)


def fields(access: Access, *rows: Row) -> tuple[Field, ...]:
    """Fields of a register, one for each row."""
    found = []
    for name, lsb, width, doc, *last in rows:
        value = last[0] if last else 0
        named = value if isinstance(value, type) else type(value)
        found.append(
            Field(
                name=name,
                access=access,
                lsb=lsb,
                width=width,
                reset=0 if isinstance(value, type) else value,
                values=named if issubclass(named, NamedValue) else None,
                doc=doc,
            )
        )
    return tuple(found)


def block_map(
    name: str,
    *,
    doc: str,
    ident: int,
    version: tuple[int, int],
    capabilities: Sequence[Row],
    configuration: Sequence[Row],
    causes: type[NamedValue],
    streams: type[NamedValue],
    lines: Sequence[Sequence[Register]],
    constants: Sequence[Register] = (),
    queued: bool = False,
) -> RegisterMap:
    """A register map with the common registers first.

    Parameters
    ----------
    name, doc : of the block.
    ident : the 32 bits of ID.
    version : major, minor. The major number changes when old host code would misread the block.
    capabilities, configuration : constants that describe this instance.
    constants : more registers of constants.
    causes, streams : named values of `error.cause` and `error.stream`.
    lines : the block's own registers; each inner sequence starts a 64-byte line.
    queued : START, and writes to the registers that it reads, are accepted while the block is busy.
        Counters continue from START to START, and errors are kept until an abort.
    """
    constant = Access.CONSTANT
    can = register("capabilities", constant, "Features of this instance.", *capabilities)
    shape = register("configuration", constant, "Shape of this instance.", *configuration)
    first = [*identity(ident, version, can), shape, *constants]
    common = [first, [_start(queued)], [_CONTROL], _outcome(causes, streams)]
    return RegisterMap(
        name=name,
        doc=doc,
        registers=place([*common, *lines]),
        busy=BUSY,
        latch=LATCH,
        clear=CLEAR,
    )


def identity(ident: int, version: tuple[int, int], capabilities: Register) -> list[Register]:
    """Return the registers that identify a block.

    Parameters
    ----------
    ident, version : as of `block_map`.
    capabilities : the third register.
    """
    major, minor = version
    return [
        value_register("id", Access.CONSTANT, "Identifies the block.", reset=ident),
        register(
            "version",
            Access.CONSTANT,
            "Version of the register interface.",
            ("minor", 0, 16, "Incremented with compatible additions.", minor),
            ("major", 16, 16, "Incremented when old host code would misread the block.", major),
        ),
        capabilities,
        value_register("map_hash", Access.MAP_HASH, "Hash of this register map."),
    ]


def _start(queued: bool) -> Register:
    refused = "accepted at any time" if queued else "refused while the block is busy"
    return register(
        "start",
        Access.PULSE,
        f"Starts a run; alone in its line, and {refused}.",
        ("go", 0, 1, "Writing 1 starts a run."),
        locked=not queued,
    )


_CONTROL = register(
    "control",
    Access.PULSE,
    "Commands that are accepted at any time.",
    ("abort", 0, 1, "Ends the run: no new burst is issued, those in flight drain."),
    ("latch", 1, 1, "Captures all counters in one cycle."),
    ("clear", 2, 1, "Clears status.refused."),
)


def _outcome(causes: type[NamedValue], streams: type[NamedValue]) -> list[Register]:
    status = fields(
        Access.STATUS,
        ("busy", 0, 1, "A run is in progress; configuration is locked."),
        ("done", 1, 1, "The last run ended, and all its writes are complete."),
        ("error", 2, 1, "The last run ended, or is about to end, with an error."),
    )
    refused = fields(
        Access.REFUSED, ("refused", 3, 1, "A write was refused because the block was busy.")
    )
    return [
        Register(
            name="status",
            doc="State of the block. An accepted START clears done and error.",
            fields=(*status, *refused),
        ),
        register(
            "error",
            Access.STATUS,
            "First error of the last run; all zero when there was none.",
            ("cause", 0, 8, "Cause of the error.", causes),
            ("stream", 8, 8, "The stream with the error.", streams),
            ("response", 16, 2, "The bus response, if the cause is a response.", Response),
        ),
        value_register(
            "error_address",
            Access.STATUS,
            "Byte address of the burst, or of the array, that the first error belongs to.",
            width=64,
        ),
    ]
