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

BUSY = "status.busy"
LATCH = "control.latch"
CLEAR = "control.clear"


class Response(NamedValue):
    """AXI responses, as RRESP and BRESP encode them."""

    OKAY = 0, "Success."
    EXOKAY = 1, "Success of an exclusive access, which no block makes."
    SLVERR = 2, "The subordinate failed."
    DECERR = 3, "Nobody is at the address."


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


def block_map(
    name: str,
    *,
    doc: str,
    ident: int,
    version: tuple[int, int],
    capabilities: Sequence[Field],
    configuration: Sequence[Field],
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
    version : major, minor. The major number is incremented when old host code would misread the
        block.
    capabilities, configuration : `CONSTANT` fields that describe this instance.
    constants : more registers of such fields.
    causes, streams : named values of `error.cause` and `error.stream`.
    lines : the block's own registers; each inner sequence starts a 64-byte line.
    queued : START, and writes to the registers that it reads, are accepted while the block is busy.
        Counters continue from START to START, and errors are kept until an abort.
    """
    can = Register(
        name="capabilities", doc="What this instance can do.", fields=tuple(capabilities)
    )
    shape = Register(
        name="configuration", doc="Shape of this instance.", fields=tuple(configuration)
    )
    first = [*identity(ident, version, can), shape, *constants]
    common = [first, [_start(queued)], [_control()], _outcome(causes, streams)]
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
    capabilities : the third of them.
    """
    major, minor = version
    return [
        value_register("id", Access.CONSTANT, "What the block is.", reset=ident),
        Register(
            name="version",
            doc="Version of the register interface.",
            fields=(
                constant_field("minor", 0, 16, minor, "Incremented with compatible additions."),
                constant_field(
                    "major",
                    16,
                    16,
                    major,
                    "Incremented when old host code would misread the block.",
                ),
            ),
        ),
        capabilities,
        value_register("map_hash", Access.MAP_HASH, "Hash of this register map."),
    ]


def bit_fields(access: Access, docs: Mapping[str, str]) -> tuple[Field, ...]:
    """Make fields of one bit each, from bit 0 on, from names and meanings."""
    return tuple(
        Field(name=name, access=access, lsb=lsb, doc=doc)
        for lsb, (name, doc) in enumerate(docs.items())
    )


def constant_field(name: str, lsb: int, width: int, value: int, doc: str) -> Field:
    """Make a field that describes the hardware."""
    return Field(name=name, access=Access.CONSTANT, lsb=lsb, width=width, reset=value, doc=doc)


def _start(queued: bool) -> Register:
    go = Field(name="go", access=Access.PULSE, doc="Writing 1 starts a run.")
    refused = "accepted at any time" if queued else "refused while the block is busy"
    return Register(
        name="start",
        doc=f"Starts a run; alone in its line, and {refused}.",
        fields=(go,),
        locked=not queued,
    )


def _control() -> Register:
    return Register(
        name="control",
        doc="Commands that are accepted at any time.",
        fields=bit_fields(
            Access.PULSE,
            {
                "abort": "Ends the run: no new burst is issued, those in flight drain.",
                "latch": "Captures all counters in one cycle.",
                "clear": "Clears status.refused.",
            },
        ),
    )


def _outcome(causes: type[NamedValue], streams: type[NamedValue]) -> list[Register]:
    def status(name: str, lsb: int, doc: str) -> Field:
        return Field(name=name, access=Access.STATUS, lsb=lsb, doc=doc)

    return [
        Register(
            name="status",
            doc="State of the block. An accepted START clears done and error.",
            fields=(
                status("busy", 0, "A run is in progress; configuration is locked."),
                status("done", 1, "The last run ended, and all its writes are complete."),
                status("error", 2, "The last run ended, or is about to end, with an error."),
                Field(
                    name="refused",
                    access=Access.REFUSED,
                    lsb=3,
                    doc="A write was refused because the block was busy.",
                ),
            ),
        ),
        Register(
            name="error",
            doc="First error of the last run; all zero when there was none.",
            fields=(
                Field(
                    name="cause",
                    access=Access.STATUS,
                    width=8,
                    values=causes,
                    doc="What went wrong.",
                ),
                Field(
                    name="stream",
                    access=Access.STATUS,
                    lsb=8,
                    width=8,
                    values=streams,
                    doc="The stream with the error.",
                ),
                Field(
                    name="response",
                    access=Access.STATUS,
                    lsb=16,
                    width=2,
                    values=Response,
                    doc="The bus response, if the cause is one.",
                ),
            ),
        ),
        value_register(
            "error_address",
            Access.STATUS,
            "Byte address of the burst, or of the array, that the first error belongs to.",
            width=64,
        ),
    ]
